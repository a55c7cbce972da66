"""The line on real tiny runs: healthy, all groups dead, a drop-in without it; nothing logged changes; what is said, and
how often."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from trl import GRPOConfig, GRPOTrainer

from grpo_lab import LabConfig, LabTrainer
from grpo_lab.testing import ScriptedRollout
from grpo_lab.trainer.metrics.progress import HealthLine
from parity.harness import Run, arguments, mixed_reward, train


def run(folder: Path, model: Path, reward: Any = None, prepare: Any = None, **changes: Any) -> Run:
    settings = {**arguments(folder, max_steps=3), "objective": "dr_grpo", **changes}
    return train(LabTrainer, LabConfig(**settings), model, reward=reward or mixed_reward(), prepare=prepare)


def lines(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    return [r for r in caplog.records if r.name == "grpo_lab" and r.getMessage().startswith("step ")]


def without_it(trainer: Any) -> None:
    trainer.remove_callback(HealthLine)


@pytest.mark.not_fast
def test_a_healthy_run_says_so_and_logs_the_same(
    tiny_folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "grpo_lab")
    said = run(tmp_path, tiny_folder)
    found = lines(caplog)
    assert [r.levelno for r in found] == [logging.INFO] * 2  # the first window and the last, the same between
    assert all(": healthy (reward " in r.getMessage() for r in found)
    assert [r.getMessage().split(":")[0] for r in found] == ["step 1", "step 3"]
    caplog.clear()
    silent = run(tmp_path, tiny_folder, prepare=without_it)
    assert lines(caplog) == []
    timed = {"step_time", "train_runtime", "train_samples_per_second", "train_steps_per_second"}
    for one, other in zip(said.history, silent.history, strict=True):
        assert {k: v for k, v in one.items() if k not in timed} == {k: v for k, v in other.items() if k not in timed}


@pytest.mark.not_fast
def test_all_groups_dead_is_said_and_what_to_look_at(
    tiny_folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def never(completions: list[Any], **_: Any) -> list[float]:
        return [0.0] * len(completions)

    run(tmp_path, tiny_folder, reward=never)
    first, last = lines(caplog)  # at the level WARNING: a script without logging set up sees it
    assert first.getMessage().startswith("step 1: all groups are dead")
    assert "mean reward 0:" in first.getMessage()
    assert "Look at rewards and their weights, data (difficulty), num_generations" in first.getMessage()
    assert last.getMessage().startswith("step 3: all groups are dead")
    assert {first.levelno, last.levelno} == {logging.WARNING}


class OwnLoss(LabTrainer):
    """A team's, of whose value nobody here knows what it says."""

    def token_loss(self, batch: Any) -> torch.Tensor:
        return super().token_loss(batch)


@pytest.mark.not_fast
@pytest.mark.parametrize(("trainer", "is_said"), [(LabTrainer, True), (OwnLoss, False)])
def test_of_a_teams_loss_it_does_not_say_that_0_is_right(
    trainer: type[LabTrainer], is_said: bool, tiny_folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "grpo_lab")
    whole_batch = {"max_steps": 1, "per_device_train_batch_size": 24, "gradient_accumulation_steps": 1}
    config = LabConfig(**arguments(tmp_path, **whole_batch), objective="grpo")
    assert abs(train(trainer, config, tiny_folder, reward=mixed_reward()).losses[0]) < 1e-6
    assert ["loss 0 is right" in one.getMessage() for one in lines(caplog)] == [is_said]


@pytest.mark.not_fast
def test_a_drop_in_run_has_it_where_it_is_asked_for(
    tiny_folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "grpo_lab")
    plain = run(tmp_path, tiny_folder, objective=None, max_steps=1)
    assert not any(isinstance(one, HealthLine) for one in plain.trainer.callback_handler.callbacks)
    assert lines(caplog) == []
    asked = train(GRPOTrainer, GRPOConfig(**arguments(tmp_path, max_steps=1)), tiny_folder, callbacks=[HealthLine()])
    assert asked.trainer.state.global_step == 1
    assert len(lines(caplog)) == 1  # stock TRL's trainer, too: it reads TRL's metrics


