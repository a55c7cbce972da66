"""Rewards per step: at which tokens the steps of a completion end, and what each step is worth.

A step reward is called like any other reward and returns a list of ``(end_token, score)`` for each completion.
``end_token`` is the index of the step's last token (0 = first token of the completion), ascending. ``score`` is a
finite number, or ``None`` if the step cannot be scored. Anything else raises ValueError that names completion and step.
``advantage: process`` turns the scores into advantages of tokens (DeepSeekMath, arXiv 2402.03300, §4.1.3).

``StepReward`` is the protocol, and ``@step_reward`` makes one of a function. ``SplitStepReward`` is the base class of
those that read text: it cuts a completion into steps, and finds the tokens at which they end. Stock TRL knows one
number per completion only: there, use ``steps_as_outcome(reward)``, the mean of the step scores.
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
    """Check the steps of one completion, and return them as Python's own numbers (numpy's and torch's are converted).

    Args:
        row: what the reward returned for the completion.
        tokens: number of the completion's tokens: ends must ascend below it.
        place: index of the completion, for error messages; ``name``: the reward's name, for the same.
        infinite: whether a score may be ±∞; NaN and None always are allowed.
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
    """Return what the step reward ``name`` returned as a list. Raises ValueError if it is a number, a text, a mapping
    or None."""
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
    """Base class of rewards of scope ``step``; a subclass implements ``score_steps``, with the arguments of any TRL
    reward."""

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
        """Return ``[[(end_token, score), …], …]``, one list of steps per completion."""

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
    """A ``StepReward`` that calls a plain function. It is pickled by its import path, as functions are; one made of a
    ``partial`` or of another object without a path is pickled with that object."""

    __qualname__: str

    def __init__(self, score: Callable[..., Any]) -> None:
        self._score = score
        named: Any = score
        while isinstance(named, functools.partial):
            named = named.func
        if not hasattr(named, "__qualname__"):
            named = type(named)
        self._by_address = named is score
        for name in ("__name__", "__qualname__", "__module__", "__doc__"):
            setattr(self, name, getattr(named, name))

    def score_steps(
        self, prompts: Sequence[Any], completions: Sequence[Any], completion_ids: TokenIds, **columns: Any
    ) -> Any:
        return self._score(prompts=prompts, completions=completions, completion_ids=completion_ids, **columns)

    def __reduce__(self) -> str | tuple[Any, ...]:
        # the decorator has put this object in the place of the function: it is found under the function's path
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
    """Return where the non-blank pieces end that the pattern ``between`` (one group around it all) separates."""
    ends = []
    start = 0
    for block in re.split(between, text):
        if block.strip():
            ends.append(start + len(block.rstrip()))
        start += len(block)
    return ends


_SPLITTERS: dict[str, Splitter] = {"line": by_line, "paragraph": by_paragraph}


def token_ends(ids: Sequence[int], character_ends: Sequence[int], tokenizer: Any, to_the_end: bool = True) -> list[int]:
    """Find the tokens at which steps end, and return their indices in ``ids``.

    The search decodes ever closer beginnings of the completion, and so needs no offsets, which not every tokenizer has.
    Special tokens count as no character.

    Args:
        ids: the completion's token ids.
        character_ends: for each step the index behind its last character in the decoded completion, ascending. The
            step ends at the token that holds its last character.
        tokenizer: the one that made the ids.
        to_the_end: whether nothing but white space follows the last step. That step then ends at the last token, which
            may be an end token.
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
    """Return the mean of the scores that are not None; None without any."""
    scores = [score for _, score in steps if score is not None]
    if scores:
        return sum(scores) / len(scores)
    return None


class SplitStepReward(StepReward):
    """Base class of step rewards that split a completion's text into steps and score these texts.

    A subclass implements ``score_texts``, or overrides ``score_all`` to score all completions at once.

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
        """Return one score per step of one completion; ``None`` = not scored."""

    def score_all(
        self, prompts: Sequence[Any], steps: Sequence[list[str]], columns: Mapping[str, Any]
    ) -> Sequence[Sequence[float | None]]:
        """Return one list of scores per completion, one score per step.

        Args:
            prompts: the prompt of each completion.
            steps: the texts of each completion's steps.
            columns: what else TRL passes to rewards: the data set's columns, ``log_metric`` and so on.
        """
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
        """Return where the steps of ``text`` end. Raises ValueError if ``split`` gives no ascending indices."""
        ends = list(self.split(text))
        whole = all(isinstance(end, int) for end in ends)
        if not whole or any(not a < b <= len(text) for a, b in zip([0, *ends], ends)):
            raise ValueError(
                f"`split` of {self.name} gave {ends} for a text of {len(text)} characters; it gives, for each step, "
                "the index behind its last character, ascending"
            )
        return ends

    def _placed(self, ids: Sequence[int], text: str, cuts: list[int], scores: Sequence[float | None]) -> StepScores:
        """Return (end token, score) of each scored step; ``cuts`` are the character indices where the steps end. If
        several steps end within one token, the lowest score counts."""
        merged: dict[int, float] = {}
        to_the_end = bool(cuts) and not text[cuts[-1] :].strip()
        for end, score in zip(token_ends(ids, cuts, self.tokenizer, to_the_end), scores, strict=bool(ids)):
            if score is not None:
                merged[end] = min(merged.get(end, score), score)
        return list(merged.items())
