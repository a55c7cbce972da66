"""Trainings of some steps on scripted completions, launched by ``accelerate launch`` with one or more processes.

    accelerate launch --config_file … tests/distributed/worker.py spec.json

``spec.json``: ``{"model": folder, "out": folder, "runs": [Case.spec(processes), …]}``; ``"from": {"run": name, "step":
n}`` in a run: it goes on from that run's checkpoint. Each run leaves ``<name>.pt`` (the final weights) and
``<name>.json``: logged rows and, per rank, the reward tables that it saw and the local rows that its rewards were
called on. The rollout knows the global row, so the completions are the same however many processes make them.
"""

from __future__ import annotations

import gc
import json
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import gather_object
from peft import LoraConfig
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

from forked import as_rank
from grpo_lab import LabConfig, LabTrainer
from grpo_lab.rewards import KimiLengthReward, group_reward
from grpo_lab.rewards.protocol import Group
from grpo_lab.testing import ScriptedRollout
from parity.harness import arguments, mixed_reward, problems
from parity.sampler import NoisySampler


@group_reward(requires=("accuracy_reward",), num_generations=4)
def rare_and_right(group: Group) -> list[float | None]:
    """A team's group reward: a right answer counts the more, the fewer of its group are right; a cut one costs its
    place."""
    right = [value == 1.0 and not cut for value, cut in zip(group.rewards["accuracy_reward"], group.truncated or [])]
    places = [sum(other < length for other in group.lengths) / len(group) for length in group.lengths]
    return [1.0 / sum(right) if ok else -place for ok, place in zip(right, places)]


class Disagreeing(NoisySampler):
    """Scores every token, whichever rank asks."""

    def __call__(self, prompts: list[list[int]], completions: list[list[int]]) -> list[list[float | None]]:
        return [self._row(*row) for row in zip(prompts, completions, strict=True)]


class Accuracy:
    """Right, wrong or (one in seven) unscorable by the token ids; keeps the rows that this rank was called on."""

    __name__ = "accuracy_reward"

    def __init__(self) -> None:
        self.local_rows: list[list[dict[str, Any]]] = []

    def __call__(self, completion_ids: list[list[int]], number: list[int], **_: Any) -> list[float | None]:
        values = [None if sum(ids) % 7 == 0 else float(sum(ids) % 4 > 0) for ids in completion_ids]
        rows = zip(number, completion_ids, values, strict=True)
        self.local_rows.append([{"number": n, "length": len(ids), "correct": value} for n, ids, value in rows])
        return values


class Recording(LabTrainer):
    """Keeps the reward table of every generation batch, as this rank sees it, through the public hook."""

    def compute_advantages(self, table: Any) -> Tensor:
        rows = [[None if value != value else value for value in row] for row in table.values.tolist()]
        self.__dict__.setdefault("tables", []).append({"names": list(table.names), "values": rows})
        return super().compute_advantages(table)


def sparse_reward(prompts: list[str], completion_ids: list[list[int]], number: list[int], **_: Any) -> list[float]:
    """Three groups out of four are dead, so whole ranks and whole steps are."""
    return [(sum(ids) % 5) / 4.0 if n % 4 == 3 else 0.25 for n, ids in zip(number, completion_ids, strict=True)]


def rewards_of(kind: str, accuracy: Accuracy, stock: bool) -> list[Any]:
    if kind == "mixed":
        return [mixed_reward()]
    if kind == "sparse":
        return [sparse_reward]
    if stock:  # it shows no reward the values of another, and starts every reward on local rows
        return [accuracy, KimiLengthReward(weight=0.5, correctness=Accuracy(), num_generations=4)]
    return [accuracy, KimiLengthReward(weight=0.5, warmup_steps=1), rare_and_right]


