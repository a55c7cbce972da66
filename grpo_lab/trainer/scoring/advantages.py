"""Compute the advantages of the selected rows: once on the reward table of all ranks, then for this rank's tokens. With
a critic, each token first gets its reward and value; afterwards the critic gets the returns that it is to learn.

    penalise → add_value_estimates          local.rewards: −β·k_t on each own token, the scores of steps on the tokens
                                            where these end, and the completion's other rewards on its last one;
                                            local.values: V at generation
    → add_token_energies                    local.token_energy: 1 − 2π + Σπ² at generation, for a rule that reads it
    → row_advantages                        the rule, or a team's ``compute_advantages`` over it
    → to_advantages_and_returns             returns = Â + V for the critic; then Â whitened, for the policy
    → write_advantages

Tool output and inserted text are no time steps: a step goes from one token of the policy to its next
(``LocalRows.mask``). A completion that the length limit cut is an episode like any other, with its rewards on its last
token, where ``value.missing_eos_penalty`` is subtracted. A completion that no reward could score teaches nothing: its
advantages are 0, and its returns are NaN, which no loss reads.

If a team's ``compute_advantages`` calls ``super()`` and there is no rule of ours, the advantages are TRL's own:

    sum_then_normalize    the rule that ``scale_rewards`` names, on the weighted sum
    normalize_then_sum    the rule ``gdpo``

Source: TRL 1.16, ``_generate_and_score_completions``.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from grpo_lab.advantages import (
    GDPO,
    Moments,
    advantage_rule,
    masked_moments,
    on_own_tokens,
    reads_token_energy,
    whiten,
)
from grpo_lab.batch import RewardTable, safe
from grpo_lab.objectives.value_loss import explained_variance
from grpo_lab.trainer import trl_bridge
from grpo_lab.trainer.ports import Collectives, Faults, StepPort, UpdatePort
from grpo_lab.trainer.row_table import Bin, Carried, loss_mask
from grpo_lab.trainer.scoring.carriers import Penalised
from grpo_lab.trainer.settings.algorithm import TRL_SCALING
from grpo_lab.trainer.step.log_probs import forwards_in_bins, padded_log_probs


def checked_advantages(advantages: Tensor, table: RewardTable, faults: Faults | None = None) -> Tensor:
    """Return a rule's advantages, detached, after a check of their shape and values.

    The shape is ``[N]``, one per row of the table, or ``[B, T]``, one per token of this rank's rows. With a guard
    (``faults``), advantages that are not finite become 0 and the batch is marked as bad. Raise ValueError for another
    type or shape. Without a guard, raise it also for an advantage that is not finite on a row or on a token with loss.
    """
    assert table.local is not None
    rows = table.values.size(0)
    mask = table.local.mask
    if not isinstance(advantages, Tensor):
        seen = f"a {type(advantages).__name__}"
    else:
        advantages = advantages.detach()  # a constant to the loss, however a team's rule made it
        if advantages.shape == (rows, 1) != mask.shape:
            advantages = advantages.squeeze(1)
        if advantages.shape == mask.shape:  # values on tokens without loss are not used
            advantages = advantages.to(mask.device)
            advantages = advantages.where(mask | advantages.isfinite(), 0)
        finite = advantages.isfinite()
        if advantages.shape in ((rows,), mask.shape):
            if bool(finite.all()):
                return advantages
            if faults is not None:
                bad = f"{int((~finite).sum())} of {finite.numel()} advantages of finite rewards are not finite"
                faults.found("advantage", bad)
                return advantages.where(finite, 0)
        seen = f"shape {tuple(advantages.shape)} (finite: {bool(finite.all())})"
    raise ValueError(
        f"the advantage rule returned {seen} for {rows} rewards; it must return one finite number per row, [{rows}], "
        f"or per token of this process's rows (`table.local`), {list(mask.shape)} (`advantage`)"
    )


def add_value_estimates(trainer: UpdatePort, made: Penalised) -> Penalised:
    """Put the rewards and values of this rank's tokens into ``table.local``; without a critic nothing changes."""
    value = trainer.algorithm.value
    if value is None:
        return made
    local = made.local
    mask = made.local.mask
    table = made.table
    outcome = without_steps(table).total[local.rows].to(mask.device)
    scorable = ~outcome.isnan()
    at_the_end = outcome.nan_to_num(nan=0.0)
    if made.charged is None:
        charged = torch.zeros(mask.shape, device=mask.device).double()
    else:
        charged = made.charged
    charged = charged * scorable.unsqueeze(1)
    # −β·KL of a whole completion, which ``table.total`` holds (``kl.per: sequence``)
    penalties = (table.values * table.weights.to(table.values.device))[:, table.values.size(1) - table.penalties :]
    of_whole = penalties.nansum(dim=1)[local.rows].to(mask.device)
    earned = at_the_end
    of_steps = torch.zeros_like(charged)
    for column, steps in table.steps.items():
        of_steps = of_steps + float(table.weights[column]) * on_own_tokens(steps.local(local.rows), mask)
    if value.missing_eos_penalty is not None:
        cut = made.scored.rewarded.truncated[local.rows].to(mask.device)
        earned = at_the_end - value.missing_eos_penalty * (cut & scorable)
    # the curves of a healthy run, means over completions
    book = trainer.recorder.book()
    of_tokens = charged.sum(1)
    in_between = of_steps.sum(1)
    book.add("ppo/shaped_reward", (of_tokens + earned + in_between).sum(), scorable.sum())
    book.add("ppo/task_reward", (at_the_end + in_between - of_whole).sum(), scorable.sum())
    book.add("ppo/kl_reward", (of_tokens + of_whole).sum(), scorable.sum())
    rewards = charged + earned.unsqueeze(1) * last_own(mask) + of_steps
    if value.whiten_rewards:
        counted = mask & scorable.unsqueeze(1)
        rewards = whiten(rewards, counted, _moments(trainer, rewards, counted), shift_mean=False)
    values = values_at_generation(trainer, made.scored.batch).double()
    return replace(made, table=replace(table, local=replace(local, rewards=rewards, values=values)), to_go=None)


