"""A mixture of tasks in real trainings on scripted completions: against one data set, against runs of one task each, a
resume in the middle, dynamic sampling, and what is refused."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from transformers import AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

from grpo_lab import LabConfig, LabTrainer
from grpo_lab.rewards import for_task
from grpo_lab.testing import ScriptedRollout
from parity.harness import Run, arguments, mixed_reward, movement_difference, problems, train

pytestmark = pytest.mark.not_fast

TASKS = ("add", "sort")


def rows(n: int = 16) -> Dataset:
    return problems(n).add_column("task", [TASKS[number % 4 == 1] for number in range(n)])


class Seen:
    """The reward of the harness; keeps the prompts, tasks and tokens of every generation batch."""

    __name__ = "seen"

    def __init__(self) -> None:
        self.batches: list[list[tuple[int, str]]] = []
        self.reward = mixed_reward()

    def __call__(self, number: list[int], task: list[str], **inputs: Any) -> list[float]:
        self.batches.append(list(zip(number[::4], task[::4], strict=True)))
        return self.reward(number=number, **inputs)


def run(
    folder: Path, model: Path, tasks: Any = None, resume: str | None = None, reward: Any = None, rollout: Any = None,
    data: Dataset | None = None, prepare: Callable[[Any], None] | None = None, dtype: Any = torch.float32,
    **changes: Any,
) -> Run:  # fmt: skip
    args = LabConfig(**arguments(folder, tasks=tasks, **{"learning_rate": 0.1, **changes}))

    def keep(trainer: Any) -> None:
        if prepare is not None:
            prepare(trainer)
        if resume is not None:
            start = trainer.train
            trainer.train = lambda: start(resume_from_checkpoint=resume)

    more: Any = {"rollout": rollout, "dtype": dtype}
    data = rows() if data is None else data
    return train(LabTrainer, args, model, reward=reward or mixed_reward(), train_dataset=data, prepare=keep, **more)


def shared(prompts: Any) -> dict[str, Any]:
    """Rows of the same order whoever trains: a mixture's, handed to a run without tasks."""
    return {"shuffle_dataset": False, "data": Dataset.from_list([dict(row) for row in prompts])}


WEIGHTS = {"add": {"weight": 2}, "sort": {"weight": 1}}


@functools.cache
def in_order(model: Path) -> list[dict[str, Any]]:
    """The prompts of a mixture's run as it has drawn them."""
    seen = Seen()
    run(model.parent / "order", model, WEIGHTS, reward=seen, objective="dr_grpo", max_steps=4)
    assert all([task for _, task in batch].count("add") == 2 for batch in seen.batches)
    by_number = rows()
    return [by_number[number] for batch in seen.batches for number, _ in batch]


@pytest.mark.parametrize("objective", ["dapo", "grpo", "dr_grpo", "gspo"])
def test_two_tasks_with_one_objective_are_one_data_set(tiny_folder: Path, tmp_path: Path, objective: Any) -> None:
    """The same prompts in the same order: a run without tasks, tasks that share all, tasks that name the same."""
    prompts = in_order(tiny_folder)
    plain = run(tmp_path / "a", tiny_folder, objective=objective, **shared(prompts))
    alike = run(tmp_path / "b", tiny_folder, WEIGHTS, objective=objective)
    named = {name: {**one, "objective": objective} for name, one in WEIGHTS.items()}
    apart = run(tmp_path / "c", tiny_folder, named, objective="grpo")
    for other in (alike, apart):
        assert all(torch.equal(other.weights[name], value) for name, value in plain.weights.items())
        assert other.losses == pytest.approx(plain.losses, rel=1e-5, abs=1e-7)
    logged = [row for row in apart.history if "tasks/add/loss" in row]
    assert [row["tasks/add/loss"] + row["tasks/sort/loss"] for row in logged] == pytest.approx(apart.losses, abs=1e-6)


def alone(wanted: str) -> Callable[..., list[float]]:
    """The reward where a row is of the task; 0.25 for all others, whose groups are then dead."""
    reward = mixed_reward()

    def one(number: list[int], task: list[str], **inputs: Any) -> list[float]:
        values = reward(number=number, **inputs)
        return [value if of == wanted else 0.25 for value, of in zip(values, task, strict=True)]

    return one


