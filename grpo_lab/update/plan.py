"""The plan of one optimizer step: which row is computed on which rank, in which micro-batch.

If the denominators were counted beforehand, the order of rows in one optimizer step does not change the sum of their
losses. Nor does it matter which rank and micro-batch compute a row (`live.py` says when). So rows that add nothing are
left out, and the rest moves to where it fits best. Every micro-batch ("bin") is only as wide as its own longest row.

A row is re-aligned to prompt + completion without a gap and padded on the right. So a bin of m rows costs m × (its
longest prompt + completion) tokens. The arithmetic that finds the bins is in `balance.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from grpo_lab.update.balance import Ints, assign_bins, choose_cuts, even_out, loads_of, longest_of

DEFAULT_OVERHEAD_TOKENS = 64

Numbers = torch.Tensor | NDArray[np.generic] | Sequence[int] | Sequence[bool]


@dataclass(frozen=True, eq=False)
class Rows:
    """The rows of one optimizer step over all ranks; every rank holds the identical table, kept as numpy arrays.

    Attributes:
        prompt_lengths: [N], tokens of each prompt without padding, ≥ 0.
        completion_lengths: [N], tokens of each completion without padding, ≥ 0.
        live: bool [N], which rows must be computed (`live_rows`).

    Raises:
        ValueError: the fields do not fit each other, or a live row has no token.
    """

    prompt_lengths: Numbers
    completion_lengths: Numbers
    live: Numbers

    def __post_init__(self) -> None:
        prompt = whole_numbers("prompt_lengths", self.prompt_lengths)
        completion = whole_numbers("completion_lengths", self.completion_lengths)
        live = _array(self.live)
        if live.ndim == 1 and live.size == 0:
            live = live.astype(bool)
        if live.dtype != np.bool_ or live.ndim != 1:
            raise ValueError(f"Rows.live must be a list of bool, one per row; got {live.dtype} of shape {live.shape}.")
        if not prompt.size == completion.size == live.size:
            seen = f"{prompt.size}, {completion.size} and {live.size}"
            raise ValueError(f"Rows needs one prompt length, completion length and live flag per row; got {seen}.")
        if (empty := np.flatnonzero(live & (prompt + completion == 0))).size:
            raise ValueError(f"Row {int(empty[0])} is live but has no token.")
        for name, value in (("prompt_lengths", prompt), ("completion_lengths", completion), ("live", live)):
            object.__setattr__(self, name, value)

    def __len__(self) -> int:
        return int(np.size(self.live))


@dataclass(frozen=True)
class Plan:
    """The plan of one step: which rank computes which rows in which bin.

    Every rank has the same number of bins (≥ 1). For an empty bin the rank runs one dummy row with weight zero, so that
    every rank makes the same forwards, backwards and collectives.

    Attributes:
        bins: `bins[rank][k]` are the table's row indices that `rank` computes in its k-th micro-batch, longest row
            first.
        tokens_live: tokens of the live rows (prompt + completion).
        tokens_computed: Σ rows × longest over all bins of all ranks, dummy rows not counted.
        step_tokens: Σ_k max over ranks of the k-th bins' tokens: what the step waits for.
        live_per_rank: [R], `tokens_live` of each rank.
        computed_per_rank: [R], `tokens_computed` of each rank.
        shared: the bins are packed rows (`plan_shared`).
    """

    bins: list[list[list[int]]]
    tokens_live: int
    tokens_computed: int
    step_tokens: int
    live_per_rank: tuple[int, ...]
    computed_per_rank: tuple[int, ...]
    shared: bool = False

    @property
    def padding_share(self) -> float:
        """Share of the computed tokens that is padding; 0 where nothing is computed."""
        if self.tokens_computed:
            return 1.0 - self.tokens_live / self.tokens_computed
        return 0.0


def default_max_tokens(micro_batch_size: int, longest_prompt: int, longest_completion: int) -> int:
    """Return the tokens of the stock micro-batch: rows × (longest prompt + longest completion), both over the
    generation batch.

    With this budget no bin is a larger tensor than the micro-batch it replaces, so memory does not rise.
    """
    _at_least(1, micro_batch_size=micro_batch_size)
    _at_least(0, longest_prompt=longest_prompt, longest_completion=longest_completion)
    return max(1, micro_batch_size * (longest_prompt + longest_completion))


def _at_least(least: int, **counts: int) -> None:
    """Raise ValueError unless all named counts are whole numbers of at least `least`."""
    for name, value in counts.items():
        if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < least:
            raise ValueError(f"{name} must be a whole number ≥ {least}; got {value!r}.")


def plan_update(rows: Rows, num_ranks: int, max_tokens: int, *, overhead_tokens: int = DEFAULT_OVERHEAD_TOKENS) -> Plan:
    """Distribute the live rows over ranks and bins.

    Guarantees:

    * every live row is in one bin, and no other row is in any;
    * rows × longest ≤ max_tokens in every bin, except that a row longer than max_tokens has a bin by itself;
    * every rank has the same number of bins (≥ 1);
    * the same table gives the same plan, and a permuted table the permuted plan (rows of equal lengths are told apart
      by their index only).

    Args:
        rows: all rows of the step.
        num_ranks: number of ranks.
        max_tokens: tokens that one forward may have, the setting `update.max_tokens`.
        overhead_tokens: what one more micro-batch costs, in tokens.
    """
    _at_least(1, num_ranks=num_ranks, max_tokens=max_tokens)
    _at_least(0, overhead_tokens=overhead_tokens)
    table = np.flatnonzero(rows.live)
    completion = np.asarray(rows.completion_lengths)[table]
    total = np.asarray(rows.prompt_lengths)[table] + completion
    order = np.lexsort((table, -completion, -total))
    table = table[order]
    lengths = total[order]
    if not table.size:
        return empty_plan(num_ranks)
    starts = choose_cuts(lengths, num_ranks, max_tokens, overhead_tokens)
    rounds, ranks = assign_bins(lengths, starts, num_ranks)
    bin_of = np.repeat(np.arange(starts.size), np.diff(np.append(starts, lengths.size)))
    bin_of = even_out(lengths, bin_of, rounds, ranks, num_ranks, max_tokens)
    return _lay_out(table, lengths, bin_of, rounds, ranks, num_ranks)


def empty_plan(num_ranks: int, shared: bool = False) -> Plan:
    """Return the plan of a step without a live row: each rank runs one dummy row."""
    return Plan([[[]] for _ in range(num_ranks)], 0, 0, 0, (0,) * num_ranks, (0,) * num_ranks, shared)


def _lay_out(table: Ints, lengths: Ints, bin_of: Ints, rounds: Ints, ranks: Ints, num_ranks: int) -> Plan:
    """Return the plan in which each bin, with its round and rank, holds the rows that `bin_of` assigns to it, and its
    counts."""
    counts = np.bincount(bin_of, minlength=rounds.size)
    tokens = np.zeros((num_ranks, int(rounds.max()) + 1), dtype=np.int64)
    tokens[ranks, rounds] = counts * longest_of(lengths, bin_of, rounds.size)
    live = loads_of(lengths, ranks[bin_of], num_ranks)
    bins: list[list[list[int]]] = [[[] for _ in range(tokens.shape[1])] for _ in range(num_ranks)]
    by_bin = table[np.argsort(bin_of, kind="stable")].tolist()  # stable: within a bin the longest row stays first
    ends = np.cumsum(counts)
    for rank, k, start, end in zip(ranks.tolist(), rounds.tolist(), (ends - counts).tolist(), ends.tolist()):
        bins[rank][k] = by_bin[start:end]
    return Plan(
        bins=bins,
        tokens_live=int(lengths.sum()),
        tokens_computed=int(tokens.sum()),
        step_tokens=int(tokens.max(axis=0).sum()),
        live_per_rank=tuple(live.tolist()),
        computed_per_rank=tuple(tokens.sum(axis=1).tolist()),
    )


def _array(values: Numbers) -> NDArray[np.generic]:
    if isinstance(values, torch.Tensor):
        return values.detach().cpu().numpy()
    return np.asarray(values)


def whole_numbers(name: str, values: Numbers, signed: bool = False) -> Ints:
    """Return `values` as an int64 array. Raises ValueError if they are not a list of whole numbers, or if one is
    negative and `signed` is False."""
    array = _array(values)
    if array.ndim != 1 or (array.size and not np.issubdtype(array.dtype, np.integer)):
        raise ValueError(f"Rows.{name} must be whole numbers, one per row; got {array.dtype} of shape {array.shape}.")
    if not signed and array.size and int(array.min()) < 0:
        raise ValueError(f"Rows.{name} must be ≥ 0 tokens; got {int(array.min())} in row {int(array.argmin())}.")
    return array.astype(np.int64)


@dataclass(frozen=True, eq=False)
class Routes:
    """Routes of the planned rows between ranks, in the order of the table.

    A rank holds the rows that it generated (`rows_per_rank` neighbours in the table). A row that the plan computes
    elsewhere is sent there, and its results may be sent back the same way. Only as many tokens are sent as its bin is
    wide: the rest is never read.

    Attributes:
        rows: [M], table index of each planned row.
        homes: [M], the rank that holds the row.
        ranks: [M], the rank that computes it.
        widths: [M], completion tokens of the longest completion in the row's bin, ≥ 1.
    """

    rows: Ints
    homes: Ints
    ranks: Ints
    widths: Ints

    @staticmethod
    def of(plan: Plan, completions: Ints, rows_per_rank: int) -> Routes:
        """Return the routes of `plan`.

        Args:
            plan: which rank computes which rows.
            completions: [N], tokens of every completion of the table.
            rows_per_rank: rows that each rank has generated.
        """
        parts = [(np.asarray(one), rank) for rank, bins in enumerate(plan.bins) for one in bins if one]
        found = np.concatenate([np.zeros(0, np.int64), *(one for one, _ in parts)])
        sizes = [one.size for one, _ in parts]
        ranks = np.repeat(np.asarray([rank for _, rank in parts], dtype=np.int64), sizes)
        widest = np.asarray([max(int(completions[one].max()), 1) for one, _ in parts], dtype=np.int64)
        order = np.argsort(found, kind="stable")
        return Routes(found[order], found[order] // rows_per_rank, ranks[order], np.repeat(widest, sizes)[order])

    @property
    def moves(self) -> NDArray[np.bool_]:
        """Bool [M]: True for rows that leave their rank."""
        return np.not_equal(self.homes, self.ranks)

    def chosen(self, where: NDArray[np.bool_], by: Ints) -> Routes:
        """Return the rows where `where` is True, sorted by the ranks in `by`. Sender and receiver order their messages
        like this."""
        at = np.flatnonzero(where)
        at = at[np.argsort(by[at], kind="stable")]
        return Routes(self.rows[at], self.homes[at], self.ranks[at], self.widths[at])

    def leaving(self, rank: int) -> Routes:
        """Return the rows that `rank` sends, sorted by the rank that gets them."""
        return self.chosen(self.moves & (self.homes == rank), self.ranks)

    def arriving(self, rank: int) -> Routes:
        """Return the rows that `rank` receives, sorted by the rank that they come from."""
        return self.chosen(self.moves & (self.ranks == rank), self.homes)
