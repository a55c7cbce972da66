"""Compute the advantages of the selected rows: once on the reward table of all ranks, then for this rank's tokens. With
a critic, each token first gets its reward and value; afterwards the critic gets the returns that it is to learn.

    penalise → add_value_estimates          with a critic: ``local.rewards`` are −β·k_t on each own token, the scores of
                                            steps on the tokens where these end, and the completion's other rewards on
                                            its last own token; ``local.values`` are the critic's at generation
    → add_token_energies                    for a rule that reads it: ``local.token_energy``, 1 − 2π + Σπ² at generation
    → row_advantages                        the advantages Â by the rule, or by a team's ``compute_advantages``
    → to_advantages_and_returns             with a critic: returns Â + V, which it learns; then Â is whitened
    → write_advantages                      Â and returns are written into this rank's rows

Tool output and inserted text are no time steps: a step goes from one token of the policy to its next
(``LocalRows.mask``). A completion that the length limit cut is an episode like any other, with its rewards on its last
token, where ``value.missing_eos_penalty`` is subtracted. A completion that no reward could score teaches nothing: its
advantages are 0, and its returns are NaN, which no loss reads.

If a team's ``compute_advantages`` calls ``super()`` and there is no rule of ours, the advantages are those of TRL's
``multi_objective_aggregation``:

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
    """Return a rule's advantages, detached from its graph, after a check of their shape and values.

    Args:
        advantages: ``[N]``, one per row of the table (or ``[N, 1]``); or ``[B, T]``, one per token of this rank's rows.
        table: the rewards, with ``local``.
        faults: the guard's record. With it, advantages that are not finite become 0 and the batch is marked as bad.

    Raises:
        ValueError: the type or shape is another; or, without a guard, an advantage is not finite, on a row or on a
            token that carries loss.
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
    """Put the rewards and values ``[B, T]`` of this rank's tokens, in units of the reward, into ``table.local``, and
    log the mean rewards of completions (``ppo/…``). Without a critic change nothing. A collective with
    ``whiten_rewards``."""
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
        kl_of_tokens = torch.zeros(mask.shape, device=mask.device).double()
    else:
        kl_of_tokens = made.charged
    kl_of_tokens = kl_of_tokens * scorable.unsqueeze(1)
    # −β·KL of a whole completion, which ``table.total`` holds (``kl.per: sequence``)
    penalties = (table.values * table.weights.to(table.values.device))[:, table.values.size(1) - table.penalties :]
    kl_of_whole = penalties.nansum(dim=1)[local.rows].to(mask.device)
    of_steps = torch.zeros_like(kl_of_tokens)
    for column, steps in table.steps.items():
        of_steps = of_steps + float(table.weights[column]) * on_own_tokens(steps.local(local.rows), mask)
    earned = at_the_end
    if value.missing_eos_penalty is not None:
        cut = made.scored.rewarded.truncated[local.rows].to(mask.device)
        earned = at_the_end - value.missing_eos_penalty * (cut & scorable)
    # the curves of a healthy run, means over completions
    book = trainer.recorder.book()
    kl = kl_of_tokens.sum(1)
    in_between = of_steps.sum(1)
    book.add("ppo/shaped_reward", (kl + earned + in_between).sum(), scorable.sum())
    book.add("ppo/task_reward", (at_the_end + in_between - kl_of_whole).sum(), scorable.sum())
    book.add("ppo/kl_reward", (kl + kl_of_whole).sum(), scorable.sum())
    rewards = kl_of_tokens + earned.unsqueeze(1) * last_own(mask) + of_steps
    if value.whiten_rewards:
        counted = mask & scorable.unsqueeze(1)
        rewards = whiten(rewards, counted, _moments(trainer, rewards, counted), shift_mean=False)
    values = values_at_generation(trainer, made.scored.batch).double()
    return replace(made, table=replace(table, local=replace(local, rewards=rewards, values=values)), to_go=None)


def without_steps(table: RewardTable) -> RewardTable:
    """Return the table with 0 in place of the means of step rewards, which are counted at their tokens; a mean of NaN
    (no step could be scored) stays."""
    values = table.values.clone()
    values[:, list(table.steps)] *= 0.0
    return replace(table, values=values)


@torch.no_grad()
def values_at_generation(trainer: UpdatePort, batch: dict[str, Any]) -> Tensor:
    """Compute the critic's values ``[B, T]`` of the policy's own tokens, 0 for all others. The forward runs in bins if
    that is exact, else as TRL's does."""
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
    """Put ``token_energies`` of this rank's tokens into ``table.local``, if the rule reads them."""
    if not reads_token_energy(trainer.algorithm.advantage):
        return made
    energy = token_energies(trainer, made.scored.batch)
    return replace(made, table=replace(made.table, local=replace(made.local, token_energy=energy)))


def with_equal_energies(table: RewardTable) -> RewardTable:
    """Return the table with a token energy of 1 for every token, so that dead groups are found without a forward.

    The energies do not matter for that: a mean of equal rewards is the same with any positive weights, so a dead
    group's advantages are 0 with any energies.
    """
    assert table.local is not None
    return replace(table, local=replace(table.local, token_energy=torch.ones(table.local.mask.shape)))