def without_steps(table: RewardTable) -> RewardTable:
    """Return the table with 0 in place of a step reward's means; NaN where no step was scored."""
    values = table.values.clone()
    values[:, list(table.steps)] *= 0.0
    return replace(table, values=values)


@torch.no_grad()
def values_at_generation(trainer: UpdatePort, batch: dict[str, Any]) -> Tensor:
    """Return values ``[B, T]`` of the policy's own tokens, else 0: from bins if these are exact, else from TRL."""
    model = trainer.model
    args = trainer.args
    training = trainer.model.training
    if training and not trl_bridge.is_multimodal(batch) and trainer.exact_update.verdict.now().stock is None:

        def of(part: Bin) -> Tensor:
            nothing = torch.full_like(part.labels, -100)  # no log-prob is asked for: the LM head has nothing to do
            with trl_bridge.values_heard(trainer.accelerator, model) as heard:
                trl_bridge.completion_log_probs(trainer.accelerator, model, *replace(part, labels=nothing).inputs)
            return heard[0]

        found = forwards_in_bins(trainer, model, batch, of)
    else:
        if training:
            size = args.per_device_train_batch_size
        else:
            size = args.per_device_eval_batch_size
        with (
            trl_bridge.without_checkpointing(trainer.model, trainer.args),
            trl_bridge.values_heard(trainer.accelerator, model) as heard,
        ):
            trl_bridge.stock_forward(trainer, model, batch, batch_size=size)
        found = torch.cat([values[:, -batch["completion_ids"].size(1) :] for values in heard])
    return safe(found, loss_mask(batch))


def add_token_energies(trainer: UpdatePort, made: Penalised) -> Penalised:
    """Put the squared norms of this rank's tokens' scores into ``table.local``, if the rule reads them."""
    if not reads_token_energy(trainer.algorithm.advantage):
        return made
    energy = token_energies(trainer, made.scored.batch)
    return replace(made, table=replace(made.table, local=replace(made.local, token_energy=energy)))


def with_equal_energies(table: RewardTable) -> RewardTable:
    """Return the table with a squared norm of 1 for every token. Which groups are dead does not depend on them: an
    advantage is 0 wherever the rewards of those that have such a token are equal."""
    assert table.local is not None
    return replace(table, local=replace(table.local, token_energy=torch.ones(table.local.mask.shape)))


@torch.no_grad()
def token_energies(trainer: UpdatePort, batch: dict[str, Any]) -> Tensor:
    """Return 1 − 2π + Σπ² ``[B, T]`` of the policy's own tokens, else 0: from bins if these are exact, else from
    TRL's forward."""
    model = trainer.model
    in_bins = model.training and not trl_bridge.is_multimodal(batch)
    with trl_bridge.energies_for_log_probs(), trl_bridge.without_checkpointing(model, trainer.args):
        if in_bins and trainer.exact_update.verdict.now().stock is None:
            found = forwards_in_bins(
                trainer, model, batch,
                lambda part: trl_bridge.completion_log_probs(trainer.accelerator, model, *part.inputs)[0],
            )  # fmt: skip
        else:
            found = padded_log_probs(trainer, batch)
    return safe(found, loss_mask(batch))


