"""Rewards per step: at which tokens the steps of a completion end, and what each step is worth.

A step reward is called like any other reward and returns a list of ``(end_token, score)`` for each completion.
``end_token`` is the index of the step's last token (0 = first token of the completion), ascending. ``score`` is a
finite number, or ``None`` if the step cannot be scored. Anything else raises ValueError, with the place.
``advantage: process`` makes advantages per token of the scores (DeepSeekMath, arXiv 2402.03300, §4.1.3).

Stock TRL knows one number per completion only: there, use ``steps_as_outcome(reward)``, the mean of the step scores.
"""

from __future__ import annotations

import functools
import math
import operator
import re
from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, ClassVar

from grpo_lab.rewards.completion import whole_text
from grpo_lab.verifiers.verdict import as_number

StepScores = list[tuple[int, float | None]]
TokenIds = Sequence[Sequence[int]]


def _steps_of(row: Sequence[Any], tokens: int, place: int, name: str, infinite: bool) -> StepScores:
    """Check one completion's steps: ends ascend within its ``tokens``, scores are ``None``, finite or NaN (or
    ``infinite``).

    Ends and scores are returned as Python's own numbers (numpy's and torch's are converted).
    """
    steps: StepScores = []
    for step in row:
        try:
            end, score = step
            score = as_number(score)
        except (TypeError, ValueError, RuntimeError) as error:
            raise ValueError(
                f"step reward {name!r} gave {step!r} for a step of completion {place}; a step is (end_token, score), "
                "the score a finite number or None"
            ) from error
        if not isinstance(end, bool):
            with suppress(TypeError):  # anything but a whole number raises below
                end = operator.index(end)
        last = steps[-1][0] if steps else -1
        if type(end) is not int or not last < end < tokens:
            raise ValueError(
                f"step reward {name!r} ends a step of completion {place} at token {end!r}; ends are whole numbers that "
                f"ascend within the completion's {tokens} tokens (0 = first), and the one before is {last}"
            )
        if score is not None and math.isinf(score) and not infinite:
            raise ValueError(
                f"step reward {name!r} gave {score} to a step of completion {place}; allowed are finite numbers or None"
            )
        steps.append((end, score))
    return steps


def _listed(value: Any, count: int, name: str, where: str = "") -> list[Any]:
    plain = value is None or isinstance(value, str | Mapping) or not hasattr(value, "__iter__")
    if plain or getattr(value, "ndim", 1) == 0:
        raise ValueError(
            f"step reward {name!r} returned {value!r}{where}; a step reward returns [[(end_token, score), …], …], one "
            f"list for each of the {count} completions (an empty one where no step is scored)"
        )
    return list(value)


Splitter = Callable[[str], Sequence[int]]
"""Function ``text -> ends``: the index behind the last character of each step, ascending."""


class StepReward(ABC):
    """Base class of rewards of scope ``step``; a subclass implements ``score_steps``, which gets what any TRL reward
    gets."""

    scope: ClassVar[str] = "step"
    #: Tokenizer that says at which token a step ends. ``LabTrainer`` sets it if it is ``None``.
    tokenizer: Any = None
    #: Number of completions, since this object was made, with a step whose score was NaN (taken as ``None``).
    not_numbers: int = 0

    @property
    def name(self) -> str:
        return str(getattr(self, "__name__", type(self).__name__))

    @abstractmethod
    def score_steps(
        self, prompts: Sequence[Any], completions: Sequence[Any], completion_ids: TokenIds, **columns: Any
    ) -> Sequence[Sequence[tuple[int, float | None]]]:
        """Return ``[[(end_token, score), …], …]``, one list per completion."""

    def __call__(
        self, prompts: Sequence[Any], completions: Sequence[Any], completion_ids: TokenIds, **columns: Any
    ) -> list[StepScores]:
        """Call ``score_steps`` and check its result. Raises ValueError that names the completion and the step."""
        scored = self.score_steps(prompts, completions, completion_ids=completion_ids, **columns)
        return self.checked(scored, completion_ids)

    def means(
        self, prompts: Sequence[Any], completions: Sequence[Any], completion_ids: TokenIds, **columns: Any
    ) -> list[float | None]:
        """Return the mean of each completion's step scores; None where no step was scored."""
        return [mean_score(steps) for steps in self(prompts, completions, completion_ids=completion_ids, **columns)]

    def checked(self, scored: Any, completion_ids: TokenIds, keep_infinite: bool = False) -> list[StepScores]:
        """Check what ``score_steps`` returned. NaN becomes ``None`` (counted in ``not_numbers``). ``keep_infinite``
        allows ±∞."""
        count = len(completion_ids)
        rows = [
            _listed(row, count, self.name, f" for completion {place}")
            for place, row in enumerate(_listed(scored, count, self.name))
        ]
        if len(rows) != count:
            raise ValueError(f"step reward {self.name!r} returned {len(rows)} lists for {count} completions")
        found = [
            _steps_of(row, len(ids), place, self.name, keep_infinite)
            for place, (row, ids) in enumerate(zip(rows, completion_ids, strict=True))
        ]
        self.not_numbers += sum(any(score != score for _, score in steps) for steps in found)
        return [[(end, None if score != score else score) for end, score in steps] for steps in found]


