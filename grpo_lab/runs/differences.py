"""Differences between two runs in settings (by flat names), rows and package versions, each in one sentence.

A flat name joins the keys of a nested recipe by dots, such as ``evaluation.max_new_tokens``.
"""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from grpo_lab.io import is_local
from grpo_lab.recipe.models import model_files
from grpo_lab.runs.folder import RUN, is_only_marked, record_of

FLAT = ("arguments", "sampling")
"""Sections whose settings a recipe writes without the section's name."""
OF_NO_FILE = ("name", "output_dir", "keep_models", "max_hours", "stop_file")
"""Settings of a recipe that have no effect on what the files of its run contain."""
PACKAGES = ("grpo_lab", "torch", "transformers", "trl", "accelerate", "peft", "datasets", "math-verify", "vllm")


@dataclass(frozen=True)
class Difference:
    """A setting that differs: its old value, and the one asked for now."""

    name: str
    old: Any
    new: Any

    def of(self, *names: str) -> bool:
        """Return whether the setting is one of ``names``, or stands in a section of one of these names."""
        return any(self.name == name or self.name.startswith(f"{name}.") for name in names)

    def __str__(self) -> str:
        return f"{self.name}: {_shown(self.old)} → {_shown(self.new)}"


def plain_settings(recipe: Any) -> dict[str, Any]:
    """Return a recipe, a dataclass, as the nested mapping that JSON gives back; paths are text."""
    plain: dict[str, Any] = json.loads(json.dumps(asdict(recipe), default=str))
    return plain


def settings_of(recipe: Any, *models: Any) -> dict[str, Any]:
    """Return the settings that decide what a run's files contain, as plain values, for a comparison of two runs.

    ``models``: paths or hub names of the models that the run reads. Of each local one, ``model_files`` in the result
    holds the digests of its files, so that a model with other weights at the same path is a difference.
    """
    said = {name: value for name, value in plain_settings(recipe).items() if name not in OF_NO_FILE}
    return {**said, "model_files": {path: model_files(path) for path in sorted(str(m) for m in models if is_local(m))}}


def earlier_run(
    recipe: Any, command: str, overwrite: bool, settings: Callable[[Any], Mapping[str, Any]], marker: str = RUN
) -> dict[str, Any]:
    """Return what an earlier run of ``command`` has recorded in the recipe's folder; `{}` if there is none to continue.

    There is none in a new folder, with ``overwrite``, and where that run failed before it had written a file of its
    own.

    Args:
        recipe: the recipe that is to be run now.
        command: name of the command, as ``run.json`` has it.
        overwrite: the run begins anew, whatever an earlier one left.
        settings: ``settings(recipe)`` returns the settings that two runs of one folder must have in common.
        marker: file in the folder that records the run.

    Raises:
        ValueError: the folder holds something else, or a run with other settings, which the error names.
    """
    found = record_of(recipe.output_dir, command, marker)
    failed = not found.get("finished") and is_only_marked(recipe.output_dir)
    if overwrite or not found or failed:
        return {}
    if "recipe" in found:
        refuse_other_settings(recipe.output_dir, found["recipe"], settings(recipe))
    return found


def refuse_other_settings(
    folder: Path,
    then: Mapping[str, Any],
    now: Mapping[str, Any],
    may_differ: Callable[[Difference], bool] = lambda one: False,
) -> list[Difference]:
    """Return how the settings of the run in ``folder`` (``then``) differ from those asked for (``now``).

    Raises ValueError, which names them, for differences that ``may_differ`` does not allow; by default it allows none.
    """
    found = differing(then, now)
    if refused := [one for one in found if not may_differ(one)]:
        raise ValueError(
            f"`output_dir` {str(folder)!r} holds a run with other settings: {'; '.join(map(str, refused))}. Choose "
            "another `--output_dir`, or give --overwrite"
        )
    return found


