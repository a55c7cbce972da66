"""Rounds of one list of stages, each in a folder of its own; the next begins with the model that the one before left.

start/     train? → evaluate                          the model that samples first
round-1/   sample → select → train → evaluate
round-2/   …
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from grpo_lab.runs.stage import At, Report, Stage, carry_out
from grpo_lab.runs.stop import StopRequests
from grpo_lab.stages.train import MODEL


@dataclass(kw_only=True)
class Round(At):
    """Where a round works and what it works with.

    Args:
        number: 0 for the start.
        current: the model that samples: of the round before, or the start's. Folder or hub name.
        start: the model that sampled first.
    """

    number: int
    current: str
    start: str

    @property
    def model(self) -> str:
        """What the round leaves: its own model, where a stage made one, else the one it began with."""
        return str(self.folder / MODEL) if "train" in self.facts else self.current


def rounds(
    folder: Path,
    count: int,
    start: Round,
    stages: Sequence[Stage],
    stop: StopRequests | None = None,
    report: Report = lambda at, stage, seconds: None,
) -> Iterator[Round]:
    """Rounds 1 … ``count`` after ``start``, each when it is done."""
    current = start.model
    for number in range(1, count + 1):
        done = Round(folder=round_folder(folder, number), number=number, current=current, start=start.model)
        carry_out(stages, done, stop, report)
        current = done.model
        yield done


def round_folder(folder: Path, number: int) -> Path:
    """``start`` for 0, else ``round-<number>``."""
    return folder / (f"round-{number}" if number else "start")
