"""A reference that follows the policy, and β that follows the KL: when they move, and the resumed run against the whole
one, to the bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers import AutoModelForCausalLM, TrainerCallback

from grpo_lab import LabConfig
from grpo_lab.trainer.resume.state import REFERENCE, read_state
from grpo_lab.trainer.resume.whole import MARK
from parity.harness import with_entry
from training.test_resume import TWO_ITERATIONS, TWO_STEPS, assert_same, build, history, weights

pytestmark = pytest.mark.slow

IN_LOSS = {"objective": "grpo", "beta": 0.1}
STEERED = {
    "objective": "dr_grpo",
    **TWO_STEPS,
    "kl": {"estimator": "k1", "placement": "reward", "per": "token", "coefficient": 0.2, "target": 0.5, "rate": 1.0},
}


def flat(model: Any) -> Tensor:
    return torch.cat([value.detach().flatten() for value in model.parameters()])


class Seen(TrainerCallback):  # type: ignore[misc]
    """Policy and reference after every step, and the reference's log-probs that the buffer holds."""

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer
        self.policy = [flat(trainer.model)]
        self.reference = [flat(trainer.ref_model)]
        self.log_probs: list[list[Tensor]] = []
        trainer.add_callback(self)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.policy.append(flat(self.trainer.model))
        self.reference.append(flat(self.trainer.ref_model))
        self.log_probs.append([row["ref_per_token_logps"].clone() for row in self.trainer._buffered_inputs])


@pytest.mark.parametrize("every", [2, "2", "generation", None])
def test_when_it_moves_and_that_a_batchs_log_probs_stay(every: Any, tmp_path: Path) -> None:
    trainer = build(
        tmp_path / "run", **IN_LOSS, num_iterations=3, max_steps=6, reference_every=every, save_strategy="no"
    )
    seen = Seen(trainer)
    trainer.train()
    # batches: steps 1–3 and 4–6. The reference after step k is the policy after step:
    of = {2: [0, 0, 2, 2, 4, 4, 6], "generation": [0, 0, 0, 0, 3, 3, 3], None: [0] * 7}[2 if every == "2" else every]
    for step, moved in enumerate(of):
        assert torch.equal(seen.reference[step], seen.policy[moved]), step
    assert len({float(policy.sum()) for policy in seen.policy}) == 7  # the policy moves in every step
    for batch in (seen.log_probs[:3], seen.log_probs[3:]):  # shuffled once a batch, then the same tensors
        for later in batch[1:]:
            assert all(torch.equal(a, b) for a, b in zip(later, batch[0], strict=True))


CASES = {
    "every 3 steps": {**IN_LOSS, **TWO_ITERATIONS, "reference_every": 3},
    "every 3 steps, KL in the reward": {
        "objective": "dr_grpo",
        **TWO_STEPS,
        "reference_every": 3,
        "kl": {"estimator": "k1", "placement": "reward", "coefficient": 0.2},
    },
    "generation": {**IN_LOSS, **TWO_ITERATIONS, "reference_every": "generation"},
    "sync_ref_model": {"beta": 0.1, **TWO_STEPS, "sync_ref_model": True, "ref_model_sync_steps": 2},
    "target": STEERED,
    "target, generation batches that end inside an optimizer step": {**STEERED, "steps_per_generation": 3},
}


@pytest.mark.thorough(
    but=["every 3 steps, KL in the reward", "target, generation batches that end inside an optimizer step"]
)
@pytest.mark.parametrize("name", CASES)
def test_a_resumed_run_is_the_uninterrupted_one(name: str, tmp_path: Path) -> None:
    settings, stop = CASES[name], 3
    whole = build(tmp_path / "whole", **settings)
    whole.train()
    place = tmp_path / "whole" / f"checkpoint-{stop}"
    again = build(tmp_path / "again", **settings)
    again.train(resume_from_checkpoint=str(place))
    assert_same(again, whole)
    assert torch.equal(flat(again.ref_model), flat(whole.ref_model))
    assert again.parts.kl.coefficient == whole.parts.kl.coefficient
    if "target" in name:
        betas = [row["kl/beta"] for row in history(whole) if "kl/beta" in row]
        assert len(set(betas)) == len(betas) >= 3  # it moves with every batch
        with_entry(place, "kl")
    else:
        assert not torch.equal(flat(whole.ref_model), flat(AutoModelForCausalLM.from_pretrained(tmp_path / "start")))
        with_entry(place, "reference")
    lost = build(tmp_path / "lost", **settings)
    lost.train(resume_from_checkpoint=str(place))
    if name != "generation":  # there the next batch moves it before anything reads it
        assert history(lost, stop) != history(whole, stop), "what was saved made no difference"


