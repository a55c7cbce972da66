"""Order of the prompts: our samplers replace TRL's `RepeatSampler`, learn from the run, and are kept in the checkpoint.

    sampler: {name: prioritized}                                     P(i) ∝ max(1 − s_i, floor), s_i: pass rate so far
    sampler: {name: curriculum, pass_rate_column: pass_rate}         easy → hard
    sampler: {name: uniform_then_hard, uniform_rounds: 50}           all problems first, then those below `hard_below`
    tasks: {arithmetic: {weight: 3}, sorting: {}}                    each task by its weight

The samplers are in `grpo_lab/curation` (formulas, sources). For `prioritized` the data set gets a column with each
row's number. So a reward counts for its problem even if the prompt was drawn by `update.dead_groups: resample` and not
by the sampler.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import gather_object
from datasets import Dataset
from torch import Tensor

from grpo_lab.curation import (
    CurriculumSampler,
    MixtureSampler,
    PrioritizedSampler,
    RoundSampler,
    UniformThenHardSampler,
)
from grpo_lab.rewards.for_task import COLUMN
from grpo_lab.trainer.metrics.book import MetricBook
from grpo_lab.trainer.resume.state import STATE, SavedState
from grpo_lab.trainer.settings.parse import LabSettings
from grpo_lab.trainer.settings.sampler import KNOBS, SamplerSettings
from grpo_lab.trainer.trl_bridge.rewards import correctness_columns
from grpo_lab.verifiers.verdict import CORRECT_FROM

ROW_COLUMN = "grpo_lab_row"


def with_row_numbers(settings: SamplerSettings | None, dataset: Any, reward_funcs: Any) -> Any:
    """Return the data set, with a column of row numbers (``ROW_COLUMN``) if the sampler is ``prioritized``. Raise
    ValueError if the data set or the rewards lack what the sampler needs."""
    if settings is None:
        return dataset
    if dataset is None:
        raise ValueError(
            f"`sampler`={settings.name!r} draws rows of `train_dataset`, and there is none (an environment makes the "
            "prompts): give a data set, or leave `sampler` out"
        )
    if not isinstance(dataset, Dataset):
        raise ValueError(f"`sampler` draws rows by number: give it a Dataset, not a {type(dataset).__name__}")
    column = settings.column
    if column is not None and column not in dataset.column_names:
        raise ValueError(
            f"`sampler.pass_rate_column` is {column!r}, which `train_dataset` lacks; it has {dataset.column_names}. "
            "`grpo-lab curate` writes pass rates"
        )
    if settings.name != "prioritized":
        return dataset
    if isinstance(reward_funcs, (list, tuple)):
        rewards = list(reward_funcs)
    else:
        rewards = [reward_funcs]
    if not correctness_columns(rewards):
        raise ValueError(
            "`sampler: prioritized` needs a reward that measures correctness, and none of `reward_funcs` does: an "
            "AccuracyReward, a function called accuracy_reward, or one with the attribute measures_correctness = True"
        )
    if ROW_COLUMN in dataset.column_names:
        dataset = dataset.remove_columns(ROW_COLUMN)
    return dataset.add_column(ROW_COLUMN, list(range(len(dataset))))


def row_numbers(inputs: Iterable[Mapping[str, Any]]) -> list[int]:
    """Return each completion's row number in the data set; −1 if it is not known (evaluation, other samplers)."""
    return [int(row.get(ROW_COLUMN, -1)) for row in inputs]


