"""Is this the same run, and what differs: settings by their flat names, and the rows, in one sentence each."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from datasets import Image

FLAT = ("arguments", "sampling")
"""Sections whose settings stand in a recipe without a section's name."""


@dataclass(frozen=True)
class Difference:
    """One setting, as it was and as it is asked for now."""

    name: str
    old: Any
    new: Any

    def of(self, *names: str) -> bool:
        """Whether it is one of these settings, or inside one of these sections."""
        return any(self.name == name or self.name.startswith(f"{name}.") for name in names)

    def __str__(self) -> str:
        return f"{self.name}: {_shown(self.old)} → {_shown(self.new)}"


def plain_settings(recipe: Any) -> dict[str, Any]:
    """A recipe as JSON gives it back: plain values only."""
    plain: dict[str, Any] = json.loads(json.dumps(asdict(recipe), default=str))
    return plain


def differences(then: Mapping[str, Any], now: Mapping[str, Any]) -> list[Difference]:
    """What differs between two recipes of plain values, by the names that a recipe gives its settings."""
    before, after = dict(_flat(then)), dict(_flat(now))
    names = sorted({*before, *after})
    found = [Difference(name, before.get(name), after.get(name)) for name in names]
    return [one for one in found if one.old != one.new]


def refuse_other_settings(
    folder: Path,
    then: Mapping[str, Any],
    now: Mapping[str, Any],
    may_differ: Callable[[Difference], bool] = lambda one: False,
) -> list[Difference]:
    """The differences that ``may_differ``: nothing that was made follows from them. ValueError that names the
    others."""
    found = differences(then, now)
    if refused := [one for one in found if not may_differ(one)]:
        raise ValueError(
            f"`output_dir` {str(folder)!r} holds a run with other settings: {'; '.join(map(str, refused))}. Choose "
            "another "
            "`--output_dir`, or give --overwrite"
        )
    return found


def _flat(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted name → value. Flat settings have no section; what is empty or unset does not appear."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            inside = f"{name}.{key}" if name else str(key)
            yield from _flat(item, "" if inside in FLAT else inside)
    elif isinstance(value, list) and any(isinstance(item, Mapping) for item in value):
        for place, item in enumerate(value):
            yield from _flat(item, f"{name}.{place}")
    elif value is not None and value != []:
        yield name.replace(".arguments.", "."), value


def _shown(value: Any) -> str:
    text = "not set" if value is None else repr(value) if isinstance(value, str) else str(value)
    return text if len(text) <= 120 else f"{text[:117]}…"


def rows_fingerprint(rows: Any) -> dict[str, Any]:
    """Number and short hash of the rows in their order: names and values of their columns, an image by its bytes."""
    for name, feature in (rows.features or {}).items():
        if isinstance(feature, Image):
            rows = rows.cast_column(name, Image(decode=False))
    digest = hashlib.sha256()
    for row in rows:
        digest.update(json.dumps(row, sort_keys=True, default=_plain).encode() + b"\n")
    return {"count": len(rows), "fingerprint": digest.hexdigest()[:12]}


def _plain(value: Any) -> str:
    """What JSON has no form for; never an address in memory."""
    return hashlib.sha256(value).hexdigest() if isinstance(value, bytes) else f"<{type(value).__name__}> {_text(value)}"


def _text(value: Any) -> str:
    return str(value) if type(value).__repr__ is not object.__repr__ and " at 0x" not in repr(value) else ""


def refuse_other_rows(folder: Path, then: Any, rows: Any) -> None:
    """ValueError where the rows are not those that the run began with (``rows_fingerprint``; None: it does not say)."""
    now = rows_fingerprint(rows)
    if then is not None and then != now:
        raise ValueError(
            f"the data of the run in {str(folder)!r} has changed since: {then['count']} rows ({then['fingerprint']}) → "
            f"{now['count']} rows ({now['fingerprint']}). A resumed run goes on in the same order through the same "
            "rows: bring them back, or choose another `--output_dir`, or give --overwrite"
        )
