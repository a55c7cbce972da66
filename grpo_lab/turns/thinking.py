"""A thinking budget in each turn (``rollout.thinking_budget``).

    thinking, at most ``budget`` tokens  |  the text that ends it, inserted  |  the rest of the turn

If the policy closes its thinking within the budget, no text is inserted; if it ends its turn there, no rest is asked
for. The budget applies only where a turn begins with thinking and has room for the budget, the inserted text and at
least one token of an answer.
"""

from __future__ import annotations

from grpo_lab.engines.thinking_budget import ThinkingBudget
from grpo_lab.turns.protocols import TurnEngine, TurnTokens


class BudgetedTurns:
    """A ``TurnEngine`` whose turns keep a thinking budget.

    Args:
        engine: engine that writes a turn in one request, or in two: its thinking, then the rest.
        settings: the budget, and the text that ends the thinking.
    """

    def __init__(self, engine: TurnEngine, settings: ThinkingBudget) -> None:
        self.in_rounds = engine.in_rounds
        self._engine = engine
        self._settings = settings
        self._thinking: dict[int, tuple[list[int], int]] = {}
        self._heads: dict[int, TurnTokens] = {}

    def submit(self, key: int, ids: list[int], room: int) -> None:
        """Ask for a turn: for its thinking alone where the budget applies, else for the whole turn."""
        budget = self._settings.budget
        stop_ids = self._settings.stop_ids
        if room <= budget + len(stop_ids) or not self._settings.thinks(ids):
            self._engine.submit(key, ids, room)
        elif budget == 0:
            self._go_on(key, ids, TurnTokens.foreign(stop_ids), room)
        else:
            self._thinking[key] = (ids, room)
            self._engine.submit(key, ids, budget)

    def collect(self, wait: float) -> list[tuple[int, TurnTokens]]:
        """Return turns that have ended. A turn of which only the thinking has ended is submitted again for its rest."""
        ended = []
        for key, made in self._engine.collect(wait):
            if key in self._thinking:
                ids, room = self._thinking.pop(key)
                made = made.within(self._settings.budget)
                if not self._settings.is_finished(made.ids):
                    self._go_on(key, ids, self._closed(ids, made), room)
                    continue
            elif key in self._heads:
                made = self._heads.pop(key).then(made)
            ended.append((key, made))
        return ended

    def _closed(self, ids: list[int], thinking: TurnTokens) -> TurnTokens:
        """Return the thinking, with the text behind it that ends it unless the policy closed it."""
        if self._settings.must_cut(ids, thinking.ids):
            return thinking.then(TurnTokens.foreign(self._settings.stop_ids))
        return thinking

    def _go_on(self, key: int, ids: list[int], head: TurnTokens, room: int) -> None:
        """Ask for the rest of a turn that begins with ``head``."""
        self._heads[key] = head
        self._engine.submit(key, [*ids, *head.ids], room - len(head.ids))
