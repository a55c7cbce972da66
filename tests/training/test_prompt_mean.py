"""``aggregation: prompt_mean`` in a training: the gradient of a loop over prompts, however the step is cut."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from grpo_lab import LabConfig, LabTrainer
from parity.harness import LENGTHS, Kept, Run, arguments, mixed_reward, movement_bound, movement_difference, train

POINT = {"name": "dr_grpo", "aggregation": "prompt_mean"}
GROUP, LR = 4, 0.5
CUTS: dict[str, dict[str, Any]] = {
    "exact": {},
    "off": {"update": "off"},
    "one micro-batch": {"per_device_train_batch_size": 12, "gradient_accumulation_steps": 1},
    "six micro-batches": {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 6, "update": "off"},
    "small bins": {"update": {"max_tokens": 40}},
}


def trained(tiny: Path, out: Path, **changes: Any) -> tuple[Run, Kept]:
    tokenizer = AutoTokenizer.from_pretrained(tiny)
    rollout = Kept(range(20, 90), LENGTHS, end_id=tokenizer.eos_token_id, truncated_share=0.3)
    settings = {"max_steps": 1, "mask_truncated_completions": True, **changes}
    config = LabConfig(**arguments(out, **settings), objective=POINT)
    return train(LabTrainer, config, tiny, rollout=rollout, reward=mixed_reward(0)), rollout


def by_hand(tiny: Path, rollout: Kept, end: int) -> dict[str, torch.Tensor]:
    """One step of SGD on 1/3 Σ_prompts Σ −Â·log π / (loss tokens of the prompt), each row by itself."""
    model = AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32)
    ((prompts, completions),) = rollout.batches  # type: ignore[attr-defined]
    loss = torch.zeros(())
    for start in range(0, 12, GROUP):
        rows = range(start, start + GROUP)
        rewards = torch.tensor([(sum(completions[row]) % 5) / 4.0 for row in rows])
        whole = [row for row in rows if completions[row][-1] == end]  # a truncated one is masked
        tokens = sum(len(completions[row]) for row in whole)
        for row in whole:
            ids = torch.tensor([*prompts[row], *completions[row]])
            logps = model(ids[None]).logits[0, :-1].log_softmax(-1).gather(1, ids[1:, None])[-len(completions[row]) :]
            loss = loss - (rewards[row - start] - rewards.mean()) * logps.sum() / tokens / 3
    loss.backward()
    torch.optim.SGD(model.parameters(), LR).step()
    return dict(model.state_dict())


@pytest.mark.not_fast
@pytest.mark.parametrize("cut", CUTS)
def test_the_step_is_the_loops(cut: str, tiny_folder: Path, tmp_path: Path) -> None:
    run, rollout = trained(tiny_folder, tmp_path, **CUTS[cut])
    end = AutoTokenizer.from_pretrained(tiny_folder).eos_token_id
    other = Run([], [], by_hand(tiny_folder, rollout, end), run.start, [{"step": 1}], None)
    assert movement_difference(run, other) <= movement_bound(other)


@pytest.mark.not_fast
def test_two_steps_a_generation_and_two_passes(tiny_folder: Path, tmp_path: Path) -> None:
    """A step holds a part of some prompts; in bins and as TRL cuts it, the weights are the same."""
    shape = {"steps_per_generation": 6, "num_iterations": 2, "max_steps": 4, "epsilon": 1e-4}
    off = trained(tiny_folder, tmp_path / "off", update="off", **shape)[0]
    for update in ("exact", {"silent_rows": "skip"}):
        exact = trained(tiny_folder, tmp_path / str(update), update=update, **shape)[0]
        assert exact.losses == pytest.approx(off.losses, rel=1e-4, abs=1e-6)
        assert movement_difference(exact, off) <= movement_bound(off)
    assert max(row["update/silent_share"] for row in exact.history if "loss" in row) > 0
