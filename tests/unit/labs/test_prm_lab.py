"""The lab of the process reward model: its exact step score, what it measures, and what it would run."""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from grpo_lab.cli import main
from grpo_lab.data import word_problems
from grpo_lab.labs.arms import Arms
from grpo_lab.labs.experiment import GENERATED
from grpo_lab.pipelines.pipeline_recipe import pipeline_from
from grpo_lab.pipelines.runner import entries_of, run_pipeline
from grpo_lab.recipe.yaml import shipped_recipe
from grpo_lab.registry import load_named
from grpo_lab.rewards import EquationSteps
from step_judge import saved_judge

WORKED = "Ann has 4*6=24 stamps.\nAnn has 24-5=19 stamps.\n#### 19"


@pytest.fixture(scope="module")
def lab() -> ModuleType:
    Arms.read("prm")  # makes the module beside it importable
    return __import__("lab_prm")


@pytest.mark.parametrize(
    ("solution", "scores"),
    [
        (WORKED, [1, 1, 1]),
        ("Ann has 4+6=10 stamps.\nAnn has 10-5=5 stamps.\n#### 5", [0, 0, 0]),
        ("Ann has 4*6=24 stamps.\nAnn has 24-5=18 stamps.\n#### 19", [1, 0, 0]),
        ("Ann has 4*6=24 stamps.\nAnn has 4*6=24 stamps.\n#### 19", [1, 0, 0]),
        ("#### 19", [1]),
        (f"{WORKED}\n#### 19", [1, 1, 1, 0]),
    ],
)
def test_a_line_is_right_as_long_as_the_solution_goes_the_worked_way(
    lab: ModuleType, solution: str, scores: list[float]
) -> None:
    assert lab.exact(solution.split("\n"), WORKED) == scores


def test_every_worked_solution_is_right_and_a_misread_one_where_it_first_misreads(lab: ModuleType) -> None:
    """A misreading's arithmetic is right, so that only the exact score sees it."""
    settings: dict[str, Any] = {"n": 60, "seed": 0, "steps": (2, 4), "largest": 20}
    wrong = 0
    for right, careless in zip(word_problems(**settings), word_problems(**settings, misread=0.7), strict=True):
        lines = careless["worked_solution"].split("\n")
        assert min(lab.exact(right["worked_solution"].split("\n"), right["worked_solution"])) == 1
        found = lab.exact(lines, right["worked_solution"])
        pairs = zip(lines, right["worked_solution"].split("\n"), strict=True)
        first = next((at for at, (own, true) in enumerate(pairs) if own != true), len(lines))
        assert found == [float(at < first) for at in range(len(lines))]
        assert 0.0 not in EquationSteps().score_texts("", lines)
        wrong += first < len(lines)
    assert wrong > 20


def test_loss_and_parting_of_a_log(lab: ModuleType) -> None:
    """The exact score rises for 20 steps and falls for 20, while the model's rises."""
    exact = [0.5 + 0.02 * step for step in range(20)] + [0.9 - 0.02 * step for step in range(20)]
    log = [{lab.EXACT: one, lab.MODEL: step / 40, GENERATED: 100 * step} for step, one in enumerate(exact)]
    means = [sum(exact[at : at + 10]) / 10 for at in range(31)]
    peak = max(means)
    assert lab.lost(None, log) == pytest.approx(peak - means[-1])
    near = max(at for at, value in enumerate(means) if value >= peak - 0.05)
    assert lab.parted(None, log) == 100 * (near + 9)
    falling = [{**row, lab.MODEL: -row[lab.MODEL]} for row in log]
    assert lab.lost(None, falling) == 0
    assert math.isnan(lab.parted(None, log[:20]))
    assert math.isnan(lab.lost(None, []))


