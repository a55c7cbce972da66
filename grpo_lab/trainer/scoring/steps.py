"""Step rewards inside the trainer: called on local rows as TRL calls rewards, gathered as ragged lists.

In the reward table a step reward's column holds the mean of a completion's step scores, for the log; a rule that reads
steps (``advantages.process``) finds them in ``RewardTable.steps``.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from accelerate.utils import gather_object

from grpo_lab.advantages import StepTable, reads_steps
from grpo_lab.objectives.kl import KLTerm
from grpo_lab.rewards.protocol import scope_of
from grpo_lab.rewards.steps import StepReward, StepScores, mean_score

#: scores are compared with the resolution of float32, in which a larger one is infinite
LARGEST = torch.finfo(torch.float32).max


class StepCalled:
    """Calls a step reward where TRL wants one number a completion, and keeps the steps.

    ``keep_infinite``: an infinite score stands for its completion, to be found in the gathered table
    (``without_infinite``); among the steps it is None.
    """

    def __init__(self, reward: StepReward, name: str, keep_infinite: bool = False) -> None:
        self.reward, self.__name__, self.keep_infinite = reward, name, keep_infinite
        self.steps: list[StepScores] = []
        self.not_numbers = 0

    def __call__(self, **inputs: Any) -> list[float | None]:
        before = getattr(self.reward, "not_numbers", 0)
        scored = self._scored(inputs)
        self.not_numbers += getattr(self.reward, "not_numbers", 0) - before
        infinite = [_infinite(steps) if self.keep_infinite else None for steps in scored]
        self.steps = [
            steps if bad is None else [(end, None if _is_infinite(score) else score) for end, score in steps]
            for steps, bad in zip(scored, infinite, strict=True)
        ]
        return [mean_score(steps) if bad is None else bad for steps, bad in zip(self.steps, infinite, strict=True)]

    def _scored(self, inputs: dict[str, Any]) -> list[StepScores]:
        if not self.keep_infinite or type(self.reward).__call__ is not StepReward.__call__:
            return self.reward(**inputs)
        return self.reward.checked(self.reward.score_steps(**inputs), inputs["completion_ids"], keep_infinite=True)


def _is_infinite(score: float | None) -> bool:
    return score is not None and abs(score) > LARGEST


def _infinite(steps: StepScores) -> float | None:
    """The first score that is infinite, as what a completion got."""
    bad = [score for _, score in steps if score is not None and _is_infinite(score)]
    return math.copysign(math.inf, bad[0]) if bad else None


def check_steps(reward_funcs: list[Any], rule: Any, own_hook: bool, tokenizer: Any, kl: KLTerm | None = None) -> None:
    """Step rewards and what reads them belong together; a reward that counts tokens gets the run's tokenizer.

    A hook may read steps (``table.steps``), so it is let through with them.

    Args:
        kl: the one in the reward.

    Raises:
        ValueError: one without the other; a KL per completion and no outcome that it could be taken from: a z-score of
            the KL alone is the same for every coefficient.
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
            "`kl.placement` is 'reward' with `kl.per`='sequence', `advantage` is 'process', and there are step "
            "rewards only: the KL "
            "of a completion is taken from its outcome's reward, and without one `kl.coefficient` would have no "
            "effect (a z-score of "
            "the KL alone); set `kl.per: token`, or add an outcome reward to `reward_funcs`"
        )


def gathered_steps(local: dict[int, list[StepScores]], group_size: int) -> dict[int, StepTable]:
    """Each step reward's steps over all ranks, with the resolution of float32 that every reward has. A collective."""
    tables = {}
    for column in sorted(local):
        table = StepTable.of(gather_object(local[column]), group_size)
        tables[column] = StepTable(table.row, table.end, table.score.float().double(), table.rows, group_size)
    return tables
