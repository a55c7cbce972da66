"""TRL's own shaping rewards, by the names that recipes use; what TRL calls a reward, and which measure correctness."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import nn
from trl import rewards
from trl.trainer.utils import get_callable_name, get_config_model_id

from grpo_lab.rewards.for_task import ForTask

#: Name in a recipe → function of ``trl.rewards`` that builds the reward from its arguments.
SHAPING = {
    "soft_overlong": "get_soft_overlong_punishment",  # DAPO, arXiv 2503.14476, eq. 13
    "repetition": "get_repetition_penalty_reward",
    "cosine_scaled": "get_cosine_scaled_reward",
}


def shaping(name: str) -> Callable[..., Any]:
    """Return the function of ``trl.rewards`` that builds the shaping reward ``name`` (`SHAPING`). It is looked up only
    here, since TRL loads a parser of LaTeX together with some of its rewards."""
    return getattr(rewards, SHAPING[name])


def reward_name(reward: Any) -> str:
    """Return the name that TRL gives a reward: the last part of a reward model's id or path, or the function's name,
    also of a function inside a ``partial``. An object without a ``__name__`` has that of its class."""
    if isinstance(reward, str):
        return reward.split("/")[-1]
    if isinstance(reward, nn.Module):
        return get_config_model_id(reward.config).split("/")[-1]
    return str(get_callable_name(reward))


def correctness_columns(reward_funcs: list[Any]) -> list[int]:
    """Return the indices of the rewards by which a run's accuracy is measured: the first reward that measures
    correctness or, if it belongs to a task (``ForTask``), the first one of each task."""
    first: dict[str | None, int] = {}
    for column, reward in enumerate(reward_funcs):
        if measures_correctness(reward):
            first.setdefault(reward.task if isinstance(reward, ForTask) else None, column)
    columns = sorted(first.values())
    if None in first and columns[0] == first[None]:
        return columns[:1]
    return columns


def measures_correctness(reward: Any) -> bool:
    """Return whether a reward measures correctness: it has ``measures_correctness = True``, or is TRL's accuracy_reward
    or an AccuracyReward. A ``partial`` counts as the function that it holds, a ``ForTask`` as the reward in it."""
    while isinstance(reward, (functools.partial, ForTask)):
        if isinstance(reward, ForTask):
            reward = reward.reward
        else:
            reward = reward.func
    own = getattr(reward, "measures_correctness", False)
    return bool(own or reward_name(reward) in ("accuracy_reward", "AccuracyReward"))
