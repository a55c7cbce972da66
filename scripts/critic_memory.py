"""What a critic costs in memory, measured on a CPU beside the paper: GRPO, PPO with a head, PPO with a copy of the policy, side by side.

    python scripts/critic_memory.py [--hidden 512] [--layers 6] [--rows 16]

A Qwen2 from config in float32 with AdamW, two optimizer steps in a process of its own for each side; the same rows, lengths and micro-batches. On paper: 16 bytes a
trained parameter (weight, gradient, two moments); activations come on top, and with a copy its own besides. Peak above what the process held
before the model was made.
"""

from __future__ import annotations

import argparse
import gc
import json
import subprocess
import sys
import tempfile
from typing import Any

from arm_runs import peak_memory

SIDES: dict[str, dict[str, Any]] = {
    "GRPO": {"objective": "grpo"},
    "PPO, head": {"objective": "ppo", "value": {"model": "head"}},
    "PPO, copy": {"objective": "ppo", "value": {"model": "copy"}},
}
BYTES = 16


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--rows", type=int, default=16, help="completions a step")
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.side:
        print(json.dumps(measure(args.side, args)))
        return
    heads = (
        "",
        "trained parameters, M",
        "states on paper, MiB",
        "more than GRPO",
        "peak measured, MiB",
        "more than GRPO",
    )
    print(f"| {' | '.join(heads)} |\n|{'---|' * len(heads)}")
    base: dict[str, float] = {}
    for side in SIDES:
        words = [sys.executable, __file__, "--side", side, "--hidden", str(args.hidden), "--layers", str(args.layers)]
        done = subprocess.run([*words, "--rows", str(args.rows)], capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"{side}: exit code {done.returncode}\n{done.stderr[-3000:]}")
        found = json.loads(done.stdout.splitlines()[-1])
        paper = found["trained"] * BYTES / 2**20
        base = base or {"paper": paper, "peak": found["peak"]}
        line = f"| {side} | {found['trained'] / 1e6:.2f} | {paper:.0f} | {paper - base['paper']:+.0f} "
        print(line + f"| {found['peak']:.0f} | {found['peak'] - base['peak']:+.0f} |", flush=True)


def by_length(completions: list[Any], **_: Any) -> list[float]:
    """No group is dead, so that GRPO computes every row, as PPO does."""
    return [float(place) for place in range(len(completions))]


def measure(side: str, args: argparse.Namespace) -> dict[str, float]:
    """In a process of its own: trained parameters, and the peak in MiB above what was held before there was a model."""
    from grpo_lab import LabConfig, LabTrainer
    from grpo_lab.data import word_problems
    from grpo_lab.testing import tiny_model

    before = peak_memory()
    model, tokenizer = tiny_model(
        hidden_size=args.hidden, num_layers=args.layers, num_heads=8, max_positions=256, initializer_range=0.2
    )
    with tempfile.TemporaryDirectory() as folder:
        settings = {
            "output_dir": folder,
            "per_device_train_batch_size": args.rows,
            "num_generations": 8,
            "max_completion_length": 16,
            "max_steps": 2,
            "save_strategy": "no",
            "report_to": "none",
            "disable_tqdm": True,
            "gradient_checkpointing": False,
            "use_cpu": True,
            "bf16": False,
        }
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
    return {"trained": trained, "peak": peak_memory() - before}


if __name__ == "__main__":
    main()
