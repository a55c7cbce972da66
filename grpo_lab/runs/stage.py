"""A stage's argument (`Workspace`) and its results (facts).

``stages/`` and ``pipelines/kinds.py`` have the kinds of stage; ``pipelines/stage_engine.py`` runs them.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grpo_lab.evaluation.terminal import Terminal

if TYPE_CHECKING:  # it imports TRL, which a process that starts a lab's cells has no need of
    from grpo_lab.runs.stop_requests import StopRequests

Facts = dict[str, Any]
"""Results of a stage, name → plain value, as its marker file keeps them."""
Words = dict[str, str]
"""Lines of a dry run's plan, title → text."""

console = Terminal()


@dataclass
class Workspace:
    """Argument of a stage's ``run``: what it may read and where it writes.

    Attributes:
        folder: where the stage's files and its marker are.
        stop: requests to stop. A stage calls ``stop.check`` between two pieces of work, and trains inside
            ``stop.training``.
        facts: name of a finished stage → its results.
    """

    folder: Path
    stop: StopRequests
    facts: dict[str, Facts] = field(default_factory=dict)


def __getattr__(name: str) -> Any:
    """Return ``Workspace`` for its deprecated name ``At``, which a team's kinds of stage may import."""
    if name != "At":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    message = "`grpo_lab.runs.stage.At` is called `Workspace` now; the old name goes with the next release"
    warnings.warn(message, DeprecationWarning, stacklevel=2)
    return Workspace


def plain_facts(found: Mapping[str, Any] | None) -> Facts:
    """Return what a stage has returned (None: nothing) as plain values, as JSON gives them back."""
    plain: Facts = json.loads(json.dumps(dict(found or {}), default=str))
    return plain
