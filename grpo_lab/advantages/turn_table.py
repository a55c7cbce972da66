"""Turns of a generation batch as tensors ``[N, K]``: their scores, their ends, what follows them, and their tokens.

N are the completions, K is the number of turns of the completion with most turns. A turn's score is a step score that
ends at the turn's last own token (``rewards.TurnRewards``; any step reward that scores every turn, ``None`` included,
will do). Token t belongs to the first turn that ends at t or later.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from grpo_lab.advantages.process import outcome_of
from grpo_lab.advantages.step_table import StepTable
from grpo_lab.batch import RewardTable

#: End of a turn that a completion does not have.
NO_TURN = torch.iinfo(torch.long).max


def scored_turns(table: RewardTable) -> tuple[Tensor, Tensor]:
    """Return scores (float64) and ends (long) of all turns, both ``[N, K]``.

    A score is Σ_c w_c · score_c over the step rewards c. It is NaN where none of them scored the turn. A turn that a
    completion does not have has a score of NaN and the end ``NO_TURN``. Raises ValueError if no reward scores steps, or
    if two of them end their steps at different tokens.
    """
    if not table.steps:
        raise ValueError("the advantage rule reads scores of turns, and no reward of the table has any (`table.steps`)")
    columns = list(table.steps)
    first: StepTable = table.steps[columns[0]]
    for column in columns[1:]:
        other = table.steps[column]
        if not (torch.equal(first.row, other.row) and torch.equal(first.end, other.end)):
            raise ValueError(
                f"the rewards {table.names[columns[0]]!r} and {table.names[column]!r} end their steps at different "
                "tokens, and the advantage rule credits turns: leave one out, or set `advantage: process`"
            )
    weighted = torch.stack([float(table.weights[column]) * table.steps[column].score for column in columns])
    place = torch.arange(first.row.numel()) - torch.searchsorted(first.row, first.row)
    most = max([index + 1 for index in place.tolist()], default=1)
    scores = torch.full((first.rows, most), math.nan, dtype=torch.float64)
    ends = torch.full((first.rows, most), NO_TURN)
    scores[first.row, place] = known_sum(weighted)
    ends[first.row, place] = first.end
    return scores, ends


def known_sum(parts: Tensor) -> Tensor:
    """Sum over the first axis, leaving out NaN; the sum is NaN where all parts are."""
    return parts.nansum(0).masked_fill(parts.isnan().all(0), math.nan)


def outcome_of_rows(table: RewardTable) -> Tensor:
    """Return the weighted sum ``[N]`` of all rewards that score no steps; NaN for a row without one."""
    found = outcome_of(table)
    if found is None:
        return torch.full((table.values.size(0),), math.nan, dtype=torch.float64)
    return found.total.cpu()


def discounted(scores: Tensor, gamma: float) -> Tensor:
    """Return R_k = Σ_{j ≥ k} γ^{j−k} r_j of scores ``[N, K]``; NaN where neither turn k nor a later one was scored.

    Returns are rounded to float32's resolution, as sums of rewards are (``RewardTable.total``). So returns that are
    equal on paper are equal here, and their advantage is exactly 0.
    """
    found = torch.full_like(scores, math.nan)
    later = torch.zeros_like(scores[:, 0])
    known = torch.zeros_like(later, dtype=torch.bool)
    for turn in reversed(range(scores.size(1))):
        later = scores[:, turn].nan_to_num(nan=0.0) + gamma * later
        known = known | ~scores[:, turn].isnan()
        found[:, turn] = later.masked_fill(~known, math.nan)
    return found.float().double()


def paid_at_the_end(outcome: Tensor, ends: Tensor, gamma: float) -> Tensor:
    """Return γ^{K_i − k} · o_i ``[N, K]``: what turn k gets of an outcome ``[N]`` that is paid in the last turn, K_i.
    It is NaN where a completion has no turn k, or no outcome."""
    left = (ends != NO_TURN).flip(1).cumsum(1).flip(1)  # turns from k on, k included
    paid = outcome.unsqueeze(1) * gamma ** (left - 1).clamp(min=0).double()
    return paid.masked_fill(left == 0, math.nan)


def turn_of_tokens(ends: Tensor, width: int) -> Tensor:
    """Return the index of each token's turn, long ``[B, width]``. Tokens behind the last turn have the index after
    it."""
    places = torch.arange(width).expand(ends.size(0), width).contiguous()
    return torch.searchsorted(ends.contiguous(), places)


def over_tokens(of_turns: Tensor, ends: Tensor, width: int) -> Tensor:
    """Spread a number per turn ``[B, K]`` over tokens: return ``[B, width]``, the number of each token's turn, and 0
    behind the last turn."""
    held = torch.nn.functional.pad(of_turns.masked_fill(ends == NO_TURN, 0.0), (0, 1))
    return held.gather(1, turn_of_tokens(ends, width))


def on_own_tokens(steps: StepTable, mask: Tensor) -> Tensor:
    """Return ``[B, T]``: each step's score at the last token that the policy wrote (``mask``) at or before the step's
    end, and 0 elsewhere. Unscored steps are left out."""
    places = torch.arange(mask.size(1), device=mask.device)
    row = steps.row.to(mask.device)
    at = (places * mask).cummax(dim=1).values[row, steps.end.to(mask.device)]
    paid = torch.zeros(mask.shape, dtype=torch.float64, device=mask.device)
    return paid.index_put((row, at), steps.score.to(mask.device).nan_to_num(nan=0.0), accumulate=True)
