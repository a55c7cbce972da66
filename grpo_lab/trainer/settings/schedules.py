"""The mapping ``reward_schedules``: a reward's weight as a function of the optimizer step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from grpo_lab.rewards.schedules import Schedule, schedule_from


def reward_schedules(written: Any) -> dict[str, Schedule]:
    """``{reward name: schedule}`` from the configuration. Raises ``ValueError`` naming the reward and the setting."""
    if written is None:
        return {}
    if not isinstance(written, Mapping):
        raise ValueError(
            f"`reward_schedules` is {written!r}; it must be a mapping of reward names to schedules, such as "
            "{accuracy_reward: {kind: warmup, start: 100, value: 1.0}}"
        )
    found = {}
    for name, spec in written.items():
        try:
            found[str(name)] = schedule_from(spec)
        except (ValueError, TypeError) as error:
            raise ValueError(f"`reward_schedules.{name}`: {error}") from error
    return found
