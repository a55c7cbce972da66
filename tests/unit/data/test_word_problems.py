"""Word problems: solutions recomputed by another route, splits disjoint, no repeats, same seed same rows."""

import re
import subprocess
import sys
from fractions import Fraction
from itertools import islice, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_lab.data import FAMILIES, WordProblem, iter_word_problems, word_problems
from grpo_lab.data.made import SPLITS, split_of

LINE = re.compile(r"[A-Z][a-z]*(?: [a-z]+)* (\d+)([-+*/])(\d+)=(\d+)(?: [a-z]+)+\.")
WORD_NUMBERS = {"half": 2, "twice": 2}


def check_solution(problem: WordProblem, largest: int) -> None:
    """Recomputes a worked solution from its text alone, and finds each number's origin."""
    *lines, last = problem.worked_solution.split("\n")
    assert last == f"#### {problem.solution}"
    assert len(lines) == problem.steps
    told = {int(number) for number in re.findall(r"\d+", problem.question)}
    told |= {value for word, value in WORD_NUMBERS.items() if word in problem.question}
    results: list[int] = []
    unused: list[int] = []
    for line in lines:
        match = LINE.fullmatch(line)
        assert match, line
        left, operation, right, written = int(match[1]), match[2], int(match[3]), int(match[4])
        exact = {"+": left + right, "-": left - right, "*": left * right, "/": Fraction(left, right)}[operation]
        assert exact == written  # a division leaves no rest
        assert 0 < written <= largest
        for operand in (left, right):
            assert operand in told or operand in results, (line, problem.question)
        unused = [result for result in unused if result not in (left, right)] + [written]
        results.append(written)
    assert results[-1] == int(problem.solution)
    assert unused[-1:] == [results[-1]]
    assert len(unused) == 1, f"a result that nothing uses: {problem}"


@pytest.mark.not_fast
@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 10**9),
    split=st.sampled_from(SPLITS),
    fewest=st.integers(1, 6),
    most=st.integers(1, 6),
    family=st.sampled_from([None, *FAMILIES]),
    largest=st.sampled_from([12, 30, 100, 200, 1000]),
)
def test_every_solution_can_be_recomputed(
    seed: int, split: str, fewest: int, most: int, family: str | None, largest: int
) -> None:
    steps = (min(fewest, most), max(fewest, most))
    stream = iter_word_problems(seed, split, steps, [family] if family else None, largest=largest)
    problems = list(islice(stream, 20))
    assert problems
    for problem in problems:
        check_solution(problem, largest)
        assert steps[0] <= problem.steps <= steps[1]
        assert problem.family == family or family is None
        assert split_of(problem.arithmetic) == split
        assert "{" not in problem.question + problem.worked_solution


def told_result(arithmetic: str) -> int:
    """The answer of a problem's moves, ``family:a*k v+k v+*k …``, folded without a look at its solution."""
    value: Fraction | None = None
    for move in arithmetic.partition(":")[2].split():
        match = re.fullmatch(r"(\d+)([-+*/]{1,2})(\d+)", move)
        assert match, move
        a, k = int(match[1]), int(match[3])
        left, right = (Fraction(a), k) if value is None else (value, a * k if len(match[2]) == 2 else k)
        value = {"+": left + right, "-": left - right, "*": left * right, "/": left / right}[match[2][0]]
    assert value is not None
    assert value.denominator == 1
    return int(value)


@pytest.mark.not_fast(but="train")
@pytest.mark.parametrize("split", SPLITS)
def test_three_to_six_steps_with_numbers_up_to_200(split: str) -> None:
    """Right by two other routes, no share of a number of steps further than 4 sd (√(0.25·0.75/1200) = 1.25%) from a
    quarter, and numbers that are larger: a fifth of the answers above 100."""
    problems = list(islice(iter_word_problems(3, split, (3, 6), largest=200), 1200))
    for problem in problems:
        check_solution(problem, 200)
        assert told_result(problem.arithmetic) == int(problem.solution)
    for steps in (3, 4, 5, 6):
        assert abs(sum(problem.steps == steps for problem in problems) / 1200 - 0.25) < 0.05
    assert sum(int(problem.solution) > 100 for problem in problems) > 1200 / 5
    assert len({problem.question for problem in problems}) == 1200


@pytest.mark.not_fast
def test_difficulty_is_graded() -> None:
    """Each step more brings more events that can be misread, products and quotients: 1.3 a problem of three steps, 2.3
    of six."""
    problems = list(islice(iter_word_problems(0, steps=(3, 6), largest=200), 3000))
    events = {
        steps: [len(re.findall(r"[*/]", p.arithmetic)) for p in problems if p.steps == steps] for steps in range(3, 7)
    }
    means = [sum(found) / len(found) for found in events.values()]
    assert all(after - before > 0.15 for before, after in pairwise(means)), means


