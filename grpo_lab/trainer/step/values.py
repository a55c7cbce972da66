"""The critic's values: at generation, in the forward of a micro-batch or bin, and in the loss.

The value loss is one more term per token, averaged as the policy's: loss_t = policy_t + vf_coef · value_t. It reads
every token of the policy, whatever its advantage, so that no row can be left out (``LiveConditions.value_loss``).
"""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from grpo_lab.batch import TokenBatch, safe
from grpo_lab.objectives.value_loss import value_clip_acts, value_loss
from grpo_lab.trainer import trl_bridge
from grpo_lab.trainer.carried import Carried, loss_mask
from grpo_lab.trainer.critic import is_warming_up
from grpo_lab.trainer.step.log_probs import forwards_in_bins

if TYPE_CHECKING:
    from grpo_lab.trainer.ports import StepPort
    from grpo_lab.trainer.rows import Bin


def hears_values(trainer: StepPort, model: Any) -> contextlib.AbstractContextManager[list[Tensor]]:
    """Context for a training forward: gives the list that its values ``[B, L - 1]`` will be in; nothing happens without
    a critic."""
    if trainer.algorithm.value is None:
        return contextlib.nullcontext([])
    return trl_bridge.values_heard(trainer, model, trunk_learns=not is_warming_up(trainer))


def values_of_bin(heard: list[Tensor], rows: Bin) -> Tensor | None:
    """``[n, T]`` of a bin's forward, 0 beyond a completion."""
    if not heard:
        return None
    return heard[0].gather(1, rows.take).masked_fill(~rows.fields["completion_mask"].bool(), 0.0)


def values_of_micro_batch(heard: list[Tensor], width: int) -> Tensor | None:
    """``[B, T]`` of TRL's forward of a micro-batch."""
    return heard[0][:, -width:] if heard else None


def token_loss(trainer: StepPort, batch: TokenBatch) -> Tensor:
    """``[B, T]``: the policy's loss (the hook ``token_loss``) and, with a critic, vf_coef times its own; in its warm-up
    the latter alone."""
    value = trainer.algorithm.value
    if value is None:
        return trainer.token_loss(batch)
    assert batch.values is not None
    old, returns, mask = _targets(batch)
    critics = safe(value_loss(safe(batch.values, mask), old, returns, value.cliprange_value), mask)
    # the zero keeps the policy in the graph, where DDP looks for it
    policy = safe(0.0 * batch.logps, batch.mask) if is_warming_up(trainer) else trainer.token_loss(batch)
    return policy + value.vf_coef * critics


def _targets(batch: TokenBatch) -> tuple[Tensor, Tensor, Tensor]:
    """Old values and returns (0 where there are none), and bool ``[B, T]``: where there are. A completion that nobody
    could score has none."""
    carried = Carried(batch.extras)
    old, returns = carried.old_values, carried.returns
    assert old is not None
    assert returns is not None
    mask = batch.mask & ~returns.isnan()
    return safe(old, mask), safe(returns, mask), mask


@torch.no_grad()
def value_metrics(trainer: StepPort, batch: TokenBatch) -> dict[str, Tensor]:
    """Per token ``[B, T]``, for the log: the critic's loss, where its clip acts, and how far the policy has moved,
    ½(log π − log π_old)²."""
    value = trainer.algorithm.value
    if value is None or batch.values is None:
        return {}
    old, returns, mask = _targets(batch)
    found = safe(batch.values, mask)
    return {
        "value/loss": safe(value_loss(found, old, returns, value.cliprange_value), mask),
        "value/clip_fraction": safe(value_clip_acts(found, old, returns, value.cliprange_value).float(), mask),
        "policy/approx_kl": 0.5 * safe(batch.logps - batch.old_logps, batch.mask).square(),
    }


@torch.no_grad()
def values_at_generation(trainer: StepPort, batch: dict[str, Any]) -> Tensor:
    """``[B, T]`` of this rank's completions, 0 where a token is not the policy's: in bins where those are exact, else
    as TRL forwards."""
    mask = loss_mask(batch)
    return safe(_in_bins(trainer, batch) if _bins_are_exact(trainer, batch) else _as_trl(trainer, batch), mask)


def _bins_are_exact(trainer: StepPort, batch: dict[str, Any]) -> bool:
    if not trainer.model.training or trl_bridge.is_multimodal(batch):
        return False
    return trainer.exact_update.verdict.now().stock is None


def _in_bins(trainer: StepPort, batch: dict[str, Any]) -> Tensor:
    def of(part: Bin) -> Tensor:
        nothing = torch.full_like(part.labels, -100)  # no log-prob is asked for: the LM head has nothing to do
        with trl_bridge.values_heard(trainer, trainer.model) as heard:
            trl_bridge.completion_log_probs(trainer, trainer.model, *replace(part, labels=nothing).inputs)
        return heard[0]

    return forwards_in_bins(trainer, trainer.model, batch, of)


def _as_trl(trainer: StepPort, batch: dict[str, Any]) -> Tensor:
    width, args = batch["completion_ids"].size(1), trainer.args
    size = args.per_device_train_batch_size if trainer.model.training else args.per_device_eval_batch_size
    with trl_bridge.without_checkpointing(trainer), trl_bridge.values_heard(trainer, trainer.model) as heard:
        trl_bridge.stock_forward(trainer, trainer.model, batch, batch_size=size)
    return torch.cat([values[:, -width:] for values in heard])
