"""What an environment offers to the run, and not to the policy.

TRL makes a tool of every public method of an environment's class but ``reset`` and ``get_reward``: it asks ``inspect``
for them when it is built, and again before each generation. What ``turns.turn_settings`` lists (scores of turns, the
state for a resume) would be a tool, too, and the policy could call it.
"""

from __future__ import annotations

import contextlib
import inspect
from typing import Any

from trl.trainer import grpo_trainer

from grpo_lab.trainer.trl_bridge.names import replaced

__all__ = ["OFFERED", "offers_hidden"]

#: Methods that the run calls itself (``turns.turn_settings``), beside TRL's ``reset`` and ``get_reward``.
OFFERED = ("turn_rewards", "state_dict", "load_state_dict")


class _WithoutOffers:
    """In the place of ``inspect`` in TRL's trainer, which asks it for the methods of an environment's class."""

    def __getattr__(self, name: str) -> Any:
        return getattr(inspect, name)

    def getmembers(self, owner: Any, predicate: Any = None) -> list[tuple[str, Any]]:
        """Return ``inspect.getmembers`` without what an environment offers."""
        return [member for member in inspect.getmembers(owner, predicate) if member[0] not in OFFERED]


def offers_hidden(hidden: bool) -> contextlib.AbstractContextManager[None]:
    """Return a context in which TRL makes no tools of ``OFFERED``, if ``hidden``. Its constructor finds an
    environment's tools, and each generation again."""
    if not hidden:
        return contextlib.nullcontext()
    return replaced(grpo_trainer, "inspect", _WithoutOffers())
