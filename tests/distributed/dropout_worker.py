"""One optimizer step under LoRA dropout on two ranks, again and again on the same rows and weights.

    accelerate launch --config_file … tests/distributed/dropout_worker.py OUT

The first rank holds all live rows, the second dead ones only. Leaves ``found.pt``: projections of the gradient, call by
call, of TRL's batches of all rows, of ours, and of ours without one of the live rows; log-probs of one row's copies on
each rank; a step with a single live row.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import gather_object
from torch import Tensor

from forked import as_rank
from grpo_lab import LabConfig, LabTrainer
from grpo_lab.trainer.step import exact_update
from parity.harness import arguments, mixed_reward, problems
from parity.test_randomness import COPIES, PROJECTIONS, ROWS, small, step_of

CALLS = 40
LIVE = [place for place, row in enumerate(ROWS) if row[2]]


class Step:
    """A trainer whose model is wrapped for its ranks, and this rank's half of the rows."""

    def __init__(self, randomness: str, folder: Path) -> None:
        model, tokenizer, options = small("lora")
        rows = len(LIVE) * COPIES
        settings = {
            "per_device_train_batch_size": rows, "gradient_accumulation_steps": 1, "num_generations": 2 * rows,
            "max_completion_length": 5, "learning_rate": 0.0, "ddp_find_unused_parameters": False,
            "gradient_checkpointing": False,
        }  # fmt: skip
        config = LabConfig(
            **arguments(folder, **settings), objective="dr_grpo", update={"randomness": randomness, "max_tokens": 400}
        )
        self.trainer = LabTrainer(model, mixed_reward(), config, problems(), processing_class=tokenizer, **options)
        self.trainer.model.train()
        self.trainer.current_gradient_accumulation_steps = 1
        self.rank = self.trainer.accelerator.process_index
        self.wrapped = self.trainer.accelerator.prepare_model(self.trainer.model)
        assert type(self.wrapped).__name__ == "DistributedDataParallel"
        whole = step_of(tokenizer)
        live = whole["advantages"] != 0
        mine = live if self.rank == 0 else ~live
        self.batch = {name: value[mine] if value.dim() else value for name, value in whole.items()}
        generator = torch.Generator().manual_seed(2)
        self.weights = [p for p in self.trainer.model.parameters() if p.requires_grad]
        self.directions = [torch.randn(PROJECTIONS, w.numel(), generator=generator) for w in self.weights]

    def gradient(self, **changed: Tensor) -> Tensor:
        self.wrapped.zero_grad()
        self.trainer.compute_loss(self.wrapped, {**self.batch, **changed}).backward()
        return torch.cat([d @ w.grad.flatten() for d, w in zip(self.directions, self.weights, strict=True)])  # type: ignore[union-attr]

    def gradients(self) -> Tensor:
        return torch.stack([self.gradient() for _ in range(CALLS)]).double()


def of_one_row(step: Step) -> list[float]:
    """Log-probs of the first completion token of every copy of the first live row that this rank computes."""
    seen: list[float] = []
    record = exact_update.record_tokens

    def spy(trainer: Any, book: Any, batch: Any, *rest: Any) -> None:
        of_it = (batch.advantages[:, 0] - ROWS[LIVE[0]][2]).abs() < 1e-6
        seen.extend(batch.logps[of_it, 0].tolist())
        record(trainer, book, batch, *rest)

    exact_update.record_tokens = spy
    step.gradient()
    exact_update.record_tokens = record
    return seen


def without_a_live_row(make_plan: Any) -> Any:
    def planned(rows: Any, *more: Any, **named: Any) -> Any:
        live = rows.live.copy()
        live[[place for place, alive in enumerate(live) if alive][2::3]] = False
        return make_plan(replace(rows, live=live), *more, **named)

    return planned


def main(out: str) -> None:
    found: dict[str, Any] = {"stock": Step("same_draws", Path(out) / "a").gradients()}
    step = Step("same_distribution", Path(out) / "b")
    found["ours"] = step.gradients()
    assert step.trainer.exact_update.described()["batches"] == "bins"
    found["one row"] = gather_object([of_one_row(step)])
    single = step.batch["advantages"].clone()
    single[1:] = 0.0
    found["a single live row"] = gather_object([step.gradient(advantages=single).tolist()])
    exact_update.plan_update = without_a_live_row(exact_update.plan_update)
    found["biased"] = step.gradients()
    if step.rank == 0:
        torch.save(found, Path(out) / "found.pt")
    step.trainer.accelerator.wait_for_everyone()


if __name__ == "__main__":
    as_rank(main)
