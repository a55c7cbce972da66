"""``metrics.jsonl``: a line for each log of a training, and its cut to the steps that are kept."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from grpo_lab.io import no_link, write_whole_text


class MetricsFile(TrainerCallback):  # type: ignore[misc]
    """Appends every log of the main process to ``metrics.jsonl``, with its step."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any) -> None:
        if state.is_world_process_zero and logs and "train_runtime" not in logs:  # HF's totals repeat the last step
            with open(self.path, "a", encoding="utf-8", opener=no_link) as file:
                file.write(json.dumps({"step": state.global_step, **logs}, default=str) + "\n")


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
