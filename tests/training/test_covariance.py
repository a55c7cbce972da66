"""``clip_cov`` and ``kl_cov`` in a training of two passes: in bins as in TRL's batches, with the tokens that a plain
loop over the micro-batch finds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from grpo_lab import LabConfig, LabTrainer
from grpo_lab.batch import TokenBatch
from grpo_lab.objectives import ClipCov, KLCov
from parity.harness import Run, arguments, mixed_reward, movement_bound, movement_difference, train

#: shares of so few tokens that something is chosen in every micro-batch
POINTS: dict[str, dict[str, Any]] = {
    "kl_cov": {"share": 0.1, "coefficient": 0.5},
    "clip_cov": {"share": 0.1, "cov_low": 0.05, "cov_high": 50.0},
}
CUTS: dict[str, dict[str, Any]] = {"small bins": {"update": {"max_tokens": 40}}, "exact": {}, "off": {"update": "off"}}


def trained(name: str, tiny: Path, out: Path, **changes: Any) -> Run:
    settings = {"num_iterations": 2, "max_steps": 4, "learning_rate": 0.1, **changes}
    config = LabConfig(**arguments(out, **settings), objective={"name": name, **POINTS[name]})
    return train(LabTrainer, config, tiny, reward=mixed_reward())


@pytest.mark.not_fast
@pytest.mark.parametrize("name", POINTS)
def test_bins_are_trls_batches(name: str, tiny_folder: Path, tmp_path: Path, monkeypatch: Any) -> None:
    seen: list[tuple[TokenBatch, Tensor]] = []
    part = KLCov if name == "kl_cov" else ClipCov
    select = part.select

    def kept(self: Any, batch: TokenBatch, gather: Any) -> Tensor:
        found = select(self, batch, gather)
        if batch.mask.size(0) == 4 and batch.token_ids is not None:  # no toy
            seen.append((batch, found))
        return found

    monkeypatch.setattr(part, "select", kept)
    runs = {cut: trained(name, tiny_folder, tmp_path / cut, **CUTS[cut]) for cut in CUTS}
    for run in runs.values():
        assert movement_difference(run, runs["off"]) <= movement_bound(runs["off"])
    assert len(seen) == 3 * 4 * 3  # micro-batches of a step, steps, runs
    assert sum(found.sum().item() for _, found in seen) > 36
    for batch, found in seen:
        assert torch.equal(found, by_hand(name, batch, found))


def by_hand(name: str, batch: TokenBatch, found: Tensor) -> Tensor:
    """KL-Cov's tokens; of Clip-Cov's, which are drawn, those found that may be: as many as can be."""
    logps, mask = batch.logps.detach().double(), batch.mask
    advantages = batch.advantages.expand_as(mask).double()
    covariances = (advantages - advantages[mask].mean()) * (logps - logps[mask].mean())
    count = max(1, int(0.1 * mask.sum()))
    if name == "kl_cov":
        order = covariances[mask].argsort(descending=True)
        chosen = torch.zeros_like(covariances[mask], dtype=torch.bool)
        chosen[order[:count]] = True
        return torch.zeros_like(mask).masked_scatter(mask, chosen)
    moved = batch.log_ratio.detach().exp()
    held = ((moved > 1.2) & (batch.advantages > 0)) | ((moved < 0.8) & (batch.advantages < 0))
    may = mask & (covariances > 0.05) & (covariances < 50) & ~held
    assert found.sum() == min(count, may.sum())
    return found & may
