"""Dead groups: who says it, and of what.

    a group is *alike*   if no outcome and no step tells its completions apart. A property of rewards; ``groups/dead_share`` counts it
    a group is *dead*    if the rule in force gives no token that carries loss an advantage. What ``dead_groups: resample`` replaces

With most rules a group is dead where it is alike. Not with ``raw`` and ``group_max``: a group that is right throughout teaches what
was right. What a hook or a team's rule thinks is not guessed: it is asked. Both are said before any KL penalty, which makes every
group differ.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from grpo_lab.advantages import StepTable, outcome_of
from grpo_lab.advantages.groups import is_dead
from grpo_lab.batch import RewardTable
from grpo_lab.trainer.scoring.advantages import checked_advantages

if TYPE_CHECKING:
    from grpo_lab.trainer.ports import StepPort

#: Of a group's reward: an advantage that small may be what rounding makes of equal rewards. Their mean in float32 is off by up to
#: 6e-8 of them, and a rule may divide that by a standard deviation of 0 plus 1e-4.
ROUNDING = 1e-3
#: the same in float64 where the rewards are 0 and only the batch's mean is not: (N · 1e-16) / 1e-4
ROUNDING_OF_NOTHING = 1e-9


def alike(table: RewardTable) -> Tensor:
    """bool ``[groups]``: all scorable outcomes of the group are equal, and so are all its step scores."""
    outcome = outcome_of(table) if table.steps else table
    groups = table.values.size(0) // table.group_size
    if outcome is None:
        found = torch.ones(groups, dtype=torch.bool, device=table.values.device)
    else:
        found = is_dead(outcome.total.view(-1, table.group_size))
    for steps in table.steps.values():
        found = found & _steps_alike(steps, groups).to(found.device)
    return found


def _steps_alike(steps: StepTable, groups: int) -> Tensor:
    known = ~steps.score.isnan()
    group, score = steps.row[known] // steps.group_size, steps.score[known]
    high = score.new_full((groups,), -torch.inf).scatter_reduce(0, group, score, "amax")
    low = score.new_full((groups,), torch.inf).scatter_reduce(0, group, score, "amin")
    return high <= low


def live_groups(trainer: StepPort, table: RewardTable, fresh: int) -> Tensor:
    """bool ``[fresh / G]``: which of the last ``fresh`` rows' groups the rule in force has something to teach from.

    The rule (or a team's hook) is asked for advantages of the whole table: what is kept already, followed by the fresh rows, which are
    the ones in ``table.local``. A collective.
    """
    assert table.local is not None
    faults, mask = trainer.recorder.faults_in_training, table.local.mask
    advantages = checked_advantages(trainer.compute_advantages(table), table, faults)
    if advantages.dim() == 1:
        advantages = advantages[table.local.rows].unsqueeze(1)
    of_rows = (advantages.to(mask.device).float().abs() * mask).amax(1)  # 0 for a row without loss tokens
    taught = trainer.accelerator.gather(of_rows).view(-1, table.group_size).amax(1).cpu()
    rewards = table.total[-fresh:].cpu().nan_to_num(nan=0.0).abs().view(-1, table.group_size).amax(1)
    rounding = alike(table).cpu()[-taught.numel() :] & (taught <= ROUNDING * rewards + ROUNDING_OF_NOTHING)
    return (taught > 0) & ~rounding


__all__ = ["alike", "live_groups"]
