"""Rows that the data loader would give later, for what is asked of the engine before its turn (``rollout.overlap``,
``rollout.cut_after``). A checkpoint counts what was trained on, so a resumed run meets the rest again."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from typing import Any

from grpo_lab.trainer import trl_bridge
from grpo_lab.trainer.generation.rollout_ports import RolloutPort
from grpo_lab.trainer.settings.parse import RolloutSettings


def batches_ahead(settings: RolloutSettings, longest: int | None) -> int:
    """Generation batches of which completions may be begun before their turn. With ``cut_after`` = c and completions of
    at most T tokens ⌈T/c⌉: the oldest waiting completion has then been gone on with so often that it is whole."""
    if settings.cut_after is not None and longest is not None:
        return math.ceil(longest / settings.cut_after)
    return settings.overlap


class ReadAhead:
    """Micro-batches of an epoch as transformers' loop takes them, and those that come after, up to ``ahead``; with 0 it
    does nothing."""

    def __init__(self, ahead: int) -> None:
        self._ahead = ahead
        self.forget()

    def forget(self) -> None:
        """Forget what an earlier training read: a training begins."""
        self._source: Iterator[Any] | None = None
        self._given: list[Any] = []
        self._coming: deque[Any] = deque()
        self.first = 0  # micro-batches trained on before those of the optimizer step at hand

    def read(self, source: Iterator[Any], number: int, first: int) -> Iterator[Any]:
        """Read the next ``number`` micro-batches of ``source`` (fewer at its end); ``first``: how many were trained on
        before them."""
        if self._ahead == 0:
            return source
        if source is not self._source:  # an epoch begins
            self._source = source
            self._coming = deque()
        while len(self._coming) < number + self._ahead:
            found = next(source, None)
            if found is None:
                break
            self._coming.append(found)
        self._given = [self._coming.popleft() for _ in range(min(number, len(self._coming)))]
        self.first = first
        return iter(self._given)

    def rows(self, number: int) -> Any | None:
        """Micro-batch ``number`` of the training, counted from 0; None where the epoch has no more."""
        place = number - self.first
        known = [*self._given, *self._coming]
        if 0 <= place < len(known):
            return known[place]
        return None

    def rows_to_train(self, trainer: RolloutPort, number: int) -> Any | None:
        """Return ``rows``; None, too, where the training ends before it."""
        state = trainer.state
        phase = trainer.phase
        left = (state.max_steps - state.global_step) * phase.accumulation  # the step at hand included
        if number >= self.first + left:
            return None
        return self.rows(number)


def refuse_turns(trainer: RolloutPort, setting: str, turns: str, images: str) -> None:
    """Refuse (ValueError) completions that are made in turns (tools, an environment, a rollout function), or bring
    images; with the reason why ``setting`` cannot have them."""
    taken = {"rollout_func": turns, "tools": turns, "environment_factories": turns}
    found = [(f"`{name.replace('ies', 'y')}`", why) for name, why in taken.items() if getattr(trainer, name, None)]
    found += [("data with images", images)] if trl_bridge.may_bring_images(trainer) else []
    if found:
        raise ValueError(f"`{setting}` does not combine with {found[0][0]}, {found[0][1]}: leave one out")
