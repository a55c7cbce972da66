"""How far a long sampling is: a live bar on a terminal, a line now and then in a log file."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

SECONDS_BETWEEN_LINES = 30.0


@contextmanager
def progress_of(total: int, done: int, label: str, shown: bool = True) -> Iterator[Callable[[int, str], None]]:
    """Yields `advance(problems, note)`; `done` of `total` were there before. The note is shown beside the bar."""
    from rich.console import Console

    console = Console(stderr=True)
    if not shown:
        yield lambda count, note: None
    elif console.is_terminal:
        with _bar(console, total, done, label) as advance:
            yield advance
    else:
        yield _lines(total, done, label)


@contextmanager
def _bar(console: object, total: int, done: int, label: str) -> Iterator[Callable[[int, str], None]]:
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[note]}", style="dim"),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console) as progress:  # type: ignore[arg-type]
        task = progress.add_task(label, total=total, completed=done, note="")
        yield lambda count, note: progress.update(task, advance=count, note=note)


def _lines(total: int, done: int, label: str) -> Callable[[int, str], None]:
    state = {"done": done, "said": time.monotonic()}
    if done:
        print(f"{label}: {done:,} of {total:,} problems are there already", file=sys.stderr, flush=True)

    def advance(count: int, note: str) -> None:
        state["done"] += count
        now = time.monotonic()
        if now - state["said"] >= SECONDS_BETWEEN_LINES or state["done"] == total:
            state["said"] = now
            print(f"{label}: {state['done']:,.0f} of {total:,} problems; {note}", file=sys.stderr, flush=True)

    return advance
