"""load_math and the reading of \\boxed, on hand-written rows, on bad input, and on the real files where they are."""

import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_lab.data import load_math
from grpo_lab.data.benchmarks import last_boxed
from unit.data.test_data_gsm8k import write


@pytest.mark.parametrize(
    ("text", "inside"),
    [
        (r"so \boxed{5}.", "5"),
        (r"\boxed{\frac{1}{2}} and then \boxed{ \frac{3}{4} }", r"\frac{3}{4}"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\fbox{x}", "x"),
        (r"$\boxed 7$", "7"),
        (r"\boxed{open \frac{1}{2}", None),
        (r"\boxed{}", None),
        (r"\boxed", None),
        ("none", None),
        ("", None),
        (r"so \boxed 3.5.", "3.5"),  # a bare box holds the whole number
        (r"so \boxed 1,234.", "1,234"),
        (r"so $\boxed .5$", ".5"),
        (r"so \boxed 7, as said", "7"),
    ],
)
def test_last_boxed(text: str, inside: str | None) -> None:
    assert last_boxed(text) == inside


@given(st.text(alphabet="\\{}boxed 1a", max_size=60))
def test_last_boxed_takes_any_text(text: str) -> None:
    inside = last_boxed(text)
    assert inside is None or inside in text


def test_last_boxed_is_linear_in_hostile_text() -> None:
    start = time.process_time()
    assert last_boxed("\\boxed{" * 15_000) is None
    assert last_boxed("\\boxed{" + "{" * 100_000 + "}" * 100_000 + "}") is not None
    assert time.process_time() - start < 2.0


@pytest.mark.parametrize(
    ("row", "gold"),
    [
        ({"problem": "Q?", "gold_answer": r"\frac12", "solution": r"… \boxed{0.5}"}, r"\frac12"),
        ({"problem": "Q?", "answer": "042"}, "042"),
        ({"question": "Q?", "answer": 42}, "42"),
        ({"problem": "Q?", "solution": r"a \boxed{1}, b \boxed{2}."}, "2"),
    ],
)
def test_field_names_of_public_variants(tmp_path: Path, row: dict[str, Any], gold: str) -> None:
    loaded = load_math(write(tmp_path / "t.jsonl", row))[0]
    assert (loaded["question"], loaded["solution"], loaded["template"]) == ("Q?", gold, "qwen_math")
    assert loaded.get("worked_solution") == row.get("solution")


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{"problem": "Q?", "solution": "it is 2"}], r"line 1: no complete \\boxed.*in column 'solution'"),
        ([{"problem": "Q?", "level": 3}], r"missing column.*its columns are problem, level"),
        ([{"problem": "Q?", "answer": ""}], r"line 1: column 'answer' is ''"),
        ([], r"no rows"),
    ],
)
def test_bad_rows_are_named(tmp_path: Path, rows: list[Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_math(write(tmp_path / "bad.jsonl", *rows))


def test_levels_keep_their_problems(tmp_path: Path) -> None:
    rows = [
        {"problem": "a", "answer": "1", "level": 3},
        {"problem": "b", "answer": "2", "level": "Level 4"},
        {"problem": "c", "answer": "3", "level": "Level ?"},  # two of MATH's have it
        {"problem": "d", "answer": "4", "level": 13},
        {"problem": "e", "answer": "5", "level": None},
    ]
    path = write(tmp_path / "t.jsonl", *rows)
    assert load_math(path, levels=[3, 4])["question"] == ["a", "b"]
    assert load_math(path)["question"] == ["a", "b", "c", "d", "e"]


@pytest.mark.parametrize(
    ("levels", "message"),
    [
        ([1], r"no row of levels \[1\]; it has levels \[3\] \(setting: levels\)"),
        (3, "levels is 3; it must be a list of whole numbers"),
        (["3"], r"levels is \['3'\]; it must be a list"),
        ([True], "it must be a list of whole numbers"),
    ],
)
def test_levels_that_cannot_be(tmp_path: Path, levels: Any, message: str) -> None:
    path = write(tmp_path / "t.jsonl", {"problem": "a", "answer": "1", "level": 3})
    with pytest.raises(ValueError, match=message):
        load_math(path, levels=levels)
    with pytest.raises(ValueError, match="missing column: one of level"):
        load_math(write(tmp_path / "t.jsonl", {"problem": "a", "answer": "1"}), levels=[3])


def test_the_real_files(grpo_lab_data: Path) -> None:
    math500 = load_math(grpo_lab_data / "math")
    assert len(math500) == 500
    assert {"level", "subject", "worked_solution"} <= set(math500.column_names)
    assert len(load_math(grpo_lab_data / "math", levels=[3, 4, 5])) == 105 + 128 + 134
    assert math500[0]["solution"] == r"\left( 3, \frac{\pi}{2} \right)"
    aime = load_math(grpo_lab_data / "math", split="aime24", template="none")
    assert len(aime) == 30
    assert any(gold.startswith("0") for gold in aime["solution"])  # leading zeros kept
    with pytest.raises(ValueError, match=r"no split 'train'.*math500.jsonl"):
        load_math(grpo_lab_data / "math", split="train")
