"""A team's own `_calculate_rewards` and `compute_advantages`: what the outermost method returns makes the
advantages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

from grpo_lab import LabConfig, LabTrainer
from grpo_lab.rewards import group_reward
from grpo_lab.testing import ScriptedRollout
from parity.harness import LENGTHS, arguments, problems

ROUNDING = 8 * torch.finfo(torch.float32).eps  # a mean of four numbers up to 2, a difference, and (z-scores) a quotient


def spread(completion_ids: list[list[int]], **_: Any) -> list[float]:
    return [(sum(ids) % 17) / 17 for ids in completion_ids]


def shortness(completion_ids: list[list[int]], number: list[int], **_: Any) -> list[float | None]:
    return [None if n % 4 == 1 else 1 / len(ids) for n, ids in zip(number, completion_ids, strict=True)]


def build(kind: Any, model: Path, folder: Path, rewards: Any = None, **changes: Any) -> Any:
    tokenizer = AutoTokenizer.from_pretrained(model)
    config = LabConfig if issubclass(kind, LabTrainer) else GRPOConfig
    return kind(
        AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32),
        [spread, shortness] if rewards is None else rewards,
        config(**arguments(folder, **changes)),
        problems(),
        processing_class=tokenizer,
        rollout_func=ScriptedRollout(range(20, 90), LENGTHS, end_id=tokenizer.eos_token_id),
    )


def generated(trainer: Any) -> dict[str, Any]:
    trainer.model.train()
    batch: dict[str, Any] = trainer._generate_and_score_completions(next(iter(trainer.get_train_dataloader())))
    return batch


class Shaping(LabTrainer):
    """Format counts only where the first reward is above its group's mean: made from the finished table."""

    returned: Tensor

    def _calculate_rewards(self, *args: Any) -> Tensor:
        values = super()._calculate_rewards(*args).clone()
        first = values[:, 0].view(-1, self.num_generations)
        values[:, 1:][(first <= first.mean(1, keepdim=True)).flatten()] = 0.0
        values[:, 0] *= 2
        self.returned = values
        return values


class Replacing(LabTrainer):
    def _calculate_rewards(self, inputs: Any, prompts: Any, completions: Any, completion_ids_list: Any) -> Tensor:
        values = [[float(len(ids)), 0.0] for ids in completion_ids_list]
        self.returned = self.accelerator.gather(torch.tensor(values))
        return self.returned


def literal(rows: Tensor, size: int) -> list[float]:
    """dr_grpo's advantage in float64, by loops: the sum of what is known, minus the group's mean."""
    totals = [sum(value for value in row if value == value) for row in rows.double().tolist()]
    means = [sum(totals[i : i + size]) / size for i in range(0, len(totals), size)]
    return [total - means[row // size] for row, total in enumerate(totals)]


@pytest.mark.parametrize("kind", [Shaping, Replacing])
def test_what_a_subclass_returns_makes_the_advantages(kind: Any, tiny_folder: Path, tmp_path: Path) -> None:
    trainer = build(kind, tiny_folder, tmp_path, objective="dr_grpo")
    batch = generated(trainer)
    expected = torch.tensor(literal(trainer.returned, 4))
    scale = trainer.returned.nan_to_num().abs().max().item()
    assert (batch["advantages"] - expected).abs().max() <= ROUNDING * scale
    assert expected.abs().max() > 0.1


def test_group_rewards_are_in_what_a_subclass_is_given(tiny_folder: Path, tmp_path: Path) -> None:
    @group_reward(requires=("spread",))
    def twice(group: Any) -> list[float]:
        return [2 * value for value in group.rewards["spread"]]

    trainer = build(Shaping, tiny_folder, tmp_path, rewards=[spread, twice], objective="dr_grpo")
    generated(trainer)
    second = trainer.returned[:, 1]
    assert torch.equal(second[second != 0], trainer.returned[:, 0][second != 0])  # 2·x beside x·2


@pytest.mark.parametrize(
    ("values", "parts"),
    [
        (torch.zeros(12), ("shape (12,)", "[12, 2]")),
        (torch.zeros(4, 2), ("shape (4, 2)", "[12, 2]")),
        (torch.zeros(12, 3), ("shape (12, 3)", "'spread', 'shortness'")),
        ([[0.0, 0.0]] * 12, ("a list",)),
        (torch.full((12, 2), torch.inf), ("column 'spread', returned inf for completion 0",)),
    ],
    ids=["vector", "rows", "columns", "list", "infinite"],
)
def test_what_cannot_be_rewards_is_named(
    values: Any, parts: tuple[str, ...], tiny_folder: Path, tmp_path: Path
) -> None:
    class Wrong(LabTrainer):
        def _calculate_rewards(self, *args: Any) -> Any:
            return values

    with pytest.raises(ValueError) as caught:
        generated(build(Wrong, tiny_folder, tmp_path, objective="dr_grpo", guard="off"))
    assert [part for part in ("`Wrong._calculate_rewards`", *parts) if part not in str(caught.value)] == []


class Passing(LabTrainer):
    def compute_advantages(self, table: Any) -> Tensor:
        return super().compute_advantages(table)


SCALINGS: list[dict[str, Any]] = [
    {"scale_rewards": "group"},
    {"scale_rewards": "none"},
    {"scale_rewards": "batch"},
    {"multi_objective_aggregation": "normalize_then_sum", "reward_weights": [1.0, 0.5]},
]


@pytest.mark.parametrize("settings", SCALINGS, ids=lambda settings: "-".join(map(str, settings.values())))
def test_a_hook_that_asks_super_gets_trls_advantages(
    settings: dict[str, Any], tiny_folder: Path, tmp_path: Path
) -> None:
    stock = generated(build(GRPOTrainer, tiny_folder, tmp_path, **settings))
    ours = generated(build(Passing, tiny_folder, tmp_path, **settings))
    assert torch.equal(ours["completion_ids"], stock["completion_ids"])
    # z-scores of at most √11 each; float32 TRL against ours, one rounding of a sum of four and a quotient on either
    # side
    assert (ours["advantages"] - stock["advantages"]).abs().max() <= 16 * ROUNDING
    assert stock["advantages"].abs().max() > 0.1


def test_a_token_loss_that_trl_would_never_ask_is_refused(tiny_folder: Path, tmp_path: Path) -> None:
    class Mine(LabTrainer):
        def token_loss(self, batch: Any) -> Tensor:
            return super().token_loss(batch)

    with pytest.raises(ValueError) as caught:
        build(Mine, tiny_folder, tmp_path, delta=1.1)
    assert [p for p in ("`Mine.token_loss`", "delta=1.1", "`objective`") if p not in str(caught.value)] == []


def test_a_batch_without_rewards_is_named(tiny_folder: Path, tmp_path: Path) -> None:
    class Mixin(GRPOTrainer):
        def _generate_and_score_completions(self, inputs: Any) -> Any:
            return {"prompt_ids": torch.ones(4, 2), "completion_mask": torch.ones(4, 2)}

    class Mine(LabTrainer, Mixin):
        pass

    with pytest.raises(RuntimeError, match=r"`_calculate_rewards`"):
        generated(build(Mine, tiny_folder, tmp_path, objective="dr_grpo"))
