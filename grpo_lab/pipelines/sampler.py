"""Completions of a saved model for curation and long2short: transformers or vLLM behind one call."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from grpo_lab.curation import Written
from grpo_lab.engines.sampler import (
    Completion,
    Sampler,
    TransformersSampler,
    VllmSampler,
    context_of,
    in_form_of,
    render_prompt,
    stop_token_ids,
)
from grpo_lab.evaluation.terminal import Terminal
from grpo_lab.io import check_place
from grpo_lab.recipe.checks import no_room
from grpo_lab.recipe.models import loading, model_files, refuse_no_tokenizer
from grpo_lab.recipe.sections import SamplingSettings

console = Terminal()


class ModelSampler:
    """`sampler(prompts, n)` → n completions a prompt, in the form of the prompt (text or message list).

    Args: model: folder or hub name of a saved model.
    """

    def __init__(self, model: str, settings: SamplingSettings) -> None:
        check_place(model)
        self.settings, self.name = settings, model
        self.made = 0  # completions by this process
        self.full_length = self.cut = 0  # of them: under max_completion_length, and cut by it
        if settings.use_vllm:
            self._start_vllm(model)
        else:
            from grpo_lab.recipe.models import load_saved_model

            loaded, self.tokenizer = load_saved_model(model, settings.use_cpu)
            self.context = context_of(loaded)
            self.sampler: Sampler = TransformersSampler(loaded, self.tokenizer, settings.batch_size, progress=False)

    def _start_vllm(self, model: str) -> None:
        from transformers import AutoConfig, AutoTokenizer, GenerationConfig

        from grpo_lab.engines.vllm.engine import EngineOptions, engine_factory

        refuse_no_tokenizer(model)
        with loading(model):
            self.tokenizer = AutoTokenizer.from_pretrained(model)
            config: Any = AutoConfig.from_pretrained(model)
        options = EngineOptions.from_mapping(self.settings.engine)
        start = engine_factory(options, trainer_dtype=getattr(config, "dtype", None))
        engine = start(model=model, seed=self.settings.seed)
        self.context = engine.llm.llm_engine.model_config.max_model_len
        try:
            generation: GenerationConfig | None = GenerationConfig.from_pretrained(model)
        except OSError:  # the folder has none
            generation = None
        self.sampler = VllmSampler(engine, stop_token_ids(generation, self.tokenizer))

    def __call__(
        self,
        prompts: Sequence[Any],
        n: int,
        *,
        max_new_tokens: int | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[list[Any]]:
        groups = self.written(prompts, n, max_new_tokens=max_new_tokens, chat_template_kwargs=chat_template_kwargs)
        return [[one.completion for one in group] for group in groups]

    def written(
        self,
        prompts: Sequence[Any],
        n: int,
        *,
        max_new_tokens: int | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[list[Written]]:
        """The same, each completion with whether the limit of tokens cut it."""
        ids = [self.rendered(prompt, chat_template_kwargs) for prompt in prompts]
        limit = max_new_tokens or self.settings.max_completion_length
        groups: list[list[Completion]] = self.sampler(
            ids,
            n=n,
            temperature=self.settings.temperature,
            max_new_tokens=limit,
            seed=_seed(self.settings.seed, ids),
        )
        self.made += sum(len(group) for group in groups)
        if max_new_tokens is None:
            self.full_length += sum(len(group) for group in groups)
            self.cut += sum(not completion.ended for group in groups for completion in group)
        return [
            [Written(in_form_of(prompt, self._text(completion.ids)), not completion.ended) for completion in group]
            for prompt, group in zip(prompts, groups, strict=True)
        ]

    def rendered(self, prompt: Any, chat_template_kwargs: Mapping[str, Any] | None = None) -> list[int]:
        """The tokens the model is given for a prompt: what another chat template or tokenizer changes."""
        return render_prompt(prompt, self.tokenizer, chat_template_kwargs).ids

    def _text(self, ids: list[int]) -> str:
        return str(self.tokenizer.decode(ids, skip_special_tokens=True))

    def prompt_tokens(self, prompt: Any) -> int:
        return len(self.rendered(prompt))

    def tokens(self, completion: Any) -> int:
        """Length of a completion's text in this model's tokens, without an end token."""
        text = completion if isinstance(completion, str) else str(completion[-1]["content"])
        return len(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def identity(self) -> dict[str, Any]:
        """What the samples depend on, for the header of their file: the model's files, all that shape its completions,
        and the settings. The engine counts: its rounding differs. What it is given for a prompt is `rendered`.
        """
        settings = self.settings
        return {
            "model": self.name,
            "files": model_files(self.name),
            "temperature": settings.temperature,
            "max_completion_length": settings.max_completion_length,
            "seed": settings.seed,
            "engine": {"vllm": dict(settings.engine)} if settings.use_vllm else "transformers",
        }


def with_room(problems: list[dict[str, Any]], sampler: ModelSampler) -> list[dict[str, Any]]:
    """Those whose prompt leaves room for a completion in the model's context; the others are counted and said."""
    context, completion = sampler.context, sampler.settings.max_completion_length
    if context is None:
        return problems
    fitting = [problem for problem in problems if sampler.prompt_tokens(problem["prompt"]) + completion <= context]
    if not fitting:
        raise no_room(completion, context)
    if len(fitting) < len(problems):
        console.print(
            f"left out {len(problems) - len(fitting):,} of {len(problems):,} problems: their prompts leave no room for "
            f"max_completion_length={completion} tokens in the model's context of {context}",
        )
    return fitting


def _seed(seed: int, ids: list[list[int]]) -> int:
    """A seed for one batch: of the run's and of what is sampled, so that a resumed run draws what it would have
    drawn."""
    digest = hashlib.sha256(f"{seed}/{json.dumps(ids)}".encode()).digest()
    return int.from_bytes(digest[:4], "big") >> 1
