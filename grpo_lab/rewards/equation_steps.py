"""``EquationSteps``: a rule-based process reward that judges every written equation of a worked solution."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import Any

from grpo_lab.rewards.equations import judged
from grpo_lab.rewards.steps import SplitStepReward, Splitter, by_line


class EquationSteps(SplitStepReward):
    """A step is right (1) where every equation in it that can be judged holds, wrong (0) where one does not, and not scored else.

    Exact fractions; decimals as rounded as they are written; chains ``a = b = c`` link by link; a name that the solution set
    (``A = 3 + 4``) stands for its value in later steps. What is not arithmetic on both sides is not judged (``equations``), so a
    wrong *plan* in right arithmetic is not seen, and a model could learn to write trivial equations: use it beside an outcome reward.

    Source: ours, in the place of DeepSeekMath's process reward model (arXiv 2402.03300, §4.1.3).

    Args:
        split: ``text -> ends`` of the steps in characters, or ``"line"`` (default), ``"paragraph"``.
        tokenizer: the one that made the completions' token ids; ``None``: the trainer's.
    """

    def __init__(self, split: Splitter | str = by_line, tokenizer: Any = None) -> None:
        super().__init__(split, tokenizer)
        self.__name__ = "equation_steps"

    def score_texts(self, prompt: Any, steps: list[str]) -> Sequence[float | None]:
        return self.judge(steps)

    @staticmethod
    def judge(steps: Sequence[str]) -> list[float | None]:
        """1, 0 or ``None`` for each step of one solution, in order."""
        names: dict[str, Fraction] = {}
        scores: list[float | None] = []
        for step in steps:
            found = judged(step, names)
            scores.append(float(all(equation.holds for equation in found)) if found else None)
        return scores


__all__ = ["EquationSteps"]
