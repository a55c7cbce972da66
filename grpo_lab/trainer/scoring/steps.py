"""Step rewards inside the trainer: called on local rows as TRL calls rewards, gathered as ragged lists.

In the reward table a step reward's column holds the mean of a completion's step scores, for the log; a rule that reads steps
(``advantages.process``) finds them in ``RewardTable.steps``.
"""

from __future__ import annotations

from typing import Any

from accelerate.utils import gather_object

from grpo_lab.advantages import StepTable, reads_steps
from grpo_lab.objectives.kl import KLTerm
from grpo_lab.rewards.protocol import scope_of
from grpo_lab.rewards.steps import StepReward, StepScores, mean_score


class StepCalled:
    """Calls a step reward where TRL wants one number a completion, and keeps the steps."""

    def __init__(self, reward: StepReward, name: str) -> None:
        self.reward, self.__name__ = reward, name
        self.steps: list[StepScores] = []
        self.not_numbers = 0

    def __call__(self, **inputs: Any) -> list[float | None]:
        before = getattr(self.reward, "not_numbers", 0)
        self.steps = self.reward(**inputs)
        self.not_numbers += getattr(self.reward, "not_numbers", 0) - before
        return [mean_score(steps) for steps in self.steps]


def check_steps(reward_funcs: list[Any], rule: Any, own_hook: bool, tokenizer: Any, kl: KLTerm | None = None) -> None:
    """Step rewards and what reads them belong together; a reward that counts tokens gets the run's tokenizer.

    A hook may read steps (``table.steps``), so it is let through with them.

    Args:
        kl: the one in the reward.

    Raises:
        ValueError: one without the other; a KL per completion and no outcome that it could be taken from: a z-score of the KL alone
            is the same for every coefficient.
    """
    given = [reward for reward in reward_funcs if scope_of(reward) == "step"]
    for reward in given:
        if getattr(reward, "tokenizer", None) is None:
            reward.tokenizer = tokenizer
    if given and not (reads_steps(rule) or own_hook):
        raise ValueError(
            f"step reward {given[0].name!r} scores steps, and advantages here are made of one number a completion: set "
            "`advantage: process` (with `objective`), or give the reward as `grpo_lab.rewards.steps_as_outcome(reward)`"
        )
    if reads_steps(rule) and not given:
        raise ValueError(
            "`advantage` is 'process', but no reward scores steps: add a step reward (`grpo_lab.rewards.step_reward`, "
            "`EquationSteps`) to `reward_funcs`, or choose another rule"
        )
    of_outcome = getattr(rule, "penalises_outcome", False) and not own_hook
    if kl is not None and kl.per == "sequence" and of_outcome and len(given) == len(reward_funcs):
        raise ValueError(
            "`kl.placement` is 'reward' with `kl.per`='sequence', `advantage` is 'process', and there are step rewards only: the KL "
            "of a completion is taken from its outcome's reward, and without one `kl.coefficient` would have no effect (a z-score of "
            "the KL alone); set `kl.per: token`, or add an outcome reward to `reward_funcs`"
        )


def gathered_steps(local: dict[int, list[StepScores]], group_size: int) -> dict[int, StepTable]:
    """Each step reward's steps over all ranks, with the resolution of float32 that every reward has. A collective."""
    tables = {}
    for column in sorted(local):
        table = StepTable.of(gather_object(local[column]), group_size)
        tables[column] = StepTable(table.row, table.end, table.score.float().double(), table.rows, group_size)
    return tables


__all__ = ["StepCalled", "check_steps", "gathered_steps"]
