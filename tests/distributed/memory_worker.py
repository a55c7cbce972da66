"""Trainings in which a bin runs out of memory: accelerate launch … memory_worker.py MODEL OUT KIND. Leaves
``<rank>.json``.

KIND ``ddp``: on the second rank alone, in a forward and (in another run) in a backward. ``fsdp2``: on both.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from forked import as_rank
from grpo_lab import LabConfig, LabTrainer
from grpo_lab.testing import ScriptedRollout
from parity.harness import arguments, mixed_reward, problems

#: tokens of a forward when the training begins
BEGIN = 100


def trained(model: str, folder: Path, tokens: Any, where: str = "", ranks: tuple[int, ...] = (1,)) -> LabTrainer:
    """``where``: of the second bin that there is no memory for, on these ``ranks``."""
    settings = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 3, "max_steps": 3}
    update = {"max_tokens": tokens, "share_prompts": "off"}
    tokenizer = AutoTokenizer.from_pretrained(model)
    trainer = LabTrainer(
        model=AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32),
        reward_funcs=mixed_reward(),
        args=LabConfig(**arguments(folder, **settings), objective="dr_grpo", update=update),
        train_dataset=problems(24),
        processing_class=tokenizer,
        rollout_func=ScriptedRollout(range(20, 90), (3, 5, 9, 14), end_id=tokenizer.eos_token_id),
    )
    trainer.exact_update.budget._loaded = {"tokens": BEGIN, "measured": None}
    if where and trainer.accelerator.process_index in ranks:
        plant(trainer, where)
    trainer.train()
    return trainer


def plant(trainer: Any, where: str) -> None:
    left = {"bins": 2, "planted": True}

    def break_off() -> None:
        left["planted"] = False
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    def forward(_module: Any, _args: Any) -> None:
        if torch.is_grad_enabled() and trainer.model.training:
            left["bins"] -= 1
            if where == "forward" and left["planted"] and left["bins"] == 0:
                break_off()

    def backward(gradient: torch.Tensor) -> torch.Tensor:
        if where == "backward" and left["planted"] and left["bins"] == 0:
            break_off()
        return gradient

    trainer.model.register_forward_pre_hook(forward)
    trainer.model.get_input_embeddings().weight.register_hook(backward)


def weights(trainer: Any) -> torch.Tensor:
    return torch.cat([one.detach().flatten() for one in trainer.model.parameters()])


def main(model: str, out: str, kind: str) -> None:
    folder = Path(out)
    report: dict[str, Any] = {}
    if kind == "fsdp2":
        try:
            trained(model, folder / "o", "auto", "forward", ranks=(0, 1))
        except torch.OutOfMemoryError as error:
            report["error"] = str(error)
    else:
        for where in ("forward", "backward"):
            broken = trained(model, folder / where, "auto", where)
            tokens = broken.exact_update.budget.tokens
            same = trained(model, folder / f"{where} fixed", tokens)
            whole = trained(model, folder / f"{where} whole", "auto")
            apart = (weights(broken) - weights(whole)).norm() / weights(whole).norm()
            report[where] = {
                "tokens": tokens,
                "same": torch.equal(weights(broken), weights(same)),
                "apart": float(apart),
            }
            report[where]["bins"] = [row["update/tokens_computed"] for row in broken.state.log_history if "loss" in row]
            report[where]["of fixed"] = [
                row["update/tokens_computed"] for row in same.state.log_history if "loss" in row
            ]
    rank = int(os.environ["RANK"])
    (folder / f"{rank}.json").write_text(json.dumps(report))


if __name__ == "__main__":
    as_rank(main)
