"""Sections about prompts that are computed once for their group: gradients compared with stock TRL's, and seconds
compared with stock's and with ours without sharing.

Rollouts are fixed: 8 groups of 8, 5 of them dead. Sides of ours are ``off``, where every row has its prompt; ``on``,
which computes attention in tiles; ``flex``, in FlexAttention's kernel with the same mask; ``flash``, in a flash
kernel's call for sequences of different lengths. Seconds are those of an optimizer step without generation; the first
step is left out.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from statistics import median
from typing import Any
from unittest import mock

import torch
from bench_shapes import config_of
from bench_shared_prompts import AGREE, DEAD, GROUPS, Cell
from bench_update_sides import Watch, peak_mib, reset_peak, trainer_of
from transformers import Qwen2ForCausalLM
from trl import GRPOTrainer

from gpu_checks.section import Row, Setting, below, faster, verdict
from grpo_lab import LabTrainer
from grpo_lab.trainer.trl_bridge import CLOCK

GROUP = 8
SHARING = {"off": "off", "on": "on", "flex": "on", "flash": "on"}
ATTENTION = {"flex": "flex_attention", "flash": "flash_attention_2"}
#: packages with a flash kernel: flash-attn has its own, and kernels fetches one from the hub
FLASH = ("flash_attn", "kernels")


@dataclass
class Side:
    """One training of a side.

    Attributes:
        seconds: median of the steps without the first.
        first: seconds of the first step.
        peak: peak of memory in MiB above the start.
        norms: the gradient's norm in each step.
        tokens: number of tokens computed in a step; NaN for stock, which does not log it.
        gradient: the first gradient in one row; None in bfloat16.
    """

    seconds: float
    first: float
    peak: float
    norms: list[float]
    tokens: float
    gradient: torch.Tensor | None


def gradients(setting: Setting) -> Iterator[Row]:
    """Compare the gradients of ours, unshared and shared, with stock's in float32."""
    cell = cell_of(setting, "small", 64, 32)
    stock = trained(setting, "small", cell, "stock", steps=0)
    for side in ("off", "on"):
        yield agrees(
            f"gradient of `share_prompts: {side}` from stock's", stock, trained(setting, "small", cell, side, steps=0)
        )


def flex_gradients(setting: Setting) -> Iterator[Row]:
    """Compare the gradient with FlexAttention with that with tiles in float32."""
    cell = cell_of(setting, "small", 64, 32)
    tiles, flex = (trained(setting, "small", cell, side, steps=0) for side in ("on", "flex"))
    row = agrees("gradient with FlexAttention from that with tiles", tiles, flex)
    yield row | {"first step s": flex.first, "compiled": CLOCK.described()}


def flex_unfused(setting: Setting) -> Iterator[Row]:
    """Do the same on a CPU: PyTorch's unfused FlexAttention reads the mask that the kernel would get. PyTorch refuses a
    backward on CPUs, since there is no fused kernel, and so do we; both checks are switched off here."""
    from transformers.integrations.flex_attention import WrappedFlexAttention

    attention = torch.nn.attention.flex_attention
    with (
        mock.patch.object(attention, "_validate_device"),
        mock.patch.object(WrappedFlexAttention, "__call__", return_value=attention.flex_attention),
        mock.patch("grpo_lab.trainer.exactness.shared_prompts._of_run", return_value=""),  # which refuses it on a CPU
    ):
        yield from flex_gradients(setting)


def seconds(setting: Setting) -> Iterator[Row]:
    """Time a step of stock, and of ours unshared and shared, for the 0.5B shape under bfloat16."""
    cell = cell_of(setting, "0.5B", 1024, 256)
    found: dict[str, Side] = {}
    for side in ("stock", "off", "on"):
        found[side] = one = trained(setting, "0.5B", cell, side, steps=1 if setting.tiny else 3)
        columns = {"side": side, "step s": one.seconds, "peak MiB": one.peak, "computed": one.tokens}
        if side == "stock":
            yield columns
            continue
        asked = f"update with `share_prompts: {side}`, stock over ours"
        yield faster(setting, asked, found["stock"].seconds, one.seconds, **columns)
        yield norms_agree(f"its gradient norms, `{side}`, from stock's", found["stock"], one)


def flex_seconds(setting: Setting) -> Iterator[Row]:
    """Time a step with tiles and with FlexAttention, and how long the latter compiles, for the 0.5B shape under
    bfloat16."""
    cell = cell_of(setting, "0.5B", 1024, 256)
    tiles = trained(setting, "0.5B", cell, "on", steps=3)
    yield {"side": "tiles", "step s": tiles.seconds, "peak MiB": tiles.peak}
    flex = trained(setting, "0.5B", cell, "flex", steps=3)
    yield verdict("seconds of FlexAttention's first step, which compiles", flex.first)
    yield verdict("what FlexAttention compiled for all lengths", CLOCK.described())
    columns = {"side": "FlexAttention", "step s": flex.seconds, "peak MiB": flex.peak}
    yield faster(setting, "step with FlexAttention, tiles over it", tiles.seconds, flex.seconds, **columns)
    yield norms_agree("its gradient norms from those of tiles", tiles, flex)


