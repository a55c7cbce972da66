"""One training, one resumed inside a generation batch, one stopped by SIGTERM on one rank, one whose second rank
cannot write, and one whose second rank lost its file.

    accelerate launch --config_file … tests/distributed/resume_worker.py MODEL OUT

Leaves ``<rank>.json``: whether weights and history of the resumed run are those of the whole one, what each rank
generated, and the error of the third. Completions are sampled by the model, with each rank's own random numbers.
"""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

from forked import as_rank
from grpo_lab import LabConfig, LabTrainer
from grpo_lab.trainer.resume.checkpoint import CheckpointNotWritten
from grpo_lab.trainer.resume.generation_buffer import rows_file
from parity.harness import arguments, problems

STOP = 3
UNTIMED = (
    "loss",
    "grad_norm",
    "learning_rate",
    "reward",
    "entropy",
    "num_tokens",
    "clip_ratio/low_mean",
    "update/live_share",
)


class Judge:
    """The completions' own values; remembers them."""

    __name__ = "judge"

    def __init__(self) -> None:
        self.seen: list[list[list[int]]] = []

    def __call__(self, completion_ids: list[list[int]], **_: Any) -> list[float]:
        self.seen.append([list(ids) for ids in completion_ids])
        return [(sum(ids) % 5) / 4 for ids in completion_ids]


class Terminated(TrainerCallback):  # type: ignore[misc]
    """SIGTERM on the first rank alone, while step ``STOP`` is collected."""

    def on_substep_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == STOP - 1 and args.process_index == 0:
            os.kill(os.getpid(), signal.SIGTERM)


def build(model: str, out: Path, **changes: Any) -> LabTrainer:
    """Two optimizer steps a generation batch; logged every second step, so that the checkpoint has an open window,
    too."""
    settings = {
        "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "steps_per_generation": 4, "max_steps": 6,
        "logging_steps": 2, "optim": "adamw_torch", "learning_rate": 3e-3, "max_completion_length": 8,
        "save_strategy": "steps", "save_steps": STOP, "use_cpu": True, **changes,
    }  # fmt: skip
    return LabTrainer(
        model=AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32),
        reward_funcs=Judge(),
        args=LabConfig(**arguments(out, **settings), objective="dapo"),
        train_dataset=problems(4),  # two steps an epoch: the checkpoint is in the second one
        processing_class=AutoTokenizer.from_pretrained(model),
    )


def disk_full(_folder: str) -> None:
    raise OSError(28, "No space left on device")


def weights(trainer: LabTrainer) -> torch.Tensor:
    return torch.cat(
        [value.detach().flatten() for value in trainer.accelerator.unwrap_model(trainer.model).parameters()]
    )


def history(trainer: LabTrainer) -> list[dict[str, Any]]:
    return [{name: row.get(name) for name in UNTIMED} for row in trainer.state.log_history if "loss" in row]


def main(model: str, out: str) -> None:
    folder = Path(out)
    place = folder / "whole" / f"checkpoint-{STOP}"
    whole = build(model, folder / "whole")
    whole.train()
    again = build(model, folder / "again")
    again.train(resume_from_checkpoint=str(place))
    rank = whole.accelerator.process_index
    stopped = build(model, folder / "stopped", enable_jit_checkpoint=True, save_strategy="no")
    stopped.add_callback(Terminated())
    stopped.train()
    after = build(model, folder / "after")
    after.train(resume_from_checkpoint=str(folder / "stopped" / f"checkpoint-{STOP}"))
    full = build(model, folder / "full", max_steps=STOP)
    if rank == 1:
        full._save_rng_state = disk_full
    told = ""
    try:
        full.train()
    except CheckpointNotWritten as error:
        told = str(error)
    report = {
        "not written": told,
        "left of it": [path.name for path in (folder / "full").glob("*") if path.is_dir()],
        "stopped at": stopped.state.global_step,
        "weights equal after SIGTERM": torch.equal(weights(after), weights(whole)),
        "weights equal": torch.equal(weights(again), weights(whole)),
        "largest weight": weights(again).abs().max().item(),
        "whole history": history(whole),
        "resumed history": history(again),
        "whole": whole.reward_funcs[0].seen,
        "resumed": again.reward_funcs[0].seen,
    }
    again.accelerator.wait_for_everyone()
    if rank == 1:
        (place / rows_file(1)).rename(folder / rows_file(1))
    again.accelerator.wait_for_everyone()
    try:
        build(model, folder / "broken").train(resume_from_checkpoint=str(place))
    except ValueError as error:
        report["error"] = str(error)
    again.accelerator.wait_for_everyone()
    if rank == 1:
        (folder / rows_file(1)).rename(place / rows_file(1))
    (folder / f"{rank}.json").write_text(json.dumps(report))
    again.accelerator.wait_for_everyone()


if __name__ == "__main__":
    as_rank(main)
