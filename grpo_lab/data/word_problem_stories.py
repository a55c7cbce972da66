"""One story: events with numbers that keep every result whole and positive, told as a question and solved line by line."""

from __future__ import annotations

import functools
import hashlib
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

from grpo_lab.data.word_problem_families import NAMES, Family, Move

# Tenths of all arithmetic: RL gets most, the cold start has problems of its own, so that RL's are new to the model.
_SPLIT_OF_TENTH = ("test",) * 2 + ("cold_start",) * 3 + ("train",) * 5
SPLITS = tuple(dict.fromkeys(_SPLIT_OF_TENTH))

# What a careless reader makes of multiplicative events: adds for times, takes away for shares, forgets "each".
MISREADING = {"*": "+", "/": "-", "+*": "+", "-*": "-"}


@dataclass(frozen=True)
class Event:
    """A move with its numbers, and with the operation that the writer of the solution sees in it."""

    move: Move
    numbers: tuple[int, int]
    slots: dict[str, str]
    misread: bool = False

    @property
    def operation(self) -> str:
        return MISREADING[self.move.op] if self.misread else self.move.op


@dataclass(frozen=True)
class WordProblem:
    """A problem as it is told, its solution line by line and its answer, a whole number as text."""

    question: str
    worked_solution: str
    solution: str
    family: str
    steps: int
    arithmetic: str
    """Canonical form: family and operations with their numbers, in order. Equal for re-told problems."""

    @property
    def split(self) -> str:
        return _split_of(self.arithmetic)


@dataclass(frozen=True)
class Draft:
    """A story before it is told: its people, its moves with their numbers, and what they come to."""

    family: Family
    people: list[str]
    item: str
    moves: list[tuple[Move, tuple[int, int]]]
    steps: int
    value: int

    @property
    def arithmetic(self) -> str:
        return f"{self.family.name}:" + " ".join(f"{a}{move.op}{k}" for move, (a, k) in self.moves)

    @property
    def split(self) -> str:
        return _split_of(self.arithmetic)

    def told(self, misread: Sequence[bool]) -> WordProblem:
        """The problem. ``misread``: for each move, whether the writer of the solution misreads it."""
        events = [self._event(turn) for turn in range(len(self.moves))]
        as_read = [
            replace(event, misread=True) if wrong else event for event, wrong in zip(events, misread, strict=True)
        ]
        lines, answer = _solve(as_read)
        if answer is None:  # the misread numbers lead to nothing whole and positive: this one was read with care
            lines, answer = _solve(events)
        told = [event.move.text.format(**event.slots) for event in events]
        return WordProblem(
            question=" ".join([*told, self.family.question.format(**events[-1].slots)]),
            worked_solution="\n".join([*lines, f"#### {answer}"]),
            solution=str(self.value),
            family=self.family.name,
            steps=self.steps,
            arithmetic=self.arithmetic,
        )

    def _event(self, turn: int) -> Event:
        move, numbers = self.moves[turn]
        new = self.people[turn + 1]
        who = {"name": self.people[0], "item": self.item, "before": self.people[turn], "other": new, "last": new}
        return Event(move, numbers, who | {"a": str(numbers[0]), "k": str(numbers[1])})


def _split_of(arithmetic: str) -> str:
    digest = hashlib.sha256(arithmetic.encode()).digest()
    return _SPLIT_OF_TENTH[int.from_bytes(digest[:8], "big") % len(_SPLIT_OF_TENTH)]


def draft_until_done(rng: random.Random, family: Family, steps: int, largest: int) -> Draft | None:
    """Dead ends are begun anew with as many steps, or long problems would be rarer than asked."""
    drafts = (_draft(rng, family, steps, largest) for _ in range(50))
    return next((draft for draft in drafts if draft is not None), None)


def _draft(rng: random.Random, family: Family, steps: int, largest: int) -> Draft | None:
    """One story with exactly ``steps`` calculations; None where the numbers led into a dead end."""
    people = rng.sample(NAMES, steps + 1)
    item = rng.choice(family.items)
    moves: list[tuple[Move, tuple[int, int]]] = []
    value: int | None = None
    left_steps = steps
    while left_steps:
        known = family.openings if value is None else family.moves
        move = rng.choice(known if left_steps > 1 else [move for move in known if move.steps == 1])
        numbers = _numbers(rng, move, value, largest)
        if numbers is None:
            return None
        moves.append((move, numbers))
        left_steps -= move.steps
        a, k = numbers
        right = a * k if move.steps == 2 else k
        value = _result(a if value is None else value, move.op[0], right)
    assert value is not None
    return Draft(family, people, item, moves, steps, value)


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
    allowed = _right_operands(move.op, move.fixed, left, largest)
    return (left, rng.choice(allowed)) if allowed else None


def _opening(rng: random.Random, move: Move, largest: int) -> int:
    if move.op == "*":
        return rng.randint(2, min(12, largest // 2))
    if move.op == "/":
        return rng.choice(_dividends(move.fixed, largest))
    return rng.randint(3, largest * 3 // 5)


@functools.cache
def _dividends(fixed: int | None, largest: int) -> list[int]:
    return [left for left in range(4, largest + 1) if _right_operands("/", fixed, left, largest)]


@functools.lru_cache(maxsize=65536)
def _right_operands(op: str, fixed: int | None, left: int, largest: int) -> list[int]:
    """All ``k`` that the operation allows after ``left``."""
    if op == "+":
        ks = range(2, min(largest - left, largest * 2 // 5) + 1)
    elif op == "-":
        ks = range(2, left)
    elif op == "*":
        ks = range(2, min(9, largest // left) + 1)
    else:
        ks = range(2, min(9, left - 1) + 1)
    return [k for k in ks if (op != "/" or left % k == 0) and fixed in (None, k)]


def _result(left: int, operation: str, right: int) -> int | None:
    if operation == "/":
        return left // right if left % right == 0 else None
    result = {"+": left + right, "-": left - right, "*": left * right}[operation]
    return result if result > 0 else None
