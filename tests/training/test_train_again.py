"""A second `train()` on the same trainer, as in a notebook: nothing that was left half done goes into it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback, set_seed
from trl import GRPOConfig, GRPOTrainer

from grpo_lab import LabConfig, LabTrainer
from parity.harness import arguments, problems

#: generations of two micro-batches, steps of four: a failing reward leaves half a step behind
WINDOW = {"gradient_accumulation_steps": 4, "steps_per_generation": 2, "max_steps": 2}
#: steps of two micro-batches, generations of four
REUSED = {"gradient_accumulation_steps": 2, "steps_per_generation": 4, "max_steps": 3}


class Fails:
    """Fails in its ``at``-th call, once."""

    __name__ = "fails"

    def __init__(self, at: int = 0) -> None:
        self.calls, self.at = 0, at

    def __call__(self, completion_ids: list[list[int]], log_metric: Any = None, **_: Any) -> list[float]:
        self.calls += 1
        log_metric("seen", float(self.calls))
        if self.calls == self.at:
            raise RuntimeError("the judge is down")
        return [(sum(ids) % 7) / 7 for ids in completion_ids]


class Interrupts(TrainerCallback):  # type: ignore[misc]
    """Ctrl-C after the first micro-batch of step ``at``, once."""

    def __init__(self, at: int) -> None:
        self.at: int | None = at

    def on_substep_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == self.at:
            self.at = None
            raise KeyboardInterrupt


def by_its_prompt(prompts: list[Any], trainer: Any) -> dict[str, Any]:
    """Completions that depend on the prompt and the row only, so that two trainings see the same ones."""
    ids = [[20 + (sum(map(ord, text)) * 7 + row * 13) % 60, 30 + row % 5, 40] for row, text in enumerate(prompts)]
    return {"prompt_ids": trainer._tokenize_prompts(prompts)[0], "completion_ids": ids, "logprobs": None}


def build(model: Path, folder: Path, kind: Any = LabTrainer, reward: Any = None, **changes: Any) -> Any:
    config = GRPOConfig if kind is GRPOTrainer else LabConfig
    return kind(
        AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32),
        reward or Fails(),
        config(**arguments(folder, **changes)),
        problems(16),
        processing_class=AutoTokenizer.from_pretrained(model),
        rollout_func=by_its_prompt,
    )


def weights(trainer: Any) -> Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in trainer.model.parameters()])


def trained(trainer: Any) -> tuple[Tensor, list[dict[str, Any]]]:
    set_seed(7)
    trainer.train()
    untimed = [
        {name: value for name, value in row.items() if name != "step_time"}
        for row in trainer.state.log_history
        if "loss" in row
    ]
    return weights(trainer), untimed


@pytest.mark.not_fast
@pytest.mark.parametrize("objective", [None, "dapo"])
def test_after_an_error_in_a_reward(objective: str | None, tiny_folder: Path, tmp_path: Path) -> None:
    trainer = build(tiny_folder, tmp_path, reward=Fails(at=2), objective=objective, **WINDOW)
    start = weights(trainer)
    with pytest.raises(RuntimeError, match="the judge is down"):
        trainer.train()
    assert torch.equal(weights(trainer), start)
    trainer.reward_funcs[0].calls = 0
    trainer.reward_funcs[0].at = 0
    fresh = build(tiny_folder, tmp_path, objective=objective, **WINDOW)
    expected = trained(fresh)
    found = trained(trainer)
    assert torch.equal(found[0], expected[0])
    assert found[1] == expected[1]
    assert not torch.equal(expected[0], start)


@pytest.mark.not_fast
def test_after_a_training_that_ended_inside_a_batch_as_stock(tiny_folder: Path, tmp_path: Path) -> None:
    """With `objective` unset a second training goes on as TRL's does: with the rest of the open batch."""
    ours, stock = (
        build(tiny_folder, tmp_path, kind, **({"update": "off"} if kind is LabTrainer else {}), **REUSED)
        for kind in (LabTrainer, GRPOTrainer)
    )
    for trainer in (ours, stock):
        trained(trainer)
        assert trainer._step == 6
        trained(trainer)
        assert trainer._step == 12
    assert torch.allclose(weights(ours), weights(stock), rtol=1e-5, atol=1e-6)


@pytest.mark.not_fast
@pytest.mark.parametrize(
    ("objective", "interrupted"), [(None, True), ("dapo", True), ("dapo", False)], ids=["drop-in", "ours", "ended"]
)
def test_the_rest_of_a_batch_is_of_the_training_before(
    objective: str | None, interrupted: bool, tiny_folder: Path, tmp_path: Path
) -> None:
    """Broken off by Ctrl-C in step 2, which was begun on the second half of the batch; or at its end."""
    trainer = build(tiny_folder, tmp_path, objective=objective, **REUSED)
    if interrupted:
        trainer.add_callback(Interrupts(at=1))
        with pytest.raises(KeyboardInterrupt):
            trainer.train()
    else:
        trained(trainer)
    fresh = build(tiny_folder, tmp_path, objective=objective, **REUSED)
    fresh.model.load_state_dict(trainer.model.state_dict())
    fresh.reward_funcs[0].calls = trainer.reward_funcs[0].calls
    found, expected = trained(trainer), trained(fresh)
    assert torch.equal(found[0], expected[0])
    assert found[1] == expected[1]
