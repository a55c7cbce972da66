"""A KL penalty in the reward: one more column of the reward table, minus β·KL of each completion."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from grpo_lab.batch import RewardTable
from grpo_lab.trainer import trl_bridge
from grpo_lab.trainer.carried import loss_mask
from grpo_lab.trainer.step.log_probs import GenerationForwards, log_probs_in_bins

if TYPE_CHECKING:
    from grpo_lab.trainer.ports import StepPort


NOTHING: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()


def check_kl_in_reward(trainer: StepPort) -> None:
    """TRL's own advantages are made before the penalty is known, so an advantage rule of ours must make them.

    Raises:
        ValueError: there is none.
    """
    objective = trainer.algorithm.objective
    if objective is None or objective.kl_in_reward is None or trainer.replaces_trls_advantages:
        return
    raise ValueError(
        "`kl.placement` is 'reward', but advantages are left to TRL, which makes them before the penalty is known; set "
        "`objective` (e.g. 'reinforce') or `advantage` (e.g. 'leave_one_out'), or override `compute_advantages`"
    )


def whole_completions(trainer: StepPort) -> contextlib.AbstractContextManager[Any]:
    """Context for TRL's generation: with a KL penalty in the reward, log-probs are of all that the policy sampled.

    ``mask_truncated_completions`` keeps cut completions out of the loss, and TRL masks their tokens before it asks for
    log-probs. In the reward they stay: they are in their group's baseline, so they pay for their KL like everybody else in it
    (else a group's baseline would be the higher, the more of it is cut). ``mask_cut`` masks them afterwards.
    """
    return trl_bridge.replaced(trainer, "mask_truncated_completions", False) if _masks_later(trainer) else NOTHING


def mask_cut(trainer: StepPort, output: dict[str, Any], cut: Tensor) -> dict[str, Tensor]:
    """What TRL would have masked in ``output``, and its token count; returns the masks of all that was sampled.

    Args:
        cut: bool ``[B]``, this rank's completions that the length limit ended.
    """
    sampled: dict[str, Tensor] = {n: output[n] for n in ("completion_mask", "tool_mask") if n in output}
    if _masks_later(trainer):
        kept = (~cut).unsqueeze(1)
        output.update({name: mask * kept.to(mask) for name, mask in sampled.items()})
        output["num_items_in_batch"] = trainer.accelerator.gather(loss_mask(output).sum()).sum()
    return sampled


def _masks_later(trainer: StepPort) -> bool:
    objective = trainer.algorithm.objective
    return bool(
        trainer.args.mask_truncated_completions and objective is not None and objective.kl_in_reward is not None
    )


def penalised(
    trainer: StepPort, output: dict[str, Any], table: RewardTable, kl: Any, sampled: dict[str, Tensor]
) -> RewardTable:
    """Rewards minus β·KL of each completion; needs the log-probs at generation, so they are computed here.

    Args:
        sampled: the masks of all that was sampled (``mask_cut``); ``output`` may hide cut completions from the loss.
    """
    old = output.get("old_per_token_logps")
    if old is None:  # the loss does not read these: it takes its own forward's (``old_policy``)
        old = _log_probs_at_generation(trainer, {**output, **sampled})
    of_each = kl.in_reward(old.double(), output["ref_per_token_logps"].double(), loss_mask({**output, **sampled}))
    penalty = trainer.accelerator.gather(of_each)
    book = trainer.recorder.book()
    book.add_alike("kl/reward_penalty", penalty.sum(), penalty.numel())
    column = (-kl.coefficient * penalty).unsqueeze(1).to(table.values)
    column = column.masked_fill(table.values.isnan().all(dim=1, keepdim=True), float("nan"))
    return RewardTable(
        torch.cat([table.values, column], dim=1),
        (*table.names, "kl"),
        torch.cat([table.weights, torch.ones_like(table.weights[:1])]),
        table.group_size,
        penalties=table.penalties + 1,
    )


@torch.no_grad()
def _log_probs_at_generation(trainer: StepPort, output: dict[str, Any]) -> Tensor:
    multimodal = {name: output.get(name) for name in trl_bridge.MULTIMODAL_FIELDS}
    if GenerationForwards.of(trainer).in_bins and not trl_bridge.is_multimodal(multimodal):
        return log_probs_in_bins(trainer, trainer.model, output)
    input_ids = torch.cat([output["prompt_ids"], output["completion_ids"]], dim=1)
    attention = torch.cat([output["prompt_mask"], output["completion_mask"]], dim=1)
    logps, _, _ = trainer._get_per_token_logps_and_entropies(
        trainer.model,
        input_ids,
        attention,
        output["completion_ids"].size(1),
        batch_size=trainer.args.per_device_train_batch_size,
        **multimodal,
    )
    return logps