def last_own(mask: Tensor) -> Tensor:
    """Return bool ``[B, T]``: the last True of each row; nowhere in a row without any."""
    ordinal = mask.long().cumsum(1)
    return mask & (ordinal == ordinal[:, -1:])


def row_advantages(trainer: StepPort, made: Penalised) -> Tensor:
    """Return advantages by the rule in force: ``[N]`` over all ranks, or ``[B, T]`` from a rule of level ``token``.
    Return TRL's own ``[B]`` if neither a rule nor a hook is in force, and selection has left the batch as it was."""
    if not trainer.replaces_trls_advantages and made.scored.rounds == 1:
        return made.scored.batch["advantages"]  # type: ignore[no-any-return]
    return checked_advantages(trainer.compute_advantages(made.table), made.table, trainer.recorder.faults_in_training)


def to_advantages_and_returns(trainer: UpdatePort, made: Penalised, advantages: Tensor) -> tuple[Tensor, Tensor | None]:
    """Return the policy's advantages ``[B, T]`` and the critic's returns, float32 ``[B, T]`` (NaN where there is
    nothing to learn). Without a critic, return the advantages as they are, and None."""
    value = trainer.algorithm.value
    local = made.local
    if value is None:
        return advantages, None
    assert local.values is not None
    each = (advantages if advantages.dim() == 2 else advantages[local.rows].unsqueeze(1)).to(local.values)
    scorable = ~made.table.values.isnan().all(dim=1)[local.rows].to(local.mask.device).unsqueeze(1)
    counted = local.mask & scorable
    returns = each + local.values
    of_returns = _moments(trainer, returns, counted)
    explained = explained_variance(of_returns.variance, _moments(trainer, returns - local.values, counted).variance)
    book = trainer.recorder.book()
    one = torch.ones((), device=returns.device)
    book.add_alike("value/explained_variance", one * (explained or 0.0), float(explained is not None))
    book.add_alike("value/return_mean", one * of_returns.mean, 1.0)
    moments = None
    if value.whiten_advantages:
        moments = _moments(trainer, each, counted)
    if moments is None:
        each = each.masked_fill(~counted, 0.0)
    else:
        each = whiten(each, counted, moments)
    return each, returns.masked_fill(~counted, float("nan")).float()


def _moments(trainer: Collectives, values: Tensor, mask: Tensor) -> Moments:
    """Return the moments over the tokens of all ranks. A collective."""
    return Moments.joined(trainer.accelerator.gather(masked_moments(values, mask).unsqueeze(0)))


def write_advantages(
    trainer: Collectives, made: Penalised, advantages: Tensor, returns: Tensor | None
) -> dict[str, Any]:
    """Write this rank's advantages ``[B]`` or ``[B, T]`` into its rows, with the critic's values and returns, and
    return the rows. A KL charged per token is added. TRL's completions table gets the advantages, too; if they are per
    token, as the mean over a completion's own tokens. ``advantages``: ``[N]`` over all ranks, ``[B, T]`` of this rank's
    tokens, or TRL's own ``[B]``."""
    batch = made.scored.batch
    mask = made.local.mask
    if returns is not None and made.local.values is not None:
        carried = Carried(batch)
        carried.old_values = made.local.values.float()
        carried.returns = returns
    trls = advantages is batch["advantages"]
    if trls and made.to_go is None:
        return batch
    if trls or advantages.dim() == 2:
        mine = advantages
    else:
        mine = advantages[made.local.rows]
    if made.to_go is not None:
        mine = (mine if mine.dim() == 2 else mine.unsqueeze(1)).to(made.to_go) + made.to_go
    batch["advantages"] = mine.to(batch["advantages"])
    if mine.dim() == 2:
        advantages = trainer.accelerator.gather((batch["advantages"] * mask).sum(1) / mask.sum(1).clamp(min=1))
    trl_bridge.replace_logged_rows(trainer.recorder.completions, {"advantages": advantages.tolist()})
    return batch


def trl_advantages(table: RewardTable, scale_rewards: Any, aggregation: str) -> Tensor:
    """Return the advantages ``[N]`` of ``table`` for TRL's settings. Raise ValueError for settings that TRL lacks."""
    if aggregation == "normalize_then_sum":
        return GDPO()(table)
    rules = {scaling: name for name, scaling in TRL_SCALING.items()}
    if aggregation != "sum_then_normalize" or scale_rewards not in rules:
        raise ValueError(
            f"`multi_objective_aggregation` is {aggregation!r} and `scale_rewards` {scale_rewards!r}; allowed are "
            f"'sum_then_normalize' with one of {sorted(rules)}, or 'normalize_then_sum'"
        )
    return advantage_rule(rules[scale_rewards])(table.total, table.group_size)