def test_every_seed_has_its_stages_and_every_arm_the_same_rewards(
    lab: ModuleType, tiny_folder: Path, tmp_path: Path
) -> None:
    options = argparse.Namespace(folder=tmp_path, start=str(tiny_folder), seeds=[3])
    stages = lab.pipeline_of(3, options)
    assert [one.name for one in entries_of(pipeline_from(stages))] == ["samples", "labels", "prm", "unseen", "check"]
    with pytest.raises(ValueError, match="no process reward model"):
        lab.arm("model alone", 3, options)
    (tmp_path / "prm-3/prm/model").mkdir(parents=True)
    rewards = {arm: lab.arm(arm, 3, options)["rewards"] for arm in Arms.read("prm").said.arms}
    names = {arm: [one["name"] for one in own] for arm, own in rewards.items()}
    assert len({json.dumps(one) for one in names.values()}) == 1
    assert [one["weight"] for one in rewards["model alone"]] == [0, 0, 1]
    assert load_named(names["outcome"][1], "rewards") is lab.ExactSteps


@pytest.mark.not_fast
def test_the_check_counts_lines_of_unseen_problems(lab: ModuleType, tmp_path: Path) -> None:
    """A classifier that knows nothing is at chance; `equation_steps` sees slips, and no misreading."""
    row = word_problems(1, steps=(2, 2), largest=20, template="none")[0]
    right = row["worked_solution"]
    slip = "\n".join(["Ann has 2+2=5 stamps.", *right.split("\n")[1:]])
    line = {"row": 0, "scores": [1.0, 0.0], "lengths": [9, 9], "problem": row}
    line["completions"] = [right, slip]
    (tmp_path / "samples.jsonl").write_text(json.dumps(line) + "\n")
    stage = {"stage": "lab_prm:StepCheck", "name": "check", "model": str(saved_judge(tmp_path / "judge"))}
    stage["samples"] = str(tmp_path / "samples.jsonl")
    labels = [{"first_error_step_1based": 2}, {"first_error_step_1based": None}, {}]
    rows = [{"problem": "2 + 2?", "steps": ["2+2=4", "4+1=6"], **label} for label in labels]
    (tmp_path / "labelled.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    stage["labelled"] = str(tmp_path / "labelled.jsonl")
    (tmp_path / "judge" / "chat_template.jinja").write_text("{{ messages[0].content }}")
    facts = run_pipeline(pipeline_from({"output_dir": str(tmp_path / "out"), "stages": [stage]}))["check"]
    assert facts["equation_steps"]["accuracy"]["value"] == pytest.approx(4 / 6)
    assert facts["equation_steps"]["majority"] == 0.5
    assert facts["equation_steps"]["F1"]["value"] == 1.0
    assert facts["model"]["steps"] == 6
    by_people = facts["labelled"]["equation_steps"]
    assert by_people["steps"] == 4, "a row without a label is passed over"
    assert by_people["accuracy"]["value"] == pytest.approx(3 / 4)


SHORT = {
    "stages.0.data.n": 64, "stages.0.max_steps": 40, "stages.0.model.tiny.hidden_size": 24,
    "stages.0.model.tiny.num_layers": 1, "stages.1.data.n": 4, "stages.1.n_samples": 2,
    "stages.1.max_completion_length": 32, "stages.2.n_samples": 2, "stages.2.max_completion_length": 16,
    "stages.3.max_steps": 2, "stages.4.data.n": 4, "stages.4.n_samples": 2, "stages.4.max_completion_length": 32,
}  # fmt: skip


@pytest.mark.slow
def test_the_pipeline_in_short(tmp_path: Path) -> None:
    """A start that has learnt little writes no right solution, and that stops nothing."""
    recipe = shipped_recipe("lab/prm/pipeline.yaml")
    words = [word for key, value in SHORT.items() for word in (f"--{key}", str(value))]
    assert main(["pipeline", "run", str(recipe), "--output_dir", str(tmp_path), *words]) == 0
    found = json.loads((tmp_path / "check" / "stage.json").read_text())["results"]
    assert found["model"]["F1"] is None
    assert found["model"]["steps"] == found["equation_steps"]["steps"] > 0
