"""Reading a YAML file and `--key value` words of the command line into one mapping, which is not checked yet.

A key may stand once, and a value must mean the same in YAML 1.1 and 1.2. Unlike in ``yaml.safe_load``, ``1e-3`` is a
number and ``2024-05-01`` is text. These are errors, which name the line: a key that stands twice, ``010`` (8 or 10),
``1:30`` (90 or text), ``on`` as a key, an anchor that holds itself, nesting deeper than ``DEEPEST``. A bare ``off`` is
false, as in YAML 1.1. ``parsed`` reads text, ``read_yaml`` a file with its overrides, ``parse_overrides`` the command
line.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from grpo_lab.reading import DEEPEST, HALF, read_text

_AMBIGUOUS = "!ambiguous"
_TWO_WAYS = re.compile(r"[-+]?(?:0[0-9_]+|[1-9][0-9_]*(?::[0-5]?[0-9])+|[0-9][0-9_]*(?::[0-5]?[0-9])+\.[0-9_]*)\Z")
"""Numbers that YAML 1.1 and 1.2 read differently: octal ones, and those of base 60."""
_NOT_TEXT = tuple(f"tag:yaml.org,2002:{kind}" for kind in ("int", "float", "bool"))
"""Tags of values that stay text behind a key that names a file (``OF_FILES``)."""
_OURS = (
    ("tag:yaml.org,2002:float", re.compile(r"[-+]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)[eE][-+]?[0-9]+\Z")),
    (_AMBIGUOUS, _TWO_WAYS),
)
#: Sections that may also be written as a bare name: ``objective: dr_grpo`` is ``objective: {name: dr_grpo}``.
NAMED = ("objective", "advantage", "correction", "sampler", "update", "reward", "environment_factory")
LISTS_OF_NAMED = ("rewards", "callbacks", "tools")
FOLDERS = ("output_dir", "path", "source")
#: Settings that name a folder or a file. Their value is text whatever it looks like: `123`, `1e3`, `off`.
OF_FILES = (*FOLDERS, "stop_file", "samples", "tokenizer", "short_model", "teacher", "against")
PACKAGE = Path(__file__).resolve().parents[1]
PLACES = (PACKAGE / "recipes", PACKAGE.parent / "recipes")
"""Folders of the shipped recipes: in a wheel, and in a checkout."""
QUICKSTART = "quickstart/dr_grpo.yaml"


def _resolvers() -> dict[Any, list[tuple[str, Any]]]:
    """Return the patterns of unquoted text that does not stand for text, in the form that PyYAML needs: first character
    → (tag, pattern). The dumper puts such text in quotes."""
    stock = yaml.SafeLoader.yaml_implicit_resolvers
    kept = {first: [one for one in forms if not one[0].endswith(":timestamp")] for first, forms in stock.items()}
    return kept | {first: [*_OURS, *kept.get(first, ())] for first in "-+0123456789."}


class _Loader(yaml.SafeLoader):
    """A ``SafeLoader`` with our patterns that refuses what the module's docstring lists, and half a character (a lone
    surrogate). Numbers and switches behind a key of ``OF_FILES`` are read as text."""

    yaml_implicit_resolvers = _resolvers()

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._open: list[str | None] = []
        """Anchors of the nodes that are being read, outermost first; None for a node without one."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        event: Any = self.peek_event()
        alias = isinstance(event, yaml.AliasEvent)
        if alias and event.anchor in self._open:
            raise _refused(f"the anchor &{event.anchor} holds itself", event)
        if len(self._open) == DEEPEST:
            raise _refused(f"nested more than {DEEPEST} deep", event)
        self._open.append(None if alias else getattr(event, "anchor", None))
        node = super().compose_node(parent, index)
        self._open.pop()
        return node

    def compose_scalar_node(self, anchor: Any) -> Any:
        node = super().compose_scalar_node(anchor)
        if node.tag == _AMBIGUOUS:
            if ":" in node.value:
                two = "a number of base 60, or text"
            else:
                two = "an octal number, or a decimal one"
            said = f"write the decimal number, or {node.value!r} in quotes for text"
            raise _refused(f"`{node.value}` is {two}: {said}", node)
        if half := HALF.search(node.value):
            raise _refused(f"{half[0]!a} is half of a character (a lone surrogate), which no file can hold", node)
        return node

    def compose_mapping_node(self, anchor: Any) -> Any:
        node = super().compose_mapping_node(anchor)
        first: dict[tuple[str, str], int] = {}
        for key, _ in node.value:
            if key.tag == "tag:yaml.org,2002:bool":
                raise _refused(f"the key `{key.value}` is read as a switch; put it in quotes", key)
            known = first.get((key.tag, str(key.value)))
            if known is not None:
                raise _refused(f"`{key.value}` stands there twice (first in line {known}); leave one out", key)
            first[key.tag, str(key.value)] = key.start_mark.line + 1
        for key, value in node.value:
            if key.value in OF_FILES and isinstance(value, yaml.ScalarNode) and value.tag in _NOT_TEXT:
                value.tag = "tag:yaml.org,2002:str"
        return node


