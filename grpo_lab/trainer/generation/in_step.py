"""Completions outside of TRL's own rollouts, by the engine that TRL drives. Every rank calls, so ranks stay in step.

    ``by_groups``           replaces the model's ``generate`` while TRL calls it (``rollout.generate``)
    ``PolicyGenerator``     greedy answers of the current policy, for an evaluation during training
    ``generate_in_step``    completions of any prompts; a rank with too few takes part with filler rows
    ``ThinkingRollout``     the trainer's ``rollout_func`` with ``rollout.thinking_budget``: TRL's own generation, up to
                            three times, each with another length limit (``engines/thinking_budget.py``)

The engine is whichever TRL drives: vLLM in the process, a vLLM server, or the model's own ``generate``.
"""

from __future__ import annotations

import functools
from collections.abc import MutableMapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from trl import GRPOTrainer

from grpo_lab.engines.compiled import CompiledGenerate, refuse_compiled
from grpo_lab.engines.forward import forward_logprobs
from grpo_lab.engines.generate import generate_by_groups, not_by_groups, say_left_to_stock
from grpo_lab.engines.generators import Completion, context_of_config, plain_generation_config
from grpo_lab.engines.thinking_budget import ThinkingBudget, budgeted_generate
from grpo_lab.trainer.exactness.model_conditions import dropout_rate, shared_dropout_rate
from grpo_lab.trainer.settings.parse import RolloutSettings
from grpo_lab.trainer.trl_bridge import replaced

#: Model in training → its compiled generation, which owns CUDA graphs and a cache of keys and values.
_COMPILED: MutableMapping[Any, CompiledGenerate] = WeakKeyDictionary()


def by_groups(trainer: GRPOTrainer) -> AbstractContextManager[None]:
    """Return a context in which TRL's call of the model's ``generate`` does what ``rollout.generate`` asks for:

        groups      a group's prompt is computed once for all its completions, and finished rows leave the batch
        compiled    the same in compiled forwards, on a GPU
        stock       transformers' own ``generate``
        auto        ``groups`` if ``objective`` is set, no dropout is active and the model's cache allows it; else
                    ``stock``

    With vLLM or continuous batching the context changes nothing.

    Raises:
        ValueError: ``groups`` or ``compiled`` is asked for and is not possible.
    """
    how = trainer.lab_settings.rollout.generate
    engine = trainer.use_vllm or trainer.use_transformers_continuous_batching
    if engine or how == "stock" or (how == "auto" and trainer.lab_settings.objective is None):
        return nullcontext()
    model = trainer.accelerator.unwrap_model(trainer.model_wrapped)
    if how == "auto" and (reason := _drops(model)):
        say_left_to_stock(reason)
        return nullcontext()
    if how != "auto":
        refuse_generation(how, model, trainer.generation_config)
    if how != "compiled":
        return replaced(model, "generate", functools.partial(generate_by_groups, model.generate, model))
    if model not in _COMPILED:
        if trainer.accelerator.device.type == "cpu":
            raise ValueError(NOT_ON_A_CPU)
        _COMPILED[model] = CompiledGenerate()
    return replaced(model, "generate", functools.partial(_COMPILED[model], model.generate, model))


NOT_ON_A_CPU = (
    "`rollout.generate` is 'compiled', and on a CPU launches cost little and the room of keys and values is read whole "
    "for every token: set it to 'groups'"
)


def refuse_generation(how: str, model: Any, generation_config: Any) -> None:
    """Raise ValueError if ``model`` cannot generate in the way ``how``: ``groups`` or ``compiled``."""
    reason = _drops(model) or not_by_groups(model, generation_config)
    if reason:
        raise ValueError(f"`rollout.generate` is {how!r}, and {reason}: leave it out, and transformers makes every row")
    if how == "compiled":
        refuse_compiled(model, generation_config)


def _drops(model: Any) -> str:
    """Return a reason against generation by groups if dropout is active in ``model``, else an empty text."""
    drops = model.training and max(dropout_rate(model), shared_dropout_rate(model)) > 0
    if drops:
        return "dropout is active, which a prompt that is read once would share"
    return ""


