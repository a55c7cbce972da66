"""`grpo-lab pipeline status` and `show`: how far the stages of a folder have come, as a table and as a drawing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.columns import Columns
from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from grpo_lab.evaluation.terminal import NOT_RECORDED, Terminal, duration
from grpo_lab.runs.folder import read_marker

STAGES, RECIPE = "pipeline.json", "pipeline.yaml"
"""The state of all stages; the pipeline as it was read, which `resume` reads."""
MARKS = {"done": "✓", "running": "…", "waiting": "○"}
SHARES = ("accuracy", "thinking", "no_thinking", "mode_following", "format", "language", "pair_accuracy", "pass_at_k")
MEASURED = ("rows", "kept", "steps", *SHARES, "length", "tokens")
"""Facts with a column of their own, where a stage has them."""


def status(folder: Path, console: Console | None = None) -> None:
    """Print the table, one row a stage. ValueError: no pipeline is there."""
    print_stages(stages_in(folder), console or Terminal())


def show(folder: Path, console: Console | None = None) -> None:
    """Print the drawing: a row of boxes for each step from the start, under those whose things it takes."""
    stages, out = stages_in(folder)["stages"], console or Terminal()
    depth: dict[str, int] = {}
    for one in stages:  # in their order: what comes before is known
        depth[one["name"]] = max((depth[name] + 1 for name in one["before"]), default=0)
    for level in range(max(depth.values()) + 1):
        boxes = [_box(one) for one in stages if depth[one["name"]] == level]
        out.print(*([] if level == 0 else ["  ↓"]), end="" if level == 0 else "\n")
        out.print(Columns(boxes, padding=(0, 1)))


def stages_in(folder: Path) -> dict[str, Any]:
    """``pipeline.json`` of a folder. ValueError: there is none, or it is damaged."""
    found = read_marker(Path(folder) / STAGES, "`grpo-lab pipeline resume` writes it anew")
    if not found:
        raise ValueError(f"{str(folder)!r} holds no pipeline ({STAGES}); name the `output_dir` of one")
    return found


def print_stages(state: Mapping[str, Any], console: Console) -> None:
    """The table at the end of a run."""
    stages: Sequence[Mapping[str, Any]] = state["stages"]
    measured = [name for name in MEASURED if any(name in one["results"] for one in stages)]
    table = Table(title=Text(str(state["name"])), box=box.SIMPLE_HEAD, title_justify="left")
    for heading in ("stage", "kind", "", "time"):
        table.add_column(heading, no_wrap=heading == "stage")
    for name in measured:
        table.add_column(name.replace("_", " "), justify="right")
    for one in stages:
        took = duration(one["seconds"]) if one["seconds"] else NOT_RECORDED
        cells = [_shown(name, one["results"].get(name)) for name in measured]
        table.add_row(one["name"], one["kind"], f"{MARKS[one['status']]} {one['status']}", took, *cells)
    console.print(table)


def _shown(name: str, value: Any) -> str:
    number = value.get("value") if isinstance(value, Mapping) else value
    if not isinstance(number, int | float):
        return ""
    return f"{number:.1%}" if name in SHARES else f"{number:,}" if isinstance(number, int) else f"{number:.1f}"


def _box(one: Mapping[str, Any]) -> Panel:
    facts = [
        f"{name} {_shown(name, one['results'][name])}" for name in MEASURED if one["results"].get(name) is not None
    ]
    taken = [f"← {found['from']}" for found in one["inputs"].values()]
    words = [f"{MARKS[one['status']]} {one['kind']}", *facts, *taken]
    return Panel(Text("\n".join(words)), title=Text(one["name"]), expand=False)
