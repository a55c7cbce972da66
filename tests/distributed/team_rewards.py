"""Rewards of a team's own module, for the real runs: ``distributed.team_rewards:odd_share`` in a recipe."""

from __future__ import annotations

from typing import Any

from grpo_lab.rewards import group_reward
from grpo_lab.rewards.protocol import Group


def odd_share(prompts: list[Any], completion_ids: list[list[int]], **_: Any) -> list[float]:
    """Something that a random model can learn: the share of odd token ids."""
    return [sum(token % 2 for token in ids) / max(len(ids), 1) for ids in completion_ids]


@group_reward(requires=("odd_share",), num_generations=4)
def shortest_of_the_odd(group: Group) -> list[float]:
    odd = [value >= 0.5 for value in group.rewards["odd_share"]]
    shortest = min((n for n, ok in zip(group.lengths, odd, strict=True) if ok), default=None)
    return [0.1 if ok and n == shortest else 0.0 for n, ok in zip(group.lengths, odd, strict=True)]


@group_reward(num_generations=4)
def fewest_turns(group: Group) -> list[float]:
    """1 for the completions with the fewest turns of their group."""
    counts = [len(turns) for turns in group.columns["turns"]]
    return [float(count == min(counts)) for count in counts]
