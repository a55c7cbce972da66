"""``TokenClassificationSteps``: score every step by a process reward model, a Hugging Face token classifier.

The model's input is that of TRL's former ``PRMTrainer``, and of our stage `step_reward_model`: the prompt, then each
step with a separator behind it, tokenized part by part. The score of a step is read at the last token of its separator.
The functions at the end load a saved model with a head; ``preference.py`` uses them, too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from grpo_lab.rewards.steps import SplitStepReward, Splitter, by_line


class TokenClassificationSteps(SplitStepReward):
    """Score each step by the probability of the label ``good`` at its end, in a model that classifies tokens
    (``AutoModelForTokenClassification``).

    The model reads ``prompt + Σ (step + separator)`` in *its own* tokens, without white space around a step. The score
    is placed at the policy's token in which the step ends. In a causal model the score of a step depends on nothing
    after it.

    The model is loaded at the first call, a whole copy on every rank. A prompt that leaves no room for a step raises
    ValueError. Steps beyond ``max_length`` get None; their share is logged (``<name>/beyond_share``). Source:
    Math-Shepherd (2312.08935), DeepSeekMath §4.1.3.

    Args:
        model: a folder, a hub name, or a loaded model whose output has ``logits`` ``[B, T, labels]``.
        model_tokenizer: the reward model's tokenizer. ``None`` loads it from ``model``, which then is a folder or name.
        separator: text behind every step, as in the model's training (TRL's default: a newline).
        split: function from a text to the character indices where its steps end, or ``"line"``, ``"paragraph"``.
        good: index or name of the label that means a right step.
        column: data column to read in place of the prompt, if the prompt has a template around the question.
        batch_size: completions per forward.
        max_length: most tokens that the model reads; ``None``: its own number of positions.
        device: where the model runs; ``None``: the run's own device.
        tokenizer: the one that made the completions' token ids; ``None``: the trainer's.

    Raises:
        ValueError: ``model`` is no token classifier, it has no such label, or a setting is out of range.
    """

    def __init__(
        self,
        model: Any,
        model_tokenizer: Any = None,
        *,
        separator: str = "\n",
        split: Splitter | str = by_line,
        good: int | str = 1,
        column: str | None = None,
        batch_size: int = 8,
        max_length: int | None = None,
        device: str | None = None,
        tokenizer: Any = None,
    ) -> None:
        super().__init__(split, tokenizer)
        for name, value in (("batch_size", batch_size), ("max_length", max_length)):
            if value is not None and value < 1:
                raise ValueError(f"`{name}` is {value}; it must be at least 1")
        self.__name__ = "token_classification_steps"
        named = isinstance(model, str | Path)
        self.source = str(model) if named else type(model).__name__
        self.columns = () if column is None else (column,)  # the trainer looks for them among the rows
        self.column = column
        self.batch_size = batch_size
        self.device = device
        self._model: Any = None if named else model
        if model_tokenizer is None and not named:
            raise ValueError("`model` is a loaded model: give its tokenizer, too (`model_tokenizer`)")
        instead = ". One of another kind can be given loaded, with `model_tokenizer`"
        if named:
            config = saved_config(self.source, "TokenClassification", instead)
        else:
            config = model.config
        if model_tokenizer is None:
            self.model_tokenizer = saved_tokenizer(self.source)
        else:
            self.model_tokenizer = model_tokenizer
        self.good = _label(good, config, self.source)
        own = getattr(config.get_text_config(), "max_position_embeddings", None) or 0
        self.max_length: int | None = max_length or (own if own > 0 else None)  # XLNet's is -1: none
        self._separator_ids = self._ids(separator)
        if not self._separator_ids:
            raise ValueError(f"`separator` {separator!r} is no token of {self.source}'s tokenizer: nothing to score")

    def score_texts(self, prompt: Any, steps: list[str]) -> Sequence[float | None]:
        if self.column is not None:
            raise ValueError(f"`column` is {self.column!r}: {self.name} needs the row's columns, call `score_all`")
        return self.score_all([prompt], [steps], {})[0]

    def score_all(
        self, prompts: Sequence[Any], steps: Sequence[list[str]], columns: Mapping[str, Any]
    ) -> list[list[float | None]]:
        if self.column is not None and self.column not in columns:
            raise ValueError(f"{self.name} reads the column {self.column!r} (`column`); rows have {sorted(columns)}")
        questions = prompts if self.column is None else columns[self.column]
        tokenized: dict[str, list[int]] = {}  # the completions of a group have one prompt
        read = []
        for question, texts in zip(questions, steps, strict=True):
            if repr(question) not in tokenized:
                tokenized[repr(question)] = self._prompt_ids(question)
            read.append(self._read(tokenized[repr(question)], texts))
        scores: list[list[float | None]] = [[None] * len(texts) for texts in steps]
        scorable = [row for row, (_, places) in enumerate(read) if places]
        by_length = sorted(scorable, key=lambda row: len(read[row][0]))
        for first in range(0, len(by_length), self.batch_size):
            batch = by_length[first : first + self.batch_size]
            for row, good in zip(batch, self._good([read[row][0] for row in batch]), strict=True):
                places = read[row][1]
                scores[row][: len(places)] = [good[place] for place in places]
        asked = sum(map(len, steps))
        scored = sum(len(places) for _, places in read)
        if columns.get("log_metric") is not None and asked:
            columns["log_metric"](f"{self.name}/beyond_share", (asked - scored) / asked)
        return scores

    def read(self, prompt: Any, steps: Sequence[str]) -> tuple[list[int], list[int]]:
        """Return what the model reads of a solution: token ids, and for each step the index at which it is scored. The
        steps that do not fit into ``max_length`` are left out of both."""
        return self._read(self._prompt_ids(prompt), steps)

    def _read(self, prompt: list[int], steps: Sequence[str]) -> tuple[list[int], list[int]]:
        """Return what ``read`` does, for the token ids of a prompt."""
        ids = list(prompt)
        places = []
        for step in steps:
            more = [*self._ids(step.strip()), *self._separator_ids]
            if self.max_length is not None and len(ids) + len(more) > self.max_length:
                break
            ids += more
            places.append(len(ids) - 1)
        return ids, places

    def _prompt_ids(self, prompt: Any) -> list[int]:
        """Tokenize a prompt for the reward model: a text behind the begin token, messages by the chat template."""
        if isinstance(prompt, str):
            start = getattr(self.model_tokenizer, "bos_token_id", None)
            ids = [*([] if start is None else [start]), *self._ids(prompt)]
        elif getattr(self.model_tokenizer, "chat_template", None):
            prompt = self.model_tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True)
            ids = self._ids(prompt)
        else:
            raise ValueError(
                f"the prompt is a list of messages, and the tokenizer of {self.source} has no chat template: name the "
                "column with the question as plain text (`column`), or give a tokenizer with a template "
                "(`model_tokenizer`)"
            )
        if self.max_length is not None and len(ids) >= self.max_length:
            raise ValueError(
                f"a prompt has {len(ids)} tokens of {self.source}, which reads {self.max_length} (`max_length`): "
                f"prompts are not cut, as steps cannot be judged without them. It begins {prompt[:60]!r}"
            )
        return ids

    def _ids(self, text: str) -> list[int]:
        return list(self.model_tokenizer(text, add_special_tokens=False)["input_ids"])

    def _good(self, batch: list[list[int]]) -> list[list[float]]:
        """Compute the probability of the label ``good`` at every token, one list per row of token ids."""
        import torch

        if self._model is None:
            self._model = saved_weights(self.source, "TokenClassification")
        if self.device is None:
            from accelerate import PartialState

            device = PartialState().device
        else:
            device = torch.device(self.device)
        if self._model.training or next(self._model.parameters()).device != device:
            self._model = self._model.to(device).eval()
        padded = padded_ids(batch, getattr(self.model_tokenizer, "pad_token_id", None) or 0, device)
        width = padded["input_ids"].size(1)
        with torch.inference_mode():
            logits = self._model(**padded).logits
        if logits.dim() != 3 or logits.size(1) != width or logits.size(2) <= self.good:
            raise ValueError(f"{self.source} gave logits {tuple(logits.shape)}, not [{len(batch)}, {width}, labels]")
        good = logits.float().softmax(-1)[..., self.good].cpu()
        return [row[: len(one)] for row, one in zip(good.tolist(), batch, strict=True)]


def saved_config(source: str, head: str, instead: str = "") -> Any:
    """Load the configuration of a saved model.

    Args:
        source: its folder or hub name.
        head: end of its architecture's name behind ``For``, such as ``TokenClassification``.
        instead: advice to add to the error about a model with another head.

    Raises:
        ValueError: there is no such model, or it has another head.
    """
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(source)
    except OSError as error:
        raise ValueError(
            f"`model` is {source!r}, neither a folder with a saved model here nor one that the hub gives "
            f"({str(error).splitlines()[0]})"
        ) from error
    kinds = getattr(config, "architectures", None) or []
    if not any(kind.endswith(f"For{head}") for kind in kinds):
        raise ValueError(
            f"`model` {source!r} holds {' / '.join(kinds) or 'a model of no named kind'}; this reward needs one with a "
            f"head for it (`AutoModelFor{head}`){instead}"
        )
    return config


def saved_weights(source: str, head: str) -> Any:
    """Load a saved model with the head ``head`` (see ``saved_config``). Raises ValueError if weights are missing, which
    transformers would draw at random."""
    import transformers

    kind = getattr(transformers, f"AutoModelFor{head}")
    model, loading = kind.from_pretrained(source, output_loading_info=True)
    if lacking := sorted(loading["missing_keys"]):
        raise ValueError(f"the weights of {source!r} lack {lacking}: its scores would be random")
    return model


def padded_ids(rows: Sequence[list[int]], pad: int, device: Any) -> dict[str, Any]:
    """Pad rows of ids on the right, and return the model's ``input_ids`` and ``attention_mask``."""
    from grpo_lab.batch import padded

    return dict(zip(("input_ids", "attention_mask"), padded(rows, pad, device), strict=True))


def saved_tokenizer(source: str) -> Any:
    """Load the tokenizer that was saved with a model. Raises ValueError if there is none."""
    from transformers import AutoTokenizer

    reason = "nothing that could be read as one"
    try:
        tokenizer = AutoTokenizer.from_pretrained(source)
        # transformers makes an empty one where there is none
        if tokenizer("1 + 1\n", add_special_tokens=False)["input_ids"]:
            return tokenizer
    except (OSError, ValueError) as error:
        reason = str(error).splitlines()[0]
    raise ValueError(f"`model` {source!r} has no tokenizer beside it ({reason}): give `model_tokenizer`")


def _label(good: int | str, config: Any, source: str) -> int:
    """Return the index of the label ``good``, given as an index or as a name of the model's configuration."""
    names = {str(name): int(index) for index, name in (getattr(config, "id2label", None) or {}).items()}
    if isinstance(good, str) and not good.isdecimal():
        index = names.get(good, -1)
    else:
        index = int(good)
    if not 0 <= index < config.num_labels or config.num_labels < 2:
        raise ValueError(
            f"`good` is {good!r}; {source} has {config.num_labels} labels: {names}. Two or more are needed, and "
            "`good` is one of them"
        )
    return index
