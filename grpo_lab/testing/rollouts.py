"""A scripted rollout: TRL's ``rollout_func`` with completions that depend only on a seed, the call and the global row.

So stock TRL and ours, one process and four, get the very same completions, and a difference can only come from the
update.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass
class ScriptedRollout:
    """``rollout_func(prompts, trainer)`` for tests and benchmarks.

    Args:
        vocabulary: completions are drawn from these token ids (keep special tokens out).
        lengths: completion lengths in tokens, drawn from this list.
        end_id: appended where the completion is not truncated (``None``: never).
        truncated_share: share of completions without ``end_id``.
        seed: everything follows from it.
        sampler_logps: ``(prompt ids, completion ids) -> log-probs`` of the "sampler", nats (only read with a sampler
            correction).
    """

    vocabulary: Sequence[int]
    lengths: Sequence[int]
    end_id: int | None = None
    truncated_share: float = 0.0
    seed: int = 0
    sampler_logps: Callable[[list[list[int]], list[list[int]]], list[list[float]]] | None = None
    calls: int = field(default=0, init=False)

    def __call__(self, prompts: list[Any], trainer: Any) -> dict[str, Any]:
        first = trainer.accelerator.process_index * len(prompts)
        completions = [self.completion(self.calls, first + i) for i in range(len(prompts))]
        self.calls += 1
        prompt_ids, _, _ = trainer._tokenize_prompts(prompts)
        prompt_ids = [list(ids) for ids in prompt_ids]
        logps = None if self.sampler_logps is None else self.sampler_logps(prompt_ids, completions)
        return {"prompt_ids": prompt_ids, "completion_ids": completions, "logprobs": logps}

    def completion(self, call: int, row: int) -> list[int]:
        """Token ids of global row ``row`` at generation ``call``."""
        rng = random.Random(f"{self.seed}/{call}/{row}")
        ids = [rng.choice(self.vocabulary) for _ in range(rng.choice(self.lengths))]
        if self.end_id is not None and rng.random() >= self.truncated_share:
            ids[-1] = self.end_id
        return ids
