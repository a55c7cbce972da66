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
from grpo_lab.settings import Count, Number, Positive, Whole, settings
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
        weight: its share of the mix, against the other sources' weights.
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
            found, learned = read_lines(Path(str(self.file))), "completion"
        else:
            found, learned = load_rows(self.data, f"rows.{name}.data").to_list(), GOLD
        if any("prompt" not in row or row.get(learned) is None for row in found):
            raise ValueError(f"`rows.{name}`: {self.file or told(self.data)} has a row without `{learned}` or `prompt`")
        if self.data is None:
            return [{**row, "source": name} for row in found]
        return [
            {"prompt": row["prompt"], "completion": in_form_of(row["prompt"], row[GOLD]), "row": number}
            | {"problem": row, "source": name}
            for number, row in enumerate(encodable(found))
        ]


@settings()
class Build:
    """``build``: row files mixed, drawn and shuffled by ``seed``; ``size``: rows of a mix by weights (default: the most
    that repeats none)."""

    leaves: ClassVar[Mapping[str, str]] = {"rows": ROWS}
    rows: Annotated[Mapping[str, Source], Field(min_length=1)]
    size: Positive | None = None
    seed: Whole = 0

    def __post_init__(self) -> None:
        weighed = [name for name, source in self.rows.items() if source.weight is not None]
        if weighed and (others := [name for name in self.rows if name not in weighed]):
            raise ValueError(f"`rows.{weighed[0]}` has a `weight` and `rows.{others[0]}` has none; weigh all or none")
        if self.size is not None and not weighed:
            raise ValueError(f"`size` is {self.size}, and has an effect only where `rows` have weights; leave it out")

    def plan(self) -> str:
        return "; ".join(f"{name}: {told(source)}" for name, source in self.rows.items())

    def run(self, at: At) -> Facts:
        found, asked, seen = dict[str, Rows](), 0, set[str]()
        for name, source in self.rows.items():
            found[name] = []
            for row in source.rows(name):
                key, asked = json.dumps([row["prompt"], text_of(row["completion"]).split()]), asked + 1
                if key not in seen:  # the same prompt with the same words of an answer stays where it stands first
                    found[name].append(row)
                    seen.add(key)
        counts, draw = self.counts({name: len(rows) for name, rows in found.items()}), random.Random(self.seed)
        chosen = [row for name, rows in found.items() for row in draw.sample(rows, counts[name])]
        draw.shuffle(chosen)
        if not chosen:
            raise ValueError(f"`rows` come to none: there were {asked}, and {counts} are asked for")
        write_json_lines(at.folder / ROWS, chosen)
        dropped = {"the same row": asked - len(seen), "not drawn": len(seen) - len(chosen)}
        return {"rows": len(chosen), "kept": len(chosen), "sources": counts, "dropped": dropped}

    def counts(self, there: Mapping[str, int]) -> dict[str, int]:
        """Rows to draw of each source. ValueError for more than there are."""
        weights = {name: float(source.weight) for name, source in self.rows.items() if source.weight is not None}
        if weights:
            share = {name: weight / sum(weights.values()) for name, weight in weights.items()}
            size = self.size or min(there[name] / share[name] for name in share)
            # without a `size` rounding asks for no row that is not there
            wanted = {name: int(size * share[name] + (0.5 if self.size else 1e-9)) for name in share}
        else:
            wanted = {name: there[name] if one.count is None else one.count for name, one in self.rows.items()}
        if short := [name for name in wanted if wanted[name] > there[name]]:
            setting = "size" if weights else f"rows.{short[0]}.count"
            raise ValueError(
                f"`{setting}` asks for {wanted[short[0]]:,} rows of {short[0]!r}, which has {there[short[0]]:,} "
                "different ones; ask for fewer, or bring more"
            )
        return wanted
