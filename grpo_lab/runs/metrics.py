"""``metrics.jsonl`` in a run's folder: every log with its step, cut back where a run is gone on with."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from grpo_lab.io import append_json_line, write_whole_text


class MetricsFile(TrainerCallback):  # type: ignore[misc]
    """Appends every log of the main process to ``metrics.jsonl``, with its step. ``beside``: numbers that are written
    in front of it, and in no other log."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.beside: Callable[[], Mapping[str, float]] = dict

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any) -> None:
        if state.is_world_process_zero and logs and "train_loss" not in logs:  # HF's totals repeat the last step
            append_json_line(self.path, {"step": state.global_step, **self.beside(), **logs})


def cut_metrics(file: Path, step: int, evaluation_due: bool = False) -> None:
    """Leave the lines of ``metrics.jsonl`` up to ``step``: those after it will be written again, and so will, where it
    is due, the evaluation after ``step``. Half a line goes, too."""
    if file.is_file():
        lines = file.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True)
        write_whole_text(file, "".join(line for line in lines if _is_before(line, step, evaluation_due)))


def _is_before(line: str, step: int, evaluation_due: bool) -> bool:
    try:
        row = json.loads(line)
        again = evaluation_due and row["step"] == step and any(name.startswith("eval_") for name in row)
        return line.endswith("\n") and bool(row["step"] <= step) and not again
    except (ValueError, KeyError, TypeError):
        return False