class _Dumper(yaml.SafeDumper):
    """A ``SafeDumper`` whose text ``_Loader`` reads back as text."""

    yaml_implicit_resolvers = _resolvers()


def _refused(what: str, at: Any) -> yaml.MarkedYAMLError:
    """Return an error that says ``what`` is wrong, with the line of ``at``, a node or an event."""
    return yaml.MarkedYAMLError(problem=what, problem_mark=at.start_mark)


def parsed(text: str, what: str) -> Any:
    """Return the value in YAML ``text``. Raises a ValueError of one line if it is no YAML, or ambiguous; ``what`` is
    the place, for the message."""
    try:
        return yaml.load(text, Loader=_Loader)  # a SafeLoader
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = ""
        if mark is not None and "\n" in text.strip():
            line = f", line {mark.line + 1}"
        said = ", ".join(part for part in (error.context, error.problem) if part)
        raise ValueError(f"{what}{line}: {'' if error.context is None else 'no YAML: '}{said}") from error
    except yaml.reader.ReaderError as error:
        line = ""
        if "\n" in text.strip():
            line = f", line {text.count(chr(10), 0, error.position) + 1}"
        raise ValueError(f"{what}{line}: no YAML: the character {chr(error.character)!a} is not allowed") from error
    except ValueError as error:  # a whole number of more digits than Python reads
        raise ValueError(f"{what}: {error}") from error


def written(settings: Any) -> str:
    """Return ``settings`` as YAML that ``parsed`` reads back."""
    return yaml.dump(settings, Dumper=_Dumper, sort_keys=False)


def read_yaml(
    path: str | Path, overrides: Mapping[str, Any] | None = None, where: str = "the recipe"
) -> dict[str, Any]:
    """Return the mapping in a YAML file, with ``overrides`` put in (dotted key → value, as in ``set_at``).

    ``where``: the setting that names the file, for messages. Raises ValueError if there is no such file, no YAML in it,
    or no mapping.
    """
    file = Path(path)
    if not file.is_file():
        raise ValueError(f"{where} is {str(path)!r}: no such file; recipes are YAML files, see recipes/")
    written = parsed(read_text(file), f"recipe {str(path)!r}")
    if not isinstance(written, dict):
        if written is None:
            seen = "is empty"
        else:
            seen = f"holds a {type(written).__name__}"
        raise ValueError(f"recipe {str(path)!r} {seen}; it must be a mapping of settings")
    for key, value in (overrides or {}).items():
        set_at(written, key, value)
    return written


def set_at(written: dict[str, Any], key: str, value: Any, where: str = "--") -> None:
    """Put ``value`` into ``written`` at the dotted ``key`` (``rewards.0.weight``). Sections that are missing on the way
    are made, and a bare name there becomes the mapping ``{name: …}``.

    Raises ValueError if there is something else on the way; the message writes ``where`` before the key.
    """
    *path, last = key.split(".")
    section: Any = written
    name_of_section = ""
    for step in path:
        place = _place_in(section, step, where + key)
        if isinstance(section, list):
            may_be_bare = name_of_section in LISTS_OF_NAMED
        else:
            may_be_bare = step in NAMED
            if section.get(step) is None:
                section[step] = {}
        if may_be_bare and isinstance(section[place], str):
            section[place] = {"name": section[place]}
        if not isinstance(section[place], dict | list):
            seen = f"{step!r} is {section[place]!r} in the recipe"
            raise ValueError(f"`{where}{key}`: {seen}, and not a section that holds {last!r}")
        section = section[place]
        name_of_section = step
    section[_place_in(section, last, where + key)] = value


