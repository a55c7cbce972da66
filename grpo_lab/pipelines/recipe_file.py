"""A YAML file and ``--key value`` words of the command line → one mapping, not yet looked at."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from grpo_lab.pipelines.strict_yaml import parsed

#: Sections that are also written as a bare name: ``objective: dr_grpo`` is ``objective: {name: dr_grpo}``.
NAMED = ("objective", "advantage", "sampler", "update", "reward", "environment_factory")
LISTS_OF_NAMED = ("rewards", "callbacks", "tools")


def read_yaml(path: str | Path, overrides: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The mapping in a YAML file with ``--key value`` overrides. ValueError: no such file, no YAML, no mapping."""
    file = Path(path)
    if not file.is_file():
        raise ValueError(f"`--config` is {str(path)!r}: no such file; recipes are YAML files, see recipes/")
    try:
        written = parsed(file.read_text(encoding="utf-8"), f"recipe {str(path)!r}")
    except UnicodeDecodeError as error:
        raise ValueError(f"recipe {str(path)!r} is no text in UTF-8: {error}") from error
    if not isinstance(written, dict):
        raise ValueError(f"recipe {str(path)!r} holds a {type(written).__name__}; it must be a mapping of settings")
    for key, value in (overrides or {}).items():
        _set(written, key, value)
    return written


def _set(written: dict[str, Any], key: str, value: Any) -> None:
    """Put ``value`` at the dotted ``key``. A bare name on the way becomes the mapping ``{name: …}`` that it stands for."""
    *path, last = key.split(".")
    place: Any = written
    before = ""
    for step in path:
        at: Any = _index(place, step, key) if isinstance(place, list) else step
        if isinstance(place, dict) and place.get(at) is None:
            place[at] = {}
        if isinstance(place[at], str) and (step in NAMED if isinstance(place, dict) else before in LISTS_OF_NAMED):
            place[at] = {"name": place[at]}
        if not isinstance(place[at], dict | list):
            raise ValueError(
                f"`--{key}`: {step!r} is {place[at]!r} in the recipe, and not a section that holds {last!r}"
            )
        place, before = place[at], step
    place[_index(place, last, key) if isinstance(place, list) else last] = value


def _index(place: list[Any], step: str, key: str) -> int:
    if not (step.isascii() and step.isdigit() and int(step) < len(place)):
        raise ValueError(
            f"`--{key}`: {step!r} is no place of a list with {len(place)} entries; places are 0 to {len(place) - 1}"
        )
    return int(step)


def parse_overrides(words: Sequence[str]) -> dict[str, Any]:
    """``--key value --other.key=value`` → a mapping; values are read as YAML (``1e-5``, ``true``, ``{a: 1}``).

    A flat key without a value is ``true`` (``--use_cpu``; a setting that is no switch refuses that later). ValueError for a
    dotted one, which is a number or a name far more often than a switch.
    """
    found: dict[str, Any] = {}
    rest = list(words)
    while rest:
        word = rest.pop(0)
        if not word.startswith("--") or word == "--":
            raise ValueError(f"did not expect {word!r} on the command line; settings are given as --key value")
        key, equals, value = word[2:].partition("=")
        if not equals:
            if rest and not rest[0].startswith("--"):
                value = rest.pop(0)
            elif "." in key:
                raise ValueError(f"`--{key}` has no value; give one, `--{key} VALUE` (a switch: true or false)")
            else:
                value = "true"
        found[key.replace("-", "_") if "." not in key else key] = parsed(value, f"`--{key}` {value!r}")
    return found
