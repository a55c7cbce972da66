"""What would stop a training only at its first generation, or when the trainer is built: said before the cold start."""

from __future__ import annotations

import inspect
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from grpo_lab.engines.sampler import context_of_config
from grpo_lab.pipelines.context_room import cut_to_fit
from grpo_lab.pipelines.parts import trainer_class
from grpo_lab.pipelines.recipe import ColdStartSection, Recipe
from grpo_lab.pipelines.rows import MADE, load_rows, rows_here
from grpo_lab.rewards.protocol import scope_of
from grpo_lab.settings import one_of
from grpo_lab.trainer.supervised.cold_start import check_cold_start, check_rows

if TYPE_CHECKING:
    from datasets import Dataset

GIVEN_TO_REWARDS = ("prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric")
"""What TRL hands to every reward, besides the columns of the rows."""
FEW = 1000
"""Rows of a cold start that a dry run makes."""
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


def check_trackers(names: Any, where: str = "report_to") -> None:
    """ValueError for a tracker that nobody knows or that is not installed, before the trainer is built."""
    from transformers.integrations import integration_utils

    here = {*integration_utils.get_available_reporting_integrations(), "none", "all", "flyte"}
    for name in [names] if isinstance(names, str) else names or ():
        if name not in integration_utils.INTEGRATION_TO_CALLBACK and name not in here:
            known = sorted(integration_utils.INTEGRATION_TO_CALLBACK)
            raise ValueError(f"`{where}` names {name!r}{one_of(name, known)}")
        if name not in here:
            raise ValueError(f"`{where}` names {name!r}, which is not installed here; install it, or leave it out")


def cold_start_rows(section: ColdStartSection, model: tuple[Any, Any] | None, here_only: bool) -> Any:
    """The rows of a cold start, its settings looked at as well.

    A dry run (``here_only``) makes few of them, where more would show nothing else.

    Args:
        model: its tokenizer and configuration, where they are known.
    """
    settings = check_cold_start(section.arguments)
    check_trackers(settings.get("report_to"), "cold_start.report_to")
    if here_only:
        count, data = section.data.arguments.get("n"), section.data
        alike = model is None or cut_to_fit(section, context_of_config(model[1]))
        if alike and data.loader in MADE and isinstance(count, int) and count > FEW:
            data = replace(data, arguments={**data.arguments, "n": FEW})
        rows = rows_here(data, "cold_start.data")
    else:
        rows = load_rows(section.data, "cold_start.data")
    if rows is not None:
        check_rows(rows)
    return rows
