"""A team's ``token_loss`` beside the exact update: it may change with the step, and it may log."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from grpo_lab import LabConfig, LabTrainer
from parity.harness import arguments, assert_same_movement, movement_difference, train
from tolerance import loss_gap


class LatePull(LabTrainer):
    """From the third step on a term that does not vanish where the advantage is 0."""

    def token_loss(self, batch: Any) -> torch.Tensor:
        loss = super().token_loss(batch)
        return loss if self.state.global_step < 2 else loss + 0.1 * batch.logps.square().masked_fill(~batch.mask, 0.0)


class LiveOnly(LatePull):
    """What an exact update that asked only once would do: rows of dead groups stay left out."""

    def token_loss(self, batch: Any) -> torch.Tensor:
        return super().token_loss(batch).masked_fill(batch.advantages == 0, 0.0)


@pytest.mark.not_fast
def test_a_term_that_sets_in_later_acts_on_all_rows(tmp_path: Path, tiny_folder: Path) -> None:
    settings = arguments(tmp_path, learning_rate=0.05)
    ours, stock = (
        train(LatePull, LabConfig(**settings, objective="dr_grpo", update=update), tiny_folder)
        for update in (None, "off")
    )
    #: per nat a surrogate's term moves by |Â| ≤ 1 and the pull 0.1·l² by 0.2·6; terms are at most 1 + 0.1·6² ≈ 4.6
    bound = loss_gap(torch.float32, terms=4.6, additions=12 * 30, steps=len(stock.losses))
    assert ours.losses == pytest.approx(stock.losses, rel=0, abs=bound)
    assert_same_movement(ours, stock)
    live_only = train(LiveOnly, LabConfig(**settings, objective="dr_grpo", update="off"), tiny_folder)
    assert movement_difference(live_only, stock) > 0.05, "dead rows left out after the second step must be seen"
    shares = [row["update/live_share"] for row in ours.history if "update/live_share" in row]
    assert [share < 1 for share in shares] == [True, True, False, False]


class Logging(LabTrainer):
    def token_loss(self, batch: Any) -> torch.Tensor:
        self._metrics["train"]["own/toy_share"].append(float(batch.logps.dtype == torch.float64))
        self.metric_book("train").add_alike("own/toy", torch.tensor(float(batch.logps.dtype == torch.float64)), 1)
        return super().token_loss(batch)


@pytest.mark.not_fast
def test_toy_batches_are_not_in_a_teams_metrics(tmp_path: Path, tiny_folder: Path) -> None:
    """The trainer asks the hook about float64 toy batches, at the start and with each generation batch."""
    settings = arguments(tmp_path, max_steps=2, num_iterations=2)
    run = train(Logging, LabConfig(**settings, objective="dr_grpo"), tiny_folder)
    logged = [row for row in run.history if "loss" in row]
    assert [row["own/toy_share"] for row in logged] == [0.0, 0.0]
    assert [row["own/toy"] for row in logged] == [0.0, 0.0]
