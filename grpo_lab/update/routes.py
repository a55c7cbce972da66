"""Which rows of a planned step leave the rank that holds them, and how wide they travel. Pure: the same on every rank.

A rank holds the rows that it generated (`rows_per_rank` in a row of the table). Those that the plan computes elsewhere
are handed over, and what is made of them may be handed back the same way. A row travels as wide as the bin that it goes
to: what lies beyond is never read there.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from grpo_lab.update.plan import Plan

Ints = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Routes:
    """All planned rows, in the order of the table.

    rows [M]: table index. homes [M]: the rank that holds the row. ranks [M]: the rank that computes it. widths [M]:
    completion tokens of the longest completion of its bin, ≥ 1.
    """

    rows: Ints
    homes: Ints
    ranks: Ints
    widths: Ints

    @staticmethod
    def of(plan: Plan, completions: Ints, rows_per_rank: int) -> Routes:
        """`completions` [N]: tokens of every row of the table."""
        parts = [(np.asarray(one), rank) for rank, bins in enumerate(plan.bins) for one in bins if one]
        found = np.concatenate([np.zeros(0, np.int64), *(one for one, _ in parts)])
        sizes = [one.size for one, _ in parts]
        ranks = np.repeat(np.asarray([rank for _, rank in parts], dtype=np.int64), sizes)
        widest = np.asarray([max(int(completions[one].max()), 1) for one, _ in parts], dtype=np.int64)
        order = np.argsort(found, kind="stable")
        return Routes(found[order], found[order] // rows_per_rank, ranks[order], np.repeat(widest, sizes)[order])

    @property
    def moves(self) -> NDArray[np.bool_]:
        """[M]: rows that leave their rank."""
        moved: NDArray[np.bool_] = self.homes != self.ranks
        return moved

    def chosen(self, where: NDArray[np.bool_], by: Ints) -> Routes:
        """Rows `where`, those of one rank of `by` together, ranks ascending: the order of the messages at either
        end."""
        at = np.flatnonzero(where)
        at = at[np.argsort(by[at], kind="stable")]
        return Routes(self.rows[at], self.homes[at], self.ranks[at], self.widths[at])

    def leaving(self, rank: int) -> Routes:
        """Rows that `rank` hands over, by the rank that gets them."""
        return self.chosen(self.moves & (self.homes == rank), self.ranks)

    def arriving(self, rank: int) -> Routes:
        """Rows that `rank` is handed, by the rank that they come from."""
        return self.chosen(self.moves & (self.ranks == rank), self.homes)
