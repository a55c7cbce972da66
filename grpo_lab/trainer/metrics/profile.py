"""``profile: true``: where the time of a run's optimizer steps goes, as a table in ``profile.md``.

The code marks its parts by name (`ranks.named_place`). A part's seconds run from one mark to the next, so the parts add
up to the training's wall time on the main process. On a GPU the program waits for the device at each mark; else a part
would be charged for the kernels of the one before it. Without ``profile`` a run does not wait.

A second table shows what the host did within the update (marked by ``host``), without waiting at marks. On a GPU its
forward and backward are the time to launch kernels, and the rest is waiting for the device.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from transformers import TrainerCallback
from trl import GRPOTrainer

from grpo_lab.io import write_whole_text
from grpo_lab.trainer.ranks import counted, named_place
from grpo_lab.trainer.trl_bridge import replaced

FILE = "profile.md"
#: Name of a place → row of the table. A place that is not named here counts for the place around it.
PARTS = {
    "generation": "generation", "rewards": "rewards", "log-probs": "log-probs at generation",
    "update": "update: forward and backward", "optimizer": "optimizer",
    "step": "rest of the step: advantages, tensors", "training": "between steps: rows, logs, callbacks",
    "checkpoint": "checkpoints", "evaluation": "evaluation",
}  # fmt: skip

#: Rows of the table of the host's times, in order: the names that ``host`` takes, and the rest.
PLANNING = "planning"
EXCHANGE = "rows, to their ranks and to the host"
LAYOUT = "masks and packing of bins"
FORWARD = "forward and loss"
BACKWARD = "backward"
WAITING = "waiting for the device, and the rest"

_doing: list[str] = []
_since = 0.0
_host: dict[str, float] | None = None


@contextmanager
def host(name: str) -> Iterator[None]:
    """Return a context, also a decorator, in which the host's time counts for ``name``, and not for a ``host`` around
    it. Without a profile it does nothing."""
    if _host is None:
        yield
        return
    _turn()
    _doing.append(name)
    try:
        yield
    finally:
        _turn()
        _doing.pop()


def _turn() -> None:
    """Add the time since the last change of activity to that of the current one; called before it changes."""
    global _since
    now = time.perf_counter()
    if _host is not None and _doing:
        _host[_doing[-1]] = _host.get(_doing[-1], 0.0) + now - _since
    _since = now


@contextmanager
def host_counted(seconds: dict[str, float]) -> Iterator[None]:
    """Return a context in which ``host`` adds the seconds of each activity to ``seconds``."""
    global _host
    _host = seconds
    try:
        yield
    finally:
        _host = None
        _doing.clear()


class Profile(TrainerCallback):  # type: ignore[misc]
    """Measures a run from its second step on, since the first one includes one-time setup, and writes ``profile.md`` at
    the end of the training."""

    def __init__(self, trainer: GRPOTrainer) -> None:
        self.trainer = trainer
        self.steps = 0
        self.seconds = dict[str, float]()
        self.of_host = dict[str, float]()
        self._counting = ExitStack()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Begin to measure after the first step: mark backward and optimizer, and count the time at each place."""
        if self.steps == 0:
            accelerator = self.trainer.accelerator
            optimizer = self.trainer.optimizer
            backward = named_place("update")(host(BACKWARD)(accelerator.backward))
            self._counting.enter_context(replaced(accelerator, "backward", backward))
            self._counting.enter_context(replaced(optimizer, "step", named_place("optimizer")(optimizer.step)))
            self._counting.enter_context(counted(self.seconds))
            self._counting.enter_context(host_counted(self.of_host))
        self.steps += 1

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._counting.close()
        if state.is_world_process_zero and self.steps > 1:
            steps = self.steps - 1
            parts = by_part(self.seconds, steps)
            text = as_table({"": parts}, steps)
            if PARTS["update"] in parts and self.of_host:
                text += "\n" + host_table(self.of_host, parts[PARTS["update"]], steps)
            write_whole_text(Path(args.output_dir) / FILE, text)


def by_part(seconds: Mapping[str, float], steps: int) -> dict[str, float]:
    """Return part → seconds per step, in the table's order. ``seconds`` is what ``ranks.counted`` has filled: places,
    with all their names, → seconds in ``steps`` steps."""
    found = dict.fromkeys(PARTS.values(), 0.0)
    for place, spent in seconds.items():
        known = [PARTS[name] for name in place.split(" › ") if name in PARTS]
        found[known[-1] if known else PARTS["training"]] += spent / steps
    return {part: spent for part, spent in found.items() if spent > 0}


def as_table(runs: Mapping[str, Mapping[str, float]], steps: int) -> str:
    """Return a Markdown table of each part's seconds per step and share of the whole, in two columns for each run.
    ``runs``: name of a run → what ``by_part`` returned."""
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


def host_table(seconds: Mapping[str, float], update: float, steps: int) -> str:
    """Return a Markdown table of what the host did within the update, in seconds per step. ``seconds``: activity →
    seconds in ``steps`` steps; ``update``: seconds of the update per step."""
    lines = ["| the host, within the update | seconds a step | share |", "|---|---|---|"]
    known = {name: seconds[name] / steps for name in (PLANNING, EXCHANGE, LAYOUT, FORWARD, BACKWARD) if name in seconds}
    known[WAITING] = max(0.0, update - sum(known.values()))
    lines += [f"| {name} | {spent:.4f} | {spent / update:.1%} |" for name, spent in known.items()]
    return "\n".join(lines) + "\n"
