"""An advantage per token from a team's rule or hook: a literal loop, bins and TRL's batches, the same way by name, the
door."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from grpo_lab import LabConfig, LabTrainer
from grpo_lab.advantages import GroupMean, token_rule
from grpo_lab.batch import RewardTable
from parity.harness import Run, arguments, mixed_reward, movement_bound, movement_difference, train
from training.test_process_training import PROCESS, ragged_steps
from training.test_process_training import run as run_process


@token_rule
def late_tokens(table: RewardTable) -> Tensor:
    """The group's difference, growing along the completion: Â_t = (r − mean)·(t + 1)/length."""
    row = GroupMean()(table.total, table.group_size)[table.local.rows]
    place = torch.arange(1, table.local.mask.size(1) + 1)
    return row.unsqueeze(1) * place / table.local.lengths.unsqueeze(1)


class ByHook(LabTrainer):
    def compute_advantages(self, table: RewardTable) -> Tensor:
        return late_tokens(table)

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
        output = super()._generate_and_score_completions(inputs)
        self.__dict__.setdefault("seen", []).append((output, [row["number"] for row in inputs], self._logs))
        return output


def trained(kind: Any, model: Path, folder: Path, **settings: Any) -> Run:
    shape = {"learning_rate": 0.1, "max_steps": 4, "num_iterations": 2, "gradient_accumulation_steps": 2}
    return train(kind, LabConfig(**arguments(folder, **{**shape, "num_generations": 4, **settings})), model)


@pytest.mark.not_fast
def test_hook_rule_bins_and_trls_batches(tiny_folder: Path, tmp_path: Path) -> None:
    hook = trained(ByHook, tiny_folder, tmp_path, objective="dr_grpo")
    for output, numbers, _ in hook.trainer.seen:
        ids = [row[kept].tolist() for row, kept in zip(output["completion_ids"], output["completion_mask"].bool())]
        rewards = mixed_reward()(prompts=[], completion_ids=ids, number=numbers)
        for row, (tokens, reward) in enumerate(zip(ids, rewards, strict=True)):
            group = rewards[row - row % 4 : row - row % 4 + 4]
            expected = [(reward - sum(group) / 4) * (t + 1) / len(tokens) for t in range(len(tokens))]
            found = output["advantages"][row].tolist()[: len(tokens)]
            assert found == pytest.approx(expected, rel=1e-6, abs=1e-7)  # float32 of numbers of size 1
    last = hook.trainer.seen[-1][0]
    own = last["completion_mask"].bool()
    means = [row[kept].mean().item() for row, kept in zip(last["advantages"], own, strict=True)]
    assert list(hook.trainer._logs["advantages"]) == pytest.approx(means, abs=1e-6)
    by_name = trained(
        LabTrainer, tiny_folder, tmp_path, objective={"name": "dr_grpo", "advantage": f"{__name__}:late_tokens"}
    )
    assert all(torch.equal(value, hook.weights[name]) for name, value in by_name.weights.items())
    off = trained(ByHook, tiny_folder, tmp_path, objective="dr_grpo", update="off")
    assert movement_difference(hook, off) <= movement_bound(off)


@pytest.mark.not_fast
def test_a_hook_over_process_gets_what_process_gives(tiny_folder: Path, tmp_path: Path) -> None:
    class Passing(LabTrainer):
        def compute_advantages(self, table: RewardTable) -> Tensor:
            assert set(table.steps) == {0}
            return super().compute_advantages(table)

    plain = run_process(tmp_path, tiny_folder, [ragged_steps], max_steps=2)
    config = LabConfig(**arguments(tmp_path, learning_rate=0.2, max_steps=2, objective=PROCESS))
    passed = train(Passing, config, tiny_folder, rollout=_again(plain), reward=[ragged_steps])
    assert all(torch.equal(value, plain.weights[name]) for name, value in passed.weights.items())


def _again(run: Run) -> Any:
    rollout = run.trainer.rollout_func
    rollout.calls = 0
    return rollout


@pytest.mark.not_fast
@pytest.mark.parametrize("shape", ["(12, 2)", "(3,)", "scalar", "nan", "list"])
def test_another_shape_is_refused(shape: str, tiny_folder: Path, tmp_path: Path) -> None:
    made = {
        "(12, 2)": torch.zeros(12, 2),
        "(3,)": torch.zeros(3),
        "scalar": torch.zeros(()),
        "nan": torch.full((12,), torch.nan),
        "list": [0.0] * 12,
    }

    class Wrong(LabTrainer):
        def compute_advantages(self, table: RewardTable) -> Tensor:
            return made[shape]

    with pytest.raises(
        ValueError, match=r"advantage rule returned.*\[12\].*table\.local"
    ):  # with a guard NaN costs its step
        train(Wrong, LabConfig(**arguments(tmp_path), objective="dr_grpo", guard="off"), tiny_folder)
