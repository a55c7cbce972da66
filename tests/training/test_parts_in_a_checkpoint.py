"""Function parts that cannot be pickled (lambdas, closures): a real checkpoint, a real resume, and what its record
says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from grpo_lab import LabConfig, LabTrainer
from grpo_lab.testing import ScriptedRollout
from parity.harness import LENGTHS, arguments, mixed_reward, problems

pytestmark = pytest.mark.slow


class SoftClipTrainer(LabTrainer):
    """docs/add_an_algorithm.md, (b)."""

    objective = "dr_grpo"
    surrogate = staticmethod(lambda batch: -batch.advantages * torch.tanh(batch.ratio - 1))


def closure(scale: float) -> Any:
    def part(batch: Any) -> Any:
        return -batch.advantages * scale * batch.ratio

    return part


def build(folder: Path, model: Path, kind: Any = LabTrainer, **settings: Any) -> Any:
    tokenizer = AutoTokenizer.from_pretrained(model)
    return kind(
        AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32),
        mixed_reward(),
        LabConfig(**arguments(folder, max_steps=3, save_strategy="steps", save_steps=2, logging_steps=1), **settings),
        problems(),
        processing_class=tokenizer,
        rollout_func=ScriptedRollout(range(20, 90), LENGTHS, end_id=tokenizer.eos_token_id),
    )


def weights(trainer: Any) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in trainer.model.parameters()])


CASES: dict[str, tuple[Any, dict[str, Any], str]] = {
    "the sample of the page": (SoftClipTrainer, {}, "SoftClipTrainer.<lambda>"),
    "a closure": (LabTrainer, {"objective": {"name": "dr_grpo", "surrogate": closure(2.0)}}, "closure.<locals>.part"),
    "an advantage rule": (
        LabTrainer,
        {"objective": "dr_grpo", "advantage": lambda rewards, _size: rewards - rewards.mean()},
        "<lambda>",
    ),
}


@pytest.mark.parametrize("name", list(CASES))
def test_saved_and_resumed(name: str, tiny_folder: Path, tmp_path: Path) -> None:
    kind, settings, written = CASES[name]
    whole = build(tmp_path / "whole", tiny_folder, kind, **settings)
    whole.train()
    place = tmp_path / "whole" / "checkpoint-2"
    record = torch.load(place / "training_args.bin", weights_only=False)
    assert written in repr([record.objective, record.advantage, record.reward_schedules])
    assert written in repr(whole.args.to_dict())
    again = build(tmp_path / "again", tiny_folder, kind, **settings)
    again.rollout_func.calls = 2
    again.train(resume_from_checkpoint=str(place))
    assert torch.equal(weights(again), weights(whole))
    whole.save_model(str(tmp_path / "model"))
    assert (tmp_path / "model" / "training_args.bin").is_file()


def test_what_can_be_pickled_is_kept(tiny_folder: Path, tmp_path: Path) -> None:
    """A part with an address stays itself, so that the record can be used again."""
    trainer = build(tmp_path, tiny_folder, objective={"name": "dr_grpo", "advantage": best})
    trainer.save_model(str(tmp_path / "model"))
    record = torch.load(tmp_path / "model" / "training_args.bin", weights_only=False)
    assert record.objective["advantage"] is best
    assert trainer.args.objective["advantage"] is best


def best(rewards: torch.Tensor, _size: int) -> torch.Tensor:
    return rewards - rewards.mean()


def test_a_record_without_its_part_says_so(tiny_folder: Path, tmp_path: Path) -> None:
    build(tmp_path, tiny_folder, SoftClipTrainer).save_model(str(tmp_path / "model"))
    record = torch.load(tmp_path / "model" / "training_args.bin", weights_only=False)
    with pytest.raises(ValueError, match=r"`surrogate` is '.*SoftClipTrainer\.<lambda>', and .*\.py has no"):
        record.agree()
