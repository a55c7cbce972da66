"""A pipeline is a list of stages, carried out in order; each leaves a marker when it is done; killed anywhere, the same
command goes on.

The protocol of a stage:

    name     its marker is ``<name>.json`` in the folder that it works in
    inputs   the stages before it whose facts it reads; ``carry_out`` refuses a list in which one of them does not come
             before it
    plan()   what it will do, title → words: what ``--dry-run`` prints; writes nothing, and raises what would stop it
    run(at)  does it, writing its files into ``at.folder``, and returns facts: what later stages, tables and pages read
             of it

- The facts, written whole, are the marker: a stage with a marker is never done again, one without is done from its
  beginning (sampling goes on with the batches that are there, a training with its checkpoint: they keep that
  themselves).
- Whatever a stage draws follows from the run's seed, its folder and its name, so a run that was killed leaves the same
  files as one that was not. Times are no facts: ``report`` hears them.
- ``remembered=False``: a stage that is cheap beside what it reads from the disk, and follows from settings that may
  change between two runs (a curation's filters): it leaves no marker and is done by each run.
- ``whole=True``: a stop breaks it off, and it is done again (an evaluation); without, a stop ends it where it looks
  (``runs.stop``).
- Whether the folder is this pipeline's is asked before (``runs.folder.record_of``), and whether its recipe is the same
  (``runs.differences``): the same command goes on, a changed recipe is refused with what differs, ``--overwrite``
  begins anew.

``runs`` knows no stage of its own: ``stages/`` has what they do, and a pipeline says which, in which folder.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from grpo_lab.io import write_json
from grpo_lab.runs.folder import OneWriter
from grpo_lab.runs.stop import StopRequests

Facts = dict[str, Any]
Words = dict[str, str]


@dataclass
class At:
    """Where stages work.

    Args:
        folder: of their files and markers.
        facts: stage → what it found, of the stages that are done.
    """

    folder: Path
    facts: dict[str, Facts] = field(default_factory=dict)


@dataclass(frozen=True)
class Stage:
    """One step of a pipeline; the module's text says what each field promises."""

    name: str
    run: Callable[[Any], Mapping[str, Any] | None]
    plan: Callable[[], Mapping[str, str]] = dict
    inputs: tuple[str, ...] = ()
    remembered: bool = True
    whole: bool = False


Report = Callable[[Any, str, float | None], None]
"""``report(at, stage, None)`` before a stage, with its seconds afterwards."""


def carry_out(
    stages: Sequence[Stage], at: At, stop: StopRequests | None = None, report: Report = lambda at, stage, seconds: None
) -> None:
    """Every stage that has no marker, in order; ``at.facts`` has them all afterwards.

    Raises:
        ValueError: a damaged marker, or a stage that reads one that does not come before it. What a stage raises comes
            through.
        Interrupted: asked to stop.
    """
    at.folder.mkdir(parents=True, exist_ok=True)
    for stage in stages:
        if missing := [name for name in stage.inputs if name not in at.facts]:
            raise ValueError(f"stage {stage.name!r} reads {missing}, and before it come {list(at.facts)}")
        marker = at.folder / f"{stage.name}.json"
        found = read_facts(marker) if stage.remembered else None
        if found is None:
            began = time.perf_counter()
            report(at, stage.name, None)
            with nullcontext() if stop is None or stage.whole else stop.held():
                found = json.loads(json.dumps(dict(stage.run(at) or {}), default=str))
                if stage.remembered:
                    write_json(marker, found)
            report(at, stage.name, time.perf_counter() - began)
        at.facts[stage.name] = found


def plan_of(stages: Iterable[Stage]) -> Words:
    """What the stages will do. ValueError for what would stop one of them."""
    return {title: words for stage in stages for title, words in stage.plan().items()}


@contextmanager
def working(recipe: Any, new: bool) -> Iterator[StopRequests]:
    """Around a run: its folder is this process's, and it can be asked to stop.

    Args:
        recipe: of any pipeline: its ``output_dir``, ``max_hours``, ``stop_file``.
        new: nothing is there to go on with, so that a stop file which waits is an earlier run's.

    Raises:
        ValueError: another process writes there.
        Interrupted: asked to stop, here or in the block.
    """
    folder = recipe.output_dir
    with OneWriter(folder).take(), StopRequests(folder, recipe.max_hours, recipe.stop_file) as stop:
        stop.heed_waiting(new)
        yield stop


def read_facts(marker: Path) -> Facts | None:
    """What a finished stage found; None where it is not finished. ValueError for a marker that nobody can have written
    whole."""
    if not marker.is_file():
        return None
    try:
        found = json.loads(marker.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{marker} is damaged ({error}); remove it, and the part is done again") from error
    if not isinstance(found, dict):
        raise ValueError(f"{marker} holds a {type(found).__name__} and no facts; remove it, and the part is done again")
    return found
