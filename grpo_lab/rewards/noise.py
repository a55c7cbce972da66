"""Rewards that are wrong on purpose, by independent flips or by labels that stay wrong: what do a verifier's mistakes
cost?

The two differ. A flip is drawn anew for every completion, so a group still tells right from wrong on average (arXiv
2604.07666: 15% cost at most 2 points, false positives more than false negatives). A wrong label is a property of the
prompt: whenever it comes, the same wrong answer is rewarded, and no average removes it (arXiv 2603.16140: 8 to 10% lost
whatever the algorithm).

No random state is used: a draw is a hash of a seed and of what is judged, the same in every process and after a resume.
Neither reward measures correctness: add the true reward at weight 0, so that the log has it.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Callable, Sequence
from decimal import Decimal
from typing import Any

from grpo_lab.rewards.protocol import refuse_waiting, scope_of
from grpo_lab.verifiers.verdict import CORRECT_FROM, checked_scores
from grpo_lab.verifiers.written import number_text

_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")
_LARGEST_SLIP = 9


def draw(*of: Any) -> float:
    """Return a uniform number in [0, 1), a hash of the arguments (JSON values, or objects that ``str`` can write)."""
    text = json.dumps(of, sort_keys=True, default=str)
    return int.from_bytes(hashlib.blake2b(text.encode("utf-8", "replace"), digest_size=8).digest()) / 2**64


class _Noisy:
    """Base class of rewards that distort another reward of completions. Their name is ``kind``, then its name."""

    def __init__(self, kind: str, reward: Callable[..., Sequence[float | None]], seed: int) -> None:
        if scope_of(reward) != "completion":
            raise ValueError(
                f"{type(self).__name__} takes a reward of completions; {reward!r} is of a {scope_of(reward)}"
            )
        refuse_waiting(reward, f"`reward` of {type(self).__name__}")
        self.reward = reward
        self.seed = seed
        self.columns = getattr(reward, "columns", ())
        self.__name__ = f"{kind}_{getattr(reward, '__name__', type(reward).__name__)}"

    def close(self) -> None:
        """End the workers of the reward inside, if it has any."""
        getattr(self.reward, "close", lambda: None)()

    def _scores(self, prompts: Any, completions: Sequence[Any], columns: dict[str, Any]) -> list[float | None]:
        values = self.reward(prompts=prompts, completions=completions, **columns)
        return checked_scores(values, len(completions), f"the reward inside {self.__name__}")


class FlippedReward(_Noisy):
    """Flip each verdict of ``reward`` independently. A wrong completion gets 1.0 with probability ``false_positives``,
    a right one (a score of 1 or more) gets 0.0 with probability ``false_negatives``. All other completions get 1.0 if
    they are right, else 0.0; None stays None.

    Two equal completions of one prompt in one call have draws of their own. So has the same completion in another
    optimizer step (``trainer_state``, which TRL passes).

    Args:
        reward: a reward of completions, such as ``AccuracyReward()``.
        false_positives: share of the wrong completions that get 1.0, in [0, 1].
        false_negatives: share of the right completions that get 0.0, in [0, 1].
        seed: another seed gives other flips at the same rates.
    """

    def __init__(
        self, reward: Any, *, false_positives: float = 0.0, false_negatives: float = 0.0, seed: int = 0
    ) -> None:
        super().__init__("flipped", reward, seed)
        self.false_positives = _share(false_positives, "false_positives")
        self.false_negatives = _share(false_negatives, "false_negatives")

    def __repr__(self) -> str:
        rates = f"false_positives={self.false_positives:g}, false_negatives={self.false_negatives:g}"
        return f"FlippedReward({self.reward!r}, {rates}, seed={self.seed})"

    def __call__(
        self, prompts: Sequence[Any], completions: Sequence[Any], trainer_state: Any = None, **columns: Any
    ) -> list[float | None]:
        scores = self._scores(prompts, completions, {**columns, "trainer_state": trainer_state})
        step = int(getattr(trainer_state, "global_step", 0))
        seen = Counter[str]()
        found = list[float | None]()
        for prompt, completion, score in zip(prompts, completions, scores, strict=True):
            key = json.dumps([prompt, completion], sort_keys=True, default=str)
            seen[key] += 1
            if score is None or score != score:  # NaN is unscorable, too
                found.append(score)
                continue
            right = score >= CORRECT_FROM
            flips = draw(self.seed, step, key, seen[key]) < (self.false_negatives if right else self.false_positives)
            found.append(float(right != flips))
        if columns.get("log_metric") is not None and found:
            pairs = zip(scores, found, strict=True)
            flipped = sum(before is not None and (before >= CORRECT_FROM) != (after == 1.0) for before, after in pairs)
            columns["log_metric"](f"{self.__name__}/flipped", flipped / len(found))
        return found


class WrongLabelReward(_Noisy):
    """Score with ``reward``, but judge a share of the prompts by a wrong gold answer, always the same one for a prompt.
    The last number of its ``solution`` is off by 1 to 9, up or down. Which prompts have a wrong label, and by how much
    it is off, is a function of the prompt and the seed.

    Args:
        reward: a reward of completions that reads the column ``solution``.
        share: share of the prompts that have a wrong label, in [0, 1].
        seed: another seed chooses other prompts.
    """

    def __init__(self, reward: Any, *, share: float, seed: int = 0) -> None:
        super().__init__("wrong_label", reward, seed)
        self.share = _share(share, "share")

    def __repr__(self) -> str:
        return f"WrongLabelReward({self.reward!r}, share={self.share:g}, seed={self.seed})"

    def __call__(
        self, prompts: Sequence[Any], completions: Sequence[Any], solution: Sequence[Any], **columns: Any
    ) -> list[float | None]:
        labels = [self.label(prompt, gold) for prompt, gold in zip(prompts, solution, strict=True)]
        return self._scores(prompts, completions, {**columns, "solution": labels})

    def is_wrong(self, prompt: Any) -> bool:
        """Return whether this prompt has a wrong label."""
        return draw(self.seed, "wrong", prompt) < self.share

    def label(self, prompt: Any, solution: Any) -> Any:
        """Return the solution by which ``prompt`` is judged: its own or, if ``is_wrong``, a wrong one of the same type.
        Raises ValueError if the solution to be changed has no number."""
        if not self.is_wrong(prompt) or solution is None:
            return solution
        written = number_text(solution) or str(solution)
        numbers = list(_NUMBER.finditer(written))
        if not numbers:
            raise ValueError(
                f"WrongLabelReward makes wrong labels of solutions with a number in them, and one is {solution!r:.80}: "
                "leave such rows out of the data"
            )
        last = numbers[-1]
        slip = 1 + int(draw(self.seed, "slip", prompt) * 2 * _LARGEST_SLIP)  # 1 to 18
        offset = slip if slip <= _LARGEST_SLIP else _LARGEST_SLIP - slip  # 1 to 9, or -1 to -9
        number = Decimal(last[0].replace(",", "")) + offset
        text = f"{written[: last.start()]}{number}{written[last.end() :]}"
        if isinstance(solution, str):
            return text
        return type(solution)(text)


def _share(value: float, name: str) -> float:
    """Return the setting ``name`` as a float. Raises ValueError unless it lies in [0, 1]."""
    if isinstance(value, bool) or not 0 <= value <= 1:
        raise ValueError(f"`{name}` is {value!r}; it is a share and lies in [0, 1]")
    return float(value)
