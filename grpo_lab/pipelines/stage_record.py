"""Marker of a stage, `stage.json` in its folder: its inputs, its status, its results and what it left.

    {"name", "kind", "status": "running" | "failed" | "broken off" | "done", "why", "error", "settings", "inputs",
     "before", "seconds", "results", "digests", "versions", "left", "taken"}

It is written before the stage begins and when it ends. From it, and from what is asked, ``pipelines.standing`` decides
whether the stage is done again. ``left``: the files of its results; ``taken``: those that it was made from. If several
stages of a command share a folder, their markers are called `<stage>.json`, and are written when they are done.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from itertools import count
from pathlib import Path
from typing import Any, ClassVar

from grpo_lab.evaluation.run_record import DONE, RUNNING, WAITING, PipelineStage
from grpo_lab.io import write_json
from grpo_lab.reading import Fields
from grpo_lab.recipe.digests import Seen, file_digest, remember, seen
from grpo_lab.recipe.models import files_of_model, model_files
from grpo_lab.runs.differences import differing, flat, versions
from grpo_lab.runs.folder import STAGE, is_empty, read_marker
from grpo_lab.visible import visible

Facts = dict[str, Any]

PATHS = ("path", "model", "short_model", "teacher", "source", "rows", "samples", "tokenizer")
"""Settings that name a file or a folder even if they have no slash."""
NEW = "new"
AGAIN = "again"
GOES_ON = "goes on"
"""How the reason begins if a stage is to be continued and not done from its start."""
_MOST_FILES = 2000
"""Largest number of files of one place whose digests are remembered. The files of a larger place are read each time."""
_LONGEST_ERROR = 500


@dataclass
class StageRecord(PipelineStage):
    """Record of a stage, as read from its folder. ``settings``: as written, with the ``inputs`` (setting →
    stage.thing).

    ``digests``: stage.thing, or a file that a setting names → digest of what it held.
    """

    digests: dict[str, str] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    left: Seen = field(default_factory=dict)
    taken: Seen = field(default_factory=dict)

    FIELDS: ClassVar[Fields] = {
        **dict.fromkeys(("name", "kind", "status", "why", "error"), str),
        **dict.fromkeys(("settings", "inputs", "results", "digests", "versions", "left", "taken"), dict),
        "before": list,
        "seconds": float | None,
    }

    @classmethod
    def read(cls, folder: Path, name: str, kind: str, marker: str = STAGE) -> StageRecord:
        """Read the record of the stage that worked in ``folder``. Raises ValueError if the file is damaged."""
        file = folder / marker
        if marker == STAGE:
            advice = "move the folder away, and the stage is done again"
        else:
            advice = "remove it, and the stage is done again"
            facts = facts_alone(file, advice)
            if facts is not None:
                return cls(name, kind, DONE, results=facts)
        found = read_marker(file, advice, cls.FIELDS)
        record = cls(**{"name": name, "kind": kind, **{f.name: found[f.name] for f in fields(cls) if f.name in found}})
        remember(record.left, folder)
        remember(record.taken)
        return record

    def write(self, folder: Path, marker: str = STAGE) -> None:
        """Write the record into ``folder``; a kill leaves the earlier file or the new one."""
        write_json(folder / marker, asdict(self))

    def reason(self, settings: Mapping[str, Any], digests: Mapping[str, str], gone: Sequence[str]) -> str:
        """Return why a stage with these ``settings``, made from what has these ``digests``, is to be done; empty if it
        is not. ``gone``: what it has left and is no longer there."""
        changed = [str(one) for one in differing(self.settings, settings)]
        changed += [f"{name} has changed" for name, one in digests.items() if self.digests.get(name, one) != one]
        if self.status == WAITING:
            return NEW
        if changed:
            return f"{AGAIN}: {'; '.join(changed)}"
        if self.status != DONE:
            return GOES_ON
        if gone:
            return f"{AGAIN}: its {gone[0]} is gone"
        return ""

    def due(self, folder: Path, settings: Mapping[str, Any], digests: Mapping[str, str], left: Collection[str]) -> str:
        """Return why the stage in ``folder`` is to be done; empty if it is not. Nothing is written. ``left``: places of
        what it leaves."""
        return self.reason(settings, digests, [place for place in left if not (folder / place).exists()])

    def begin(self, folder: Path, settings: Facts, digests: dict[str, str], left: Collection[str]) -> bool:
        """Return whether the stage in ``folder`` is to be done (``due``). If so, its folder is prepared."""
        why = self.due(folder, settings, digests, left)
        if why:
            self.prepare(folder, why, settings, digests)
        return bool(why)

    def prepare(self, folder: Path, why: str, settings: Mapping[str, Any], digests: Mapping[str, str]) -> None:
        """Prepare the ``folder`` of a stage that is to be done: as a killed stage left it, or empty.

        For an empty one, what was in it is kept beside it, as `<name>.before-<n>`.
        """
        if not why.startswith(GOES_ON):
            self.seconds = None
            if folder.is_dir() and not is_empty(folder):  # renamed, never emptied
                beside = (folder.with_name(f"{folder.name}.before-{number}") for number in count(1))
                folder.rename(next(place for place in beside if not place.exists()))
        folder.mkdir(parents=True, exist_ok=True)
        self.status = RUNNING
        self.why = why
        self.error = ""
        self.settings = dict(settings)
        self.digests = dict(digests)
        self.versions = versions()
        self.results = {}
        self.left = {}
        for one in self.inputs.values():
            one["digest"] = self.digests.get(one["from"], "")
        self.write(folder)

    def finish(self, folder: Path, places: Iterable[str]) -> None:
        """Record that the stage is done, with the files that are at ``places`` of ``folder``."""
        self.status = DONE
        self.left = seen_at([folder / place for place in places], folder)
        self.write(folder)

    def end(self, folder: Path, status: str, error: BaseException | str = "") -> None:
        """Record that the stage is not done, and why."""
        if isinstance(error, str):
            said = error
        else:
            said = f"{type(error).__name__}: {error}"
        self.status = status
        self.error = visible(" ".join(said.split()))[:_LONGEST_ERROR]
        self.write(folder)


def facts_alone(file: Path, advice: str) -> Facts | None:
    """Read a marker as it was until 2026-11-27: the facts of a stage that is done, and nothing else. None: there is no
    such file, or it holds a complete record."""
    found = read_marker(file, advice)
    if file.is_file() and "status" not in found:
        return found
    return None


def seen_at(places: Iterable[Path], folder: Path | None = None) -> Seen:
    """Return size, time and digest of the files at each of ``places`` (``recipe.digests.seen``), unless they are very
    many."""
    found: Seen = {}
    for place in places:
        files = files_of(place)
        if len(files) <= _MOST_FILES:
            found |= seen(files, folder)
    return found


def named_in(settings: Mapping[str, Any]) -> Iterator[str]:
    """Yield the values in ``settings`` that may name a file or a folder."""
    for setting, value in flat(settings):
        for one in value if isinstance(value, list) else [value]:
            if isinstance(one, str) and len(one) < 1000 and (setting.rpartition(".")[2] in PATHS or "/" in one):
                yield one


def digests_of(settings: Mapping[str, Any], inputs: Mapping[str, Path]) -> dict[str, str]:
    """Return digests of what is at ``inputs`` now, and of each file and folder that ``settings`` name."""
    return digests_at({**inputs, **{one: Path(one) for one in named_in(settings)}})


def digests_at(places: Mapping[str, Path]) -> dict[str, str]:
    """Return the digest of what is at each of ``places`` now. Places where nothing is are left out."""
    return {name: digest for name, place in sorted(places.items()) if (digest := digest_of(place))}


def digest_of(place: Path) -> str:
    """Return the digest of a file, of a model's folder (weights, tokenizer, template: `model_files`), or of every file
    of another folder; empty if nothing is there."""
    if place.is_file():
        return file_digest(place)
    if not place.is_dir():
        return ""
    held = model_files(str(place))
    held = held or {file.relative_to(place).as_posix(): file_digest(file) for file in files_of(place)}
    return hashlib.sha256(json.dumps(held, sort_keys=True).encode()).hexdigest()[:16]


def files_of(place: Path) -> list[Path]:
    """List the files that ``digest_of`` reads."""
    if not place.is_dir():
        return [place] if place.is_file() else []
    return files_of_model(place) or [file for file in place.rglob("*") if file.is_file()]
