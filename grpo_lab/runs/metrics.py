"""``metrics.jsonl`` in a run's folder: every log with its step; a resumed run first cuts it back to its own step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from grpo_lab.io import append_json_line, write_whole_text
from grpo_lab.reading import checked_object, json_lines


class MetricsFile(TrainerCallback):  # type: ignore[misc]
    """Callback that appends each log of the main process to ``metrics.jsonl``, as a line with its optimizer step.

    ``beside``: function whose numbers are added to each line of the file, but to no other log (terminal, trackers).
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.beside: Callable[[], Mapping[str, float]] = dict

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any) -> None:
        if state.is_world_process_zero and logs and "train_loss" not in logs:  # HF's totals repeat the last step
            append_json_line(self.path, {"step": state.global_step, **self.beside(), **logs})


def cut_metrics(file: Path, step: int, evaluation_due: bool = False) -> None:
    """Remove the lines of ``metrics.jsonl`` that a run resumed at ``step`` will write again.

    Those are the lines of later steps and, if ``evaluation_due``, of the evaluation at ``step``, which the resumed run
    repeats. Damaged lines at the end, left by a kill, are removed too. Raises ValueError if a damaged line is followed
    by one that is kept.
    """
    if not file.is_file():
        return
    kept: list[int] = []
    damaged: dict[int, str] = {}
    for number, found in json_lines(file):  # of a damaged line, `found` says what is wrong with it
        row = None
        try:
            if isinstance(found, dict):
                row = checked_object(found, {"step": int})
        except ValueError as error:
            found = str(error)
        if row is None:
            damaged[number] = str(found)
        elif row["step"] < step or (row["step"] == step and not (evaluation_due and _is_evaluation(row))):
            kept.append(number)
    for number, why in damaged.items():
        if kept and number < kept[-1]:
            raise ValueError(f"{file}, line {number}: {why}: remove that line, and the run goes on without it")
    lines = file.read_bytes().split(b"\n")[:-1]  # a last line without a newline was not written whole
    chosen = [lines[number - 1].decode() + "\n" for number in kept if number <= len(lines)]
    write_whole_text(file, "".join(chosen))


def _is_evaluation(row: Mapping[str, Any]) -> bool:
    return any(name.startswith("eval_") for name in row)
