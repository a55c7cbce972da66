"""Stages that build rows.

`build` mixes several sources into one file, by weights or counts, and leaves out rows that repeat another. `fusion`
makes rows that teach Qwen3's thinking and non-thinking modes, out of a model's own judged samples and of worked
solutions.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import field
from pathlib import Path
from typing import Annotated, Any, ClassVar

from pydantic import Field

from grpo_lab.curation.rejection import in_form_of, text_of
from grpo_lab.data.fusion import EMPTY_BLOCK, FusionShares, fusion_rows, goes_on, thought_through
from grpo_lab.engines.generators import render_pair
from grpo_lab.io import as_line, write_json_lines, write_lines
from grpo_lab.reading import read_json_lines
from grpo_lab.recipe.ahead import known_model, to_come
from grpo_lab.recipe.data import load_rows, rows_here
from grpo_lab.recipe.models import load_tokenizer
from grpo_lab.recipe.sections import DataSection, ModelSection
from grpo_lab.runs.console import describe
from grpo_lab.runs.stage import Facts, Workspace
from grpo_lab.settings import Count, Number, Positive, Whole, settings
from grpo_lab.stages.sample import OF_A_LINE, TEXT, check_lines, lines_in, read_lines
from grpo_lab.stages.select import GOLD, ROWS
from grpo_lab.verifiers.verdict import CORRECT_FROM
from grpo_lab.visible import encodable

Rows = list[dict[str, Any]]


@settings(bare="file")
class Source:
    """A source of rows, and how many of them to use. Without ``weight`` and ``count`` all are used.

    Args:
        file: JSON lines with ``prompt`` and ``completion``, as stages write them.
        data: in place of a file, rows of a loader with a ``worked_solution``.
        weight: its share of the mix, relative to the other sources' weights. The mix is the largest one with these
            shares that uses no row twice.
        count: number of rows to draw.
    """

    file: str | None = None
    data: DataSection | None = None
    weight: Annotated[Number, Field(gt=0)] | None = None
    count: Count | None = None

    def check(self, name: str) -> None:
        """Raise ValueError unless it has one of `file` and `data`, and at most one of `weight` and `count`."""
        if (self.file is None) == (self.data is None) or None not in (self.weight, self.count):
            raise ValueError(f"`rows.{name}` is a `file` or `data`, and has a `weight`, a `count` or neither")

    def at_most(self, name: str) -> int | None:
        """Return the number of rows before repeated ones are left out; None if the rows are not on this machine yet.
        Raises ValueError if the file or loader does not exist, or its rows lack the column to learn from. ``name`` is
        the source's key in the recipe, for error messages."""
        if self.data is None:
            place = str(self.file)
            check_lines(place, f"rows.{name}.file", {"prompt": TEXT, "completion": TEXT})
            if to_come(place):
                return None
            return lines_in(Path(place))
        loaded = rows_here(self.data, f"rows.{name}.data")
        if loaded is not None and GOLD not in loaded.column_names:
            raise ValueError(
                f"`rows.{name}`: {describe(self.data)} has no column {GOLD!r}; it has {loaded.column_names}"
            )
        if loaded is None:
            return None
        return len(loaded)

    def rows(self, name: str) -> Iterator[dict[str, Any]]:
        """Yield the rows one after another, each with ``name`` as its ``source``; a file is not read as a whole."""
        if self.data is None:
            found = self._read(name)
        else:
            found = self._loaded(self.data, name)
        return ({**row, "source": name} for row in found)

    def _read(self, name: str) -> Iterator[dict[str, Any]]:
        lines = read_json_lines(str(self.file), {"prompt": TEXT, "completion": TEXT}, f"`rows.{name}`")
        return (row for _, row in lines)

    @staticmethod
    def _loaded(data: DataSection, name: str) -> Iterator[dict[str, Any]]:
        """Yield the rows of a loader, with the worked solution as completion. Raises ValueError if a row has none."""
        for number, row in enumerate(encodable(load_rows(data, f"rows.{name}.data").to_list())):
            if row.get(GOLD) is None:
                raise ValueError(f"`rows.{name}`: {describe(data)} has a row without `{GOLD}`")
            completion = row[GOLD] and in_form_of(row["prompt"], row[GOLD])
            yield {"prompt": row["prompt"], "completion": completion, "row": number, "problem": row}


