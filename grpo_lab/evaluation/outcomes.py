"""Outcomes of an evaluation: the graded completions, and the files that hold them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from grpo_lab.evaluation.statistics import is_number
from grpo_lab.io import write_json_lines, write_whole
from grpo_lab.verifiers.verdict import CORRECT_FROM
from grpo_lab.visible import encodable

if TYPE_CHECKING:
    import pyarrow as pa

Kind = Literal["greedy", "sampled"]


@dataclass(frozen=True)
class Outcome:
    """One completion of a problem, and what the reward said of it.

    Attributes:
        problem: index of the row among the evaluated rows.
        kind: "greedy" (one per problem) or "sampled".
        sample: 0 for greedy; 0 … n_samples − 1 for sampled.
        question: the plain prompt, or the last user message.
        prompt: exactly the text that the model continued, template included.
        solution: the gold answer in the column `solution`, as text; None: the rows have no such column.
        completion: what the model wrote, without special tokens.
        tokens: how many tokens it wrote, the end-of-sequence token included.
        truncated: it reached max_new_tokens without an end-of-sequence token.
        score: the reward; None: unscorable, counted apart and in no accuracy.
        answer: the answer that votes in maj@k; None: none was found, or nothing reads answers.
        thinking: tokens that it wrote before its thinking was closed; None: it did not think.
        log_prob: mean log-prob of the tokens that the model wrote, in nats; None: not asked for.
        measures: name → score of each further reward (`format`, `language`, …); None: unscorable.
        group: the row's value, as text, in the column by which accuracy is reported; None: there is no such column.
        transcript: messages of a completion in several turns, as JSON; None: it is one text.
    """

    problem: int
    kind: Kind
    sample: int
    question: str
    prompt: str
    solution: str | None
    completion: str
    tokens: int
    truncated: bool
    score: float | None
    answer: str | None
    thinking: int | None = None
    log_prob: float | None = None
    measures: Mapping[str, float | None] = field(default_factory=dict, hash=False)
    group: str | None = None
    transcript: str | None = None

    @property
    def correct(self) -> bool | None:
        """Return whether the score is that of a correct answer; None if it is unscorable."""
        if self.score is None:
            return None
        return self.score >= CORRECT_FROM


def write_outcomes(outcomes: Sequence[Outcome], folder: Path) -> None:
    """Write the outcomes to ``folder`` twice: `outcomes.parquet` for tools, `outcomes.jsonl` for eyes and `grep`.

    Both have a row for each outcome, its fields and `correct`. Fields that no outcome uses (`group`, `transcript`,
    `measures`) are left out.
    """
    import pyarrow as pa

    records = [encodable(asdict(outcome) | {"correct": outcome.correct}) for outcome in outcomes]
    measures = []
    if outcomes:
        measures = sorted(outcomes[0].measures)
    used = {name: any(getattr(one, name) is not None for one in outcomes) for name in ("group", "transcript")}
    used["measures"] = bool(measures)
    names = [f.name for f in fields(Outcome) if used.get(f.name, True)] + ["correct"]
    records = [{name: record[name] for name in names} for record in records]
    write_json_lines(folder / "outcomes.jsonl", records)
    arrow_types = {"int": pa.int64(), "bool": pa.bool_(), "float": pa.float64()}
    types = {f.name: arrow_types.get(str(f.type).partition(" ")[0], pa.string()) for f in fields(Outcome)}
    types |= {"correct": pa.bool_(), "measures": pa.struct([(name, pa.float64()) for name in measures])}
    schema = pa.schema([(name, types[name]) for name in names])
    write_parquet(folder / "outcomes.parquet", pa.Table.from_pylist(records, schema=schema))


def write_parquet(path: Path, table: pa.Table) -> None:
    """Write a table to ``path``, whole or not at all."""
    import pyarrow.parquet as pq

    write_whole(path, lambda partial: pq.write_table(table, partial, compression="zstd"))


def read_outcome(row: dict[str, Any], where: str) -> Outcome:
    """Make an outcome from a line of `outcomes.jsonl`. Fields that earlier releases did not write get their defaults.

    Raises:
        ValueError: a field is missing, has the wrong type, or is no finite number. The message begins with ``where``.
    """
    row = {"thinking": None, "log_prob": None, "measures": {}, "group": None, "transcript": None, **row}
    names = [f.name for f in fields(Outcome)]
    if missing := [name for name in names if name not in row]:
        raise ValueError(f"{where} no {missing}")
    if isinstance(row["measures"], dict):
        measures = [*row["measures"].values()]
    else:
        measures = ["none"]
    wrong = [
        *(name for name in ("problem", "sample", "tokens") if type(row[name]) is not int),
        *(name for name in ("kind", "question", "prompt", "completion") if not isinstance(row[name], str)),
        *(name for name in ("solution", "answer", "group", "transcript") if not isinstance(row[name], str | None)),
        *(["truncated"] if type(row["truncated"]) is not bool else []),
        *(name for name in ("score", "tokens", "thinking", "log_prob") if not is_number(row[name] or 0)),
        *(["measures"] if not all(is_number(one or 0) for one in measures) else []),
    ]
    if wrong:
        raise ValueError(f"{where} of the wrong type, or no finite number: {wrong}")
    return Outcome(**{name: row[name] for name in names})


def as_text(value: object) -> str | None:
    """Convert a gold answer to text: a string stays, None stays, anything else becomes JSON."""
    if value is None or isinstance(value, str):
        return value
    return json.dumps(value, ensure_ascii=False, default=str)