def test_careless_solutions_leave_problem_and_answer_alone() -> None:
    careful = list(islice(iter_word_problems(4, misread=0.0), 400))
    careless = list(islice(iter_word_problems(4, misread=1.0), 400))
    assert [p.question for p in careful] == [p.question for p in careless]
    assert [p.solution for p in careful] == [p.solution for p in careless]
    wrong = [p for p in careless if not p.worked_solution.endswith(f"#### {p.solution}")]
    assert 100 < len(wrong) < 300  # problems that only add and take away cannot be misread
    for problem in careless:
        *lines, last = problem.worked_solution.split("\n")
        results = [LINE.fullmatch(line) for line in lines]
        for match in results:
            assert match
            left, right, written = int(match[1]), int(match[3]), int(match[4])
            assert written == {"+": left + right, "-": left - right, "*": left * right, "/": left / right}[match[2]] > 0
        assert last == f"#### {results[-1][4]}"  # type: ignore[index]


def test_a_misread_pack_is_added() -> None:
    problem = next(p for p in iter_word_problems(0, steps=(1, 1), misread=1.0) if "packs of" in p.question)
    a, k = (int(number) for number in re.findall(r"\d+", problem.question))
    assert problem.solution == str(a * k)
    assert f"{a}+{k}={a + k}" in problem.worked_solution


@pytest.mark.not_fast
def test_the_share_of_misread_events() -> None:
    """One-step problems with a product or a quotient: misread with the chance that was set (3 sd of 2,000 = 3.3%)."""
    problems = islice(iter_word_problems(0, steps=(1, 1), misread=0.4), 7000)
    wrong = [not p.worked_solution.endswith(f"#### {p.solution}") for p in problems if re.search(r"[*/]", p.arithmetic)]
    assert len(wrong) > 2000
    assert abs(sum(wrong) / len(wrong) - 0.4) < 0.035


@pytest.mark.not_fast
def test_splits_share_no_arithmetic_whatever_the_seeds() -> None:
    arithmetic = {
        split: {
            problem.arithmetic
            for seed in range(3)
            for how in ({}, {"steps": (3, 6), "largest": 200})
            for problem in islice(iter_word_problems(seed, split, **how), 800)
        }
        for split in SPLITS
    }
    for one in SPLITS:
        for other in SPLITS:
            assert one == other or not arithmetic[one] & arithmetic[other]


def test_arithmetic_ignores_names_and_things() -> None:
    """Two tellings of the same numbers are one problem to the split."""
    tellings: dict[str, set[str]] = {}
    for problem in islice(iter_word_problems(0, steps=(1, 1), families=["bakery"], largest=10), 300):
        tellings.setdefault(problem.arithmetic, set()).add(problem.question)
    assert max(len(questions) for questions in tellings.values()) > 5


@pytest.mark.not_fast
def test_no_problem_twice_and_every_family_and_length() -> None:
    rows = word_problems(3000, seed=5)
    assert len(set(rows["question"])) == 3000
    assert set(rows["family"]) == set(FAMILIES)
    assert len(FAMILIES) >= 6
    for steps in (1, 2, 3, 4):
        assert 500 < sum(step == steps for step in rows["steps"]) < 1000


def test_columns_and_templates() -> None:
    rows = word_problems(3, seed=1, template="chat", system_prompt="Be brief.")
    assert rows.column_names == ["prompt", "template", "question", "solution", "worked_solution", "family", "steps"]
    assert rows[0]["prompt"][0] == {"role": "system", "content": "Be brief."}
    assert word_problems(3, seed=1, template="none")["prompt"] == rows["question"]
    assert set(word_problems(3, template="r1")["template"]) == {"r1"}


def test_same_seed_same_rows_and_a_longer_call_begins_with_the_shorter() -> None:
    assert word_problems(20, seed=3).to_list() == word_problems(50, seed=3).select(range(20)).to_list()
    assert word_problems(20, seed=3).to_list() != word_problems(20, seed=4).to_list()


def test_rows_are_the_same_in_another_process() -> None:
    """Nothing depends on Python's salted hash."""
    code = (
        "from grpo_lab.data import iter_word_problems as w; print([next(s).question for s in [w(9)] for _ in range(5)])"
    )
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=600)
    stream = iter_word_problems(9)
    assert other.stdout.strip() == str([next(stream).question for _ in range(5)])


@pytest.mark.not_fast(cases="arguments9-only \\\\d+ different problems.[*]n=1000000")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"n": 0}, r"n is 0"),
        ({"n": 5, "split": "dev"}, r"`split` is 'dev'\. Allowed: \['test', 'cold_start', 'train'\]"),
        ({"n": 5, "steps": (0, 2)}, r"steps is \(0, 2\)"),
        ({"n": 5, "steps": (3, 2)}, r"steps is \(3, 2\)"),
        ({"n": 5, "largest": 5}, r"largest is 5"),
        ({"n": 5, "families": ["bank"]}, r"families is \['bank'\]; allowed: .*collection"),
        ({"n": 5, "misread": 1.5}, r"misread is 1.5"),
        ({"n": 5, "families": []}, r"families is \[\]"),
        ({"n": 5, "template": "r9"}, r"`template` is 'r9'"),
        ({"n": 10**6, "steps": (1, 1), "largest": 10, "families": ["bus"]}, r"only \d+ different problems.*n=1000000"),
    ],
)
def test_bad_settings_are_named(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        word_problems(**arguments)  # type: ignore[arg-type]


def test_the_room_loads_neither_trl_nor_transformers() -> None:
    code = "import sys, grpo_lab.data; print({'trl', 'transformers', 'torch', 'datasets', 'vllm'} & set(sys.modules))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=600)
    assert run.stdout.strip() == "set()"
