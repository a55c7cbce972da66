"""Under dropout the exact update is exact in distribution: the same mean gradient as stock's batches of all rows, from
the live rows only.

One optimizer step is made again and again on the same rows, at the same weights, by the trainer's own ``compute_loss``.
A call holds COPIES of each row, which draw masks of their own, so CALLS calls are CALLS × COPIES ≥ 2,000 draws of the
step, and each call's gradient is a mean of COPIES of them. Compared are PROJECTIONS random directions of every weight's
gradient, two samples of CALLS values each: all |difference of means| / standard error stay below the two-sided
t-quantile at ERROR / (number of directions) (Bonferroni, CALLS − 1 degrees of freedom, Welch's least). Two equal
distributions fail with a probability of at most ERROR.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from scipy import stats
from torch import Tensor
from torch.nn.functional import dropout
from transformers import GPT2Config, GPT2LMHeadModel

from grpo_lab import LabConfig, LabTrainer
from grpo_lab.testing import tiny_model
from grpo_lab.trainer.exactness.bin_probe import MaskProbe, apart_from_dropout
from grpo_lab.trainer.exactness.model_conditions import RandomnessWatch
from grpo_lab.trainer.step import exact_update, micro_batch
from parity.harness import arguments, mixed_reward, problems, train

COPIES, CALLS, PROJECTIONS, ERROR = 50, 40, 8, 1e-4
#: (prompt tokens, completion tokens, advantage): half of the rows are dead, and padded by the longest
ROWS = ((2, 5, 0.0), (3, 3, 0.7), (2, 5, 0.0), (3, 4, -1.1), (4, 2, 0.0), (2, 3, 0.4))
RATE = 0.2


def lora(rate: float = RATE) -> LoraConfig:
    modules = ["q_proj", "v_proj", "down_proj"]
    return LoraConfig(task_type="CAUSAL_LM", r=4, lora_dropout=rate, target_modules=modules, init_lora_weights=False)


def small(kind: str) -> tuple[Any, Any, dict[str, Any]]:
    """Model, tokenizer, options of the trainer: dropout in LoRA, in attention, on embeddings."""
    model, tokenizer = tiny_model("qwen2", hidden_size=16, num_layers=1, initializer_range=0.2)
    torch.manual_seed(0)
    if kind == "lora":
        return model, tokenizer, {"peft_config": lora()}
    if kind == "attention":
        for module in model.modules():
            if hasattr(module, "attention_dropout"):
                module.attention_dropout = RATE
        return model, tokenizer, {}
    sizes = {"n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 64, "vocab_size": len(tokenizer)}
    config = GPT2Config(**sizes, resid_pdrop=0.0, attn_pdrop=0.0, embd_pdrop=RATE, initializer_range=0.2)
    return GPT2LMHeadModel(config), tokenizer, {}


def step_of(tokenizer: Any) -> dict[str, Tensor]:
    """One micro-batch as TRL pads it: prompts left, completions right, every row COPIES times."""
    generator = torch.Generator().manual_seed(1)
    widths = max(row[0] for row in ROWS), max(row[1] for row in ROWS)
    fields: dict[str, list[Tensor]] = {"prompt_ids": [], "prompt_mask": [], "completion_ids": [], "completion_mask": []}
    for prompt, completion, _ in ROWS:
        for name, length, width, left in (
            ("prompt", prompt, widths[0], True),
            ("completion", completion, widths[1], False),
        ):
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
        "per_device_train_batch_size": rows, "gradient_accumulation_steps": 1, "num_generations": rows,
        "max_completion_length": 5, "learning_rate": 0.0, **changes,
    }  # fmt: skip
    config = LabConfig(
        **arguments(folder, **settings), objective="dr_grpo", update={"randomness": randomness, "max_tokens": 400}
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


@pytest.mark.thorough(but="attention")
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


# -- what is computed, and what is said --------------------------------------------------------------------------------


def mostly_dead(number: list[int], **_: Any) -> list[float]:
    """5 of 8 groups are alike: 62.5%. In the others no reward is the mean."""
    return [0.5 if n < 5 else i % 4 / 3.0 for i, n in enumerate(number)]


@pytest.mark.not_fast
def test_lora_keeps_the_speed_up_and_a_drop_in_run_says_what_it_costs(
    tiny_folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="grpo_lab")
    told: dict[str, tuple[float, list[logging.LogRecord], dict[str, Any]]] = {}
    cases: dict[str, dict[str, Any]] = {
        "objective": {"objective": "dr_grpo"},
        "drop-in": {"loss_type": "dr_grpo", "scale_rewards": "none"},
        "drop-in, asked for": {"loss_type": "dr_grpo", "update": {"randomness": "same_distribution"}},
        "same draws": {"objective": "dr_grpo", "update": {"randomness": "same_draws"}},
    }
    for name, changes in cases.items():
        caplog.clear()
        settings = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 4, "max_steps": 2, **changes}
        config = LabConfig(**arguments(tmp_path / name, **settings))
        options = {"reward": mostly_dead, "train_dataset": problems(8), "peft_config": lora(0.05)}
        run = train(LabTrainer, config, tiny_folder, **options)
        steps = [row for row in run.history if "loss" in row]
        assert all((row["update/live_share"] == 12 / 32) is (row["update/computed_share"] < 1) for row in steps)
        lines = [record for record in caplog.records if record.getMessage().startswith("exact update")]
        share = max(row["update/tokens_computed"] / row["update/tokens_stock"] for row in steps)
        told[name] = share, lines, run.trainer.exact_update.described()
    for name in ("objective", "drop-in, asked for"):
        share, (line,), record = told[name]
        assert share < 0.5
        assert (line.levelno, record["randomness"]) == (logging.INFO, "same_distribution")
    for name, level in (("drop-in", logging.WARNING), ("same draws", logging.INFO)):
        share, (line,), record = told[name]
        assert share == 1.0
        assert (line.levelno, "randomness" in record) == (level, False)
        assert "p=0.05" in line.getMessage()
        assert "set `update.randomness: same_distribution`" in line.getMessage()
        factor = record["first_step_tokens"] / record["first_step_tokens_live_in_bins"]
        assert factor > 2
        assert f"{factor:.1f} times as many" in line.getMessage()


@pytest.mark.not_fast(cases="{'dead_groups': 'resample'}")
@pytest.mark.parametrize("update", [{}, {"randomness": "same_draws"}, {"dead_groups": "resample"}], ids=str)
def test_old_log_probs_have_masks_of_their_own(
    update: dict[str, Any], tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """TRL makes them at generation, under masks that no training forward has: two passes share them, and neither has a
    ratio of 1 although the policy stands still. A forward's own log-probs in their place would be another distribution
    of the ratio."""
    seen: list[tuple[Tensor, Tensor]] = []
    for room in (exact_update, micro_batch):
        record = room.record_tokens

        def spy(trainer: Any, book: Any, batch: Any, *rest: Any, _record: Any = record) -> None:
            if batch.logps.requires_grad:
                seen.append((batch.logps[batch.mask].detach(), batch.proximal_logps[batch.mask]))
            _record(trainer, book, batch, *rest)

        monkeypatch.setattr(room, "record_tokens", spy)

    def with_dropout(trainer: Any) -> None:
        for module in trainer.model.modules():
            if hasattr(module, "attention_dropout"):
                module.attention_dropout = RATE

    settings = {"learning_rate": 0.0, "num_iterations": 2, "max_steps": 2}
    update = update | {"share_prompts": "off"}  # dropout comes after the trainer was made
    config = LabConfig(**arguments(tmp_path, **settings), objective="dr_grpo", update=update)
    run = train(LabTrainer, config, tiny_folder, prepare=with_dropout)
    assert run.trainer.exact_update.described()["batches"] == ("as TRL" if "randomness" in update else "bins")
    assert len(seen) % 2 == 0
    half = len(seen) // 2
    for (first, old), (second, old_again) in zip(seen[:half], seen[half:], strict=True):
        assert torch.equal(old, old_again)
        moved = [float((one - other).abs().mean()) for one, other in ((first, old), (second, old), (first, second))]
        assert min(moved) > 1e-3, "dropout of 0.2 moves a log-prob by far more than float32 rounds"


@pytest.mark.not_fast
def test_checkpointing_draws_the_masks_once(tiny_folder: Path, tmp_path: Path) -> None:
    """The backward of a bin repeats its forward: under the same masks, and without moving those of the next bin."""
    runs = []
    for name, on, rate in (("plain", False, RATE), ("checkpointing", True, RATE), ("no dropout", False, 0.0)):
        settings = arguments(tmp_path / name, max_steps=1, gradient_checkpointing=on)
        config = LabConfig(**settings, objective="dr_grpo", update={"max_tokens": 60})
        runs.append(train(LabTrainer, config, tiny_folder, peft_config=lora(rate)).weights)
    names = [name for name in runs[0] if "lora" in name]
    plain, checkpointing, without = (torch.cat([run[name].flatten() for name in names]) for run in runs)
    rounding = 8 * torch.finfo(torch.float32).eps * float(plain.abs().max())  # the same operations in the same order
    assert float((plain - checkpointing).abs().max()) <= rounding
    assert float((plain - without).abs().max()) > 100 * rounding, "masks do not matter here: nothing was compared"


def test_the_model_is_asked_whether_dropout_is_all_and_of_each_row(tmp_path: Path) -> None:
    model, tokenizer, options = small("attention")
    config = LabConfig(**arguments(tmp_path), objective="dr_grpo")
    trainer = LabTrainer(model, mixed_reward(), config, problems(), processing_class=tokenizer, **options)
    trainer.model.train()
    hooks: dict[str, tuple[Any, str | None]] = {
        "dropout of each row": (lambda m, i, output: dropout(output, 0.3, m.training), None),
        "noise": (lambda m, i, output: output + 0.01 * torch.randn_like(output), "beside torch's dropout"),
        "one mask for all rows": (
            lambda m, i, output: output * dropout(torch.ones_like(output[:1])), "is shared by the rows"),
        "a mask over the weights": (
            lambda m, i, output: output @ dropout(torch.eye(output.size(-1))), "is shared by the rows"),
    }  # fmt: skip
    before = torch.get_rng_state()
    for name, (hook, reason) in hooks.items():
        handle = trainer.model.get_input_embeddings().register_forward_hook(hook)
        found = MaskProbe(trainer).why_stock()
        handle.remove()
        assert (found is None) if reason is None else (found is not None and reason in found), (name, found)
    assert torch.equal(torch.get_rng_state(), before), "asking leaves no trace"
    assert all(module.training for module in trainer.model.modules())


def test_the_first_steps_forwards_are_seen_apart_from_dropout() -> None:
    values, query = torch.ones(2, 3), torch.ones(1, 1, 2, 4)
    for noise in (False, True):
        watch = RandomnessWatch(torch.device("cpu"))
        watch.start()
        with apart_from_dropout(watch):
            dropped = dropout(values, 0.5)
            torch.nn.functional.scaled_dot_product_attention(query, query, query, dropout_p=0.5)
            torch.rand(1) if noise else None
            dropout(values, 0.5)
        watch.stop()
        assert watch.drawn is noise
        assert set(dropped.unique().tolist()) <= {0.0, 2.0}
