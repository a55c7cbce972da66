"""Curricula by pass rate: easy problems first, or all problems first and then the hard ones.

Kimi k1.5 (arXiv 2501.12599, section 2.3.3, "Curriculum Sampling") starts with easier tasks and goes on to harder ones;
its ablation (section 3.5) first trains on a uniform mixture and then on hard problems only. How difficulty is cut and
when to switch are not given: settings. So is the floor that lets easy problems come back now and then (0: never, as in
the report).
"""

from __future__ import annotations

from collections.abc import Sequence, Sized

import torch

from grpo_lab.curation.prioritized import inclusion_probabilities, systematic_sample
from grpo_lab.curation.rounds import RoundSampler, seeded


class CurriculumSampler(RoundSampler):
    """Easy to hard: every epoch visits the problems by falling pass rate, ties in random order.

    Where N is no multiple of `batch_size`, the rows left out of an epoch are drawn at random, or the hardest would
    never be seen. See `RoundSampler` for the shape and the other arguments.

    Args: pass_rates: one a row, in [0, 1].
    """

    def __init__(
        self,
        data_source: Sized,
        pass_rates: Sequence[float],
        mini_repeat_count: int,
        batch_size: int = 1,
        repeat_count: int = 1,
        seed: int = 0,
    ) -> None:
        super().__init__(data_source, mini_repeat_count, batch_size, repeat_count, seed)
        self._rates = checked_rates(pass_rates, self.num_samples)

    def draw(self, epoch: int, number: int, generator: torch.Generator) -> list[int]:
        shuffled = torch.randperm(self.num_samples, generator=seeded(self.seed, epoch))
        taken = shuffled[: self.rounds_per_epoch * self.batch_size]
        by_difficulty = taken[torch.sort(self._rates[taken], descending=True, stable=True).indices]
        return by_difficulty[number * self.batch_size : (number + 1) * self.batch_size].tolist()


class UniformThenHardSampler(RoundSampler):
    """All problems, shuffled, for the first `uniform_rounds` rounds of the run; from then on only problems with a pass
    rate below `hard_below`, shuffled, again and again.

    Args:
        pass_rates: one a row, in [0, 1].
        uniform_rounds: generation batches, counted over epochs.
        hard_below: a problem is hard if its pass rate is smaller; at least `batch_size` problems have to be.
        floor: chance of an easy problem in the hard phase relative to a hard one's, in [0, 1]. With 0 the hard problems
            are gone through lap by lap; else every round is drawn by these weights (`prioritized.systematic_sample`).
    """

    def __init__(
        self,
        data_source: Sized,
        pass_rates: Sequence[float],
        mini_repeat_count: int,
        batch_size: int = 1,
        repeat_count: int = 1,
        seed: int = 0,
        *,
        uniform_rounds: int,
        hard_below: float = 0.5,
        floor: float = 0.0,
    ) -> None:
        super().__init__(data_source, mini_repeat_count, batch_size, repeat_count, seed)
        if uniform_rounds < 0:
            raise ValueError(f"uniform_rounds={uniform_rounds} is negative")
        if not 0 <= floor <= 1:
            raise ValueError(f"floor={floor} is not in [0, 1]")
        self.uniform_rounds, self.floor = uniform_rounds, floor
        self._all = torch.arange(self.num_samples)
        self._hard = torch.nonzero(checked_rates(pass_rates, self.num_samples) < hard_below).flatten()
        if len(self._hard) < batch_size:
            raise ValueError(
                f"{len(self._hard)} problems have a pass rate below hard_below={hard_below}; "
                f"a round needs batch_size={batch_size}"
            )
        self._weights = torch.full((self.num_samples,), floor, dtype=torch.float64)
        self._weights[self._hard] = 1.0

    def draw(self, epoch: int, number: int, generator: torch.Generator) -> list[int]:
        position = epoch * self.rounds_per_epoch + number
        if position < self.uniform_rounds:
            return self._shuffled(self._all, position, phase=0)
        if self.floor > 0:
            return systematic_sample(inclusion_probabilities(self._weights, self.batch_size), generator)
        return self._shuffled(self._hard, position - self.uniform_rounds, phase=1)

    def _shuffled(self, pool: torch.Tensor, position: int, phase: int) -> list[int]:
        """Round `position` of the pool, shuffled anew whenever it has been gone through."""
        lap, place = divmod(position, len(pool) // self.batch_size)
        order = pool[torch.randperm(len(pool), generator=seeded(self.seed, phase, lap))]
        return [int(index) for index in order[place * self.batch_size : (place + 1) * self.batch_size]]


def checked_rates(pass_rates: Sequence[float], rows: int) -> torch.Tensor:
    """[N] float64, or ValueError."""
    if len(pass_rates) != rows:
        raise ValueError(f"{len(pass_rates)} pass rates for {rows} rows")
    if wrong := [rate for rate in pass_rates if rate is None or not 0 <= rate <= 1]:
        raise ValueError(f"a pass rate is {wrong[0]}; numbers in [0, 1] are needed (leave unscorable problems out)")
    return torch.tensor([float(rate) for rate in pass_rates], dtype=torch.float64)