PAIRS = {
    "two objectives": ({"objective": "cispo"}, {"objective": "dr_grpo"}),
    "two levels": ({"objective": {"name": "gspo", "aggregation": "token_mean"}}, {"objective": "reinforce"}),
    "own averages": (
        {"objective": "dapo", "denominators": "own", "loss_weight": 0.5},
        {"objective": "grpo", "denominators": "own"},
    ),
}


@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("update", [{"share_prompts": "on"}, "off"], ids=["exact", "off"])
def test_a_step_is_the_sum_of_the_tasks_own_steps(tiny_folder: Path, tmp_path: Path, pair: str, update: Any) -> None:
    """In float64, movements added by hand: a run of each task alone, on the same rows, where the others' are dead."""
    double = {"max_steps": 1, "update": update, "num_iterations": 1}
    tasks = {name: {**WEIGHTS[name], **parts} for name, parts in zip(TASKS, PAIRS[pair], strict=True)}
    seen = Seen()
    found = of_double(tmp_path / "m", tiny_folder, tasks, reward=seen, objective="grpo", **double)
    by_number = rows()
    same = shared([by_number[number] for number, _ in seen.batches[0]])
    tokens = of_tokens(found)
    expected = dict.fromkeys(found.weights, torch.zeros(()).double())
    for name, parts in zip(TASKS, PAIRS[pair], strict=True):
        one = of_double(
            tmp_path / name, tiny_folder, reward=alone(name), objective=parts["objective"], **same, **double
        )
        scale = parts.get("loss_weight", 1.0)
        if parts.get("denominators") == "own":  # dapo divides by tokens, grpo by rows
            whole, own = (tokens["all"], tokens[name]) if parts["objective"] == "dapo" else (3, WEIGHTS[name]["weight"])
            scale *= whole / own
        for key, value in one.weights.items():
            expected[key] = expected[key] + scale * (value - one.start[key])
    moved = {key: value - found.start[key] for key, value in found.weights.items()}
    gap = sum((moved[key] - value).square().sum() for key, value in expected.items()) ** 0.5
    assert gap <= 1e-6 * sum(value.square().sum() for value in expected.values()) ** 0.5


def of_double(folder: Path, model: Path, tasks: Any = None, **changes: Any) -> Run:
    kept: dict[str, Any] = {}

    def keep(trainer: Any) -> None:
        kept["batches"] = batches = []
        made = trainer._generate_and_score_completions

        def scored(inputs: Any) -> dict[str, Any]:
            batches.append(made(inputs))
            return batches[-1]

        trainer._generate_and_score_completions = scored

    found = run(folder, model, tasks, prepare=keep, dtype=torch.float64, **changes)
    found.trainer.kept = kept["batches"]
    return found


def of_tokens(found: Run) -> dict[str, int]:
    """Loss tokens of the first batch, in all and by task."""
    batch = found.trainer.kept[0]
    lengths = batch["completion_mask"].sum(1)
    return {"all": int(lengths.sum())} | {
        name: int(lengths[batch["grpo_lab.task"] == at].sum()) for at, name in enumerate(TASKS)
    }


OWN = {"add": {"weight": 2, "denominators": "own"}, "sort": {"objective": "gspo"}}
TWO_STEPS = {"steps_per_generation": 6, "num_iterations": 2}


