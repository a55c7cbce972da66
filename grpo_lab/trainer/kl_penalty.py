"""A KL penalty in the reward: one more column of the reward table, minus β·KL of each completion."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from grpo_lab.batch import RewardTable
from grpo_lab.trainer import trl_bridge
from grpo_lab.trainer.log_probs import GenerationForwards, log_probs_in_bins

if TYPE_CHECKING:
    from grpo_lab.trainer.lab_trainer import LabTrainer


def check_kl_in_reward(trainer: LabTrainer) -> None:
    """TRL's own advantages are made before the penalty is known, so an advantage rule of ours must make them.

    Raises:
        ValueError: there is none.
    """
    objective = trainer.algorithm.objective
    if objective is None or objective.kl_in_reward is None or trainer.has_own_advantages:
        return
    raise ValueError(
        "`kl.placement` is 'reward', but advantages are left to TRL, which makes them before the penalty is known; set "
        "`objective` (e.g. 'reinforce') or `advantage` (e.g. 'leave_one_out'), or override `compute_advantages`"
    )


def penalised(trainer: LabTrainer, output: dict[str, Any], table: RewardTable, kl: Any, mask: Tensor) -> RewardTable:
    """Rewards minus β·KL of each completion; needs the log-probs at generation, so they are computed here."""
    old = output.get("old_per_token_logps")
    if old is None:  # the loss does not read these: it takes its own forward's (``old_policy``)
        old = _log_probs_at_generation(trainer, output)
    penalty = trainer.accelerator.gather(kl.in_reward(old, output["ref_per_token_logps"], mask))
    book = trainer.metric_book(trainer._mode())
    book.add_alike("kl/reward_penalty", penalty.sum(), penalty.numel())
    column = (-kl.coefficient * penalty).unsqueeze(1).to(table.values)
    column = column.masked_fill(table.values.isnan().all(dim=1, keepdim=True), float("nan"))
    return RewardTable(
        torch.cat([table.values, column], dim=1),
        (*table.names, "kl"),
        torch.cat([table.weights, torch.ones(1)]),
        table.group_size,
    )


@torch.no_grad()
def _log_probs_at_generation(trainer: LabTrainer, output: dict[str, Any]) -> Tensor:
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
