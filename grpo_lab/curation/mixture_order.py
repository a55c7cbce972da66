"""Order of the prompts of a mixture: every task has its share of every stretch of prompts.

    after n prompts, task k has had c_k(n) of them:   |c_k(n) − n·w_k/Σw| < 1

``Shares`` chooses the task of each prompt. The candidates are the tasks that are at least 1/(2K − 2) of a prompt behind
their share, K tasks in all. Of these, the one is chosen that would otherwise be the first to fall behind by more than
the bound 1 − 1/(2K − 2). Source: Tijdeman, "The chairman assignment problem" (Discrete Mathematics 32, 1980), which
proves this bound. ``MixtureSampler`` takes the rows of each task in random order; nothing else is random. How we
differ: prime-rl draws the task of each prompt at random (``ratio``).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import torch

from grpo_lab.curation.samplers import RoundSampler, seeded


class Shares:
    """Choice of the task of one prompt after the other, by the tasks' weights alone.

    Attributes:
        shares: w_k/Σw of each task, exact.
        slack: 1/(2K − 2), how far behind its share a task must be to come next; 0 for a single task.
        counts: prompts that each task has had.
        dealt: prompts of all tasks.
    """

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
    """Return the largest number of prompts of each task in a round of ``batch_size``.

    Before and after a round a task's count is less than one prompt from its share, so the round holds less than two
    prompts more than the task's share of it.
    """
    return [min(math.ceil(share * batch_size) + 1, batch_size) for share in Shares(weights).shares]


class MixtureSampler(RoundSampler):
    """Sampler of several tasks that gives each its share of every round.

    Each task has passes of its own over its rows, which are shuffled anew for every pass. A round takes all its rows of
    a task from one pass: if the rest of a pass is too short, it is left out and the next pass begins.

    Args:
        data_source: the dataset, of which only the length is read.
        tasks: the task of each row, numbered from 0.
        weights: one for each task, above 0.
        shape: the other arguments of `RoundSampler`, in order; ``more``: the same by name.

    Raises ValueError if a task has fewer rows than a round may take of it.
    """

    def __init__(
        self, data_source: Any, tasks: Sequence[int], weights: Sequence[float], *shape: int, **more: int
    ) -> None:
        super().__init__(data_source, *shape, **more)
        self.weights = [float(weight) for weight in weights]
        of_rows = torch.as_tensor(list(tasks), dtype=torch.long)
        self.rows = [torch.nonzero(of_rows == task).flatten() for task in range(len(weights))]
        self._places: list[list[tuple[int, int, int]]] = []  # of each round and task: (pass, first place, row count)
        self._shares = Shares(self.weights)
        self._order: list[list[int]] = []  # of each round: the tasks of its prompts
        for task, most in enumerate(most_of(self.weights, self.batch_size)):
            if len(self.rows[task]) < most:
                raise ValueError(
                    f"task {task} has {len(self.rows[task])} rows, and a round of batch_size={self.batch_size} may "
                    f"take {most} of it"
                )

    def draw(self, epoch: int, number: int, generator: torch.Generator) -> list[int]:
        return self.round(epoch * self.rounds_per_epoch + number)

    def round(self, number: int) -> list[int]:
        """Return the rows of round `number`, counted over the whole run. They follow from the arguments of the
        constructor alone."""
        while len(self._order) <= number:
            self._deal()
        waiting = []
        for task, (lap, place, count) in enumerate(self._places[number]):
            rows = self.rows[task]
            order = rows[torch.randperm(len(rows), generator=seeded(self.seed, task, lap))]
            waiting.append(iter(order[place : place + count].tolist()))
        return [next(waiting[task]) for task in self._order[number]]

    def _deal(self) -> None:
        """Fix the next round: the tasks of its prompts, and where in which pass it begins with each task."""
        order = [self._shares.next() for _ in range(self.batch_size)]
        places = []
        if self._places:
            before = self._places[-1]
        else:
            before = [(0, 0, 0)] * len(self.rows)
        for task, (lap, place, count) in enumerate(before):
            needed = order.count(task)
            start = place + count
            if start + needed > len(self.rows[task]):
                lap = lap + 1
                start = 0
            places.append((lap, start, needed))
        self._order.append(order)
        self._places.append(places)

    def _shape(self) -> dict[str, Any]:
        rows = [len(rows) for rows in self.rows]
        return {**super()._shape(), "weights": self.weights, "rows": rows}

    def state_dict(self) -> dict[str, Any]:
        """Return the state without rounds: each follows from its number."""
        return {**super().state_dict(), "drawn": []}
