"""Sections that compare stock TRL and ours on the same scripted rollouts, on this device, in float32 and bfloat16, with
the test suite's harness and bounds.

float32: the movements of the weights may differ by what rounding makes of such a run: the rounding of the weights, and
the error of the log-probs in each step, computed from the unit roundoff and the number of additions
(``tests/tolerance.movement_gap``).

bfloat16 (autocast, float32 weights): the yardstick is stock's own rounding, which is the distance of its bfloat16 run
from its float32 run. Ours makes other errors of the same size, by other shapes and other attention kernels. So two
distances may be at most twice the yardstick: that of our bfloat16 run from stock's float32 run, and that of the two
bfloat16 runs from each other (to expect is √2 times the yardstick).
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

#: objective → TRL's settings of the same objective
STOCK: dict[str, dict[str, Any]] = {
    "dr_grpo": {"loss_type": "dr_grpo", "scale_rewards": "none"},
    "grpo": {"loss_type": "grpo"},
    "dapo": {"loss_type": "dapo"},
}
#: settings in bfloat16: two passes, so that ratios differ from 1, but so little that none comes near a clip, where
#: rounding would decide whether it is cut
MOVES = {"num_iterations": 2, "max_steps": 4, "learning_rate": 1e-4}


def models(setting: Setting) -> Path:
    """Return the folder of a random Qwen2, which is made if it is not there. Its attention heads have 64 dimensions as
    Qwen2.5's (tiny: 8), so that a GPU takes its usual kernels."""
    folder = setting.own / "model"
    if not folder.exists():
        sizes = {"hidden_size": 32} if setting.tiny else {"hidden_size": 256, "num_layers": 4}
        model, tokenizer = tiny_model("qwen2", initializer_range=1 / sizes["hidden_size"] ** 0.5, **sizes)
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    return folder


def run(setting: Setting, kind: Any, name: str, **changes: Any) -> Run:
    """Train with a trainer class ``kind`` and the objective ``name``; ``changes``: further settings."""
    settings = arguments(setting.own / "out", **({"use_cpu": not setting.gpu} | changes))
    ours = issubclass(kind, LabTrainer)
    args = LabConfig(objective=name, **settings) if ours else GRPOConfig(**settings, **STOCK[name])
    done = train(kind, args, models(setting))
    done.trainer = None
    return done


def fp32(setting: Setting) -> Iterator[Row]:
    """Compare the movement of the weights in four steps of SGD in float32; yield a row for each objective."""
    width = 32 if setting.tiny else 256
    for name in objectives(setting):
        stock, ours = (run(setting, kind, name) for kind in (GRPOTrainer, LabTrainer))
        found = movement_difference(ours, stock)
        bound = movement_bound(stock, width)
        apart = max(abs(a - b) for a, b in zip(ours.losses, stock.losses, strict=True))
        asked = f"{name}, float32: movement of the weights from stock's"
        yield verdict(asked, found, f"<= {bound:.1e}", found <= bound < ONE_ROW_IN_A_HUNDRED, **{"losses apart": apart})


def bf16(setting: Setting) -> Iterator[Row]:
    """Compare the movement of the weights under bfloat16 autocast; yield a row for each objective."""
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
