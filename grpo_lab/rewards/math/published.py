r"""Rewards as other projects pay them, to compare with: verl's for GSM8K, and the last box.

``HashesReward``: `compute_score` of volcengine/verl, verl/utils/reward_score/gsm8k.py, method "strict": `####
(-?[0-9.,]+)` without commas must *equal* the gold as text. So `#### 18.0`, `#### $18` and `####18` earn 0 with a gold
of 18 (`AccuracyReward`: 1), as does a right answer in a box: it measures the format as much as the mathematics
(docs/reproduce.md).

``BoxedReward``: `boxed_reward_fn` of sail-sg/understand-r1-zero (understand_r1_zero/math_grader.py); the reward of
ServiceNow/TapeAgents (examples/rl_gsm8k/orchestrate_rl.py), which pays -1 where no answer can be read (`unreadable`).
Unlike in `AccuracyReward(mode="strict")` no other marker counts, thinking tags are not looked at, and a completion that
runs on is judged by its last box (the sources do not cut it). Unlike in the sources equality is math-verify's
(TapeAgents compares the first whole number in the box), and a completion cut at its length limit earns what its box
earns (understand-r1-zero pays it 0, TapeAgents -1).
"""

from __future__ import annotations

import re
from typing import Any, Literal

from grpo_lab.rewards.completion import RowReward
from grpo_lab.rewards.math.accuracy import AccuracyReward, digits
from grpo_lab.rewards.math.extraction import Answer, boxed_answers

_HASHED = re.compile(r"#### (-?[0-9.,]+)")


class HashesReward(RowReward):
    """verl's strict GSM8K score: 1.0 where the number after `#### ` is the gold answer, letter by letter, else 0.0.

    Args:
        take: which `#### number` of a completion counts: `"last"` (verl since 2025), `"first"` (before). They differ
            only where a completion has several.
    """

    columns = ("solution",)

    def __init__(self, take: Literal["last", "first"] = "last") -> None:
        if take not in ("last", "first"):
            raise ValueError(f"take must be 'last' or 'first'; got {take!r}")
        self.take = take
        self.__name__ = "hashes_reward"  # TRL names its metrics after this

    def __repr__(self) -> str:
        return f"HashesReward(take={self.take!r})"

    def score(self, text: str, *row: Any) -> float | None:
        """None where the gold is empty. `solution` is the number alone (`load_gsm8k`)."""
        (gold,) = row
        if gold is None or isinstance(gold, bool):
            return None
        written = digits(gold) if isinstance(gold, int) else str(gold)
        expected = (written or "").strip().replace(",", "")
        if not expected:
            return None
        found = _HASHED.findall(text)
        return float(bool(found) and found[-1 if self.take == "last" else 0].replace(",", "") == expected)


class BoxedReward(AccuracyReward):
    r"""As `AccuracyReward`, 1.0 for the gold answer in the last `\boxed{}`, 0.0 for another one, `unreadable` for a
    completion without a box.

    ``fast_path``, ``timeout_s``, ``memory_bytes`` and ``workers`` are those of `AccuracyReward`.

    Args:
        unreadable: reward of a completion without a (closed, filled) box: 0.0, or below to teach the format.
    """

    def __init__(
        self,
        *,
        unreadable: float = 0.0,
        fast_path: bool = True,
        timeout_s: float = 5.0,
        memory_bytes: int = 1 << 30,
        workers: int | None = None,
    ) -> None:
        super().__init__("strict", fast_path=fast_path, timeout_s=timeout_s, memory_bytes=memory_bytes, workers=workers)
        if isinstance(unreadable, bool) or not -1e6 < unreadable <= 0:
            raise ValueError(f"unreadable must be a number at most 0; got {unreadable!r}")
        self.unreadable = float(unreadable)
        self.__name__ = "boxed_reward"  # TRL names its metrics after this

    def __repr__(self) -> str:
        return f"BoxedReward(unreadable={self.unreadable:g})"

    def read(self, completion: str) -> Answer | None:
        boxes = boxed_answers(completion)
        return boxes[-1] if boxes else None
