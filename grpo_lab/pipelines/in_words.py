"""A recipe's settings as a reader wants them told, in a report and in a dry run's plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

from grpo_lab.evaluation.terminal import Terminal
from grpo_lab.io import is_local
from grpo_lab.recipe.rows import MADE
from grpo_lab.recipe.sections import DataSection, RewardSection, SamplingSettings
from grpo_lab.rewards.schedules import Schedule
from grpo_lab.stages.sample import problems_in


def told(settings: Any) -> str:
    """Settings in words; what is None was not applied."""
    if settings is None:
        return "not applied"
    if isinstance(settings, DataSection):
        rest = ", ".join(f"{name} {value}" for name, value in settings.arguments.items())
        limit = "" if settings.limit is None else f", the first {settings.limit:,}"
        return f"{settings.loader} ({rest}, template {settings.template}{limit})"
    if isinstance(settings, RewardSection):
        return " ".join([settings.name, *(f"{name}={value}" for name, value in settings.arguments.items())])
    if isinstance(settings, tuple):
        return "; ".join(told(one) for one in settings)
    if is_dataclass(settings):
        pairs = [(f.name, getattr(settings, f.name)) for f in fields(settings)]
        return ", ".join(f"{name.replace('_', ' ')} {told(value)}" for name, value in pairs if value is not None)
    return str(settings)


def show(name: str, facts: Mapping[str, str], console: Terminal | None = None) -> None:
    """The plan of a dry run as a table."""
    table = Table(title=Text(f"{name}: what will happen"), box=box.SIMPLE_HEAD, show_header=False, title_justify="left")
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for fact, value in facts.items():
        table.add_row(Text(fact), Text(value))  # a prompt's "[asy]" is no markup, and its "\\[" keeps the backslash
    (console or Terminal()).print(table)


def count_of(rows: Any, section: DataSection) -> str:
    """How many rows there are, and where from. Of made ones the recipe says how many, whatever was made of them."""
    count = None if rows is None else len(rows)
    if section.loader in MADE and isinstance(section.arguments.get("n"), int):
        count = min(section.arguments["n"], section.limit or section.arguments["n"])
    return f"{'not loaded here' if count is None else f'{count:,}'} from {told(section)}"


def model_of(path: str) -> str:
    """A saved model, and when one that is not here will be."""
    return path if is_local(path) else f"{path} (a hub name: loaded when sampling starts)"


def sampling_of(settings: SamplingSettings, rows: Any, file: Path, overwrite: bool) -> dict[str, str]:
    """What will be sampled, and what an earlier run has left of it in ``file``."""
    each = f"{settings.n_samples} a problem at temperature {settings.temperature:g}"
    total = "" if rows is None else f", at most {settings.n_samples * len(rows):,} in all"
    tokens = f"of at most {settings.max_completion_length} tokens each"
    there = problems_in(file)
    forgotten = " (--overwrite makes them anew)" if overwrite and there else ""
    return {
        "completions": f"{each}{total}, {tokens}; by {'vLLM' if settings.use_vllm else 'transformers'}",
        "samples that are there": f"of {there:,} problems in {file}{forgotten}" if there else "none",
    }


def settings_in_words(training: Mapping[str, Any]) -> str:
    """Those of a trainer of TRL's."""
    return ", ".join(f"{name} {value}" for name, value in training.items()) or "TRL's defaults"


def section_of(name: str, reward: Any, weight: float) -> RewardSection:
    """A reward that carries its own weight: what that comes to when its schedule is over, and the schedule."""
    own = getattr(reward, "schedule", None)
    if not isinstance(own, Schedule):
        return RewardSection(name, weight)
    return RewardSection(name, weight * own.final, {"schedule": own.as_mapping()})


def rewards_in_force(sections: Sequence[RewardSection], trainer: Any) -> list[RewardSection]:
    """The recipe's rewards with the weights in force (``reward_weights`` may have set them), then those beside them:
    that a named trainer declares, or an environment owns."""
    weights = trainer.args.reward_weights or [reward.weight for reward in sections]
    found = [replace(reward, weight=float(weight)) for reward, weight in zip(sections, weights, strict=False)]
    whole = zip(trainer.reward_func_names, trainer.reward_funcs, trainer.reward_weights.tolist(), strict=True)
    return found + [section_of(name, reward, weight) for name, reward, weight in list(whole)[len(found) :]]
