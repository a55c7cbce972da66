"""One training on two ranks whose metrics are recomputed by hand on rank 0: ``metrics_worker.py MODEL OUT KIND``."""

from __future__ import annotations

import os
import sys
from pathlib import Path

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from grpo_lab import LabConfig
from metrics_oracle import Recorded, ToolRollout, accuracy_reward, check_steps
from parity.harness import arguments, problems

KINDS = {
    "token": {"objective": "dr_grpo", "epsilon": 0.03, "epsilon_high": 0.05},
    "sequence": {"objective": "gspo", "epsilon": 0.01, "epsilon_high": 0.012},
}


def main(model_folder: str, out: str) -> None:
    torch.set_num_threads(1)
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    for kind, settings in KINDS.items():
        shape = {
            "num_iterations": 2,
            "learning_rate": 1.0,
            "per_device_train_batch_size": 2,
            "update": {"max_tokens": 40},
        }
        config = LabConfig(**arguments(Path(out) / kind, **shape, **settings))
        config.script = ToolRollout(range(20, 90), (1, 1, 5, 9, 14), end_id=0, truncated_share=0.3)
        trainer = Recorded(
            model=AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32),
            reward_funcs=[accuracy_reward],
            args=config,
            train_dataset=problems(),
            processing_class=tokenizer,
            rollout_func=config.script,
        )
        trainer.train()
        if trainer.accelerator.is_main_process:
            seen = check_steps(trainer.steps, [row for row in trainer.state.log_history if "loss" in row], config)
            (Path(out) / f"{kind}.txt").write_text(" ".join(sorted(seen)))
        trainer.accelerator.wait_for_everyone()


if __name__ == "__main__":
    main(*sys.argv[1:])
    sys.stdout.flush()
    os._exit(0)  # gloo's threads race with the interpreter's teardown ("terminate called without an active exception")
