"""The exact update's verdict has one owner: asked once per generation batch, anew where its answer may have changed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoTokenizer

from grpo_lab import LabConfig, LabTrainer, PPOTrainer
from grpo_lab.batch import Denominators, TokenBatch, masked_sum, safe
from grpo_lab.trainer.exactness import update_verdict as verdict
from parity.harness import arguments, mixed_reward, problems, train

TWO_STEPS = {"gradient_accumulation_steps": 2, "steps_per_generation": 4, "max_steps": 4, "learning_rate": 0.1}


def plain(batch: TokenBatch) -> Tensor:
    return -batch.ratio * batch.advantages


def drawn(batch: TokenBatch) -> Tensor:
    return plain(batch) * torch.rand(())


def odd(batch: TokenBatch) -> Tensor:
    if batch.mask.size(0) == 6:
        raise KeyError("six rows")
    return plain(batch)


def summed(loss: Tensor, mask: Tensor, denominators: Denominators) -> Tensor:
    return masked_sum(loss, mask) / denominators.rows


def by_place(loss: Tensor, mask: Tensor, denominators: Denominators) -> Tensor:
    return (masked_sum(loss, mask, dim=1) * torch.arange(mask.size(0))).sum()


class Whitened(LabTrainer):
    def token_loss(self, batch: TokenBatch) -> Tensor:
        return plain(batch) * batch.advantages.std()


class Pulled(LabTrainer):
    def token_loss(self, batch: TokenBatch) -> Tensor:
        return super().token_loss(batch) + 0.1 * safe(batch.logps.square(), batch.mask)


def hook_on_the_object(trainer: Any) -> None:
    trainer.token_loss = lambda batch: plain(batch) * batch.advantages.std()


def part(**parts: Any) -> dict[str, Any]:
    return {"objective": {"name": "dr_grpo", **parts}}


BY_ROWS = "the loss of a row depends on the other rows of its batch"
PULL = "the loss of a row does not vanish where its advantage is zero"


@pytest.mark.parametrize(
    ("kind", "settings", "prepare", "stock", "all_rows"),
    [
        (LabTrainer, {"objective": "dr_grpo"}, None, None, None),
        (LabTrainer, {"objective": "dr_grpo", "update": "off"}, None, "update is 'off'", "update is 'off'"),
        (LabTrainer, {"objective": "dr_grpo", "update": {"dead_groups": "keep"}}, None, None, "update.dead_groups is "
            "'keep'"),
        (LabTrainer, {"delta": 1.1}, None, "left to TRL (delta=1.1", "left to TRL (delta=1.1"),
        (LabTrainer, {"entropy_coef": 0.1}, None, None, "the entropy bonus (entropy_coef=0.1) acts on rows"),
        (LabTrainer, {"objective": "bnpo"}, None, "`local_token_mean`", "`local_token_mean`"),
        (LabTrainer, part(aggregation="local_token_mean"), None, "the average `local_token_mean`",
         "`local_token_mean`"),
        (LabTrainer, part(surrogate=drawn), None, "the surrogate `drawn`: it draws random", "`drawn`: it draws"),
        (LabTrainer, part(surrogate=odd), None, "`odd` cannot be asked on a toy batch (KeyError", "cannot be asked"),
        (LabTrainer, part(aggregation=by_place), None, "the aggregation `by_place` is no sum over "
            "rows", "no sum over rows"),
        (Whitened, part(aggregation=summed), None, "`Whitened.token_loss`: "
            f"{BY_ROWS}", f"`Whitened.token_loss`: {BY_ROWS}"),
        (LabTrainer, {"objective": "dr_grpo"}, hook_on_the_object, f"`trainer.token_loss`: {BY_ROWS}", BY_ROWS),
        (Pulled, {"objective": "dr_grpo"}, None, None, f"`Pulled.token_loss`: {PULL}"),
        (LabTrainer, {"objective": {"name": "mirror_descent", "aggregation": summed}}, None, None,
         f"`MirrorDescent`: {PULL}"),
        (PPOTrainer, {}, None, None, "value.vf_coef=0.1"),
        (LabTrainer, {"objective": "grpo", "beta": 0.04}, None, None, "beta=0.04"),
    ],
)  # fmt: skip
def test_the_reason_names_the_cause(
    kind: Any,
    settings: dict[str, Any],
    prepare: Any,
    stock: str | None,
    all_rows: str | None,
    tiny_folder: Path,
    tmp_path: Path,
) -> None:
    """The causes that are a model's: ``unit/test_model_conditions``; a team's methods: ``parity/test_overrides``."""
    trainer = kind(
        str(tiny_folder), mixed_reward(), LabConfig(**arguments(tmp_path, **settings)), problems(),
        processing_class=AutoTokenizer.from_pretrained(tiny_folder),
    )  # fmt: skip
    if prepare is not None:
        prepare(trainer)
    trainer.model.train()
    found = trainer.exact_update.verdict.now()
    assert (found.stock is None) is (stock is None)
    assert (found.all_rows is None) is (all_rows is None)
    assert (stock or "") in (found.stock or "")
    assert (all_rows or "") in (found.all_rows or "")


@pytest.mark.not_fast
@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"objective": "dr_grpo"}, [0, 2]),
        ({"objective": "grpo", "beta": 0.04, "num_iterations": 2}, [0]),
        ({"objective": {"name": "dr_grpo", "surrogate": plain}}, [0, 1, 2, 3]),  # a team's part may follow a schedule
    ],
)
def test_asked_once_per_generation_batch(
    settings: dict[str, Any], expected: list[int], tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original, steps = verdict.answers, []

    def counted(trainer: Any, objective: Any) -> Any:
        steps.append(trainer.state.global_step)
        return original(trainer, objective)

    monkeypatch.setattr(verdict, "answers", counted)
    run = train(LabTrainer, LabConfig(**arguments(tmp_path, **TWO_STEPS, **settings)), tiny_folder)
    assert steps == expected
    standing = run.trainer.exact_update.verdict
    assert standing.so_far() is standing.so_far(), "a reader asks nobody"
    standing.forget()
    assert standing.now().stock is None
    assert len(steps) == len(expected) + 1, "forgotten (a resume), it is asked anew"
