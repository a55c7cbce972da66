"""Order of the prompts of a mixture: every task has its share of every stretch of prompts.

    after n prompts, task k has had c_k(n) of them:   |c_k(n) − n·w_k/Σw| < 1

Prompt by prompt: of the tasks that are far enough behind their share, the one that would be the first to fall a whole
prompt behind is next. Source: Tijdeman, "The chairman assignment problem" (Discrete Mathematics 32, 1980), whose bound
is 1 − 1/(2K − 2) for K tasks. Nothing is drawn at random but the order of each task's rows. prime-rl draws the task of
each prompt at random (``ratio``).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import torch

from grpo_lab.curation.samplers import RoundSampler, seeded


class Shares:
    """Deals out prompts to tasks by their weights, one after the other; the same sequence always."""

    def __init__(self, weights: Sequence[float]) -> None:
        exact = [Fraction(str(weight)) for weight in weights]
        self.shares = [weight / sum(exact) for weight in exact]
        if len(exact) > 1:
            self.slack = Fraction(1, 2 * len(exact) - 2)
        else:
            self.slack = Fraction(0)
        self.counts = [0] * len(exact)
        self.dealt = 0

    def next(self) -> int:
        """Return the task of the next prompt."""
        self.dealt += 1
        behind = [share * self.dealt - count for share, count in zip(self.shares, self.counts, strict=True)]
        due = [task for task, missing in enumerate(behind) if missing >= self.slack]
        task = min(due, key=lambda task: (1 - self.slack - behind[task]) / self.shares[task])
        self.counts[task] += 1
        return task


def most_of(weights: Sequence[float], batch_size: int) -> list[int]:
    """Return how many prompts of each task a round may hold: within one of the share at both of its ends."""
    return [min(math.ceil(share * batch_size) + 1, batch_size) for share in Shares(weights).shares]


class MixtureSampler(RoundSampler):
    """Sampler of several tasks. Each round holds them by their weights; each task's rows are shuffled once a pass of
    its own.

    A round takes its rows of a task from one pass: what is left of a pass and does not fill a round is left out.

    Args:
        tasks: the task of each row, numbered from 0.
        weights: one a task, above 0; shape: as in `RoundSampler`.

    Raises ValueError if a task has fewer rows than a round may take of it.
    """

    def __init__(
        self, data_source: Any, tasks: Sequence[int], weights: Sequence[float], *shape: int, **more: int
    ) -> None:
        super().__init__(data_source, *shape, **more)
        self.weights = [float(weight) for weight in weights]
        of_rows = torch.as_tensor(list(tasks), dtype=torch.long)
        self.rows = [torch.nonzero(of_rows == task).flatten() for task in range(len(weights))]
        self._places: list[list[tuple[int, int, int]]] = []  # a round: (pass, first place, number) of each task
        self._shares = Shares(self.weights)
        self._order: list[list[int]] = []  # a round: the tasks of its prompts
        for task, most in enumerate(most_of(self.weights, self.batch_size)):
            if len(self.rows[task]) < most:
                raise ValueError(
                    f"task {task} has {len(self.rows[task])} rows, and a round of batch_size={self.batch_size} may "
                    f"take {most} of it"
                )

    def draw(self, epoch: int, number: int, generator: torch.Generator) -> list[int]:
        return self.round(epoch * self.rounds_per_epoch + number)

    def round(self, number: int) -> list[int]:
        """Return the rows of round `number` of the run, which follows from the arguments and the seed alone."""
        while len(self._order) <= number:
            self._deal()
        waiting = []
        for task, (lap, place, count) in enumerate(self._places[number]):
            rows = self.rows[task]
            order = rows[torch.randperm(len(rows), generator=seeded(self.seed, task, lap))]
            waiting.append(iter(order[place : place + count].tolist()))
        return [next(waiting[task]) for task in self._order[number]]

    def _deal(self) -> None:
        order = [self._shares.next() for _ in range(self.batch_size)]
        places = []
        if self._places:
            before = self._places[-1]
        else:
            before = [(0, 0, 0)] * len(self.rows)
        for task, (lap, place, count) in enumerate(before):
            needed = order.count(task)
            place += count
            if place + needed > len(self.rows[task]):
                lap = lap + 1
                place = 0
            places.append((lap, place, needed))
        self._order.append(order)
        self._places.append(places)

    def _shape(self) -> dict[str, Any]:
        rows = [len(rows) for rows in self.rows]
        return {**super()._shape(), "weights": self.weights, "rows": rows}

    def state_dict(self) -> dict[str, Any]:
        """Return the epoch, and no rounds: each follows from its number."""
        return {**super().state_dict(), "drawn": []}
