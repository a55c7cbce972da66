"""Parts of a team that are no function of one row: the exact update finds out and trains what was written.

Each is trained twice on the same scripted completions, as it comes and with ``update: off`` (micro-batches as TRL cuts
them), and the weights must move alike. A part that only the rows decide is still cut into bins.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import TrainerCallback

from grpo_lab import LabConfig, LabTrainer
from grpo_lab.batch import Denominators, TokenBatch, masked_sum, safe
from parity.harness import Run, arguments, movement_difference, train


def whitened(batch: TokenBatch) -> Tensor:
    """Advantages whitened over the rows that happen to share a batch."""
    advantages = batch.advantages - batch.advantages.mean()
    return -batch.ratio * advantages / (advantages.std() + 1e-4)


def by_width(batch: TokenBatch) -> Tensor:
    return -batch.ratio * batch.advantages * 10 / batch.mask.size(1)


def by_place(batch: TokenBatch) -> Tensor:
    """Reads a state of its own by the row's place in the batch."""
    weights = torch.linspace(0.1, 1.0, 8)[: batch.mask.size(0)].unsqueeze(1)
    return -batch.ratio * batch.advantages * weights.to(batch.logps)


def drawn(batch: TokenBatch) -> Tensor:
    return -batch.ratio * batch.advantages * (torch.rand(batch.mask.shape) > 0.5)


class Pull:
    """A pull on every row, once it is switched on."""

    def __init__(self) -> None:
        self.strength = 0.0

    def __call__(self, batch: TokenBatch) -> Tensor:
        return -batch.ratio * batch.advantages + self.strength * batch.logps.square()


class Counting:
    """A pull that sets in after its seventh call."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, batch: TokenBatch) -> Tensor:
        self.calls += 1
        return -batch.ratio * batch.advantages + 0.1 * (self.calls > 7) * batch.logps.square()


class FromStepTwo(TrainerCallback):
    def __init__(self, pull: Pull) -> None:
        self.pull = pull

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.pull.strength = 0.1 if state.global_step >= 2 else 0.0


def over_the_width(loss: Tensor, mask: Tensor, denominators: Denominators) -> Tensor:
    return masked_sum(loss, mask) * 3 / (denominators.rows * mask.size(1))


def over_the_rows(loss: Tensor, mask: Tensor, denominators: Denominators) -> Tensor:
    """Linear in each row, but with weights by the row's place."""
    rows = torch.arange(1, mask.size(0) + 1).to(loss)
    return (masked_sum(loss, mask, dim=1) * rows).sum() / denominators.rows / 20


class WhitenedHook(LabTrainer):
    def token_loss(self, batch: TokenBatch) -> Tensor:
        return safe(whitened(batch), batch.mask)


class WidthHook(LabTrainer):
    def token_loss(self, batch: TokenBatch) -> Tensor:
        return super().token_loss(batch) * 10 / batch.mask.size(1)


def run(folder: Path, tiny: Path, update: str | None, case: str) -> Run:
    pull, random_state = Pull(), random.getstate()
    part: dict[str, Any] = {
        "whitened": {"surrogate": whitened},
        "divided by the width": {"surrogate": by_width},
        "by the row's place": {"surrogate": by_place},
        "random": {"surrogate": drawn},
        "a pull switched on later": {"surrogate": pull},
        "counts its calls": {"surrogate": Counting()},
        "aggregation over the width": {"aggregation": over_the_width},
        "aggregation by place": {"aggregation": over_the_rows},
    }
    trainer = {"hook, whitened": WhitenedHook, "hook, over the width": WidthHook}.get(case, LabTrainer)
    objective = {"name": "dr_grpo", **part.get(case, {})}
    config = LabConfig(**arguments(folder, learning_rate=0.1), objective=objective, update=update)
    found = train(trainer, config, tiny, callbacks=[FromStepTwo(pull)])
    random.setstate(random_state)
    return found


CASES = (
    "whitened",
    "divided by the width",
    "by the row's place",
    "random",
    "a pull switched on later",
    "counts its calls",
    "aggregation over the width",
    "aggregation by place",
    "hook, whitened",
    "hook, over the width",
)


@pytest.mark.not_fast
@pytest.mark.parametrize("case", CASES)
def test_what_was_written_is_trained(case: str, tiny_folder: Path, tmp_path: Path) -> None:
    ours, off = (run(tmp_path, tiny_folder, update, case) for update in (None, "off"))
    difference = movement_difference(ours, off)
    print(f"{case}: the weights move apart by {difference:.2g}")
    assert difference <= 1e-5  # float32, as in test_exact_update
    shares = [row["update/live_share"] for row in ours.history if "update/live_share" in row]
    if case == "a pull switched on later":
        assert [share < 1 for share in shares] == [True, True, False, False]
    else:
        assert "update/computed_share" in ours.history[0]
        assert all(row["update/computed_share"] == 1 for row in ours.history if "loss" in row), "cut into bins"


@pytest.mark.not_fast
def test_a_pull_that_sets_in_between_the_passes_over_a_batch(tiny_folder: Path, tmp_path: Path) -> None:
    """The old log-probs of rows without advantage are needed in the second pass, and are made before the first."""

    def runs(update: str | None) -> Run:
        pull = Pull()

        class FromStepOne(TrainerCallback):
            def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
                pull.strength = 0.1 * (state.global_step % 2)

        def moved(batch: TokenBatch) -> Tensor:
            return -batch.ratio * batch.advantages + pull.strength * batch.log_ratio.square()

        changes = {"num_iterations": 2, "max_steps": 2, "learning_rate": 0.1}
        objective = {"name": "dr_grpo", "surrogate": moved}
        config = LabConfig(**arguments(tmp_path, **changes), objective=objective, update=update)
        return train(LabTrainer, config, tiny_folder, callbacks=[FromStepOne()])

    assert movement_difference(runs(None), runs("off")) <= 1e-5
