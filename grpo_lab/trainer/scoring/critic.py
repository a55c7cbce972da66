"""With a critic: what each token earned, what it was worth, and what the critic is to learn.

    penalise → add_value_estimates          local.rewards: −β·k_t on each own token, and the completion's rewards on its
                                            last one; local.values: V at generation
    → the rule (``advantages.GAE``, or a team's ``compute_advantages`` over it)
    → to_advantages_and_returns             returns = Â + V, which the critic learns; then Â whitened, which pushes the
                                            policy

Tool output and inserted text are no time steps: a step goes from one token of the policy to its next
(``LocalRows.mask``). A completion that the length limit cut is an episode like another, with its rewards on its last
token; ``value.missing_eos_penalty`` is taken off there. One that no reward could score teaches nobody: its advantages
are 0, its returns NaN, which no loss reads.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from grpo_lab.advantages import Moments, masked_moments, whiten
from grpo_lab.batch import RewardTable
from grpo_lab.objectives.value_loss import explained_variance
from grpo_lab.trainer.scoring.carriers import Advantages, Penalised
from grpo_lab.trainer.step.values import values_at_generation

if TYPE_CHECKING:
    from grpo_lab.trainer.ports import StepPort


def add_value_estimates(trainer: StepPort, made: Penalised) -> Penalised:
    """The same with the rewards and values of this rank's tokens in ``table.local``; unchanged without a critic."""
    value = trainer.algorithm.value
    if value is None:
        return made
    local, mask = made.local, made.local.mask
    outcome = made.table.total[local.rows].to(mask.device)
    scorable, at_the_end = ~outcome.isnan(), outcome.nan_to_num(nan=0.0)
    charged = made.charged if made.charged is not None else torch.zeros(mask.shape, device=mask.device).double()
    charged = charged * scorable.unsqueeze(1)
    earned, of_whole = at_the_end, charged_to_whole(made.table)[local.rows].to(mask.device)
    if value.missing_eos_penalty is not None:
        cut = made.scored.rewarded.truncated[local.rows].to(mask.device)
        earned = at_the_end - value.missing_eos_penalty * (cut & scorable)
    _record_curves(trainer, charged.sum(1), of_whole, at_the_end, earned, scorable)
    rewards = charged + earned.unsqueeze(1) * last_own(mask)
    if value.whiten_rewards:
        counted = mask & scorable.unsqueeze(1)
        rewards = whiten(rewards, counted, _moments(trainer, rewards, counted), shift_mean=False)
    values = values_at_generation(trainer, made.scored.batch).double()
    table = replace(made.table, local=replace(local, rewards=rewards, values=values))
    return replace(made, table=table, to_go=None)


def to_advantages_and_returns(trainer: StepPort, made: Penalised, of_rows: Advantages) -> Advantages:
    """Advantages ``[B, T]`` as they push the policy, with the returns that the critic learns. Unchanged without a
    critic."""
    value, local, advantages = trainer.algorithm.value, made.local, of_rows.values
    if value is None:
        return of_rows
    assert local.values is not None
    each = (advantages if advantages.dim() == 2 else advantages[local.rows].unsqueeze(1)).to(local.values)
    scorable = ~made.table.values.isnan().all(dim=1)[local.rows].to(local.mask.device).unsqueeze(1)
    counted = local.mask & scorable
    returns = each + local.values
    _record_explained(trainer, returns, local.values, counted)
    if value.whiten_advantages:
        each = whiten(each, counted, _moments(trainer, each, counted))
    else:
        each = each.masked_fill(~counted, 0.0)
    return replace(of_rows, values=each, returns=returns.masked_fill(~counted, float("nan")).float())


def charged_to_whole(table: RewardTable) -> Tensor:
    """float64 ``[N]``: what of ``table.total`` is −β·KL of a whole completion (``kl.per: sequence``); 0 where tokens
    pay, or nobody can score."""
    rewards = table.values.size(1) - table.penalties
    return (table.values[:, rewards:] * table.weights[rewards:].to(table.values.device)).nansum(dim=1)


def last_own(mask: Tensor) -> Tensor:
    """bool ``[B, T]``: the last True of each row; nowhere in a row without any."""
    ordinal = mask.long().cumsum(1)
    return mask & (ordinal == ordinal[:, -1:])


def _moments(trainer: StepPort, values: Tensor, mask: Tensor) -> Moments:
    """Over the tokens of all ranks. A collective."""
    return Moments.joined(trainer.accelerator.gather(masked_moments(values, mask).unsqueeze(0)))


def _record_curves(
    trainer: StepPort, of_tokens: Tensor, of_whole: Tensor, at_the_end: Tensor, earned: Tensor, scorable: Tensor
) -> None:
    """The three curves of a healthy run, means over completions: shaped reward, task reward, and −β·KL.

    Args:
        of_tokens, of_whole: −β·KL of each completion, charged to its tokens or in ``at_the_end``.
        at_the_end: rewards of the last token; ``earned``: less the penalty for a completion that did not end.
    """
    book, count = trainer.recorder.book(), scorable.sum()
    book.add("ppo/shaped_reward", (of_tokens + earned).sum(), count)
    book.add("ppo/task_reward", (at_the_end - of_whole).sum(), count)
    book.add("ppo/kl_reward", (of_tokens + of_whole).sum(), count)


def _record_explained(trainer: StepPort, returns: Tensor, values: Tensor, mask: Tensor) -> None:
    of_returns, of_errors = _moments(trainer, returns, mask), _moments(trainer, returns - values, mask)
    found = explained_variance(of_returns.variance, of_errors.variance)
    book, one = trainer.recorder.book(), torch.ones((), device=returns.device)
    book.add_alike("value/explained_variance", one * (found or 0.0), 0.0 if found is None else 1.0)
    book.add_alike("value/return_mean", one * of_returns.mean, 1.0)
