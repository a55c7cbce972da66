"""What would stop a training only at its first generation, or when the trainer is built: said before the cold start."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

from grpo_lab.pipelines.parts import trainer_class
from grpo_lab.pipelines.recipe import Recipe
from grpo_lab.rewards.protocol import scope_of

if TYPE_CHECKING:
    from datasets import Dataset

GIVEN_TO_REWARDS = ("prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric")
"""What TRL hands to every reward, besides the columns of the rows."""
TAKES_REWARDS = ("_calculate_rewards", "_generate_and_score_completions")
"""Where a team's trainer may hand over more."""


def check_columns(recipe: Recipe, rows: Dataset, rewards: list[Any]) -> None:
    """A reward's parameters without default must be columns of the rows, or of what TRL hands to every reward.

    A team's trainer may hand over more (``_calculate_rewards``), and an environment may own columns: not looked at there.
    """
    from grpo_lab import LabTrainer

    kind = trainer_class(recipe)
    own = any(getattr(kind, name) is not getattr(LabTrainer, name) for name in TAKES_REWARDS)
    if own or recipe.environment_factory is not None:
        return
    for section, reward in zip(recipe.rewards, rewards, strict=True):
        if isinstance(reward, str) or not inspect.isroutine(reward):
            continue
        told = inspect.signature(reward).parameters.values()
        named = [p.name for p in told if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
        missing = [name for name in named if name not in (*GIVEN_TO_REWARDS, *rows.column_names)]
        if missing and scope_of(reward) == "completion":
            raise ValueError(f"`rewards`: {section.name!r} needs {missing}, and the rows have {rows.column_names}")


def check_trackers(names: list[str]) -> None:
    """ValueError for a tracker in ``report_to`` that is not installed; transformers says so when the trainer is built."""
    from transformers.integrations import integration_utils

    for name in set(names) - set(integration_utils.get_available_reporting_integrations()) - {"none", "all", "flyte"}:
        raise ValueError(f"`report_to` names {name!r}, which is not installed here; install it, or leave it out")
