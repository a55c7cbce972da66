"""How a worked solution is written down: not at all, said twice, in two languages, between tags. The answer stays.

Cold starts on such solutions give a model habits that rewards can be tried on: one that blurts its answers and works few of
them out (accuracy), one that repeats itself (length reward), one that mixes two scripts in its reasoning (language
consistency), as R1-Zero did.
"""

from __future__ import annotations

import random
import re
from dataclasses import dataclass

_CALCULATION = re.compile(r"\d+[-+*/]\d+=\d+")


@dataclass(frozen=True)
class SolutionStyle:
    """Args:
    repeats: chance that a line is written a second time.
    mixed: chance that a line is written in Chinese ("现在有 4*6=24 个。": now there are …) instead of English.
    think: the lines stand between ``<think>`` and ``</think>``, the answer behind.
    blurted: chance that the answer stands alone, as most answers do in a corpus: nothing is worked out.
    """

    repeats: float = 0.0
    mixed: float = 0.0
    think: bool = False
    blurted: float = 0.0

    def __post_init__(self) -> None:
        for name in ("repeats", "mixed", "blurted"):
            if not 0.0 <= getattr(self, name) <= 1.0:
                raise ValueError(f"{name} is {getattr(self, name)}; a share between 0 and 1 is needed")

    def write(self, worked_solution: str, rng: random.Random, hurry: random.Random) -> str:
        """The solution in this style. Lines without a calculation (the answer) stay.

        ``rng`` draws for its lines, ``hurry`` whether there are any; their draws do not depend on the settings.
        """
        blurted = hurry.random() < self.blurted
        lines = []
        for line in worked_solution.split("\n"):
            other_language, again = rng.random() < self.mixed, rng.random() < self.repeats
            calculation = _CALCULATION.search(line)
            if calculation is not None and other_language:
                line = f"现在有{calculation.group()}个。"
            lines += [line, line] if calculation is not None and again else [line]
        if blurted:
            return lines[-1]
        if self.think:
            lines = ["<think>", *lines[:-1], "</think>", lines[-1]]
        return "\n".join(lines)
