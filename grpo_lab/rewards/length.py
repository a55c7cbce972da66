"""Kimi k1.5's length reward: among the samples of one problem, favour short ones, and never reward a wrong one.

    λ_i = 0.5 − (len_i − min_len) / (max_len − min_len)          ∈ [−0.5, 0.5]
    reward_i = λ_i           if sample i is correct
               min(0, λ_i)   if it is wrong
    reward_i = 0 for all     if max_len = min_len

``min_len`` and ``max_len`` run over the k samples of the **same problem**, lengths in tokens. Source: Kimi k1.5, arXiv
2501.12599, section 2.3.3 "Length penalty". There it is added to the task reward with a weight that is 0 at first, then
constant. What the paper leaves open, and how public code departs from it: ``docs/algorithms/kimi_length_reward.md``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args

from grpo_lab.rewards.for_task import name_of
from grpo_lab.rewards.protocol import CompletionReward, Group, GroupReward
from grpo_lab.rewards.schedules import Constant, Schedule, Warmup, schedule_from
from grpo_lab.verifiers.verdict import CORRECT_FROM

Truncated = Literal["as_is", "wrong", "exclude"]


def kimi_length_reward(lengths: Sequence[int], correct: Sequence[bool | None]) -> list[float]:
    """Compute the length reward of one group, without a weight.

    Args:
        lengths: tokens of each of the k samples of one problem.
        correct: whether each is correct. ``None``: the sample is left out of min and max, and gets 0.

    Returns:
        k numbers in [−0.5, 0.5].
    """
    if len(lengths) != len(correct):
        raise ValueError(f"one length and one verdict per sample: got {len(lengths)} lengths, {len(correct)} verdicts")
    if any(length < 0 for length in lengths):
        raise ValueError(f"lengths are token counts ≥ 0, got {min(lengths)}")
    taking_part = [length for length, verdict in zip(lengths, correct) if verdict is not None]
    shortest = min(taking_part, default=0)
    longest = max(taking_part, default=0)
    if shortest == longest:
        return [0.0] * len(lengths)
    rewards = []
    for length, verdict in zip(lengths, correct):
        by_length = 0.5 - (length - shortest) / (longest - shortest)
        if verdict is None:
            rewards.append(0.0)
        elif verdict:
            rewards.append(by_length)
        else:
            rewards.append(min(0.0, by_length))
    return rewards


class KimiLengthReward(GroupReward):
    """Group reward of length, ``weight(step) · reward_i``, with a weight of its own that may change over training.

    The values contain that weight already: leave the entry in TRL's ``reward_weights`` at 1.

    Args:
        weight: a number, or a schedule of ``rewards.schedules`` (also as a mapping). The paper does not give its value.
        warmup_steps: weight 0 for this many optimizer steps, then ``weight``. Leave it at 0 if ``weight`` is a
            schedule.
        correctness: the completion reward that says what is correct: its name, or (in stock TRL) the callable.
        correct_from: a sample is correct if that reward's value is at least this.
        truncated: how to count a sample that the token budget stopped. ``as_is``: like any other. ``wrong``: never
            correct. ``exclude``: left out of min and max, reward 0. The last two are refused in stock TRL, which does
            not say what was truncated.
        num_generations: see ``GroupReward``.

    A sample that the correctness reward calls unscorable (``None``) is left out of min and max and gets ``None``.
    """

    __name__ = "kimi_length_reward"

    def __init__(
        self,
        weight: float | Mapping[str, Any] | Schedule = 1.0,
        warmup_steps: int = 0,
        correctness: str | CompletionReward = "accuracy_reward",
        correct_from: float = CORRECT_FROM,
        truncated: Truncated = "as_is",
        num_generations: int | None = None,
    ) -> None:
        sources: dict[str, CompletionReward] | None = None
        if isinstance(correctness, str):
            name = correctness
        elif callable(correctness):
            name = name_of(correctness)
            sources = {name: correctness}
        else:
            raise ValueError(f"`correctness` is a reward's name or a reward callable, got {correctness!r}")
        if truncated not in get_args(Truncated):
            raise ValueError(f"`truncated` must be one of {get_args(Truncated)}, got {truncated!r}")
        super().__init__(num_generations=num_generations, sources=sources)
        self.requires = (name,)
        self.schedule = schedule_from(weight)
        if warmup_steps:
            if not isinstance(self.schedule, Constant):
                raise ValueError(
                    f"`warmup_steps={warmup_steps}` is the short form for a constant weight; with "
                    f"weight={self.schedule!r} say it in the schedule and leave `warmup_steps` at 0"
                )
            self.schedule = Warmup(start=warmup_steps, value=self.schedule.value)
        self.correct_from = correct_from
        self.truncated = truncated

    def weight_at(self, step: int) -> float:
        """Return the weight in force at optimizer step ``step`` (what a trainer logs)."""
        return self.schedule(step)

    def needs_progress(self) -> bool:
        return not self.schedule.is_constant

    def score_group(self, group: Group) -> list[float | None]:
        values = self.required(self.requires[0], group)
        verdicts = [None if value is None else bool(value >= self.correct_from) for value in values]
        if self.truncated != "as_is":
            if group.truncated is None:
                raise ValueError(
                    f"KimiLengthReward(truncated={self.truncated!r}) must know which samples the token budget cut off, "
                    "and stock TRL tells no reward. Use grpo_lab.LabTrainer, or truncated='as_is'"
                )
            counted = None if self.truncated == "exclude" else False
            cuts = zip(verdicts, group.truncated)
            verdicts = [counted if cut and verdict is not None else verdict for verdict, cut in cuts]
        weight = self.weight_at(group.step)
        by_length = kimi_length_reward(group.lengths, verdicts)
        return [None if value is None else weight * reward for value, reward in zip(values, by_length)]
