"""Marker of a stage, `stage.json` in its folder: its inputs, its status, its results and what it left.

    {"name", "kind", "status": "running" | "failed" | "broken off" | "done", "why", "error", "settings", "inputs",
     "before", "seconds", "results", "digests", "versions", "left", "taken"}

It is written before the stage begins and when it ends. From it, and from what the recipe asks for now,
``pipelines.standing`` decides whether the stage is done again. If several stages of a command share a folder, their
markers are called `<stage>.json`, and are written when they are done.
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
"""How the reason to do a stage begins: it has never begun; it is done from its start; or it is continued."""
_MOST_FILES = 2000
"""Largest number of files of one place whose digests are remembered. The files of a larger place are read each time."""
_LONGEST_ERROR = 500
"""Most characters of an error that a marker records."""


@dataclass
class StageRecord(PipelineStage):
    """Record of a stage, as read from its folder: a `PipelineStage`, and what its results were made from.

    Attributes:
        settings: settings that the stage was done with, and its inputs (``inputs``: setting → stage.thing).
        digests: input (stage.thing), or file or folder that a setting names → digest of what it held.
        versions: package → its version.
        left: files of the stage's results, in its folder, as they were when it ended (`recipe.digests.Seen`).
        taken: files that the stage was made from, as they were when it began.
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
        """Read the record of the stage that worked in ``folder``; a new record if there is none.

        ``name`` and ``kind``: those of the stage, if the file does not have them; ``marker``: name of the file. The
        digests in it are remembered, so that unchanged files are not read again. Raises ValueError if the file is
        damaged.
        """
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
        """Write the record into ``folder``. A kill leaves the earlier file or the new one, never a part."""
        write_json(folder / marker, asdict(self))

    def reason(self, settings: Mapping[str, Any], digests: Mapping[str, str], gone: Sequence[str]) -> str:
        """Return why the stage has to be done, beginning with ``NEW``, ``AGAIN`` or ``GOES_ON``; empty if it is done.

        Args:
            settings: settings that are asked for now.
            digests: input or file → digest of what it holds now. One that the record does not know, or that
                does not exist now, is no reason.
            gone: places of results that the stage has left and that are no longer there.
        """
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
        """Return why the stage in ``folder`` has to be done (``reason``); empty if it is done. Nothing is written.
        ``left``: places in the folder of what the stage leaves."""
        return self.reason(settings, digests, [place for place in left if not (folder / place).exists()])

    def begin(self, folder: Path, settings: Facts, digests: dict[str, str], left: Collection[str]) -> bool:
        """Return whether the stage in ``folder`` has to be done (``due``); if so, ``prepare`` its folder first."""
        why = self.due(folder, settings, digests, left)
        if why:
            self.prepare(folder, why, settings, digests)
        return bool(why)

    def prepare(self, folder: Path, why: str, settings: Mapping[str, Any], digests: Mapping[str, str]) -> None:
        """Make the ``folder`` of a stage ready, and record there that the stage is running.

        If the reason ``why`` says that the stage goes on, the folder stays as it is. Otherwise it becomes an empty one:
        a folder with files in it is renamed to `<name>.before-<n>`.
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
        """Record that the stage is done, and the size, time and digest of the files at ``places`` in ``folder``."""
        self.status = DONE
        self.left = seen_at([folder / place for place in places], folder)
        self.write(folder)

    def end(self, folder: Path, status: str, error: BaseException | str = "") -> None:
        """Record that the stage has ended without being done: its ``status``, and the ``error`` in one line."""
        if isinstance(error, str):
            said = error
        else:
            said = f"{type(error).__name__}: {error}"
        self.status = status
        self.error = visible(" ".join(said.split()))[:_LONGEST_ERROR]
        self.write(folder)


def facts_alone(file: Path, advice: str) -> Facts | None:
    """Return the facts of a stage whose marker has the form used until 2026-11-27, which held them and nothing else,
    and was written when the stage was done. None: there is no marker, or it holds a complete record."""
    found = read_marker(file, advice)
    if file.is_file() and "status" not in found:
        return found
    return None


def seen_at(places: Iterable[Path], folder: Path | None = None) -> Seen:
    """Return size, time and digest of the files at each of ``places`` (``recipe.digests.seen``). A place with more than
    ``_MOST_FILES`` files is left out."""
    found: Seen = {}
    for place in places:
        files = files_of(place)
        if len(files) <= _MOST_FILES:
            found |= seen(files, folder)
    return found


def named_in(settings: Mapping[str, Any]) -> Iterator[str]:
    """Yield the texts in ``settings`` that may name a file or a folder: those of the settings ``PATHS``, and all with a
    slash."""
    for setting, value in flat(settings):
        for one in value if isinstance(value, list) else [value]:
            if isinstance(one, str) and len(one) < 1000 and (setting.rpartition(".")[2] in PATHS or "/" in one):
                yield one


def digests_of(settings: Mapping[str, Any], inputs: Mapping[str, Path]) -> dict[str, str]:
    """Return the digests of what is at ``inputs`` (name → place) now, and of each file and folder that ``settings``
    name; nothing for a place that does not exist."""
    return digests_at({**inputs, **{one: Path(one) for one in named_in(settings)}})


def digests_at(places: Mapping[str, Path]) -> dict[str, str]:
    """Return name → digest of what is at its place now. Places that do not exist are left out."""
    return {name: digest for name, place in sorted(places.items()) if (digest := digest_of(place))}


def digest_of(place: Path) -> str:
    """Return the digest of a file, of a model's folder (weights, tokenizer, template: `model_files`), or of every file
    of another folder; empty if nothing is there."""
    if place.is_file():
        return file_digest(place)
    if not place.is_dir():
        return ""
    held = model_files(str(place))
    if not held:
        held = {file.relative_to(place).as_posix(): file_digest(file) for file in files_of(place)}
    return hashlib.sha256(json.dumps(held, sort_keys=True).encode()).hexdigest()[:16]


def files_of(place: Path) -> list[Path]:
    """List the files whose contents ``digest_of`` covers."""
    if not place.is_dir():
        return [place] if place.is_file() else []
    return files_of_model(place) or [file for file in place.rglob("*") if file.is_file()]
