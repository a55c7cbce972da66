"""Rewards of generated problems (Countdown, sorting, proofs), whose answers a rule checks; and a random one, as a
control.

Scores can rise under a random reward, too: RL on Qwen2.5 lifts MATH-500 even when the reward knows nothing of the
answer. This model family has seen the problems (arXiv 2507.10532), and clipping favours what the model does anyway
(arXiv 2506.10947). Train the control with everything else as in the run it is compared with, and report both.
"""

from __future__ import annotations

import math
import os
import re
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from fractions import Fraction
from itertools import pairwise
from typing import Any

import numpy as np

from grpo_lab.rewards.arithmetic import NotArithmetic, value_of
from grpo_lab.rewards.completion import RowReward, answer_block
from grpo_lab.verifiers.logic import Formula, NoFormula, NotAProof, check, read

MOST_CHARACTERS, MOST_DEPTH = 500, 50  # of an expression
_EXPRESSION = re.compile(r"(?:[ \t]|[0-9]{1,18}(?![0-9])|[-+*/()])*")
_SIGNS = str.maketrans({"×": "*", "·": "*", "⋅": "*", "∗": "*", "÷": "/", "∕": "/", "−": "-", "–": "-"})


class CountdownReward(RowReward):
    """Reward 1.0 for an expression that reaches ``target`` with each of ``numbers`` exactly once, else 0.0. None for a
    row without a list of numbers or a target, or with one that is no whole number.

        reward = 1[value(expression) = target and numbers(expression) = numbers given, as multisets]

    The game of the television programme, as in TinyZero (github.com/Jiayi-Pan/TinyZero). How we differ: the expression
    is read into exact fractions, never by ``eval``; there is no reward for the form alone. The expression is the last
    line of the last ``<answer>``, else of the last fenced block, else of the text: ``(3 + 5) * 4``, or
    ``(3 + 5) * 4 = 32``.
    """

    columns = ("numbers", "target")
    __name__ = "countdown_reward"

    def score(self, text: str, *row: Any) -> float | None:
        numbers, target = row
        if target is None or isinstance(numbers, str | bytes) or numbers is None or not len(numbers):
            return None  # in a text, each digit would be taken for a number
        try:
            *given, goal = [Fraction(number) for number in (*numbers, target)]
        except (TypeError, ValueError, ArithmeticError):
            return None
        if any(number.denominator != 1 for number in (*given, goal)):
            return None
        return float(reaches(answer_block(text).strip().rpartition("\n")[2], list(map(int, given)), int(goal)))


def reaches(text: str, numbers: Sequence[int], target: int) -> bool:
    """Return whether ``text`` is an expression, or ``expression = target``, that has the value ``target`` and uses each
    of ``numbers`` once."""
    left, equals, right = text.strip().rstrip(".").strip("$`").partition("=")
    right = right.strip().translate(_SIGNS)
    sign = -1 if right.startswith("-") else 1  # a target below 0
    try:
        value, used = value_and_numbers(left)
        stated: Fraction | int = target
        if equals:
            stated = sign * value_and_numbers(right.removeprefix("-"))[0]
    except NotArithmetic:
        return False
    return value == stated == target and Counter(used) == Counter(numbers)


def value_and_numbers(expression: str) -> tuple[Fraction, list[int]]:
    """Return the exact value of an expression of whole numbers, and these numbers in order. Raises ``NotArithmetic``
    for any other text.

    A number must not have a sign of its own, since the game has no negative numbers, and a product needs its ``*``.
    """
    expression = expression.strip().translate(_SIGNS)
    if len(expression) > MOST_CHARACTERS or not _EXPRESSION.fullmatch(expression):
        raise NotArithmetic(f"not whole numbers, + - * / and brackets in {MOST_CHARACTERS} characters")
    tokens = re.findall(r"[0-9]+|\S", expression)
    depth = 0
    for before, token in pairwise(["(", *tokens]):
        depth += (token == "(") - (token == ")")
        begins_value = token.isdigit() or token == "("
        behind_value = before.isdigit() or before == ")"
        if depth > MOST_DEPTH or begins_value == behind_value:  # a value must not, and all else must, follow a value
            raise NotArithmetic(f"{token!r} after {before!r}, or brackets deeper than {MOST_DEPTH}")
    return value_of(" ".join(tokens)), [int(token) for token in tokens if token.isdigit()]


