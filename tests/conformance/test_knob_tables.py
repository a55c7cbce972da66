"""The tables of knobs in docs/algorithms say what the classes have: every name, every field, every default."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from grpo_lab.advantages import RULES, TOKEN_RULES
from grpo_lab.objectives import AGGREGATIONS, CORRECTIONS, RATIO_LEVELS, SURROGATES
from grpo_lab.registry import knobs_of

DOCS = Path(__file__).resolve().parents[2] / "docs" / "algorithms"


def table(page: str, header: str) -> list[list[str]]:
    """The cells of the table whose first line begins with ``header``."""
    lines = (DOCS / page).read_text(encoding="utf-8").splitlines()
    start = next(number for number, line in enumerate(lines) if line.startswith(header))
    rows = []
    for line in lines[start + 2 :]:
        if not line.startswith("|"):
            break
        rows.append([cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]])
    return rows


def in_words(part: Any) -> str:
    return ", ".join(f"`{name}` ({default})" for name, default in knobs_of(part).items()) or "none"


@pytest.mark.parametrize(
    ("page", "header", "parts"),
    [
        ("surrogates.md", "| name | class | knobs", SURROGATES),
        ("advantages.md", "| name | class | knobs", {**RULES, **TOKEN_RULES}),
        ("sampler_correction.md", "| name | class | knobs", CORRECTIONS),
    ],
    ids=["surrogates", "advantages", "corrections"],
)
def test_knobs_are_the_fields(page: str, header: str, parts: Mapping[str, Any]) -> None:
    rows = {row[0]: row[1:3] for row in table(page, header)}
    assert rows == {f"`{name}`": [f"`{part.__name__}`", in_words(part)] for name, part in parts.items()}


def test_which_surrogates_read_the_ratio() -> None:
    rows = {row[0].strip("`"): row[3] for row in table("surrogates.md", "| name | class | knobs")}
    assert rows == {name: "yes" if getattr(part, "reads_ratio", True) else "no" for name, part in SURROGATES.items()}


def test_every_level_and_aggregation_is_there() -> None:
    assert [row[0].strip("`") for row in table("surrogates.md", "| level |")] == list(RATIO_LEVELS)
    assert {row[0].strip("`") for row in table("aggregation.md", "| name |")} == AGGREGATIONS.keys()
