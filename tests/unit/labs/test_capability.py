"""The capability lab: what counts as solved, pass@k by group and paired gains by definition, a cell in short."""

from __future__ import annotations

import random
from argparse import Namespace
from itertools import combinations
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import pytest

from grpo_lab.evaluation.outcomes import Outcome
from grpo_lab.evaluation.result import EvaluationResult
from grpo_lab.labs.arms import Arms
from grpo_lab.labs.capability import curves, measured_at, points, report, side, verdict, whole_solution

pytestmark = pytest.mark.not_fast

SOLUTION = "Ann has 4*6=24 stamps.\nAnn has 24-5=19 stamps.\n#### 19"
T_OF_TWO = 4.302652729911275
"""The 97.5% point of Student's t with 2 degrees of freedom, from a table."""


@pytest.mark.parametrize(
    ("completion", "score"),
    [
        (SOLUTION, 1.0),
        ("She has 4 * 6 = 24.\nSo 24 - 5 = 19 are left.\n#### 19", 1.0),  # other words
        ("Ann has 4+6=10 stamps.\nAnn has 10+9=19 stamps.\n#### 19", 0.0),  # the answer by luck
        ("#### 19", 0.0),
        ("Ann has 24-5=19 stamps.\n#### 19", 0.0),  # a calculation is missing
        (f"Ann has 1+1=2 stamps.\n{SOLUTION}", 0.0),  # one too many
        (SOLUTION.replace("#### 19", "#### 18"), 0.0),
        ("Ann has 4*6=24 stamps.\nAnn has 24-5=18 stamps.\n#### 19", 0.0),  # a false equation
    ],
)
def test_what_counts_as_solved(completion: str, score: float) -> None:
    asked: dict[str, Any] = {"prompts": ["x"], "solution": ["19"], "worked_solution": [SOLUTION]}
    assert whole_solution(completions=[completion], **asked) == [score]
    messages = [{"role": "assistant", "content": completion}]
    assert whole_solution(completions=[messages], **asked) == [score]


def outcome(problem: int, sample: int, group: str, score: float | None) -> Outcome:
    return Outcome(
        problem=problem, kind="sampled", sample=sample, question="", prompt="", solution="1", completion="1", tokens=1,
        truncated=False, score=score, answer="1", thinking=None, log_prob=None, measures={}, group=group,
    )  # fmt: skip


def test_pass_at_k_by_group_is_the_share_of_subsets_with_a_right_sample() -> None:
    """Every subset of k of the eight samples of a problem, counted one by one; groups in the order of their numbers."""
    draw = random.Random(3)
    groups = ["10", "9", "9", "10", "9"]
    right = [[draw.random() < 0.3 for _ in range(8)] for _ in groups]
    outcomes = tuple(
        outcome(problem, sample, group, float(right[problem][sample]))
        for problem, group in enumerate(groups)
        for sample in range(8)
    )
    result = EvaluationResult(outcomes, {"by": "steps"})
    assert list(result.pass_at_by) == ["9", "10"]
    for group, of_group in result.pass_at_by.items():
        assert list(of_group) == [1, 2, 4, 8]
        for k, found in of_group.items():
            literal = [
                fmean(any(subset) for subset in combinations(right[problem], k))
                for problem, name in enumerate(groups)
                if name == group
            ]
            assert found.value == pytest.approx(fmean(literal), abs=1e-12)
    written = result.summary()["sampled"]["pass_at_by"]["steps"]
    assert written["10"]["4"] == result.pass_at_by["10"][4].to_dict()


def run(seed: int, after: list[float], before: list[float] | None = None) -> dict[str, Any]:
    names = [f"depth {depth}: pass@{k}" for depth in (3, 4) for k in (1, 8)]
    start = None if before is None else dict(zip(names, before, strict=True))
    return {"seed": seed, "before": start, "after": dict(zip(names, after, strict=True)), "curves": {}}


def test_gains_are_paired_by_seed_and_named_by_the_rule() -> None:
    """The interval of the mean difference by its definition; each word of the rule, and its order."""
    assert points({0: 0.5, 1: 0.75, 2: 0.25}, {2: 0.5, 0: 0.25}) == [25.0, -25.0]
    gains = [10.0, 12.0, 17.0]
    half = T_OF_TWO * stdev(gains) / 3**0.5
    assert side(gains) == (fmean(gains) > half) == 1
    assert side([-one for one in gains]) == -1
    assert side([gain - fmean(gains) + half - 1e-6 for gain in gains]) == 0
    assert side([gain - fmean(gains) + half + 1e-6 for gain in gains]) == 1
    assert side([10.0]) == 0
    up, down, open_ = gains, [-one for one in gains], [-1.0, 0.0, 1.0]
    assert verdict(up, down, [0.5]) == "narrows"
    assert verdict(down, up, [0.5]) == "adds"
    assert verdict(up, up, [0.95]) == "sharpens"
    assert verdict(up, open_, [0.5]) == "sharpens"
    assert verdict(down, open_, [0.5]) == "loses"
    assert verdict(open_, open_, [0.5]) == "not shown"
    assert verdict([10.0], [10.0], [0.5]) == "–"


