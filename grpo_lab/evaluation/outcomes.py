"""One graded completion (`Outcome`), and the two files it is kept in: parquet for tools, jsonl for eyes and `grep`."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal

from grpo_lab.evaluation.files import write_json_lines, write_parquet
from grpo_lab.evaluation.statistics import is_number
from grpo_lab.verifiers.correct import CORRECT_FROM
from grpo_lab.visible import encodable

Kind = Literal["greedy", "sampled"]


@dataclass(frozen=True)
class Outcome:
    """What the model wrote for one problem, and what the reward said of it.

    problem     index of the row in the evaluated rows
    kind        "greedy" (one per problem) or "sampled"
    sample      0 for greedy; 0 … n_samples − 1 for sampled
    question    the plain prompt, or the last user message
    prompt      exactly the text the model continued (template included)
    solution    the gold answer as it stood in the column `solution`; None where the rows have no such column
    completion  what the model wrote, special tokens removed
    tokens      tokens it wrote, the end-of-sequence token included
    truncated   it reached max_new_tokens without an end-of-sequence token
    score       the reward; None: unscorable, counted apart and in no accuracy
    answer      the answer that maj@k lets vote; None: none found, or no reader for answers was given
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

    @property
    def correct(self) -> bool | None:
        return None if self.score is None else self.score >= CORRECT_FROM


def write_outcomes(outcomes: Sequence[Outcome], folder: Path) -> None:
    """`outcomes.parquet` and `outcomes.jsonl` in ``folder``; the same rows and columns in both, `correct` added."""
    records = [_record(outcome) for outcome in outcomes]
    write_json_lines(folder / "outcomes.jsonl", records)

    import pyarrow as pa

    text, whole, flag = pa.string(), pa.int64(), pa.bool_()
    types = {"problem": whole, "sample": whole, "tokens": whole, "truncated": flag, "score": pa.float64()}
    schema = pa.schema([(f.name, types.get(f.name, text)) for f in fields(Outcome)] + [("correct", flag)])
    write_parquet(folder / "outcomes.parquet", pa.Table.from_pylist(records, schema=schema))


def read_outcomes(folder: Path) -> list[Outcome]:
    """The rows of `outcomes.jsonl`; ValueError with file and line number where one cannot be read."""
    path = folder / "outcomes.jsonl"
    with path.open(encoding="utf-8", newline="\n") as lines:
        return [_outcome(line, number, path) for number, line in enumerate(lines, start=1)]


def _outcome(line: str, number: int, path: Path) -> Outcome:
    names = [f.name for f in fields(Outcome)]
    try:
        record = json.loads(line)
        outcome = Outcome(**{name: record[name] for name in names})
        _check_types(outcome)
        return outcome
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise ValueError(f"{path}, line {number}: not an outcome with the fields {names} ({error!r})") from error


def _check_types(outcome: Outcome) -> None:
    wrong = [
        *(name for name in ("problem", "sample", "tokens") if type(getattr(outcome, name)) is not int),
        *(name for name in ("kind", "question", "prompt", "completion") if not isinstance(getattr(outcome, name), str)),
        *(name for name in ("solution", "answer") if not isinstance(getattr(outcome, name), str | None)),
        *(["truncated"] if type(outcome.truncated) is not bool else []),
        *(name for name in ("score", "tokens") if not is_number(getattr(outcome, name) or 0)),
    ]
    if wrong:
        raise TypeError(f"of the wrong type, or no finite number: {wrong}")


def _record(outcome: Outcome) -> dict[str, Any]:
    record: dict[str, Any] = encodable(asdict(outcome) | {"correct": outcome.correct})
    return record


def as_text(value: object) -> str | None:
    """A gold answer as text: strings as they are, None as None, anything else as JSON."""
    if value is None or isinstance(value, str):
        return value
    return json.dumps(value, ensure_ascii=False, default=str)


def of_kind(outcomes: Iterable[Outcome], kind: Kind) -> list[Outcome]:
    """The greedy ones, or the sampled ones."""
    return [outcome for outcome in outcomes if outcome.kind == kind]