def flash_seconds(setting: Setting) -> Iterator[Row]:
    """Time a step with tiles and with a flash kernel, if one is installed, for the 0.5B shape under bfloat16."""
    if not any(find_spec(package) for package in FLASH):
        yield verdict("a flash kernel", f"none: neither {' nor '.join(FLASH)} is installed")
        return
    cell = cell_of(setting, "0.5B", 1024, 256)
    tiles, flash = (trained(setting, "0.5B", cell, side, steps=3) for side in ("on", "flash"))
    yield {"side": "tiles", "step s": tiles.seconds, "peak MiB": tiles.peak}
    columns = {"side": "flash kernel", "step s": flash.seconds, "peak MiB": flash.peak}
    yield faster(setting, "step with a flash kernel, tiles over it", tiles.seconds, flash.seconds, **columns)
    yield norms_agree("its gradient norms from those of tiles", tiles, flash)


def cell_of(setting: Setting, shape: str, prompt: int, completion: int) -> Cell:
    words = config_of(shape_of(setting, shape)).vocab_size
    prompt, completion = (24, 16) if setting.tiny else (prompt, completion)
    return Cell(GROUPS * GROUP, DEAD, min(words, 1000), group=GROUP, prompt=prompt, completion=completion)


def shape_of(setting: Setting, shape: str) -> str:
    return "tiny" if setting.tiny else shape


def trained(setting: Setting, shape: str, cell: Cell, side: str, steps: int) -> Side:
    """Train a side for ``steps`` optimizer steps after a first one. ``small`` shapes are trained in float32, others
    under bfloat16 on a GPU."""
    exact = shape == "small"
    torch.manual_seed(0)
    config = config_of(shape_of(setting, shape))
    config._attn_implementation = ATTENTION.get(side, "sdpa")
    with torch.device(setting.device):
        model = Qwen2ForCausalLM(config).float()
    cell.calls = 0
    settings = arguments(setting, cell, steps + 1) | {"bf16": setting.gpu and not exact}
    if side != "stock":
        settings["update"] = {"share_prompts": SHARING[side]}
    watch = Watch(keep_gradient=exact)
    trainer = trainer_of(GRPOTrainer if side == "stock" else LabTrainer, model, cell, settings, watch)
    reset_peak()
    before = torch.cuda.memory_allocated() / 2**20 if setting.gpu else peak_mib()
    trainer.train()
    history = trainer.state.log_history
    computed = [row["update/tokens_computed"] for row in history if "update/tokens_computed" in row]
    return Side(
        median(watch.seconds[1:] or watch.seconds), watch.seconds[0], peak_mib() - before,
        [row["grad_norm"] for row in history if "grad_norm" in row],
        median(computed) if computed else float("nan"), watch.gradient,
    )  # fmt: skip


def arguments(setting: Setting, cell: Cell, steps: int) -> dict[str, Any]:
    return {
        "output_dir": str(setting.own / "out"), "per_device_train_batch_size": 8,
        "gradient_accumulation_steps": cell.rows // 8, "num_generations": GROUP,
        "max_completion_length": cell.completion, "max_steps": steps, "learning_rate": 1e-6,
        "lr_scheduler_type": "constant", "max_grad_norm": 0.0, "loss_type": "dr_grpo", "scale_rewards": "none",
        "logging_steps": 1, "save_strategy": "no", "report_to": "none", "disable_tqdm": True,
        "use_cpu": not setting.gpu, "gradient_checkpointing": False, "seed": 0,
    }  # fmt: skip


def agrees(asked: str, one: Side, other: Side) -> Row:
    """Return a verdict on the distance of two gradients, relative to the length of the first."""
    assert one.gradient is not None
    assert other.gradient is not None
    apart = float((other.gradient - one.gradient).norm() / one.gradient.norm())
    return below(asked, apart, AGREE)


def norms_agree(asked: str, one: Side, other: Side) -> Row:
    """Return a verdict on the gradient norms of two sides under bfloat16. A number is rounded by up to 4e-3 there, and
    a norm, which all weights share in, by less than the bound of 5e-3."""
    apart = max(abs(a - b) / a for a, b in zip(one.norms, other.norms, strict=True))
    return below(asked, apart, 5e-3)


def flex_built(setting: Setting) -> Iterator[Row]:
    """Check on a CPU that ours refuses FlexAttention, and names it."""
    cell = cell_of(setting, "0.5B", 1024, 256)
    try:
        trained(setting, "0.5B", cell, "flex", steps=0)
    except ValueError as refusal:
        yield verdict(
            "ours refuses it on a CPU", str(refusal), "a refusal that names FlexAttention", "Flex" in str(refusal)
        )


def flash_built(setting: Setting) -> Iterator[Row]:
    """Check on a CPU that transformers refuses a flash kernel."""
    cell = cell_of(setting, "0.5B", 1024, 256)
    try:
        trained(setting, "0.5B", cell, "flash", steps=0)
    except (ImportError, ValueError) as refusal:
        words = str(refusal).strip().splitlines()[-1]
        yield verdict("transformers refuses it on a CPU", words, "a refusal that names it", "lash" in words)