class _FunctionStepReward(StepReward):
    __qualname__: str

    def __init__(self, score: Callable[..., Any]) -> None:
        self._score = score
        named: Any = score
        while isinstance(named, functools.partial):
            named = named.func
        if not hasattr(named, "__qualname__"):
            named = type(named)
        self._by_address = named is score  # a partial or an object has no import path of its own
        for name in ("__name__", "__qualname__", "__module__", "__doc__"):
            setattr(self, name, getattr(named, name))

    def score_steps(
        self, prompts: Sequence[Any], completions: Sequence[Any], completion_ids: TokenIds, **columns: Any
    ) -> Any:
        return self._score(prompts=prompts, completions=completions, completion_ids=completion_ids, **columns)

    def __reduce__(self) -> str | tuple[Any, ...]:
        # as functions are: by address, which holds this object after the decorator
        if self._by_address:
            return str(self.__qualname__)
        return (step_reward, (self._score,))


def step_reward(score: Callable[..., Any]) -> StepReward:
    """Decorator: make a step reward of a function that returns ``[[(end_token, score), …], …]``."""
    if not callable(score):
        raise ValueError(f"@step_reward decorates a function, got {score!r}")
    return _FunctionStepReward(score)


def by_line(text: str) -> list[int]:
    """Return where the non-blank lines end, as character indices before their trailing white space."""
    return _ends(text, r"(\n)")


def by_paragraph(text: str) -> list[int]:
    """Return where the paragraphs (separated by blank lines) end, as character indices before their trailing white
    space."""
    return _ends(text, r"(\n\s*\n)")


def _ends(text: str, between: str) -> list[int]:
    ends = []
    start = 0
    for block in re.split(between, text):
        if block.strip():
            ends.append(start + len(block.rstrip()))
        start += len(block)
    return ends


_SPLITTERS: dict[str, Splitter] = {"line": by_line, "paragraph": by_paragraph}


def token_ends(ids: Sequence[int], character_ends: Sequence[int], tokenizer: Any, to_the_end: bool = True) -> list[int]:
    """Find for each end in characters the index of the token that holds the character before it.

    ``to_the_end``: only white space follows the last step, so that step ends with the completion (and its end token).

    The search decodes beginnings of the completion (a binary search), so that it works for every tokenizer, whatever
    its offsets. Special tokens count as no character.
    """
    if not character_ends or not ids:
        return []

    def characters(count: int) -> int:
        return len(tokenizer.decode(list(ids[:count]), skip_special_tokens=True, clean_up_tokenization_spaces=False))

    found: list[int] = []
    low = 1
    for wanted in character_ends[:-1] if to_the_end else character_ends:
        low += bisect_left(range(low, len(ids)), wanted, key=characters)
        found.append(low - 1)
    if to_the_end:
        return [*found, len(ids) - 1]
    return found


