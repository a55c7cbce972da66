"""The optimal token baseline: at each token the mean reward of the group, weighted by how uncertain each completion was
so far."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from grpo_lab.advantages.baselines import GroupMean
from grpo_lab.batch import RewardTable, safe


@dataclass(frozen=True)
class OptimalTokenBaseline:
    """Subtract a baseline of its own at each token: Â_{i,t} = r_i − B_t. B_t is the weighted mean reward of the group's
    completions that have a token t.

        B_t = Σ_i r_i W_{i,t} / Σ_i W_{i,t}     W_{i,t} = Σ_{j ≤ t} w_{i,j}     w = 1 − 2π(y) + Σ_v π(v)²

    w is the squared norm of the gradient of a token's log-prob by the logits. If these gradients are orthogonal for
    different tokens, and the network below the logits is left out of account, B_t minimises the variance of the policy
    gradient. t counts the policy's own tokens; tool output is skipped. π is the policy at generation, at the sampling
    temperature.

    A group of equal rewards gets exactly 0. So do the tokens of its longest completion that no other completion has:
    there B_t is the completion's own reward.

    Source: "The Optimal Token Baseline" (arXiv 2602.07078) as verl's ``optimal_token_baseline``. verl adds 1e-8 to the
    denominator; here B_t is the group's mean if all W are 0. Counting own tokens only is verl's ``tir_`` variant; its
    knob ``handle_zero_tail`` (B_t = 0 where no other completion has the token) is left out. So is verl's ρ²w in place
    of w, with the sampler's weights ρ. Cost: a forward without gradient over the generation batch.
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
    """Return whether the rule reads w of each token (``LocalRows.token_energy``)."""
    return bool(getattr(rule, "reads_token_energy", False))
