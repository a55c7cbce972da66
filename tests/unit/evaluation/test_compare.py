"""`compare`: what is paired with what, the exact test against a sum over all flips, and the honest refusals."""

from __future__ import annotations

import io
import itertools
import json
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from grpo_lab.cli import main
from grpo_lab.evaluation import EvaluationResult
from grpo_lab.evaluation.comparison import compare, comparison_page, print_comparison
from grpo_lab.evaluation.statistics import mcnemar_exact
from grpo_lab.evaluation.terminal import Terminal
from unit.reports.test_report import Page, assert_self_contained, outcome, whole_run


@pytest.mark.parametrize(("gained", "lost"), [(0, 0), (1, 0), (3, 3), (7, 2), (1, 9)])
def test_the_exact_test_is_the_share_of_all_flips_at_least_as_uneven(gained: int, lost: int) -> None:
    flips = [sum(heads) for heads in itertools.product((0, 1), repeat=gained + lost)]
    even = Fraction(gained + lost, 2)
    extreme = sum(abs(heads - even) >= abs(gained - even) for heads in flips)
    assert mcnemar_exact(gained, lost) == float(Fraction(extreme, len(flips)))


def test_the_exact_test_at_size_and_against_a_published_value() -> None:
    assert mcnemar_exact(300, 100) < 1e-20
    # the approval ratings of Agresti's Categorical Data Analysis, 86 against 150: R's binom.test(86, 236) gives 3.7e-5
    assert mcnemar_exact(86, 150) == pytest.approx(3.7e-5, rel=0.03)


def evaluated(folder: Path, scores: list[float | None], first: int = 0, **settings: Any) -> Path:
    """A run with an evaluation of the problems ``first``, ``first`` + 1, …"""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "run.json").write_text(
        json.dumps({"name": folder.name, "settings": {"learning_rate": 0.1 * len(folder.name)}})
    )
    outcomes = [outcome(i, score, question=f"question {first + i}?") for i, score in enumerate(scores)]
    EvaluationResult(tuple(outcomes), {"max_new_tokens": 64, **settings}).write(folder / "evaluation" / "after")
    return folder


def test_problems_are_paired_by_what_they_ask_and_not_by_their_place(tmp_path: Path) -> None:
    base = evaluated(tmp_path / "base", [1.0, 0.0, 0.0, 1.0, None])
    other = evaluated(tmp_path / "other", [1.0, 1.0, 0.0, 1.0], first=1)  # its rows 0, 1, 2 are base's 1, 2, 3
    (test,) = compare([base, other]).tests
    assert test.difference is not None
    assert (test.gained, test.lost, test.difference.n, test.p_value) == (2, 1, 3, 1.0)
    assert "share 3 scorable problems of 4 and 5" in " ".join(compare([base, other]).notes)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"first": 100}, "evaluated on other problems"),
        ({"mode": "lenient"}, "judged differently: mode lenient and strict"),
        ({"scores": []}, "no held-out outcomes of other"),
    ],
)
def test_what_cannot_be_compared_is_not_tested_and_said(tmp_path: Path, change: dict[str, Any], why: str) -> None:
    base = evaluated(tmp_path / "base", [1.0, 0.0], mode="strict")
    other = evaluated(tmp_path / "other", **{"scores": [1.0, 1.0], "mode": "strict", **change})
    found = compare([base, other])
    assert found.tests[0].difference is None
    assert why in found.tests[0].why_not
    page = Page(comparison_page(found).html())
    assert_self_contained(page)
    assert f"no test: {found.tests[0].why_not}" in page.text


def test_another_budget_is_tested_and_noted(tmp_path: Path) -> None:
    base, other = evaluated(tmp_path / "base", [1.0, 0.0]), evaluated(tmp_path / "other", [1.0, 1.0], max_new_tokens=8)
    found = compare([base, other])
    assert found.tests[0].difference is not None
    assert "other and base were evaluated with another max_new_tokens: 8 and 64" in found.notes
    assert dict(found.differing) == {"settings.learning_rate": [0.4, 0.5]}


@pytest.mark.not_fast
def test_two_whole_runs_and_a_lone_evaluation(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = whole_run(tmp_path / "a"), whole_run(tmp_path / "b", steps=40)
    page_file = tmp_path / "c.html"
    words = [str(a), str(b), str(a / "evaluation" / "before")]
    assert main(["compare", *words, "--output", str(page_file)]) == 0
    printed = capsys.readouterr().out
    assert "before against a: -42.9" in printed
    assert f"comparison: {page_file}" in printed
    page = Page(page_file.read_text(encoding="utf-8"))
    assert_self_contained(page)
    labels = [value for _, name, value in page.attributes if name == "data-label"]
    assert {"a", "b", "before", "difference", "p"} <= set(labels)
    assert "Lengths of correct and incorrect answers: correct" in page.text
    assert "Not recorded: before." in page.text
    assert main(["compare", *words, "--output", str(page_file)]) == 0  # its own page is written anew
    page_file.write_text("mine")
    assert main(["compare", *words, "--output", str(page_file)]) == 2
    assert page_file.read_text() == "mine"


def test_the_printed_table_breaks_no_word(tmp_path: Path) -> None:
    """At 80 columns, beside names that are long."""
    names = [f"second_supervised_stage_of_a_pipeline_with_two_ways_to_think_{one}" for one in "ab"]
    said = Terminal(file=io.StringIO(), width=80)
    print_comparison(compare([evaluated(tmp_path / name, [1.0, 0.0, 1.0]) for name in names]), said)
    table = said.file.getvalue().partition(" against ")[0]  # type: ignore[attr-defined]
    assert {*names, "accuracy", "truncated", "66.7%", "93.9]"} <= {*table.replace(",", "").split()}


def test_mistakes_are_named(tmp_path: Path) -> None:
    a = whole_run(tmp_path / "a")
    for folders, said in (([a], "2 to 8 runs, got 1"), ([a, a], "named twice")):
        with pytest.raises(ValueError, match=said):
            compare(folders)


def test_a_default_written_out_is_the_same_judge() -> None:
    """`accuracy` and `{name: accuracy, mode: strict}` are one reward: no test was made, as "judged differently"."""
    from grpo_lab.recipe.build import build_reward
    from grpo_lab.recipe.sections import DataSection, EvaluationSection, RewardSection
    from grpo_lab.stages.held_out import Condition, about

    rows = DataSection("word_problems", "chat", arguments={"n": 4})
    rewards = [RewardSection("accuracy", arguments=given) for given in ({}, {"mode": "strict"}, {"mode": "lenient"})]
    short, long, other = (
        about("m", EvaluationSection(rows, one), build_reward(one), Condition("chat")) for one in rewards
    )
    assert short == long
    assert other["judge"] != long["judge"]
