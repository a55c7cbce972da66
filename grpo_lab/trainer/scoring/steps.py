"""Step rewards inside the trainer: called on local rows as TRL calls rewards, gathered as ragged lists, spread to tokens.

In the reward table a step reward's column holds the mean of a completion's step scores, for the log; advantages per token come from the
steps themselves (``advantages.process``). Other rewards, where there are any, are the outcome: their z-score within the group is
added at every token. ``reward_weights`` weigh a step reward's advantages, and the outcome's rewards before they are compared.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from accelerate.utils import gather_object
from torch import Tensor

from grpo_lab.advantages import GroupZScore, Process, StepTable, spread
from grpo_lab.batch import RewardTable
from grpo_lab.rewards.protocol import scope_of
from grpo_lab.rewards.steps import StepReward, StepScores, mean_score

if TYPE_CHECKING:
    from grpo_lab.trainer.ports import StepPort


class StepCalled:
    """Calls a step reward where TRL wants one number a completion, and keeps the steps."""

    def __init__(self, reward: StepReward, name: str) -> None:
        self.reward, self.__name__ = reward, name
        self.steps: list[StepScores] = []

    def __call__(self, **inputs: Any) -> list[float | None]:
        self.steps = self.reward(**inputs)
        return [mean_score(steps) for steps in self.steps]


def check_steps(reward_funcs: list[Any], rule: Any, own_hook: bool, tokenizer: Any) -> None:
    """Step rewards and the rule that reads them belong together; a reward that counts tokens gets the run's tokenizer.

    Raises:
        ValueError: one without the other.
    """
    given = [reward for reward in reward_funcs if scope_of(reward) == "step"]
    for reward in given:
        if getattr(reward, "tokenizer", None) is None:
            reward.tokenizer = tokenizer
    per_token = isinstance(rule, Process) and not own_hook
    if given and not per_token:
        raise ValueError(
            f"step reward {given[0].name!r} scores steps, and advantages here are one number a completion: set "
            "`advantage: process` (with `objective`), or give the reward as `grpo_lab.rewards.steps_as_outcome(reward)`"
        )
    if own_hook and isinstance(rule, Process):
        raise ValueError(
            "`advantage` is 'process', which makes advantages per token of steps, and this class overrides `compute_advantages`, "
            "which makes one a completion: leave one of them out"
        )
    if per_token and not given:
        raise ValueError(
            "`advantage` is 'process', but no reward scores steps: add a step reward (`grpo_lab.rewards.step_reward`, "
            "`EquationSteps`) to `reward_funcs`, or choose another rule"
        )


def gathered_steps(local: dict[int, list[StepScores]], group_size: int) -> dict[int, StepTable]:
    """Each step reward's steps over all ranks, with the resolution of float32 that every reward has. A collective."""
    tables = {}
    for column in sorted(local):
        table = StepTable.of(gather_object(local[column]), group_size)
        tables[column] = StepTable(table.row, table.end, table.score.float().double(), table.rows, group_size)
    return tables


def outcome_of(table: RewardTable, steps: dict[int, StepTable]) -> RewardTable | None:
    """The table without the columns of step rewards; ``None`` where there is no other reward."""
    kept = [column for column in range(len(table.names)) if column not in steps]
    if not kept:
        return None
    names = tuple(table.names[column] for column in kept)
    return RewardTable(table.values[:, kept], names, table.weights[kept], table.group_size, table.penalties)


def dead_with_steps(table: RewardTable, steps: dict[int, StepTable], dead: Tensor) -> Tensor:
    """bool ``[groups]``: no outcome and no step tells the completions of a group apart.

    Args:
        dead: bool ``[groups]``, all outcomes of the group are equal (all True where there is none).
    """
    for column in steps.values():
        moved = Process().normalised(column).score != 0
        alive = torch.zeros(dead.numel(), dtype=torch.bool)
        alive[column.row[moved] // table.group_size] = True
        dead = dead & ~alive.to(dead.device)
    return dead


def token_advantages(rule: Process, table: RewardTable, steps: dict[int, StepTable], rows: slice, width: int) -> Tensor:
    """Advantages ``[B, T]`` (float64) of this rank's rows: Σ_c w_c · process(steps of c) + z-score of the outcome."""
    total = torch.zeros(rows.stop - rows.start, width, dtype=torch.float64)
    for column, scores in steps.items():
        weight = float(table.weights[column])
        part = spread(rule.normalised(scores).local(rows), width)
        total = total + (part if weight == 1.0 else weight * part)
    outcome = outcome_of(table, steps)
    if outcome is not None:
        row = GroupZScore(rule.epsilon, rule.std)(outcome.total, outcome.group_size)[rows]
        total = total + row.cpu().unsqueeze(1)
    return total


def mean_advantage(trainer: StepPort, advantages: Tensor, mask: Tensor) -> Tensor:
    """``[N]`` for the completions table: the mean over each completion's own tokens, of all ranks. A collective."""
    counts = mask.sum(1).clamp(min=1)
    mean: Tensor = trainer.accelerator.gather((advantages * mask).sum(1) / counts)
    return mean


__all__ = [
    "StepCalled",
    "check_steps",
    "dead_with_steps",
    "gathered_steps",
    "mean_advantage",
    "outcome_of",
    "token_advantages",
]
