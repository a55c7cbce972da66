"""Golds as the file writes them, by every way in, and whether the right answer is paid."""

from __future__ import annotations

import pickle
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from grpo_lab.data import load_file, load_gsm8k, load_math
from grpo_lab.data.rows import dataset_of, read_rows
from grpo_lab.recipe.data import load_rows
from grpo_lab.recipe.sections import DataSection
from grpo_lab.rewards import AccuracyReward
from grpo_lab.rewards.math.accuracy import HashesReward, gold_answer
from grpo_lab.verifiers.written import WrittenFloat

Q = '{"question": "Q?", "%s": %s}\n'


def solutions(folder: Path, *written: str, column: str = "solution") -> list[Any]:
    file = folder / "rows.jsonl"
    file.write_text("".join(Q % (column, one) for one in written))
    return list(load_file(file)[column])


@pytest.mark.parametrize(
    ("written", "kept"),
    [
        (["0.00005"], ["0.00005"]),
        (["1e22", "5E-7"], ["1e22", "5E-7"]),
        (["0.10"], ["0.10"]),
        (["12345678901234567", "0.5"], ["12345678901234567", "0.5"]),
        (["3", "0.5"], ["3", "0.5"]),
        (["3", '"x"', "0.50", "true", "null"], ["3", "x", "0.50", "true", None]),
        (['["a", 0.10]', '"b"'], ['["a", 0.10]', "b"]),
        (["1" + "0" * 25], ["1" + "0" * 25]),
        (["9" * 401, "1"], ["9" * 401, "1"]),
        (["9" * 5000], ["9" * 5000]),
        (["1e400"], ["1e400"]),
        (["3", "4"], [3, 4]),
        (["0.5", "0.25"], [0.5, 0.25]),
    ],
)
def test_a_gold_of_a_file_is_its_text(tmp_path: Path, written: list[str], kept: list[Any]) -> None:
    assert solutions(tmp_path, *written) == kept


