"""The gradient of a step under a thinking budget, once more: float64, one row at a time, loops instead of masks.

Which tokens were inserted is found by reading the completion (``inserted_positions``), not from the trainer's mask.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from datasets import Dataset
from transformers import TrainerCallback

from grpo_lab import LabTrainer, objectives
from grpo_lab.engines.thinking_budget import ThinkingBudget

STOP_TEXT = "\nSo:\n</think>\n"
#: all but ``prompt_mean``, whose counts are made at generation (tests/training/test_prompt_mean.py)
AGGREGATIONS = {name: one for name, one in objectives.AGGREGATIONS.items() if name != "prompt_mean"}
CLOSED = "<think>\n\n</think>\n\n"
LENGTH = 64


def questions(n: int = 16) -> Dataset:
    """Every third prompt ends in a closed thinking block, so that a batch holds rows that are cut and rows that are
    not."""
    return Dataset.from_dict({"prompt": [f"Tom has {i} apples.\n{CLOSED if i % 3 == 2 else ''}" for i in range(n)]})


def settings(folder: Any, budget: int | None, **changes: Any) -> dict[str, Any]:
    rollout = {} if budget is None else {"thinking_budget": budget, "budget_text": STOP_TEXT}
    return {
        "output_dir": str(folder), "objective": "grpo", "rollout": rollout, "per_device_train_batch_size": 6,
        "gradient_accumulation_steps": 2, "num_generations": 3, "max_completion_length": LENGTH,
        "max_steps": len(AGGREGATIONS), "learning_rate": 0.05, "optim": "sgd", "lr_scheduler_type": "constant",
        "max_grad_norm": 0.0, "logging_steps": 1, "save_strategy": "no", "report_to": "none", "use_cpu": True,
        "bf16": False, "seed": 3, "disable_tqdm": True, "gradient_checkpointing": False, **changes,
    }  # fmt: skip


@dataclass
class Step:
    """One optimizer step: the weights before it, the micro-batches as TRL cut them, the gradient that the trainer
    made."""

    aggregation: str
    model: Any
    batches: list[dict[str, Any]] = field(default_factory=list)
    gradient: dict[str, torch.Tensor] = field(default_factory=dict)


class Tap(TrainerCallback):
    """Takes the aggregations in turn, one an optimizer step, and keeps what an oracle needs."""

    def __init__(self, trainer: LabTrainer) -> None:
        self.trainer, self.steps = trainer, []

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        trainer, name = self.trainer, list(AGGREGATIONS)[len(self.steps) % len(AGGREGATIONS)]
        if trainer.algorithm.left_to_trl is None:
            objective = replace(trainer.algorithm.objective, aggregate=AGGREGATIONS[name])
            trainer.algorithm = replace(trainer.algorithm, objective=objective)
            trainer.parts.update._verdict = None
        model = trainer.accelerator.unwrap_model(trainer.model)
        twin = type(model)(copy.deepcopy(model.config)).double().eval()  # a copy would keep TRL's patched forward
        twin.load_state_dict(model.state_dict())
        self.steps.append(Step(name, twin))

    def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
        model = self.trainer.accelerator.unwrap_model(self.trainer.model)
        self.steps[-1].gradient = {n: p.grad.detach().double().clone() for n, p in model.named_parameters()}


class TappedTrainer(LabTrainer):
    """``LabTrainer`` whose micro-batches can be looked at."""

    tap: Tap


def run(trainer: TappedTrainer, tap: type[Tap] = Tap) -> list[Step]:
    trainer.tap, loss = tap(trainer), trainer.parts.update.loss

    def tapped(model: Any, inputs: Any, *args: Any) -> torch.Tensor:
        trainer.tap.steps[-1].batches.append({k: v.clone() for k, v in inputs.items() if isinstance(v, torch.Tensor)})
        return loss(model, inputs, *args)

    trainer.parts.update.loss = tapped  # type: ignore[method-assign]
    trainer.add_callback(trainer.tap)
    trainer.train()
    return trainer.tap.steps


def inserted_positions(tokenizer: Any, prompt: list[int], ids: list[int], budget: int | None) -> set[int]:
    """Read off the texts: the stop text stands directly after ``budget`` tokens in which the thinking is not closed."""
    stop = tokenizer(STOP_TEXT, add_special_tokens=False)["input_ids"]
    if budget is None or tokenizer.decode(prompt).endswith("</think>\n\n"):
        return set()
    head, there = ids[:budget], ids[budget : budget + len(stop)]
    if tokenizer.eos_token_id in head or "</think>" in tokenizer.decode(head) or len(head) < budget:
        return set()
    assert there == stop, f"thinking goes on after {budget} tokens: {tokenizer.decode(ids)!r}"
    return set(range(budget, budget + len(stop)))


def rows_of(batch: dict[str, Any]) -> list[dict[str, Any]]:
    """Ragged rows of a micro-batch: no padding, no mask."""
    rows = []
    for i in range(batch["prompt_ids"].size(0)):
        width = int(batch["completion_mask"][i].sum())
        sampler = batch.get("sampling_per_token_logps")
        rows.append(
            {
                "prompt": batch["prompt_ids"][i][batch["prompt_mask"][i].bool()].tolist(),
                "ids": batch["completion_ids"][i, :width].tolist(),
                "advantage": float(batch["advantages"][i]),
                "sampler": None if sampler is None else sampler[i, :width].tolist(),
            }
        )
    return rows


def token_losses(model: Any, row: dict[str, Any], inserted: set[int], temperature: float) -> list[torch.Tensor]:
    """−w Â ρ_t of each sampled token; on-policy ρ = exp(log π − stop-gradient), w = Π π/π_sampler where at most 3."""
    ids = torch.tensor([row["prompt"] + row["ids"]])
    first = len(row["prompt"]) - 1
    logps = (model(input_ids=ids).logits[0].double() / temperature).log_softmax(-1)
    own = [(t, logps[first + t, token]) for t, token in enumerate(row["ids"]) if t not in inserted]
    weight = 1.0
    if row["sampler"] is not None:
        weight = math.exp(sum(logp.item() - row["sampler"][t] for t, logp in own))
        weight = weight if weight <= 3.0 else 0.0
    return [-weight * row["advantage"] * (logp - logp.detach()).exp() for _, logp in own]


def oracle(step: Step, tokenizer: Any, budget: int | None, temperature: float = 1.0) -> dict[str, torch.Tensor]:
    """The gradient by name, with inserted tokens as context only."""
    batches = []
    for batch in step.batches:
        rows = []
        for row in rows_of(batch):
            inserted = inserted_positions(tokenizer, row["prompt"], row["ids"], budget)
            rows.append(token_losses(step.model, row, inserted, temperature))
        batches.append(rows)
    everything = [row for rows in batches for row in rows]
    tokens = sum(len(row) for row in everything)
    if step.aggregation == "sequence_mean":
        loss = sum(sum(row) / len(row) for row in everything) / len(everything)
    elif step.aggregation == "token_mean":
        loss = sum(sum(row) for row in everything) / tokens
    elif step.aggregation == "fixed_budget":
        loss = sum(sum(row) for row in everything) / (len(everything) * LENGTH)
    elif step.aggregation == "sequence_sum":
        loss = sum(sum(row) for row in everything) / len(everything)
    else:
        assert step.aggregation == "local_token_mean"
        loss = sum(sum(sum(row) for row in rows) / sum(len(row) for row in rows) for rows in batches) / len(batches)
    step.model.zero_grad()
    loss.backward()
    return {name: parameter.grad.clone() for name, parameter in step.model.named_parameters()}


def difference(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """‖g − g*‖ / ‖g*‖ over all parameters."""
    assert found.keys() == expected.keys()
    apart = sum((found[n] - expected[n]).square().sum().item() for n in expected)
    return (apart / sum(value.square().sum().item() for value in expected.values())) ** 0.5


def check_budget_is_obeyed(step: Step, tokenizer: Any, budget: int | None) -> int:
    """Every completion of the step; returns how many were cut. Inserted positions: context, no loss, NaN for the
    sampler."""
    cut = 0
    for batch in step.batches:
        for i, row in enumerate(rows_of(batch)):
            inserted = inserted_positions(tokenizer, row["prompt"], row["ids"], budget)
            assert len(row["ids"]) <= LENGTH
            if budget is not None:
                width = len(row["ids"])
                assert batch["tool_mask"][i, :width].tolist() == [int(t not in inserted) for t in range(width)]
            if row["sampler"] is not None:
                assert [math.isnan(value) for value in row["sampler"]] == [
                    t in inserted for t in range(len(row["ids"]))
                ]
            cut += bool(inserted)
    return cut


def inserted_mask(prompt_ids: Sequence[int], ids: Sequence[int], settings: ThinkingBudget) -> list[int]:
    """The mask of a completion made under these settings, from the ids alone: 1 = sampled, 0 = inserted.

    Text was inserted exactly where the first `budget` tokens neither end the completion nor close the thinking, and
    then directly after them.
    """
    start, stop = settings.budget, len(settings.stop_ids)
    is_stop_text = list(ids[start : start + stop]) == list(settings.stop_ids)
    if not is_stop_text or not settings.must_cut(prompt_ids, ids[:start]):
        return [1] * len(ids)
    return [1] * start + [0] * stop + [1] * (len(ids) - start - stop)
