"""The trainer room has no circle and no arrow that runs back up, imports for type checkers and inside functions included."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from import_graph import circles, graph_of, imports_of_source

ROOT = Path(__file__).resolve().parents[1]
TRAINER = "grpo_lab.trainer"

#: rooms and files from the bottom up: each may import what stands before it, and its own room
ORDER = (
    *(
        "trl_bridge",
        "carried",
        "ranks",
        "settings",
        "config",
        "named_parts",
        "proof",
        "metrics",
        "ports",
        "supervised",
        "resume",
        "critic",
    ),
    *("prompts", "step", "rollout", "scoring", "door", "parts", "lab_trainer", "named"),
)


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


def test_no_circle() -> None:
    assert circles(graph()) == []


def test_no_arrow_up() -> None:
    assert upward(graph()) == []


def test_every_room_has_its_place() -> None:
    assert {room(module) for module in graph()} == set(ORDER)


def test_a_planted_circle_is_seen() -> None:
    found = graph()
    source = (
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from grpo_lab.trainer.lab_trainer import LabTrainer\n"
    )
    planted = imports_of_source(source, f"{TRAINER}.step.row_table", False, set(found))
    assert planted == {f"{TRAINER}.lab_trainer"}
    found[f"{TRAINER}.step.row_table"] |= planted
    assert len(circles(found)) == 1
    assert f"{TRAINER}.step.row_table" in circles(found)[0]
    assert upward(found) == [f"{TRAINER}.step.row_table imports {TRAINER}.lab_trainer"]


DESIGN = ROOT / "docs" / "design.md"
#: where docs/design.md tells the way of one reward; each file of the room stands there once
WAY = ("<!-- the way of one reward -->", "<!-- end of the way -->")


def files_of_the_room() -> set[str]:
    folder = ROOT / "grpo_lab" / "trainer"
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*.py") if path.name != "__init__.py"}


def wrongly_named(text: str, files: set[str]) -> list[str]:
    """Files that the way does not name exactly once, and names that are no file."""
    way = text[text.index(WAY[0]) : text.index(WAY[1])]
    named = re.findall(r"`([a-z_/]+\.py)`", way)
    return sorted(
        [f"{file} stands there {named.count(file)} times" for file in files if named.count(file) != 1]
    ) + sorted({f"{name} is no file of the room" for name in named if name not in files})


def test_the_way_of_one_reward_names_each_file_once() -> None:
    assert wrongly_named(DESIGN.read_text(encoding="utf-8"), files_of_the_room()) == []


@pytest.mark.parametrize(
    ("planted", "found"),
    [("`ports.py`", "ports.py stands there 2 times"), ("`step/gone.py`", "step/gone.py is no file of the room")],
)
def test_a_planted_fault_of_the_way_is_seen(planted: str, found: str) -> None:
    text = DESIGN.read_text(encoding="utf-8").replace(WAY[1], f"{planted} {WAY[1]}")
    assert wrongly_named(text, files_of_the_room()) == [found]


def test_a_new_file_that_the_way_leaves_out_is_seen() -> None:
    text = DESIGN.read_text(encoding="utf-8")
    assert wrongly_named(text, files_of_the_room() | {"new.py"}) == ["new.py stands there 0 times"]


def test_an_import_inside_a_function_is_seen() -> None:
    known = {"a.b", "a.c"}
    assert imports_of_source("def f():\n    from a import c", "a.b", False, known) == {"a.c"}
    assert imports_of_source("from .c import x", "a.b", False, known) == {"a.c"}
