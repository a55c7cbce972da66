"""Make two pages from the code: docs/command_line.md from the parser, and docs/settings.md from ``LabConfig``.

    python scripts/reference_pages.py            # writes both; some seconds

A test compares the pages with what this script would write.
"""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import re
import types
import typing
from pathlib import Path
from typing import Any

from grpo_lab import LabConfig
from grpo_lab.cli import _parser
from grpo_lab.engines.vllm.engine import EngineOptions
from grpo_lab.trainer.settings.parse import OUR_FIELDS, LabSettings
from grpo_lab.trainer.settings.sampler import KNOBS

DOCS = Path(__file__).resolve().parents[1] / "docs"
MADE = "<!-- made by scripts/reference_pages.py: make docs-index -->"
#: settings whose type is only "a mapping" → the class of what is inside
INSIDE = {"rollout.engine": EngineOptions}


def prose(text: str) -> str:
    """Return the text of a docstring or of a help line as Markdown."""
    pieces = " ".join(text.replace("``", "`").split()).split("`")  # every other one is code
    return "`".join(piece if number % 2 else piece.replace("<", "&lt;") for number, piece in enumerate(pieces))


def sentence(text: str) -> str:
    """Return a text as a Markdown sentence, with a capital and a full stop."""
    said = prose(text)
    return said[:1].upper() + said[1:] + ("" if said.endswith(".") else ".")


def cell(text: str) -> str:
    """Return a text as a cell of a Markdown table."""
    return prose(text).replace("|", "\\|")


def table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> list[str]:
    """Return the lines of a Markdown table, and an empty one behind it."""
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    return [*lines, *("| " + " | ".join(row) + " |" for row in rows), ""]


# -- command line ------------------------------------------------------------------------------------------------------