@pytest.mark.parametrize("save_at", [2, 5])
def test_a_resume_in_the_middle_of_a_batch_goes_on_to_the_bit(tiny_folder: Path, tmp_path: Path, save_at: int) -> None:
    """A generation batch serves four steps, the run has three of them; its order and its update go on as they were."""
    how: dict[str, Any] = {**TWO_STEPS, "objective": "dapo", "max_steps": 10, "save_strategy": "steps", "save_steps": 1}
    whole, again = Seen(), Seen()
    first = run(tmp_path, tiny_folder, OWN, reward=whole, **how)
    script = scripted(tiny_folder)
    script.calls = -(-save_at // 4)  # batches that were made before
    place = str(tmp_path / f"checkpoint-{save_at}")
    second = run(tmp_path / "on", tiny_folder, OWN, resume=place, reward=again, rollout=script, **how)
    assert all(torch.equal(second.weights[name], value) for name, value in first.weights.items())
    assert again.batches == whole.batches[script.calls - len(again.batches) :]
    assert second.losses[-(10 - save_at) :] == first.losses[save_at:]


def scripted(model: Path) -> ScriptedRollout:
    end = AutoTokenizer.from_pretrained(model).eos_token_id
    return ScriptedRollout(range(20, 90), (3, 5, 9, 14, 21, 30), end_id=end, truncated_share=0.2)


def test_a_dead_group_is_replaced_by_one_of_its_task(tiny_folder: Path, tmp_path: Path) -> None:
    seen = Seen()
    update = {"dead_groups": "resample", "max_rounds": 4}
    found = of_double(tmp_path, tiny_folder, OWN, reward=seen, objective="grpo", update=update)
    assert len(seen.batches) > 4  # some rounds were needed
    assert all([task for _, task in batch].count("add") == 2 for batch in seen.batches)
    for batch in found.trainer.kept:
        assert batch["grpo_lab.task"].bincount().tolist() == [8, 4]
        assert (batch["advantages"].view(3, 4) != 0).any(1).all()
    assert any(row.get("update/resampled_share", 0) > 0 for row in found.history)


def test_metrics_by_hand(tiny_folder: Path, tmp_path: Path) -> None:
    kept: list[Any] = []

    class Keeping(Seen):
        def __call__(self, number: list[int], task: list[str], **inputs: Any) -> list[float]:
            values = super().__call__(number=number, task=task, **inputs)
            kept.append((task, values, [len(ids) for ids in inputs["completion_ids"]]))
            return values

    found = run(tmp_path, tiny_folder, OWN, reward=Keeping(), objective="dapo")
    logged = [row for row in found.history if "loss" in row]
    for row, (tasks, values, lengths) in zip(logged, kept, strict=True):
        for name, prompts in zip(TASKS, (2, 1), strict=True):
            mine = [at for at, task in enumerate(tasks) if task == name]
            groups = [mine[start : start + 4] for start in range(0, len(mine), 4)]
            dead = [len({values[at] for at in group}) == 1 for group in groups]
            assert row[f"tasks/{name}/prompt_share"] == pytest.approx(prompts / 3)
            assert row[f"tasks/{name}/reward"] == pytest.approx(sum(values[at] for at in mine) / len(mine))
            assert row[f"tasks/{name}/mean_length"] == pytest.approx(sum(lengths[at] for at in mine) / len(mine))
            assert row[f"tasks/{name}/dead_share"] == pytest.approx(sum(dead) / len(dead))
            assert 0 <= row[f"tasks/{name}/truncated_share"] <= row["completions/truncated_share"] * 3
            of_advantage = [
                any(values[at] != values[group[0]] for at in group)
                and values[one] != sum(values[at] for at in group) / 4
                for group in groups
                for one in group
            ]
            assert row[f"tasks/{name}/live_share"] == pytest.approx(sum(of_advantage) / len(mine))
            if row["update/live_share"] > 0:
                assert row.get(f"tasks/{name}/entropy", row["entropy"]) == pytest.approx(row["entropy"], rel=0.05)
        assert sum(row[f"tasks/{name}/loss"] for name in TASKS) == pytest.approx(row["loss"], abs=1e-6)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"sampler": "prioritized"}, "both say which prompt comes next"),
    ({"shuffle_dataset": False}, "ask for different orders"),
    ({"ignore_data_skip": True}, "goes on where it stood"),
    ({"objective": None}, "`tasks.add.denominators` is set, and the loss of the run is TRL's own"),
    ({"gradient_accumulation_steps": 6, "steps_per_generation": 3}, "rows of several generation batches"),
    ({"tasks": {"add": {}, "other": {}}}, "rows of task 'sort', which `tasks` does not have"),
    ({"tasks": {"add": {}, "sort": {}, "third": {}}}, "no row of it"),
    ({"tasks": {"add": {"weight": 0}, "sort": {}}}, "`tasks.add.weight` is 0; it must be a finite number above 0"),
    ({"tasks": {"add": {"wieght": 1}, "sort": {}}}, "did you mean 'weight'"),
    ({"tasks": {"add": {"objective": "dr_gpro"}, "sort": {}}}, "did you mean 'dr_grpo'"),
    ({"tasks": {"add": {"objective": "ppo"}, "sort": {}}}, "there is a critic, which all tasks share"),
    ({"tasks": {"add": {"advantage": "group_mean"}, "sort": {}}, "objective": "ppo"}, "there is a critic"),
    ({"tasks": {"add": {"advantage": "returns"}, "sort": {}}}, "a rule that makes advantages per token is of all"),
    ({"tasks": {"add": {"objective": "bnpo"}, "sort": {}}}, "averages over its own micro-batch"),
    ({"tasks": {"add": {"objective": "clip_cov"}, "sort": {}}}, "chooses among the tokens of a whole micro-batch"),
    ({"data": problems()}, "reads the column 'task' of `train_dataset`"),
    ({"reward": for_task(mixed_reward(), "subtract")}, "is of task 'subtract'"),
    (
        {"per_device_train_batch_size": 24, "data": rows(24), "tasks": {"add": {}, "sort": {"weight": 3}}},
        "may take 15 different ones of it",
    ),
]


