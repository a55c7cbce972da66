"""Generators of completions: the call that they share (`CompletionGenerator`) and what it returns (`Completion`).

`TransformersGenerator` samples from a transformers model, `VllmGenerator` from a vLLM engine. Anything with the same
call can replace them in evaluation, curation, rounds and long2short. In training TRL drives the engine, and its
completions are put in the same form (`trainer/generation/in_step.py`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from grpo_lab.engines.grouping import GroupedEngine, check_logprobs

if TYPE_CHECKING:
    from transformers import GenerationConfig, PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase


Messages = Sequence[Mapping[str, Any]]

#: Arguments of ``apply_chat_template`` that are not settings of a template: `render_prompt` or TRL's trainer sets them.
RENDERING = (
    "add_generation_prompt", "chat_template", "continue_final_message", "conversation", "documents", "padding",
    "return_dict", "return_tensors", "tokenize", "tools", "truncation",
)  # fmt: skip
#: Largest number of characters that a chat template may make of one prompt. A template is a program that came with the
#: model.
TEMPLATE_CHARACTERS = 10_000_000


@dataclass(frozen=True)
class Completion:
    """A completion: what a policy wrote after a prompt, with T tokens.

    ids             tokens [T], the end token included
    ended           whether an end token ended it; False: the limit of tokens cut it off
    logprobs        the generator's log-probs of these tokens in nats [T]; None: it gives none
    policy_version  optimizer steps taken by the policy that wrote it; None outside a training
    mask            1 = sampled, 0 = inserted by a thinking budget or said by a tool, with NaN in ``logprobs`` [T];
                    None: all sampled
    messages        assistant's and tools' messages of a completion in turns; None: it is one text
    columns         values of this completion that rewards get as further columns of its row (``turns``, …)
    """

    ids: list[int]
    ended: bool
    logprobs: list[float] | None = None
    policy_version: int | None = None
    mask: list[int] | None = None
    messages: list[dict[str, Any]] | None = None
    columns: Mapping[str, Any] = field(default_factory=dict)

    @property
    def was_cut(self) -> bool:
        """Return whether a thinking budget cut the thinking of this completion, which must be one text (a completion in
        turns has masked tokens of tools)."""
        return 0 in (self.mask or ())


class GenerationStopped(KeyboardInterrupt):
    """Raised for Ctrl-C during generation. ``completions``: [prompt][sample], with None for those that are not
    finished."""

    def __init__(self, completions: Sequence[Sequence[Completion | None]]) -> None:
        super().__init__("stopped while completions were made")
        self.completions = completions


class CompletionGenerator(Protocol):
    """Samples n completions of each prompt (token ids, unpadded). Returns them as [prompt][sample].

    Temperature 0.0 means greedy (then n is 1); nothing else changes the distribution. With a ``seed`` the same
    arguments give the same completions, and the process-wide random state is left as it was. With ``seed=None`` the
    draws come from that state.
    """

    def __call__(
        self, prompts: Sequence[list[int]], *, n: int, temperature: float, max_new_tokens: int, seed: int | None
    ) -> list[list[Completion]]: ...


@dataclass(frozen=True)
class RenderedPrompt:
    """The text that the model continues, and its token ids, special tokens included."""

    text: str
    ids: list[int]


def check_template_kwargs(kwargs: Any, where: str = "chat_template_kwargs") -> None:
    """Raise ValueError if settings of a chat template (``where`` in the message) would render prompts differently from
    training."""
    for name in kwargs or ():
        if name in RENDERING:
            raise ValueError(
                f"`{where}` has {name!r}, which decides how a prompt is rendered, in training and everywhere alike; it "
                "takes what the template itself knows, such as `enable_thinking`"
            )


def render_prompt(
    prompt: str | Messages,
    tokenizer: PreTrainedTokenizerBase,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    continues: bool = False,
) -> RenderedPrompt:
    """Render a prompt to the text that the model continues, and its tokens.

    The result equals that of TRL's trainer. A plain string is tokenized with the tokenizer's own special tokens. A list
    of messages goes through the chat template, which writes them itself, and gets the generation prompt: an assistant
    message at the end is closed, and a new one begun. With ``continues`` that message is left open instead.

    Raises:
        ValueError: the prompt has no tokens, or the template fails, leaves its sandbox, or writes more than
            `TEMPLATE_CHARACTERS`.
    """
    if isinstance(prompt, str):
        rendered = RenderedPrompt(prompt, list(tokenizer(prompt)["input_ids"]))
        _refuse_empty(rendered)
        return rendered
    open_end = continues and prompt[-1]["role"] == "assistant"
    how = {"add_generation_prompt": not open_end, "continue_final_message": open_end}
    [rendered] = _tokenized([_of_template(prompt, tokenizer, chat_template_kwargs, how)], tokenizer)
    return rendered


def render_pair(
    prompt: Messages,
    completion: Messages,
    tokenizer: PreTrainedTokenizerBase,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    continues: bool = False,
) -> tuple[RenderedPrompt, RenderedPrompt]:
    """Render a row of messages to train on: the prompt alone, and with the completion behind it. If the prompt ends in
    an assistant message, ``continues`` makes the completion extend that message."""
    [pair] = render_pairs([(prompt, completion, continues)], tokenizer, chat_template_kwargs)
    return pair


def render_pairs(
    rows: Iterable[tuple[Messages, Messages, bool]],
    tokenizer: PreTrainedTokenizerBase,
    chat_template_kwargs: Mapping[str, Any] | None = None,
) -> list[tuple[RenderedPrompt, RenderedPrompt]]:
    """Render many rows (prompt, completion, ``continues``) as `render_pair` does. One call of the tokenizer for all
    texts takes a quarter of the time of one call for each."""
    texts: list[str] = []
    for prompt, completion, continues in rows:
        turns = [*prompt, *completion]
        goes_on = continues and prompt[-1]["role"] == "assistant"
        if goes_on:
            turns = [*prompt[:-1], {**prompt[-1], "content": prompt[-1]["content"] + completion[0]["content"]}]
        how = {"add_generation_prompt": not goes_on, "continue_final_message": goes_on}
        texts.append(_of_template(prompt, tokenizer, chat_template_kwargs, how))
        texts.append(_of_template(turns, tokenizer, chat_template_kwargs, {}))
    rendered = _tokenized(texts, tokenizer)
    return list(zip(rendered[::2], rendered[1::2], strict=True))


def _tokenized(texts: list[str], tokenizer: PreTrainedTokenizerBase) -> list[RenderedPrompt]:
    """Tokenize texts of a chat template, which writes the special tokens itself. Raises ValueError if one has no
    tokens."""
    if not texts:
        return []
    rendered = [
        RenderedPrompt(text, list(ids))
        for text, ids in zip(texts, tokenizer(texts, add_special_tokens=False)["input_ids"], strict=True)
    ]
    for one in rendered:
        _refuse_empty(one)
    return rendered


def _refuse_empty(rendered: RenderedPrompt) -> None:
    if not rendered.ids:
        raise ValueError(f"the prompt {rendered.text!r} has no tokens: nothing to continue")


def _of_template(
    messages: Messages, tokenizer: PreTrainedTokenizerBase, kwargs: Mapping[str, Any] | None, how: Mapping[str, bool]
) -> str:
    """Render ``messages`` to text with the chat template. ``how`` are our arguments of ``apply_chat_template``,
    ``kwargs`` those of a team. Raises ValueError if it fails or writes too much."""
    asked: dict[str, Any] = {**how, **(kwargs or {})}
    try:
        text = str(tokenizer.apply_chat_template([dict(one) for one in messages], tokenize=False, **asked))
    except Exception as error:  # of jinja2, of its sandbox, or of the template's own arithmetic
        said = " ".join(str(error).split())[:500]
        raise ValueError(f"the chat template cannot render a prompt: {type(error).__name__}: {said}") from error
    if len(text) > TEMPLATE_CHARACTERS:
        raise ValueError(
            f"the chat template makes {len(text):,} characters of one prompt; at most {TEMPLATE_CHARACTERS:,} are taken"
        )
    return text


def in_form_of(prompt: str | Messages, text: str | Messages) -> Any:
    """Return a completion as TRL gives it to rewards: text after a text prompt, a list with an assistant message after
    messages. A completion that is a list of messages already (turns with tools) is returned as it is."""
    if isinstance(prompt, str) or not isinstance(text, str):
        return text
    return [{"role": "assistant", "content": text}]


@dataclass(frozen=True)
class TransformersGenerator:
    """A generator that samples from a transformers model by groups, in left-padded batches of similar length.

    Temperature is the only setting. The values that ``plain_generation_config`` writes down replace those of the
    model's own generation_config; other settings in it, such as ``suppress_tokens`` and ``epsilon_cutoff``, still
    apply.

    Greedy answers do not depend on ``batch_size`` except through the rounding of padded attention. Sampled ones do,
    since a batch shares one random stream. Raises ValueError if a prompt and its completion would not fit into the
    model's context.

    Attributes:
        batch_size: completions that are made at the same time.
        progress: whether to show a progress bar.
        logprobs: whether completions get log-probs: those of the model's forward, at temperature 1.
        more_stops: tokens that end a completion besides the model's own.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    batch_size: int
    progress: bool = True
    logprobs: bool = False
    more_stops: Sequence[int] = ()

    def __call__(
        self, prompts: Sequence[list[int]], *, n: int, temperature: float, max_new_tokens: int, seed: int | None
    ) -> list[list[Completion]]:
        import torch
        from tqdm.auto import tqdm

        context = context_of_config(self.model.config)
        longest = max(map(len, prompts), default=0)
        if context is not None and longest + max_new_tokens > context:
            raise ValueError(too_long("longest", longest, max_new_tokens, context))
        # Longest first: too large a batch shows at once, and not after an hour.
        tasks = [(index, sample) for index in range(len(prompts)) for sample in range(n)]
        tasks.sort(key=lambda task: -len(prompts[task[0]]))
        stops = [*stop_token_ids(self.model.generation_config, self.tokenizer), *self.more_stops]
        padding = self.tokenizer.pad_token_id
        pad = stops[0] if padding is None else int(padding)
        config = plain_generation_config(temperature, max_new_tokens, stops, pad)
        completions: list[list[Completion | None]] = [[None] * n for _ in prompts]
        was_training = self.model.training
        self.model.train(False)
        # manual_seed below seeds every GPU that the process uses, so the state of every one is put back. To ask for the
        # state of one that it does not use would begin to use it.
        forked = []
        if torch.cuda.is_initialized():
            forked = list(range(torch.cuda.device_count()))
        label = "greedy" if temperature == 0 else f"{n} samples at T={temperature:g}"
        try:
            with (
                torch.random.fork_rng(devices=forked, enabled=seed is not None),
                tqdm(total=len(tasks), desc=f"evaluating, {label}", unit="answer", disable=not self.progress) as bar,
            ):
                if seed is not None:
                    torch.manual_seed(seed)
                for start in range(0, len(tasks), self.batch_size):
                    batch = tasks[start : start + self.batch_size]
                    written = self._complete([prompts[index] for index, _ in batch], config, stops, pad)
                    for (index, sample), completion in zip(batch, written, strict=True):
                        completions[index][sample] = completion
                    bar.update(len(batch))
        except KeyboardInterrupt:
            raise GenerationStopped(completions) from None
        finally:
            self.model.train(was_training)
        return [[c for c in row if c is not None] for row in completions]

    def _complete(
        self, prompts: Sequence[list[int]], config: GenerationConfig, stops: Sequence[int], pad: int
    ) -> list[Completion]:
        """Make one completion of each prompt, in one batch."""
        import torch

        from grpo_lab.batch import padded
        from grpo_lab.engines.forward import forward_logprobs
        from grpo_lab.engines.generate import generate_by_groups
        from grpo_lab.finite import FiniteScores

        stock: Any = self.model.generate  # typed as a Tensor by torch's Module.__getattr__
        ids, mask = padded(prompts, pad, self.model.device, left=True)
        with torch.no_grad():  # synced, ranks of a launch for ZeRO-3 would wait for one another's tokens
            output = generate_by_groups(stock, self.model, ids, mask, config, [FiniteScores()], synced_gpus=False)
        completions = []
        for prompt, row in zip(prompts, output[:, ids.shape[1] :].tolist(), strict=True):
            own = until_end(row, stops)
            logprobs = None
            if self.logprobs:  # a row alone: all logits of a batch may not fit
                [logprobs] = forward_logprobs(self.model, [prompt], [own])
            completions.append(Completion(own, bool(own) and own[-1] in stops, logprobs))
        return completions


