"""A model whose learned positions are exactly as many as prompt + completion: stock trains, so bins must."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel
from trl import GRPOConfig, GRPOTrainer

from grpo_lab import LabConfig, LabTrainer
from grpo_lab.testing import tiny_model
from grpo_lab.trainer.row_table import RowTable
from parity.harness import Run, arguments, movement_difference, problems, train
from tolerance import movement_gap

LONGEST_COMPLETION = 30


def weights_and_movement(run: Run) -> tuple[float, float]:
    """‖w‖ and ‖Δw‖."""
    moved = sum((run.weights[n].double() - run.start[n].double()).square().sum().item() for n in run.weights)
    return sum(value.double().square().sum().item() for value in run.weights.values()) ** 0.5, moved**0.5


def saved_gpt2(folder: Path, positions: int) -> Path:
    _, tokenizer = tiny_model("qwen2")
    ends = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id, "bos_token_id": None}
    sizes = {"vocab_size": len(tokenizer), "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": positions}
    still = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "initializer_range": 0.2}
    GPT2LMHeadModel(GPT2Config(**sizes, **still, **ends)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.not_fast
@pytest.mark.parametrize("changes", [{}, {"steps_per_generation": 6}], ids=["training forward", "old log-probs"])
def test_prompt_and_completion_fill_the_context(tmp_path: Path, changes: dict[str, Any]) -> None:
    _, tokenizer = tiny_model("qwen2")
    longest = max(len(tokenizer(row["prompt"])["input_ids"]) for row in problems())
    folder = saved_gpt2(tmp_path / "gpt2", longest + LONGEST_COMPLETION)
    settings = arguments(tmp_path, max_completion_length=LONGEST_COMPLETION, learning_rate=0.1, max_steps=4, **changes)
    rows = {"update": {"share_prompts": "off"}}  # a row of a group's prompt and completions has no padding
    ours = train(LabTrainer, LabConfig(**settings, objective="dr_grpo", **rows), folder)
    packed = train(LabTrainer, LabConfig(**settings, objective="dr_grpo"), folder)
    stock = train(GRPOTrainer, GRPOConfig(**settings, loss_type="dr_grpo", scale_rewards="none"), folder)
    weights, moved = weights_and_movement(stock)
    for run in (ours, packed):
        assert movement_difference(run, stock) <= movement_gap(torch.float32, weights, moved, steps=4)
    assert max(row["update/padding_share"] for row in ours.history if "loss" in row) > 0


def test_only_padding_is_held_back() -> None:
    """A row of 1 + 1 tokens at place 4 beside one of 3 + 4: its padding would reach place 10 of 7; real tokens keep
    theirs."""
    long = {"prompt_ids": [[0, 0, 5, 6, 7], [0, 0, 0, 0, 8]], "prompt_mask": [[0, 0, 1, 1, 1], [0, 0, 0, 0, 1]]}
    completions = {"completion_ids": [[1, 2, 3, 4], [9, 0, 0, 0]], "completion_mask": [[1] * 4, [1, 0, 0, 0]]}
    table = RowTable.of([{name: torch.tensor(value) for name, value in {**long, **completions}.items()}])
    assert table.bin([0, 1]).position_ids.tolist() == [[2, 3, 4, 5, 6, 7, 8], [4, 5, 6, 7, 8, 9, 10]]
    assert table.bin([0, 1], 9).position_ids.tolist() == [[2, 3, 4, 5, 6, 7, 8], [4, 5, 6, 7, 8, 8, 8]]
    assert table.bin([0], 5).position_ids.tolist() == [[2, 3, 4, 5, 6, 7, 8]], (
        "rotary models may run past what their config says"
    )