def steps_as_outcome(reward: StepReward) -> Callable[..., list[float | None]]:
    """Make an ordinary reward of a step reward, for stock TRL: the mean of a completion's step scores, or ``None``
    if no step was scored. Raises ValueError if ``reward`` is no step reward."""
    if not isinstance(reward, StepReward):
        raise ValueError(
            f"`steps_as_outcome` was given {reward!r}; it takes a step reward: a function under `@step_reward`, or an "
            "object whose class derives from `StepReward`"
        )

    def outcome(
        prompts: Sequence[Any], completions: Sequence[Any], completion_ids: TokenIds, **columns: Any
    ) -> list[float | None]:
        return reward.means(prompts, completions, completion_ids=completion_ids, **columns)

    outcome.__name__ = reward.name
    return outcome


def mean_score(steps: StepScores) -> float | None:
    scores = [score for _, score in steps if score is not None]
    if scores:
        return sum(scores) / len(scores)
    return None


class SplitStepReward(StepReward):
    """Base class of step rewards that split texts into steps. A subclass implements ``score_texts`` (or ``score_all``,
    for all completions at once).

    Args:
        split: function from a text to the character indices where its steps end, or ``"line"`` (default: every line
            that is not blank), or ``"paragraph"``.
        tokenizer: the one that made the completions' token ids; ``None``: the trainer's.
    """

    def __init__(self, split: Splitter | str = by_line, tokenizer: Any = None) -> None:
        if isinstance(split, str):
            if split not in _SPLITTERS:
                raise ValueError(f"`split` is {split!r}; it must be one of {sorted(_SPLITTERS)} or a function")
            split = _SPLITTERS[split]
        self.split = split
        self.tokenizer = tokenizer

    @abstractmethod
    def score_texts(self, prompt: Any, steps: list[str]) -> Sequence[float | None]:
        """Return one score per step; ``None`` = not scored."""

    def score_all(
        self, prompts: Sequence[Any], steps: Sequence[list[str]], columns: Mapping[str, Any]
    ) -> Sequence[Sequence[float | None]]:
        """Call ``score_texts`` for every completion. ``columns``: the other columns that TRL passes."""
        return [self.score_texts(prompt, texts) for prompt, texts in zip(prompts, steps, strict=True)]

    def score_steps(
        self, prompts: Sequence[Any], completions: Sequence[Any], completion_ids: TokenIds, **columns: Any
    ) -> list[StepScores]:
        if self.tokenizer is None:
            raise ValueError(
                f"{self.name} counts in tokens where steps end: give it the model's tokenizer (`tokenizer=`); "
                "LabTrainer does so"
            )
        texts = [whole_text(one, ids, self.tokenizer) for one, ids in zip(completions, completion_ids, strict=True)]
        cuts = [self._cut(text) for text in texts]
        steps = [[text[a:b] for a, b in zip([0, *ends], ends)] for text, ends in zip(texts, cuts, strict=True)]
        scores = self.score_all(prompts, steps, columns)
        for own, found in zip(steps, scores, strict=True):
            if len(found) != len(own):
                raise ValueError(
                    f"{self.name} scored {len(found)} of a completion's {len(own)} steps; None: not scored"
                )
        return [self._placed(*one) for one in zip(completion_ids, texts, cuts, scores, strict=True)]

    def _cut(self, text: str) -> list[int]:
        ends = list(self.split(text))
        whole = all(isinstance(end, int) for end in ends)
        if not whole or any(not a < b <= len(text) for a, b in zip([0, *ends], ends)):
            raise ValueError(
                f"`split` of {self.name} gave {ends} for a text of {len(text)} characters; it gives, for each step, "
                "the index behind its last character, ascending"
            )
        return ends

    def _placed(self, ids: Sequence[int], text: str, cuts: list[int], scores: Sequence[float | None]) -> StepScores:
        """Place each score at the token where its step ends. If several steps end within one token, the worst score
        counts."""
        merged: dict[int, float] = {}
        to_the_end = bool(cuts) and not text[cuts[-1] :].strip()
        for end, score in zip(token_ends(ids, cuts, self.tokenizer, to_the_end), scores, strict=bool(ids)):
            if score is not None:
                merged[end] = min(merged.get(end, score), score)
        return list(merged.items())