_INTEGER = re.compile(r"-?[0-9]+")
_MOST_READ = 4000
"""Largest number of characters of a number that is read. A longer one counts as infinite."""


def _in_order(answer: Sequence[float]) -> int:
    """Count the numbers that are not larger than the next one."""
    return sum(a <= b for a, b in pairwise(answer))


KINDS: dict[str, Callable[[list[int], list[float]], float]] = {
    "distance": lambda numbers, answer: sum(a == b for a, b in zip(sorted(numbers), answer, strict=True)),
    "inclusion_ordering": lambda numbers, answer: sum(x in answer for x in numbers) + _in_order(answer),
    "inclusion_ordering_multiset": lambda numbers, answer: (
        (Counter[float](numbers) & Counter(answer)).total() + _in_order(answer)
    ),
    "exact": lambda numbers, answer: answer == sorted(numbers),
}
"""Kind → its score, a function of the prompt's numbers and of as many answered ones (formulas: ``SortingReward``)."""


class SortingReward(RowReward):
    """Score how well a completion sorts the prompt's numbers. It is made to study reward hacking: two of its kinds can
    be gamed.

        distance                       Σ_i 1[o_i = sorted(q)_i]                                           0 … L
        inclusion_ordering             Σ_{x ∈ q} 1[x ∈ o] + Σ_i 1[o_i ≤ o_{i+1}]                           0 … 2L − 1
        inclusion_ordering_multiset    Σ_x min(count_x(q), count_x(o)) + Σ_i 1[o_i ≤ o_{i+1}]              0 … 2L − 1
        exact                          1[o = sorted(q)]                                                  0 or 1

    The answer o is the integers of a completion in order, q the prompt's L numbers. More or fewer than L integers earn
    0, and a row without numbers gets None. Source: CS336 lecture 17. Its code is ``inclusion_ordering``; its formula
    counts with multiplicity, as ``inclusion_ordering_multiset`` does. For q = [4, 2, 4, 4] and o = [0, 2, 4, 6] these
    two give 7 and 5; a uniformly random answer (L = 4 numbers, each one of 10) earns 3.03 and 2.86 on average.

    Args:
        kind: ``distance``, ``inclusion_ordering``, ``inclusion_ordering_multiset`` or ``exact``.
    """

    columns = ("numbers",)

    def __init__(self, kind: str = "exact") -> None:
        if kind not in KINDS:
            raise ValueError(f"kind is {kind!r}; it must be one of {list(KINDS)}")
        self.kind = kind
        self.__name__ = f"sorting_{kind}_reward"  # TRL names its metrics after this

    def score(self, text: str, *row: Any) -> float | None:
        numbers = row[0]
        if numbers is None:
            return None
        wanted = None
        if not isinstance(numbers, str | bytes | dict):
            with suppress(TypeError, ValueError):
                wanted = [int(one) for one in numbers]
        if wanted is None:
            kind = "text" if isinstance(numbers, str) else type(numbers).__name__
            raise ValueError(f"`numbers` holds the {kind} {numbers!r:.200}; it must be a list of integers")
        if not wanted:
            return None
        found = _INTEGER.findall(text)
        if len(found) != len(wanted):
            return 0.0
        answer = [int(one) if len(one) <= _MOST_READ else math.copysign(math.inf, float(one[:2])) for one in found]
        return float(KINDS[self.kind](wanted, answer))


_FIRST = re.compile(r"^\s*1[.):]")
_NUMBERED = re.compile(r"^\s*[0-9]{1,4}[.):]")
_TURNSTILE = re.compile(r"\|-|⊢")