def command_line() -> str:
    """Return the page of the command line."""
    parser = _parser()
    commands = next(action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    said = {action.dest: action.help or "" for action in commands._choices_actions}
    loud = [name for name, command in commands.choices.items() if "--verbose" in command._option_string_actions]
    lines = [
        "# Command line",
        MADE,
        "",
        "Every command prints its options with `--help`, such as `grpo-lab train --help`. Commands with `--config`, "
        "and `quickstart`, also take `--key value` for every setting of their recipe. What a recipe may hold, how "
        "numbers are read, and exit codes: [recipes](recipes.md).",
        "",
        *options(parser, {"help", "command"}),
        f"`--traceback` may stand after every command, too; `--verbose` after {', '.join(loud)}.",
        "",
    ]
    told = {name: rows_of(command, {"help", "traceback", "verbose"}) for name, command in commands.choices.items()}
    common = common_rows(told)
    lines += ["Options that several commands have:", "", *table(HEAD, common)]
    for name, command in commands.choices.items():
        lines += [f"## {name}", sentence(said[name] % {}), ""]
        same = with_the_same_options(told, name)
        if same:
            lines += [f"The options of [{same}](#{same}).", ""]
            continue
        own = [row for row in told[name] if row not in common]
        also = [row[0].split(" ")[0].rstrip("`") + "`" for row in told[name] if row in common]
        lines += [*(table(HEAD, own) if own else []), *([f"Also {', '.join(also)}.", ""] if also else [])]
        lines += loaders(command)
    return "\n".join(lines)


def common_rows(told: dict[str, list[tuple[str, str]]]) -> list[tuple[str, str]]:
    """Return the rows of options that several commands have with the same meaning. Commands with the same options as an
    earlier one do not count."""
    rows = [row for name, some in told.items() if with_the_same_options(told, name) is None for row in some]
    return list(dict.fromkeys(row for row in rows if rows.count(row) > 1))


def with_the_same_options(told: dict[str, list[tuple[str, str]]], name: str) -> str | None:
    """Return the name of an earlier command with the same options, if they are more than nine; else None."""
    earlier = list(told)[: list(told).index(name)]
    return next((other for other in earlier if told[other] == told[name] and len(told[name]) > 9), None)


HEAD = ("option", "what")
#: how the help of an option begins that is an argument of data loaders
OF_LOADERS = re.compile(r"of the loaders? (.+)")


def options(parser: argparse.ArgumentParser, without: set[str]) -> list[str]:
    """Return the table of a parser's options, but those named in ``without``."""
    return table(HEAD, rows_of(parser, without))


def rows_of(parser: argparse.ArgumentParser, without: set[str]) -> list[tuple[str, str]]:
    """Return a row for each option that the parser's help shows. Arguments of data loaders have a table of their
    own."""
    shown = [action for action in parser._actions if action.dest not in without and action.help != argparse.SUPPRESS]
    return [option(action) for action in shown if not OF_LOADERS.match(action.help or "")]


def loaders(parser: argparse.ArgumentParser) -> list[str]:
    """Return a table with a row for each data loader: its arguments, which are options of the command."""
    found: dict[str, list[str]] = {}
    for action in parser._actions:
        names = OF_LOADERS.match(action.help or "")
        for loader in names[1].split(", ") if names else ():
            found.setdefault(loader, []).append(f"`{action.option_strings[0]}`")
    rows = [(f"`{loader}`", ", ".join(names)) for loader, names in found.items()]
    head = ("loader", "its arguments, as options (`--data.KEY` is the same)")
    return table(head, rows) if rows else []


def option(action: argparse.Action) -> tuple[str, str]:
    """Return the row of an option: its names with their value, and what it does, with choices and default."""
    value = "" if action.nargs == 0 else " " + (_metavar(action) or action.dest.upper())
    names = ", ".join(f"`{name}{value}`" for name in action.option_strings) or f"`{_metavar(action) or action.dest}`"
    what = cell((action.help or "") % {"default": action.default, "prog": "grpo-lab"})
    if action.choices:
        what += f"; one of {', '.join(map(str, action.choices))}"
    if action.required and action.option_strings:
        what += "; needed"
    silent = any(action.default is one for one in (None, False, argparse.SUPPRESS)) or action.default == []
    return names, what if silent or "default" in what or action.nargs == 0 else f"{what} (default: {action.default})"


def _metavar(action: argparse.Action) -> str | None:
    if isinstance(action.metavar, tuple):
        return " ".join(action.metavar)
    return action.metavar


# -- settings ----------------------------------------------------------------------------------------------------------


def settings() -> str:
    """Return the page of the settings."""
    said = arguments_of(LabConfig)
    lines = [
        "# Settings",
        MADE,
        "",
        "`LabConfig` takes every argument of `trl.GRPOConfig` and these settings. In a recipe they are keys at the "
        "top level, in Python arguments, on the command line options such as `--update.max_tokens 4096`. A mapping "
        "may also be JSON text. An unknown key is refused with the nearest match, and a contradiction with both "
        "settings. `None` is `null` in YAML, and the default where no other is named.",
        "",
    ]
    kinds = typing.get_type_hints(LabSettings)
    defaults = {field.name: field.default for field in dataclasses.fields(LabConfig)}
    for name in OUR_FIELDS:
        lines += [f"## {name}", sentence(said[name]), ""]
        if dataclasses.is_dataclass(inside := _one_kind(kinds.get(name))):
            lines += keys(name, inside)
        elif defaults[name] is not None:
            lines += [f"Default: {_shown(defaults[name])}.", ""]
        lines += MORE.get(name, list)()
    return "\n".join(lines)


def keys(place: str, kind: Any) -> list[str]:
    """Return a table of the keys of the mapping ``place``, which is read as the dataclass ``kind``, and a table for
    each mapping inside it. If the docstring describes no key, its text without the first paragraph is returned."""
    said = arguments_of(kind)
    kinds = typing.get_type_hints(kind)
    gone = {name for name, one in kinds.items() if one is type(None)}
    fields = [field for field in dataclasses.fields(kind) if field.name != "knobs" and field.name not in gone]
    nested = {field.name: INSIDE.get(f"{place}.{field.name}", _one_kind(kinds[field.name])) for field in fields}
    if not said:  # then the docstring describes all keys together
        return [sentence(text) + "\n" for text in inspect.cleandoc(kind.__doc__ or "").split("\n\n")[1:]]
    rows = []
    for field in fields:
        below = dataclasses.is_dataclass(nested[field.name])
        kind_and_default = ("a mapping, below", "") if below else (_type(kinds[field.name]), _shown(_default(field)))
        rows.append((f"`{field.name}`", *kind_and_default, cell(said.get(field.name, "")) or "–"))
    lines = table(("key", "type", "default", "what"), rows)
    for name, inside in nested.items():
        if dataclasses.is_dataclass(inside):
            lines += [f"### {place}.{name}", *keys(f"{place}.{name}", inside)]
    return lines


def arguments_of(kind: type) -> dict[str, str]:
    """Return field → what the docstring of the dataclass ``kind`` says of it: ``name: …`` below ``Args:``, or the name,
    at least two spaces and a text."""
    fields = {field.name for field in dataclasses.fields(kind)}
    found: dict[str, list[str]] = {}
    at: list[str] | None = None
    for line in inspect.cleandoc(kind.__doc__ or "").splitlines():
        begins = re.match(r" *(\w+)(?:: | {2,})(.*)", line)
        if begins and begins[1] in fields and begins[1] not in found:
            at = found.setdefault(begins[1], [])
            line = begins[2]
        if not line.strip():
            at = None
        if at is not None:
            at.append(line)
    return {name: " ".join(lines) for name, lines in found.items()}


def _one_kind(kind: Any) -> Any:
    """Return ``X`` for the type ``X | None``, and any other type as it is."""
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        others = [one for one in typing.get_args(kind) if one is not type(None)]
        return others[0] if len(others) == 1 else kind
    return kind


def _type(kind: Any) -> str:
    if typing.get_origin(kind) is typing.Literal:
        return " \\| ".join(f"`{one}`" for one in typing.get_args(kind))
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        names = [_type(one) for one in typing.get_args(kind) if one is not type(None)]
        return "number" if names == ["whole number", "number"] else " \\| ".join(names)
    known = {int: "whole number", float: "number", bool: "switch", str: "text", Any: "name or mapping"}
    return known.get(kind) or ("mapping" if typing.get_origin(kind) else kind.__name__)


def _default(field: dataclasses.Field[Any]) -> Any:
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()


def _shown(value: Any) -> str:
    if value is dataclasses.MISSING:
        return "needed"
    return "–" if value is None else f"`{str(value).lower() if isinstance(value, bool) else value}`"


def samplers() -> list[str]:
    rows = []
    for name, knobs in KNOBS.items():
        said = [f"`{knob}` ({'needed' if value is None else _shown(value or None)})" for knob, value in knobs.items()]
        rows.append((f"`{name}`", ", ".join(said)))
    return table(("sampler", "reads (default)"), rows)


PARTS = (
    "Presets, with their parts: [algorithms](algorithms/README.md). "
    "Names and knobs: [surrogates](algorithms/surrogates.md), [aggregations](algorithms/aggregation.md)."
)
RULES_AND_KNOBS = "Names and knobs: [advantages](algorithms/advantages.md)."
CORRECTIONS_AND_KNOBS = "Names and knobs: [corrections](algorithms/sampler_correction.md)."
#: what follows a setting's keys
MORE = {
    "objective": lambda: [PARTS, ""],
    "sampler": samplers,
    "advantage": lambda: [RULES_AND_KNOBS, ""],
    "correction": lambda: [CORRECTIONS_AND_KNOBS, ""],
}
PAGES = {DOCS / "command_line.md": command_line, DOCS / "settings.md": settings}


if __name__ == "__main__":
    for page, made in PAGES.items():
        page.write_text(made(), encoding="utf-8")
