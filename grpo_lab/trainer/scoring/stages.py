"""Score and record: the first and the last of the stages from completions to advantages.

``LabTrainer`` names all of them in order: score → select (``resample``) → penalise (``kl_penalty``) → row advantages → token
advantages (``advantages``) → log-probs (``step.log_probs``) → record.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import Tensor

from grpo_lab.rewards.protocol import scope_of
from grpo_lab.trainer import trl_bridge
from grpo_lab.trainer.carried import Carried, loss_mask
from grpo_lab.trainer.metrics.book import reward_metrics
from grpo_lab.trainer.metrics.by_length import length_quartiles, record_by_length
from grpo_lab.trainer.scoring.carriers import Rewarded, Scored, local_rows
from grpo_lab.trainer.scoring.cut import whole_completions
from grpo_lab.trainer.scoring.dead import alike
from grpo_lab.trainer.scoring.reward_table import (
    as_trl_calls_it,
    correctness,
    fill_group_rewards,
    gathered_rows,
    nan_counts,
    truncated_rows,
    without_infinite,
)
from grpo_lab.trainer.scoring.scored import record_not_numbers, scored_by
from grpo_lab.trainer.scoring.steps import StepCalled
from grpo_lab.trainer.settings.inputs import completion_limit
from grpo_lab.trainer.step.log_probs import GenerationForwards

if TYPE_CHECKING:
    from grpo_lab.trainer.ports import StepPort

TRUNCATION_WARNING = 0.20


def rewards_of_all(trainer: StepPort, trls: Callable[..., Tensor], group_size: int, *of_rows: Any) -> Tensor:
    """TRL's ``_calculate_rewards`` with each reward checked and group rewards completed after the gather, ``[N, F]``."""
    inputs, prompts, completions, ids = of_rows
    names = tuple(trainer.reward_func_names)
    faults = trainer.recorder.faults_in_training
    guarded = faults is not None
    if faults is not None:
        faults.generation()
    seams = [as_trl_calls_it(reward, name, guarded) for reward, name in zip(trainer.reward_funcs, names, strict=True)]
    with trl_bridge.replaced(trainer, "reward_funcs", seams):
        values = trls(*of_rows)
    not_numbers = nan_counts(seams, values, trainer.accelerator)
    values = without_infinite(values, names, faults, "reward function {}")
    if trainer._scoring is not None:
        trainer._scoring.steps = {i: seam.steps for i, seam in enumerate(seams) if isinstance(seam, StepCalled)}
    if any(scope_of(reward) == "group" for reward in trainer.reward_funcs):
        cut = truncated_rows(ids, {*trainer.eos_token_ids, trainer._tokenizer.pad_token_id})
        rows = gathered_rows(trainer, inputs, prompts, completions, ids, cut)
        progress = (trainer.state.global_step, trainer.state.max_steps)
        group = fill_group_rewards(values, names, trainer.reward_funcs, rows, group_size, progress, guarded)
        values, not_numbers = group[0], not_numbers + group[1]
        values = without_infinite(values, names, faults, "group reward {}")
    record_not_numbers(trainer, not_numbers, values.size(0))
    return values


def score(trainer: StepPort, trls: Callable[[Any], dict[str, Any]], inputs: Any) -> Scored:
    """One generation: TRL's completions and rewards, and which of its forwards were replaced or put off."""
    forwards = GenerationForwards.of(trainer)
    with forwards.instead_of_trls(trainer) as put_off, whole_completions(trainer), scored_by(trainer) as found:
        batch = trls(inputs)
    if trainer.rollout_func is not None:  # its mask may come now and then, or on one rank only
        batch.setdefault("tool_mask", batch["completion_mask"])
    if put_off:
        Carried(batch).old_logps = Carried(batch).sampler_weights = None
        trl_bridge.forget_sampling_metrics(trainer, trainer.recorder.mode())
    rewarded = found.taken()
    record_rewards(trainer, rewarded)
    resamples = trainer.lab_settings.update.dead_groups == "resample"
    columns = trl_bridge.logged_rows(trainer, rewarded.lengths.numel()) if resamples else None
    return Scored(batch, rewarded, forwards, columns)


def record_rewards(trainer: StepPort, rewarded: Rewarded) -> None:
    """Groups alike, lengths and correctness of all that was generated into the book; many cut completions are said once."""
    table, book = rewarded.table, trainer.recorder.book()
    correct = correctness(table, trainer.reward_funcs)
    reward_metrics(book, alike(table), rewarded.lengths, rewarded.truncated, correct)
    share = rewarded.truncated.float().mean().item()
    if trainer.recorder.mode() == "train" and share > TRUNCATION_WARNING:
        trainer.recorder.say(
            f"{share:.0%} of the completions were cut at max_completion_length={completion_limit(trainer.args)} tokens "
            f"(warned above 20%){'' if correct is None else ': cut answers count as wrong'}; raise the limit, or expect a length bias",
            key="truncated",
            level=logging.WARNING,
        )


def record(trainer: StepPort, scored: Scored) -> dict[str, Any]:
    """The batch that goes to the buffer; how the sampler correction goes with length, of the rows that stay."""
    batch, forwards = scored.batch, scored.forwards
    if forwards.corrected:
        carried = Carried(batch)
        carried.length_quartile = length_quartiles(scored.rewarded.lengths)[local_rows(trainer, batch)]
        if carried.sampler_weights is not None:  # TRL made it: it was not put off
            record_by_length(trainer, batch, loss_mask(batch), trainer.recorder.mode())
    return batch


__all__ = ["record", "record_rewards", "rewards_of_all", "score"]
