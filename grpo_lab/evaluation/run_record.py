"""What a finished (or broken-off) run left in its folder, read so that a missing or damaged piece never stops a report.

```
run_dir/run.json                      what was run: model, template, objective, settings, versions, seed, seconds
run_dir/metrics.jsonl                 one JSON object a logged step, with `step`; keys as in TRL's log_history
run_dir/evaluation/before|after/      written by EvaluationResult.write
run_dir/evaluation/step_<n>/          the same during training, where the run evaluated on the way
```
Whatever could not be read is named in `notices`.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from grpo_lab.evaluation.result import EvaluationResult

Series = list[tuple[int, float]]
"""(optimizer step, value), steps rising."""

_NUMBERED_LINES = 5


@dataclass
class RunRecord:
    """A run as far as it could be read; the fields are empty or None where nothing was found."""

    folder: Path
    summary: dict[str, Any] = field(default_factory=dict)
    metrics: dict[str, Series] = field(default_factory=dict)
    before: EvaluationResult | None = None
    after: EvaluationResult | None = None
    during: list[tuple[int, EvaluationResult]] = field(default_factory=list)
    notices: list[str] = field(default_factory=list)

    @property
    def recorded(self) -> bool:
        """Whether anything of a run is there, damaged or not."""
        return bool(self.summary or self.metrics or self.before or self.after or self.during or self.notices)

    @property
    def last_step(self) -> int:
        return max((series[-1][0] for series in self.metrics.values()), default=0)

    def first_of(self, *names: str) -> Series:
        """The first of these metrics that was recorded; empty if none was."""
        return next((self.metrics[name] for name in names if name in self.metrics), [])


def read_run(folder: str | Path) -> RunRecord:
    """Everything that can be read from ``folder``; ValueError only if there is no such folder."""
    folder = Path(folder)
    if not folder.is_dir():
        raise ValueError(f"{folder} is not a folder; the output folder of a run is needed")
    record = RunRecord(folder)
    record.summary = _read_summary(folder / "run.json", record.notices)
    record.metrics = _read_metrics(folder / "metrics.jsonl", record.notices)
    evaluations = folder / "evaluation"
    record.before = _read_evaluation(evaluations / "before", record.notices)
    record.after = _read_evaluation(evaluations / "after", record.notices)
    for step, path in sorted(_step_folders(evaluations)):
        result = _read_evaluation(path, record.notices)
        if result is not None:
            record.during.append((step, result))
    return record


def _read_summary(path: Path, notices: list[str]) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        summary = json.loads(path.read_text(encoding="utf-8", errors="replace"))
    except (ValueError, RecursionError) as error:
        notices.append(f"run.json could not be read: {error}")
        return {}
    if not isinstance(summary, dict):
        notices.append(f"run.json holds a {type(summary).__name__}, not a mapping; it was left out")
        return {}
    return summary


def _read_metrics(path: Path, notices: list[str]) -> dict[str, Series]:
    if not path.is_file():
        return {}
    values: dict[str, dict[int, float]] = {}
    damaged: list[tuple[int, str]] = []
    not_finite: dict[str, int] = {}
    repeated = 0
    for number, row in _json_lines(path, damaged):
        step = row.get("step")
        if isinstance(step, bool) or not isinstance(step, int | float) or not _is_finite(step):
            damaged.append((number, f"no usable `step` (saw {str(step)[:40]!r})"))
            continue
        for name, value in row.items():
            if name == "step" or isinstance(value, bool) or not isinstance(value, int | float):
                continue
            if not _is_finite(value):
                not_finite[name] = not_finite.get(name, 0) + 1
                continue
            repeated += int(step) in values.setdefault(name, {})
            values[name][int(step)] = float(value)
    for number, reason in sorted(damaged)[:_NUMBERED_LINES]:
        notices.append(f"metrics.jsonl, line {number}: {reason}; the line was left out")
    if len(damaged) > _NUMBERED_LINES:
        notices.append(f"metrics.jsonl: {len(damaged) - _NUMBERED_LINES} further lines were left out")
    if repeated:
        notices.append(
            f"metrics.jsonl: {repeated} values were logged twice for one step (a resumed run?); the later ones are shown"
        )
    for name, count in not_finite.items():
        notices.append(
            f"metrics.jsonl: {name} was NaN or infinite in {count} {'row' if count == 1 else 'rows'}, not drawn"
        )
    return {name: sorted(points.items()) for name, points in values.items()}


def _json_lines(path: Path, damaged: list[tuple[int, str]]) -> Iterator[tuple[int, dict[str, Any]]]:
    with path.open(encoding="utf-8", errors="replace", newline="\n") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:
                damaged.append((number, f"not JSON ({error})"))
                continue
            if isinstance(row, dict):
                yield number, row
            else:
                damaged.append((number, f"a JSON {type(row).__name__}, not an object"))


def _is_finite(value: int | float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # a whole number too large for a float
        return False


def _read_evaluation(folder: Path, notices: list[str]) -> EvaluationResult | None:
    if not folder.is_dir():
        return None
    try:
        return EvaluationResult.read(folder)
    except (OSError, ValueError, RecursionError) as error:
        notices.append(f"evaluation/{folder.name} could not be read: {error}")
        return None


def _step_folders(evaluations: Path) -> Iterator[tuple[int, Path]]:
    if not evaluations.is_dir():
        return
    for path in evaluations.iterdir():
        named = re.fullmatch(r"step[-_]?(\d{1,12})", path.name, re.ASCII)
        if named and path.is_dir():
            yield int(named[1]), path
