"""``profile: true``: where the time of a run's optimizer steps goes, as a table in ``profile.md``.

A part is a place that the run names (`ranks.at`): its seconds are those between two names, so the parts add up to the
training's wall time, of the main process. On a GPU each change of place waits for the device, or a part would be
charged for the kernels of the one before it; a run without ``profile`` waits nowhere.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from grpo_lab.io import write_whole_text
from grpo_lab.trainer.ranks import at, counted
from grpo_lab.trainer.trl_bridge import replaced

FILE = "profile.md"
#: innermost place → the row of the table; what has no name of its own belongs to the place around it
PARTS = {
    "generation": "generation", "rewards": "rewards", "log-probs": "log-probs at generation",
    "update": "update: forward and backward", "optimizer": "optimizer",
    "step": "rest of the step: advantages, tensors", "training": "between steps: rows, logs, callbacks",
    "checkpoint": "checkpoints", "evaluation": "evaluation",
}  # fmt: skip


class Profile(TrainerCallback):  # type: ignore[misc]
    """Counts from the second step on: the first one makes what the others find ready."""

    def __init__(self, trainer: Any) -> None:
        self.trainer, self.steps, self.seconds = trainer, 0, dict[str, float]()
        self._counting = ExitStack()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self.steps == 0:
            accelerator, optimizer = self.trainer.accelerator, self.trainer.optimizer
            for owner, name, place in ((accelerator, "backward", "update"), (optimizer, "step", "optimizer")):
                self._counting.enter_context(replaced(owner, name, at(place)(getattr(owner, name))))
            self._counting.enter_context(counted(self.seconds))
        self.steps += 1

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._counting.close()
        if state.is_world_process_zero and self.steps > 1:
            text = as_table({"": by_part(self.seconds, self.steps - 1)}, self.steps - 1)
            write_whole_text(Path(args.output_dir) / FILE, text)


def by_part(seconds: Mapping[str, float], steps: int) -> dict[str, float]:
    """Seconds a step of each part, in the table's order. ``seconds``: of each place, outermost name first."""
    found = dict.fromkeys(PARTS.values(), 0.0)
    for place, spent in seconds.items():
        known = [PARTS[name] for name in place.split(" › ") if name in PARTS]
        found[known[-1] if known else PARTS["training"]] += spent / steps
    return {part: spent for part, spent in found.items() if spent > 0}


def as_table(runs: Mapping[str, Mapping[str, float]], steps: int) -> str:
    """A Markdown table of seconds a step, and of the share; a column each of ``runs``."""
    parts = [part for part in PARTS.values() if any(part in run for run in runs.values())]
    head = "".join(f" {name + ', ' if name else ''}seconds a step | share |" for name in runs)
    lines = [f"| part |{head}", "|---|" + "---|---|" * len(runs)]
    for part in [*parts, "all"]:
        cells = []
        for run in runs.values():
            whole = sum(run.values())
            own = whole if part == "all" else run.get(part, 0.0)
            cells.append(f" {own:.3f} | {own / whole:.0%} |")
        lines.append(f"| {part} |{''.join(cells)}")
    return "\n".join(lines) + f"\n\nWall time of {steps} optimizer steps, the first one not among them.\n"
