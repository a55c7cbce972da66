"""Completions by the engine that TRL drives, outside of its own rollouts: every rank calls, so that ranks stay in step.

Thinking under a budget goes on this way, and an evaluation on the way: greedy answers of the policy as it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import torch

from grpo_lab.engines.sampler import Completion, context_of_config, plain_generation_config
from grpo_lab.trainer.trl_bridge import replaced

if TYPE_CHECKING:
    from trl import GRPOTrainer


class PolicySampler:
    """The policy in training as a `Sampler` of greedy answers; no random number is drawn, no metric recorded."""

    def __init__(self, trainer: GRPOTrainer) -> None:
        self.trainer, self.tokenizer, self.stops = trainer, trainer._tokenizer, list(trainer.eos_token_ids)
        engine = (
            trainer.vllm_generation.llm.llm_engine if trainer.use_vllm and trainer.vllm_mode == "colocate" else None
        )
        config: Any = trainer.accelerator.unwrap_model(trainer.model).config
        self.context = engine.model_config.max_model_len if engine else context_of_config(config)

    def __call__(
        self, prompts: Sequence[list[int]], *, n: int, temperature: float, max_new_tokens: int, seed: int | None
    ) -> list[list[Completion]]:
        """ValueError: samples are asked for."""
        if n != 1 or temperature != 0:
            raise ValueError(f"an evaluation on the way is greedy; got n={n}, temperature={temperature}")
        trainer, training = self.trainer, self.trainer.model.training
        with ExitStack() as stack:
            if trainer.use_vllm:
                for name, value in {"temperature": 0.0, "repetition_penalty": 1.0}.items():
                    stack.enter_context(replaced(trainer.vllm_generation, name, value))
            else:
                pad = int(trainer._tokenizer.pad_token_id)
                plain = plain_generation_config(0.0, max_new_tokens, self.stops, pad)
                stack.enter_context(replaced(trainer, "generation_config", plain))
            stack.callback(trainer.model.train, training)
            trainer.model.eval()  # the sync is proven on training's own batches
            made = generate_in_step(trainer, [list(ids) for ids in prompts], [self.stops[:1]], 1, max_new_tokens)
        return [[completion] for completion in made]


def generate_in_step(
    trainer: GRPOTrainer, prompt_ids: list[list[int]], filler: list[list[int]], group: int, max_new_tokens: int
) -> list[Completion]:
    """Completions by the engine that TRL drives; every rank calls. One with fewer rows than it must hand in completes
    the ``filler`` in vain, so that ranks stay in step."""
    rows = prompt_ids + filler[:1] * (_rows_in_step(trainer, len(prompt_ids)) - len(prompt_ids))
    if not rows:
        return []
    engine = trainer.vllm_generation if trainer.use_vllm else trainer.generation_config
    with replaced(engine, "max_completion_length" if trainer.use_vllm else "max_new_tokens", max_new_tokens):
        ids, logprobs = trainer._generate_single_turn(rows, None, {}, num_generations=group)
    ends, version = trainer.eos_token_ids, int(trainer.state.global_step)
    scored = [None] * len(ids) if logprobs is None else logprobs
    made = [
        Completion(row, row[-1:] != [] and row[-1] in ends, own, version) for row, own in zip(ids, scored, strict=True)
    ]
    return made[: len(prompt_ids)]


def _rows_in_step(trainer: GRPOTrainer, rows: int) -> int:
    """How many rows this rank must hand in: as many as any other to an engine that ranks share (tensor parallel,
    server); else one where others have any, since sharded weights are gathered by all ranks together."""
    if trainer.accelerator.num_processes == 1:
        return rows
    most = int(trainer.accelerator.gather(torch.tensor([rows], device=trainer.accelerator.device)).max())
    shared = trainer.use_vllm and (trainer.vllm_mode == "server" or trainer.args.vllm_tensor_parallel_size > 1)
    return most if shared else max(rows, min(most, 1))
