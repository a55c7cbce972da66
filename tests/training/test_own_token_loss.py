"""A team's ``token_loss`` beside the exact update: it may change with the step, and it may log."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from grpo_lab import LabConfig, LabTrainer
from parity.harness import arguments, movement_difference, train


class LatePull(LabTrainer):
    """From the third step on a term that does not vanish where the advantage is 0."""

    def token_loss(self, batch: Any) -> torch.Tensor:
        loss = super().token_loss(batch)
        return loss if self.state.global_step < 2 else loss + 0.1 * batch.logps.square().masked_fill(~batch.mask, 0.0)


def test_a_term_that_sets_in_later_acts_on_all_rows(tmp_path: Path, tiny_folder: Path) -> None:
    settings = arguments(tmp_path, learning_rate=0.05)
    ours, stock = (
        train(LatePull, LabConfig(**settings, objective="dr_grpo", update=update), tiny_folder)
        for update in (None, "off")
    )
    assert ours.losses == pytest.approx(stock.losses, rel=1e-5, abs=1e-7)
    assert movement_difference(ours, stock) <= 1e-5
    shares = [row["update/live_share"] for row in ours.history if "update/live_share" in row]
    assert [share < 1 for share in shares] == [True, True, False, False]


class Logging(LabTrainer):
    def token_loss(self, batch: Any) -> torch.Tensor:
        self._metrics["train"]["own/toy_share"].append(float(batch.logps.dtype == torch.float64))
        self.metric_book("train").add_alike("own/toy", torch.tensor(float(batch.logps.dtype == torch.float64)), 1)
        return super().token_loss(batch)


def test_toy_batches_are_not_in_a_teams_metrics(tmp_path: Path, tiny_folder: Path) -> None:
    """The trainer asks the hook about float64 toy batches, at the start and with each generation batch."""
    settings = arguments(tmp_path, max_steps=2, num_iterations=2)
    run = train(Logging, LabConfig(**settings, objective="dr_grpo"), tiny_folder)
    logged = [row for row in run.history if "loss" in row]
    assert [row["own/toy_share"] for row in logged] == [0.0, 0.0]
    assert [row["own/toy"] for row in logged] == [0.0, 0.0]