@dataclass(frozen=True)
class VllmGenerator:
    """A generator that samples from a vLLM engine in this process.

    Attributes:
        stop_token_ids: tokens that end a completion.
        logprobs: whether completions get the engine's log-probs. Raises EngineFault if one is not finite.
        more_stops: further tokens that end a completion.
    """

    engine: GroupedEngine
    stop_token_ids: Sequence[int]
    logprobs: bool = False
    more_stops: Sequence[int] = ()

    def __call__(
        self, prompts: Sequence[list[int]], *, n: int, temperature: float, max_new_tokens: int, seed: int | None
    ) -> list[list[Completion]]:
        from vllm import SamplingParams

        plain: dict[str, Any] = {"top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
        plain |= {"n": n, "temperature": temperature, "max_tokens": max_new_tokens}
        plain |= {"stop_token_ids": [*self.stop_token_ids, *self.more_stops], "logprobs": 0 if self.logprobs else None}
        # vLLM gives sample k of a request the seed `seed + k`, so no two samples share one.
        seeds = [None if seed is None else seed + place * n for place in range(len(prompts))]
        parameters = [SamplingParams(**plain, seed=own) for own in seeds]
        asked = [{"prompt_token_ids": list(ids)} for ids in prompts]
        outputs = self.engine.llm.generate(asked, parameters, use_tqdm=False)
        check_logprobs(outputs)
        return [[of_engine(one) for one in sorted(output.outputs, key=lambda one: one.index)] for output in outputs]


def of_engine(written: Any) -> Completion:
    """Convert vLLM's `CompletionOutput` to a `Completion`."""
    ids = list(written.token_ids)
    logprobs = None
    if written.logprobs is not None:
        logprobs = [entries[token].logprob for token, entries in zip(ids, written.logprobs, strict=True)]
    return Completion(ids, written.finish_reason == "stop", logprobs)


def until_end(ids: Sequence[int], eos_ids: Collection[int]) -> list[int]:
    """Return the ids up to the first end-of-text token, including it; the model did not write the padding behind it."""
    ends = (position + 1 for position, token in enumerate(ids) if token in eos_ids)
    return list(ids[: next(ends, None)])


def context_of_config(config: PretrainedConfig) -> int | None:
    """Return how many tokens prompt and completion may have together (max_position_embeddings). None: the model sets no
    limit, as XLNet with its -1."""
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    limit = getattr(text, "max_position_embeddings", None)
    if limit is None or limit <= 0:
        return None
    return int(limit)


def too_long(which: str, tokens: int, max_new_tokens: int, context: int) -> str:
    """Return the error message for a prompt (``which``: "longest", …) that does not fit into the context."""
    helps = f"Lower max_new_tokens to at most {context - tokens}, or leave out prompts that are too long."
    if tokens >= context:
        helps = "No max_new_tokens makes room after it: leave such prompts out, or take a model with a longer context."
    return (
        f"the {which} prompt has {tokens} tokens and max_new_tokens is {max_new_tokens}: together "
        f"{tokens + max_new_tokens}, but the model's context (max_position_embeddings) is {context}. {helps}"
    )


def stop_token_ids(generation: GenerationConfig | None, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the EOS ids of the tokenizer and of the model's generation config, which differ in Qwen's models. Raises
    ValueError if there is none."""
    configured = None
    if generation is not None:
        configured = generation.eos_token_id
    listed = configured if isinstance(configured, list) else [configured]
    stops = [int(token) for token in [tokenizer.eos_token_id, *listed] if token is not None]
    if not stops:
        raise ValueError("neither the tokenizer nor the model's generation_config names an eos_token_id to stop at")
    return list(dict.fromkeys(stops))


def plain_generation_config(temperature: float, max_new_tokens: int, stops: list[int], pad: int) -> GenerationConfig:
    """Return a config for greedy decoding at temperature 0, else for sampling from the model's own distribution.

    The neutral values are written down, since a setting left None is filled in from the model's own config. That
    happens to settings which are missing here, such as ``epsilon_cutoff`` and ``suppress_tokens``.
    """
    from transformers import GenerationConfig

    neutral = {"min_new_tokens": 0, "top_p": 1.0, "typical_p": 1.0, "repetition_penalty": 1.0}
    neutral |= {"no_repeat_ngram_size": 0, "num_beams": 1, "num_return_sequences": 1, "use_cache": True}
    # greedy ignores top_k; transformers warns unless it is this neutral value
    greedy = {"do_sample": False, "temperature": 1.0, "top_k": 50}
    drawn = {"do_sample": True, "temperature": temperature, "top_k": 0, "min_p": 0.0}
    own = {"max_new_tokens": max_new_tokens, "eos_token_id": stops, "pad_token_id": pad}
    return GenerationConfig(**neutral, **(greedy if temperature == 0 else drawn), **own)
