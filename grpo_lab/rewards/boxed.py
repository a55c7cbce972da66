r"""BoxedReward: as `AccuracyReward`, but the answer is the last `\boxed{}` of the completion, and nothing else.

Sources: `boxed_reward_fn` of sail-sg/understand-r1-zero (understand_r1_zero/math_grader.py); the reward of
ServiceNow/TapeAgents (examples/rl_gsm8k/orchestrate_rl.py), which pays -1 where no answer can be read (`unreadable`).

How it differs from `AccuracyReward(mode="strict")`: no other marker counts, thinking tags are not looked at, and a completion
that runs on into questions of its own is judged by the last box of all (the sources do not cut it). How it differs from the
sources: equality is math-verify's in a process that can be killed, not their normalisation by Hendrycks and sympy (of theirs
TapeAgents' compares the first whole number in the box); and a completion cut at its length limit earns what its box earns
(understand-r1-zero pays it 0, TapeAgents -1).
"""

from __future__ import annotations

from grpo_lab.rewards.accuracy import AccuracyReward
from grpo_lab.rewards.extraction import Answer, boxed_answers


class BoxedReward(AccuracyReward):
    r"""1.0 for the gold answer in the last `\boxed{}`, 0.0 for another one, `unreadable` for a completion without a box.

    Args:
        unreadable: reward of a completion without a (closed, filled) box: 0.0, or below to teach the format.
        fast_path: as `AccuracyReward`, like the next three.
        timeout_s: processor seconds for one comparison.
        memory_bytes: of one worker.
        workers: processes.
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