class PromptOrder:
    """Builds the sampler of a training, updates it with rewards, and saves its state. Does nothing if neither
    ``sampler`` nor ``tasks`` is set.

    Args:
        group_size: completions per prompt.
        every: micro-batches trained on per generation batch, for each of which the sampler repeats the batch's prompts.

    Attributes:
        sampler: the sampler in use; None if it is TRL's.
    """

    holds = "with `sampler` what it knows of the prompts, with `tasks` how they are shared out"

    def __init__(self, settings: LabSettings, args: Any, group_size: int, every: int) -> None:
        self.settings = settings.sampler
        self._tasks = settings.tasks
        self._args = args
        self._group_size = group_size
        self._every = every
        self.sampler: RoundSampler | None = None

    def built(self, dataset: Any) -> RoundSampler | None:
        """Build the sampler for ``dataset``, which yields rows in the pattern of TRL's `RepeatSampler`, keep it and
        return it. Return None if TRL's own is to be used. Raise ValueError if the data set does not fit it."""
        settings = self.settings
        if settings is None and not self._tasks:
            return None
        shape = {"mini_repeat_count": self._group_size, "repeat_count": self._every, "seed": self._args.seed}
        shape["batch_size"] = self._args.generation_batch_size // self._group_size
        if settings is None:
            return self._of_tasks(dataset, shape)
        rates = None
        if settings.column:
            rates = list(dataset[settings.column])
        how: dict[str, Any] = {knob: settings[knob] for knob in KNOBS[settings.name] if knob != "pass_rate_column"}
        try:
            if settings.name == "prioritized":  # a problem without a pass rate (nothing was scorable) starts from 0
                initial: float | list[float] = 0.0
                if rates is not None:
                    initial = [0.0 if rate is None else float(rate) for rate in rates]
                self.sampler = PrioritizedSampler(dataset, **shape, initial=initial, **how)
            elif settings.name == "curriculum":
                self.sampler = CurriculumSampler(dataset, rates, **shape, **how)
            else:
                self.sampler = UniformThenHardSampler(dataset, rates, **shape, **how)
        except ValueError as error:
            raise ValueError(f"`sampler`: {error}") from error
        return self.sampler

    def _of_tasks(self, dataset: Any, shape: dict[str, int]) -> RoundSampler:
        """Build a sampler whose batches hold each task by its weight. ``shape``: the pattern of TRL's sampler."""
        numbers = {name: number for number, name in enumerate(self._tasks)}
        weights = [task.weight for task in self._tasks.values()]
        try:
            self.sampler = MixtureSampler(dataset, [numbers[name] for name in dataset[COLUMN]], weights, **shape)
        except ValueError as error:
            raise ValueError(f"`tasks` {list(self._tasks)}: {error}") from error
        return self.sampler

    def learn(self, rows: Tensor, correct: Tensor | None) -> None:
        """Update a ``prioritized`` sampler with the completions of all ranks.

        Args:
            rows: long ``[N]``, the row number of each completion; −1 if it is not known.
            correct: ``[N]``, correctness rewards, NaN if unscorable; None if no reward measures correctness.
        """
        if isinstance(self.sampler, PrioritizedSampler) and correct is not None:
            for row, successes, trials in outcomes(rows, correct):
                self.sampler.update(row, successes, trials)

    def record(self, book: MetricBook) -> None:
        """Log the share of prompts that were tried so far, and the share whose weight is the floor, for a
        ``prioritized`` sampler; called once per generation batch."""
        if isinstance(self.sampler, PrioritizedSampler):
            seen = self.sampler.trials > 0
            at_floor = self.sampler.weights <= self.sampler.floor
            book.add_alike("sampler/seen_share", seen.sum(), self.sampler.num_samples)
            book.add_alike("sampler/at_floor_share", at_floor.sum(), self.sampler.num_samples)

    def save(self, _folder: Path) -> dict[str, Any] | None:
        """Return the sampler's state for the checkpoint; None without a sampler of ours. Every rank calls this. Raise
        RuntimeError if the samplers of the ranks differ."""
        if self.sampler is None:
            return None
        prints = gather_object([self.sampler.fingerprint()])
        if len(set(prints)) > 1:
            raise RuntimeError(f"the sampler differs between ranks ({prints}): they would draw other prompts")
        return dict(self.sampler.state_dict())

    def load(self, saved: SavedState | None) -> None:
        """Restore the sampler's state, before the first batch of the resumed epoch is drawn. Raise ValueError if the
        checkpoint has none, or one of other data."""
        if self.sampler is None or saved is None:
            return
        setting = "sampler" if self.settings else "tasks"
        if "sampler" not in saved.entries:
            raise ValueError(
                f"`resume_from_checkpoint`: {saved.checkpoint} was written without `{setting}` (no entry in its "
                f"{STATE}); resume with the settings of the run, or leave `{setting}` out"
            )
        try:
            self.sampler.load_state_dict(saved.entries["sampler"])
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"`resume_from_checkpoint`: {saved.checkpoint} does not fit this run: {error}") from error


def outcomes(rows: Tensor, correct: Tensor) -> list[tuple[int, int, int]]:
    """Return (row number, right completions, scorable completions) for each row of the data set that has a scorable
    completion, in ascending order. ``rows`` and ``correct`` are as in ``PromptOrder.learn``."""
    known = (rows >= 0) & ~correct.isnan().to(rows.device)
    found, place = torch.unique(rows[known], return_inverse=True)
    right = (correct.to(rows.device)[known] >= CORRECT_FROM).long()
    successes = torch.zeros_like(found).index_add_(0, place, right)
    trials = torch.zeros_like(found).index_add_(0, place, torch.ones_like(right))
    return list(zip(found.tolist(), successes.tolist(), trials.tolist(), strict=True))
