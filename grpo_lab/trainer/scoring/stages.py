"""The stages from completions to advantages, one function each; ``LabTrainer`` names them in the order in which they happen."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import Tensor

from grpo_lab.rewards.protocol import scope_of
from grpo_lab.trainer import trl_bridge
from grpo_lab.trainer.carried import Carried, loss_mask
from grpo_lab.trainer.metrics.by_length import length_quartiles, record_by_length
from grpo_lab.trainer.scoring.advantages import checked_advantages
from grpo_lab.trainer.scoring.kl_penalty import mask_cut, penalised, whole_completions
from grpo_lab.trainer.scoring.resample import DEAD_GROUP, dead_rows
from grpo_lab.trainer.scoring.reward_table import (
    Scored,
    as_trl_calls_it,
    check_finite,
    fill_group_rewards,
    gathered_rows,
    nan_counts,
    truncated_rows,
)
from grpo_lab.trainer.scoring.scored import record_not_numbers, scored_by
from grpo_lab.trainer.scoring.steps import StepCalled, mean_advantage, token_advantages
from grpo_lab.trainer.step.log_probs import GenerationForwards

if TYPE_CHECKING:
    from grpo_lab.trainer.ports import StepPort


def rewards_of_all(trainer: StepPort, trls: Callable[..., Tensor], group_size: int, *of_rows: Any) -> Tensor:
    """TRL's ``_calculate_rewards`` with each reward checked and group rewards completed after the gather, ``[N, F]``."""
    inputs, prompts, completions, ids = of_rows
    names = tuple(trainer.reward_func_names)
    seams = [as_trl_calls_it(reward, name) for reward, name in zip(trainer.reward_funcs, names, strict=True)]
    with trl_bridge.replaced(trainer, "reward_funcs", seams):
        values = trls(*of_rows)
    check_finite(values, names)
    not_numbers = nan_counts(seams, values, trainer.accelerator)
    if trainer._scoring is not None:
        trainer._scoring.steps = {i: seam.steps for i, seam in enumerate(seams) if isinstance(seam, StepCalled)}
    if any(scope_of(reward) == "group" for reward in trainer.reward_funcs):
        cut = truncated_rows(ids, {*trainer.eos_token_ids, trainer._tokenizer.pad_token_id})
        rows = gathered_rows(trainer, inputs, prompts, completions, ids, cut)
        progress = (trainer.state.global_step, trainer.state.max_steps)
        group = fill_group_rewards(values, names, trainer.reward_funcs, rows, group_size, progress)
        values, not_numbers = group[0], not_numbers + group[1]
    record_not_numbers(trainer, not_numbers, values.size(0))
    return values


def score(
    trainer: StepPort, trls: Callable[[Any], dict[str, Any]], inputs: Any
) -> tuple[dict[str, Any], Scored, dict[str, Tensor], GenerationForwards]:
    """TRL's completions and rewards; which of its forwards are replaced or put off."""
    forwards = GenerationForwards.of(trainer)
    with forwards.instead_of_trls(trainer) as put_off, whole_completions(trainer), scored_by(trainer) as found:
        output = trls(inputs)
    if trainer.rollout_func is not None:  # its mask may come now and then, or on one rank only
        output.setdefault("tool_mask", output["completion_mask"])
    scored, mode, mine = found.taken(), trainer.recorder.mode(), local_rows(trainer, output)
    sampled = mask_cut(trainer, output, scored.truncated[mine])
    if forwards.corrected:
        Carried(output).length_quartile = length_quartiles(scored.lengths)[mine]
    if put_off:
        Carried(output).old_logps = Carried(output).sampler_weights = None
        trl_bridge.forget_sampling_metrics(trainer, mode)
    elif forwards.corrected:
        record_by_length(trainer, output, loss_mask(output), mode)
    if trainer.lab_settings.update.dead_groups == "resample":
        output[DEAD_GROUP] = dead_rows(scored).to(output["prompt_ids"].device)[mine]
    return output, scored, sampled, forwards


def set_advantages(trainer: StepPort, output: dict[str, Any], scored: Scored, sampled: dict[str, Tensor]) -> None:
    """Our advantages in the place of TRL's, where they are ours."""
    table = scored.table
    kl = trainer.algorithm.objective.kl_in_reward if trainer.algorithm.objective is not None else None
    if kl is None and not trainer.replaces_trls_advantages:
        return  # TRL's own stay
    if kl is not None:
        table = penalised(trainer, output, table, kl, sampled)
    mine = local_rows(trainer, output)
    if scored.steps:
        width = output["completion_ids"].size(1)
        per_token = token_advantages(trainer.algorithm.advantage, table, scored.steps, mine, width)
        output["advantages"] = per_token.to(output["advantages"])
        logged = mean_advantage(trainer, output["advantages"], loss_mask(output))
        trl_bridge.replace_logged_advantages(trainer, logged)
        return
    advantages = checked_advantages(trainer.compute_advantages(table), table)
    output["advantages"] = advantages[mine].to(output["advantages"])
    trl_bridge.replace_logged_advantages(trainer, advantages)


def local_rows(trainer: StepPort, output: dict[str, Any]) -> slice:
    """This rank's rows of what was gathered."""
    rows, rank = output["prompt_ids"].size(0), trainer.accelerator.process_index
    return slice(rows * rank, rows * (rank + 1))