@settings()
class Build:
    """``build``: mix the sources ``rows`` into one file; ``seed`` decides which rows are drawn and their order."""

    leaves: ClassVar[Mapping[str, str]] = {"rows": ROWS}
    rows: Annotated[Mapping[str, Source], Field(min_length=1)]
    seed: Whole = 0

    def __post_init__(self) -> None:
        for name, source in self.rows.items():
            source.check(name)
        weighed = [name for name, source in self.rows.items() if source.weight is not None]
        if weighed and (others := [name for name in self.rows if name not in weighed]):
            raise ValueError(f"`rows.{weighed[0]}` has a `weight` and `rows.{others[0]}` has none; weigh all or none")

    def plan(self) -> str:
        for name, source in self.rows.items():
            there = source.at_most(name)
            if source.count is not None and there is not None and source.count > there:
                raise _too_few(name, source.count, there)
        return "; ".join(f"{name}: {describe(source)}" for name, source in self.rows.items())

    def run(self, workspace: Workspace) -> Facts:
        asked, found = self._different()
        different = sum(map(len, found.values()))
        counts = self.counts({name: len(lines) for name, lines in found.items()})
        draw = random.Random(self.seed)
        chosen = [line for name, lines in found.items() for line in draw.sample(lines, counts[name])]
        draw.shuffle(chosen)
        if not chosen:
            raise ValueError(f"`rows` come to none: there were {asked}, and {counts} are asked for")
        write_lines(workspace.folder / ROWS, (line.decode() for line in chosen))
        dropped = {"the same row": asked - different, "not drawn": different - len(chosen)}
        facts = {"rows": len(chosen), "kept": len(chosen), "out_of": asked}
        return {**facts, "sources": counts, "dropped": dropped}

    def _different(self) -> tuple[int, dict[str, list[bytes]]]:
        """Return the number of all rows, and source → its rows without repeated ones, as lines to write (which take
        less memory than dicts). Of rows with the same prompt and the same words in the answer, the first is kept."""
        asked = 0
        seen: set[bytes] = set()
        found: dict[str, list[bytes]] = {name: [] for name in self.rows}
        for name, source in self.rows.items():
            for row in source.rows(name):
                asked += 1
                same = json.dumps([row["prompt"], text_of(row["completion"]).split()])
                digest = hashlib.blake2b(same.encode(), digest_size=16).digest()
                if digest not in seen:
                    seen.add(digest)
                    found[name].append(as_line(row).encode())
        return asked, found

    def counts(self, there: Mapping[str, int]) -> dict[str, int]:
        """Return source → number of rows to draw. ``there``: source → number of different rows that it has. Raises
        ValueError if a source has fewer than its ``count``."""
        weights = {name: float(source.weight) for name, source in self.rows.items() if source.weight is not None}
        unit = min((there[name] / weight for name, weight in weights.items()), default=0.0)
        wanted = {name: there[name] if one.count is None else one.count for name, one in self.rows.items()}
        wanted |= {name: int(unit * weight + 1e-9) for name, weight in weights.items()}
        for name, count in wanted.items():
            if count > there[name]:
                raise _too_few(name, count, there[name])
        return wanted


def _too_few(name: str, wanted: int, there: int) -> ValueError:
    return ValueError(
        f"`rows.{name}.count` asks for {wanted:,} rows of {name!r}, which has {there:,} different ones; ask for fewer, "
        "or bring more"
    )


