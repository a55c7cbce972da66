"""What every kind of stage is given (`Workspace`), and what it returns (facts). ``stages/`` has the stages;
``pipelines/stage_engine.py`` runs them."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grpo_lab.evaluation.terminal import Terminal

if TYPE_CHECKING:  # it imports TRL, which a process that starts a lab's cells has no need of
    from grpo_lab.runs.stop_requests import StopRequests

Facts = dict[str, Any]
Words = dict[str, str]
Report = Callable[[Any, str, float | None], None]
"""Function ``report(workspace, stage, seconds)``. It is called with None before a stage, and with the stage's seconds
after it."""

console = Terminal()


@dataclass
class Workspace:
    """What stages work with: the folder of their files and markers, the requests to ``stop``, and the facts of finished
    stages. A stage calls ``stop.check`` between two pieces of work, and trains inside ``stop.training``."""

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
    """Return the facts of a stage as plain values, as JSON gives them back."""
    plain: Facts = json.loads(json.dumps(dict(found or {}), default=str))
    return plain
