"""Cut rows into token-budget bins and hand the bins to ranks.

The cost model. A bin of `m` rows whose longest row has `l` tokens is a tensor of `m × l` positions (its *footprint*):
that is what the forward and backward compute. The k-th bins of all ranks run together (with FSDP every forward is a
collective). So a *round* of R bins lasts as long as its largest bin. Every round also costs a fixed overhead `o`
(kernel launches, parameter gathers), measured in tokens:

    cost = Σ_k ( max_r  m_{r,k} · l_{r,k}  +  o )        subject to  m · l ≤ budget  (or m = 1)

It suffices to sort the rows by length and to look for cut points of the sorted list. Proof: take any bins, order them
by their longest row, and refill them in that order with the sorted rows, each with as many rows as it had. At most
Σ_{i<k} m_i rows are longer than the k-th bin's longest, so no bin has grown. The cut points are found by

* one rank: dynamic programming over the cut points, the exact optimum (`cheapest_cuts`);
* several ranks: for a given number of rounds K, the smallest footprint F for which K·R bins suffice (`even_cuts`; the
  exact optimum for K = 1), and the K with the lowest cost (`choose_cuts`).

Then `assign_bins` gives each bin a round and a rank, and `even_out` swaps rows between ranks until their tokens are
even. All of it is integer arithmetic on sorted lengths, so the same table gives the same plan on every rank.
"""

from __future__ import annotations

from bisect import bisect_left

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]

#: Above this many rows one rank's plan is cut evenly as well: neighbours in the sorted list are then so close in length
#: that the exact optimum has nothing left to win, and its time grows with rows × rows per bin.
EXACT_ROWS = 4096
#: max/mean of live tokens per rank at which swapping stops.
EVEN_ENOUGH = 1.01
#: Pairs of rows that are compared in one array.
PAIRS_AT_ONCE = 4_000
#: Pairs of rows looked at before swapping stops: a bound on time that is the same on every rank.
SWAP_WORK = 5_000_000


