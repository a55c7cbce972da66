"""A sampler that disagrees with the trainer, so that TRL's sampler correction can run without vLLM."""

from __future__ import annotations

import copy
from typing import Any

import torch


class NoisySampler:
    """Log-probs of each completion under a frozen copy of ``model``, plus noise that depends on token and position.

    As from vLLM, one token comes unscored (``None``).
    """

    def __init__(self, model: Any, noise: float = 0.15) -> None:
        self.model, self.noise = copy.deepcopy(model).eval(), noise

    def __call__(self, prompts: list[list[int]], completions: list[list[int]]) -> list[list[float | None]]:
        table = [self._row(prompt, row) for prompt, row in zip(prompts, completions, strict=True)]
        table[0][0] = None
        return table

    @torch.no_grad()
    def _row(self, prompt: list[int], row: list[int]) -> list[float | None]:
        ids = torch.tensor([prompt + row])
        logps = self.model(input_ids=ids).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        noise = [self.noise * ((3 * token + t) % 7 - 3) for t, token in enumerate(row)]
        return [logps[t, token].item() + noise[t] for t, token in enumerate(row)]


class NoEngine:
    """Stands where TRL keeps its vLLM engine; a ``rollout_func`` makes the completions, so only the sync is called."""

    context = 1 << 30  # tokens: no limit

    def sync_weights(self) -> None:
        pass


def as_with_vllm(trainer: Any) -> None:
    """Let ``trainer`` run TRL's own code for completions that vLLM made."""
    trainer.use_vllm, trainer._last_loaded_step, trainer.vllm_generation = True, -1, NoEngine()
