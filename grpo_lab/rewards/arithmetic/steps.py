r"""What a worked solution calculates: a rule-based process reward of it, and the list of its equations.

``EquationSteps`` judges every written equation. ``equation_list``: two texts with the same list are one way of solving
(RFT, arXiv 2308.01825, section 3.3): "Ann has 4 * 6 = 24 stamps. She keeps 24-5=19." -> ("4*6=24", "24-5=19").

``worked_out``: whether a completion writes a calculation down. To be watched beside an accuracy, at weight 0, not to be
paid for: "Ann has 4*6=24 stamps.\n#### 24" -> 1, "#### 24" -> 0, "x = 24" -> 0.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

from grpo_lab.rewards.arithmetic.equations import judged
from grpo_lab.rewards.completion import completion_text
from grpo_lab.rewards.steps import SplitStepReward, Splitter, by_line


class EquationSteps(SplitStepReward):
    """A step is right (1) where every equation in it that can be judged holds, wrong (0) where one does not, and not
    scored else.

    Exact fractions; decimals as rounded as they are written; chains ``a = b = c`` link by link; a name that the
    solution set (``A = 3 + 4``) is its value in later steps. What is not arithmetic on both sides is not judged
    (``equations``), so a wrong *plan* in right arithmetic is not seen, and a model could learn to write trivial
    equations: use it beside an outcome reward.

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


def equation_list(text: str) -> tuple[str, ...]:
    """The equations of ``text`` that can be read as arithmetic (``equations.judged``), in their order, without blanks.

    A chain a = b = c counts as two. Empty where the text states none: a bare answer, or reasoning in words.
    """
    return tuple("".join(f"{one.left}={one.right}".split()) for one in judged(text))


def calculates_right(text: str) -> bool:
    """Whether every equation of ``text`` that can be judged holds; true where there is none."""
    return all(one.holds for one in judged(text))


#: characters that are read: an answer that is worked out calculates long before them
MOST_READ = 8_000
_OPERATION = r"\d[^=\n\d]{0,20}(?:[-+*/×÷·⋅−^]|\bx\b|\\times|\\cdot|\\div)[^=\n\d]{0,20}\d|\\[dt]?frac"
_CALCULATION = re.compile(rf"(?:{_OPERATION})[^=\n]{{0,80}}=|=[^=\n]{{0,80}}?(?:{_OPERATION})")


def works_out(text: str) -> bool:
    """Whether ``text`` has an operation on numbers and a sign of equality in one line, right or wrong; ``MOST_READ``
    characters are read.

    Words that reason without a calculation are not seen.
    """
    return _CALCULATION.search(text[:MOST_READ]) is not None


def worked_out(completions: list[Any], **_: Any) -> list[float]:
    """1 where a completion writes a calculation down (``works_out``), else 0.

    As a reward of weight 0 it changes nothing, and the run logs ``rewards/worked_out/mean``: the share of completions
    that reason on paper. Paid for, it would teach a model to write calculations, needed or not. (TRL sums what is
    scorable: a completion that every other reward calls unscorable counts as 0 with it.)
    """
    return [float(works_out(completion_text(completion))) for completion in completions]
