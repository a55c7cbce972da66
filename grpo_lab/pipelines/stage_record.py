"""`stage.json` in a stage's folder: what the stage was made from, whether it is done, and its results.

    {"name", "kind", "status": "running" | "done", "why", "settings", "inputs", "before", "seconds", "results",
     "digests", "versions"}

Written whole before the stage begins and when it is done. A stage is done again only where what it is made from has
changed (its settings; what an input holds, a model by its weights, tokenizer and template; a file or a folder that its
settings name) or what it left is gone; a release of a library is recorded, and makes nothing again."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, dataclass, field, fields
from itertools import count
from pathlib import Path
from typing import Any, ClassVar

from grpo_lab.evaluation.run_record import PipelineStage
from grpo_lab.io import saving, write_json
from grpo_lab.reading import Fields
from grpo_lab.recipe.models import model_files
from grpo_lab.runs.differences import differing, flat, versions
from grpo_lab.runs.folder import STAGE, is_empty, read_marker
from grpo_lab.runs.stage import Facts, console, plain_facts

PATHS = ("path", "model", "short_model", "teacher", "source", "rows", "samples", "tokenizer")
"""Settings that name a file or a folder without a slash in it, too."""
RUNNING, DONE, WAITING = "running", "done", "waiting"
GOES_ON = "goes on"


@dataclass
class StageRecord(PipelineStage):
    """One stage as its folder says it. ``settings``: as written, with the ``inputs`` (setting → stage.thing).
    ``digests``: stage.thing, or what a setting names → what it held."""

    digests: dict[str, str] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)

    FIELDS: ClassVar[Fields] = {
        **dict.fromkeys(("name", "kind", "status", "why"), str),
        **dict.fromkeys(("settings", "inputs", "results", "digests", "versions"), dict),
        "before": list,
        "seconds": float | None,
    }

    @classmethod
    def read(cls, folder: Path, name: str, kind: str) -> StageRecord:
        """Of the stage that worked in ``folder``. ValueError for a damaged file."""
        found = read_marker(folder / STAGE, "move the folder away, and the stage is done again", cls.FIELDS)
        return cls(**{"name": name, "kind": kind, **{f.name: found[f.name] for f in fields(cls) if f.name in found}})

    def write(self, folder: Path) -> None:
        """To ``folder``, whole."""
        write_json(folder / STAGE, asdict(self))

    def due(self, folder: Path, settings: Facts, digests: Mapping[str, str], left: Collection[str]) -> str:
        """Why the stage in ``folder`` is to be done; empty where it is not. Nothing is written. ``left``: places of
        what it leaves."""
        changed = [str(one) for one in differing(self.settings, settings)]
        changed += [f"{name} has changed" for name, one in digests.items() if self.digests.get(name, one) != one]
        gone = [place for place in left if not (folder / place).exists()]
        if self.status == WAITING:
            return "new"
        if changed:
            return f"again: {'; '.join(changed)}"
        if self.status == RUNNING:
            return GOES_ON
        return f"again: its {gone[0]} is gone" if gone else ""

    def begin(self, folder: Path, settings: Facts, digests: dict[str, str], left: Collection[str]) -> bool:
        """Whether the stage in ``folder`` is to be done (``due``), and ``why``; its folder is then ready: as a killed
        stage left it, or empty, and what was made from something else stands beside it as `<name>.before-<n>`."""
        why = self.due(folder, settings, digests, left)
        if not why:
            return False
        self.why = why
        if why != GOES_ON:
            self.seconds = None
            if folder.is_dir() and not is_empty(folder):  # never emptied
                beside = (folder.with_name(f"{folder.name}.before-{number}") for number in count(1))
                folder.rename(next(place for place in beside if not place.exists()))
        folder.mkdir(parents=True, exist_ok=True)
        self.status, self.settings, self.digests, self.versions = RUNNING, settings, digests, versions()
        self.results = {}
        for one in self.inputs.values():
            one["digest"] = digests.get(one["from"], "")
        self.write(folder)
        return True


def digests_of(settings: Mapping[str, Any], inputs: Mapping[str, Path]) -> dict[str, str]:
    """What ``inputs`` hold now (stage.thing → place), and each file and folder that ``settings`` name."""
    places = dict(inputs)
    for setting, value in flat(settings):
        for one in value if isinstance(value, list) else [value]:
            if isinstance(one, str) and len(one) < 1000 and (setting.rpartition(".")[2] in PATHS or "/" in one):
                places[one] = Path(one)
    return {name: digest for name, place in sorted(places.items()) if (digest := digest_of(place))}


def digest_of(place: Path) -> str:
    """Of a file; of a folder with a model (weights, tokenizer, template: `model_files`); of every file of another
    folder. Empty: nothing is there."""
    if place.is_file():
        with place.open("rb") as content:
            return hashlib.file_digest(content, "sha256").hexdigest()[:16]
    if not place.is_dir():
        return ""
    files = {file.relative_to(place).as_posix(): digest_of(file) for file in place.rglob("*") if file.is_file()}
    held = model_files(str(place)) or files
    return hashlib.sha256(json.dumps(held, sort_keys=True).encode()).hexdigest()[:16]


def made_once(folder: Path, settings: Mapping[str, Any], make: Callable[[], object]) -> None:
    """Have ``make`` save a model in ``folder``, its tokenizer last, where it is not there, or was made from other
    ``settings``; that one then stands beside it."""
    plain = plain_facts(settings)
    record = StageRecord.read(folder, folder.name, "start")
    if record.begin(folder, plain, digests_of(plain, {}), ["tokenizer_config.json"]):
        console.print(f"{folder}: {record.why}", soft_wrap=True)
        with saving(folder):
            make()
        record.status = DONE
        record.write(folder)