class PolicyGenerator:
    """Generator of greedy answers by the policy in training (a `CompletionGenerator`). It draws no random number and
    records no metric.

    Args:
        logprobs: whether each answer gets the policy's log-probs, from a forward of its row alone.

    Attributes:
        context: largest number of tokens of prompt and completion together; None if the model has no limit.

    Raises:
        ValueError: log-probs are asked for, and FSDP or DeepSpeed shards the weights.
    """

    def __init__(self, trainer: GRPOTrainer, logprobs: bool = False) -> None:
        self.trainer = trainer
        self.tokenizer = trainer._tokenizer
        self.stops = list(trainer.eos_token_ids)
        self.logprobs = logprobs
        if logprobs and (trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled):
            raise ValueError(
                "`evaluation.log_probs` with `evaluation.every` needs all weights on each process, and FSDP or "
                "DeepSpeed keeps them in parts; leave one of the two out"
            )
        engine = None
        if trainer.use_vllm and trainer.vllm_mode == "colocate":
            engine = trainer.vllm_generation.llm.llm_engine
        config: Any = trainer.accelerator.unwrap_model(trainer.model).config
        if engine:
            self.context: int | None = engine.model_config.max_model_len
        else:
            self.context = context_of_config(config)

    def __call__(
        self, prompts: Sequence[list[int]], *, n: int, temperature: float, max_new_tokens: int, seed: int | None
    ) -> list[list[Completion]]:
        """Return one greedy completion per prompt (token ids), in a list of its own. Raise ValueError if samples are
        asked for."""
        if n != 1 or temperature != 0:
            raise ValueError(f"an evaluation on the way is greedy; got n={n}, temperature={temperature}")
        trainer = self.trainer
        training = self.trainer.model.training
        with ExitStack() as stack:
            if trainer.use_vllm:
                for name, value in {"temperature": 0.0, "repetition_penalty": 1.0}.items():
                    stack.enter_context(replaced(trainer.vllm_generation, name, value))
            else:
                pad = int(trainer._tokenizer.pad_token_id)
                plain = plain_generation_config(0.0, max_new_tokens, self.stops, pad)
                stack.enter_context(replaced(trainer, "generation_config", plain))
            stack.callback(trainer.model.train, training)
            trainer.model.eval()  # keeps the proof of the sync to training's own batches
            made = generate_in_step(trainer, [list(ids) for ids in prompts], [self.stops[:1]], 1, max_new_tokens)
            if self.logprobs:
                model = trainer.accelerator.unwrap_model(trainer.model)
                with torch.no_grad():  # one row per forward, as after the training
                    made = [
                        replace(one, logprobs=forward_logprobs(model, [ids], [one.ids])[0])
                        for ids, one in zip(prompts, made, strict=True)
                    ]
        return [[completion] for completion in made]


def generate_in_step(
    trainer: GRPOTrainer, prompt_ids: list[list[int]], filler: list[list[int]], group: int, max_new_tokens: int
) -> list[Completion]:
    """Return one completion per prompt, by the engine that TRL drives. Every rank must call this, also one without
    prompts.

    Args:
        prompt_ids: this rank's prompts, token ids.
        filler: its first prompt is completed for nothing, as often as this rank has too few rows (``rows_in_step``).
        group: number of adjacent rows with the same prompt, which a server gets as one request.
        max_new_tokens: length limit of each completion.
    """
    rows = prompt_ids + filler[:1] * (rows_in_step(trainer, len(prompt_ids)) - len(prompt_ids))
    if not rows:
        return []
    if trainer.use_vllm:
        engine: Any = trainer.vllm_generation
    else:
        engine = trainer.generation_config
    with replaced(engine, "max_completion_length" if trainer.use_vllm else "max_new_tokens", max_new_tokens):
        ids, logprobs = trainer._generate_single_turn(rows, None, {}, num_generations=group)
    ends = trainer.eos_token_ids
    version = int(trainer.state.global_step)
    if logprobs is None:
        logprobs = [None] * len(ids)
    made = []
    for row, row_logprobs in zip(ids, logprobs, strict=True):
        ended = bool(row) and row[-1] in ends
        made.append(Completion(row, ended, row_logprobs, version))
    return made[: len(prompt_ids)]