def test_columns_that_are_no_golds_stay_numbers_where_no_digit_is_lost(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    lines = [("1", "0.10", "5", '{"a": 1}'), ("0.5", "1", "12345678901234567", '{"a": "x"}')]
    names = ("pass_rate", "weight", "mixed", "about")
    rows = [", ".join(f'"{name}": {cell}' for name, cell in zip(names, line, strict=True)) for line in lines]
    file.write_text("".join(f'{{"question": "Q?", "solution": "1", {row}}}\n' for row in rows))
    found = load_file(file)
    assert (found["pass_rate"], found["weight"]) == ([1.0, 0.5], [0.1, 1.0])
    assert found["mixed"] == [5, 12345678901234567]
    assert found["about"] == ['{"a": 1}', '{"a": "x"}']


def test_the_benchmarks_read_the_text(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    for load in (load_gsm8k, load_math):
        for written in ("0.00005", "1e22", "0.10", "1" + "0" * 30):
            file.write_text(Q % ("final_answer", written))
            assert load(file)["solution"] == [written]


@pytest.mark.parametrize(
    ("written", "gold"),
    [("1,234", "1234"), ("-1,234,567.50", "-1234567.50"), ("$1,234", "$1234"), ("3,5", "3,5"), ("(1,2)", "(1,2)")],
)
def test_gsm8k_drops_the_commas_of_thousands_alone(tmp_path: Path, written: str, gold: str) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text(Q % ("answer", f'"So\\n#### {written}"'))
    assert load_gsm8k(file)["solution"] == [gold]
    assert HashesReward()(completions=["#### 35"], solution=["3,5"]) == [0.0]


def test_parquet_and_csv(tmp_path: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    single = pyarrow.array([0.1, 0.5], pyarrow.float32())
    exact = pyarrow.array([Decimal("0.10"), Decimal("2.50")])
    double = pyarrow.array([0.00005, 1e22])
    for name, column in {"single": single, "exact": exact, "double": double}.items():
        table = pyarrow.table({"question": ["Q?", "R?"], "answer": column})
        pyarrow.parquet.write_table(table, tmp_path / f"{name}.parquet")
    texts = {name: load_math(tmp_path / f"{name}.parquet")["solution"] for name in ("single", "exact", "double")}
    assert texts == {"single": ["0.1", "0.5"], "exact": ["0.10", "2.50"], "double": ["0.00005", "1" + "0" * 22]}
    assert float(read_rows(tmp_path / "single.parquet", "train")[0]["answer"]) == float(np.float32(0.1))
    (tmp_path / "rows.csv").write_text('question,solution,level\n"Q, ""so""?",0.00005,3\nR?,"1,234",\n')
    found = load_file(tmp_path / "rows.csv")
    assert found["solution"] == ["0.00005", "1,234"]
    assert (found["question"], found["level"]) == (['Q, "so"?', "R?"], ["3", None])
    (tmp_path / "bad.csv").write_text("question,solution\nQ?,1,2\n")
    with pytest.raises(ValueError, match=r"bad\.csv, line 2: 3 cells where the first line names 2 columns"):
        load_file(tmp_path / "bad.csv")


def rows_of_a_team() -> list[dict[str, Any]]:
    return [{"question": "Q?", "solution": 10**25}, {"question": "R?", "solution": 0.5}]


def test_a_teams_loader() -> None:
    section = DataSection(loader=f"{__name__}:rows_of_a_team", template="chat", arguments={})
    assert load_rows(section)["solution"] == ["1" + "0" * 25, "0.5"]


NUMBERS: list[tuple[Any, str | None]] = [
    (0.00005, "0.00005"),
    (1e22, "1" + "0" * 22),
    (18.0, "18"),
    (10**401, "1" + "0" * 401),
    (np.int64(3), "3"),
    (np.float32(0.1), "0.1"),
    (np.float64(5e-5), "0.00005"),
    (np.array(7), "7"),
    (torch.tensor(3), "3"),
    (torch.tensor(0.1), "0.1"),
    (torch.tensor(0.5, dtype=torch.bfloat16), "0.5"),
    (Decimal("0.10"), "0.10"),
    (Decimal("1E+3"), "1000"),
    (Fraction(1, 3), "1/3"),
    (WrittenFloat("0.10"), "0.10"),
    (pickle.loads(pickle.dumps(WrittenFloat("0.10"))), "0.10"),
    (True, None),
    (np.bool_(True), None),
    (float("nan"), None),
    (Decimal("Infinity"), None),
    (np.array([1, 2]), None),
    (10**5000, None),
]


@pytest.mark.parametrize(("value", "text"), NUMBERS, ids=[f"{type(value).__name__}-{text}" for value, text in NUMBERS])
def test_numbers_of_every_library_are_golds(value: Any, text: str | None) -> None:
    assert gold_answer(value) == text


def test_right_answers_to_such_golds_are_paid(strict: AccuracyReward) -> None:
    paid = {
        "0.0015": ["1.5e-3", "1.5E-3", r"1.5\times 10^{-3}", "1.5 x 10^-3", "1.5×10⁻³"],
        "1000000": ["1e6", "1.0e6", "1E+6", "10⁶"],
        "5e-05": ["0.00005", "5e-5", r"5\times10^{-5}"],
        "1e22": ["10^{22}", "1" + "0" * 22],
        "2e - 1": ["2e-1", r"2\mathrm{e}-1", "4.436564"],
        "9" * 401: ["9" * 401],
    }
    unpaid = {
        "0.0015": ["1.5e-4", "-1.5e-3", "1.5"],
        "1.5": ["1.5e-3"],
        "1000000": ["1e7", "6"],
        "5e-05": ["5e", "-5", "13.09"],
        "2e - 1": ["0.2"],
        "1e22": ["1e23", "22"],
        "9" * 401: ["9" * 400, "1"],
        "0.5": ["1e9999", "1e-9999"],
    }
    for table, expected in ((paid, 1.0), (unpaid, 0.0)):
        pairs = [(gold, answer) for gold, answers in table.items() for answer in answers]
        boxes = [rf"\boxed{{{answer}}}" for _, answer in pairs]
        found = strict(completions=boxes, solution=[gold for gold, _ in pairs])
        assert [pair for pair, one in zip(pairs, found, strict=True) if one != expected] == []
    said = ["The answer is 1.5e-3 metres.", "The answer is 1.5 × 10^{-3} metres."]
    assert strict(completions=said, solution=["0.0015", "0.0015"]) == [1.0, 1.0]
    assert strict(completions=said, solution=["1.5", "15"]) == [0.0, 0.0]


def test_made_columns_hold_what_arrow_holds() -> None:
    found = dataset_of([{"n": 2**63, "tags": [1, 2]}, {"n": -1, "tags": None}])
    assert found["n"] == [str(2**63), "-1"]
    assert found["tags"] == [[1, 2], None]
