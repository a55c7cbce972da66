"""``update.silent_rows``: leaving out rows without a gradient gives the weights and the metrics of keeping them; parts
that choose tokens give stock's."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM
from trl import GRPOConfig, GRPOTrainer

from golden.in_double import everything_in_double
from grpo_lab import LabConfig, LabTrainer
from grpo_lab.batch import TokenBatch
from grpo_lab.objectives import Clipped
from grpo_lab.testing import ScriptedRollout
from grpo_lab.trainer.step import exact_update, silent
from parity.harness import Run, arguments, assert_same_movement, movement_difference, train
from parity.sampler import NoisySampler, as_with_vllm
from parity.test_exact_update import lora

#: name → settings with stale rows, of which some have no gradient
STALE: dict[str, dict[str, Any]] = {
    "token clip": {"objective": "dapo", "num_iterations": 2, "epsilon": 1e-4, "epsilon_high": 1e-4},
    "four passes": {"objective": "dr_grpo", "num_iterations": 4, "epsilon": 1e-3},
    "batch outlives a step": {"objective": "grpo", "steps_per_generation": 6, "epsilon": 1e-4},
    "sequence clip": {"objective": "gspo", "num_iterations": 2, "epsilon": 1e-4, "epsilon_high": 1e-4},
    "product": {"objective": {"name": "dr_grpo", "ratio": "product"}, "num_iterations": 2, "epsilon": 0.01},
    "drop-in": {"loss_type": "grpo", "importance_sampling_level": "sequence", "num_iterations": 2, "epsilon": 1e-4},
    "prompts once": {
        "objective": "gspo", "num_iterations": 2, "epsilon": 1e-4, "update": {"share_prompts": "on"},
    },
    "small bins": {"objective": "gspo", "num_iterations": 2, "epsilon": 1e-4, "update": {"max_tokens": 24}},
}  # fmt: skip
SHORT = (1, 2, 3, 4, 6, 14)
REJECTS = {"vllm_importance_sampling_mode": "sequence_mask", "vllm_importance_sampling_clip_max": 1.5}


@dataclass(frozen=True)
class Gated(Clipped):
    """A team's: no row whose first token has a log-prob below −6 nats."""

    def __call__(self, batch: TokenBatch) -> Tensor:
        return super().__call__(batch) * (batch.logps[:, :1].detach() > -6)


@dataclass(frozen=True)
class TopEntropy(Clipped):
    """As TRL's ``top_entropy_quantile: 0.3``, one part of the loss that chooses tokens."""

    selection: ClassVar[str] = "top"

    def __call__(self, batch: TokenBatch) -> Tensor:
        return super().__call__(batch) * batch.chosen["top"]

    def select(self, batch: TokenBatch, gather: Any) -> Tensor:
        assert batch.entropies is not None
        every = gather(batch.entropies[batch.mask].float())
        return (batch.entropies >= torch.quantile(every, 0.7)) & batch.mask


def run_with(
    folder: Path, tiny: Path, how: str | None, changes: dict[str, Any], sampler: float | None = None, **options: Any
) -> Run:
    """A training with ``silent_rows``: ``how`` (None: stock TRL); ``sampler``: noise of an engine's log-probs."""
    changes = {"max_steps": 4, **changes}
    rollout = ScriptedRollout(range(20, 90), SHORT, end_id=0, truncated_share=0.2)
    if sampler is not None:
        rollout.sampler_logps = NoisySampler(AutoModelForCausalLM.from_pretrained(tiny), sampler)
        options["prepare"] = as_with_vllm
    if how is None:
        return train(GRPOTrainer, GRPOConfig(**arguments(folder, **changes)), tiny, rollout=rollout, **options)
    if changes.get("update") != "off":
        changes["update"] = {"silent_rows": how, **changes.get("update", {})}
    return train(LabTrainer, LabConfig(**arguments(folder, **changes)), tiny, rollout=rollout, **options)


def logged(run: Run, name: str) -> list[float]:
    return [row[name] for row in run.history if name in row]


def check_alike(skip: Run, keep: Run, bound: float = 1e-6, unseen: tuple[str, ...] = ()) -> None:
    """Weights and every logged metric, the loss with them; and rows were left out indeed."""
    assert movement_difference(skip, keep) <= bound
    assert max(logged(keep, "update/silent_share")) > 0
    assert sum(logged(skip, "update/live_share")) < sum(logged(keep, "update/live_share"))
    counted = (*unseen, "update/live", "update/padding", "update/computed", "update/tokens", "step_time", "train_")
    for ours, expected in zip(skip.history, keep.history, strict=True):
        for name, value in expected.items():
            if not name.startswith(counted):
                assert ours[name] == pytest.approx(value, rel=2e-5, abs=1e-6, nan_ok=True), name


@pytest.mark.not_fast
@pytest.mark.parametrize("case", STALE, ids=str)
def test_silent_rows_are_left_out(case: str, tiny_folder: Path, tmp_path: Path) -> None:
    skip, keep = (run_with(tmp_path, tiny_folder, how, STALE[case]) for how in ("skip", "keep"))
    check_alike(skip, keep)
    assert len(logged(skip, "update/tokens_looked")) == 4


