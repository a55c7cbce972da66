"""Process supervision: each step of a completion has a score; a token gets the sum of the scores of its own and all
later steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from grpo_lab.advantages.group import GroupZScore, StdNormalized, deviation, group_average
from grpo_lab.batch import RewardTable


@dataclass(frozen=True)
class StepTable:
    """Step scores of a generation batch over all ranks: S steps of N completions, ordered by completion, then by step.

    Args:
        row: long ``[S]``, the completion that a step belongs to, ascending.
        end: long ``[S]``, index of the step's last token within the completion (0 = first), ascending within a row.
        score: float64 ``[S]``; NaN where the step could not be scored.
        rows: N. A completion may have no step at all.
        group_size: G; groups are contiguous, ``N % G == 0``.
    """

    row: Tensor
    end: Tensor
    score: Tensor
    rows: int
    group_size: int

    def __post_init__(self) -> None:
        if self.group_size < 1 or self.rows % self.group_size:
            raise ValueError(f"{self.rows} rows are not whole groups of num_generations={self.group_size}")
        if not self.row.shape == self.end.shape == self.score.shape or self.row.dim() != 1:
            shapes = ", ".join(str(tuple(one.shape)) for one in (self.row, self.end, self.score))
            raise ValueError(f"a step has one row, one end and one score; got {shapes}")
        if self.row.numel() and not (int(self.row.min()) >= 0 and int(self.row.max()) < self.rows):
            raise ValueError(f"a step names row {int(self.row.max())} (or {int(self.row.min())}) of {self.rows}")
        if (self.row.diff() < 0).any() or ((self.row.diff() == 0) & (self.end.diff() <= 0)).any():
            raise ValueError("steps must come in the order of rows, and their ends ascending within a row")
        if self.score.isinf().any():
            raise ValueError("a step score is infinite; a step reward gives finite numbers, or None for unscorable")

    @staticmethod
    def of(steps: list[list[tuple[int, float | None]]], group_size: int) -> StepTable:
        """Make the table from ``[[(end_token, score), …], …]``, one list a completion (empty: no step was scored)."""
        flat = [(row, end, score) for row, ends in enumerate(steps) for end, score in ends]
        return StepTable(
            row=torch.tensor([row for row, _, _ in flat], dtype=torch.long),
            end=torch.tensor([end for _, end, _ in flat], dtype=torch.long),
            score=torch.tensor([float("nan") if s is None else s for _, _, s in flat], dtype=torch.float64),
            rows=len(steps),
            group_size=group_size,
        )

    def local(self, rows: slice) -> StepTable:
        """Return the steps of a slice of rows, such as a rank's own. Rows are counted from the slice's first; each is a
        group by itself."""
        mine = (self.row >= rows.start) & (self.row < rows.stop)
        return StepTable(self.row[mine] - rows.start, self.end[mine], self.score[mine], rows.stop - rows.start, 1)

    def picked(self, rows: Tensor) -> StepTable:
        """Return the steps of the rows in ``rows`` (long ``[M]``, whole groups), in that order."""
        rows = rows.to(self.row.device)
        first = torch.searchsorted(self.row, rows)
        count = torch.searchsorted(self.row, rows, right=True) - first
        place = torch.arange(int(count.sum()), device=rows.device) - (count.cumsum(0) - count).repeat_interleave(count)
        index = first.repeat_interleave(count) + place
        row = torch.arange(rows.numel(), device=rows.device).repeat_interleave(count)
        return StepTable(row, self.end[index], self.score[index], rows.numel(), self.group_size)

    @staticmethod
    def joined(tables: Sequence[StepTable]) -> StepTable:
        """Concatenate tables: the rows of one follow those of the table before."""
        starts = torch.tensor([0, *(table.rows for table in tables)]).cumsum(0).tolist()
        row = torch.cat([table.row + start for table, start in zip(tables, starts)])
        end, score = (torch.cat([getattr(table, name) for table in tables]) for name in ("end", "score"))
        return StepTable(row, end, score, starts[-1], tables[0].group_size)


@dataclass(frozen=True)
class Process(StdNormalized):
    """Â_{i,t} = Σ_{j: index(j) ≥ t} r̃_i^{(j)},  r̃ = (r − mean R)/(std R + ε), R = all step scores of the group.

    Source: DeepSeekMath (arXiv 2402.03300, §4.1.3, process supervision). ε and ``std`` are those of ``group_zscore``:
    with one step a completion, ending at its last token, this is outcome GRPO to the last bit.

    It works in two stages: ``normalised`` on the small table of all ranks, then ``spread`` onto the tokens of this
    rank's rows. Tokens after a row's last scored step, rows without one and steps that could not be scored get 0. So
    does a group whose steps all have the same score.

    Called on a whole table, it returns the sum Â = Σ_c w_c · process(steps of column c) + z-score of the outcome within
    the group. The outcome is the weighted sum of all columns that hold no steps.
    """

    level: ClassVar[str] = "token"
    reads_steps: ClassVar[bool] = True
    #: Whether a KL per completion is taken from the outcome's reward. Without an outcome it would be compared with
    #: itself alone.
    penalises_outcome: ClassVar[bool] = True

    def __call__(self, table: RewardTable) -> Tensor:
        """Return advantages ``[B, T]`` (float64) of this rank's rows. Raises ValueError for a table without them
        (``local``)."""
        if table.local is None:
            raise ValueError("`process` makes advantages per token and was called on a table without `local` rows")
        rows = table.local.rows
        width = table.local.mask.size(1)
        total = torch.zeros(rows.stop - rows.start, width, dtype=torch.float64)
        for column, steps in table.steps.items():
            weight = float(table.weights[column])
            part = spread(self.normalised(steps).local(rows), width).cpu()
            total = total + (part if weight == 1.0 else weight * part)
        outcome = outcome_of(table)
        if outcome is not None:
            row = GroupZScore(self.epsilon, self.std)(outcome.total, outcome.group_size)[rows]
            total = total + row.cpu().unsqueeze(1)
        return total

    def normalised(self, table: StepTable) -> StepTable:
        """Return the table with r̃ in place of the scores; 0 for a step that could not be scored."""
        group = table.row // table.group_size
        groups = table.rows // table.group_size
        first = torch.searchsorted(group, torch.arange(groups, device=group.device))
        place = torch.arange(group.numel(), device=group.device) - first[group]
        if group.numel():
            width = int(torch.bincount(group, minlength=1).max())
        else:
            width = 1
        ragged = table.score.new_full((groups, max(width, 1)), float("nan"))
        ragged[group, place] = table.score
        standard = (ragged - group_average(ragged)) / (deviation(ragged, 1, True, self.std) + self.epsilon)
        return StepTable(table.row, table.end, standard[group, place].nan_to_num(nan=0.0), table.rows, table.group_size)


def spread(steps: StepTable, width: int) -> Tensor:
    """Return ``[B, width]``: at token t, the sum of the scores of the row's steps that end at t or later.

    Raises ValueError if a step ends beyond the width.
    """
    if steps.end.numel() and not (int(steps.end.min()) >= 0 and int(steps.end.max()) < width):
        raise ValueError(
            f"a step ends at token {int(steps.end.max())} (the first at {int(steps.end.min())}) of a completion of at "
            f"most {width} tokens; `end_token` counts from 0 within the completion"
        )
    at_ends = steps.score.new_zeros(steps.rows, width)
    at_ends[steps.row, steps.end] = steps.score
    return at_ends.flip(1).cumsum(1).flip(1)


def outcome_of(table: RewardTable) -> RewardTable | None:
    """Return the table without the columns of step rewards, or ``None`` if there is no other reward.

    A row that no other reward could score stays NaN: a penalty beside it does not make its reward 0.
    """
    columns = len(table.names)
    kept = [column for column in range(columns) if column not in table.steps]
    rewards = [column for column in kept if column < columns - table.penalties]
    if not rewards:
        return None
    unscored = table.values[:, rewards].isnan().all(dim=1, keepdim=True)
    values = table.values[:, kept].masked_fill(unscored, float("nan"))
    names = tuple(table.names[column] for column in kept)
    return replace(table, values=values, names=names, weights=table.weights[kept], steps={})
