"""One graded completion (`Outcome`), the two files it is kept in, and under what name its answer votes in maj@k."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from grpo_lab.evaluation.statistics import is_number
from grpo_lab.io import json_lines, write_json_lines, write_whole
from grpo_lab.verifiers.canonical import canonical
from grpo_lab.verifiers.verdict import CORRECT_FROM
from grpo_lab.visible import encodable

if TYPE_CHECKING:
    import pyarrow as pa

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
    """`outcomes.parquet` for tools and `outcomes.jsonl` for eyes and `grep`: the same rows in both, `correct` added."""
    import pyarrow as pa

    records = [encodable(asdict(outcome) | {"correct": outcome.correct}) for outcome in outcomes]
    write_json_lines(folder / "outcomes.jsonl", records)
    text, whole, flag = pa.string(), pa.int64(), pa.bool_()
    types = {"problem": whole, "sample": whole, "tokens": whole, "truncated": flag, "score": pa.float64()}
    schema = pa.schema([(f.name, types.get(f.name, text)) for f in fields(Outcome)] + [("correct", flag)])
    write_parquet(folder / "outcomes.parquet", pa.Table.from_pylist(records, schema=schema))


def write_parquet(path: Path, table: pa.Table) -> None:
    import pyarrow.parquet as pq

    write_whole(path, lambda partial: pq.write_table(table, partial, compression="zstd"))


def read_outcomes(folder: Path) -> list[Outcome]:
    """The rows of `outcomes.jsonl`; ValueError with file and line number where one cannot be read."""
    path = folder / "outcomes.jsonl"
    return [_outcome(row, f"{path}, line {number}: not an outcome:") for number, row in json_lines(path)]


def _outcome(row: dict[str, Any] | str, where: str) -> Outcome:
    if isinstance(row, str):
        raise ValueError(f"{where} {row}")
    names = [f.name for f in fields(Outcome)]
    if missing := [name for name in names if name not in row]:
        raise ValueError(f"{where} no {missing}")
    wrong = [
        *(name for name in ("problem", "sample", "tokens") if type(row[name]) is not int),
        *(name for name in ("kind", "question", "prompt", "completion") if not isinstance(row[name], str)),
        *(name for name in ("solution", "answer") if not isinstance(row[name], str | None)),
        *(["truncated"] if type(row["truncated"]) is not bool else []),
        *(name for name in ("score", "tokens") if not is_number(row[name] or 0)),
    ]
    if wrong:
        raise ValueError(f"{where} of the wrong type, or no finite number: {wrong}")
    return Outcome(**{name: row[name] for name in names})


def as_text(value: object) -> str | None:
    """A gold answer as text: strings as they are, None as None, anything else as JSON."""
    if value is None or isinstance(value, str):
        return value
    return json.dumps(value, ensure_ascii=False, default=str)


ReadAnswer = Callable[[str], "str | None"]

_LONGEST_NAME = 200
# Forty digits are more than an answer needs; without a bound "1e999999999" would be expanded for hours.
_DECIMAL = re.compile(r"[-+]?(?:\d{1,40}(?:\.\d{0,40})?|\.\d{1,40})", re.ASCII)
_FRACTION = re.compile(r"([-+]?)(?:\\frac\{(\d{1,40})\}\{(\d{1,40})\}|(\d{1,40})/(\d{1,40}))", re.ASCII)
_THOUSANDS = re.compile(r"[-+]?\d{1,3}(?:,\d{3})+(?![\d,])", re.ASCII)
_SHORT_FRACTION = re.compile(r"\\frac(\d)(\d)", re.ASCII)


def answer_reader(reward: Any) -> ReadAnswer | None:
    """How to read answers where the caller did not say: as `AccuracyReward` (or its kin) does. None for others."""
    from grpo_lab.rewards.math.accuracy import AccuracyReward

    if not isinstance(reward, AccuracyReward):
        return None

    return lambda completion: getattr(reward.read(completion), "text", None)


def vote_key(answer: str) -> str:
    """The name under which an answer votes: numbers and fractions by value (`$1,234.50` and `1234.5` are one, `1/2` and
    `\\frac12` too), all else by its canonical spelling: two that only algebra can match vote apart."""
    text = answer.strip()
    if len(text) > _LONGEST_NAME:
        return text
    text = "".join(canonical(text).split())
    number = text.replace(",", "") if _THOUSANDS.match(text) else _SHORT_FRACTION.sub(r"\\frac{\1}{\2}", text)
    if _DECIMAL.fullmatch(number):
        return str(Fraction(number))
    parts = _FRACTION.fullmatch(number)
    if parts and int(bottom := parts[3] or parts[5]):
        return str(Fraction(int(parts[1] + (parts[2] or parts[4])), int(bottom)))
    return text
