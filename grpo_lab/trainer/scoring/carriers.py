"""Data classes that the stages hand to one another, from completions to advantages.

    score → Scored → select → Scored → penalise → Penalised → values → advantages → record

``Scored.batch`` is TRL's dict of this rank's rows; ``Scored.rewarded`` holds the rewards of all ranks' rows, the same
on every rank.

With ``mask_truncated_completions``, truncated completions are out of the loss and still in their group's baseline. TRL
masks their tokens before it asks for log-probs. With a KL penalty in the reward that is too early, since truncated
completions are charged for their KL like all others. So TRL is then made to mask nothing (``whole_completions``), and
``mask_cut`` masks them once the penalty is known.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from grpo_lab.advantages import StepTable
from grpo_lab.batch import LocalRows, RewardTable
from grpo_lab.trainer import trl_bridge
from grpo_lab.trainer.ports import Collectives, Numbers, UpdatePort
from grpo_lab.trainer.row_table import loss_mask
from grpo_lab.trainer.step.log_probs import GenerationForwards

_OF_ROWS = ("lengths", "tokens", "truncated", "rows")


@dataclass(frozen=True)
class Rewarded:
    """Rewards and facts of the N completions of all ranks, in rank order; the same on every rank.

    Args:
        table: the rewards, with the scores of step rewards.
        lengths: long ``[N]``, tokens that the policy made, without tool output, as TRL counts them.
        tokens: long ``[N]``, tokens of each completion, tool output included.
        truncated: bool ``[N]``, whether the length limit ended it.
        rows: long ``[N]``, row number in the data set, −1 if unknown (``prompt_order.row_numbers``).
    """

    table: RewardTable
    lengths: Tensor
    tokens: Tensor
    truncated: Tensor
    rows: Tensor

    def picked(self, index: Tensor) -> Rewarded:
        """Return the rows ``index`` (long ``[M]``, whole groups), in that order."""
        index = index.to(self.table.values.device)
        place = index.to(self.lengths.device)
        return Rewarded(self.table.picked(index), **{name: getattr(self, name)[place] for name in _OF_ROWS})

    @staticmethod
    def joined(parts: Sequence[Rewarded]) -> Rewarded:
        """Return the rows of several generations, one after the other."""
        first = parts[0].table
        steps = {column: StepTable.joined([part.table.steps[column] for part in parts]) for column in first.steps}
        of_rows = {name: torch.cat([getattr(part, name) for part in parts]) for name in _OF_ROWS}
        values = torch.cat([part.table.values for part in parts])
        tasks = None
        if first.tasks is not None:
            tasks = torch.cat([part.table.tasks for part in parts])  # type: ignore[misc]
        return Rewarded(replace(first, values=values, steps=steps, lengths=of_rows["lengths"], tasks=tasks), **of_rows)


@dataclass(frozen=True)
class Scored:
    """Completions with their rewards: those of one generation, or those that were kept of several
    (``dead_groups: resample``).

    Args:
        batch: this rank's rows as TRL returns them. Its ``advantages`` are TRL's until ours replace them.
        rewarded: rewards of all ranks' rows.
        forwards: which of TRL's forward passes were replaced or put off for this batch.
        columns: TRL's logged table of these completions, by column; None unless rows may be resampled.
        rounds: number of generations that were made for the rows.
    """

    batch: dict[str, Any]
    rewarded: Rewarded
    forwards: GenerationForwards
    columns: dict[str, list[Any]] | None = None
    rounds: int = 1


@dataclass(frozen=True)
class Penalised:
    """Rows and rewards from which advantages are computed.

    Args:
        scored: the selected rows.
        table: their rewards, with ``local``, and with a column for the KL if it is charged per completion.
        charged: float64 ``[B, T]``, −β·k of each token; only if the KL is charged per token.
        to_go: float64 ``[B, T]``, the discounted sum of ``charged`` from each token on, which is added to the token's
            advantage; only if the KL is charged per token.
    """

    scored: Scored
    table: RewardTable
    to_go: Tensor | None = None
    charged: Tensor | None = None

    @property
    def local(self) -> LocalRows:
        """This rank's rows of the table."""
        assert self.table.local is not None
        return self.table.local


def local_rows(trainer: Collectives, batch: dict[str, Any]) -> slice:
    """Return the slice of a tensor of all ranks' rows that holds those of this rank, which are in ``batch``."""
    rows = batch["prompt_ids"].size(0)
    rank = trainer.accelerator.process_index
    return slice(rows * rank, rows * (rank + 1))


def whole_completions(trainer: Numbers) -> contextlib.AbstractContextManager[Any]:
    """Return a context for TRL's generation in which TRL masks no truncated completion, if that is to be done later
    (``mask_cut``)."""
    if not _masks_later(trainer):
        return contextlib.nullcontext()
    return trl_bridge.replaced(trainer, "mask_truncated_completions", False)


def with_local_rows(trainer: UpdatePort, scored: Scored, table: RewardTable, before: int = 0) -> RewardTable:
    """Return ``table`` with ``local``: where this rank's rows of ``scored`` are in it, their lengths, and the mask of
    the tokens that will carry loss, also if truncated completions are only masked later.

    Args:
        before: number of rows of the table before those of ``scored`` (``resample``: the groups kept so far).
    """
    mask = loss_mask(scored.batch)
    mine = local_rows(trainer, scored.batch)
    if _masks_later(trainer):
        mask = mask & _uncut(trainer, scored)
    place = slice(before + mine.start, before + mine.stop)
    local = LocalRows(place, mask, scored.rewarded.tokens[mine], over_ranks=functools.partial(_sum_over_ranks, trainer))
    return replace(table, local=local)


def _sum_over_ranks(trainer: Collectives, numbers: Tensor) -> Tensor:
    """Return the sums of ``numbers`` over all ranks, on the device of ``numbers``. A collective."""
    if trainer.accelerator.num_processes == 1:
        return numbers
    here = numbers.to(trainer.accelerator.device)
    summed: Tensor = trainer.accelerator.reduce(here, reduction="sum")
    return summed.to(numbers.device)


def mask_cut(trainer: UpdatePort, scored: Scored) -> None:
    """Mask, in ``scored.batch``, the truncated completions that TRL was kept from masking (``whole_completions``), and
    set TRL's token count ``num_items_in_batch``. Else do nothing."""
    if _masks_later(trainer):
        batch = scored.batch
        kept = _uncut(trainer, scored)
        names = batch.keys() & {"completion_mask", "tool_mask"}
        batch |= {name: batch[name] * kept.to(batch[name]) for name in names}
        batch["num_items_in_batch"] = trainer.accelerator.gather(loss_mask(batch).sum()).sum()


def _uncut(trainer: Collectives, scored: Scored) -> Tensor:
    """Return bool ``[B, 1]``: which of this rank's completions were not truncated."""
    return ~scored.rewarded.truncated[local_rows(trainer, scored.batch)].unsqueeze(1)


def _masks_later(trainer: Numbers) -> bool:
    """Return whether truncated completions are masked after the KL penalty and not by TRL."""
    objective = trainer.algorithm.objective
    in_reward = objective is not None and objective.kl_in_reward is not None
    return bool(trainer.args.mask_truncated_completions and in_reward)
