"""Rules of level ``table``: GDPO sees each reward; OPO and REINFORCE++ see how many tokens the policy wrote."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from grpo_lab.advantages.group import DEVIATIONS, StdNormalized, by_group, deviation, group_average, scorable
from grpo_lab.advantages.whiten import EPSILON
from grpo_lab.batch import RewardTable


@dataclass(frozen=True)
class GDPO(StdNormalized):
    """Standardise each reward k within its group, add up the weighted z-scores, and divide by their deviation over the
    batch:

        z_ik = (r_ik − mean r_k of the group)/(std r_k of the group + ε)      s_i = Σ_k w_k z_ik
        Â_i = (s_i − mean of all s)/(std of all s + ε)

    The mean of all s is 0, since each z sums to 0 in its group. It is therefore not subtracted: its rounding error
    would keep a group in which no reward differs from being exactly 0.

    Source: GDPO (arXiv 2601.05242; NVlabs/GDPO), as TRL's ``multi_objective_aggregation: normalize_then_sum``, whose ε
    of 1e-4 this is. A reward that could not score a completion (NaN) adds nothing to its s; a completion that none
    could score gets 0. (NVlabs/GDPO reads NaN as a reward of 0.)

    Args:
        epsilon: added to both standard deviations, ≥ 0.
        std: ``sample`` (n − 1 in the denominators, as TRL and the authors' code) or ``population`` (n).
    """

    level: ClassVar[str] = "table"
    takes_penalty: ClassVar[bool] = False

    def __call__(self, table: RewardTable) -> Tensor:
        """Return advantages ``[N]``, float64. Raises ValueError for a table with a penalty (KL), which would lose its
        coefficient when it is divided by its own deviation."""
        if table.penalties:
            raise ValueError(
                "`advantage: gdpo` divides each reward by its deviation, so a KL charged to a completion's reward "
                "would lose its coefficient: put it into the loss (`kl.placement: loss`)"
            )
        rows, columns = table.values.shape
        grouped = by_group(table.values.t().reshape(-1), table.group_size)  # the groups of the first reward come first
        scores = (grouped - group_average(grouped)) / (deviation(grouped, 1, True, self.std) + self.epsilon)
        weighted = scores.view(columns, rows).t() * table.weights.to(scores)
        summed = weighted.nansum(dim=1).masked_fill(table.values.isnan().all(dim=1), float("nan"))
        return scorable(summed / (deviation(summed, 0, False, self.std) + self.epsilon), table.values)


def lengths_by_group(table: RewardTable) -> Tensor:
    """Return the tokens of each completion by group, float64 ``[N/G, G]``, 0 for an unscorable one. Raises ValueError
    for a table without lengths."""
    if table.lengths is None:
        raise ValueError("the advantage rule reads how long completions are, and the table has no `lengths`")
    lengths = by_group(table.lengths.to(table.values), table.group_size)
    return lengths.masked_fill(table.total.isnan().view_as(lengths), 0.0)


@dataclass(frozen=True)
class OPO:
    """Subtract the group's mean reward weighted by length: Â_i = r_i − b, b = Σ_j l_j r_j / Σ_j l_j, l_j the tokens of
    completion j.

    b minimises the variance of the policy gradient if the squared norm of the gradient of a completion's log-prob is
    proportional to its length.

    Source: OPO (arXiv 2505.23585); its code is verl's ``opo``. The authors train strictly on-policy, without KL and
    entropy terms. How we differ: a group with one scorable completion gets 0 (verl's baseline is 0 there).
    """

    level: ClassVar[str] = "table"

    def __call__(self, table: RewardTable) -> Tensor:
        """Return advantages ``[N]``, float64. Raises ValueError for a table without lengths."""
        grouped = by_group(table.total, table.group_size)
        lengths = lengths_by_group(table)
        centred = grouped - group_average(grouped)  # exactly 0 in a group of equal rewards
        tokens = lengths.sum(dim=1, keepdim=True).clamp(min=1)
        rest = (lengths * centred).nansum(dim=1, keepdim=True) / tokens
        return scorable(centred - rest, table.total)


@dataclass(frozen=True)
class ReinforcePPBaseline(StdNormalized):
    """Subtract the mean of the group, then normalise over the batch:

        c_i = r_i − mean of the group      Â_i = (c_i − m)/√(v + ε)      m, v: mean and variance of c over the batch

    ``over: tokens`` counts c_i once for each token of completion i, as the authors' OpenRLHF and verl do. m is not 0
    then, since rewards and lengths go together, and a group of equal rewards gets −m/√(v + ε): **no group is dead**, no
    row is left out, and ``resample`` finds nothing to replace. ``over: completions`` (ms-swift) counts each once; m is
    0, and such a group gets exactly 0.

    Source: REINFORCE++ with baseline (arXiv 2501.03262); numbers as verl's ``reinforce_plus_plus_baseline``. OpenRLHF's
    variance is over n and at least 1e-8. The authors add a k2 KL to the loss (``kl``).

    Args:
        epsilon: added to the variance, ≥ 0.
        std: the variance divides by n − 1 (``sample``, as verl) or n (``population``), n the tokens or completions.
        over: ``tokens`` or ``completions``.
    """

    level: ClassVar[str] = "table"
    epsilon: float = EPSILON
    over: str = "tokens"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.over not in ("tokens", "completions"):
            raise ValueError(f"`advantage.over` is {self.over!r}; it must be one of ['tokens', 'completions']")

    def __call__(self, table: RewardTable) -> Tensor:
        """Return advantages ``[N]``, float64. Raises ValueError for a table without lengths."""
        grouped = by_group(table.total, table.group_size)
        centred = grouped - group_average(grouped)
        mean = torch.zeros((), dtype=torch.float64, device=centred.device)
        if self.over == "tokens":
            counts = lengths_by_group(table)
            mean = (counts * centred).nansum() / counts.sum().clamp(min=1)
        else:
            counts = (~grouped.isnan()).double()
        squares = (counts * (centred - mean).square()).nansum()
        variance = squares / (counts.sum() - DEVIATIONS[self.std]).clamp(min=1)
        return scorable((centred - mean) / (variance + self.epsilon).sqrt(), table.total)