def _place_in(section: dict[str, Any] | list[Any], step: str, key: str) -> Any:
    """Return ``step`` of the dotted ``key`` as a key of a mapping, or as an index of a list. Raises ValueError if the
    list has no such entry."""
    if isinstance(section, dict):
        return step
    if not (step.isascii() and step.isdigit() and int(step) < len(section)):
        allowed = f"a list with {len(section)} entries; places are 0 to {len(section) - 1}"
        raise ValueError(f"`{key}`: {step!r} is no place of {allowed}")
    return int(step)


def parse_overrides(words: Sequence[str]) -> dict[str, Any]:
    """Read the words ``--key value --other.key=value`` into a mapping of (dotted) keys to values.

    Values are read as YAML (``1e-5``, ``true``, ``{a: 1}``), except those of ``OF_FILES``, which are text as they stand
    (but ``null``, where a setting may be empty). A flat key without a value is ``true`` (``--use_cpu``); a setting that
    is no switch refuses that later. A dotted key without a value, or one that names a file, is a ValueError: it is a
    number or a name far more often than a switch.
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
            elif "." in key or key.replace("-", "_") in OF_FILES:
                raise ValueError(f"`--{key}` has no value; give one, `--{key} VALUE` (a switch: true or false)")
            else:
                value = "true"
        name = key if "." in key else key.replace("-", "_")
        last = name.rpartition(".")[2]
        verbatim = last in FOLDERS or (last in OF_FILES and value not in ("null", "~"))
        found[name] = value if verbatim else parsed(value, f"`--{key}` {value!r}")
    return found


def shipped_recipe(name: str, places: tuple[Path, ...] = PLACES) -> Path:
    """Return the path of the shipped recipe ``name``, such as ``quickstart/dr_grpo.yaml``. Raises ValueError if this
    installation has none."""
    for place in places:
        if (place / name).is_file():
            return place / name
    raise ValueError(
        f"this installation of grpo_lab ships no recipe {name!r}; looked in {' and '.join(map(str, places))}. Install "
        "a wheel or an editable checkout, or name a file: grpo-lab train --config FILE"
    )


def switched_on(name: str, written: Any) -> bool:
    """Return whether a switch of this name is true anywhere in a recipe."""
    if isinstance(written, Mapping):
        return written.get(name) is True or any(switched_on(name, one) for one in written.values())
    return isinstance(written, list) and any(switched_on(name, one) for one in written)


LONGEST_NAME = 255
"""Most bytes of a file's name."""
LONGEST_PATH = 3800
"""Most bytes of an output folder's path. Linux takes paths of 4,095 bytes, of which the files inside need some."""


def check_folder_name(folder: Any) -> None:
    """Raise ValueError for an ``output_dir`` that is no text, empty, too long, or has a zero byte."""
    if folder in (None, ""):
        raise ValueError("`output_dir` is empty; name a folder, or leave it out")
    if not isinstance(folder, str | Path):
        raise ValueError(f"`output_dir` is {folder!r}; it must be the name of a folder (as text, in quotes)")
    longest = max(len(os.fsencode(part)) for part in Path(folder).absolute().parts)
    whole = len(os.fsencode(Path(folder).absolute()))
    if "\0" in str(folder) or longest > LONGEST_NAME or whole > LONGEST_PATH:
        raise ValueError(
            f"`output_dir` is {str(folder)[:100]!r}, with a name of {longest} bytes in a path of {whole}; at most "
            f"{LONGEST_NAME} and {LONGEST_PATH} bytes, and no zero byte, can be written"
        )