def differing(then: Mapping[str, Any], now: Mapping[str, Any]) -> list[Difference]:
    """Return every setting that is not the same in two mappings of plain values."""
    before = dict(flat(then))
    after = dict(flat(now))
    every = [Difference(name, before.get(name), after.get(name)) for name in sorted({*before, *after})]
    return [one for one in every if one.old != one.new]


def flat(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the flat name and the value of each setting in nested mappings.

    Mappings in a list are numbered, from 0. Sections in ``FLAT``, and any section's ``arguments``, do not appear in
    names. Values that are None, an empty list or an empty mapping are skipped.
    """
    if isinstance(value, Mapping):
        for key, item in value.items():
            inside = f"{name}.{key}" if name else str(key)
            yield from flat(item, "" if inside in FLAT else inside)
    elif isinstance(value, list) and any(isinstance(item, Mapping) for item in value):
        for place, item in enumerate(value):
            yield from flat(item, f"{name}.{place}")
    elif value is not None and value != []:
        yield name.replace(".arguments.", "."), value


def _shown(value: Any) -> str:
    """Return a setting's value as text of at most 118 characters; None reads "not set"."""
    if value is None:
        text = "not set"
    elif isinstance(value, str):
        text = repr(value)
    else:
        text = str(value)
    if len(text) <= 120:
        return text
    return f"{text[:117]}…"


def rows_fingerprint(rows: Any) -> dict[str, Any]:
    """Return ``count``, how many rows there are, and ``fingerprint``, a short hash of them in order: the names and
    values of their columns, an image by its encoded bytes."""
    from datasets import Image  # takes a second to import, and most functions here do not need it

    for name, feature in (rows.features or {}).items():
        if isinstance(feature, Image):
            rows = rows.cast_column(name, Image(decode=False))
    digest = hashlib.sha256()
    for row in rows:
        digest.update(json.dumps(row, sort_keys=True, default=_plain).encode() + b"\n")
    return {"count": len(rows), "fingerprint": digest.hexdigest()[:12]}


def _plain(value: Any) -> str:
    """Return text for a value that JSON cannot hold, the same in every process: bytes become their hash, and an object
    whose `repr` would show an address in memory becomes the name of its class."""
    if isinstance(value, bytes):
        return hashlib.sha256(value).hexdigest()
    has_text = type(value).__repr__ is not object.__repr__ and " at 0x" not in repr(value)
    return f"<{type(value).__name__}> {value if has_text else ''}"


def refuse_other_rows(folder: Path, then: Any, now: Mapping[str, Any]) -> None:
    """Raise ValueError if the rows of the run in ``folder`` are no longer those that it began with.

    ``then`` and ``now``: ``rows_fingerprint`` at the run's beginning (None if it is not recorded: nothing is checked)
    and of the rows that were loaded now.
    """
    if then is not None and then != now:
        raise ValueError(
            f"the data of the run in {str(folder)!r} has changed since: {then['count']} rows ({then['fingerprint']}) → "
            f"{now['count']} rows ({now['fingerprint']}). A resumed run goes on in the same order through the same "
            "rows: bring them back, or choose another `--output_dir`, or give --overwrite"
        )


def versions() -> dict[str, str]:
    """Return the versions of Python, the machine and the packages that numbers depend on."""
    return dict(_versions())


@cache
def _versions() -> dict[str, str]:
    found = {"python": platform.python_version(), "machine": f"{platform.machine()} {platform.system()}"}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def other_releases(record: Mapping[str, Any]) -> list[str]:
    """Return "name old → new" for each version that differs from those in ``record``, a run's ``run.json``; an empty
    list if it has none."""
    then = record.get("versions") or {}
    now = versions()
    names = sorted({*then, *now}) if then else []
    changed = [name for name in names if then.get(name) != now.get(name)]
    return [f"{name} {then.get(name, 'not installed')} → {now.get(name, 'not installed')}" for name in changed]
