"""Settings of transformers with a fixed set of names: a wrong one is refused with the setting and the nearest match."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Any

from transformers.trainer_utils import HubStrategy, IntervalStrategy, SaveStrategy, SchedulerType
from transformers.training_args import OptimizerNames

from grpo_lab.nearest import did_you_mean

CHOICES: dict[str, type[Enum]] = {
    "lr_scheduler_type": SchedulerType,
    "optim": OptimizerNames,
    "save_strategy": SaveStrategy,
    "logging_strategy": IntervalStrategy,
    "eval_strategy": IntervalStrategy,
    "hub_strategy": HubStrategy,
}
SEEDS = 2**32
"""numpy's, which transformers seeds beside torch: 0 … 2³² − 1."""


def check_choices(values: Mapping[str, Any], where: str = "") -> None:
    """``ValueError`` for a name that its setting does not know, or a seed that numpy does not take.

    Args:
        where: the section, for messages (``"cold_start"``; empty for a flat setting).
    """
    prefix = f"{where}." if where else ""
    for name, kind in CHOICES.items():
        value = values.get(name)
        if isinstance(value, str) and not isinstance(value, Enum):
            known = [str(member.value) for member in kind]
            if value not in known:
                hint = did_you_mean(value, known)
                raise ValueError(f"`{prefix}{name}` is {value!r}{hint} Allowed: {known}")
    seed = values.get("seed")
    if isinstance(seed, int) and not 0 <= seed < SEEDS:
        raise ValueError(f"`{prefix}seed` is {seed}; it must be a whole number from 0 to {SEEDS - 1}")
