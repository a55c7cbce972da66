"""`PreferenceReward`: a preference reward model that can be trained further while the policy trains against it.

A frozen model is worth less the farther the policy moves from the completions that it was trained on
(over-optimisation, arXiv 2210.10760). With ``every`` it is trained again after so many optimizer steps, with the loss
of TRL's RewardTrainer. It learns comparisons of the policy's current completions *together with* all earlier ones
(arXiv 2505.18126). `LabTrainer` makes these, and saves them with the weights in its checkpoints
(``trainer.scoring.preference_training``).
"""

from __future__ import annotations

import hashlib
import json
import math
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, field
from functools import cached_property
from typing import Any

from grpo_lab.reading import read_json_lines
from grpo_lab.rewards.token_classification import padded_ids, saved_config, saved_tokenizer, saved_weights

Pair = dict[str, Any]
#: Fields of a comparison (a ``Pair``).
PAIR = ("prompt", "chosen", "rejected")
_PAIR_FIELDS = dict.fromkeys(PAIR, str | list)
HEAD = "SequenceClassification"


@dataclass(eq=False)
class PreferenceReward:
    """Reward r of prompt and completion, the output of a sequence classifier with one label. None for a text longer
    than the model's context.

    Args:
        model: folder or hub name of a sequence classifier with one label, as the stage ``reward_model`` saves it.
        judge: name (as logged) of the run's reward that says which of two completions is better; its weight may be 0.
        every: optimizer steps between two trainings. None freezes the model; a ``judge`` then only measures it.
        comparisons: JSON-lines file of the comparisons that the model has learned so far.
        noise: share of new comparisons that are turned round, as simulated errors of the judge, in [0, 0.5].
        held_out: share of prompts whose comparisons only measure the model, here and in the stage ``reward_model``.
        steps: optimizer steps of one training.
        batch_size: comparisons per step.
        learning_rate: of AdamW, whose moments begin anew with each training.
        seed: of noise and draws.
    """

    __name__ = "preference_reward"
    model: str
    _: KW_ONLY
    judge: str | None = None
    every: int | None = None
    comparisons: str | None = None
    noise: float = 0.0
    held_out: float = 0.2
    steps: int = 20
    batch_size: int = 16
    learning_rate: float = 1e-5
    seed: int = 0
    #: Pairs (prompt, completion) of the last call. A trainer that trains this model sets it to []; otherwise it is
    #: None.
    seen: list[tuple[Any, Any]] | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        if self.every is not None and (self.every < 1 or self.judge is None):
            raise ValueError(f"`every` is {self.every}: at least 1, and a `judge` that says which completion is better")
        if not (0.0 <= self.noise <= 0.5 and 0.0 <= self.held_out < 1.0):
            raise ValueError(f"`noise` is {self.noise}, from 0 to 0.5; `held_out` {self.held_out}, from 0, below 1")
        if min(self.steps, self.batch_size) < 1:
            raise ValueError(f"`steps` is {self.steps} and `batch_size` {self.batch_size}: at least 1 each")
        self.model = str(self.model)
        config = saved_config(self.model, HEAD)
        self.tokenizer = saved_tokenizer(self.model)
        if config.num_labels != 1:
            raise ValueError(f"`model` {self.model!r} has {config.num_labels} labels; a reward is one number")
        limit = getattr(config.get_text_config(), "max_position_embeddings", None) or 0
        self.context = limit if limit > 0 else math.inf  # XLNet's is -1: none

    def __call__(self, prompts: Sequence[Any], completions: Sequence[Any], **_: Any) -> list[float | None]:
        if self.seen is None and self.every is not None:
            raise ValueError("`every` of PreferenceReward: only grpo_lab.LabTrainer keeps a reward model in training")
        self.seen = [*zip(prompts, completions, strict=True)]
        return self.scores(self.seen)

    def scores(self, texts: Sequence[tuple[Any, Any]]) -> list[float | None]:
        """Return r of each (prompt, completion), without a gradient; None where the text does not fit the model."""
        import torch

        read = [self.ids(*text) for text in texts]
        found: list[float | None] = [None] * len(read)
        fitting = sorted((row for row, ids in enumerate(read) if len(ids) <= self.context), key=lambda r: len(read[r]))
        for first in range(0, len(fitting), 2 * self.batch_size):
            batch = fitting[first : first + 2 * self.batch_size]
            with torch.no_grad():
                values = self.forward([read[row] for row in batch]).tolist()
            for row, value in zip(batch, values, strict=True):
                found[row] = value
        return found

    def ids(self, prompt: Any, completion: Any) -> list[int]:
        """Return the token ids of prompt and completion, joined as TRL's RewardTrainer does: through the chat template
        or, if both are texts, one behind the other with an end token."""
        if isinstance(prompt, str):
            end = self.tokenizer.eos_token
            text = prompt + completion
            return list(self.tokenizer(text if text.endswith(end) else text + end)["input_ids"])
        whole = self.tokenizer.apply_chat_template([*prompt, *completion], tokenize=True, return_dict=True)
        return list(whole["input_ids"])

    def forward(self, rows: Sequence[list[int]]) -> Any:
        """Compute r of each row of token ids, ``[B]`` in float32. Its gradient is kept."""
        padded = padded_ids(rows, self.tokenizer.pad_token_id, self.classifier.device)
        return self.classifier(**padded, use_cache=False).logits[:, 0].float()

    @cached_property
    def classifier(self) -> Any:
        """The model, loaded on first use; without dropout, as in RewardTrainer."""
        from accelerate import PartialState

        model = saved_weights(self.model, HEAD)
        model.config.get_text_config().pad_token_id = self.tokenizer.pad_token_id  # where a row's last token is
        return model.to(PartialState().device).eval()

    def restart(self, model: str) -> None:
        """Replace the weights by those in the folder ``model``, loaded on next use."""
        self.model = model
        self.__dict__.pop("classifier", None)

    def fit(self, pairs: Sequence[Pair], step: int) -> None:
        """Train the model for ``steps`` optimizer steps of AdamW, with the loss −log σ(r_chosen − r_rejected).

        The batches are drawn from ``pairs`` by the setting ``seed`` and ``step``, the policy's optimizer step; the
        global random state is unchanged. Pairs that do not fit the model's context are left out.
        """
        import torch

        draw = random.Random(f"{self.seed}/{step}")
        model = self.classifier
        optimizer = torch.optim.AdamW(model.parameters(), lr=self.learning_rate, weight_decay=0.0)
        both = [[self.ids(pair["prompt"], pair[side]) for side in ("chosen", "rejected")] for pair in pairs]
        both = [ids for ids in both if max(map(len, ids)) <= self.context]
        for _ in range(self.steps if both else 0):
            some = draw.sample(both, min(self.batch_size, len(both)))
            with torch.enable_grad():
                chosen, rejected = self.forward([ids[0] for ids in some] + [ids[1] for ids in some]).chunk(2)
                (-torch.nn.functional.logsigmoid(chosen - rejected).mean()).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()

    def pair_accuracy(self, pairs: Sequence[Pair]) -> float | None:
        """Return the share of ``pairs`` whose chosen completion scores higher than the rejected one, a tie counting
        half; None if no pair has both scores."""
        better, worse = (self.scores([(one["prompt"], one[side]) for one in pairs]) for side in PAIR[1:])
        found = right_way_round(zip(better, worse, strict=True))
        if found:
            return sum(found) / len(found)
        return None

    def earlier(self) -> list[Pair]:
        """Read the file ``comparisons``, and return the comparisons in it whose prompts are not held out; an empty list
        without a file."""
        found = []
        advice = f"a comparison has {', '.join(PAIR)} (setting: comparisons)"
        for _, row in read_json_lines(self.comparisons, _PAIR_FIELDS, advice) if self.comparisons else ():
            found.append({name: row[name] for name in PAIR})
        return [pair for pair in found if not holds_out(pair["prompt"], self.held_out)]


def holds_out(prompt: Any, share: float) -> bool:
    """Return whether a prompt is among the ``share`` of prompts whose comparisons are held out from learning. The
    prompt's hash decides, so the answer is the same in every run and stage."""
    digest = hashlib.sha256(json.dumps(prompt, sort_keys=True).encode()).digest()
    return int.from_bytes(digest[:4], "big") < share * 2**32


def right_way_round(scores: Iterable[tuple[Any, Any]]) -> list[float]:
    """Return for each pair of scores (better, worse) 1 if the first is higher, ½ for a tie, else 0. Pairs in which a
    score is None or NaN are left out."""
    known = [pair for pair in scores if None not in pair and not any(map(math.isnan, pair))]
    return [0.5 if better == worse else float(better > worse) for better, worse in known]


def orders(judged: Sequence[float], group_size: int) -> Iterator[list[tuple[int, int]]]:
    """Yield for each group of ``group_size`` completions all pairs (better, worse) of their indices in ``judged``, the
    judge's scores. Equal scores make no pair, and neither does NaN."""
    for start in range(0, len(judged), group_size):
        group = range(start, start + group_size)
        yield [(one, other) for one in group for other in group if judged[one] > judged[other]]
