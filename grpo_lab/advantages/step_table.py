"""Step scores of a generation batch, as a table over all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class StepTable:
    """Step scores of a generation batch over all ranks: S steps of N completions, ordered by completion, then by step.

    Args:
        row: long ``[S]``, the completion that a step belongs to, ascending.
        end: long ``[S]``, index of the step's last token within the completion (0 = first), ascending within a row.
        score: float64 ``[S]``; NaN where the step could not be scored.
        rows: N. A completion may have no step at all.
        group_size: G; the completions of a group are neighbours, ``N % G == 0``.

    Raises:
        ValueError: the tensors do not fit each other, are not in this order, or a score is infinite.
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
        """Make the table from ``[[(end_token, score), …], …]``: one list per completion, empty if it has no step. A
        score of None is one that could not be given."""
        flat = [(row, end, score) for row, ends in enumerate(steps) for end, score in ends]
        return StepTable(
            row=torch.tensor([row for row, _, _ in flat], dtype=torch.long),
            end=torch.tensor([end for _, end, _ in flat], dtype=torch.long),
            score=torch.tensor([float("nan") if s is None else s for _, _, s in flat], dtype=torch.float64),
            rows=len(steps),
            group_size=group_size,
        )

    def local(self, rows: slice) -> StepTable:
        """Return the steps of a slice of rows, such as a rank's own. In the result rows are numbered from the start of
        the slice, and each row is a group by itself."""
        mine = (self.row >= rows.start) & (self.row < rows.stop)
        return StepTable(self.row[mine] - rows.start, self.end[mine], self.score[mine], rows.stop - rows.start, 1)

    def picked(self, rows: Tensor) -> StepTable:
        """Return the steps of the rows in ``rows`` (long ``[M]``, whole groups), in that order; rows are numbered
        anew."""
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


def spread(steps: StepTable, width: int) -> Tensor:
    """Spread step scores over tokens: return ``[B, width]``, at token t the sum of the scores of the row's steps that
    end at t or later.

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
