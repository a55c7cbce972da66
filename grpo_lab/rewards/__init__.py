"""Reward functions, which turn texts into scores: picklable `(prompts, completions, **columns) -> list[float | None]`.

Importing this package loads neither torch nor sympy, and starts no process.
"""

from grpo_lab.rewards.arithmetic import EquationSteps, worked_out
from grpo_lab.rewards.code import CodeReward
from grpo_lab.rewards.completion import ModeFollowingReward, ThinkFormatReward
from grpo_lab.rewards.for_task import for_task
from grpo_lab.rewards.language import LanguageConsistencyReward
from grpo_lab.rewards.length import KimiLengthReward, kimi_length_reward
from grpo_lab.rewards.math.accuracy import AccuracyReward, BoxedReward, HashesReward
from grpo_lab.rewards.noise import FlippedReward, WrongLabelReward
from grpo_lab.rewards.preference import PreferenceReward
from grpo_lab.rewards.protocol import GroupReward, group_reward
from grpo_lab.rewards.puzzles import CoinReward, CountdownReward, ProofReward, SortingReward
from grpo_lab.rewards.steps import SplitStepReward, StepReward, step_reward, steps_as_outcome
from grpo_lab.rewards.token_classification import TokenClassificationSteps
from grpo_lab.rewards.turn_scores import JudgedByEnvironment, TurnLimits, TurnRewards

__all__ = [
    "AccuracyReward",
    "BoxedReward",
    "CodeReward",
    "CoinReward",
    "CountdownReward",
    "EquationSteps",
    "FlippedReward",
    "GroupReward",
    "HashesReward",
    "JudgedByEnvironment",
    "KimiLengthReward",
    "LanguageConsistencyReward",
    "ModeFollowingReward",
    "PreferenceReward",
    "ProofReward",
    "SortingReward",
    "SplitStepReward",
    "StepReward",
    "ThinkFormatReward",
    "TokenClassificationSteps",
    "TurnLimits",
    "TurnRewards",
    "WrongLabelReward",
    "for_task",
    "group_reward",
    "kimi_length_reward",
    "step_reward",
    "steps_as_outcome",
    "worked_out",
]