def build(model_folder: str, out: Path, run: dict[str, Any], accuracy: Accuracy) -> GRPOTrainer:
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    plain = run["stock"] or "loss_type" in run["args"]
    settings = arguments(
        out / run["name"],
        **{"learning_rate": 0.1, "gradient_checkpointing": False, "ddp_find_unused_parameters": False, **run["args"]},
    )
    kind: Any = GRPOTrainer if run["stock"] else LabTrainer if plain else Recording
    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    sampler = Disagreeing(model) if "correction" in settings else None
    return kind(
        model=model,
        reward_funcs=rewards_of(run["reward"], accuracy, run["stock"]),
        args=(GRPOConfig if run["stock"] else LabConfig)(**settings),
        train_dataset=problems(24).add_column("task", [("add", "sort")[row % 3 == 1] for row in range(24)]),
        processing_class=tokenizer,
        peft_config=LoraConfig(r=4, lora_alpha=64, target_modules=["q_proj", "v_proj"]) if run.get("adapter") else None,
        rollout_func=ScriptedRollout(
            range(20, 90),
            (3, 5, 9, 14, 21, 30),
            end_id=tokenizer.eos_token_id,
            truncated_share=0.2,
            sampler_logps=sampler,
        ),
    )


def whole_weights(model: nn.Module) -> tuple[dict[str, Tensor], float]:
    """All weights in full, and the share of their elements that this rank holds. A collective where they are
    sharded."""
    parameters = list(model.parameters())
    if any(hasattr(p, "ds_tensor") for p in parameters):
        return gathered_weights(model, parameters)
    local = sum((p.to_local() if isinstance(p, DTensor) else p).numel() for p in parameters)
    state = {
        key: value.full_tensor() if isinstance(value, DTensor) else value for key, value in model.state_dict().items()
    }
    return {key: value.clone() for key, value in state.items()}, local / sum(p.numel() for p in parameters)


def gathered_weights(model: nn.Module, parameters: list[Any]) -> tuple[dict[str, Tensor], float]:
    """The same under ZeRO-3, which keeps a rank's part in ``ds_tensor`` and leaves the parameter empty."""
    from deepspeed.runtime.zero import GatheredParameters

    local = sum(p.ds_tensor.numel() for p in parameters)
    with GatheredParameters(parameters):
        state = {key: value.detach().clone() for key, value in model.state_dict().items()}
    return state, local / sum(p.ds_numel for p in parameters)


def train(model_folder: str, out: Path, run: dict[str, Any]) -> None:
    accuracy = Accuracy()
    trainer = build(model_folder, out, run, accuracy)
    error, before = None, run.get("from")
    if before is not None:
        trainer.rollout_func.calls = before["step"]  # a generation a step
    place = None if before is None else str(out / before["run"] / f"checkpoint-{before['step']}")
    try:
        trainer.train(resume_from_checkpoint=place)
    except ValueError as refusal:  # of a group reward in stock TRL, before any collective
        error = str(refusal)
    seen = gather_object(
        [{"tables": trainer.__dict__.get("tables", []), "local_rows": accuracy.local_rows, "error": error}]
    )
    policy = trainer.accelerator.unwrap_model(trainer.model)
    weights, share = whole_weights(policy.merge_and_unload() if run.get("adapter") else policy)
    if trainer.accelerator.is_main_process:
        torch.save(weights, out / f"{run['name']}.pt")
        report = {
            "kind": str(trainer.accelerator.distributed_type.value),
            "fsdp2": trainer.accelerator.is_fsdp2,
            "zero_stage": getattr(trainer.accelerator.state.deepspeed_plugin, "zero_stage", None),
            "share_of_parameters": share,
            "world": trainer.accelerator.num_processes,
            "history": trainer.state.log_history,
            "advantages": list(trainer._logs["advantages"]),
            "find_unused_parameters": getattr(trainer.model_wrapped, "find_unused_parameters", None),
            "ranks": seen,
        }
        (out / f"{run['name']}.json").write_text(json.dumps(report))
    trainer.accelerator.wait_for_everyone()


def main(file: str) -> None:
    gc.freeze()  # accelerate collects garbage in every train(); walking all imported modules each time takes a second
    spec = json.loads(Path(file).read_text())
    for run in spec["runs"]:
        train(spec["model"], Path(spec["out"]), run)


if __name__ == "__main__":
    as_rank(main)
