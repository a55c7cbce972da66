"""Dynamic sampling: draw further prompts until the batch holds live groups only. Selection comes before advantages.
In a mixture a dead group is replaced by one of its task.

    a group is *alike*   if all its outcomes are equal, and so are all its step scores (``groups/dead_share``)
    a group is *dead*    if the rule in force gives none of its loss tokens a nonzero advantage; else it is *live*. In a
                         group that is alike, an advantage that rounding may explain (``ROUNDING``) counts as 0

With most rules a group is dead if and only if it is alike. Not so with ``raw`` and ``group_max``: a group in which
every completion is right is alike, and teaches what was right. So the rule itself is asked for advantages. It is asked
before any KL penalty, with which the rewards of almost every group would differ.

Source: DAPO (arXiv 2503.14476, §3.2, eq. 11). Off by default: it changes the *data distribution* (hard and easy
prompts, whose groups are mostly dead, appear less often than in the data set), and generation costs more (logged).
"""

from __future__ import annotations

import functools
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from grpo_lab.advantages import outcome_of, reads_token_energy
from grpo_lab.advantages.group import has_equal, is_dead
from grpo_lab.batch import RewardTable
from grpo_lab.rewards.for_task import COLUMN
from grpo_lab.trainer import trl_bridge
from grpo_lab.trainer.ports import StepPort
from grpo_lab.trainer.row_table import POSITION_OFFSET, RowTable
from grpo_lab.trainer.scoring.advantages import checked_advantages, with_equal_energies
from grpo_lab.trainer.scoring.carriers import Rewarded, Scored, local_rows, with_local_rows
from grpo_lab.trainer.step.log_probs import keep_copy

#: In a group that is alike, an advantage of at most this share of the reward may come from rounding. The mean of equal
#: float32 rewards is off by up to 6e-8 of them, and a rule may divide that by a standard deviation of 0 plus 1e-4.
ROUNDING = 1e-3
#: The same bound, absolute, for a group of rewards 0 in a batch whose mean is not 0: (N · 1e-16) / 1e-4 in float64.
ROUNDING_OF_NOTHING = 1e-9