@pytest.mark.parametrize(("changes", "said"), REFUSED, ids=[said[:30] for _, said in REFUSED])
def test_what_is_refused_before_the_first_step(
    tiny_folder: Path, tmp_path: Path, changes: dict[str, Any], said: str
) -> None:
    how: dict[str, Any] = {"tasks": OWN, "objective": "grpo", **changes}
    with pytest.raises(ValueError, match=re.escape(said)):
        run(tmp_path, tiny_folder, **how)


def test_an_evaluation_has_tasks_too(tiny_folder: Path, tmp_path: Path) -> None:
    args = LabConfig(
        **arguments(tmp_path, tasks=OWN, objective="dapo", eval_strategy="steps", eval_steps=2, max_steps=2)
    )
    rewards = [for_task(mixed_reward(), name) for name in TASKS]
    found = train(LabTrainer, args, tiny_folder, reward=rewards, train_dataset=rows(), eval_dataset=rows(6))
    (measured,) = [row for row in found.history if "eval_loss" in row]
    assert {"eval_tasks/add/reward", "eval_rewards/sort/parity_reward/mean"} <= measured.keys()
    with pytest.raises(ValueError, match="of `eval_dataset`, which has"):
        train(LabTrainer, args, tiny_folder, reward=rewards, train_dataset=rows(), eval_dataset=problems(6))


@pytest.mark.parametrize("objective", ["ppo", "bnpo"])
def test_what_cannot_be_of_one_task_can_be_of_all(tiny_folder: Path, tmp_path: Path, objective: str) -> None:
    found = run(tmp_path, tiny_folder, WEIGHTS, objective=objective, max_steps=2)
    assert len(found.losses) == 2
    assert found.trainer.args.loss_type.endswith(objective)
    logged = [row for row in found.history if "loss" in row]
    assert all({"tasks/add/loss", "tasks/sort/loss"} <= row.keys() for row in logged)


def test_tasks_without_an_objective_only_order_the_prompts(tiny_folder: Path, tmp_path: Path) -> None:
    """A drop-in's loss is TRL's own."""
    seen = Seen()
    found = run(tmp_path, tiny_folder, {"add": {}, "sort": {}}, reward=seen, loss_type="dapo")
    assert [sum(task == "sort" for _, task in batch) for batch in seen.batches] in ([1, 2, 1, 2], [2, 1, 2, 1])
    assert found.trainer.args.loss_type == "dapo"
    assert (
        run(tmp_path, tiny_folder, OWN, objective="dapo", max_steps=1).trainer.args.loss_type == "grpo_lab:dapo+tasks"
    )


def test_rewards_of_tasks_in_stock_trl(tiny_folder: Path, tmp_path: Path) -> None:
    rewards = [for_task(mixed_reward(), name) for name in TASKS]
    found = train(GRPOTrainer, GRPOConfig(**arguments(tmp_path)), tiny_folder, reward=rewards, train_dataset=rows())
    plain = train(GRPOTrainer, GRPOConfig(**arguments(tmp_path)), tiny_folder, train_dataset=rows())
    assert movement_difference(found, plain) == 0.0
    assert {f"rewards/{name}/parity_reward/mean" for name in TASKS} <= found.history[0].keys()


def test_a_task_s_own_objective_does_not_inherit_the_run_s_knobs() -> None:
    own = {"a": {"objective": "grpo"}, "b": {"objective": "sapo"}, "c": {}}
    wide = LabConfig("x", objective={"name": "grpo", "epsilon": 0.05, "epsilon_high": 0.9}, tasks=own, bf16=False)
    a, _, c = (task.surrogate for task in wide.algorithm.objective.tasks)
    assert (a.epsilon, a.high, c.epsilon, c.high) == (0.2, 0.2, 0.05, 0.9)
    ruled = LabConfig(
        "x", objective="grpo", advantage="gdpo", tasks={"a": {"objective": "dr_grpo"}, "b": {}}, bf16=False
    )
    assert [type(rule).__name__ for rule, _ in ruled.algorithm.advantage.rules] == ["GroupMean", "GDPO"]