class TwoGroups(LabTrainer):
    """An optimizer of two groups; ``rates``: theirs."""

    rates = (0.0, 0.5)

    def create_optimizer(self, model: Any = None) -> Any:
        first, *others = self.model.parameters()
        groups = [{"params": one, "lr": rate} for one, rate in zip(([first], others), self.rates, strict=True)]
        self.optimizer = torch.optim.SGD(groups)
        return self.optimizer


@pytest.mark.not_fast
@pytest.mark.parametrize("rate", [0.5, 0.0])
def test_a_learning_rate_of_0_is_said_where_all_groups_have_it(
    rate: float, tiny_folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """HF logs the first group's."""

    class Mine(TwoGroups):
        rates = (0.0, rate)

    caplog.set_level(logging.INFO, "grpo_lab")
    found = train(Mine, LabConfig(**arguments(tmp_path, max_steps=3), objective="dr_grpo"), tiny_folder)
    assert [row["learning_rate"] for row in found.history if "loss" in row] == [0.0] * 3
    said = [r.getMessage() for r in lines(caplog)]
    assert any("is 0: nothing moves" in one for one in said) is (rate == 0)


@pytest.mark.not_fast
@pytest.mark.parametrize("judges", [True, False])
def test_cut_completions_count_as_wrong_where_answers_are_judged(
    judges: bool, tiny_folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def liking(completion_ids: list[list[int]], **_: Any) -> list[float]:
        return [float(sum(ids) % 2) for ids in completion_ids]

    liking.measures_correctness = judges  # type: ignore[attr-defined]
    rollout = ScriptedRollout(range(20, 90), (3, 5), end_id=None)
    args = LabConfig(**arguments(tmp_path, max_steps=3), objective="dr_grpo")
    train(LabTrainer, args, tiny_folder, reward=liking, rollout=rollout)
    said = [
        r.getMessage()
        for r in caplog.records
        if "completions are cut off" in r.getMessage() or "were cut at" in r.getMessage()
    ]
    assert len(said) == 2  # once by the step, once by the health line
    assert all(("count as wrong" in one) is judges for one in said)


@pytest.mark.not_fast
def test_nothing_scored_is_said_of_what_trl_logs(
    tiny_folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """TRL 1.16 logs the mean over nothing as None. One such window loses no weights."""

    def silent(completions: list[Any], trainer_state: Any, **_: Any) -> list[None] | list[float]:
        early = trainer_state.global_step < 1
        return [float(place % 2) for place in range(len(completions))] if early else [None] * len(completions)

    found = run(tmp_path, tiny_folder, reward=silent, max_steps=5)
    assert [row["reward"] for row in found.history if "loss" in row][1:] == [None] * 4
    said = [r.getMessage() for r in lines(caplog)]
    assert "no completion was scored" in said[-1]
    assert not any("weights may be lost" in one or "got the same reward" in one for one in said)


ARGS = SimpleNamespace(steps_per_generation=1, num_iterations=1, gradient_accumulation_steps=1)


def played(rows: list[dict[str, Any]], main: bool = True, every: int = 4) -> list[int]:
    """Steps at which something was said of these logs."""
    callback, state = HealthLine(every), SimpleNamespace(log_history=[], max_steps=99, is_world_process_zero=main)
    said = []
    for step, row in enumerate(rows, 1):
        state.log_history.append({**row, "step": step})
        state.global_step, before = step, callback.said
        callback.on_log(ARGS, state, None, row)
        if callback.said is not before:
            said.append(step)
    return said


def test_an_unchanged_verdict_is_said_every_so_often_only() -> None:
    healthy, dead = {"loss": 0.1, "groups/dead_share": 0.0}, {"loss": 0.1, "groups/dead_share": 1.0}
    assert played([healthy] * 10) == [1, 5, 9]
    assert played([healthy] * 2 + [dead] * 5 + [healthy]) == [1, 5, 8]  # three windows dead; alive again
    assert played([healthy, {"eval_loss": 0.1}, {"train_runtime": 3.0}]) == [1]
    assert played([healthy] * 3, main=False) == []
