"""A run with tools by an engine, with TRL's loop or with ``rollout.turns``; the model knows no words, so its calls are
read from its tokens."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch
from trl.trainer import grpo_trainer

from grpo_lab import LabConfig, LabTrainer
from grpo_lab.testing import tiny_model
from parity.conftest import TOOL_TEMPLATE
from parity.drop_in_cases import chats
from parity.harness import arguments

LONGEST = 200
stock_parse = grpo_trainer.parse_response


def slow_multiply(a: int, b: int) -> int:
    """Multiplies two whole numbers, in a while.

    Args:
        a: first factor
        b: second factor

    Returns:
        The product.
    """
    time.sleep((a + b) % 7 / 50)
    return a * b


def parsed(tokenizer: Any, ids: list[int], prefix: list[int], **named: Any) -> dict[str, Any]:
    """In the place of TRL's ``parse_response``: two of three turns call the tool."""
    text = tokenizer.decode(ids)
    if "<tool_call>" in text:  # the template, which is checked before the first step
        return stock_parse(tokenizer, ids, prefix=prefix, **named)  # type: ignore[no-any-return]
    said: dict[str, Any] = {"role": "assistant", "content": text}
    if sum(ids) % 3:
        function = {"name": "slow_multiply", "arguments": {"a": ids[0], "b": len(ids)}}
        said["tool_calls"] = [{"type": "function", "function": function}]
    return said


class Kept(LabTrainer):
    """Keeps what each generation handed over, and the columns that rewards got."""

    def __init__(self, *args: Any, **named: Any) -> None:
        self.rows: list[dict[str, Any]] = []
        super().__init__(*args, **named)

    def _generate(self, prompts: list[Any]) -> Any:
        made = super()._generate(prompts)
        prompt, ids, mask, messages, logprobs, *_ = made
        if logprobs is None:  # without an engine
            logprobs = [None] * len(ids)
        names = ("prompt", "ids", "mask", "messages", "logprobs")
        rows = zip(prompt, ids, mask, messages, logprobs, strict=True)
        self.rows += [dict(zip(names, row, strict=True)) for row in rows]
        return made


def odd_share(completion_ids: list[list[int]], **columns: Any) -> list[float]:
    return [sum(token % 2 for token in ids) / len(ids) for ids in completion_ids]


def saved_model(folder: Path, **changes: Any) -> Path:
    """A tiny model with heads of 32, the smallest that vLLM's CPU kernels have; part of its vocabulary ends a turn."""
    sizes = {"hidden_size": 64, "num_heads": 2, "num_layers": 2, "max_positions": 2048, "initializer_range": 0.2}
    model, tokenizer = tiny_model("qwen2", **{**sizes, **changes})
    model.generation_config.eos_token_id = [tokenizer.eos_token_id, *range(100, 200)]
    tokenizer.chat_template = TOOL_TEMPLATE
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def build(model: Path, out: Path, turns: Any, rollout: dict[str, Any], **changes: Any) -> Kept:
    settings = arguments(out, max_steps=2, gradient_accumulation_steps=1, max_completion_length=LONGEST)
    # No baseline: rows of a group are the same where draws are greedy, and would move nothing with one.
    objective = {"name": "reinforce", "advantage": "raw"}
    settings |= {"per_device_train_batch_size": 8, "objective": objective, "use_vllm": True, "top_k": 1}
    settings |= {"learning_rate": 1e-2, "vllm_importance_sampling_correction": False, **changes}
    peft_config = settings.pop("peft_config", None)
    settings["rollout"] = dict(rollout)
    if settings["use_vllm"]:
        settings["rollout"]["verify_every"] = 1
    if turns is not None:
        settings["rollout"]["turns"] = turns
    return Kept(str(model), odd_share, LabConfig(**settings), chats(), tools=[slow_multiply], peft_config=peft_config)


def same_rows(ours: list[dict[str, Any]], stock: list[dict[str, Any]]) -> None:
    """The same trajectories, row by row; log-probs within rounding, and NaN where a tool spoke."""
    assert len(ours) == len(stock)
    for one, other in zip(ours, stock, strict=True):
        for name in ("prompt", "ids", "mask", "messages"):
            assert one[name] == other[name]
        own = torch.tensor(one["mask"]).bool()
        told = torch.tensor(one["logprobs"])
        assert bool(told[~own].isnan().all())
        assert torch.allclose(told[own], torch.tensor(other["logprobs"])[own], atol=1e-5)


THINKING = 4
STOP_THINKING = "So:</think>"


def cut_turns(trainer: Kept) -> list[int]:
    """Return the index of each turn whose thinking was ended at `THINKING` tokens, in the last batch. What was inserted
    there carries no loss and has no log-prob; all else of a turn is the policy's."""
    stop = trainer.processing_class(STOP_THINKING, add_special_tokens=False)["input_ids"]
    made = trainer.parts.trajectories.made
    found = []
    for row, one in zip(trainer.rows[-len(made) :], made, strict=True):
        own = [0] * len(row["ids"])
        for index, turn in enumerate(one.turns):
            own[turn.first : turn.end] = [1] * (turn.end - turn.first)
            begin = turn.first + THINKING
            if row["ids"][begin : begin + len(stop)] == stop:
                own[begin : begin + len(stop)] = [0] * len(stop)
                found.append(index)
            else:  # it ended within its budget
                assert turn.end - turn.first <= THINKING
        assert row["mask"] == own
    return found
