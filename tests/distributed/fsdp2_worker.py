"""One rank of a run whose parameters are really sharded: torchrun … fsdp2_worker.py MODEL OUT UPDATE.

accelerate does not switch FSDP on for CPU ranks, so the model is sharded here with ``torch.distributed.fsdp.fully_shard`` and
accelerate is told to leave it alone; from then on the trainer walks the same roads as on GPUs (``is_fsdp2``, gradient sync on
the last bin only).
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

from grpo_lab import LabConfig, LabTrainer
from grpo_lab.testing.rollouts import ScriptedRollout
from parity.harness import LENGTHS, arguments, mixed_reward, problems


class AsFSDP2(TrainerCallback):
    """Once everything is prepared, accelerate treats the run as FSDP2: gradients sync on the last backward only."""

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        Accelerator.is_fsdp2 = property(lambda self: True)  # type: ignore[assignment]


def main(model_folder: str, out: str, update: str) -> None:
    torch.set_num_threads(1)
    settings = arguments(Path(out), per_device_train_batch_size=2, gradient_accumulation_steps=3)
    config = LabConfig(**settings, objective="dr_grpo", update=None if update == "exact" else update)
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    config.distributed_state  # noqa: B018  (starts the process group)
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    assert isinstance(model, FSDPModule)
    assert all(isinstance(p, DTensor) for p in model.parameters())
    Accelerator.prepare_model = lambda self, model, *_, **__: model  # type: ignore[method-assign]
    rollout = ScriptedRollout(range(20, 90), LENGTHS, end_id=tokenizer.eos_token_id, truncated_share=0.2)
    trainer = LabTrainer(
        model=model,
        reward_funcs=mixed_reward(),
        args=config,
        train_dataset=problems(),
        processing_class=tokenizer,
        rollout_func=rollout,
        callbacks=[AsFSDP2()],
    )
    trainer.train()
    shards = sum(p.to_local().numel() for p in model.parameters())
    whole = {name: p.full_tensor().detach().clone() for name, p in model.named_parameters()}
    if trainer.accelerator.is_main_process:
        total = sum(p.numel() for p in whole.values())
        losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
        torch.save({"weights": whole, "losses": losses, "share": shards / total}, Path(out) / "result.pt")
    trainer.accelerator.wait_for_everyone()


if __name__ == "__main__":
    main(*sys.argv[1:])
    sys.stdout.flush()
    os._exit(0)  # gloo's threads race with the interpreter's teardown ("terminate called without an active exception")
