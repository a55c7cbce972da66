"""From prompts to completions: one `Sampler`, one `Completion`, whatever makes them.

`TransformersSampler` asks a transformers model, `VllmSampler` a vLLM engine; anything with the same call takes their
place in evaluation, curation, rounds and long2short. In training TRL drives the engine, and what it hands over has the
same form (`trainer/generation/thinking.py`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from grpo_lab.engines.chat_template import rendered
from grpo_lab.engines.grouping import check_logprobs

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import GenerationConfig, PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

    from grpo_lab.engines.grouping import GroupedEngine

Messages = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Completion:
    """What a policy wrote after a prompt.

    ids             tokens [T], the end token included
    ended           by an end token; False where the limit of tokens cut it off
    logprobs        the sampler's log-probs of them in nats [T]; None where it gives none
    policy_version  optimizer steps taken by the policy that wrote it; None outside a training
    """

    ids: list[int]
    ended: bool
    logprobs: list[float] | None = None
    policy_version: int | None = None


class GenerationStopped(KeyboardInterrupt):
    """Ctrl-C while completions were made. ``completions``: those that were ready, None in the place of the others."""

    def __init__(self, completions: Sequence[Sequence[Completion | None]]) -> None:
        super().__init__("stopped while completions were made")
        self.completions = completions


class Sampler(Protocol):
    """n completions for each prompt (token ids, unpadded), in the prompts' order.

    temperature 0.0 means greedy (then n is 1); nothing else bends the distribution (no top-k, top-p, penalty). The same
    arguments give the same completions, and the process-wide random state is left as it was; ``seed=None`` goes on with
    it instead. Errors are the caller's to see.
    """

    def __call__(
        self, prompts: Sequence[list[int]], *, n: int, temperature: float, max_new_tokens: int, seed: int | None
    ) -> list[list[Completion]]: ...


@dataclass(frozen=True)
class RenderedPrompt:
    """The text that the model continues, and its token ids, special tokens included."""

    text: str
    ids: list[int]


def render_prompt(
    prompt: str | Messages, tokenizer: PreTrainedTokenizerBase, chat_template_kwargs: Mapping[str, Any] | None = None
) -> RenderedPrompt:
    """The text the model continues, and its tokens, as TRL makes them for training.

    A plain string is tokenized as it is, with the tokenizer's own special tokens. A message list goes through the chat
    template with the generation prompt added (the template writes its special tokens itself, so none are added after
    it); one that ends with an assistant's message is continued where that ends.
    """
    if isinstance(prompt, str):
        return RenderedPrompt(prompt, list(tokenizer(prompt)["input_ids"]))
    continued = prompt[-1]["role"] == "assistant"
    how = {"add_generation_prompt": not continued, "continue_final_message": continued, **(chat_template_kwargs or {})}
    text = rendered(tokenizer, prompt, **how)
    return RenderedPrompt(text, list(tokenizer(text, add_special_tokens=False)["input_ids"]))


def in_form_of(prompt: str | Messages, text: str) -> Any:
    """A completion as TRL gives it to rewards: text after a text prompt, one assistant message after messages."""
    return text if isinstance(prompt, str) else [{"role": "assistant", "content": text}]


@dataclass(frozen=True)
class TransformersSampler:
    """`model.generate` in left-padded batches of similar length; no log-probs.

    Temperature is the only knob, whatever the model's own generation_config says. Greedy answers do not depend on
    ``batch_size`` except through the rounding of padded attention; sampled ones do, since a batch shares one random
    stream.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    batch_size: int
    progress: bool = True

    def __call__(
        self, prompts: Sequence[list[int]], *, n: int, temperature: float, max_new_tokens: int, seed: int | None
    ) -> list[list[Completion]]:
        import torch
        from tqdm.auto import tqdm

        self._refuse_overlong(prompts, max_new_tokens)
        # Longest first: too large a batch shows at once, and not after an hour.
        tasks = [(index, sample) for index in range(len(prompts)) for sample in range(n)]
        tasks.sort(key=lambda task: -len(prompts[task[0]]))
        stops = stop_token_ids(self.model.generation_config, self.tokenizer)
        config = plain_generation_config(temperature, max_new_tokens, stops, self._pad_id(stops))

        completions: list[list[Completion | None]] = [[None] * n for _ in prompts]
        was_training = self.model.training
        self.model.train(False)
        # manual_seed below seeds every GPU of the process, so the state of every one is put back.
        forked = list(range(torch.cuda.device_count())) if torch.cuda.is_available() else []
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
                    written = self._continue([prompts[index] for index, _ in batch], config)
                    for (index, sample), ids in zip(batch, written, strict=True):
                        own = until_end(ids, stops)
                        completions[index][sample] = Completion(own, ended=bool(own) and own[-1] in stops)
                    bar.update(len(batch))
        except KeyboardInterrupt:
            raise GenerationStopped(completions) from None
        finally:
            self.model.train(was_training)
        return [[c for c in row if c is not None] for row in completions]

    def _continue(self, prompts: Sequence[list[int]], config: GenerationConfig) -> list[list[int]]:
        """The new tokens after each prompt [rows, new], padding and all."""
        import torch

        from grpo_lab.finite import FiniteScores

        input_ids, attention_mask = left_padded(prompts, int(config.pad_token_id), self.model.device)
        with torch.no_grad():
            generate: Any = self.model.generate  # typed as a Tensor by torch's Module.__getattr__
            output = generate(
                input_ids=input_ids,
                attention_mask=attention_mask,
                generation_config=config,
                logits_processor=[FiniteScores()],
            )
        rows: list[list[int]] = output[:, input_ids.shape[1] :].tolist()
        return rows

    def _pad_id(self, stops: list[int]) -> int:
        pad = self.tokenizer.pad_token_id
        return stops[0] if pad is None else int(pad)

    def _refuse_overlong(self, prompts: Sequence[list[int]], max_new_tokens: int) -> None:
        context = context_of(self.model)
        longest = max((len(ids) for ids in prompts), default=0)
        if context is not None and longest + max_new_tokens > context:
            raise ValueError(too_long("longest", longest, max_new_tokens, context))


