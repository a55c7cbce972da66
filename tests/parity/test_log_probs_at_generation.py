"""Old and reference log-probs at generation: TRL's numbers from bins, and no forward for rows that nothing reads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from trl import GRPOConfig, GRPOTrainer

from grpo_lab import LabConfig
from grpo_lab.trainer import log_probs
from grpo_lab.trainer.lab_trainer import LabTrainer
from grpo_lab.update import live_rows
from parity.harness import arguments, mixed_reward, movement_difference, train

TWICE = {"num_iterations": 2, "max_steps": 2, "loss_type": "dr_grpo", "scale_rewards": "none"}


class Recorder:
    """The first generation batch of a run as the loss gets it, and the positions that no-grad forwards compute."""

    def __init__(self) -> None:
        self.output: dict[str, Any] = {}
        self.positions = 0

    def __call__(self, trainer: Any) -> None:
        generate = trainer._generate_and_score_completions
        model = trainer.model

        def count(_module: Any, _args: Any, kwargs: dict[str, Any]) -> None:
            if not torch.is_grad_enabled():
                self.positions += kwargs["input_ids"].numel()

        def recorded(inputs: Any) -> dict[str, Any]:
            handle = model.register_forward_pre_hook(count, with_kwargs=True)
            output = generate(inputs)
            handle.remove()
            if not self.output:
                self.output = dict(output)
            return output

        trainer._generate_and_score_completions = recorded


def both(tmp_path: Path, model: Path, dead_every: int = 3, **changes: Any) -> tuple[Recorder, Recorder]:
    found = []
    for kind, config in ((GRPOTrainer, GRPOConfig), (LabTrainer, LabConfig)):
        recorder = Recorder()
        args = config(**arguments(tmp_path, **{**TWICE, **changes}))
        train(kind, args, model, reward=mixed_reward(dead_every), prepare=recorder)
        found.append(recorder)
    return found[0], found[1]


@pytest.mark.parametrize("changes", [{}, {"steps_per_generation": 6, "num_iterations": 1}], ids=["twice", "outlives"])
def test_old_log_probs_are_trls_on_live_rows_and_not_computed_on_dead_ones(
    tmp_path: Path, tiny_folder: Path, changes: dict[str, Any]
) -> None:
    stock, ours = both(tmp_path, tiny_folder, **changes)
    mask = ours.output["completion_mask"].bool()
    live = live_rows(ours.output["advantages"], mask)
    assert 0 < live.sum() < live.numel(), "dead and live rows, or nothing is shown"
    theirs, found = stock.output["old_per_token_logps"], ours.output["old_per_token_logps"]
    assert torch.allclose(found[live][mask[live]], theirs[live][mask[live]], atol=2e-6)
    assert (found[~live] == 0).all()
    assert (found[~mask] == 0).all()
    lengths = (ours.output["prompt_mask"].sum(1) + ours.output["completion_mask"].sum(1))[live]
    assert ours.positions >= lengths.sum()
    assert ours.positions < 0.6 * stock.positions


def test_with_a_kl_term_all_rows_are_computed_without_padding(tmp_path: Path, tiny_folder: Path) -> None:
    stock, ours = both(tmp_path, tiny_folder, beta=0.1)
    mask = ours.output["completion_mask"].bool()
    for name in ("old_per_token_logps", "ref_per_token_logps"):
        assert torch.allclose(ours.output[name][mask], stock.output[name][mask], atol=2e-6), name
    assert ours.positions < 0.8 * stock.positions  # the policy's; the reference is a model of its own


def test_no_live_row_is_no_trouble(tmp_path: Path, tiny_folder: Path) -> None:
    _, ours = both(tmp_path, tiny_folder, dead_every=1)
    assert (ours.output["old_per_token_logps"] == 0).all()
    assert ours.positions <= 4, "one stand-in of two tokens at most"


def test_a_loss_of_the_teams_own_gets_what_trl_would_give_it(tmp_path: Path, tiny_folder: Path) -> None:
    """A subclass that replaces ``_compute_loss`` may read any row."""

    class Team(LabTrainer):
        def _compute_loss(self, model: Any, inputs: Any) -> torch.Tensor:
            assert (inputs["old_per_token_logps"] != 0).any(dim=1).all()
            return GRPOTrainer._compute_loss(self, model, inputs)

    train(Team, LabConfig(**arguments(tmp_path, **TWICE)), tiny_folder)


def test_kl_in_the_reward_reads_all_rows(tmp_path: Path, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The penalty comes before the advantages, so no row can be left out; bins or TRL's forward, the same rewards."""
    settings = {"objective": "reinforce", "kl": {"estimator": "k1", "coefficient": 0.1, "placement": "reward"}}
    args = LabConfig(**arguments(tmp_path, max_steps=2, **settings))
    runs = [train(LabTrainer, args, tiny_folder)]
    as_trl = log_probs.GenerationForwards(misaligned=False, corrected=False, in_bins=False, put_off=False)
    monkeypatch.setattr(log_probs.GenerationForwards, "of", staticmethod(lambda trainer: as_trl))
    runs.append(train(LabTrainer, args, tiny_folder))
    assert runs[0].losses == pytest.approx(runs[1].losses, abs=1e-6)
    penalties = [[row["kl/reward_penalty"] for row in run.history if "loss" in row] for run in runs]
    assert penalties[0] == pytest.approx(penalties[1], abs=1e-6)
    assert any(abs(p) > 1e-4 for p in penalties[0])


def test_a_subclass_that_moves_advantages_afterwards(tmp_path: Path, tiny_folder: Path) -> None:
    """Rows that had no advantage when log-probs were computed may have one when the loss reads them."""

    class Team(LabTrainer):
        def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
            output = super()._generate_and_score_completions(inputs)
            output["advantages"] = output["advantages"] + 0.5
            return output

    settings = arguments(tmp_path, **TWICE)
    ours, stock = (train(Team, LabConfig(**settings, update=update), tiny_folder) for update in (None, "off"))
    assert ours.losses == pytest.approx(stock.losses, rel=1e-5, abs=1e-7)
    assert movement_difference(ours, stock) <= 1e-5


def test_kl_in_the_reward_leaves_an_on_policy_ratio_at_one(tmp_path: Path, models: dict[str, Path]) -> None:
    """Log-probs for the penalty come from a forward with other dropout masks; with one update a batch the loss must not read them."""
    seen: list[float] = []

    class Team(LabTrainer):
        def token_loss(self, batch: Any) -> torch.Tensor:
            if batch.logps.dtype == torch.float32:
                seen.append(batch.log_ratio.abs().max().item())
            return super().token_loss(batch)

    kl = {"estimator": "k1", "coefficient": 0.1, "placement": "reward"}
    train(Team, LabConfig(**arguments(tmp_path, max_steps=2), objective="dr_grpo", kl=kl), models["dropout"])
    assert seen
    assert max(seen) == 0.0