def rows_in_step(trainer: GRPOTrainer, rows: int) -> int:
    """Return how many rows this rank, which has ``rows`` of its own, must pass to the engine. A collective.

    An engine that ranks share (tensor parallel, server) needs the same number from each: the largest. Otherwise a rank
    without rows passes one if another rank has any, since gathering sharded weights takes all ranks.
    """
    if trainer.accelerator.num_processes == 1:
        return rows
    most = int(trainer.accelerator.gather(torch.tensor([rows], device=trainer.accelerator.device)).max())
    shared = trainer.use_vllm and (trainer.vllm_mode == "server" or trainer.args.vllm_tensor_parallel_size > 1)
    if shared:
        return most
    return max(rows, min(most, 1))


def thinking_rollout(trainer: GRPOTrainer, settings: RolloutSettings, environment_factory: Any) -> Any:
    """Return the ``rollout_func`` that the constructed ``trainer`` is to have: a ``ThinkingRollout`` if
    ``rollout.thinking_budget`` is set, else its own.

    Raises:
        ValueError: a budget is set, and the inserted text does not fit or does not close the thinking; or there is a
            rollout function, tools or an environment, which make completions in their own way.
    """
    if settings.thinking_budget is None or settings.turns is not None:  # ``turns`` keeps it in each turn
        return trainer.rollout_func
    taken = {"rollout_func": trainer.rollout_func, "tools": trainer.tools, "environment_factory": environment_factory}
    for name, value in taken.items():
        if value:
            own = "which makes completions in a way of its own; leave one of them out"
            raise ValueError(f"`rollout.thinking_budget` does not combine with `{name}`, {own}")
    ends: dict[str, Any] = {"max_completion_length": trainer.max_completion_length, "eos_ids": trainer.eos_token_ids}
    asked = settings.thinking_budget
    return ThinkingRollout(ThinkingBudget.for_tokenizer(trainer._tokenizer, asked, text=settings.budget_text, **ends))


class ThinkingRollout:
    """A ``rollout_func(prompts, trainer)`` for TRL that inserts a text into each completion whose thinking has used up
    its budget of tokens, to end it. Logs ``rollout/cut_share``, the share of completions that were cut so.

    Its ``env_mask`` marks the tokens that the policy wrote. TRL uses it as ``tool_mask``, which multiplies the loss,
    the sampler correction and every denominator that counts tokens; ``completion_mask`` keeps the inserted tokens as
    context. The inserted tokens have NaN as the sampler's log-prob, so that any use of it would show.
    """

    #: Tells ``prompt_fit`` that completions come from the engine that TRL drives, so that its limits hold for them.
    drives_trls_engine = True

    def __init__(self, budget: ThinkingBudget) -> None:
        self.budget = budget

    def __call__(self, prompts: list[Any], trainer: GRPOTrainer) -> dict[str, Any]:
        """Return token ids of prompts and completions, log-probs (None if the engine returns none) and ``env_mask``.
        Raise ValueError if the prompts have images."""
        tokenized, images, multimodal = trainer._tokenize_prompts(prompts)
        if images is not None or multimodal:
            raise ValueError("`rollout.thinking_budget` handles text only, and these prompts have images")
        prompt_ids = [list(ids) for ids in tokenized]
        several = trainer.accelerator.num_processes > 1

        def generate(ids: list[list[int]], max_new_tokens: int) -> list[Completion]:
            """Generate from the bare prompts in groups (a server gets one request with ``n = G``), and from continued
            rows, which differ within a group, one by one."""
            if self.budget.budget > 0 and ids == prompt_ids:
                group = trainer.current_group_size
            else:
                group = 1
            return generate_in_step(trainer, ids, prompt_ids[:1], group, max_new_tokens)

        done = budgeted_generate(prompt_ids, generate, self.budget, in_step=several)
        counts = torch.tensor([[sum(one.was_cut for one in done), len(done)]], device=trainer.accelerator.device)
        trainer.recorder.book().add_alike("rollout/cut_share", *trainer.accelerator.gather(counts).sum(0))
        unscored = any(completion.logprobs is None for completion in done)
        return {
            "prompt_ids": prompt_ids,
            "completion_ids": [completion.ids for completion in done],
            "logprobs": None if unscored else [completion.logprobs for completion in done],
            "env_mask": [completion.mask for completion in done],
        }