def test_what_a_checkpoint_holds(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    settings: dict[str, Any] = {**IN_LOSS, **TWO_ITERATIONS, "reference_every": 3, "max_steps": 4}
    trainer = build(tmp_path / "run", **settings)
    trainer.train()
    early, late = (tmp_path / "run" / f"checkpoint-{step}" / REFERENCE for step in (2, 3))
    assert not early.exists()  # it had not moved
    assert [file.name for file in late.iterdir()] == ["00000.safetensors"]
    assert [read_state(file.parent).entries["reference"]["moved"] for file in (early, late)] == [False, True]
    plain = build(tmp_path / "plain", **{**settings, "reference_every": None})
    plain.train(
        resume_from_checkpoint=str(late.parent)
    )  # a run without the setting goes on with the reference that there was
    assert not torch.equal(flat(plain.ref_model), flat(AutoModelForCausalLM.from_pretrained(tmp_path / "start")))
    (late / "00000.safetensors").write_bytes(b"half")
    with pytest.raises(ValueError, match=r"grpo_lab_reference/00000.safetensors is damaged"):
        build(tmp_path / "damaged", **settings).train(resume_from_checkpoint=str(late.parent))
    (late.parent / MARK).unlink()  # as an earlier version leaves it
    with pytest.raises(ValueError, match=r"the reference in .* cannot be loaded"):
        build(tmp_path / "damaged", **settings).train(resume_from_checkpoint=str(late.parent))
    with_entry(late.parent, "reference")
    with caplog.at_level("WARNING", logger="grpo_lab"):
        build(tmp_path / "without", **settings).train(resume_from_checkpoint=str(late.parent))
    assert "does not hold the reference" in caplog.text


def adapted(folder: Path, **changes: Any) -> Any:
    """A model that came with its adapter: TRL keeps a copy of it, ``ref``."""

    def model_of(start: Path) -> Any:
        torch.manual_seed(1)
        config = LoraConfig(task_type="CAUSAL_LM", r=4, init_lora_weights=False)
        return get_peft_model(AutoModelForCausalLM.from_pretrained(start, dtype=torch.float32), config)

    return build(folder, model_of=model_of, **IN_LOSS, **TWO_ITERATIONS, **changes)


def adapter(trainer: Any, name: str) -> Tensor:
    return torch.cat([v.detach().flatten() for key, v in trainer.model.named_parameters() if f".{name}." in key])


@pytest.mark.parametrize("every", [3, None])
def test_an_adapters_copy_moves_and_is_resumed(every: int | None, tmp_path: Path) -> None:
    """Without the setting, too: transformers alone would resume from the adapter that the run began with."""
    whole = adapted(tmp_path / "whole", reference_every=every)
    start = adapter(whole, "ref").clone()
    whole.train()
    assert torch.equal(adapter(whole, "ref"), start) is (every is None)
    again = adapted(tmp_path / "again", reference_every=every)
    again.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-3"))
    assert torch.equal(weights(again), weights(whole))  # of both adapters
    assert history(again) == history(whole)


def test_a_new_adapter_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"`reference_every`.*`peft_config`.*cannot move"):
        build(tmp_path / "run", **IN_LOSS, **TWO_ITERATIONS, reference_every=3, peft_config=LoraConfig(r=4))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"reference_every": 2}, "nothing reads a reference"),
        ({"beta": 0.1, "reference_every": 0}, "`reference_every` is 0"),
        ({"beta": 0.1, "reference_every": True}, "`reference_every` is True"),
        ({"beta": 0.1, "reference_every": "epoch"}, "'generation'"),
        ({"beta": 0.1, "reference_every": 2, "sync_ref_model": True}, "both move the reference"),
        ({"beta": 0.1, "reference_every": "generation"}, "gets 1 updates"),
        ({"beta": 0.1, "reference_every": 1}, "has no effect"),
        (
            {"kl": {"placement": "reward", "coefficient": 0.1}, "reference_every": 3, "num_iterations": 6},
            "always 0",
        ),
    ],
)
def test_the_door(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LabConfig(output_dir="x", use_cpu=True, bf16=False, objective="dr_grpo", **changes)
