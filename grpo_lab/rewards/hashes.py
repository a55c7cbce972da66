"""HashesReward: verl's rule for GSM8K. 1.0 where the number after `#### ` is the gold answer, letter by letter.

Source: `compute_score` of volcengine/verl, verl/utils/reward_score/gsm8k.py, method "strict". The pattern is
`#### (-?[0-9.,]+)`, commas are taken out, and the rest must *equal* the gold as text.

So `#### 18.0`, `#### 18.`, `#### $18`, `####18` and `#### Final Answer: 18` all earn 0 with a gold of 18, where
`AccuracyReward` gives 1 to each; and a right answer in a box or a sentence earns 0, too. It measures the format as much as the
mathematics: Qwen2.5-0.5B-Instruct scores 0.1% by it before training and 54.3% after (docs/reproduce.md).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Literal

from grpo_lab.rewards.completion import completion_text
from grpo_lab.rewards.gold import digits

_HASHED = re.compile(r"#### (-?[0-9.,]+)")


class HashesReward:
    """verl's strict GSM8K score.

    Args:
        take: which `#### number` of a completion counts: `"last"` (verl since 2025), `"first"` (before). They differ only
            where a completion has several.
    """

    columns = ("solution",)

    def __init__(self, take: Literal["last", "first"] = "last") -> None:
        if take not in ("last", "first"):
            raise ValueError(f"take must be 'last' or 'first'; got {take!r}")
        self.take = take
        self.__name__ = "hashes_reward"  # TRL names its metrics after this

    def __repr__(self) -> str:
        return f"HashesReward(take={self.take!r})"

    def __call__(
        self,
        prompts: Sequence[Any] | None = None,
        completions: Sequence[Any] | None = None,
        solution: Sequence[Any] | None = None,
        **columns: Any,
    ) -> list[float | None]:
        """Rewards in order; None where the gold is empty. `solution` is the number alone (`load_gsm8k`)."""
        if completions is None or solution is None:
            raise ValueError("HashesReward needs completions=[...] and the gold answers in the column 'solution'")
        if len(completions) != len(solution):
            raise ValueError(
                f"got {len(completions)} completions and {len(solution)} solutions; they must be one to one"
            )
        return [self._score(completion_text(one), gold) for one, gold in zip(completions, solution, strict=True)]

    def _score(self, text: str, gold: Any) -> float | None:
        if gold is None or isinstance(gold, bool):
            return None
        written = digits(gold) if isinstance(gold, int) else str(gold)
        expected = (written or "").strip().replace(",", "")
        if not expected:
            return None
        found = _HASHED.findall(text)
        return float(bool(found) and found[-1 if self.take == "last" else 0].replace(",", "") == expected)
