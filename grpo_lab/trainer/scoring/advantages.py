"""Advantages of the rows that stay: one answer for the reward table of all ranks, then what it is on this rank's
tokens.

Where a team's ``compute_advantages`` asks ``super()`` without a rule of ours, they are TRL's own:

    sum_then_normalize    the rule that ``scale_rewards`` names, on the weighted sum
    normalize_then_sum    z_ik = (r_ik − mean of its group) / (std of its group + 1e-4) for each reward k;
                          s_i = Σ_k w_k z_ik;  Â_i = (s_i − mean of all s) / (std of all s + 1e-4)
                          (GDPO, arXiv 2601.05242)

Rows that no reward could score (NaN) get 0. Source: TRL 1.16, ``_generate_and_score_completions``.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torch import Tensor

from grpo_lab.advantages import advantage_rule
from grpo_lab.advantages.group import sample_std
from grpo_lab.batch import LocalRows, RewardTable
from grpo_lab.trainer import trl_bridge
from grpo_lab.trainer.carried import Carried
from grpo_lab.trainer.ports import Fault
from grpo_lab.trainer.scoring.carriers import Advantages, Penalised, Scored, local_rows, loss_tokens
from grpo_lab.trainer.settings.algorithm import TRL_SCALING

if TYPE_CHECKING:
    from grpo_lab.trainer.ports import StepPort

EPSILON = 1e-4


def with_local_rows(trainer: StepPort, scored: Scored, table: RewardTable, before: int = 0) -> RewardTable:
    """The table with this rank's rows of ``scored`` in it; ``before``: rows of the table that stand before them all."""
    mine = local_rows(trainer, scored.batch)
    lengths = scored.rewarded.tokens[mine]
    place = slice(before + mine.start, before + mine.stop)
    return replace(table, local=LocalRows(place, loss_tokens(trainer, scored), lengths))


def checked_advantages(advantages: Tensor, table: RewardTable, guarded: bool = False) -> Advantages:
    """One finite number per row of the table ``[N]``, or one per token of this rank's rows ``[B, T]``.

    With a guard others than finite ones become 0, and a fault.

    Raises:
        ValueError: anything else.
    """
    rows, local = table.values.size(0), table.local
    assert local is not None
    if not isinstance(advantages, Tensor):
        seen = f"a {type(advantages).__name__}"
    else:
        advantages = advantages.detach()  # a number to the loss, whatever a team's rule made it with
        if tuple(advantages.shape) == (rows, 1) != tuple(local.mask.shape):
            advantages = advantages.squeeze(1)
        if tuple(advantages.shape) == tuple(local.mask.shape):  # what stands on tokens without loss is nobody's
            advantages = advantages.where(local.mask | advantages.isfinite(), 0)
        finite = bool(advantages.isfinite().all())
        if (finite or guarded) and tuple(advantages.shape) in ((rows,), tuple(local.mask.shape)):
            if finite:
                return Advantages(advantages)
            count = int((~advantages.isfinite()).sum())
            said = f"{count} of {advantages.numel()} advantages of finite rewards are not finite"
            return Advantages(advantages.where(advantages.isfinite(), 0), faults=(Fault("advantage", said),))
        seen = f"shape {tuple(advantages.shape)} (finite: {finite})"
    raise ValueError(
        f"the advantage rule returned {seen} for {rows} rewards; it must return one finite number per row, [{rows}], "
        "or per token "
        f"of this process's rows (`table.local`), {list(local.mask.shape)} (`advantage`)"
    )


def row_advantages(trainer: StepPort, made: Penalised) -> Advantages:
    """What the rule in force says: ``[N]`` over all ranks, or ``[B, T]`` of a rule of level ``token``.

    TRL's own advantages stay where neither a rule nor a hook of ours is in force, nor selection has put the batch
    together anew: then ``[B]``.
    """
    if not trainer.replaces_trls_advantages and made.scored.rounds == 1:
        return Advantages(made.scored.batch["advantages"])
    guarded = trainer.recorder.faults_in_training is not None
    return checked_advantages(trainer.compute_advantages(made.table), made.table, guarded)


def write_advantages(trainer: StepPort, made: Penalised, found: Advantages) -> dict[str, Any]:
    """This rank's rows with their advantages ``[B]`` or ``[B, T]``, with the KL of each token and what comes after it
    where it is charged so, and the critic's values and returns; the guard is told of faults. TRL's completions table
    gets the advantages, too, per token as the mean over a completion's own tokens."""
    batch, mask, advantages = made.scored.batch, made.local.mask, found.values
    faults = trainer.recorder.faults_in_training
    for fault in (*made.faults, *found.faults):
        assert faults is not None  # there are none without a guard
        faults.found(*fault)
    if found.returns is not None and made.local.values is not None:
        carried = Carried(batch)
        carried.old_values, carried.returns = made.local.values.float(), found.returns
    trls = advantages is batch["advantages"]
    if trls and made.to_go is None:
        return batch
    mine = advantages if trls or advantages.dim() == 2 else advantages[made.local.rows]
    if made.to_go is not None:
        each = mine if mine.dim() == 2 else mine.unsqueeze(1)
        mine = each.to(made.to_go) + made.to_go
    batch["advantages"] = mine.to(batch["advantages"])
    logged = advantages
    if mine.dim() == 2:
        in_force = batch["advantages"]
        logged = trainer.accelerator.gather((in_force * mask).sum(1) / mask.sum(1).clamp(min=1))
    trl_bridge.replace_logged_advantages(trainer, logged)
    return batch


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