def test_the_report_says_gains_words_and_differences(tmp_path: Path) -> None:
    start = [[0.5, 1.0, 0.1, 0.2], [0.4, 1.0, 0.0, 0.3], [0.6, 1.0, 0.1, 0.1]]
    edge = [[0.3, 0.9, 0.3, 0.7], [0.2, 0.9, 0.2, 0.8], [0.5, 1.0, 0.3, 0.6]]
    found = {
        "edge, outcome": [run(seed, edge[seed], start[seed]) for seed in range(3)],
        "edge, process": [run(seed, start[seed]) for seed in range(3)],
    }
    assert measured_at(found) == ([3, 4], [1, 8])
    text = report(found, Namespace(folder=tmp_path))
    rows = [line for line in text.splitlines() if line.startswith("| ")]
    half = 100 * T_OF_TWO * stdev([0.2, 0.2, 0.1]) / 3**0.5
    assert rows[2].startswith("| (start) | 3 | 0.500 ± 0.248; 1.000 ± 0.000 |")
    (gain,) = [row for row in rows if row.startswith("| edge, outcome | -")]
    assert gain == f"| edge, outcome | -16.7 ± {half:.1f}; -6.7 ± 14.3: loses | +20.0 ± 0.0; +50.0 ± 0.0: adds |"
    (less,) = [row for row in rows if row.startswith("| edge, process − edge, outcome")]
    assert less.endswith("-20.0 ± 0.0; -50.0 ± 0.0 |")
    assert "3 of 8 intervals exclude 0; by chance 0.4 would" in text
    assert (tmp_path / "curves.png").stat().st_size > 10_000
    assert rows[3].endswith("| loses; adds |")
    assert f"{(tmp_path / 'table.md').read_text()}\n{(tmp_path / 'gains.md').read_text()}" == f"{text}\n"


def test_arms_with_starts_of_their_own_are_held_against_these(tmp_path: Path) -> None:
    """Each arm's gain is over what it measured itself: +10 and −20 points at depth 3, pass@1, at every seed."""
    start = {"low": [0.2, 0.5, 0.0, 0.0], "high": [0.6, 0.9, 0.0, 0.0]}
    end = {"low": [0.3, 0.5, 0.0, 0.0], "high": [0.4, 0.9, 0.0, 0.0]}
    found = {arm: [run(seed, end[arm], start[arm]) for seed in range(3)] for arm in start}
    text = report(found, Namespace(folder=tmp_path))
    rows = [line for line in text.splitlines() if line.startswith("| ")]
    assert [row.split(" | ")[0] for row in rows[2:6]] == ["| (start of low)", "| (start of high)", "| low", "| high"]
    assert rows[3].startswith("| (start of high) | 3 | 0.600 ± 0.000; 0.900 ± 0.000 |")
    assert "| low | +10.0 ± 0.0; +0.0 ± 0.0: sharpens |" in text
    assert "| high | -20.0 ± 0.0; +0.0 ± 0.0: loses |" in text
    assert "| high − low | +10.0 ± 0.0; +40.0 ± 0.0 |" in text
    titles = [f"depth {depth}: pass@k, {when} RL" for depth in (3, 4) for when in ("before", "after")]
    panels = curves(found, [3, 4], [1, 8])
    assert [*panels] == titles
    assert [*panels[titles[0]]] == ["low", "high"]
    assert panels[titles[0]]["high"] == [[(0.0, 0.6), (3.0, 0.9)]] * 3


SHORT = {
    "model.tiny.hidden_size": 32, "model.tiny.num_heads": 2,
    "cold_start.data.taught.n": 64, "cold_start.data.edge.n": 16,
    "cold_start.max_steps": 2, "cold_start.per_device_train_batch_size": 8, "data.n": 32, "max_steps": 1,
    "per_device_train_batch_size": 16, "max_completion_length": 12, "evaluation.n_samples": 128,
    "evaluation.data.three.n": 1, "evaluation.data.four.n": 1,
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    ("lab", "arm", "more"),
    [
        ("capability", "edge, process", {"evaluation.data.five.n": 1}),
        pytest.param("capability_losses", "plain", {"steps_per_generation": 1}, marks=pytest.mark.thorough),
        ("capability_bases", "share 10%", {}),
    ],
)
def test_a_cell_in_short(lab: str, arm: str, more: dict[str, int], tmp_path: Path) -> None:
    """In this process; ``tests/training/test_comparing_scripts.py`` has the command and the processes of its cells."""
    changes = [(key, str(value)) for key, value in {**SHORT, **more}.items()]
    options = Namespace(recipe=None, start=None, arms=[arm], folder=tmp_path, set=changes)
    shipped = Arms.read(lab)
    record = {"seed": 0, **shipped.run(arm, 0, tmp_path / "cell", options)}
    depths = [3, 4, 5] if lab == "capability" else [3, 4]
    assert measured_at({arm: [record]}) == (depths, [1, 8, 32, 128])
    assert set(record["before"].values()) == set(record["after"].values()) == {0.0}
    assert f"| {arm} | 1 | 0.000; 0.000 |" in shipped.report({arm: [record]}, options)


def test_the_lab_of_a_gpu_is_dry_run_without_one(tmp_path: Path) -> None:
    fewer = [[f"cold_start.data.{name}.n", "64"] for name in ("taught", "edge")]
    asked = {"recipe": "lab/capability/gpu.yaml", "start": None, "set": fewer, "folder": tmp_path, "dry_run": True}
    said = Arms.read("capability").check(["edge, outcome"], Namespace(**asked))
    assert said["recipe"].endswith("lab/capability/gpu.yaml")
