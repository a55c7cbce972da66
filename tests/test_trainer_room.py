"""The trainer room has no circle and no arrow that runs back up, imports for type checkers and inside functions
included."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from import_graph import circles, graph_of, imports_of_source

ROOT = Path(__file__).resolve().parents[1]


TRAINER = "grpo_lab.trainer"

#: rooms and files from the bottom up: each may import what stands before it, and its own room
ORDER = (
    "trl_import", "trl_bridge", "ranks", "settings", "config", "row_table", "metrics", "ports", "resume", "critic",
    "exactness", "supervised", "step", "generation", "scoring", "arguments", "step_components", "lab_trainer", "named",
)  # fmt: skip


def graph() -> dict[str, set[str]]:
    """Without the package's own ``__init__``, which names what the room offers."""
    found = graph_of(ROOT / "grpo_lab" / "trainer", ROOT)
    found.pop(TRAINER)
    return {module: imports - {TRAINER} for module, imports in found.items()}


def room(module: str) -> str:
    return module.removeprefix(f"{TRAINER}.").split(".")[0]


def upward(found: dict[str, set[str]]) -> list[str]:
    return [
        f"{module} imports {other}"
        for module, imports in found.items()
        for other in imports
        if room(other) != room(module) and ORDER.index(room(other)) > ORDER.index(room(module))
    ]


@pytest.mark.not_fast
def test_no_circle() -> None:
    assert circles(graph()) == []


@pytest.mark.not_fast
def test_no_arrow_up() -> None:
    assert upward(graph()) == []


@pytest.mark.not_fast
def test_every_room_has_its_place() -> None:
    assert {room(module) for module in graph()} == set(ORDER)


@pytest.mark.not_fast
def test_a_planted_circle_is_seen() -> None:
    found = graph()
    source = (
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from grpo_lab.trainer.lab_trainer import LabTrainer\n"
    )
    planted = imports_of_source(source, f"{TRAINER}.row_table", False, set(found))
    assert planted == {f"{TRAINER}.lab_trainer"}
    found[f"{TRAINER}.row_table"] |= planted
    assert len(circles(found)) == 1
    assert f"{TRAINER}.row_table" in circles(found)[0]
    assert upward(found) == [f"{TRAINER}.row_table imports {TRAINER}.lab_trainer"]


DESIGN = ROOT / "docs" / "design.md"
#: where docs/design.md tells the way of one reward, and which file to open for what; below which folder their paths are
WAY = ("<!-- the way of one reward -->", "<!-- end of the way -->", "grpo_lab/trainer")
WHICH = ("<!-- which file -->", "<!-- end of which file -->", "grpo_lab")


def names_of_no_file(text: str, part: tuple[str, str, str]) -> list[str]:
    """Paths that a part of the page names and the package does not have."""
    said = text[text.index(part[0]) : text.index(part[1])]
    named = re.findall(r"`([a-z_/]+(?:\.py|/))`", said)
    return sorted({name for name in named if not (ROOT / part[2] / name).exists()})


@pytest.mark.parametrize("part", [WAY, WHICH], ids=["way", "which file"])
def test_the_page_names_files_that_are_there(part: tuple[str, str, str]) -> None:
    text = DESIGN.read_text(encoding="utf-8")
    assert names_of_no_file(text, part) == []
    assert names_of_no_file(text.replace(part[1], f"`step/gone.py` {part[1]}"), part) == ["step/gone.py"]


def test_the_page_names_every_method_that_is_overridden() -> None:
    from trl import GRPOTrainer

    from grpo_lab import LabTrainer

    text = DESIGN.read_text(encoding="utf-8")
    rows = text[text.index("| method | why |") : text.index("TRL makes rewards and advantages")].splitlines()
    ours = [base for base in LabTrainer.__mro__ if base.__module__.startswith(TRAINER)]
    overridden = {
        name for base in ours for name in vars(base) if callable(vars(base)[name]) and hasattr(GRPOTrainer, name)
    }
    assert {name for row in rows for name in re.findall(r"`(\w+)`", row.split(" | ")[0])} == overridden - {
        "__class_getitem__"
    }


def test_an_import_inside_a_function_is_seen() -> None:
    known = {"a.b", "a.c"}
    assert imports_of_source("def f():\n    from a import c", "a.b", False, known) == {"a.c"}
    assert imports_of_source("from .c import x", "a.b", False, known) == {"a.c"}
