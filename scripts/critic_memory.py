"""What a critic costs in memory, measured on a CPU beside the paper: GRPO, PPO with a head, PPO with a copy of the
policy, side by side.

    python scripts/critic_memory.py [--hidden 512] [--layers 6] [--rows 16]

A Qwen2 from config in float32 with AdamW, two optimizer steps in a process of its own for each side; the same rows,
lengths and micro-batches. On paper: 16 bytes a trained parameter (weight, gradient, two moments); activations come on
top, and with a copy its own besides. Peak above what the process held before the model was made.
"""

from __future__ import annotations

import gc
import tempfile
from pathlib import Path
from typing import Any

from grpo_lab import LabConfig, LabTrainer
from grpo_lab.data import word_problems
from grpo_lab.labs.experiment import Experiment, Found, Options, Record, carry_out, options_of_cell, parser
from grpo_lab.labs.tables import markdown
from grpo_lab.testing import tiny_model

SIDES: dict[str, dict[str, Any]] = {
    "GRPO": {"objective": "grpo"},
    "PPO, head": {"objective": "ppo", "value": {"model": "head"}},
    "PPO, copy": {"objective": "ppo", "value": {"model": "copy"}},
}
BYTES = 16


def main() -> None:
    words = parser(__doc__, "runs/critic_memory", seeds=[0])
    words.add_argument("--hidden", type=int, default=512)
    words.add_argument("--layers", type=int, default=6)
    words.add_argument("--rows", type=int, default=16, help="completions a step")
    carry_out(Experiment(list(SIDES), measure, table, settings=settings_of), words.parse_args())


def settings_of(side: str, seed: int, options: Options) -> dict[str, Any]:
    return {**options_of_cell(side, seed, options), "side": SIDES[side]}


def table(found: Found, _: Options) -> str:
    heads = [
        "",
        "trained parameters, M",
        "states on paper, MiB",
        "more than GRPO",
        "peak measured, MiB",
        "more than GRPO",
    ]
    rows, base = [], None
    for side, (one, *_) in found.items():
        paper, peak = one["trained"] * BYTES / 2**20, one["memory_mib"]
        base = base or (paper, peak)
        more = [f"{paper:.0f}", f"{paper - base[0]:+.0f}", f"{peak:.0f}", f"{peak - base[1]:+.0f}"]
        rows.append([side, f"{one['trained'] / 1e6:.2f}", *more])
    return markdown(heads, rows)


def by_length(completions: list[Any], **_: Any) -> list[float]:
    """No group is dead, so that GRPO computes every row, as PPO does."""
    return [float(place) for place in range(len(completions))]


def measure(side: str, seed: int, output: Path, options: Options) -> Record:
    """Trained parameters; the peak above what was held before there was a model is measured around this."""
    model, tokenizer = tiny_model(
        hidden_size=options.hidden, num_layers=options.layers, num_heads=8, max_positions=256, initializer_range=0.2
    )
    with tempfile.TemporaryDirectory() as folder:
        settings = {
            "output_dir": folder,
            "per_device_train_batch_size": options.rows,
            "max_steps": 2,
            "save_strategy": "no",
        }
        settings |= {"num_generations": 8, "max_completion_length": 16, "gradient_checkpointing": False}
        settings |= {"report_to": "none", "disable_tqdm": True, "use_cpu": True, "bf16": False}
        trainer = LabTrainer(
            model=model,
            reward_funcs=by_length,
            args=LabConfig(**settings, **SIDES[side]),
            train_dataset=word_problems(n=64),
            processing_class=tokenizer,
        )
        trained = sum(one.numel() for one in trainer.model.parameters() if one.requires_grad)
        gc.collect()
        trainer.train()
    return {"trained": trained}


if __name__ == "__main__":
    main()