@dataclass(frozen=True)
class VllmSampler:
    """A vLLM engine in this process. ``logprobs``: the engine's own, which must be finite (``EngineFault``)."""

    engine: GroupedEngine
    stop_token_ids: Sequence[int]
    logprobs: bool = False

    def __call__(
        self, prompts: Sequence[list[int]], *, n: int, temperature: float, max_new_tokens: int, seed: int | None
    ) -> list[list[Completion]]:
        from vllm import SamplingParams

        parameters = [
            SamplingParams(
                n=n,
                temperature=temperature,
                top_p=1.0,
                top_k=0,
                min_p=0.0,
                repetition_penalty=1.0,
                max_tokens=max_new_tokens,
                seed=None
                if seed is None
                else seed + place * n,  # sample k of a request is given seed + k: none share one
                stop_token_ids=list(self.stop_token_ids),
                logprobs=0 if self.logprobs else None,
            )
            for place in range(len(prompts))
        ]
        asked = [{"prompt_token_ids": list(ids)} for ids in prompts]
        outputs = self.engine.llm.generate(asked, parameters, use_tqdm=False)
        check_logprobs(outputs)
        return [[_of_engine(one) for one in sorted(output.outputs, key=lambda one: one.index)] for output in outputs]


def _of_engine(written: Any) -> Completion:
    ids, logprobs = list(written.token_ids), None
    if written.logprobs is not None:
        logprobs = [entries[token].logprob for token, entries in zip(ids, written.logprobs, strict=True)]
    return Completion(ids, written.finish_reason == "stop", logprobs)


def left_padded(rows: Sequence[Sequence[int]], pad_id: int, device: Any) -> tuple[Tensor, Tensor]:
    """Ragged rows -> (ids [B, T], attention mask [B, T]), padded on the left."""
    import torch

    width = max(len(row) for row in rows)
    ids = torch.tensor([[pad_id] * (width - len(row)) + list(row) for row in rows], device=device)
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows], device=device)
    return ids, mask


def until_end(ids: Sequence[int], eos_ids: Collection[int]) -> list[int]:
    """The ids up to and with the first end-of-text token; the padding behind it is not the model's."""
    for position, token in enumerate(ids):
        if token in eos_ids:
            return list(ids[: position + 1])
    return list(ids)


def context_of(model: PreTrainedModel) -> int | None:
    """Tokens that prompt and completion may have together (max_position_embeddings); None where the model has no
    limit."""
    return context_of_config(model.config)


def context_of_config(config: PretrainedConfig) -> int | None:
    """The same, of a model's configuration."""
    limit = getattr(config.get_text_config(), "max_position_embeddings", None)
    return None if limit is None else int(limit)


def too_long(which: str, tokens: int, max_new_tokens: int, context: int) -> str:
    helps = (
        f"Lower max_new_tokens to at most {context - tokens}, or leave out prompts that are too long."
        if tokens < context
        else "No max_new_tokens makes room after it: leave such prompts out, or take a model with a longer context."
    )
    return (
        f"the {which} prompt has {tokens} tokens and max_new_tokens is {max_new_tokens}: together "
        f"{tokens + max_new_tokens}, but the model's context (max_position_embeddings) is {context}. {helps}"
    )


def stop_token_ids(generation: GenerationConfig | None, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Where a completion ends: the tokenizer's EOS and every EOS of the model's generation config.

    Both, because Qwen's base and chat models name different ones in the two places.
    """
    configured = None if generation is None else generation.eos_token_id
    listed = configured if isinstance(configured, list) else [configured]
    stops = [int(token) for token in [tokenizer.eos_token_id, *listed] if token is not None]
    if not stops:
        raise ValueError("neither the tokenizer nor the model's generation_config names an eos_token_id to stop at")
    return list(dict.fromkeys(stops))


def plain_generation_config(temperature: float, max_new_tokens: int, stops: list[int], pad: int) -> GenerationConfig:
    """Greedy at temperature 0, else pure sampling. Values left None would be filled in from the model's own config."""
    from transformers import GenerationConfig

    greedy = temperature == 0
    config: Any = GenerationConfig
    made: GenerationConfig = config(
        max_new_tokens=max_new_tokens,
        min_new_tokens=0,
        do_sample=not greedy,
        temperature=1.0 if greedy else temperature,
        top_k=50 if greedy else 0,  # greedy ignores it; transformers warns unless it is this neutral value
        top_p=1.0,
        typical_p=1.0,
        min_p=None if greedy else 0.0,
        num_beams=1,
        num_return_sequences=1,
        repetition_penalty=1.0,
        no_repeat_ngram_size=0,
        eos_token_id=stops,
        pad_token_id=pad,
        use_cache=True,
    )
    return made
