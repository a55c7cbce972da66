"""``mixture`` in a recipe: written out, loaded, told by a dry run, refused in one sentence."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from grpo_lab.pipelines.dry_run import plan_of_training
from grpo_lab.recipe.build import build_reward
from grpo_lab.recipe.data import load_rows
from grpo_lab.recipe.sections import DataSection, read_recipe, recipe_from
from grpo_lab.rewards.for_task import ByTask

RECIPE = Path(__file__).resolve().parents[3] / "recipes" / "verifiable" / "mixture.yaml"
SORTING: dict[str, Any] = {"data": {"loader": "sorting", "n": 30}, "rewards": ["sorting"]}
GAMES: dict[str, Any] = {
    "data": {"loader": "countdown", "n": 40, "numbers": [2, 3]},
    "rewards": ["countdown", {"name": "accuracy", "weight": 0.5}],
    "weight": 3,
    "objective": "dr_grpo",
}
GOOD: dict[str, Any] = {
    "model": {"tiny": {"hidden_size": 16, "num_layers": 1, "num_heads": 2, "max_positions": 128}},
    "mixture": {"games": GAMES, "sorting": SORTING}, "objective": "dapo", "num_generations": 2,
    "per_device_train_batch_size": 8, "max_completion_length": 8, "max_steps": 2, "use_cpu": True, "bf16": False,
}  # fmt: skip


def test_it_is_short_for_what_a_recipe_can_say_without_it() -> None:
    recipe = recipe_from(GOOD)
    assert recipe.data.loader == "mixture"
    assert recipe.arguments["tasks"] == {"games": {"weight": 3, "objective": "dr_grpo"}, "sorting": {}}
    rewards = [build_reward(section) for section in recipe.rewards]
    names = ["games/countdown_reward", "games/accuracy_reward", "sorting/sorting_exact_reward"]
    assert [reward.__name__ for reward in rewards] == names
    assert [section.weight for section in recipe.rewards] == [1.0, 0.5, 1.0]
    rows = load_rows(recipe.data)
    assert [rows["task"].count(name) for name in ("games", "sorting")] == [40, 30]
    assert rows[69]["target"] is None  # a column of the other task


def test_the_dry_run_names_each_task(tmp_path: Path) -> None:
    facts = plan_of_training(recipe_from({**GOOD, "output_dir": str(tmp_path / "out")}))
    assert facts["task games"] == "40 rows, weight 3: 75.0% of the prompts"
    assert facts["task sorting"] == "30 rows, weight 1: 25.0% of the prompts"
    assert facts["rewards"] == "games/countdown × 1, games/accuracy × 0.5, sorting/sorting × 1"
    assert "task games=(objective=dr_grpo" in facts["algorithm"]
    assert "the trainer built around" in facts["checked"]


def test_held_out_rows_by_task() -> None:
    held_out = {"data": {"loader": "sorting", "split": "test", "n": 5}}
    tasks = {
        "games": {**GAMES, "evaluation": held_out | {"reward": "sorting"}},
        "sorting": {**SORTING, "evaluation": held_out},
    }
    evaluation = recipe_from({**GOOD, "mixture": tasks, "evaluation": {"batch_size": 7}}).evaluation
    assert evaluation is not None
    assert (evaluation.by, evaluation.batch_size) == ("task", 7)
    assert load_rows(evaluation.data).unique("task") == ["games", "sorting"]
    judge = build_reward(evaluation.reward, "evaluation.reward")
    assert isinstance(judge, ByTask)
    row = {"prompts": ["?"] * 3, "completions": ["0 1"] * 3, "solution": ["0 1", "1 0", "0 1"], "numbers": [[1, 0]] * 3}
    assert judge(**row, task=["games", "sorting", "none"])[2] is None
    assert judge(**row, task=["games", "sorting", "none"])[0] == 1.0


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"data": {"loader": "sorting"}}, "`mixture` and `data` are both set"),
    ({"tasks": {}}, "`mixture` and `tasks` are both set"),
    ({"mixture": {}}, "it must be a mapping of tasks"),
    ({"mixture": {"a": {"data": {"loader": "sorting"}}}}, "`mixture.a` needs `rewards`"),
    ({"mixture": {"a": {**SORTING, "wieght": 2}}}, "did you mean 'weight'"),
    ({"mixture": {"a": {**SORTING, "rewards": []}}}, "`mixture.a.rewards` is []; a task needs at least one reward"),
    (
        {"mixture": {"a": {**SORTING, "evaluation": {"data": {"loader": "sorting"}}}, "b": SORTING}},
        "`mixture.b.evaluation`",
    ),
]


@pytest.mark.parametrize(("changes", "said"), WRONG, ids=[said for _, said in WRONG])
def test_what_is_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        recipe_from({**GOOD, **changes})


@pytest.mark.parametrize(
    ("task", "said"),
    [
        ({**SORTING, "rewards": ["some/model"]}, "is a model, which TRL gives every row"),
        ({**SORTING, "weight": -1}, "`mixture.sorting.weight` is -1; it must be a finite number above 0"),
        ({**SORTING, "objective": "grop"}, "did you mean 'grpo'"),
        ({**SORTING, "data": {"loader": "sortin"}}, "`mixture.sorting.data.loader` is 'sortin'"),
        ({**SORTING, "data": {"loader": "sorting", "n": 30, "template": "r1"}}, "column 'prompt' is"),
        (
            {**SORTING, "data": {"loader": "sorting", "n": 1}},
            "has 1 rows of task 'sorting', and a generation batch of 4 prompts may take 2",
        ),
    ],
)
def test_what_the_dry_run_refuses(tmp_path: Path, task: dict[str, Any], said: str) -> None:
    mixture = {"games": GAMES, "sorting": task}
    with pytest.raises(ValueError, match=re.escape(said)):
        plan_of_training(recipe_from({**GOOD, "mixture": mixture, "output_dir": str(tmp_path / "out")}))


def test_a_mixture_of_a_cold_start_is_named_as_it_is_written() -> None:
    section = DataSection(loader="mixture", arguments={"sums": {"loader": "sortin"}})
    with pytest.raises(ValueError, match=r"`cold_start\.data\.sums\.loader` is 'sortin'"):
        load_rows(section, "cold_start.data")
    with pytest.raises(ValueError, match=r"`mixture\.sums\.data\.loader` is 'sortin'"):
        load_rows(section)


@pytest.mark.slow
def test_two_steps_and_an_evaluation_by_task(tmp_path: Path) -> None:
    from grpo_lab.pipelines.train import train

    sections = [f"{task}.{of}" for task in ("arithmetic", "countdown") for of in ("data", "evaluation.data")]
    small = {f"mixture.{section}.n": 8 for section in sections}
    outcome = train(
        read_recipe(
            RECIPE,
            {
                **small,
                "output_dir": str(tmp_path / "run"),
                "model.tiny.hidden_size": 16,
                "model.tiny.num_heads": 2,
                "model.tiny.num_layers": 1,
                "cold_start.data.countdown.n": 4,
                "cold_start.data.arithmetic.n": 4,
                "cold_start.max_steps": 2,
                "num_generations": 2,
                "per_device_train_batch_size": 6,
                "max_completion_length": 8,
                "max_steps": 2,
            },
        )
    )
    assert outcome.after is not None
    assert set(outcome.after.accuracy_by) == {"arithmetic", "countdown"}
    logged = [json.loads(line) for line in (outcome.folder / "metrics.jsonl").read_text().splitlines()]
    assert [row["tasks/countdown/prompt_share"] for row in logged if "loss" in row] == pytest.approx([1 / 3] * 2)
    assert outcome.report is not None
    assert "Reward by task" in outcome.report.read_text()
