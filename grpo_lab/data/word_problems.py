"""Endless, seeded word problems in GSM8K's format, for runs that need no download.

    Ann buys 4 packs of 6 stamps. Ann loses 5 of the stamps. How many stamps does Ann have now?

    Ann has 4*6=24 stamps.
    Ann has 24-5=19 stamps.
    #### 19

**Splits are disjoint by construction.** A problem's arithmetic (family, operations and numbers in order, without names
and things) is hashed, and the hash alone decides whether it is a ``train``, ``cold_start`` or ``test`` problem. So a
test problem is never a training problem with other names in it, whatever the seeds and sizes.

**Careless solutions.** With ``misread`` the worked solutions are those of a writer who at times takes multiplicative
events for additive ones ("3 times as many" for "3 more", "shared among 4" for "less 4", "4 packs of 6" for "4 and 6").
Their arithmetic is right and their answer wrong, as in unfiltered solutions from elsewhere: a cold start that leaves
something for reinforcement learning to correct. The column ``solution`` stays the true answer.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import TYPE_CHECKING

from grpo_lab.data.prompts import PromptTemplate, find_template
from grpo_lab.data.rows import to_dataset
from grpo_lab.data.solution_style import SolutionStyle
from grpo_lab.data.word_problem_families import FAMILIES, NAMES, Family, Move

if TYPE_CHECKING:
    from datasets import Dataset

# Tenths of all arithmetic: RL gets most, the cold start has problems of its own, so that RL's are new to the model.
_SPLIT_OF_TENTH = ("test",) * 2 + ("cold_start",) * 3 + ("train",) * 5
SPLITS = tuple(dict.fromkeys(_SPLIT_OF_TENTH))
_MOST_STEPS = 8
_PATIENCE = 20_000  # draws in a row without a new problem of the split before we say that there is none


# What a careless reader makes of multiplicative events: adds for times, takes away for shares, forgets "each".
_MISREADING = {"*": "+", "/": "-", "+*": "+", "-*": "-"}


@dataclass(frozen=True)
class Event:
    """A move with its numbers, and with the operation that the writer of the solution sees in it."""

    move: Move
    numbers: tuple[int, int]
    slots: dict[str, str]
    misread: bool = False

    @property
    def operation(self) -> str:
        return _MISREADING[self.move.op] if self.misread else self.move.op


Misreading = Callable[[Sequence[Event]], Sequence[Event]]


@dataclass(frozen=True)
class WordProblem:
    question: str
    worked_solution: str
    solution: str
    family: str
    steps: int
    arithmetic: str
    """Canonical form: family and operations with their numbers, in order. Equal for re-told problems."""

    @property
    def split(self) -> str:
        digest = hashlib.sha256(self.arithmetic.encode()).digest()
        return _SPLIT_OF_TENTH[int.from_bytes(digest[:8], "big") % len(_SPLIT_OF_TENTH)]


def word_problems(
    n: int,
    seed: int = 0,
    split: str = "train",
    steps: tuple[int, int] = (1, 4),
    families: Sequence[str] | None = None,
    template: str | PromptTemplate = "chat",
    *,
    largest: int = 100,
    misread: float = 0.0,
    repeats: float = 0.0,
    mixed: float = 0.0,
    think: bool = False,
    system_prompt: str | None = None,
) -> Dataset:
    """``n`` different word problems as a data set.

    Args:
        seed: same arguments, same rows. Other seeds of one split may repeat problems, other splits never do.
        split: ``train``, ``cold_start`` or ``test`` (held out).
        steps: fewest and most calculations of a solution, both included; each number of steps is about equally frequent.
        families: names out of ``FAMILIES``; None for all.
        template: name of a prompt template (``grpo_lab.data.prompts``).
        largest: no number in a problem or its solution is larger. Numbers are whole and positive.
        misread: chance that ``worked_solution`` misreads a multiplicative event (see above). ``solution`` and the
            problems themselves do not depend on it.
        repeats, mixed: chances that a line of ``worked_solution`` is written twice, or in Chinese
            (``solution_style``).
        think: the lines of ``worked_solution`` stand between ``<think>`` and ``</think>``.
        system_prompt: system turn, for template ``chat`` alone.

    Returns:
        columns ``prompt, template, question, solution, worked_solution, family, steps``.

    Raises:
        ValueError: a setting out of its range, or fewer than ``n`` different problems under these settings.
    """
    if n < 1:
        raise ValueError(f"n is {n}; at least 1 problem is needed")
    form = find_template(template, system_prompt)
    style, writer = SolutionStyle(repeats, mixed, think), random.Random(f"{seed}/{split}/writer")
    problems = list(islice(iter_word_problems(seed, split, steps, families, largest=largest, misread=misread), n))
    if len(problems) < n:
        raise ValueError(
            f"only {len(problems)} different problems were found for split={split!r}, steps={tuple(steps)}, "
            f"largest={largest}, families={list(families or FAMILIES)}; n={n} asked. Raise largest or steps, or lower n"
        )
    return to_dataset(
        (
            {
                "question": problem.question,
                "solution": problem.solution,
                "worked_solution": style.write(problem.worked_solution, writer),
                "family": problem.family,
                "steps": problem.steps,
            }
            for problem in problems
        ),
        form,
    )


def iter_word_problems(
    seed: int = 0,
    split: str = "train",
    steps: tuple[int, int] = (1, 4),
    families: Sequence[str] | None = None,
    *,
    largest: int = 100,
    misread: float = 0.0,
) -> Iterator[WordProblem]:
    """The stream behind ``word_problems``: no question twice; ends when no new one turns up."""
    chosen = _checked_families(split, steps, families, largest)
    if not 0.0 <= misread <= 1.0:
        raise ValueError(f"misread is {misread}; a share between 0 and 1 is needed")
    rng = random.Random(f"{seed}/{split}")
    reader = random.Random(f"{seed}/{split}/reader")  # of its own, so that the problems stay the same

    def careless(events: Sequence[Event]) -> Sequence[Event]:
        flags = [reader.random() < misread and event.move.op in _MISREADING for event in events]
        return [replace(event, misread=flag) for event, flag in zip(events, flags, strict=True)]

    seen: set[bytes] = set()
    misses = 0
    while misses < _PATIENCE:
        problem = _tell_until_told(rng, rng.choice(chosen), rng.randint(*steps), largest, careless)
        mark = b"" if problem is None else hashlib.sha256(problem.question.encode()).digest()[:16]
        if problem is None or problem.split != split or mark in seen:
            misses += 1
            continue
        misses = 0
        seen.add(mark)
        yield problem


def _checked_families(split: str, steps: tuple[int, int], families: Sequence[str] | None, largest: int) -> list[Family]:
    if split not in SPLITS:
        raise ValueError(f"unknown split {split!r}; allowed: {', '.join(SPLITS)} (setting: split)")
    if len(steps) != 2 or not 1 <= steps[0] <= steps[1] <= _MOST_STEPS:
        raise ValueError(
            f"steps is {steps!r}; a pair (fewest, most) with 1 <= fewest <= most <= {_MOST_STEPS} is needed"
        )
    if largest < 10:
        raise ValueError(f"largest is {largest}; at least 10 is needed for the stories to have numbers to work with")
    names = list(FAMILIES) if families is None else list(families)
    unknown = [name for name in names if name not in FAMILIES]
    if unknown or not names:
        raise ValueError(f"families is {names!r}; allowed: one or more of {', '.join(FAMILIES)} (setting: families)")
    return [FAMILIES[name] for name in names]


def _tell_until_told(
    rng: random.Random, family: Family, steps: int, largest: int, misread: Misreading
) -> WordProblem | None:
    """Dead ends are told anew with as many steps, or long problems would be rarer than asked."""
    tellings = (_tell(rng, family, steps, largest, misread) for _ in range(50))
    return next((problem for problem in tellings if problem is not None), None)


def _tell(rng: random.Random, family: Family, steps: int, largest: int, misread: Misreading) -> WordProblem | None:
    """One story with exactly ``steps`` calculations; None where the numbers led into a dead end."""
    people = rng.sample(NAMES, steps + 1)
    item = rng.choice(family.items)
    events: list[Event] = []
    value: int | None = None
    left_steps = steps
    while left_steps:
        moves = family.openings if value is None else family.moves
        move = rng.choice([move for move in moves if move.steps <= left_steps])
        numbers = _numbers(rng, move, value, largest)
        if numbers is None:
            return None
        turn = len(events) + 1
        slots = {
            "name": people[0],
            "item": item,
            "before": people[turn - 1],
            "other": people[turn],
            "last": people[turn],
        }
        events.append(Event(move, numbers, slots | {"a": str(numbers[0]), "k": str(numbers[1])}))
        left_steps -= move.steps
        value = _solve(events)[1]
    told = [event.move.text.format(**event.slots) for event in events]
    lines, answer = _solve(misread(events))
    if answer is None:  # the misread numbers lead to nothing whole and positive: this one was read with care
        lines, answer = _solve(events)
    return WordProblem(
        question=" ".join([*told, family.question.format(**events[-1].slots)]),
        worked_solution="\n".join([*lines, f"#### {answer}"]),
        solution=str(value),
        family=family.name,
        steps=steps,
        arithmetic=f"{family.name}:" + " ".join(f"{e.numbers[0]}{e.move.op}{e.numbers[1]}" for e in events),
    )


def _solve(events: Sequence[Event]) -> tuple[list[str], int | None]:
    """Solution lines and final value; None as soon as a value is not whole and positive."""
    lines: list[str] = []
    value: int | None = None
    for event in events:
        left, right = event.numbers
        operation = event.operation
        if len(operation) == 2:
            lines.append(event.move.side_line.format(calc=f"{left}*{right}={left * right}", **event.slots))
            right = left * right
        if value is not None:
            left = value
        value = _result(left, operation[0], right)
        if value is None:
            return lines, None
        lines.append(event.move.line.format(calc=f"{left}{operation[0]}{right}={value}", **event.slots))
    return lines, value


def _numbers(rng: random.Random, move: Move, value: int | None, largest: int) -> tuple[int, int] | None:
    """Operands ``(a, k)`` that keep every result whole, positive and at most ``largest``; None if there are none.

    ``a`` is the left operand of an opening and the first factor of a side product; elsewhere it is not used.
    """
    if move.steps == 2:
        assert value is not None
        room = largest - value if move.op == "+*" else value - 1
        room = min(room, largest)
        if room < 4:
            return None
        a = rng.randint(2, min(9, room // 2))
        return a, rng.randint(2, max(2, min(12, room // a)))
    if value is None:
        left = _opening(rng, move, largest)
    else:
        left = value
    allowed = _right_operands(move, left, largest)
    return (left, rng.choice(allowed)) if allowed else None


def _opening(rng: random.Random, move: Move, largest: int) -> int:
    if move.op == "*":
        return rng.randint(2, min(12, largest // 2))
    if move.op == "/":
        return rng.choice([left for left in range(4, largest + 1) if _right_operands(move, left, largest)])
    return rng.randint(3, largest * 3 // 5)


def _right_operands(move: Move, left: int, largest: int) -> list[int]:
    """All ``k`` that the operation allows after ``left``."""
    if move.op == "+":
        ks = range(2, min(largest - left, largest * 2 // 5) + 1)
    elif move.op == "-":
        ks = range(2, left)
    elif move.op == "*":
        ks = range(2, min(9, largest // left) + 1)
    else:
        ks = range(2, min(9, left - 1) + 1)
    return [k for k in ks if (move.op != "/" or left % k == 0) and move.fixed in (None, k)]


def _result(left: int, operation: str, right: int) -> int | None:
    if operation == "/":
        return left // right if left % right == 0 else None
    result = {"+": left + right, "-": left - right, "*": left * right}[operation]
    return result if result > 0 else None