@torch.no_grad()
def token_energies(trainer: UpdatePort, batch: dict[str, Any]) -> Tensor:
    """Compute 1 − 2π(a) + Σ_v π(v)² ``[B, T]`` for each of the policy's own tokens a, and 0 for all others: the squared
    norm of ∂ log π(a) by the logits. The forward runs in bins if that is exact, else as TRL's does."""
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
    """Return bool ``[B, T]`` that is True at the last True of each row of ``mask`` only."""
    ordinal = mask.long().cumsum(1)
    return mask & (ordinal == ordinal[:, -1:])


def row_advantages(trainer: StepPort, made: Penalised) -> Tensor:
    """Return the advantages by the rule or hook in force: ``[N]`` for all ranks' rows, or ``[B, T]`` for this rank's
    tokens. If there is neither, and no row was resampled, return TRL's own for this rank's rows, ``[B]``."""
    if not trainer.replaces_trls_advantages and made.scored.rounds == 1:
        return made.scored.batch["advantages"]  # type: ignore[no-any-return]
    return checked_advantages(trainer.compute_advantages(made.table), made.table, trainer.recorder.faults_in_training)


def to_advantages_and_returns(trainer: UpdatePort, made: Penalised, advantages: Tensor) -> tuple[Tensor, Tensor | None]:
    """Return the policy's advantages and the critic's returns, both ``[B, T]``, and log the critic's explained
    variance. Without a critic return ``advantages`` as they are, and None.

    The returns, float32, are Â + V with Â before whitening; NaN for tokens of others and for completions that no reward
    could score. A collective with a critic.
    """
    value = trainer.algorithm.value
    local = made.local
    if value is None:
        return advantages, None
    assert local.values is not None
    if advantages.dim() == 1:
        advantages = advantages[local.rows].unsqueeze(1)
    of_tokens = advantages.to(local.values)
    scorable = ~made.table.values.isnan().all(dim=1)[local.rows].to(local.mask.device).unsqueeze(1)
    counted = local.mask & scorable
    returns = of_tokens + local.values
    of_returns = _moments(trainer, returns, counted)
    explained = explained_variance(of_returns.variance, _moments(trainer, returns - local.values, counted).variance)
    book = trainer.recorder.book()
    one = torch.ones((), device=returns.device)
    book.add_alike("value/explained_variance", one * (explained or 0.0), float(explained is not None))
    book.add_alike("value/return_mean", one * of_returns.mean, 1.0)
    if value.whiten_advantages:
        of_tokens = whiten(of_tokens, counted, _moments(trainer, of_tokens, counted))
    else:
        of_tokens = of_tokens.masked_fill(~counted, 0.0)
    return of_tokens, returns.masked_fill(~counted, float("nan")).float()


def _moments(trainer: Collectives, values: Tensor, mask: Tensor) -> Moments:
    """Return the moments of ``values`` over the tokens of all ranks at which ``mask`` is True. A collective."""
    return Moments.joined(trainer.accelerator.gather(masked_moments(values, mask).unsqueeze(0)))


def write_advantages(
    trainer: Collectives, made: Penalised, advantages: Tensor, returns: Tensor | None
) -> dict[str, Any]:
    """Write the advantages, ``[B]`` or ``[B, T]``, and the critic's values and returns into this rank's rows, and
    return the rows. A KL that is charged per token is added to the advantages here.

    TRL's table of completions gets the advantages, too: if they are per token, their mean over a completion's own
    tokens. A collective.

    Args:
        advantages: ``[N]`` for all ranks' rows, ``[B, T]`` for this rank's tokens, or TRL's own ``[B]``, which stand in
            the rows already.
        returns: ``[B, T]``, or None without a critic.
    """
    batch = made.scored.batch
    mask = made.local.mask
    if returns is not None and made.local.values is not None:
        carried = Carried(batch)
        carried.old_values = made.local.values.float()
        carried.returns = returns
    are_trls = advantages is batch["advantages"]
    if are_trls and made.to_go is None:
        return batch
    if are_trls or advantages.dim() == 2:
        mine = advantages
    else:
        mine = advantages[made.local.rows]
    if made.to_go is not None:
        if mine.dim() == 1:
            mine = mine.unsqueeze(1)
        mine = mine.to(made.to_go) + made.to_go
    batch["advantages"] = mine.to(batch["advantages"])
    if mine.dim() == 2:
        advantages = trainer.accelerator.gather((batch["advantages"] * mask).sum(1) / mask.sum(1).clamp(min=1))
    trl_bridge.replace_logged_rows(trainer.recorder.completions, {"advantages": advantages.tolist()})
    return batch


def trl_advantages(table: RewardTable, scale_rewards: Any, aggregation: str) -> Tensor:
    """Return the advantages ``[N]`` that TRL computes from ``table`` with its settings ``scale_rewards`` and
    ``multi_objective_aggregation``. Raise ValueError for values that TRL does not have."""
    if aggregation == "normalize_then_sum":
        return GDPO()(table)
    rules = {scaling: name for name, scaling in TRL_SCALING.items()}
    if aggregation != "sum_then_normalize" or scale_rewards not in rules:
        raise ValueError(
            f"`multi_objective_aggregation` is {aggregation!r} and `scale_rewards` {scale_rewards!r}; allowed are "
            f"'sum_then_normalize' with one of {sorted(rules)}, or 'normalize_then_sum'"
        )
    return advantage_rule(rules[scale_rewards])(table.total, table.group_size)
