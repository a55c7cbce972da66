"""``describe()``, ``loss_type`` and the model card say what was trained, hooks of a subclass included."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from grpo_lab import KimiTrainer, LabConfig, LabTrainer
from grpo_lab.pipelines.train import rewards_in_force
from grpo_lab.recipe.sections import recipe_from
from parity.harness import arguments, mixed_reward, problems


def soft(batch: Any) -> Tensor:
    return -batch.advantages * (batch.ratio - 1).tanh()


class Shaped(LabTrainer):
    def _calculate_rewards(self, *args: Any, **kwargs: Any) -> Tensor:
        return super()._calculate_rewards(*args, **kwargs)

    def compute_advantages(self, table: Any) -> Tensor:
        return super().compute_advantages(table)

    def token_loss(self, batch: Any) -> Tensor:
        return super().token_loss(batch)


class OwnLoss(LabTrainer):
    def _compute_loss(self, model: Any, inputs: Any) -> Tensor:
        return super()._compute_loss(model, inputs)


def trainer(kind: Any, folder: Path, tiny: Path, **settings: Any) -> Any:
    return kind(
        AutoModelForCausalLM.from_pretrained(tiny),
        mixed_reward(),
        LabConfig(**arguments(folder, **settings)),
        problems(),
        processing_class=AutoTokenizer.from_pretrained(tiny),
    )


@pytest.mark.parametrize("loss", [{}, {"delta": 1.1}], ids=["ours", "left to TRL"])
def test_trls_advantages_are_named(loss: dict[str, Any], tmp_path: Path) -> None:
    """Advantages of `normalize_then_sum` were called `trl:group`, those beside a loss of TRL's only `trl`."""
    for settings, name in (
        ({"multi_objective_aggregation": "normalize_then_sum"}, "trl:normalize_then_sum"),
        ({"scale_rewards": "batch"}, "trl:batch"),
    ):
        config = LabConfig(**arguments(tmp_path, **loss, **settings))
        assert config.algorithm.names["advantage"] == name


def card_of(made: Any) -> str:
    made.create_model_card(model_name="mine")
    return (Path(made.args.output_dir) / "README.md").read_text()


@pytest.mark.parametrize(
    ("settings", "loss_type", "scaling"),
    [
        ({"objective": "reinforce"}, "grpo_lab:reinforce", "none"),
        ({"objective": "mirror_descent"}, "grpo_lab:mirror_descent", "none"),
        ({"objective": "gspo"}, "grpo", "group"),
        ({"objective": "dr_grpo", "advantage": "leave_one_out"}, "dr_grpo", "none"),
        ({"objective": {"name": "dr_grpo", "surrogate": soft}}, "grpo_lab:dr_grpo+surrogate=soft", "none"),
        (
            {"objective": {"name": "dapo", "aggregation": "sequence_sum"}},
            "grpo_lab:dapo+aggregation=sequence_sum",
            "group",
        ),
        ({}, "dapo", "group"),
    ],
)  # fmt: skip
def test_what_trl_calls_the_loss(settings: dict[str, Any], loss_type: str, scaling: str, tmp_path: Path) -> None:
    config = LabConfig(**arguments(tmp_path, **settings))
    assert (config.loss_type, config.scale_rewards) == (loss_type, scaling)
    assert json.loads(config.to_json_string())["loss_type"] == loss_type
    config.agree()  # a second time, as the trainer does with class attributes
    assert config.loss_type == loss_type


def test_such_a_loss_type_without_its_objective_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="what a run with `objective` wrote there"):
        LabConfig(**arguments(tmp_path, loss_type="grpo_lab:reinforce"))


def test_hooks_stand_in_the_description_and_in_the_card(tiny_folder: Path, tmp_path: Path) -> None:
    made = trainer(Shaped, tmp_path, tiny_folder, objective="reinforce")
    said = made.algorithm.describe()
    assert "advantage=Shaped.compute_advantages over group_mean" in said
    assert "surrogate=Shaped.token_loss over Reinforce" in said
    assert "rewards=Shaped._calculate_rewards" in said
    card = card_of(made)
    assert said in card
    assert "None" not in card
    assert f"the local model `{tiny_folder}`" in card
    assert "Williams 1992" in card
    assert "parity_reward × 1" in card
    assert "trained with GRPO" not in card
    assert "2402.03300" not in card


def test_a_replaced_loss_and_trls_own(tiny_folder: Path, tmp_path: Path) -> None:
    own = trainer(OwnLoss, tmp_path / "a", tiny_folder, objective="dapo")
    assert "loss=OwnLoss._compute_loss" in own.algorithm.describe()
    plain = trainer(LabTrainer, tmp_path / "b", tiny_folder, objective="mirror_descent")
    assert "Shaped" not in plain.algorithm.describe()
    assert "objective=mirror_descent" in card_of(plain)
    left = trainer(LabTrainer, tmp_path / "c", tiny_folder, delta=1.1)
    assert left.algorithm.describe().startswith("TRL's own loss (delta=1.1, ")
    assert "TRL's own loss" in card_of(left)


def test_the_runs_record_has_the_rewards_in_force(tiny_folder: Path, tmp_path: Path) -> None:
    """What the trainer has added, and `reward_weights`: `run.json` had the recipe's rewards and weights alone."""
    written = {"model": {"tiny": {}}, "data": {"loader": "word_problems", "n": 8}, "rewards": ["tests:mixed"]}
    rewards = recipe_from(written).rewards
    made = trainer(KimiTrainer, tmp_path / "kimi", tiny_folder, max_completion_length=8)
    _, added = rewards_in_force(rewards, made)
    assert (added.name, added.weight) == ("kimi_length_reward", 0.5)  # it said 1, TRL's outer factor
    assert added.arguments == {"schedule": {"kind": "warmup", "start": 100, "value": 0.5}}
    assert "kimi_length_reward × 0.5 from step 100 on, 0 before" in card_of(made)
    (found,) = rewards_in_force(rewards, trainer(LabTrainer, tmp_path / "lab", tiny_folder, reward_weights=[0.25]))
    assert found.weight == 0.25
