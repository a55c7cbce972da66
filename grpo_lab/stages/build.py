"""Build: one file of rows to train on out of several, mixed by weights or counts, without the same row twice."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar

from pydantic import Field

from grpo_lab.curation.rejection import in_form_of, text_of
from grpo_lab.io import write_json_lines
from grpo_lab.recipe.rows import load_rows
from grpo_lab.recipe.sections import DataSection
from grpo_lab.runs.console import told
from grpo_lab.runs.stage import At, Facts
from grpo_lab.settings import Count, Number, Whole, settings
from grpo_lab.stages.sample import read_lines
from grpo_lab.stages.select import GOLD, ROWS
from grpo_lab.visible import encodable

Rows = list[dict[str, Any]]


@settings(bare="file")
class Source:
    """Where rows come from, and how many. Without ``weight`` and ``count``: all of them.

    Args:
        file: JSON lines with ``prompt`` and ``completion``, as stages leave them.
        data: in place of a file, rows of a loader with a ``worked_solution``.
        weight: its share of the mix, against the other sources' weights; the mix is the largest that repeats no row.
    """

    file: str | None = None
    data: DataSection | None = None
    weight: Annotated[Number, Field(gt=0)] | None = None
    count: Count | None = None

    def __post_init__(self) -> None:
        if (self.file is None) == (self.data is None) or None not in (self.weight, self.count):
            raise ValueError("a source of `rows` is a `file` or `data`, and has a `weight`, a `count` or neither")

    def rows(self, name: str) -> Rows:
        if self.data is None:
            found = read_lines(Path(str(self.file)))
        else:
            loaded = enumerate(encodable(load_rows(self.data, f"rows.{name}.data").to_list()))
            found = [
                {"prompt": row["prompt"], "completion": row.get(GOLD) and in_form_of(row["prompt"], row[GOLD])}
                | {"row": number, "problem": row}
                for number, row in loaded
            ]
        if any(row.get("prompt") is None or row.get("completion") is None for row in found):
            lacks = "`prompt` or `completion`" if self.data is None else f"`{GOLD}`"
            raise ValueError(f"`rows.{name}`: {self.file or told(self.data)} has a row without {lacks}")
        return [{**row, "source": name} for row in found]


@settings()
class Build:
    """``build``: row files mixed, drawn and shuffled by ``seed``."""

    leaves: ClassVar[Mapping[str, str]] = {"rows": ROWS}
    rows: Annotated[Mapping[str, Source], Field(min_length=1)]
    seed: Whole = 0

    def __post_init__(self) -> None:
        weighed = [name for name, source in self.rows.items() if source.weight is not None]
        if weighed and (others := [name for name in self.rows if name not in weighed]):
            raise ValueError(f"`rows.{weighed[0]}` has a `weight` and `rows.{others[0]}` has none; weigh all or none")

    def plan(self) -> str:
        return "; ".join(f"{name}: {told(source)}" for name, source in self.rows.items())

    def run(self, at: At) -> Facts:
        asked, different = [row for name, source in self.rows.items() for row in source.rows(name)], dict[str, Any]()
        for row in asked:  # the same prompt with the same words of an answer stays where it stands first
            different.setdefault(json.dumps([row["prompt"], text_of(row["completion"]).split()]), row)
        found = {name: [row for row in different.values() if row["source"] == name] for name in self.rows}
        counts, draw = self.counts({name: len(rows) for name, rows in found.items()}), random.Random(self.seed)
        chosen = [row for name, rows in found.items() for row in draw.sample(rows, counts[name])]
        draw.shuffle(chosen)
        if not chosen:
            raise ValueError(f"`rows` come to none: there were {len(asked)}, and {counts} are asked for")
        write_json_lines(at.folder / ROWS, chosen)
        dropped = {"the same row": len(asked) - len(different), "not drawn": len(different) - len(chosen)}
        return {"rows": len(chosen), "kept": len(chosen), "sources": counts, "dropped": dropped}

    def counts(self, there: Mapping[str, int]) -> dict[str, int]:
        """Rows to draw of each source. ValueError for more than there are."""
        weights = {name: float(source.weight) for name, source in self.rows.items() if source.weight is not None}
        unit = min((there[name] / weight for name, weight in weights.items()), default=0.0)
        wanted = {name: there[name] if one.count is None else one.count for name, one in self.rows.items()}
        wanted |= {name: int(unit * weight + 1e-9) for name, weight in weights.items()}
        if short := [name for name in wanted if wanted[name] > there[name]]:
            raise ValueError(
                f"`rows.{short[0]}.count` asks for {wanted[short[0]]:,} rows of {short[0]!r}, which has "
                f"{there[short[0]]:,} different ones; ask for fewer, or bring more"
            )
        return wanted
