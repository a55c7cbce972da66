"""Sections about the update of stock and ours on fixed rollouts: seconds, tokens a second, MFU and peak memory; plain,
with gradient checkpointing, and with LoRA.

Weights are float32, under bfloat16 autocast (TRL's default) on a GPU; the optimizer is AdamW; lengths are those of real
GSM8K model outputs. Generation is scripted and not timed. Every batch of lengths comes twice, and the second time
counts: a kernel that plans for each shape, as cuDNN's attention, takes longer the first time.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from statistics import median
from typing import Any

import torch
from bench_shapes import config_of
from bench_update_sides import GROUP, Rollouts, Watch, peak_mib, reset_peak, tokens_computed, trainer_of
from transformers import AutoModelForCausalLM
from trl import GRPOTrainer

from gpu_checks.device import device_name, peak_flops
from gpu_checks.section import Row, Setting, faster, verdict
from gpu_checks.work import lengths, live, needed_flops, shape_of
from gpu_checks.worker import failure
from grpo_lab import LabTrainer

SIDES: dict[str, type] = {"stock": GRPOTrainer, "ours": LabTrainer}
DEAD_SHARES = (0.62, 0.0)


def section(setting: Setting, shape: str, variant: str) -> Iterator[Row]:
    """Measure both sides for each share of dead groups; yield a row for each. A run that breaks, as for lack of memory,
    has an ``error`` in its row."""
    for share in shares(setting, shape, variant):
        found: dict[str, Row] = {}
        for side in SIDES:
            found[side] = attempt(setting, "tiny" if setting.tiny else shape, variant, share, side)
            free_memory()
        yield found["stock"]
        yield beside(setting, found["stock"], found["ours"])


def shares(setting: Setting, shape: str, variant: str) -> tuple[float, ...]:
    """Return the shares of dead groups to measure, the most telling first. In the tiny form all shapes are the same, so
    only one section measures without dead groups."""
    both = not setting.tiny or (shape, variant) == ("0.5B", "plain")
    return DEAD_SHARES if both else DEAD_SHARES[:1]


def attempt(setting: Setting, shape: str, variant: str, share: float, side: str) -> Row:
    """Return the row of one run, or one with an ``error`` if it breaks."""
    groups = 2 if setting.tiny else 8
    row: Row = {"shape": shape, "variant": variant, "dead": round(share * groups) / groups, "side": side}
    try:
        rollouts = Rollouts(groups * GROUP, round(share * groups), 0, period=1 if setting.tiny else 4)
        return row | measured(setting, shape, variant, rollouts, side)
    except Exception as error:
        return row | {"error": failure(error)["reason"]}


def measured(setting: Setting, shape: str, variant: str, rollouts: Rollouts, side: str) -> Row:
    """Train once, and return the measured columns of its row: medians over the second half of the steps."""
    torch.manual_seed(0)
    before = torch.cuda.memory_allocated() / 2**20 if setting.gpu else 0.0
    with torch.device(setting.device):
        model = AutoModelForCausalLM.from_config(config_of(shape), dtype=torch.float32)
    rollouts.vocabulary = model.config.vocab_size
    watch = Watch(keep_gradient=False)
    more = {"peft_config": adapter()} if variant == "LoRA" else {}
    trainer = trainer_of(SIDES[side], model, rollouts, arguments(setting, variant, rollouts.rows), watch, **more)
    reset_peak()
    trainer.train()
    peak = peak_mib() - before
    calls = range(1, rollouts.calls)
    half = len(watch.seconds) // 2
    seconds = median(watch.seconds[half:])
    computed = tokens_computed(trainer, rollouts)[1:]
    needed = median(needed_flops(shape_of(shape), live(rollouts, call), variant == "LoRA") for call in calls)
    tokens = median(sum(map(sum, lengths(rollouts, call))) for call in calls)
    best = peak_flops(device_name())
    return {
        "seconds": seconds, "seconds, new shapes": median(watch.seconds[1:half] or watch.seconds[:1]),
        "tokens/s": tokens / seconds, "computed": median(computed), "real": tokens,
        "MFU": "unknown" if best is None else needed / (seconds * best[0]), "peak MiB": peak,
    }  # fmt: skip


def adapter() -> Any:
    """Return the configuration of the LoRA adapter. It has no dropout, for which stock and ours would draw different
    masks."""
    from peft import LoraConfig

    return LoraConfig(r=16, lora_alpha=32, lora_dropout=0.0, target_modules="all-linear", task_type="CAUSAL_LM")


def arguments(setting: Setting, variant: str, rows: int) -> dict[str, Any]:
    """Return the settings of both sides. ``objective`` is unset (a drop-in run), so that both can have the same."""
    return {
        "output_dir": str(setting.own / "out"), "per_device_train_batch_size": 8,
        "gradient_accumulation_steps": rows // 8, "num_generations": GROUP, "max_completion_length": 512,
        "max_steps": 2 if setting.tiny else 8, "learning_rate": 1e-6, "optim": "adamw_torch_fused",
        "lr_scheduler_type": "constant", "loss_type": "dr_grpo", "scale_rewards": "none", "logging_steps": 1,
        "save_strategy": "no", "report_to": "none", "disable_tqdm": True, "use_cpu": not setting.gpu,
        "bf16": setting.gpu, "gradient_checkpointing": variant == "checkpointing", "seed": 0,
    }  # fmt: skip


def beside(setting: Setting, stock: Row, ours: Row) -> Row:
    """Return our row as a verdict on stock's seconds over ours; a run that broke is in place of the quotient."""
    asked = f"update, {ours['shape']}, {ours['variant']}, {ours['dead']:.0%} dead: stock over ours"
    if "seconds" in stock and "seconds" in ours:
        return faster(setting, asked, stock["seconds"], ours["seconds"], **ours)
    return verdict(asked, ours.get("error") or stock["error"], "> 1x", False if "error" in ours else None, **ours)


def free_memory() -> None:
    """Give the memory of earlier runs back to the device."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
