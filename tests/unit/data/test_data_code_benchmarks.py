"""load_humaneval and load_mbpp: columns, what stands in the tests, bad input; HumanEval's own file where it is."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from grpo_lab.data import load_humaneval, load_mbpp
from grpo_lab.rewards import CodeReward
from unit.data.test_data_gsm8k import write

HUMANEVAL = {
    "task_id": "HumanEval/38",
    "prompt": 'import math\n\ndef shift(n):\n    return n + 1\n\n\ndef back(n):\n    """Undo shift."""\n',
    "entry_point": "back",
    "canonical_solution": "    return n - 1\n",
    "test": "def check(candidate):\n    for n in range(5):\n        assert candidate(shift(n)) == n\n",
}
MBPP = {
    "task_id": 2,
    "text": "Write a function to find what two lists share.",
    "code": "def shared(a, b):\r\n  return set(a) & set(b)",
    "test_list": ["assert shared([3, 4], [5, 4]) == {4}", "assert sqrt(len(shared([1], [2]))) == 0"],
    "test_setup_code": "from math import sqrt",
    "challenge_test_list": [],
}
SANITIZED = {
    "task_id": 2,
    "prompt": MBPP["text"],
    "code": MBPP["code"],
    "test_list": MBPP["test_list"],
    "test_imports": ["from math import sqrt"],
}


@pytest.fixture(scope="module")
def reward() -> Iterator[CodeReward]:
    made = CodeReward(timeout_s=2.0, wall_s=20.0, workers=2)
    yield made
    made.close()


def test_columns_of_humaneval(tmp_path: Path) -> None:
    row = load_humaneval(write(tmp_path / "any.jsonl", HUMANEVAL))[0]
    program = HUMANEVAL["prompt"] + HUMANEVAL["canonical_solution"]
    question = (
        "Complete this Python function. Answer with everything above and its body in one Python block.\n\n```python\n"
    )
    assert row == {
        "prompt": [{"role": "user", "content": question + HUMANEVAL["prompt"] + "```"}],
        "template": "chat",
        "task_id": "HumanEval/38",
        "question": question + HUMANEVAL["prompt"] + "```",
        "tests": f"import math\n\ndef shift(n):\n    return n + 1\n{HUMANEVAL['test']}",
        "entry_point": "back",
        "solution": program,
        "worked_solution": f"```python\n{program}```",
    }


def test_a_helper_of_the_prompt_is_the_tests_own(tmp_path: Path, reward: CodeReward) -> None:
    row = load_humaneval(write(tmp_path / "any.jsonl", HUMANEVAL))[0]
    answers = ["def back(n):\n    return n - 1", "def shift(n):\n    return n\n\ndef back(n):\n    return n"]
    given = {"tests": [row["tests"]] * 2, "entry_point": ["back"] * 2}
    assert reward(completions=answers, **given) == [1.0, 0.0]  # by the program's own `shift` the second would be right


@pytest.mark.parametrize("form", [MBPP, SANITIZED], ids=["full", "sanitized"])
def test_columns_of_mbpp(tmp_path: Path, reward: CodeReward, form: dict[str, Any]) -> None:
    rows = load_mbpp(write(tmp_path / "any.jsonl", form), template="none")
    row = rows[0]
    assert row["question"] == (
        "Write a function to find what two lists share.\n\nYour code should pass this test:\n\n"
        "```python\nassert shared([3, 4], [5, 4]) == {4}\n```"
    )
    assert row["tests"] == "\n".join(["from math import sqrt", *MBPP["test_list"]])
    assert row["solution"] == "def shared(a, b):\n  return set(a) & set(b)"
    assert not {"code", "text", "test_list", "test_imports", "test_setup_code"} & set(rows.column_names)
    assert row["entry_point"] == "shared"
    given = {"tests": [row["tests"]] * 2, "entry_point": ["shared"] * 2}
    assert reward(completions=[row["worked_solution"], "shared = print"], **given) == [1.0, 0.0]
    both = load_mbpp(tmp_path / "any.jsonl", template="none", shown_tests=3)[0]["question"]
    assert "these tests" in both
    assert MBPP["test_list"][1] in both


def test_a_function_that_is_named_as_one_of_pythons_is_the_programs(tmp_path: Path, reward: CodeReward) -> None:
    """MBPP has a few, e.g. ``assert sum(10, 15) == 6``."""
    made = {**MBPP, "code": "def sum(a, b):\n    return a - b", "test_list": ["assert sum(15, 9) == 6"]}
    row = load_mbpp(write(tmp_path / "any.jsonl", made))[0]
    given = {"tests": [row["tests"]] * 2, "entry_point": [row["entry_point"]] * 2}
    assert reward(completions=[row["solution"], "x = 1"], **given) == [1.0, 0.0]


@pytest.mark.parametrize(
    ("load", "row", "words"),
    [
        (load_humaneval, {**HUMANEVAL, "prompt": "def back(n:\n"}, "line 1: column 'prompt' is no Python"),
        (load_humaneval, {**HUMANEVAL, "entry_point": "forth"}, "does not define its entry_point 'forth'"),
        (load_humaneval, {"prompt": "p", "test": "t", "entry_point": "back"}, "missing column: one of canonical"),
        (load_mbpp, {**MBPP, "test_list": []}, "column 'test_list' is"),
        (load_mbpp, {**MBPP, "test_list": [3]}, "a list of lines is needed"),
        (load_mbpp, {**MBPP, "text": " "}, "column 'text' is ' '"),
    ],
)
def test_bad_rows(tmp_path: Path, load: Any, row: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        load(write(tmp_path / "any.jsonl", row))


def test_an_mbpp_question_names_its_function(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="shown_tests is 0"):
        load_mbpp(write(tmp_path / "any.jsonl", MBPP), shown_tests=0)


@pytest.mark.not_fast
def test_humanevals_own_rows(grpo_lab_data: Path, reward: CodeReward) -> None:
    """Four of its prompts define a helper; their programs are right beside the tests' own copy, too."""
    rows = load_humaneval(grpo_lab_data / "code" / "humaneval.jsonl")
    assert len(rows) == 164
    helped = rows.filter(lambda row: row["tests"].split("def check")[0].count("def "))
    assert helped["task_id"] == ["HumanEval/10", "HumanEval/32", "HumanEval/38", "HumanEval/50"]
    given = {name: helped[name] for name in ("tests", "entry_point")}
    assert reward(completions=helped["worked_solution"], **given) == [1.0] * 4
