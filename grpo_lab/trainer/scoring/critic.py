"""With a critic: what each token earned, what it was worth, and what the critic is to learn.

    penalise → valued      local.rewards: −β·k_t on each own token, and the completion's rewards on its last one; local.values: V at generation
    → the rule (``advantages.GAE``, or a team's ``compute_advantages`` over it)
    → credited             returns = Â + V, which the critic learns; then Â whitened, which pushes the policy

Tool output and inserted text are no time steps: a step goes from one token of the policy to its next (``LocalRows.mask``). A
completion that the length limit cut is an episode like another, with its rewards on its last token; ``value.missing_eos_penalty`` is
taken off there. One that no reward could score teaches nobody: its advantages are 0, its returns NaN, which no loss reads.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from grpo_lab.advantages import Moments, masked_moments, whiten
from grpo_lab.objectives.value_loss import explained_variance
from grpo_lab.trainer.carried import Carried
from grpo_lab.trainer.scoring.carriers import Penalised
from grpo_lab.trainer.step.values import values_at_generation

if TYPE_CHECKING:
    from grpo_lab.trainer.ports import StepPort


def valued(trainer: StepPort, made: Penalised) -> Penalised:
    """The same with the rewards and values of this rank's tokens in ``table.local``; unchanged without a critic."""
    value = trainer.algorithm.value
    if value is None:
        return made
    local, mask = made.local, made.local.mask
    outcome = made.table.total[local.rows].to(mask.device)
    scorable, task = ~outcome.isnan(), outcome.nan_to_num(nan=0.0)
    charged = made.charged if made.charged is not None else torch.zeros(mask.shape, device=mask.device).double()
    charged = charged * scorable.unsqueeze(1)
    earned = task
    if value.missing_eos_penalty is not None:
        cut = made.scored.rewarded.truncated[local.rows].to(mask.device)
        earned = task - value.missing_eos_penalty * (cut & scorable)
    paid = _penalty_columns(made)  # a KL a completion is one of the table's columns
    _record_curves(trainer, charged.sum(1) + paid, task - paid, earned - paid, scorable)
    rewards = charged + earned.unsqueeze(1) * last_own(mask)
    if value.whiten_rewards:
        counted = mask & scorable.unsqueeze(1)
        rewards = whiten(rewards, counted, _moments(trainer, rewards, counted), shift_mean=False)
    values = values_at_generation(trainer, made.scored.batch).double()
    table = replace(made.table, local=replace(local, rewards=rewards, values=values))
    return replace(made, table=table, to_go=None)


def credited(trainer: StepPort, made: Penalised, advantages: Tensor) -> Tensor:
    """Advantages ``[B, T]`` as they push the policy; returns and old values go with the rows. Unchanged without a critic."""
    value, local = trainer.algorithm.value, made.local
    if value is None:
        return advantages
    assert local.values is not None
    each = (advantages if advantages.dim() == 2 else advantages[local.rows].unsqueeze(1)).to(local.values)
    scorable = ~made.table.values.isnan().all(dim=1)[local.rows].to(local.mask.device).unsqueeze(1)
    counted = local.mask & scorable
    returns = each + local.values
    _record_explained(trainer, returns, local.values, counted)
    carried = Carried(made.scored.batch)
    carried.old_values = local.values.float()
    carried.returns = returns.masked_fill(~counted, float("nan")).float()
    if value.whiten_advantages:
        return whiten(each, counted, _moments(trainer, each, counted))
    return each.masked_fill(~counted, 0.0)


def last_own(mask: Tensor) -> Tensor:
    """bool ``[B, T]``: the last True of each row; nowhere in a row without any."""
    ordinal = mask.long().cumsum(1)
    return mask & (ordinal == ordinal[:, -1:])


def _penalty_columns(made: Penalised) -> Tensor:
    """``[B]``: what this rank's completions paid as columns of the table, in units of the reward; 0 where none could score."""
    table, local = made.table, made.local
    columns = table.values.size(1) - table.penalties
    weighted = table.values[:, columns:] * table.weights[columns:].to(table.values.device)
    return weighted[local.rows].nansum(dim=1).to(local.mask.device)


def _moments(trainer: StepPort, values: Tensor, mask: Tensor) -> Moments:
    """Over the tokens of all ranks. A collective."""
    return Moments.joined(trainer.accelerator.gather(masked_moments(values, mask).unsqueeze(0)))


def _record_curves(trainer: StepPort, kl: Tensor, task: Tensor, earned: Tensor, scorable: Tensor) -> None:
    """The three curves of a healthy run, means over completions: shaped reward, task reward, and −β·KL."""
    book, count = trainer.recorder.book(), scorable.sum()
    book.add("ppo/shaped_reward", (kl + earned).sum(), count)
    book.add("ppo/task_reward", task.sum(), count)
    book.add("ppo/kl_reward", kl.sum(), count)


def _record_explained(trainer: StepPort, returns: Tensor, values: Tensor, mask: Tensor) -> None:
    of_returns, of_errors = _moments(trainer, returns, mask), _moments(trainer, returns - values, mask)
    found = explained_variance(of_returns.variance, of_errors.variance)
    book, one = trainer.recorder.book(), torch.ones((), device=returns.device)
    book.add_alike("value/explained_variance", one * (found or 0.0), 0.0 if found is None else 1.0)
    book.add_alike("value/return_mean", one * of_returns.mean, 1.0)


__all__ = ["credited", "last_own", "valued"]
