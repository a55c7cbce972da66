"""A YAML file and ``--key value`` words of the command line → one mapping, not yet looked at."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml


def read_yaml(path: str | Path, overrides: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The mapping in a YAML file with ``--key value`` overrides. ValueError: no such file, no YAML, no mapping."""
    file = Path(path)
    if not file.is_file():
        raise ValueError(f"`--config` is {str(path)!r}: no such file; recipes are YAML files, see recipes/")
    written = _parsed(file.read_text(encoding="utf-8"), f"recipe {str(path)!r}")
    if not isinstance(written, dict):
        raise ValueError(f"recipe {str(path)!r} holds a {type(written).__name__}; it must be a mapping of settings")
    for key, value in (overrides or {}).items():
        _set(written, key, value)
    return written


def _set(written: dict[str, Any], key: str, value: Any) -> None:
    *path, last = key.split(".")
    place: Any = written
    for step in path:
        place = place[_index(place, step, key)] if isinstance(place, list) else place.setdefault(step, {})
        if not isinstance(place, dict | list):
            raise ValueError(f"`--{key}`: {step!r} is not a section of the recipe")
    place[_index(place, last, key) if isinstance(place, list) else last] = value


def _index(place: list[Any], step: str, key: str) -> int:
    if not (step.isascii() and step.isdigit() and int(step) < len(place)):
        raise ValueError(
            f"`--{key}`: {step!r} is no place of a list with {len(place)} entries; places are 0 to {len(place) - 1}"
        )
    return int(step)


def parse_overrides(words: Sequence[str]) -> dict[str, Any]:
    """``--key value --other.key=value`` → a mapping; values are read as YAML (``1e-5``, ``true``, ``{a: 1}``)."""
    found: dict[str, Any] = {}
    rest = list(words)
    while rest:
        word = rest.pop(0)
        if not word.startswith("--") or word == "--":
            raise ValueError(f"did not expect {word!r} on the command line; settings are given as --key value")
        key, equals, value = word[2:].partition("=")
        if not equals:
            value = rest.pop(0) if rest and not rest[0].startswith("--") else "true"
        found[key.replace("-", "_") if "." not in key else key] = _value(value, key)
    return found


def _value(text: str, key: str) -> Any:
    value = _parsed(text, f"`--{key}` {text!r}")
    if isinstance(value, str):  # YAML 1.1 reads 1e-5 as text
        try:
            return float(value) if any(c.isdigit() for c in value) else value
        except ValueError:
            return value
    return value


def _parsed(text: str, what: str) -> Any:
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(f"{what} is no YAML: {error}") from error
