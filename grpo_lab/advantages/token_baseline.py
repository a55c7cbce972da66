"""The optimal token baseline: what a group earned, weighted at each token by how uncertain the way there was."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from grpo_lab.advantages.baselines import GroupMean
from grpo_lab.batch import RewardTable, safe


@dataclass(frozen=True)
class OptimalTokenBaseline:
    """Â_{i,t} = r_i − B_t, where B_t is the mean reward of the group's completions that have a token t, weighted by W.

        B_t = Σ_i r_i W_{i,t} / Σ_i W_{i,t}     W_{i,t} = Σ_{j ≤ t} w_{i,j}     w = 1 − 2π(y) + Σ_v π(v)²

    w is the squared norm of the score of a token by the logits. So B_t minimises the variance of the gradient, if
    tokens' scores are orthogonal and the network below the logits is left out. t counts the policy's own tokens; tool
    output is skipped. π is the policy at generation, at the sampling temperature.

    A group of equal rewards gets exactly 0. So does the end of its longest completion, beyond the second longest: no
    other has such a token, and B_t is its own reward.

    Source: "The Optimal Token Baseline" (arXiv 2602.07078) as verl's ``optimal_token_baseline``, which adds 1e-8 to the
    denominator (here a t of which all W are 0 has the group's mean); over own tokens as its ``tir_`` variant, whose
    knob ``handle_zero_tail`` (B_t = 0 at that end) is left out. With the sampler's weights ρ verl can put ρ²w in place
    of w; this is left out, too. Cost: a forward without gradient over the generation batch.
    """

    level: ClassVar[str] = "token"
    #: a run with this rule computes w of each token at generation
    reads_token_energy: ClassVar[bool] = True

    def __call__(self, table: RewardTable) -> Tensor:
        """Return advantages ``[B, T]`` (float64) of this rank's rows. A collective: it sums ``[2, N/G, T]`` over ranks.

        Raises ValueError for a table without ``local`` rows, their ``token_energy``, or ``lengths``.
        """
        local = table.local
        if local is None or local.token_energy is None or table.lengths is None:
            said = "which reads `table.lengths` and `table.local.token_energy`, and the table lacks one of them"
            raise ValueError(f"`advantage` is 'optimal_token_baseline', {said}")
        rows = torch.arange(local.rows.start, local.rows.stop)
        group = rows // table.group_size
        rewards = table.total.cpu()
        earned = GroupMean()(rewards, table.group_size)[rows].unsqueeze(1)  # exactly 0 in a group of equal rewards
        own = local.mask.cpu() & ~rewards.isnan()[rows].unsqueeze(1)
        place = (own.cumsum(1) - 1).clamp(min=0)
        path = safe(local.token_energy.cpu().double(), own).cumsum(1)
        # own tokens side by side, as wide as the longest completion on any rank
        width = max(int(table.lengths.max()), 1)
        weight = torch.zeros(len(rows), width, dtype=torch.float64)
        weight[own.nonzero()[:, 0], place[own]] = path[own]
        sums = torch.zeros(2, table.values.size(0) // table.group_size, width, dtype=torch.float64)
        sums = local.over_ranks(sums.index_add(1, group, torch.stack([weight * earned, weight])))
        baseline = torch.where(sums[1] > 0, sums[0] / sums[1], 0.0)[group]
        alone = (weight > 0) & (weight == sums[1][group])
        baseline = torch.where(alone, earned, baseline)  # exactly: no other completion has this token
        return (earned - baseline.gather(1, place)).masked_fill(~own, 0.0).to(local.mask.device)


def reads_token_energy(rule: Any) -> bool:
    """Return whether the rule reads the squared norm of each token's score."""
    return bool(getattr(rule, "reads_token_energy", False))
