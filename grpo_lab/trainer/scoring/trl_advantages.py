"""TRL's own advantages of a reward table, for a team's ``compute_advantages`` that asks ``super()`` without a rule of ours.

    sum_then_normalize    the rule that ``scale_rewards`` names, on the weighted sum
    normalize_then_sum    z_ik = (r_ik − mean of its group) / (std of its group + 1e-4) for each reward k;  s_i = Σ_k w_k z_ik;
                          Â_i = (s_i − mean of all s) / (std of all s + 1e-4)                                (GDPO, arXiv 2601.05242)

Rows that no reward could score (NaN) get 0. Source: TRL 1.16, ``_generate_and_score_completions``.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from grpo_lab.advantages import advantage_rule
from grpo_lab.advantages.groups import sample_std
from grpo_lab.batch import RewardTable
from grpo_lab.trainer.settings.algorithm import TRL_SCALING

EPSILON = 1e-4


def trl_advantages(table: RewardTable, scale_rewards: Any, aggregation: str) -> Tensor:
    """Advantages ``[N]`` of ``table`` as TRL's settings ask for.

    Raises:
        ValueError: settings that TRL does not have.
    """
    if aggregation == "normalize_then_sum":
        return _normalised_then_summed(table)
    rules = {scaling: name for name, scaling in TRL_SCALING.items()}
    if aggregation != "sum_then_normalize" or scale_rewards not in rules:
        raise ValueError(
            f"`multi_objective_aggregation` is {aggregation!r} and `scale_rewards` {scale_rewards!r}; allowed are "
            f"'sum_then_normalize' with one of {sorted(rules)}, or 'normalize_then_sum'"
        )
    return advantage_rule(rules[scale_rewards])(table.total, table.group_size)


def _normalised_then_summed(table: RewardTable) -> Tensor:
    values = table.values.double()
    grouped = values.view(-1, table.group_size, values.size(1))
    centred = grouped - grouped.nanmean(dim=1, keepdim=True)
    scaled = (centred / (sample_std(grouped, dim=1, keepdim=True) + EPSILON)).view_as(values)
    total = (scaled * table.weights.to(scaled)).nansum(dim=1)
    total = total.masked_fill(values.isnan().all(dim=1), float("nan"))
    advantages = (total - total.nanmean()) / (sample_std(total, dim=0) + EPSILON)
    return advantages.nan_to_num(nan=0.0).to(table.values.dtype)


__all__ = ["trl_advantages"]
