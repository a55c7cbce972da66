"""One training of some steps on scripted completions, launched by ``accelerate launch`` with one or more processes.

    accelerate launch --config_file … tests/distributed/worker.py spec.json

``spec.json``: ``{"model": folder, "out": folder, "runs": [{"name": …, "args": {…}}]}``. Each run leaves ``<name>.pt`` (the final
weights) and ``<name>.json`` (logged rows, every rank's group rewards). The rollout knows the global row, so the completions
are the same however many processes make them.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from accelerate.utils import gather_object
from transformers import AutoModelForCausalLM, AutoTokenizer

from grpo_lab import LabConfig, LabTrainer
from grpo_lab.rewards.protocol import Group, GroupReward
from grpo_lab.testing.rollouts import ScriptedRollout
from parity.harness import arguments, mixed_reward, problems


class RankByLength(GroupReward):
    """Each completion's place by length within its whole group, 0 … 1. Keeps what it gave, for the test to compare."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[list[float]] = []

    def score_group(self, group: Group) -> list[float]:
        order = sorted(range(len(group)), key=lambda i: (group.lengths[i], group.completion_ids[i]))
        places = {row: place / (len(order) - 1) for place, row in enumerate(order)}
        self.seen.append([places[i] for i in range(len(order))])
        return self.seen[-1]


def train(model_folder: str, out: Path, name: str, args: dict[str, Any], group_reward: bool) -> None:
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    rollout = ScriptedRollout(range(20, 90), (3, 5, 9, 14, 21, 30), end_id=tokenizer.eos_token_id, truncated_share=0.2)
    ranked = RankByLength()
    trainer = LabTrainer(
        model=AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32),
        reward_funcs=[mixed_reward(), ranked] if group_reward else mixed_reward(),
        args=LabConfig(**arguments(out / name, **{"learning_rate": 0.1, **args})),
        train_dataset=problems(24),
        processing_class=tokenizer,
        rollout_func=rollout,
    )
    trainer.train()
    seen = gather_object([ranked.seen])
    if trainer.accelerator.is_main_process:
        model = trainer.accelerator.unwrap_model(trainer.model)
        torch.save({key: value.clone() for key, value in model.state_dict().items()}, out / f"{name}.pt")
        report = {
            "world": trainer.accelerator.num_processes,
            "history": trainer.state.log_history,
            "advantages": list(trainer._logs["advantages"]),
            "group_rewards": seen,
        }
        (out / f"{name}.json").write_text(json.dumps(report))
    trainer.accelerator.wait_for_everyone()


def main() -> None:
    torch.set_num_threads(1)
    spec = json.loads(Path(sys.argv[1]).read_text())
    for run in spec["runs"]:
        train(spec["model"], Path(spec["out"]), run["name"], run["args"], run.get("group_reward", False))


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)  # gloo's threads race with the interpreter's teardown ("terminate called without an active exception")
