"""CoinReward: a control. 1.0 with probability `p`, whatever the completion says.

RL on Qwen2.5 lifts MATH-500 even when the reward knows nothing of the answer: its family has seen the problems (arXiv
2507.10532), and clipping favours what the model does anyway (arXiv 2506.10947). A gain that a coin gives too is not the
reward's: train the control with everything else as in the run it is compared with, and report both.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import numpy as np


class CoinReward:
    """A coin for each completion, thrown anew at every call.

    The throws follow from (seed, rank, optimizer step, number of the call in this step): the same run throws the same
    coins, ranks throw different ones, a resumed run goes on (apart from the checkpoint's own batch where `eval_dataset`
    throws coins on the way).

    Args:
        p: probability of 1.0.
        seed: another seed, another series of throws. It is the coin's own, apart from the run's.
    """

    def __init__(self, p: float = 0.5, *, seed: int = 0) -> None:
        if isinstance(p, bool) or not 0 <= p <= 1:
            raise ValueError(f"p must be a probability, from 0 to 1; got {p!r}")
        if isinstance(seed, bool) or not isinstance(seed, int) or seed < 0:
            raise ValueError(f"seed must be a whole number of at least 0; got {seed!r}")
        self.p, self.seed = float(p), seed
        self._last = (-1, 0)  # step, calls in it
        self.__name__ = "coin_reward"  # TRL names its metrics after this

    def __repr__(self) -> str:
        return f"CoinReward(p={self.p:g}, seed={self.seed})"

    def __call__(
        self,
        prompts: Sequence[Any] | None = None,
        completions: Sequence[Any] | None = None,
        *,
        trainer_state: Any = None,
        **columns: Any,
    ) -> list[float | None]:
        """0.0 or 1.0 a completion. Of `trainer_state` (TRL gives it) the step is read; without one all calls are of
        step 0."""
        if completions is None:
            raise ValueError("CoinReward needs completions=[...]; got none")
        step = int(getattr(trainer_state, "global_step", 0))
        call = self._last[1] + 1 if self._last[0] == step else 0
        self._last = (step, call)
        throws = np.random.default_rng([self.seed, int(os.environ.get("RANK", "0")), step, call])
        return [float(heads) for heads in throws.random(len(completions)) < self.p]
