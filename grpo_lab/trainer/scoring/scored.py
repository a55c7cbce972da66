"""Score and record: the first and the last of the stages from completions to advantages.

TRL has no hook between rewards and advantages. While its ``_generate_and_score_completions`` runs, ``Scoring``
intercepts its call of ``self._calculate_rewards``. So advantages, metrics, sampler and resampling use what the
*outermost* override of that method returned, even if a team's override changes the rewards or does not call
``super()``.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from grpo_lab.batch import RewardTable
from grpo_lab.engines.grouping import EngineFault
from grpo_lab.trainer import trl_bridge
from grpo_lab.trainer.generation.prompt_order import row_numbers
from grpo_lab.trainer.metrics.book import length_quartiles, record_by_length, reward_metrics
from grpo_lab.trainer.metrics.token_weight_log import pass_rates
from grpo_lab.trainer.metrics.turn_metrics import record_turns
from grpo_lab.trainer.ports import Faults, StepPort, row_key
from grpo_lab.trainer.ranks import named_place
from grpo_lab.trainer.row_table import Carried, loss_mask
from grpo_lab.trainer.scoring.carriers import Rewarded, Scored, local_rows, whole_completions
from grpo_lab.trainer.scoring.resample import alike
from grpo_lab.trainer.scoring.reward_table import correctness, gathered_steps, truncated_rows, without_infinite
from grpo_lab.trainer.scoring.task_rows import mark_tasks, record_by_task, task_numbers
from grpo_lab.trainer.settings.inputs import completion_limit
from grpo_lab.trainer.settings.limits import kept_by_engine
from grpo_lab.trainer.step.log_probs import GenerationForwards
from grpo_lab.trainer.step.sampler_weights import check_reported, needs_batch, weigh_batch


class Scoring:
    """Wraps TRL's ``_generate`` and ``_calculate_rewards`` for one generation batch, and keeps what they returned.

    Attributes:
        seen: the rewards of the batch, once ``reward`` was called.
    """

    def __init__(self, trainer: StepPort) -> None:
        self._trainer = trainer
        self.seen: Rewarded | None = None
        self._made: list[int] | None = None
        self._keys: list[int] = []

    def generate(self, trls: Callable[[list[Any]], Any], prompts: list[Any]) -> Any:
        """Call TRL's ``_generate`` (``trls``) and return what it returns. Count the tokens that the policy made, before
        TRL masks truncated completions, and remove log-probs that are not finite (``without_faulty``)."""
        generated = trls(prompts)
        prompt_ids, ids, tool_mask = generated[:3]
        if tool_mask is None:
            self._made = [len(row) for row in ids]
        else:
            self._made = [sum(mask) for mask in tool_mask]
        faults = self._trainer.recorder.faults_in_training
        if faults is not None:
            self._keys = [row_key(*row) for row in zip(prompt_ids, ids, strict=True)]
        if self._trainer.recorder.faults is not None:
            without_faulty(generated[4], tool_mask, faults)
        return generated

    def reward(
        self, trls: Callable[..., Any], inputs: Any, prompts: Any, completions: Any, completion_ids_list: Any
    ) -> Tensor:
        """Call the outermost ``_calculate_rewards`` (``trls``) and return its values ``[N, F]``, with NaN for infinite
        ones. Keep them in ``seen``, with lengths, truncation, row numbers and tasks of all ranks' rows. A collective.

        Raises:
            ValueError: the method returned something else than a tensor ``[N, F]``.
        """
        trainer = self._trainer
        faults = self._trainer.recorder.faults_in_training
        trainer.step_scores = {}
        values = trls(inputs, prompts, completions, completion_ids_list)
        tokens = [len(ids) for ids in completion_ids_list]
        cut = truncated_rows(trainer, completion_ids_list)
        of_tasks = task_numbers(trainer, inputs)
        of_rows = list(zip(self._made or tokens, tokens, cut, row_numbers(inputs), of_tasks, strict=True))
        with named_place("lengths of all completions"):
            gathered = trainer.accelerator.gather(torch.tensor(of_rows, device=trainer.accelerator.device))
        lengths, tokens_in_all, truncated, numbers, tasks = gathered.unbind(1)
        names = tuple(trainer.reward_func_names)
        size = trainer.current_group_size
        home = trl_bridge.home_of(trainer, "_calculate_rewards")
        _refuse_other_shape(values, lengths.numel(), names, home)
        values = without_infinite(values, names, faults, f"`{home}._calculate_rewards`, column {{}},")
        steps = gathered_steps(trainer.step_scores, size)
        weights = trainer.reward_weights.detach().cpu()
        of_all = tasks if trainer.lab_settings.tasks else None
        table = RewardTable(values, names, weights, size, steps=steps, lengths=lengths, tasks=of_all)
        self.seen = Rewarded(table, lengths, tokens_in_all, truncated.bool(), numbers)
        if trainer.lab_settings.rollout.turns is not None:
            record_turns(inputs, table, trainer.accelerator, trainer.recorder.book())
        if faults is not None and self._keys:
            first = trainer.accelerator.process_index * len(self._keys)
            faults.scored(names, self._keys, values[first : first + len(self._keys)].tolist(), first)
        return values


def _refuse_other_shape(values: Any, rows: int, names: tuple[str, ...], home: str) -> None:
    """Raise ValueError unless ``values`` is a tensor ``[rows, rewards]``; a team's ``_calculate_rewards``, that of the
    class ``home``, may return anything."""
    shape = (rows, len(names))
    if not isinstance(values, Tensor):
        seen = f"a {type(values).__name__}"
    elif tuple(values.shape) != shape:
        seen = f"shape {tuple(values.shape)}"
    else:
        return
    raise ValueError(
        f"`{home}._calculate_rewards` returned {seen}; it must return a float tensor {list(shape)}: one row per "
        f"completion of all processes (gathered, in rank order), one column per reward {list(names)}"
    )


def without_faulty(
    logprobs: list[list[float | None]] | None, sampled: list[list[int]] | None, faults: Faults | None
) -> None:
    """Replace the engine's log-probs that are NaN or infinite by None, which TRL weights with 1, and mark the batch as
    bad.

    Args:
        logprobs: ``[completion][token]``, changed in place; None if the engine returned none.
        sampled: TRL's ``tool_mask``, 0 for a token that the policy did not sample (a tool's answer, the end of a
            thinking budget); the log-prob of such a token is NaN and stays.
        faults: the guard's record; None in an evaluation.

    Raises:
        EngineFault: there is such a log-prob in an evaluation, which has no step to leave out.
    """
    for row, of_tokens in enumerate(logprobs or []):
        made = [1] * len(of_tokens) if sampled is None else sampled[row]
        numbers = [(token, value) for token, value in enumerate(of_tokens) if made[token] and value is not None]
        bad = [token for token, value in numbers if not math.isfinite(value)]
        if not bad:
            continue
        said = f"the engine's log-prob of token {bad[0]} of completion {row} is {of_tokens[bad[0]]}"
        if faults is None:
            raise EngineFault(f"{said}; its weights or its KV cache hold NaN or infinity")
        faults.found("log_prob", said)
        for token in bad:
            of_tokens[token] = None


def score(trainer: StepPort, trls: Callable[[Any], dict[str, Any]], inputs: Any) -> Scored:
    """Generate and score a batch by TRL's method; return the completions with their rewards, and log the latter.

    Args:
        trls: TRL's ``_generate_and_score_completions``.
        inputs: this rank's rows of the data set.

    Raises:
        RuntimeError: a team's method made the batch without calling ``_calculate_rewards``.
    """
    forwards = GenerationForwards.of(trainer)
    found = Scoring(trainer)
    with (
        forwards.instead_of_trls(trainer) as put_off,
        whole_completions(trainer),
        trl_bridge.offers_hidden(trainer.lab_settings.rollout.turns is not None),
        trl_bridge.scored_through(trainer, found.generate, found.reward),
    ):
        batch = trls(inputs)
    if trainer.rollout_func is not None:  # which may return a mask for some batches only, or on one rank only
        batch.setdefault("tool_mask", batch["completion_mask"])
    check_reported(trainer, batch)
    if put_off:
        Carried(batch).proximal_logps = Carried(batch).sampler_weights = None
        trl_bridge.forget_sampling_metrics(trainer.recorder.trl_metrics)
    rewarded = found.seen
    if rewarded is None:
        raise RuntimeError(
            f"`{type(trainer).__name__}` made a generation batch without calling `_calculate_rewards`, so there are no "
            "rewards for advantages and metrics: call it where `_generate_and_score_completions` is replaced"
        )
    record_rewards(trainer, rewarded)
    resamples = trainer.lab_settings.update.dead_groups == "resample"
    columns = None
    if resamples:
        columns = trl_bridge.logged_rows(trainer.recorder.completions, rewarded.lengths.numel())
    return Scored(batch, rewarded, forwards, columns)


def record_rewards(trainer: StepPort, rewarded: Rewarded) -> None:
    """Log dead groups, lengths and correctness of all completions that were generated, also of those that are not
    selected; warn once, in training, if more than 20% were truncated."""
    table = rewarded.table
    recorder = trainer.recorder
    correct = correctness(table, trainer.reward_funcs)
    dead = alike(table)
    reward_metrics(recorder.book(), dead, rewarded.lengths, rewarded.truncated, correct)
    record_by_task(trainer, rewarded, dead)
    share = rewarded.truncated.float().mean().item()
    if recorder.mode() == "train" and share > 0.20:
        recorder.say(
            f"{share:.0%} of the completions were cut at max_completion_length={completion_limit(trainer.args)} tokens "
            f"(warned above 20%){'' if correct is None else ': cut answers count as wrong'}; raise the limit, or "
            "expect a length bias",
            key="truncated",
            level=logging.WARNING,
        )


def record(trainer: StepPort, scored: Scored, batch: dict[str, Any]) -> dict[str, Any]:
    """Write into this rank's rows what the update needs later, and return them, for TRL's buffer: sampler weights that
    need the whole batch, policy versions, kept tokens, tasks, length quartiles, pass rates and tokens by prompt, each
    if something reads it. Log how the sampler correction depends on length. A collective."""
    weigh_batch(trainer, batch, scored.forwards)
    scored.forwards.mark(batch)
    carried = Carried(batch)
    rows = batch["prompt_ids"].size(0)
    table = scored.rewarded.table
    mine = local_rows(trainer, batch)
    weighed = trainer.lab_settings.token_weights_every and trainer.model.training
    carried.policy_version = trainer.sampled_by(rows)
    if kept_by_engine(trainer.args) and trainer.model.training:
        carried.kept_tokens = trainer.vllm_generation.kept.tensor(batch["completion_ids"], batch["completion_mask"])
    mark_tasks(trainer, table, batch)
    if scored.forwards.corrected or weighed:
        carried.length_quartile = length_quartiles(scored.rewarded.lengths)[mine]
    if weighed:
        of_all = pass_rates(correctness(table, trainer.reward_funcs), len(table.values), table.group_size)
        carried.pass_rate = of_all[mine].to(batch["prompt_ids"].device)
    objective = trainer.algorithm.objective
    if objective is not None and objective.per_prompt:
        tokens = trainer.accelerator.gather(loss_mask(batch).sum(1))
        of_groups = tokens.view(-1, table.group_size).sum(1)
        carried.group_tokens = of_groups.repeat_interleave(table.group_size)[mine]
    how = trainer.correction
    if how is not None and carried.sampler_weights is not None and not needs_batch(how):  # TRL made it: not put off
        record_by_length(how, batch, loss_mask(batch), trainer.accelerator, trainer.recorder.book())
    return batch
