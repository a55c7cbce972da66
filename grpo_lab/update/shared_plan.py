"""The plan of one optimizer step whose prompts are computed once: whole groups in bins, without padding.

A bin is one packed row (`trl_bridge.shared_attention`), so it costs what it holds: Σ over its prompts of (prompt + Σ
completions), in tokens. A row with c completion tokens adds c: its last token is not computed, but a copy of its
prompt's last token is.

Rows of a prompt stay together if the budget and an even share of a rank allow it. A group that is cut carries its
prompt into both parts. Groups of similar length share a bin, since its attention works on rectangles. The plan has the
fewest rounds that the budget allows, and its largest bin is as small as contiguous cuts of the sorted groups can make
it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from grpo_lab.update.balance import Ints, assign_bins, loads_of
from grpo_lab.update.plan import DEFAULT_OVERHEAD_TOKENS, Numbers, Plan, Rows, empty_plan, whole_numbers

#: What a shared bin costs beyond its tokens if attention is called on rectangles: a share of the tokens (attention
#: under a mask, keys gathered for every completion), and tokens per bin (attention in several calls).
DEARER, DEARER_BIN = 0.15, 96


@dataclass(frozen=True)
class _PartOfGroup:
    """Rows of one prompt that are computed together.

    Attributes:
        tokens: tokens of the prompt and of all completions.
        longest: tokens of the prompt and the longest completion.
        rows: table index of each row.
    """

    tokens: int
    longest: int
    rows: list[int]


def plan_shared(rows: Rows, prompts: Numbers, num_ranks: int, max_tokens: int) -> Plan:
    """Distribute the live rows over ranks and bins so that a bin computes each of its prompts once.

    The guarantees are those of `plan_update`, where a bin's tokens are those of its packed row. `tokens_live` of the
    plan counts a prompt once per bin. A row longer than max_tokens has a bin by itself.

    Args:
        rows: all rows of the step.
        prompts: [N], a number per row, equal for rows with the same prompt (a hash of its tokens; the packed row
            compares the tokens).
        num_ranks: number of ranks.
        max_tokens: tokens that one forward may have.

    Raises:
        ValueError: `prompts` are not whole numbers, or not one per row.
    """
    named = whole_numbers("prompts", prompts, signed=True)
    live = np.asarray(rows.live)
    if named.size != live.size:
        raise ValueError(f"{named.size} prompts for {live.size} rows")
    if not live.any():
        return empty_plan(num_ranks, shared=True)
    parts = _parts(rows, named, num_ranks, max_tokens)
    tokens = np.asarray([part.tokens for part in parts], dtype=np.int64)
    starts = _cuts(tokens, num_ranks, max_tokens)
    sizes = np.add.reduceat(tokens, starts)
    rounds, ranks = assign_bins(sizes, np.arange(sizes.size), num_ranks)
    bins: list[list[list[int]]] = [[[] for _ in range(int(rounds.max()) + 1)] for _ in range(num_ranks)]
    computed = np.zeros((num_ranks, int(rounds.max()) + 1), dtype=np.int64)
    for place, (start, end) in enumerate(zip(starts, [*starts[1:], len(parts)], strict=True)):
        rank = int(ranks[place])
        k = int(rounds[place])
        bins[rank][k] = [row for part in parts[start:end] for row in part.rows]
        computed[rank, k] = sizes[place]
    load = tuple(loads_of(sizes, ranks, num_ranks).tolist())
    step = int(computed.max(axis=0).sum())
    return Plan(bins, int(sizes.sum()), int(sizes.sum()), step, load, load, shared=True)


def cheaper(
    plain: Plan,
    shared: Plan,
    dearer: float = DEARER,
    dearer_bin: int = DEARER_BIN,
    overhead: int = DEFAULT_OVERHEAD_TOKENS,
) -> Plan:
    """Return the plan whose step takes less time. The time is counted in tokens: those that the step waits for, and
    `overhead` for each round (one more forward).

    Args:
        plain: a plan without shared prompts.
        shared: a plan of the same rows with shared prompts.
        dearer: what a shared bin costs beyond its tokens, as a share of them.
        dearer_bin: what a shared bin costs beyond that, in tokens per bin.
        overhead: what one more forward costs, in tokens.
    """
    rounds = len(shared.bins[0])
    dear = shared.step_tokens * (1 + dearer) + rounds * (overhead + dearer_bin)
    if dear < plain.step_tokens + overhead * len(plain.bins[0]):
        return shared
    return plain


def _parts(rows: Rows, prompts: Ints, num_ranks: int, max_tokens: int) -> list[_PartOfGroup]:
    """Cut the live rows into parts with one prompt each, longest first. No part exceeds the budget or a rank's even
    share, unless it is a single row."""
    prompt = np.asarray(rows.prompt_lengths)
    completion = np.asarray(rows.completion_lengths)
    table = np.flatnonzero(rows.live)
    table = table[np.lexsort((table, -completion[table], prompts[table]))]
    _, first = np.unique(prompts[table], return_index=True)
    share = -(-int(completion[table].sum() + prompt[table[first]].sum()) // num_ranks)
    cap = min(max_tokens, share)
    parts = []
    for group in np.split(table, first[1:]):
        start = 0
        before = int(prompt[group].max())
        while start < group.size:
            grown = before + np.cumsum(completion[group[start:]])
            size = max(1, int(np.searchsorted(grown, cap, side="right")))
            held = group[start : start + size]
            parts.append(_PartOfGroup(int(grown[size - 1]), before + int(completion[held[0]]), held.tolist()))
            start += size
    return sorted(parts, key=lambda part: (-part.longest, -part.tokens, part.rows[0]))


def _cuts(tokens: Ints, num_ranks: int, max_tokens: int) -> Ints:
    """Return the bins' starts for the fewest rounds, with the largest bin as small as possible: bisection over a greedy
    walk."""
    ends = np.cumsum(tokens)

    def walk(limit: int) -> list[int]:
        starts = [0]
        while True:
            done = int(ends[starts[-1]] - tokens[starts[-1]])
            following = max(int(np.searchsorted(ends, done + limit, side="right")), starts[-1] + 1)
            if following >= tokens.size:
                return starts
            starts.append(following)

    bins = -(-len(walk(max_tokens)) // num_ranks) * num_ranks
    low = 1
    high = max(max_tokens, int(tokens.max()))
    while low < high:
        middle = (low + high) // 2
        if len(walk(middle)) <= bins:
            high = middle
        else:
            low = middle + 1
    return np.asarray(walk(low), dtype=np.int64)
