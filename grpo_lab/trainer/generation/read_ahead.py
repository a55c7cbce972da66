"""Read prompts from the data loader before the training loop gets to them, so that their completions can be generated
early (``rollout.overlap``, ``rollout.cut_after``). A checkpoint counts only rows that were trained on, so a resumed run
reads the others again."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from typing import Any

from grpo_lab.trainer import trl_bridge
from grpo_lab.trainer.generation.rollout_ports import RolloutPort
from grpo_lab.trainer.settings.parse import RolloutSettings


def batches_ahead(settings: RolloutSettings, longest: int | None) -> int:
    """Return how many generation batches may be begun before their turn. With ``cut_after`` = c and completions of at
    most ``longest`` = T tokens it is ⌈T/c⌉: after so many turns the oldest waiting completion is whole."""
    if settings.cut_after is not None and longest is not None:
        return math.ceil(longest / settings.cut_after)
    return settings.overlap


class ReadAhead:
    """Reads the data loader for transformers' loop and holds the micro-batches of the current optimizer step and up to
    ``ahead`` later ones of the epoch. Holds nothing if ``ahead`` is 0."""

    def __init__(self, ahead: int) -> None:
        self._ahead = ahead
        self.forget()

    def forget(self) -> None:
        """Forget what an earlier training read; called when a training begins."""
        self._source: Iterator[Any] | None = None
        self._given: list[Any] = []
        self._coming: deque[Any] = deque()
        self.first = 0  # micro-batches trained on before the current optimizer step

    def read(self, source: Iterator[Any], number: int, first: int) -> Iterator[Any]:
        """Return the next ``number`` micro-batches of the data loader's iterator ``source`` (fewer at its end), those
        of one optimizer step. ``first`` is how many micro-batches were trained on before them."""
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
        """Return micro-batch ``number`` of the training, counted from 0; None if the epoch ends before it, or if it is
        not among those held."""
        place = number - self.first
        known = [*self._given, *self._coming]
        if 0 <= place < len(known):
            return known[place]
        return None

    def rows_to_train(self, trainer: RolloutPort, number: int) -> Any | None:
        """Return ``rows(number)``, or None if the training ends before that micro-batch."""
        state = trainer.state
        phase = trainer.phase
        left = (state.max_steps - state.global_step) * phase.accumulation  # the current step included
        if number >= self.first + left:
            return None
        return self.rows(number)


def refuse_turns(trainer: RolloutPort, setting: str, turns: str, images: str) -> None:
    """Raise ValueError if completions are made in turns (tools, an environment, a rollout function) or the data may
    have images. ``turns`` and ``images`` are the reasons, for the message, why ``setting`` does not work with each."""
    taken = {"rollout_func": turns, "environment_factories": turns, "tools": turns}
    found = [(f"`{name.replace('ies', 'y')}`", why) for name, why in taken.items() if getattr(trainer, name, None)]
    found += [("data with images", images)] if trl_bridge.may_bring_images(trainer) else []
    if found:
        raise ValueError(f"`{setting}` does not combine with {found[0][0]}, {found[0][1]}: leave one out")
