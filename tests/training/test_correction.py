"""``correction`` in trainings: completions of a sampler that disagrees, without an engine, weighed in our loss."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, TrainerCallback

from grpo_lab import LabConfig, LabTrainer, register_correction
from grpo_lab.objectives import CORRECTIONS
from grpo_lab.testing import ScriptedRollout
from grpo_lab.trainer.row_table import Carried, loss_mask
from parity.harness import (
    ONE_ROW_IN_A_HUNDRED,
    Run,
    arguments,
    assert_same_movement,
    mixed_reward,
    movement_difference,
    problems,
    train,
)
from parity.sampler import NoisySampler, as_with_vllm

pytestmark = pytest.mark.not_fast
#: bounds that some of the rows of a noisy sampler pass and others do not
TIGHT: dict[str, Any] = {
    "geometric_rejection": {"low": 0.97, "high": 1.03},
    "k3_rejection": {"high": 0.05},
    "icepop": {"low": 0.8, "high": 1.3},
}


class Buffers(TrainerCallback):
    """The generation batch of every optimizer step, as the loss found it."""

    def __init__(self) -> None:
        self.trainer: Any = None
        self.steps: list[list[dict[str, Any]]] = []

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.steps.append([dict(batch) for batch in self.trainer.buffered_micro_batches])


def run(
    folder: Path, model: Path, prepare: Any = None, sampler: bool = True, buffers: Buffers | None = None, **changes: Any
) -> Run:
    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    noisy = NoisySampler(loaded) if sampler else None
    rollout = ScriptedRollout(range(20, 90), (3, 5, 9, 14), truncated_share=0.2, sampler_logps=noisy)
    written = {"objective": "dr_grpo", "learning_rate": 2.0, **changes}
    more: dict[str, Any] = {"callbacks": [buffers]} if buffers else {}

    def prepared(trainer: Any) -> None:
        if buffers:
            buffers.trainer = trainer
        if prepare:
            prepare(trainer)

    return train(
        LabTrainer, LabConfig(**arguments(folder, **written)), model, rollout=rollout, prepare=prepared, **more
    )


@pytest.mark.parametrize("name", sorted(CORRECTIONS))
def test_in_bins_as_in_trls_batches(name: str, tiny_folder: Path, tmp_path: Path) -> None:
    asked = {"correction": {"name": name, **TIGHT.get(name, {})}, "num_iterations": 2, "max_steps": 4}
    bins = run(tmp_path / "bins", tiny_folder, **asked)
    stock = run(tmp_path / "stock", tiny_folder, update="off", **asked)
    assert_same_movement(bins, stock)
    uncorrected = run(tmp_path / "none", tiny_folder, num_iterations=2, max_steps=4)
    assert movement_difference(bins, uncorrected) > ONE_ROW_IN_A_HUNDRED
    for rows in (bins, stock):
        logged = [row for row in rows.history if "loss" in row]
        assert all("sampling/importance_sampling_ratio/mean" in row for row in logged)
        if name in TIGHT:
            shares = [row[f"sampling/kept_share/len_q{q}"] for row in logged for q in range(1, 5) if
                      f"sampling/kept_share/len_q{q}" in row]  # fmt: skip
            assert min(shares) < 1
            assert max(shares) > 0


@pytest.mark.parametrize("name", ["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"])
def test_trls_four_are_trls(name: str, tiny_folder: Path, tmp_path: Path) -> None:
    """By their name, in our loss, as where TRL weighs an engine's completions itself; to the bit."""
    bounds = {"vllm_importance_sampling_clip_max": 1.5}
    ours = run(tmp_path / "ours", tiny_folder, correction={"name": name, "high": 1.5})
    trls = run(tmp_path / "trls", tiny_folder, as_with_vllm, vllm_importance_sampling_mode=name, **bounds)
    named = run(tmp_path / "named", tiny_folder, as_with_vllm, correction=name, **bounds)
    for other in (trls, named):
        assert all(torch.equal(value, other.weights[key]) for key, value in ours.weights.items())


@pytest.mark.parametrize("per", ["token", "sequence"])
@pytest.mark.parametrize("more", [{}, {"update": "off"}, {"num_iterations": 2}], ids=str)
def test_batch_normalised_weighs_the_whole_generation_batch(
    per: str, more: dict[str, Any], tiny_folder: Path, tmp_path: Path
) -> None:
    buffers = Buffers()
    asked = {"correction": {"name": "batch_normalised", "per": per}, "max_steps": 2, **more}
    run(tmp_path, tiny_folder, buffers=buffers, **asked)
    loaded = AutoModelForCausalLM.from_pretrained(tiny_folder, dtype=torch.float32)
    micro_batches = buffers.steps[0]  # before the first update the model is the sampler's, without its noise
    assert len(micro_batches) == 3
    rows = [row for batch in micro_batches for row in steps_of(loaded, batch)]
    found = [row for batch in micro_batches for row in Carried(batch).sampler_weights.tolist()]
    literal = partial(CORRECTIONS["batch_normalised"](per).literal, rows)
    for at, row in enumerate(rows):
        expected = [literal(at, t) for t in range(1 if per == "sequence" else len(row))]
        assert found[at][: len(expected)] == pytest.approx(expected, rel=1e-4)


@torch.no_grad()
def steps_of(model: Any, batch: dict[str, Any]) -> list[list[float]]:
    """x_t of each row, from a forward of the row alone."""
    found = []
    for row, mask in enumerate(loss_mask(batch)):
        prompt = batch["prompt_ids"][row][batch["prompt_mask"][row].bool()]
        completion = batch["completion_ids"][row][mask]
        logps = model(input_ids=torch.cat([prompt, completion])[None]).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        own = logps.gather(1, completion[:, None]).squeeze(1)
        found.append((own - Carried(batch).behaviour_logps[row][mask]).nan_to_num(nan=0.0).tolist())
    return found


def halved(x: Tensor, mask: Tensor) -> Tensor:
    return 0.5 * torch.ones_like(x)


def test_a_correction_of_a_teams_own(tiny_folder: Path, tmp_path: Path) -> None:
    """Half of every weight is half the step."""
    register_correction("halved", halved)
    try:
        half = run(tmp_path / "half", tiny_folder, correction="halved", max_steps=1)
    finally:
        del CORRECTIONS["halved"]
    less = run(tmp_path / "less", tiny_folder, learning_rate=1.0, max_steps=1)
    assert_same_movement(half, less)
    assert half.trainer.algorithm.names["correction"] == "halved"


def test_asked_for_without_log_probs(tiny_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"`correction` is 'icepop', and the completions came without the log-probs"):
        run(tmp_path, tiny_folder, correction="icepop", sampler=False)
    args = LabConfig(**arguments(tmp_path, objective="grpo", correction="tis"))
    with pytest.raises(ValueError, match=r"`correction` is 'tis', and without `use_vllm` transformers' `generate`"):
        LabTrainer(str(tiny_folder), mixed_reward(), args, problems())