TWICE = {**REJECTS, "num_iterations": 2}
IN_DOUBLE: dict[str, dict[str, Any]] = {
    "sequence clip": STALE["sequence clip"],
    "gate": {"objective": {"name": "dapo", "surrogate": Gated()}},
    "rejecting correction": {"objective": "dapo", **REJECTS},
    "rejected before a forward": {"objective": "dapo", **TWICE},
    "drop-in": {"loss_type": "dapo", **TWICE},
}


@pytest.mark.not_fast
@pytest.mark.parametrize("case", IN_DOUBLE, ids=str)
def test_whatever_silences_them(case: str, tiny_folder: Path, tmp_path: Path) -> None:
    """In float64, where only the rounding of 53 bits is left."""
    options: dict[str, Any] = {
        "dtype": torch.float64,
        "sampler": 0.15 if "vllm_importance_sampling_mode" in IN_DOUBLE[case] else None,
    }
    with everything_in_double():
        skip, keep = (run_with(tmp_path, tiny_folder, how, IN_DOUBLE[case], **options) for how in ("skip", "keep"))
    before = case == "rejected before a forward"  # then they are in no mean over computed rows
    check_alike(skip, keep, bound=1e-12, unseen=("clip_ratio", "entropy") if before else ())
    looked = logged(skip, "update/tokens_looked")
    if before:
        assert looked[1] != looked[0]  # passes one and two over the same rows, in other bins


@pytest.mark.not_fast
def test_of_an_adapter(tiny_folder: Path, tmp_path: Path) -> None:
    runs = []
    for how in ("skip", "keep"):
        torch.manual_seed(0)
        runs.append(run_with(tmp_path, tiny_folder, how, STALE["sequence clip"], peft_config=lora()))
    check_alike(*runs)


@pytest.mark.not_fast
def test_the_second_forward_may_round_otherwise(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hundred times the clip: its values would put most tokens on the other side. They are the look's."""
    keep = run_with(tmp_path, tiny_folder, "keep", STALE["token clip"])
    made = exact_update.of_completions
    monkeypatch.setattr(exact_update, "of_completions", lambda values, rows: made(values, rows) + 0.01)
    check_alike(run_with(tmp_path, tiny_folder, "skip", STALE["token clip"]), keep)


@pytest.mark.not_fast
def test_a_bin_that_turns_out_silent_needs_no_backward(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(silent, "BEGIN", 2.0)  # no look
    backward, done = exact_update.backward, [0]

    def counted(accelerator: Any, loss: Tensor) -> None:
        done[0] += 1
        backward(accelerator, loss)

    monkeypatch.setattr(exact_update, "backward", counted)
    changes = {**STALE["sequence clip"], "update": {"max_tokens": 8, "share_prompts": "off"}}
    keep = run_with(tmp_path, tiny_folder, "keep", changes)
    all_bins, done[0] = done[0], 0
    auto = run_with(tmp_path, tiny_folder, "auto", changes)
    assert done[0] < all_bins
    assert movement_difference(auto, keep) == 0.0


@pytest.mark.not_fast
def test_auto_looks_where_it_paid_and_goes_on_so(
    tiny_folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Steps 2, 4, … are second passes. What step 2 shows is used from step 4 on; a run resumed inside that generation
    batch does the same."""
    changes = {**STALE["sequence clip"], "max_steps": 6, "save_strategy": "steps", "save_steps": 3}
    caplog.set_level(logging.INFO)
    auto = run_with(tmp_path / "whole", tiny_folder, "auto", changes)
    assert [row["step"] for row in auto.history if "update/tokens_looked" in row] == [4, 6]
    assert sum("update.silent_rows: auto" in record.getMessage() for record in caplog.records) == 1
    keep = run_with(tmp_path / "keep", tiny_folder, "keep", changes)
    assert movement_difference(auto, keep) <= 1e-6

    def go_on(trainer: Any) -> None:
        trainer.rollout_func.calls = 2
        start = trainer.train
        trainer.train = lambda: start(str(tmp_path / "whole" / "checkpoint-3"))

    resumed = run_with(tmp_path / "resumed", tiny_folder, "auto", changes, prepare=go_on)
    assert [row["step"] for row in resumed.history if "update/tokens_looked" in row] == [4, 6]
    assert movement_difference(resumed, auto) == 0.0


@pytest.mark.not_fast
@pytest.mark.parametrize("update", [{}, "off", {"max_tokens": 24}], ids=["bins", "off", "small bins"])
@pytest.mark.parametrize("passes", [1, 2])
def test_a_part_that_chooses_tokens_is_stocks(update: Any, passes: int, tiny_folder: Path, tmp_path: Path) -> None:
    changes = {"num_iterations": passes, "learning_rate": 0.1}
    stock = {"top_entropy_quantile": 0.3, "loss_type": "dapo"}
    ours = {"objective": {"name": "dapo", "surrogate": TopEntropy()}, "update": update}
    expected = run_with(tmp_path, tiny_folder, None, {**changes, **stock})
    found = run_with(tmp_path, tiny_folder, "auto", {**changes, **ours})
    assert_same_movement(found, expected)
    assert found.losses == pytest.approx(expected.losses, rel=1e-4, abs=1e-5)
    told = found.trainer.exact_update.described()
    assert told["batches"] == ("as TRL" if update == "off" else "bins")
    if update != "off":
        assert max(logged(found, "update/live_share")) < 1.0