def alike(table: RewardTable) -> Tensor:
    """Return bool ``[groups]``: whether all outcomes of the group that could be scored are equal, and all its step
    scores, too. An outcome is the weighted sum of the rewards that are no step rewards."""
    outcome = outcome_of(table) if table.steps else table
    groups = table.values.size(0) // table.group_size
    found = torch.ones(groups, dtype=torch.bool, device=table.values.device)
    if outcome is not None:
        found = is_dead(outcome.total.view(-1, table.group_size))
    for steps in table.steps.values():
        found = found & has_equal(steps.score, steps.row // steps.group_size, groups).to(found.device)
    return found


class Resampler:
    """Replaces the dead groups of a generation batch by live groups of further prompts. Which ones depends on seed,
    optimizer step, micro-batch and round only. So a resumed run draws the same prompts, and no state is kept."""

    def __init__(self, trainer: StepPort) -> None:
        self.trainer = trainer
        self.group_size = int(trainer.args.num_generations)
        self.max_rounds = trainer.lab_settings.update.max_rounds or 4

    def select(self, first: Scored, score: Callable[[list[dict[str, Any]]], Scored]) -> Scored:
        """Return ``first``, the first round, with its dead groups replaced by live groups of further rounds, and log
        how many. Every rank calls this.

        With the first included there are at most ``max_rounds`` rounds; dead groups for which they bring no replacement
        stay. Without ``update.dead_groups: resample`` return ``first`` unchanged.

        Args:
            score: generates and scores the rows of one more round.

        Raises:
            ValueError: the batch has images.
        """
        if self.trainer.lab_settings.update.dead_groups != "resample":
            return first
        if trl_bridge.is_multimodal(first.batch):
            raise ValueError("`update.dead_groups: resample` is for text, and this batch is multimodal; use `skip`")
        local = first.batch["prompt_ids"].size(0)
        rounds = [first]
        tasks = self._tasks(first)
        wanted = len(tasks)
        chosen = self._live(rounds, [])
        while len(chosen) < wanted and len(rounds) < self.max_rounds:
            rounds.append(score(self._draw(local, len(rounds), tasks)))
            chosen = self._as_wanted(rounds, chosen + self._live(rounds, chosen))
        dead = [group for group in range(wanted) if group not in chosen]
        chosen = self._as_wanted(rounds, chosen + dead)
        book = self.trainer.recorder.book("train")
        device = self.trainer.accelerator.device
        for name, total, count in (
            ("resample_rounds", len(rounds), 1),
            ("resampled_share", sum(group >= wanted for group in chosen), wanted),
            ("completions_generated", len(rounds) * wanted * self.group_size, 1),
        ):
            book.add_alike(f"update/{name}", torch.tensor([float(total)], device=device), count)
        return self._assembled(rounds, chosen)

    def _live(self, rounds: list[Scored], chosen: list[int]) -> list[int]:
        """Return the live groups of the last round, numbered over all rounds. The rule (or a team's hook) is asked on a
        table of the groups ``chosen`` so far, followed by that round; it never sees a group that was dropped. A
        collective."""
        trainer = self.trainer
        last = rounds[-1]
        size = self.group_size
        table = last.rewarded.table
        if chosen:
            kept = Rewarded.joined([scored.rewarded for scored in rounds]).picked(self._rows(chosen))
            table = Rewarded.joined([kept, last.rewarded]).table
        table = with_local_rows(trainer, last, table, before=len(chosen) * size)
        if reads_token_energy(trainer.algorithm.advantage):
            table = with_equal_energies(table)
        assert table.local is not None
        faults = trainer.recorder.faults_in_training
        mask = table.local.mask
        fresh = last.rewarded.table.values.size(0)
        advantages = checked_advantages(trainer.compute_advantages(table), table, faults)
        if advantages.dim() == 1:
            advantages = advantages[table.local.rows].unsqueeze(1)
        of_rows = (advantages.to(mask.device).float().abs() * mask).amax(1)  # 0 for a row without loss tokens
        taught = trainer.accelerator.gather(of_rows).view(-1, size).amax(1).cpu()
        rewards = table.total[-fresh:].cpu().nan_to_num(nan=0.0).abs().view(-1, size).amax(1)
        rounding = alike(table).cpu()[-taught.numel() :] & (taught <= ROUNDING * rewards + ROUNDING_OF_NOTHING)
        live = (taught > 0) & ~rounding
        first = (len(rounds) - 1) * (fresh // size)
        return [first + group for group in live.nonzero().flatten().tolist()]

    def _rows(self, groups: list[int]) -> Tensor:
        """Return the indices of the groups' rows among those of all rounds."""
        size = self.group_size
        return (torch.tensor(groups, dtype=torch.long).unsqueeze(1) * size + torch.arange(size)).flatten()

    def _tasks(self, scored: Scored) -> list[int]:
        """Return the task of each group; 0 for all without ``tasks``."""
        tasks = scored.rewarded.table.tasks
        if tasks is None:
            return [0] * (scored.rewarded.table.values.size(0) // self.group_size)
        return tasks[:: self.group_size].tolist()

    def _as_wanted(self, rounds: list[Scored], groups: list[int]) -> list[int]:
        """Return ``groups`` without those that are one too many: of each task the first ones are kept, as many as the
        first round has."""
        tasks = [task for scored in rounds for task in self._tasks(scored)]
        left = Counter(self._tasks(rounds[0]))
        kept = []
        for group in groups:
            if left[tasks[group]] > 0:
                left[tasks[group]] -= 1
                kept.append(group)
        return kept

    @functools.cached_property
    def _pools(self) -> Sequence[Sequence[int]]:
        """The rows of each task; all rows without ``tasks``."""
        data = self.trainer.train_dataset
        names = [*self.trainer.lab_settings.tasks]
        if not names:
            return [range(len(data))]
        pools: list[list[int]] = [[] for _ in names]
        for row, name in enumerate(data[COLUMN]):
            pools[names.index(name)].append(row)
        return pools

    def _draw(self, local: int, round_: int, tasks: list[int]) -> list[dict[str, Any]]:
        """Draw this rank's ``local`` rows of round ``round_``: each prompt G times, groups contiguous over ranks, of
        the same ``tasks`` as the first round's groups. No prompt is drawn twice, unless a task has too few."""
        trainer = self.trainer
        data = self.trainer.train_dataset
        step = trainer.state.global_step
        micro_batch = trainer.phase.done % trainer.args.gradient_accumulation_steps
        within = f"/{micro_batch}" if micro_batch else ""  # an optimizer step may hold several generation batches
        rng = random.Random(f"resample/{trainer.args.seed}/{step}{within}/{round_}")
        drawn = {}
        for task, number in sorted(Counter(tasks).items()):
            pool = self._pools[task]
            rows = rng.sample(pool, min(number, len(pool)))
            drawn[task] = iter(rows + rng.choices(pool, k=number - len(rows)))
        indices = [next(drawn[task]) for task in tasks]
        first = trainer.accelerator.process_index * local
        return [dict(data[indices[row // self.group_size]]) for row in range(first, first + local)]

    def _assembled(self, rounds: list[Scored], chosen: list[int]) -> Scored:
        """Return the batch of the ``chosen`` groups: this rank's share of their rows, and the rewards of all of them. A
        collective."""
        trainer = self.trainer
        first = rounds[0]
        index = self._rows(chosen)
        tables = [RowTable.of([scored.batch]).gathered(trainer.accelerator) for scored in rounds]
        merged = RowTable.of([{**table.fields, POSITION_OFFSET: table.offset} for table in tables])
        index = index.to(merged.offset.device)
        mine = index[local_rows(trainer, first.batch)]
        fields = {name: value[mine] for name, value in merged.fields.items()}
        tokens = merged.loss_mask[index].sum()
        batch = {**first.batch, **fields, POSITION_OFFSET: merged.offset[mine], "num_items_in_batch": tokens}
        ours = trainer.algorithm.objective is not None  # TRL's own loss reads old log-probs as they are
        if ours and not first.forwards.draws:
            keep_copy(batch)
        rewarded = Rewarded.joined([scored.rewarded for scored in rounds]).picked(index)
        columns: dict[str, list[Any]] = {}  # of TRL's completions table; None where a round did not write one
        for name in dict.fromkeys(name for scored in rounds for name in scored.columns or {}):
            nothing = [None] * first.rewarded.table.values.size(0)
            values = [value for scored in rounds for value in (scored.columns or {}).get(name, nothing)]
            columns[name] = [values[row] for row in index.tolist()]
        trl_bridge.replace_logged_rows(trainer.recorder.completions, columns)
        return replace(first, batch=batch, rewarded=rewarded, rounds=len(rounds))