def cheapest_cuts(lengths: Ints, budget: int, overhead: int) -> Ints:
    """Return the start positions of the bins that minimise Σ (rows × longest + overhead) for one rank, exactly.

        g(j) = min_c  c·l_j + o + g(j + c)   over 1 ≤ c ≤ max(1, ⌊budget / l_j⌋),   g(n) = 0

    g(j) is the lowest cost of the rows from the j-th on, c the rows of their first bin. Ties go to the larger bin.

    Args:
        lengths: [n], tokens of each row, longest first, each ≥ 1.
        budget: largest footprint of a bin, in tokens; a longer row has a bin to itself.
        overhead: cost of a bin beside its footprint, in tokens.
    """
    n = lengths.size
    best = np.zeros(n + 1, dtype=np.int64)
    step = np.ones(n, dtype=np.int64)
    for j in range(n - 1, -1, -1):
        most = min(n - j, max(1, budget // int(lengths[j])))
        cost = np.arange(1, most + 1) * lengths[j] + best[j + 1 : j + most + 1]
        c = most - 1 - int(cost[::-1].argmin())
        best[j] = cost[c] + overhead
        step[j] = c + 1
    starts = []
    j = 0
    while j < n:
        starts.append(j)
        j += int(step[j])
    return np.asarray(starts, dtype=np.int64)


def greedy_runs(negated: list[int], footprint: int) -> list[tuple[int, int, int]]:
    """Fill bins from the longest row on, each with as many rows as fit into `footprint`.

    Neighbouring bins with equally many rows are returned as one run, (start, rows per bin, bins). The rows per bin,
    ⌊footprint / longest⌋, only grow along the sorted list, and the walk jumps from one value to the next. So its time
    grows with √n.

    Args:
        negated: the lengths × −1, ascending, so the longest row first.
        footprint: positions of a bin, in tokens.
    """
    runs = []
    position = 0
    while position < len(negated):
        rows = max(1, footprint // -negated[position])
        end = bisect_left(negated, -(footprint // (rows + 1)), lo=position)  # first row of which one more would fit
        bins = -(-(end - position) // rows)
        runs.append((position, rows, bins))
        position += bins * rows
    return runs


def even_cuts(negated: list[int], total: int, bins: int, budget: int) -> Ints | None:
    """Return the starts of at most `bins` bins whose largest footprint is as small as possible and ≤ budget; None if so
    few bins do not suffice.

    The footprint is found by bisection, since the greedy walk needs fewer bins as the footprint grows. A row longer
    than the budget has a bin to itself.

    Args:
        negated: the lengths × −1, ascending.
        total: sum of the lengths.
        bins: largest number of bins.
        budget: largest footprint, in tokens.
    """

    def needed(footprint: int) -> int:
        return sum(count for _, _, count in greedy_runs(negated, footprint))

    if needed(budget) > bins:
        return None
    low = min(budget, max(1, -(-total // bins)))
    high = budget
    while low < high:
        middle = (low + high) // 2
        if needed(middle) <= bins:
            high = middle
        else:
            low = middle + 1
    parts = [np.arange(count, dtype=np.int64) * rows + start for start, rows, count in greedy_runs(negated, low)]
    return np.concatenate(parts)


def footprints(lengths: Ints, starts: Ints) -> Ints:
    """Return rows × longest of each bin, in tokens. `lengths` are sorted longest first, `starts` are the bins' first
    rows."""
    return np.diff(np.append(starts, lengths.size)) * lengths[starts]


def rounds_cost(sizes: Ints, num_ranks: int, overhead: int) -> int:
    """Return Σ over rounds of (largest footprint + overhead), in tokens, if bins of similar footprint share a round."""
    largest = np.sort(sizes)[::-1][::num_ranks]
    return int(largest.sum()) + overhead * largest.size


def choose_cuts(lengths: Ints, num_ranks: int, budget: int, overhead: int) -> Ints:
    """Return the starts of the cheapest bins found, for `lengths` [n ≥ 1] sorted longest first.

    With several ranks the number of rounds K runs upward from the fewest that the budget allows. The search ends when
    even a plan without padding would cost more than the best one, or after four values of K in a row without a better
    plan.
    """
    if num_ranks == 1 and lengths.size <= EXACT_ROWS:
        return cheapest_cuts(lengths, budget, overhead)
    negated: list[int] = (-lengths).tolist()
    total = int(lengths.sum())
    fewest = -(-sum(count for _, _, count in greedy_runs(negated, budget)) // num_ranks)
    best: Ints | None = None
    best_cost = 0
    misses = 0
    rounds = fewest
    while best is None or (misses < 4 and -(-total // num_ranks) + overhead * rounds < best_cost):
        starts = even_cuts(negated, total, rounds * num_ranks, budget)
        assert starts is not None  # `fewest` rounds suffice, and so do more
        cost = rounds_cost(footprints(lengths, starts), num_ranks, overhead)
        if best is None or cost < best_cost:
            best = starts
            best_cost = cost
            misses = 0
        else:
            misses += 1
        rounds += max(1, rounds // 16)
    return best


def assign_bins(lengths: Ints, starts: Ints, num_ranks: int) -> tuple[Ints, Ints]:
    """Return the round and the rank of every bin: (rounds [b], ranks [b]).

    Bins of similar footprint share a round. The largest run first, so that the memory peak comes at once and not late.
    Within a round the rank with the fewest tokens so far gets the bin with the most.
    """
    sizes = footprints(lengths, starts)
    live = np.add.reduceat(lengths, starts)
    order = np.argsort(-sizes, kind="stable")
    if num_ranks == 1:
        return np.argsort(order), np.zeros(starts.size, dtype=np.int64)
    round_of = np.arange(starts.size) // num_ranks  # of the bins in this order
    order = order[np.lexsort((-live[order], round_of))]  # within a round the bin with the most live tokens first
    rounds = np.empty(starts.size, dtype=np.int64)
    ranks = np.empty(starts.size, dtype=np.int64)
    rounds[order] = round_of
    load = np.zeros(num_ranks, dtype=np.int64)
    for first in range(0, starts.size, num_ranks):
        together = order[first : first + num_ranks]
        lightest = load.argsort(kind="stable")[: together.size]
        ranks[together] = lightest
        load[lightest] += live[together]
    return rounds, ranks


def even_out(lengths: Ints, bin_of: Ints, rounds: Ints, ranks: Ints, num_ranks: int, budget: int) -> Ints:
    """Swap rows between ranks until their tokens are even; return the new bin of every row [n].

    A bin smaller than the largest of its round leaves its rank idle at the end of the round. A longer row swapped into
    it uses that time, and takes tokens off a heavier rank. No round gets longer; no bin exceeds the budget or changes
    its number of rows. Each swap is the one that leaves the heavier of its two ranks lightest. The search ends when the
    ranks are even, when no swap helps the heaviest rank, or after `SWAP_WORK` pairs of rows.

    Args:
        lengths: [n], tokens of each row.
        bin_of: [n], the bin of each row.
        rounds: [b], the round of each bin.
        ranks: [b], the rank of each bin.
        num_ranks: number of ranks.
        budget: largest footprint of a bin, in tokens.
    """
    bin_of = bin_of.copy()
    limit = _limits(lengths, bin_of, rounds, budget)
    load = loads_of(lengths, ranks[bin_of], num_ranks)
    rows_of = [np.flatnonzero(ranks[bin_of] == r) for r in range(num_ranks)]  # rows per rank: swaps keep their number
    work = 0
    while load.max() * num_ranks > EVEN_ENOUGH * load.sum() and work < SWAP_WORK:
        heavy = int(load.argmax())
        swap, looked = _best_swap(heavy, load, rows_of, lengths, limit[bin_of])
        work += looked
        if swap is None:
            break
        give, take = swap
        light = int(ranks[bin_of[take]])
        bin_of[give], bin_of[take] = bin_of[take], bin_of[give]
        moved = lengths[give] - lengths[take]
        load[heavy] -= moved
        load[light] += moved
        rows_of[heavy] = np.sort(np.where(rows_of[heavy] == give, take, rows_of[heavy]))
        rows_of[light] = np.sort(np.where(rows_of[light] == take, give, rows_of[light]))
    return bin_of


def longest_of(values: Ints, of: Ints, count: int) -> Ints:
    """Return the largest value of each of `count` groups, 0 for an empty one. `of` gives the group of each value."""
    found = np.zeros(count, dtype=np.int64)
    np.maximum.at(found, of, values)
    return found


def loads_of(lengths: Ints, rank_of: Ints, num_ranks: int) -> Ints:
    """Return the tokens of each rank [R], from the rows' lengths and ranks."""
    return np.bincount(rank_of, weights=lengths, minlength=num_ranks).astype(np.int64)


def _limits(lengths: Ints, bin_of: Ints, rounds: Ints, budget: int) -> Ints:
    """Return the longest row that each bin may take without making its round longer [b]."""
    counts = np.bincount(bin_of, minlength=rounds.size)
    longest = longest_of(lengths, bin_of, rounds.size)
    largest = longest_of(counts * longest, rounds, int(rounds.max()) + 1)
    return np.maximum(np.minimum(largest[rounds], budget) // counts, longest)


def _best_swap(
    heavy: int, load: Ints, rows_of: list[Ints], lengths: Ints, limit: Ints
) -> tuple[tuple[int, int] | None, int]:
    """Return the best swap, (row of the heavy rank, row of a lighter one), or None if no swap helps, and how many pairs
    were looked at.

    Ranks are looked at from the lightest on, some of them at a time, until a swap is found that helps.
    """
    mine = rows_of[heavy]
    looked = 0
    light_first = [int(r) for r in np.argsort(load, kind="stable") if r != heavy and rows_of[r].size]
    ranks_at_once = max(1, PAIRS_AT_ONCE * len(light_first) // max(1, mine.size * limit.size))
    for first in range(0, len(light_first), ranks_at_once):
        block = light_first[first : first + ranks_at_once]
        theirs = np.concatenate([rows_of[r] for r in block])
        their_load = np.repeat(load[block], [rows_of[r].size for r in block])
        looked += mine.size * theirs.size
        moved = lengths[mine][:, None] - lengths[theirs][None, :]
        allowed = (moved > 0) & (lengths[mine][:, None] <= limit[theirs][None, :])
        after = np.where(allowed, np.maximum(load[heavy] - moved, their_load[None, :] + moved), load[heavy])
        best = int(after.argmin())
        if after.flat[best] < load[heavy]:
            return (int(mine[best // theirs.size]), int(theirs[best % theirs.size])), looked
    return None, looked
