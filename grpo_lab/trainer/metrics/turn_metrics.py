"""Metrics of turns (``rollout.turns``): how many, how long, what their calls cost and how they failed, why trajectories
end; and tokens, failures and scores by the index of a turn.

They are computed from the column ``turns`` of this rank's rows, and their sums are added up over ranks, once a
generation batch. A turn's reward is Σ_c w_c · score_c over the step rewards c with weight w_c. A step belongs to the
turn in which it ends (``advantages/turn_table.py``).
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from accelerate import Accelerator

from grpo_lab.batch import RewardTable
from grpo_lab.trainer.metrics.book import MetricBook
from grpo_lab.trainer.metrics.metric_names import COUNTED_TURNS, ENDS_OF_TRAJECTORIES
from grpo_lab.trainer.ranks import named_place
from grpo_lab.turns.trajectory import Call, Turn, calls_of
from grpo_lab.turns.turn_settings import TURNS_COLUMN

Turns = Sequence[Turn]
#: Name of a metric → its sum and its count.
Sums = dict[str, tuple[float, int]]


def record_turns(
    inputs: Sequence[Mapping[str, Any]], table: RewardTable, accelerator: Accelerator, book: MetricBook
) -> None:
    """Log the metrics of the turns of a generation batch. A collective.

    Args:
        inputs: this rank's rows, with the column ``turns``.
        table: the rewards of all ranks' rows.
    """
    made: list[Turns] = [row.get(TURNS_COLUMN, ()) for row in inputs]  # no column: a team's loop, refused later
    first = accelerator.process_index * len(made)
    found = sums_of(made) | sums_by_turn(made, scores_of(table, slice(first, first + len(made)), made))
    local = torch.tensor([list(found.values())], dtype=torch.float32, device=accelerator.device)
    with named_place("turns of all completions"):
        of_all = accelerator.gather(local).sum(0)
    for name, (total, count) in zip(found, of_all, strict=True):
        book.add_alike(name, total, count)


def sums_of(made: Sequence[Turns]) -> Sums:
    """Return sums and counts over all turns of the trajectories ``made``: tokens, calls, failures, reasons to end."""
    turns = [turn for own in made for turn in own]
    calls = calls_of(turns)
    ran = [call for call in calls if call.tries > 0]
    ends = [own[-1].ended for own in made if own]
    found: Sums = {
        "turns/per_trajectory": (len(turns), len(made)),
        "turns/tokens": (sum(map(own_tokens, turns)), len(turns)),
        "turns/tool_seconds": (math.fsum(call.seconds for call in ran), len(ran)),
        "turns/calls": (len(calls), len(made)),
        "turns/failed_share": (failures(calls), len(calls)),
        "turns/timed_out_share": (sum(call.failure == "timed_out" for call in calls), len(calls)),
        "turns/cut_share": (sum(call.cut for call in calls), len(calls)),
    }
    return found | {f"turns/ended_{reason}": (ends.count(reason), len(made)) for reason in ENDS_OF_TRAJECTORIES}


def sums_by_turn(made: Sequence[Turns], scores: Mapping[tuple[int, int], float]) -> Sums:
    """Return, for each of the first ``COUNTED_TURNS`` turns, sums and counts of tokens, failures and rewards over the
    trajectories that have such a turn. ``scores`` is what ``scores_of`` returns."""
    found: Sums = {}
    for index in range(COUNTED_TURNS):
        there = {row: own[index] for row, own in enumerate(made) if len(own) > index}
        calls = calls_of(there.values())
        known = [scores[row, index] for row in there if (row, index) in scores]
        found[f"turns/{index + 1}/tokens"] = (sum(map(own_tokens, there.values())), len(there))
        found[f"turns/{index + 1}/failed_share"] = (failures(calls), len(calls))
        found[f"turns/{index + 1}/reward"] = (math.fsum(known), len(known))
    return found


def scores_of(table: RewardTable, rows: slice, made: Sequence[Turns]) -> dict[tuple[int, int], float]:
    """Return (row, index of the turn) → reward of the turn, both from 0, for the turns that were scored. ``rows``: this
    rank's rows in the table; ``made``: their turns."""
    ends = [[turn.end - 1 for turn in own] for own in made]
    found: dict[tuple[int, int], float] = {}
    for column, steps in table.steps.items():
        weight = float(table.weights[column])
        mine = steps.local(rows)
        for row, end, score in zip(mine.row.tolist(), mine.end.tolist(), mine.score.tolist(), strict=True):
            place = (row, bisect_left(ends[row], end))
            if not math.isnan(score):
                found[place] = found.get(place, 0.0) + weight * score
    return found


def failures(calls: Iterable[Call]) -> int:
    """Return how many tool calls failed."""
    return sum(call.failure is not None for call in calls)


def own_tokens(turn: Turn) -> int:
    """Return how many of a turn's tokens the policy wrote: all but those that a thinking budget inserted."""
    return turn.end - turn.first - turn.inserted
