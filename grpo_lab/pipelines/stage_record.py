"""`stage.json` in a stage's folder: what the stage was made from, whether it is done, and its results.

    {"name", "kind", "status": "running" | "done", "why", "made_from": {"settings", "inputs", "files"}, "versions",
     "seconds", "results"}

Written whole before the stage begins and when it is done. A stage is done again only where what it is made from has
changed (its settings; what an input holds, a model by its weights, tokenizer and template; a file or a folder that its
settings name) or what it left is gone; a release of a library is recorded, and makes nothing again."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from grpo_lab.io import write_json
from grpo_lab.recipe.models import model_files
from grpo_lab.runs.differences import Difference, differing, versions
from grpo_lab.runs.folder import STAGE, is_empty, read_marker
from grpo_lab.runs.stage import Facts

PATHS = ("path", "model", "short_model", "teacher", "source", "rows", "samples", "tokenizer")
"""Settings that name a file or a folder without a slash in it, too."""
RUNNING, DONE, WAITING = "running", "done", "waiting"


@dataclass
class StageRecord:
    """One stage as its folder says it; ``status`` waiting: it has not begun."""

    name: str
    kind: str
    status: str = WAITING
    why: str = ""
    made_from: Mapping[str, Any] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    seconds: float = 0.0
    results: Facts = field(default_factory=dict)

    @classmethod
    def read(cls, folder: Path, name: str, kind: str) -> StageRecord:
        """Of the stage that worked in ``folder``. ValueError for a damaged file."""
        found = read_marker(folder / STAGE, "move the folder away, and the stage is done again")
        return cls(**{"name": name, "kind": kind, **{key: found[key] for key in cls.__annotations__ if key in found}})

    def write(self, folder: Path) -> None:
        """To ``folder``, whole."""
        write_json(folder / STAGE, asdict(self))


def begin(folder: Path, record: StageRecord, made_from: Mapping[str, Any], left: Mapping[str, str]) -> bool:
    """Whether the stage in ``folder`` is to be done, with ``record.why``; its folder is then ready: as a killed stage
    left it, or empty, and what was made from something else stands beside it as `<name>.before-<n>`."""
    changed = why_again(record.made_from, made_from) if record.status != WAITING else ""
    missing = [place for place in left.values() if not (folder / place).exists()] if record.status == DONE else []
    if record.status == DONE and not changed and not missing:
        return False
    if changed:
        record.why = f"again: {changed}"
    elif missing:
        record.why = f"again: its {missing[0]} is gone"
    elif record.status == WAITING:
        record.why = "new"
    else:
        record.why = "goes on"
    if folder.is_dir() and not is_empty(folder) and record.why != "goes on":
        aside(folder)
    folder.mkdir(parents=True, exist_ok=True)
    seconds = record.seconds if record.why == "goes on" else 0.0
    record.status, record.made_from, record.versions = RUNNING, made_from, versions()
    record.seconds, record.results = seconds, {}
    record.write(folder)
    return True


def aside(folder: Path) -> Path:
    """Moved to the first `<name>.before-<n>` that is free: a stage's folder is never emptied."""
    number = 1
    while (place := folder.with_name(f"{folder.name}.before-{number}")).exists():
        number += 1
    return folder.rename(place)


def made_from(
    settings: Mapping[str, Any], inputs: Mapping[str, tuple[str, Path]], no_matter: Collection[str]
) -> dict[str, Any]:
    """What a stage follows from. ``settings``: as written, without inputs; ``inputs``: setting → (stage.thing, place);
    ``no_matter``: names of settings that change nothing."""
    kept = {name: value for name, value in settings.items() if name not in no_matter}
    plain = json.loads(json.dumps(kept, default=str))
    named = {place: digest_of(Path(place)) for place in sorted({*_places(plain)})}
    return {
        "settings": plain,
        "inputs": {name: {"from": wanted, "digest": digest_of(place)} for name, (wanted, place) in inputs.items()},
        "files": {place: digest for place, digest in named.items() if digest},
    }


def why_again(then: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """What differs between two of `made_from`, in words; empty: nothing."""
    found = list(map(str, differing(then.get("settings", {}), now["settings"])))
    for name in sorted({*then.get("inputs", {}), *now["inputs"]}):
        before, after = then.get("inputs", {}).get(name, {}), now["inputs"].get(name, {})
        if before.get("from") != after.get("from"):
            found.append(str(Difference(name, before.get("from"), after.get("from"))))
        elif before != after:
            found.append(f"{after['from']} has changed")
    before, after = then.get("files", {}), now["files"]
    found += [f"{name} has changed" for name in sorted({*before} & {*after}) if before[name] != after[name]]
    return "; ".join(found)


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


def _places(value: Any, name: str = "") -> Iterator[str]:
    """Strings in settings that may name something here."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _places(item, str(key))
    elif isinstance(value, list):
        for item in value:
            yield from _places(item, name)
    elif isinstance(value, str) and len(value) < 1000 and (name in PATHS or "/" in value):
        yield value
