"""Completions that the length limit ended, under ``mask_truncated_completions``: out of the loss, and still in their group's baseline.

TRL masks their tokens before it asks for log-probs. With a KL penalty in the reward that is too early: they are in the baseline, so they
pay for their KL like everybody else in it (else a group's baseline would be the higher, the more of it is cut). There TRL is
told to mask nothing, and what it would have masked is masked here, once the penalty is known.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from torch import Tensor

from grpo_lab.trainer import trl_bridge
from grpo_lab.trainer.carried import loss_mask
from grpo_lab.trainer.scoring.carriers import Scored, local_rows

if TYPE_CHECKING:
    from grpo_lab.trainer.ports import StepPort

NOTHING: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()


def whole_completions(trainer: StepPort) -> contextlib.AbstractContextManager[Any]:
    """Context for TRL's generation: with a KL penalty in the reward, log-probs are of all that the policy sampled."""
    return trl_bridge.replaced(trainer, "mask_truncated_completions", False) if _masks_later(trainer) else NOTHING


def loss_tokens(trainer: StepPort, scored: Scored) -> Tensor:
    """bool ``[B, T]``: this rank's tokens that will carry loss, whether cut completions are masked yet or not."""
    mask = loss_mask(scored.batch)
    return mask & ~_cut(trainer, scored) if _masks_later(trainer) else mask


def mask_cut(trainer: StepPort, scored: Scored) -> None:
    """What TRL would have masked, and its token count."""
    if not _masks_later(trainer):
        return
    batch, kept = scored.batch, ~_cut(trainer, scored)
    batch.update({n: batch[n] * kept.to(batch[n]) for n in ("completion_mask", "tool_mask") if n in batch})
    batch["num_items_in_batch"] = trainer.accelerator.gather(loss_mask(batch).sum()).sum()


def _cut(trainer: StepPort, scored: Scored) -> Tensor:
    mine: Tensor = scored.rewarded.truncated[local_rows(trainer, scored.batch)]
    return mine.unsqueeze(1)


def _masks_later(trainer: StepPort) -> bool:
    objective = trainer.algorithm.objective
    return bool(
        trainer.args.mask_truncated_completions and objective is not None and objective.kl_in_reward is not None
    )


__all__ = ["loss_tokens", "mask_cut", "whole_completions"]
