"""Three ways for a team to bring a part, each with the effect that it should have: the same weights by every way.

Two passes over each batch (``num_iterations=2``), so that ratios leave 1 and surrogates differ. Completions are
scripted, so runs differ by their update only; SGD in float32 on one thread, so equal runs are equal to the last bit.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from grpo_lab import LabConfig, LabTrainer
from grpo_lab.batch import Denominators, RewardTable, TokenBatch, masked_sum, safe
from grpo_lab.data import word_problems
from grpo_lab.testing import ScriptedRollout, tiny_model

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("tables")]


def soft_clip(batch: TokenBatch) -> Tensor:
    return -batch.advantages * torch.tanh(4 * (batch.ratio - 1)) / 4


def best_minus_mean(rewards: Tensor, group_size: int) -> Tensor:
    grouped = rewards.view(-1, group_size)
    return torch.where(grouped == grouped.amax(1, keepdim=True), grouped - grouped.mean(1, keepdim=True), 0.0).flatten()


def root_mean(loss: Tensor, mask: Tensor, denominators: Denominators) -> Tensor:
    """Each completion divided by the square root of its length: between ``sequence_mean`` and ``fixed_budget``."""
    lengths = mask.sum(1).clamp(min=1).sqrt()
    return (masked_sum(loss, mask, dim=1) / lengths).sum() / denominators.rows


def spread_of_ids(completion_ids: list[list[int]], **columns: Any) -> list[float]:
    return [(sum(ids) % 17) / 17 for ids in completion_ids]


def weights(folder: Path, trainer_class: type[LabTrainer] = LabTrainer, **settings: Any) -> Tensor:
    """All weights after two generations with two passes each."""
    model, tokenizer = tiny_model("qwen2", hidden_size=32, initializer_range=0.2)
    args = LabConfig(
        str(folder),
        max_steps=4,
        num_iterations=2,
        per_device_train_batch_size=8,
        num_generations=4,
        max_completion_length=12,
        learning_rate=0.5,
        optim="sgd",
        lr_scheduler_type="constant",
        use_cpu=True,
        bf16=False,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
        **settings,
    )
    trainer = trainer_class(
        model,
        spread_of_ids,
        args,
        word_problems(32, seed=0),
        processing_class=tokenizer,
        rollout_func=ScriptedRollout(list(range(300, 400)), [3, 7, 12], end_id=tokenizer.eos_token_id),
    )
    trainer.train()
    return torch.cat([parameter.detach().flatten() for parameter in trainer.model.parameters()])


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Tensor:
    return weights(tmp_path_factory.mktemp("plain"), objective="dr_grpo")


class ByHook(LabTrainer):
    objective = "dr_grpo"

    def token_loss(self, batch: TokenBatch) -> Tensor:
        return safe(soft_clip(batch), batch.mask)


class ByAttribute(LabTrainer):
    objective = "dr_grpo"
    surrogate = staticmethod(soft_clip)


class AdvantageByHook(LabTrainer):
    objective = "dr_grpo"

    def compute_advantages(self, table: RewardTable) -> Tensor:
        return best_minus_mean(table.total, table.group_size)


class AdvantageByAttribute(LabTrainer):
    objective = "dr_grpo"
    advantage = staticmethod(best_minus_mean)


class AggregationByAttribute(LabTrainer):
    objective = "dr_grpo"
    aggregation = staticmethod(root_mean)


def here(part: Callable[..., Any]) -> str:
    return f"{__name__}:{part.__name__}"


def all_alike(found: list[Tensor], plain: Tensor) -> None:
    assert not torch.equal(found[0], plain), "the part had no effect"
    for other in found[1:]:
        torch.testing.assert_close(other, found[0], rtol=0, atol=0)


def test_surrogate_by_object_by_address_by_attribute_and_by_hook(tmp_path: Path, plain: Tensor) -> None:
    found = [
        weights(tmp_path / "a", objective={"name": "dr_grpo", "surrogate": soft_clip}),
        weights(tmp_path / "b", objective={"name": "dr_grpo", "surrogate": here(soft_clip)}),
        weights(tmp_path / "c", ByAttribute),
        weights(tmp_path / "d", ByHook),
    ]
    all_alike(found, plain)


def test_advantage_by_object_by_address_by_attribute_and_by_hook(tmp_path: Path, plain: Tensor) -> None:
    found = [
        weights(tmp_path / "a", objective="dr_grpo", advantage=best_minus_mean),
        weights(tmp_path / "b", objective="dr_grpo", advantage=here(best_minus_mean)),
        weights(tmp_path / "c", objective={"name": "dr_grpo", "advantage": best_minus_mean}),
        weights(tmp_path / "d", AdvantageByAttribute),
        weights(tmp_path / "e", AdvantageByHook),
    ]
    all_alike(found, plain)


def test_aggregation_by_object_by_address_and_by_attribute(tmp_path: Path, plain: Tensor) -> None:
    found = [
        weights(tmp_path / "a", objective={"name": "dr_grpo", "aggregation": root_mean}),
        weights(tmp_path / "b", objective={"name": "dr_grpo", "aggregation": here(root_mean)}),
        weights(tmp_path / "c", AggregationByAttribute),
    ]
    all_alike(found, plain)


def test_parts_of_ours_by_name(tmp_path: Path, plain: Tensor) -> None:
    """The preset's own parts written out are the preset; another name is another run."""
    spelt = {"name": "dr_grpo", "surrogate": "clipped", "advantage": "group_mean", "aggregation": "fixed_budget"}
    torch.testing.assert_close(weights(tmp_path / "a", objective=spelt), plain, rtol=0, atol=0)
    other = weights(tmp_path / "b", objective={"name": "dr_grpo", "advantage": "leave_one_out"})
    assert not torch.equal(other, plain)


def test_a_wrong_address_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"`surrogate` is 'nowhere.losses:mine', which cannot be loaded"):
        weights(tmp_path, objective={"name": "dr_grpo", "surrogate": "nowhere.losses:mine"})


def test_the_snippets_of_the_page_run() -> None:
    """Every Python block, in order, in one namespace."""
    page = Path(__file__).resolve().parents[2] / "docs" / "add_an_algorithm.md"
    blocks = re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    space: dict[str, Any] = {}
    for block in blocks:
        exec(compile(block, str(page), "exec"), space)
    table = RewardTable(torch.tensor([[1.0, 0.5], [0.0, 0.5]]), ("accuracy", "format"), torch.ones(2), 2)
    assert space["OnlyIfCorrect"].compute_advantages(None, table).tolist() == [0.75, -0.75]  # 1·1.5 and 0
    assert issubclass(space["SoftClipTrainer"], LabTrainer)
    assert space["args"].lab_settings.advantage.name == "leave_one_out"
