"""bfloat16 (CPU autocast, float32 weights), stock beside ours: while the policy has not moved the ratio is exactly 1,
and bins add no more error than bfloat16 has anyway.

The yardstick is stock's own rounding: the distance of its bfloat16 run from its float32 run. Ours is another draw of
rounding errors of that size, thousands of weights wide, so its distance from stock's float32 run is the same within a
factor of two. Weights and inputs are rounded alike in both, only sums run in another order, so the two bfloat16 runs
are closer to each other than either is to float32.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from trl import GRPOConfig, GRPOTrainer

from grpo_lab import LabConfig, LabTrainer
from grpo_lab.trainer.row_table import Carried
from grpo_lab.trainer.step import exact_update, micro_batch
from parity.harness import STOCK, Run, arguments, by_name, movement_difference, train

#: GSPO's own clip: a ratio that is off by what bfloat16 rounds is cut off
NARROW = {"epsilon": 3e-4, "epsilon_high": 4e-4}
#: how a generation batch outlives an optimizer step
LIVES = {
    "passes": {"num_iterations": 2, "max_steps": 4},
    "steps": {"steps_per_generation": 6, "max_steps": 4},
    "both": {"steps_per_generation": 6, "num_iterations": 2, "max_steps": 4},
}


def config(kind: Any, folder: Path, name: str, bf16: bool = True, **changes: Any) -> Any:
    settings = by_name(name) if kind is LabConfig else STOCK[name]
    return kind(**{**arguments(folder, bf16=bf16), **settings, **changes})


def spied(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Largest |log ratio| of each bin from here on."""
    seen: list[float] = []
    record = exact_update.record_tokens

    def spy(trainer: Any, book: Any, batch: Any, *rest: Any) -> None:
        seen.append(batch.log_ratio.masked_fill(~batch.mask, 0.0).abs().max().item())
        record(trainer, book, batch, *rest)

    monkeypatch.setattr(exact_update, "record_tokens", spy)
    monkeypatch.setattr(micro_batch, "record_tokens", spy)
    return seen


@pytest.mark.not_fast
@pytest.mark.parametrize("lives", LIVES)
def test_a_policy_that_does_not_move_has_ratio_one(
    lives: str, tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Learning rate 0: old log-probs and the loss's are of one policy, and of one shape, so they are the same bits."""
    seen = spied(monkeypatch)
    train(LabTrainer, config(LabConfig, tmp_path, "gspo", learning_rate=0.0, **NARROW, **LIVES[lives]), tiny_folder)
    assert len(seen) >= 4
    assert max(seen) == 0.0


@pytest.mark.not_fast
@pytest.mark.parametrize("lives", LIVES)
def test_a_resampled_batch_in_trls_own_batches_likewise(
    lives: str, tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of several rounds stand in other widths than those in which TRL made their log-probs."""
    seen = spied(monkeypatch)
    changes = {"learning_rate": 0.0, "update": {"dead_groups": "resample"}, **LIVES[lives]}
    run = train(LabTrainer, config(LabConfig, tmp_path, "bnpo", **changes), tiny_folder)
    assert sum(row.get("update/resampled_share", 0.0) for row in run.history) > 0
    assert len(seen) == 12
    assert max(seen) == 0.0


@pytest.mark.not_fast
def test_without_an_update_since_generation_shapes_do_not_matter(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step over rows of two generation batches (3 micro-batches a step, 2 a generation): those just generated have
    ratio 1."""
    seen: list[torch.Tensor] = []
    record = exact_update.record_tokens

    def spy(trainer: Any, book: Any, batch: Any, *rest: Any) -> None:
        off = batch.log_ratio.masked_fill(~batch.mask, 0.0).abs().amax(1)
        unmoved = Carried(batch.extras).unmoved
        seen.append(off if unmoved is None else off[unmoved.bool()])
        record(trainer, book, batch, *rest)

    monkeypatch.setattr(exact_update, "record_tokens", spy)
    changes = {"steps_per_generation": 2, "max_steps": 4, "learning_rate": 0.05}
    train(LabTrainer, config(LabConfig, tmp_path, "dr_grpo", **changes), tiny_folder)
    assert sum(part.numel() for part in seen) > 20
    assert torch.cat(seen).max() == 0.0


_stock: dict[tuple[str, bool], Run] = {}


def stock(folder: Path, model: Path, name: str, bf16: bool) -> Run:
    if (name, bf16) not in _stock:
        _stock[name, bf16] = train(GRPOTrainer, config(GRPOConfig, folder, name, bf16, **MOVES), model)
        _stock[name, bf16].trainer = None
    return _stock[name, bf16]


#: no ratio comes near a clip of 0.2 (a row that one draw of rounding cuts and another does not would be another
#: objective's noise)
MOVES = {"num_iterations": 2, "max_steps": 4, "learning_rate": 1e-4}


@pytest.mark.not_fast
@pytest.mark.parametrize("name", [n if n == "gspo" else pytest.param(n, marks=pytest.mark.slow) for n in STOCK])
def test_preset_beside_stock(name: str, tiny_folder: Path, tmp_path: Path) -> None:
    exact, theirs = (stock(tmp_path, tiny_folder, name, bf16) for bf16 in (False, True))
    ours = train(LabTrainer, config(LabConfig, tmp_path, name, **MOVES), tiny_folder)
    rounding = movement_difference(theirs, exact)
    ours_off, apart = movement_difference(ours, exact), movement_difference(ours, theirs)
    print(f"{name}: stock's rounding {rounding:.1e}, ours {ours_off:.1e}, apart {apart:.1e}")
    assert 1e-4 < rounding < 0.1, "bfloat16 was not in use, or its rounding is no yardstick"
    assert ours_off <= 2 * rounding
    assert apart <= rounding
