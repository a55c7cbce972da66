"""Stock TRL and ours on the same scripted rollouts, on this device, in float32 and bfloat16: the test suite's harness
and bounds.

float32: the final weights' movements differ by at most what rounding makes of this run
(``tests/tolerance.movement_gap``: rounding of the weights, and the log-probs' error in each step, from the unit
roundoff and the number of additions). bfloat16 (autocast, float32 weights): the yardstick is stock's own rounding, the
distance of its bfloat16 run from its float32 run. Ours is another draw of errors of that size (other shapes, other
attention kernels), so both distances, ours from stock's float32 run and the two bfloat16 runs from each other (√2 of
one's error), are at most twice the yardstick.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from trl import GRPOConfig, GRPOTrainer

from gpu_checks.section import Row, Setting, verdict
from grpo_lab import LabConfig, LabTrainer
from grpo_lab.testing import tiny_model
from parity.harness import ONE_ROW_IN_A_HUNDRED, Run, arguments, movement_bound, movement_difference, train

#: objective → TRL's settings that say the same
STOCK: dict[str, dict[str, Any]] = {
    "dr_grpo": {"loss_type": "dr_grpo", "scale_rewards": "none"},
    "grpo": {"loss_type": "grpo"},
    "dapo": {"loss_type": "dapo"},
}
#: bfloat16: two passes, so that ratios leave 1; none comes near a clip, which one draw of rounding would cut and
#: another not
MOVES = {"num_iterations": 2, "max_steps": 4, "learning_rate": 1e-4}


def models(setting: Setting) -> Path:
    """A random Qwen2 whose heads are of 64, as Qwen2.5's (tiny: of 8), so that a GPU takes its usual attention
    kernels."""
    folder = setting.own / "model"
    if not folder.exists():
        sizes = {"hidden_size": 32} if setting.tiny else {"hidden_size": 256, "num_layers": 4}
        model, tokenizer = tiny_model("qwen2", initializer_range=1 / sizes["hidden_size"] ** 0.5, **sizes)
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    return folder


def run(setting: Setting, kind: Any, name: str, **changes: Any) -> Run:
    settings = arguments(setting.own / "out", **({"use_cpu": not setting.gpu} | changes))
    ours = issubclass(kind, LabTrainer)
    args = LabConfig(objective=name, **settings) if ours else GRPOConfig(**settings, **STOCK[name])
    done = train(kind, args, models(setting))
    done.trainer = None
    return done


def fp32(setting: Setting) -> Iterator[Row]:
    """Movement of the weights in four SGD steps, stock beside ours, one row an objective."""
    width = 32 if setting.tiny else 256
    for name in objectives(setting):
        stock, ours = (run(setting, kind, name) for kind in (GRPOTrainer, LabTrainer))
        found = movement_difference(ours, stock)
        bound = movement_bound(stock, width)
        apart = max(abs(a - b) for a, b in zip(ours.losses, stock.losses, strict=True))
        asked = f"{name}, float32: movement of the weights from stock's"
        yield verdict(asked, found, f"<= {bound:.1e}", found <= bound < ONE_ROW_IN_A_HUNDRED, **{"losses apart": apart})


def bf16(setting: Setting) -> Iterator[Row]:
    """The same under bfloat16 autocast, measured by stock's own rounding."""
    if setting.gpu and not torch.cuda.is_bf16_supported():
        raise RuntimeError("this GPU has no bfloat16")
    for name in objectives(setting):
        exact, theirs = (run(setting, GRPOTrainer, name, bf16=half, **MOVES) for half in (False, True))
        ours = run(setting, LabTrainer, name, bf16=True, **MOVES)
        rounding = movement_difference(theirs, exact)
        off = movement_difference(ours, exact)
        apart = movement_difference(ours, theirs)
        asked = f"{name}, bfloat16: movement from stock's float32 run, and from its bfloat16 run"
        passed = 1e-4 < rounding < 0.1 and max(off, apart) <= 2 * rounding
        columns = {"from float32": off, "apart": apart, "stock's rounding": rounding}
        yield verdict(asked, max(off, apart), f"<= {2 * rounding:.1e}, twice stock's rounding", passed, **columns)


def objectives(setting: Setting) -> tuple[str, ...]:
    return ("dr_grpo",) if setting.tiny else tuple(STOCK)
