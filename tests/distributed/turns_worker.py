"""Tools on ranks of which one makes more turns than the other: MODEL OUT KIND [trajectories: ``rollout.turns``, or the
URL of a server: that as well, and a reward of groups that lie on both ranks].

Every row of rank 0 calls the tool until it may no longer; on rank 1 half of them do (KIND ``rows``), or call it once.
Each rank writes ``rank-<r>.pt``: the turns of its rows, what each step trained on, the log; the main process what the
engine drew.
"""

from __future__ import annotations

import contextlib
import itertools
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl.trainer import grpo_trainer

from distributed.team_rewards import fewest_turns, odd_share
from forked import as_rank
from grpo_lab import LabConfig, LabTrainer
from parity.drop_in_cases import chats, multiply
from parity.harness import arguments
from rollouts.stand_in import stand_in


class Turns(LabTrainer):
    """Keeps the turns that TRL's tool loop asked for: prompt, completion."""

    kept: list[tuple[list[int], list[int]]]

    def _generate_single_turn(self, prompt_ids: Any, *rest: Any, **options: Any) -> Any:
        made = super()._generate_single_turn(prompt_ids, *rest, **options)
        self.kept += zip(map(list, prompt_ids), map(list, made[0]), strict=True)
        return made


class Trained(TrainerCallback):
    """What each step trained on."""

    def __init__(self, trainer: LabTrainer) -> None:
        self.trainer = trainer
        self.rows: list[dict[str, Any]] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        fields = self.trainer._buffered_inputs[0]
        names = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask", "tool_mask")
        told = fields.get("sampling_per_token_logps")
        for row in range(len(fields["prompt_ids"])):
            prompt, seen, ids, mask, own = (fields[name][row] for name in names)
            length = int(mask.sum())
            self.rows.append(
                {
                    "prompt": prompt[seen.bool()].tolist(),
                    "ids": ids[:length].tolist(),
                    "own": own[:length].tolist(),
                    "told": None if told is None else told[row, :length].tolist(),
                }
            )


def calls(rank: int, again: bool) -> Any:
    """In the place of TRL's ``parse_response``, for a model that knows no words."""
    asked = itertools.count()
    stock_parse = grpo_trainer.parse_response

    def parsed(tokenizer: Any, ids: list[int], prefix: list[int], **named: Any) -> dict[str, Any]:
        said: dict[str, Any] = {"role": "assistant", "content": tokenizer.decode(ids)}
        if "<tool_call>" in said["content"]:  # the template, which is checked before the first step
            return stock_parse(tokenizer, ids, prefix=prefix, **named)  # type: ignore[no-any-return]
        first = "<tool_response>" not in tokenizer.decode(prefix)
        half = first and next(asked) % 2 == 1
        if rank == 0 or half or (again and not first):
            arguments_ = {"a": ids[0], "b": len(ids)}
            said["tool_calls"] = [{"type": "function", "function": {"name": "multiply", "arguments": arguments_}}]
        return said

    return parsed


def main(folder: str, out: str, kind: str, whole: str = "") -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    settings = arguments(Path(out), max_steps=2, gradient_accumulation_steps=1, max_completion_length=250)
    settings |= {"max_tool_calling_iterations": 2, "objective": "dr_grpo", "ddp_timeout": 60}
    served = whole.startswith("http")
    rewards: list[Any] = [odd_share]
    with stand_in(model) if kind != "fsdp2" and not served else contextlib.nullcontext() as engine:
        if engine is not None:
            engine.context = 2048
            engine.longest = 8
            settings |= {"use_vllm": True, "vllm_mode": "server", "rollout": {"verify_every": 1}}
        if whole:
            settings["rollout"] = {"turns": {}}
        if served:
            settings |= {"use_vllm": True, "vllm_mode": "server", "vllm_server_base_url": whole}
            settings |= {"per_device_train_batch_size": 2, "vllm_importance_sampling_correction": False}
            rewards.append(fewest_turns)
        trainer = Turns(
            model=model,
            reward_funcs=rewards,
            args=LabConfig(**settings),
            train_dataset=chats(),
            processing_class=tokenizer,
            tools=[multiply],
        )
        rank = trainer.accelerator.process_index
        trainer.kept = []
        grpo_trainer.parse_response = calls(rank, again=kind == "rows")
        trained = Trained(trainer)
        trainer.add_callback(trained)
        trainer.train()
    drawn = {}
    if engine is not None and rank == 0:
        drawn = engine.drawn
    kept = {"turns": trainer.kept, "rows": trained.rows, "drawn": drawn, "history": trainer.state.log_history}
    torch.save(kept, Path(out) / f"rank-{rank}.pt")
    trainer.accelerator.wait_for_everyone()


if __name__ == "__main__":
    as_rank(main)
