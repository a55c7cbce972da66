"""The round machine: named parts, one after the other, each leaving a marker when it is done; killed anywhere, it goes on.

    start/     train? → evaluate                          the model that samples first
    round-1/   sample → select → train → evaluate
    round-2/   …

A part is a function of the round (`Round`) that writes its files into the round's folder and returns facts. The facts, written
whole as `<part>.json`, are the marker: a part with a marker is never done again, one without is done from its beginning
(sampling goes on with the batches that are there). Whatever a part draws follows from the run's seed, the round and the part, so
a run that was killed leaves the same files as one that was not. Times are no facts: they stand in `run.json`.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from grpo_lab.io import write_json

MODEL = "model"
"""Folder of the model that a round leaves."""

Facts = dict[str, Any]
Make = Callable[["Round"], Mapping[str, Any]]
Told = Callable[["Round", str, float | None], None]
Around = Callable[[str], AbstractContextManager[Any]]


@dataclass
class Round:
    """Where a round works and what it works with.

    Args:
        number: 0 for the start.
        folder: the round's own.
        current: the model that samples: of the round before, or the start's. Folder or hub name.
        start: the model that sampled first.
        facts: part → what it found, of the parts that are done.
    """

    number: int
    folder: Path
    current: str
    start: str
    facts: dict[str, Facts] = field(default_factory=dict)

    @property
    def model(self) -> str:
        """What the round leaves: its own model, where a part made one, else the one it began with."""
        own = self.folder / MODEL
        return str(own) if "train" in self.facts else self.current


def carry_out(
    parts: Mapping[str, Make], at: Round, told: Told | None = None, around: Around = lambda part: nullcontext()
) -> Round:
    """Every part that has no marker, in order. ``told(round, part, None)`` before one, with its seconds afterwards.

    ``around(part)``: a context around a part and its marker.

    Raises:
        ValueError: a damaged marker. What a part raises comes through.
    """
    at.folder.mkdir(parents=True, exist_ok=True)
    for name, make in parts.items():
        found = read_facts(at.folder / f"{name}.json")
        if found is None:
            began = time.perf_counter()
            if told is not None:
                told(at, name, None)
            with around(name):
                found = json.loads(json.dumps(dict(make(at)), default=str))
                write_json(at.folder / f"{name}.json", found)
            if told is not None:
                told(at, name, time.perf_counter() - began)
        at.facts[name] = found
    return at


def rounds(
    folder: Path,
    count: int,
    start: Round,
    parts: Mapping[str, Make],
    told: Told | None = None,
    around: Around = lambda part: nullcontext(),
) -> Iterator[Round]:
    """Rounds 1 … ``count`` after ``start``, each when it is done; the next begins with its model."""
    current = start.model
    for number in range(1, count + 1):
        done = carry_out(parts, Round(number, round_folder(folder, number), current, start.model), told, around)
        current = done.model
        yield done


def round_folder(folder: Path, number: int) -> Path:
    """``start`` for 0, else ``round-<number>``."""
    return folder / (f"round-{number}" if number else "start")


def read_facts(marker: Path) -> Facts | None:
    """What a finished part found; None where it is not finished. ValueError for a marker that nobody can have written whole."""
    if not marker.is_file():
        return None
    try:
        found = json.loads(marker.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{marker} is damaged ({error}); remove it, and the part is done again") from error
    if not isinstance(found, dict):
        raise ValueError(f"{marker} holds a {type(found).__name__} and no facts; remove it, and the part is done again")
    return found