class ProofReward(RowReward):
    """Reward 1.0 for a proof of the row's ``sequent`` (``p -> q, p |- q``) by natural deduction for propositional
    logic, else 0.0; None if the ``sequent`` cannot be parsed.

        reward = 1[every line follows by its rule, and the last is the goal under no assumption]

    The checker is our own and reads one format (``verifiers.logic``). A proof cannot be guessed as an answer can, and
    every correct proof is accepted. The proof is read from the last ``<answer>``, else the last fenced block, else the
    text. There it begins at the last line with the number 1, and ends before the next line without a number.
    """

    columns = ("sequent",)
    __name__ = "proof_reward"

    def score(self, text: str, *row: Any) -> float | None:
        try:
            return float(why_not(text, row[0] if isinstance(row[0], str) else "") == "")
        except NoFormula:
            return None


def why_not(completion: str, sequent: str) -> str:
    """Return what is wrong with the proof in ``completion``; an empty text if it is right. Raises ``NoFormula`` if
    ``sequent`` cannot be parsed."""
    premises, goal = read_sequent(sequent)
    lines = [line for line in answer_block(completion).splitlines() if line.strip()]
    first = max((place for place, line in enumerate(lines) if _FIRST.match(line)), default=len(lines))
    end = next((place for place in range(first, len(lines)) if not _NUMBERED.match(lines[place])), len(lines))
    try:
        check("\n".join(lines[first:end]), premises, goal)
    except NotAProof as error:
        return str(error)
    return ""


def read_sequent(text: str) -> tuple[list[Formula], Formula]:
    """Parse ``p -> q, p |- q`` into premises and goal. Raises ``NoFormula`` for another text."""
    sides = _TURNSTILE.split(text)
    if len(sides) != 2:
        raise NoFormula("a sequent is `premises |- goal`")
    return [read(part) for part in sides[0].split(",") if part.strip()], read(sides[1])


class CoinReward:
    """Random reward: 1.0 with probability ``p`` for each completion, whatever it says, else 0.0; drawn anew at every
    call.

    The draws follow from (seed, rank, optimizer step, number of the call in this step). So the same run draws the same
    values, ranks draw different ones, and a resumed run draws what the uninterrupted one does. The exception is a batch
    that is open at a checkpoint, if an evaluation on an `eval_dataset` calls this reward in the same step.

    Args:
        p: probability of 1.0.
        seed: seed of the draws. It is this reward's own, apart from the run's.
    """

    __name__ = "coin_reward"

    def __init__(self, p: float = 0.5, *, seed: int = 0) -> None:
        if isinstance(p, bool) or not 0 <= p <= 1:
            raise ValueError(f"p must be a probability, from 0 to 1; got {p!r}")
        if type(seed) is not int or seed < 0:
            raise ValueError(f"seed must be a whole number of at least 0; got {seed!r}")
        self.p = float(p)
        self.seed = seed
        self._last = (-1, 0)  # step, calls in it

    def __repr__(self) -> str:
        return f"CoinReward(p={self.p:g}, seed={self.seed})"

    def __call__(
        self,
        prompts: Sequence[Any] | None = None,
        completions: Sequence[Any] | None = None,
        *,
        trainer_state: Any = None,
        **columns: Any,
    ) -> list[float | None]:
        """Return 0.0 or 1.0 for each completion. Without `trainer_state` (TRL gives it) all calls count as step 0."""
        if completions is None:
            raise ValueError("CoinReward needs completions=[...]; got none")
        step = int(getattr(trainer_state, "global_step", 0))
        call = 0
        if self._last[0] == step:
            call = self._last[1] + 1
        self._last = (step, call)
        throws = np.random.default_rng([self.seed, int(os.environ.get("RANK", "0")), step, call])
        return [float(heads) for heads in throws.random(len(completions)) < self.p]
