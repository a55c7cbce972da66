"""Prioritised sampling: problems that the model still gets wrong come more often.

    P(i) ∝ w_i = max(1 − s_i, floor)

with s_i the success rate of problem i, tracked from the rollouts of the run itself (Kimi k1.5, arXiv 2501.12599,
section 2.3.3, "Prioritized Sampling": proportional to 1 − s_i). The report gives no floor and no rule for the running
estimate; both are ours:

    floor      a solved problem keeps the weight `floor`, so that every problem has at least floor times the chance it
               would have under uniform sampling and nothing starves; forgetting is noticed
    estimate   S_i ← λ·S_i + successes,  T_i ← λ·T_i + trials,  s_i = S_i / T_i     (λ = `decay`: old policies fade)

A round needs `batch_size` *different* problems. Drawing one after the other without replacement flattens the weights
when the round is large; so the round is a systematic sample: problem i is in it with probability exactly

    π_i = min(1, k · w_i / Σw),   Σπ_i = batch_size

(k grows where some π_i reach 1). A problem that would be drawn more than once in a round is in it once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Sized
from typing import Any

import torch

from grpo_lab.curation.rounds import RoundSampler

_CERTAIN = 1 - 1e-9


class PrioritizedSampler(RoundSampler):
    """Rounds drawn ∝ max(1 − s_i, floor); see the module for the formula and `RoundSampler` for the shape.

    Args:
        initial: s_i until the first update, a number or one a problem (pass rates from curation); 0 lets unseen
            problems come first.
        floor: least weight, in (0, 1]; 1 is uniform sampling.
        decay: λ in [0, 1]; 0 believes the last update only, 1 never forgets.
    """

    def __init__(
        self,
        data_source: Sized,
        mini_repeat_count: int,
        batch_size: int = 1,
        repeat_count: int = 1,
        seed: int = 0,
        *,
        initial: float | Sequence[float] = 0.0,
        floor: float = 0.05,
        decay: float = 0.8,
    ) -> None:
        super().__init__(data_source, mini_repeat_count, batch_size, repeat_count, seed)
        if not 0 < floor <= 1:
            raise ValueError(f"floor={floor} is not in (0, 1]; without a floor a solved problem would starve")
        if not 0 <= decay <= 1:
            raise ValueError(f"decay={decay} is not in [0, 1]")
        rates = [float(initial)] * self.num_samples if isinstance(initial, int | float) else [float(s) for s in initial]
        if len(rates) != self.num_samples or not all(0 <= rate <= 1 for rate in rates):
            raise ValueError(
                f"initial needs {self.num_samples} rates in [0, 1], one a row; got {len(rates)} between "
                f"{min(rates, default=None)} and {max(rates, default=None)}"
            )
        self.floor, self.decay = floor, decay
        self._initial = torch.tensor(rates, dtype=torch.float64)
        self._successes = torch.zeros(self.num_samples, dtype=torch.float64)
        self._trials = torch.zeros(self.num_samples, dtype=torch.float64)

    def update(self, index: int, successes: float, trials: float) -> None:
        """Report that `successes` of `trials` completions of problem `index` were right; the same call on every rank.

        Unscorable completions belong in neither number. Zero trials change nothing.
        """
        if not 0 <= index < self.num_samples:
            raise ValueError(f"index={index} is not a row of the data (0 … {self.num_samples - 1})")
        if not 0 <= successes <= trials:
            raise ValueError(f"successes={successes} of trials={trials}: 0 ≤ successes ≤ trials is needed")
        if trials > 0:
            self._successes[index] = self.decay * self._successes[index] + successes
            self._trials[index] = self.decay * self._trials[index] + trials

    @property
    def trials(self) -> torch.Tensor:
        """T_i, [N] float64: the (decayed) number of completions behind s_i; 0 before the first."""
        return self._trials

    @property
    def success_rates(self) -> torch.Tensor:
        """s_i, [N] float64."""
        seen = self._trials > 0
        return torch.where(seen, self._successes / torch.where(seen, self._trials, 1.0), self._initial)

    @property
    def weights(self) -> torch.Tensor:
        """w_i = max(1 − s_i, floor), [N] float64."""
        return (1 - self.success_rates).clamp(min=self.floor)

    @property
    def probabilities(self) -> torch.Tensor:
        """P(i) = w_i / Σw, [N] float64: the share of the draws that problem i gets."""
        return self.weights / self.weights.sum()

    def draw(self, epoch: int, number: int, generator: torch.Generator) -> list[int]:
        return systematic_sample(inclusion_probabilities(self.weights, self.batch_size), generator)

    def state_dict(self) -> dict[str, Any]:
        """Adds S and T to the rounds. `initial`, `floor` and `decay` are settings and come from the constructor."""
        return {**super().state_dict(), "successes": self._successes.tolist(), "trials": self._trials.tolist()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self._successes = torch.tensor(state["successes"], dtype=torch.float64)
        self._trials = torch.tensor(state["trials"], dtype=torch.float64)


def inclusion_probabilities(weights: torch.Tensor, count: int) -> torch.Tensor:
    """π_i = min(1, k·w_i) with k such that Σπ_i = count. [N] float64, all weights positive, count ≤ N."""
    certain = torch.zeros_like(weights, dtype=torch.bool)
    while True:
        rest = count - int(certain.sum())
        free_weight = torch.where(certain, 0.0, weights).sum()
        chance = torch.where(certain, 1.0, rest * weights / free_weight.clamp(min=torch.finfo(weights.dtype).tiny))
        over = ~certain & (chance >= _CERTAIN)
        if not over.any():
            return chance
        certain |= over


def systematic_sample(chance: torch.Tensor, generator: torch.Generator) -> list[int]:
    """A set of Σπ indices that holds i with probability π_i exactly, in random order.

    The indices are laid out in random order as intervals of length π_i; points at u, u + 1, u + 2, … with u uniform in
    [0, 1) pick an interval each, and none twice as π_i ≤ 1.
    """
    certain = torch.nonzero(chance >= _CERTAIN).flatten()
    free = torch.nonzero(chance < _CERTAIN).flatten()
    free = free[torch.randperm(len(free), generator=generator)]
    count = round(float(chance[free].sum()))
    ends = torch.cumsum(chance[free], dim=0)
    points = torch.rand((), generator=generator, dtype=torch.float64) + torch.arange(count, dtype=torch.float64)
    picked = torch.searchsorted(ends, points, right=True).clamp(max=max(len(free) - 1, 0))
    chosen = torch.cat([certain, free[picked]])
    return [int(index) for index in chosen[torch.randperm(len(chosen), generator=generator)]]
