"""Dynamic sampling: further prompts until the batch holds live groups only.

Source: DAPO (arXiv 2503.14476, §3.2, eq. 11): groups whose completions are all right or all wrong are thrown away and further
prompts are drawn. Unlike skipping, this changes the *data distribution*: hard and easy prompts, whose groups are mostly dead,
appear less often than in the data set, and the generation cost grows (logged). Off by default.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from datasets import Dataset

from grpo_lab.trainer.scoring.reward_table import Scored
from grpo_lab.trainer.step.old_policy import AS_GENERATED, OLD
from grpo_lab.trainer.step.row_table import POSITION_OFFSET, RowTable
from grpo_lab.trainer.trl_bridge import is_multimodal
from grpo_lab.update import live_rows

if TYPE_CHECKING:
    from grpo_lab.trainer.ports import StepPort

DEFAULT_MAX_ROUNDS = 4
#: per-row field while a batch is being filled: 1 where all rewards of the row's group are equal
DEAD_GROUP = "dead_group"


def dead_rows(scored: Scored) -> torch.Tensor:
    """long ``[N]``: 1 for rows of groups whose rewards and steps (before any KL penalty) are all equal."""
    return scored.dead.long().repeat_interleave(scored.table.group_size)


def check_resample(train_dataset: Any) -> None:
    """Further prompts are drawn by index, so the data set must have one."""
    if not isinstance(train_dataset, Dataset):
        raise ValueError(
            f"`update.dead_groups: resample` draws further prompts by index, but `train_dataset` is a "
            f"{type(train_dataset).__name__}; use a datasets.Dataset, or `dead_groups: skip`"
        )


class Resampler:
    """Fills a generation batch with live groups. Which prompts are drawn follows from (seed, step, micro-batch, round) alone, so a resumed
    run draws the same ones and no state is kept."""

    def __init__(self, trainer: StepPort, max_rounds: int | None) -> None:
        self.trainer = trainer
        self.max_rounds = max_rounds or DEFAULT_MAX_ROUNDS

    def fill(self, output: dict[str, Any], score: Callable[[list[dict[str, Any]]], dict[str, Any]]) -> dict[str, Any]:
        """``output`` with its dead groups replaced by live ones of further rounds, as far as ``max_rounds`` allows.

        Args:
            output: one generation batch as TRL returns it (this rank's rows).
            score: generates and scores the rows of one more batch; called on all ranks alike.
        """
        if is_multimodal(output):
            raise ValueError(
                "`update.dead_groups: resample` handles text only, and this batch is multimodal; use `skip`"
            )
        local, group_size = output["prompt_ids"].size(0), self.trainer.num_generations
        tables, live = [RowTable.of([output]).gathered(self.trainer.accelerator)], [0]
        wanted = tables[0].offset.numel() // group_size
        chosen = [(0, group) for group in self._live_groups(tables[0])]
        live[0] = len(chosen)
        rounds = 1
        while len(chosen) < wanted and rounds < self.max_rounds:
            further = RowTable.of([score(self._draw(local, rounds))]).gathered(self.trainer.accelerator)
            tables.append(further)
            chosen += [(rounds, group) for group in self._live_groups(further)]
            rounds += 1
        dead = [(0, group) for group in range(wanted) if (0, group) not in chosen]
        chosen = (chosen + dead)[:wanted]
        self._record(rounds, chosen, wanted)
        return self._assembled(output, tables, chosen, local)

    def _live_groups(self, table: RowTable) -> list[int]:
        """Groups whose rewards differ and of which a row contributes. Rewards alone are not enough (all completions may be masked), nor
        are advantages: rounding makes a few 1e-5 of equal rewards, and a KL penalty in the reward makes every group differ."""
        live = live_rows(table.advantages, table.loss_mask) & (table.fields[DEAD_GROUP] == 0)
        return torch.nonzero(live.view(-1, self.trainer.num_generations).any(1)).flatten().tolist()

    def _draw(self, local: int, round_: int) -> list[dict[str, Any]]:
        """This rank's rows of a further batch: prompts without repetition, each G times, groups contiguous over ranks."""
        trainer = self.trainer
        data: Any = trainer.train_dataset
        group_size = trainer.num_generations
        groups = local * trainer.accelerator.num_processes // group_size
        step, micro_batch = trainer.state.global_step, trainer._step % trainer.args.gradient_accumulation_steps
        within = f"/{micro_batch}" if micro_batch else ""  # an optimizer step may hold several generation batches
        rng = random.Random(f"resample/{trainer.args.seed}/{step}{within}/{round_}")
        indices = rng.sample(range(len(data)), min(groups, len(data)))
        indices += rng.choices(range(len(data)), k=groups - len(indices))
        first = trainer.accelerator.process_index * local
        return [dict(data[indices[row // group_size]]) for row in range(first, first + local)]

    def _assembled(
        self, output: dict[str, Any], tables: list[RowTable], chosen: list[tuple[int, int]], local: int
    ) -> dict[str, Any]:
        merged = RowTable.of([{**table.fields, POSITION_OFFSET: table.offset} for table in tables])
        size, starts = self.trainer.num_generations, [0]
        for table in tables:
            starts.append(starts[-1] + table.offset.numel())
        rows = [starts[which] + group * size + i for which, group in chosen for i in range(size)]
        index = torch.tensor(rows, device=merged.offset.device)
        tokens = merged.loss_mask[index].sum()
        first = self.trainer.accelerator.process_index * local
        mine = index[first : first + local]
        filled = {
            **output,
            **{name: value[mine] for name, value in merged.fields.items()},
            POSITION_OFFSET: merged.offset[mine],
            "num_items_in_batch": tokens,
        }
        if OLD in filled and self.trainer.algorithm.objective is not None:  # TRL's loss reads them as they are
            filled.setdefault(AS_GENERATED, filled[OLD].clone())
        return filled

    def _record(self, rounds: int, chosen: list[tuple[int, int]], wanted: int) -> None:
        book = self.trainer.recorder.book("train")
        device = self.trainer.accelerator.device
        book.add_alike("update/resample_rounds", torch.tensor([float(rounds)], device=device), 1)
        replaced = sum(which > 0 for which, _ in chosen)
        book.add_alike("update/resampled_share", torch.tensor([float(replaced)], device=device), wanted)
        generated = rounds * wanted * self.trainer.num_generations
        book.add_alike("update/completions_generated", torch.tensor([float(generated)], device=device), 1)
