"""Under dropout the exact update is exact in distribution: the same mean gradient as stock's batches of all rows, from the live rows only.

One optimizer step is made again and again on the same rows, at the same weights, by the trainer's own ``compute_loss``. A call holds
COPIES of each row, which draw masks of their own, so CALLS calls are CALLS × COPIES ≥ 2,000 draws of the step, and each call's gradient is
a mean of COPIES of them. Compared are PROJECTIONS random directions of every weight's gradient, two samples of CALLS values each: all
|difference of means| / standard error stay below the two-sided t-quantile at ERROR / (number of directions) (Bonferroni, CALLS − 1
degrees of freedom, Welch's least). Two equal distributions fail with a probability of at most ERROR.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoKrConfig, LoraConfig
from scipy import stats
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config, GPT2LMHeadModel

from grpo_lab import LabConfig, LabTrainer
from grpo_lab.testing import tiny_model
from grpo_lab.trainer.step import exact_update
from parity.harness import Run, arguments, mixed_reward, problems, train

COPIES, CALLS, PROJECTIONS, ERROR = 50, 40, 8, 1e-4
#: (prompt tokens, completion tokens, advantage): half of the rows are dead, and padded by the longest
ROWS = ((3, 9, 0.0), (5, 4, 0.7), (2, 7, 0.0), (4, 6, -1.1), (6, 3, 0.0), (3, 5, 0.4))
RATE = 0.2


def lora(rate: float = RATE) -> LoraConfig:
    modules = ["q_proj", "v_proj", "down_proj"]
    return LoraConfig(task_type="CAUSAL_LM", r=4, lora_dropout=rate, target_modules=modules, init_lora_weights=False)


def small(kind: str) -> tuple[Any, Any, dict[str, Any]]:
    """Model, tokenizer, options of the trainer: dropout in LoRA, in attention, on embeddings."""
    model, tokenizer = tiny_model("qwen2", hidden_size=16, num_layers=2, initializer_range=0.2)
    torch.manual_seed(0)
    if kind == "lora":
        return model, tokenizer, {"peft_config": lora()}
    if kind == "attention":
        for module in model.modules():
            if hasattr(module, "attention_dropout"):
                module.attention_dropout = RATE
        return model, tokenizer, {}
    sizes = {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 64, "vocab_size": len(tokenizer)}
    config = GPT2Config(**sizes, resid_pdrop=0.0, attn_pdrop=0.0, embd_pdrop=RATE, initializer_range=0.2)
    return GPT2LMHeadModel(config), tokenizer, {}


def step_of(tokenizer: Any) -> dict[str, Tensor]:
    """One micro-batch as TRL pads it: prompts left, completions right, every row COPIES times."""
    generator = torch.Generator().manual_seed(1)
    widths = max(row[0] for row in ROWS), max(row[1] for row in ROWS)
    fields: dict[str, list[Tensor]] = {"prompt_ids": [], "prompt_mask": [], "completion_ids": [], "completion_mask": []}
    for prompt, completion, _ in ROWS:
        for name, length, width, left in (("prompt", prompt, widths[0], True), ("completion", completion, widths[1], False)):
            place = slice(width - length, None) if left else slice(length)
            ids, mask = torch.full((width,), tokenizer.pad_token_id), torch.zeros(width, dtype=torch.long)
            ids[place], mask[place] = torch.randint(20, 90, (length,), generator=generator), 1
            fields[f"{name}_ids"].append(ids)
            fields[f"{name}_mask"].append(mask)
    batch = {name: torch.stack(rows).repeat(COPIES, 1) for name, rows in fields.items()}
    batch["advantages"] = torch.tensor([row[2] for row in ROWS]).repeat(COPIES)
    return {**batch, "num_items_in_batch": batch["completion_mask"].sum()}


def gradients(kind: str, randomness: str, folder: Path, calls: int = CALLS, **changes: Any) -> Tensor:
    """``[calls, directions]``: projections of the step's gradient."""
    model, tokenizer, options = small(kind)
    rows = len(ROWS) * COPIES
    settings = {
        "per_device_train_batch_size": rows, "gradient_accumulation_steps": 1, "num_generations": rows, "max_completion_length": 9,
        "learning_rate": 0.0, **changes,
    }  # fmt: skip
    config = LabConfig(
        **arguments(folder, **settings), objective="dr_grpo", update={"randomness": randomness, "max_tokens": 1000}
    )
    trainer = LabTrainer(model, mixed_reward(), config, problems(), processing_class=tokenizer, **options)
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = 1
    batch = step_of(tokenizer)
    weights = [parameter for parameter in trainer.model.parameters() if parameter.requires_grad]
    generator = torch.Generator().manual_seed(2)
    directions = [torch.randn(PROJECTIONS, weight.numel(), generator=generator) for weight in weights]
    torch.manual_seed(5)
    found = []
    for _ in range(calls):
        trainer.model.zero_grad()
        trainer.compute_loss(trainer.model, dict(batch)).backward()
        found.append(torch.cat([d @ w.grad.flatten() for d, w in zip(directions, weights, strict=True)]))  # type: ignore[union-attr]
    told = trainer.exact_update.described()
    assert told["batches"] == ("bins" if randomness == "same_distribution" else "as TRL"), told
    return torch.stack(found).double()


def gap_in_bounds(one: Tensor, other: Tensor) -> float:
    """Largest |difference of means| / standard error over the bound of the joint test: above 1 the means differ."""
    error = (one.var(0) / len(one) + other.var(0) / len(other)).sqrt()
    bound = stats.t.ppf(1 - ERROR / (2 * one.size(1)), df=min(len(one), len(other)) - 1)
    return float(((one.mean(0) - other.mean(0)).abs() / error).max() / bound)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["lora", "attention", "embeddings"])
def test_the_mean_gradient_is_that_of_all_rows(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert CALLS * COPIES >= 2000
    stock = gradients(kind, "same_draws", tmp_path)
    ours = gradients(kind, "same_distribution", tmp_path)
    assert float(stock.std(0).min()) > 0, "nothing is random here"
    assert gap_in_bounds(ours, stock) < 1
    make_plan = exact_update.plan_update

    def without_a_live_row(rows: Any, *more: Any, **named: Any) -> Any:
        live = rows.live.copy()
        assert live[5 :: len(ROWS)].all()
        live[5 :: len(ROWS)] = False
        return make_plan(replace(rows, live=live), *more, **named)

    monkeypatch.setattr(exact_update, "plan_update", without_a_live_row)
    assert gap_in_bounds(gradients(kind, "same_distribution", tmp_path), stock) > 1, "a live row was skipped, unseen"
