"""Rewards: text -> score. Picklable callables `(prompts, completions, **columns) -> list[float | None]`.

Names are loaded on first use (PEP 562), so that importing this room loads neither sympy nor any worker process.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

_MODULES = {
    "arithmetic.steps": "EquationSteps worked_out",
    "code": "CodeReward",
    "coin": "CoinReward",
    "countdown": "CountdownReward",
    "format": "ThinkFormatReward",
    "language.reward": "LanguageConsistencyReward",
    "length": "KimiLengthReward kimi_length_reward",
    "math.accuracy": "AccuracyReward",
    "math.published": "BoxedReward HashesReward",
    "proof": "ProofReward",
    "protocol": "GroupReward group_reward",
    "sorting": "SortingReward",
    "steps": "SplitStepReward StepReward step_reward steps_as_outcome",
    "token_classification": "TokenClassificationSteps",
}
_HOMES = {name: module for module, names in _MODULES.items() for name in names.split()}

__all__ = [
    "AccuracyReward",
    "BoxedReward",
    "CodeReward",
    "CoinReward",
    "CountdownReward",
    "EquationSteps",
    "GroupReward",
    "HashesReward",
    "KimiLengthReward",
    "LanguageConsistencyReward",
    "ProofReward",
    "SortingReward",
    "SplitStepReward",
    "StepReward",
    "ThinkFormatReward",
    "TokenClassificationSteps",
    "group_reward",
    "kimi_length_reward",
    "step_reward",
    "steps_as_outcome",
    "worked_out",
]

if TYPE_CHECKING:
    from grpo_lab.rewards.arithmetic.steps import EquationSteps, worked_out
    from grpo_lab.rewards.code import CodeReward
    from grpo_lab.rewards.coin import CoinReward
    from grpo_lab.rewards.countdown import CountdownReward
    from grpo_lab.rewards.format import ThinkFormatReward
    from grpo_lab.rewards.language.reward import LanguageConsistencyReward
    from grpo_lab.rewards.length import KimiLengthReward, kimi_length_reward
    from grpo_lab.rewards.math.accuracy import AccuracyReward
    from grpo_lab.rewards.math.published import BoxedReward, HashesReward
    from grpo_lab.rewards.proof import ProofReward
    from grpo_lab.rewards.protocol import GroupReward, group_reward
    from grpo_lab.rewards.sorting import SortingReward
    from grpo_lab.rewards.steps import SplitStepReward, StepReward, step_reward, steps_as_outcome
    from grpo_lab.rewards.token_classification import TokenClassificationSteps


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(f"grpo_lab.rewards.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'grpo_lab.rewards' has no attribute {name!r}; it offers {sorted(_HOMES)}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
