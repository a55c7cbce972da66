"""Trainings whose advantages are per token, selected, or both; the same rows in every world: ``scoring_worker.py MODEL
OUT``."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from forked import as_rank
from grpo_lab import LabConfig, LabTrainer
from grpo_lab.advantages import GroupMean
from grpo_lab.batch import RewardTable
from grpo_lab.rewards import step_reward
from grpo_lab.testing import ScriptedRollout
from parity.harness import LENGTHS, arguments, mixed_reward, problems


@step_reward
def sevenths(completion_ids: list[list[int]], number: list[int], **_: Any) -> list[list[tuple[int, float]]]:
    """A step every seven tokens; of every third prompt all are right, and so is every outcome (``mixed_reward``)."""
    return [
        [(end, float(n % 3 == 0 or ids[end] % 3 == 0)) for end in range(2, len(ids), 7)]
        for n, ids in zip(number, completion_ids, strict=True)
    ]


class PerToken(LabTrainer):
    """One advantage a token of this rank's rows; T differs between ranks."""

    def compute_advantages(self, table: RewardTable) -> Tensor:
        assert table.local is not None
        row = GroupMean()(table.total, table.group_size)[table.local.rows]
        place = torch.arange(1, table.local.mask.size(1) + 1)
        self.__dict__.setdefault("widths", []).append(table.local.mask.size(1))
        return row.unsqueeze(1) * place / table.local.lengths.unsqueeze(1)


PROCESS = {"name": "grpo", "advantage": "process"}
RESAMPLE = {"update": {"dead_groups": "resample", "max_rounds": 4}}
KL = {"kl": {"estimator": "k1", "placement": "reward", "coefficient": 0.3, "per": "token", "gamma": 0.9}}
RUNS: dict[str, tuple[type[LabTrainer], dict[str, Any], list[Any]]] = {
    "kl": (LabTrainer, {"objective": "dr_grpo", "num_iterations": 2, **KL}, [mixed_reward()]),
    "kl_off": (LabTrainer, {"objective": "dr_grpo", "update": "off", **KL}, [mixed_reward()]),
    "hook": (PerToken, {"objective": "dr_grpo", "num_iterations": 2}, [mixed_reward()]),
    "hook_selected": (PerToken, {"objective": "dr_grpo", **RESAMPLE}, [mixed_reward()]),
    "batch_selected": (LabTrainer, {"objective": "dapo", "advantage": "batch_zscore", **RESAMPLE}, [mixed_reward()]),
    "kl_selected": (
        LabTrainer,
        {"objective": "dr_grpo", "advantage": "leave_one_out", **RESAMPLE, **KL},
        [mixed_reward()],
    ),
    "process_selected": (LabTrainer, {"objective": PROCESS, **RESAMPLE}, [sevenths, mixed_reward()]),
}


def main(model_folder: str, out: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    world = int(os.environ.get("WORLD_SIZE", "1"))
    for name, (kind, settings, rewards) in RUNS.items():
        shape = {"per_device_train_batch_size": 4 // world, "learning_rate": 0.1, "gradient_checkpointing": False}
        trainer = kind(
            model=AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32),
            reward_funcs=rewards,
            args=LabConfig(**arguments(Path(out) / name, **shape, ddp_find_unused_parameters=False, **settings)),
            train_dataset=problems(24),
            processing_class=tokenizer,
            rollout_func=ScriptedRollout(range(20, 90), LENGTHS, end_id=tokenizer.eos_token_id),
        )
        trainer.train()
        if trainer.accelerator.is_main_process:
            kept = {
                "weights": trainer.accelerator.unwrap_model(trainer.model).state_dict(),
                "logged": {name: list(trainer._logs[name]) for name in ("completion", "advantages")},
                "rounds": [
                    r["update/resample_rounds"] for r in trainer.state.log_history if "update/resample_rounds" in r
                ],
                "steps": len([row for row in trainer.state.log_history if "loss" in row]),
            }
            torch.save(kept, Path(out) / f"{name}.pt")
        trainer.accelerator.wait_for_everyone()


if __name__ == "__main__":
    as_rank(main)