@settings()
class Fusion:
    """``fusion``: make rows for `sft`, with thinking and without (`grpo_lab.data.fusion`).

    Args:
        model: the model that will be trained; the rows are checked against its chat template and tokens.
        samples: file of a stage `sample`. Right answers with one closed block of reasoning become thinking rows.
        plain: data sets whose ``worked_solution`` becomes a non-thinking answer, with an empty block before it.
        per_problem: most thinking rows of a problem; the first answers are used.
        shares: where rows have the flag of their mode, and how many rows are dialogues.
        seed: decides every random choice.
    """

    leaves: ClassVar[dict[str, str]] = {"rows": ROWS}
    model: str
    samples: str
    plain: Annotated[tuple[DataSection, ...], Field(min_length=1)]
    per_problem: Positive = 1
    shares: FusionShares = field(default_factory=FusionShares)
    seed: Whole = 0

    def plan(self) -> str:
        known_model(ModelSection(path=self.model), "model")
        check_lines(self.samples, "samples", OF_A_LINE)
        self._answers(rows_here)
        return f"{self.per_problem} of {self.samples} a problem, and {', '.join(map(describe, self.plain))}"

    def run(self, workspace: Workspace) -> Facts:
        lines = read_lines(Path(self.samples), OF_A_LINE)
        thinking = []
        unclosed = 0
        for line in lines:
            pairs = zip(line["completions"], line["scores"], strict=True)
            right = [text_of(one) for one, score in pairs if score is not None and score >= CORRECT_FROM]
            whole = [text for text in right if thought_through(text)]
            unclosed += len(right) - len(whole)
            kept = {"prompt": line["problem"]["prompt"], "row": line["row"], "problem": line["problem"]}
            thinking += [{**kept, "answer": text} for text in list(dict.fromkeys(whole))[: self.per_problem]]
        if not thinking:
            raise ValueError(
                f"{self.samples} has no right answer of {len(lines)} problems with one closed <think> block before it; "
                "sample from a model that reasons in one, with more `n_samples` or a longer `max_completion_length`"
            )
        plain = self._answers(load_rows)
        rows, flags = fusion_rows(thinking, plain, self.shares, self.seed)
        tokens = sum(check_rendering(rows, load_tokenizer(ModelSection(path=self.model)), self.model))
        write_json_lines(workspace.folder / ROWS, [encodable(row) for row in rows])
        kinds = {"thinking": len(thinking), "non_thinking": len(plain), **{f"flag_{one}": flags[one] for one in flags}}
        return {"rows": len(rows), **kinds, "dropped": {"no_closed_reasoning": unclosed}, "trained_tokens": tokens}

    def _answers(self, load: Callable[..., Any]) -> Rows:
        """Return prompts and answers of the non-thinking rows; none of a data set for which ``load`` returns None.
        Raises ValueError if a data set has no worked solutions."""
        found: Rows = []
        for place, section in enumerate(self.plain):
            rows = load(section, f"plain.{place}")
            if rows is not None and "worked_solution" not in rows.column_names:
                raise ValueError(f"`plain.{place}` has no column 'worked_solution'; it has {rows.column_names}")
            found += [{"prompt": row["prompt"], "answer": row["worked_solution"]} for row in rows or ()]
        return found


def check_rendering(rows: Rows, tokenizer: Any, model: str) -> Iterator[int]:
    """Yield the number of trained tokens of every row.

    Raises ValueError if the model's chat template does not let the rows choose the mode. What is rendered of prompt and
    completion must begin with what is rendered of the prompt alone, and the row's think block must follow.
    """
    for number, row in enumerate(rows, start=1):
        asked, whole = render_pair(row["prompt"], row["completion"], tokenizer, continues=goes_on(row))
        if row["mode"] == "think":
            block = ""
            if row["flag"] != "cut":
                block = "<think>"
        else:
            block = EMPTY_BLOCK
        if not whole.text.startswith(asked.text + block) or whole.ids[: len(asked.ids)] != asked.ids:
            said = whole.text[max(len(asked.text) - 20, 0) : len(asked.text) + len(block)]
            raise ValueError(
                f"the chat template of {model!r} cannot switch modes: row {number} asks for `{row['mode']}`, and where "
                f"its completion begins stands {said!r}. The prompt has to end before the <think> block, as with the "
                "hybrid Qwen3 models; a template that opens the block itself is of a model that always thinks"
            )
        yield len(whole.ids) - len(asked.ids)
