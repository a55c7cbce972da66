"""Generate seeded word problems in GSM8K's format, for runs that need no download.

    Ann buys 4 packs of 6 stamps. Ann loses 5 of the stamps. How many stamps does Ann have now?

    Ann has 4*6=24 stamps.
    Ann has 24-5=19 stamps.
    #### 19

**Splits are disjoint by construction** (see ``made``). What is hashed is a problem's arithmetic: its family, and its
operations and numbers in order. So a test problem is never a training problem with other names in it.

**Careless solutions.** With ``misread`` the worked solutions at times take multiplicative events for additive ones ("3
times as many" for "3 more", "shared among 4" for "less 4", "4 packs of 6" for "4 and 6"). The arithmetic is right and
the answer wrong, as in unfiltered solutions from elsewhere: a cold start that leaves something for reinforcement
learning to correct. The column ``solution`` stays the true answer.

**Habits** (`SolutionStyle`). Worked solutions can repeat lines, mix languages, think first or leave the calculation
out. A model that a cold start on them gave such a habit can be used to try rewards of length or language.
"""

from __future__ import annotations

import functools
import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from grpo_lab.data.made import checked_range, checked_split, different, split_of, take
from grpo_lab.data.prompts import PromptTemplate, find_template
from grpo_lab.data.rows import to_dataset
from grpo_lab.data.word_problem_families import FAMILIES, NAMES, Family, Move
from grpo_lab.settings import Share, settings

if TYPE_CHECKING:
    from datasets import Dataset

_CALCULATION = re.compile(r"\d+[-+*/]\d+=\d+")
_MOST_STEPS = 8
"""Most calculations of a problem."""
#: Largest number in a problem.
LARGEST = 100


@settings()
class SolutionStyle:
    """How worked solutions are written. The fields are the arguments of `word_problems` of the same names."""

    repeats: Share = 0.0
    mixed: Share = 0.0
    think: bool = False
    blurted: Share = 0.0

    def write(self, worked_solution: str, rng: random.Random, hurry: random.Random) -> str:
        """Return ``worked_solution`` in this style. Lines without a calculation, such as the answer, stay as they are.

        ``rng`` draws for each line, ``hurry`` draws whether only the answer is written. Both draw the same numbers
        whatever the style, so that two styles differ in what they are meant to differ in.
        """
        blurted = hurry.random() < self.blurted
        lines = []
        for line in worked_solution.split("\n"):
            other_language = rng.random() < self.mixed
            again = rng.random() < self.repeats
            calculation = _CALCULATION.search(line)
            if calculation is not None and other_language:
                line = f"现在有{calculation.group()}个。"
            lines += [line, line] if calculation is not None and again else [line]
        if blurted:
            return lines[-1]
        if self.think:
            lines = ["<think>", *lines[:-1], "</think>", lines[-1]]
        return "\n".join(lines)


def word_problems(
    n: int,
    seed: int = 0,
    split: str = "train",
    steps: tuple[int, int] = (1, 4),
    families: Sequence[str] | None = None,
    template: str | PromptTemplate = "chat",
    *,
    largest: int = LARGEST,
    misread: float = 0.0,
    repeats: float = 0.0,
    mixed: float = 0.0,
    think: bool = False,
    blurted: float = 0.0,
    system_prompt: str | None = None,
) -> Dataset:
    """Generate ``n`` different word problems: columns ``prompt, template, question, solution, worked_solution, family,
    steps``.

    Args:
        seed: the same arguments give the same rows. Two seeds of one split may share problems, two splits never do.
        split: ``train``, ``cold_start`` or ``test`` (held out).
        steps: fewest and most calculations of a solution, both included, each number about equally frequent.
        families: names out of ``FAMILIES``; None for all.
        template: name of a prompt template (``grpo_lab.data.prompts``).
        largest: no number in a problem or its solution is larger. Numbers are whole and positive.
        misread: chance that ``worked_solution`` misreads a multiplicative event; nothing else depends on it.
        repeats: chance that a line of ``worked_solution`` is written twice.
        mixed: chance that a line is written in Chinese ("现在有 4*6=24 个。": now there are …) instead of English.
        think: whether the lines of ``worked_solution`` stand between ``<think>`` and ``</think>``, the answer behind.
        blurted: chance that ``worked_solution`` is the answer alone, without its calculation, as most answers in a
            corpus are.
        system_prompt: system turn, for template ``chat`` alone.
    """
    form = find_template(template, system_prompt)
    style = SolutionStyle(repeats=repeats, mixed=mixed, think=think, blurted=blurted)
    writer = random.Random(f"{seed}/{split}/writer")
    hurry = random.Random(f"{seed}/{split}/hurry")
    rows = iter_word_problems(seed, split, steps, families, largest=largest, misread=misread)
    limits = {"split": split, "steps": tuple(steps), "largest": largest, "families": list(families or FAMILIES)}
    problems = take(rows, n, "problems", "Raise largest or steps", **limits)
    names = ("question", "solution", "worked_solution", "family", "steps")
    plain = [{name: getattr(problem, name) for name in names} for problem in problems]
    for row in plain:
        row["worked_solution"] = style.write(row["worked_solution"], writer, hurry)
    return to_dataset(plain, form)


def iter_word_problems(
    seed: int = 0,
    split: str = "train",
    steps: tuple[int, int] = (1, 4),
    families: Sequence[str] | None = None,
    *,
    largest: int = LARGEST,
    misread: float = 0.0,
) -> Iterator[WordProblem]:
    """Yield the problems of ``word_problems``, whose arguments these are, no question twice. End when no new one turns
    up (``made.different``). Raises ValueError for an argument out of range."""
    checked_split(split)
    checked_range("steps", steps, 1, _MOST_STEPS)
    if largest < 10:
        raise ValueError(f"largest is {largest}; at least 10 is needed for the stories to have numbers to work with")
    names = list(FAMILIES) if families is None else list(families)
    if not names or any(name not in FAMILIES for name in names):
        raise ValueError(f"families is {names!r}; allowed: one or more of {', '.join(FAMILIES)} (setting: families)")
    if not 0.0 <= misread <= 1.0:
        raise ValueError(f"misread is {misread}; a share between 0 and 1 is needed")
    rng = random.Random(f"{seed}/{split}")
    reader = random.Random(f"{seed}/{split}/reader")  # a separate one, so that ``misread`` does not change the problems

    def draw() -> tuple[str, WordProblem] | None:
        family = FAMILIES[rng.choice(names)]
        size = rng.randint(*steps)
        # dead ends are begun anew with as many steps, or long problems would be rarer than asked
        drafts = (_draft(rng, family, size, largest) for _ in range(50))
        draft = next((draft for draft in drafts if draft is not None), None)
        if draft is None:
            return None
        wrong = [reader.random() < misread and move.op in MISREADING for move, _ in draft.moves]
        if split_of(draft.arithmetic) != split:
            return None
        problem = draft.write(wrong)
        return problem.question, problem

    return different(draw, split, lambda question: split)


MISREADING = {"*": "+", "/": "-", "+*": "+", "-*": "-"}
"""Multiplicative operation → what a careless reader makes of it: adds for times, takes away for shares, forgets "each".
"""


@dataclass(frozen=True)
class WordProblem:
    """A word problem.

    Attributes:
        question: the story and its question.
        worked_solution: a line for each calculation, and ``#### answer``; its answer may be wrong (``misread``).
        solution: the true answer, a whole number as text.
        family: name of the story's family.
        steps: number of calculations.
        arithmetic: the family, and the operations with their numbers in order. Problems that differ only in names and
            things have the same.
    """

    question: str
    worked_solution: str
    solution: str
    family: str
    steps: int
    arithmetic: str


@dataclass(frozen=True)
class _Draft:
    """A story before it is written.

    Attributes:
        family: its family.
        people: names; the first is the main person, each move brings the next one.
        item: the thing that is counted.
        moves: the moves in order, each with its numbers ``(a, k)``.
        steps: number of calculations.
        value: the running value at the end, which is the answer.
    """

    family: Family
    people: list[str]
    item: str
    moves: list[tuple[Move, tuple[int, int]]]
    steps: int
    value: int

    @property
    def arithmetic(self) -> str:
        """The text of which the hash decides the split (``WordProblem.arithmetic``)."""
        return f"{self.family.name}:" + " ".join(f"{a}{move.op}{k}" for move, (a, k) in self.moves)

    def write(self, misread: Sequence[bool]) -> WordProblem:
        """Return the problem in words. ``misread``: for each move, whether the worked solution misreads it."""
        right = [move.op for move, _ in self.moves]
        lines, answer = self._solve([MISREADING[op] if wrong else op for op, wrong in zip(right, misread, strict=True)])
        if answer is None:  # the misread numbers lead to nothing whole and positive: this one was read with care
            lines, answer = self._solve(right)
        slots = [self._slots(turn) for turn in range(len(self.moves))]
        texts = [move.text.format(**slots[turn]) for turn, (move, _) in enumerate(self.moves)]
        return WordProblem(
            question=" ".join([*texts, self.family.question.format(**slots[-1])]),
            worked_solution="\n".join([*lines, f"#### {answer}"]),
            solution=str(self.value),
            family=self.family.name,
            steps=self.steps,
            arithmetic=self.arithmetic,
        )

    def _slots(self, turn: int) -> dict[str, str]:
        """Return what fills the slots of the texts of move number ``turn``."""
        a, k = self.moves[turn][1]
        before = self.people[turn]
        new = self.people[turn + 1]
        who = {"name": self.people[0], "item": self.item, "before": before, "other": new, "last": new}
        return who | {"a": str(a), "k": str(k)}

    def _solve(self, operations: Sequence[str]) -> tuple[list[str], int | None]:
        """Return the lines of the solution and the final value, if each move has its operation out of ``operations``.
        The value is None if it, or a value on the way, is not whole and positive."""
        lines: list[str] = []
        value: int | None = None
        for turn, ((move, (left, right)), operation) in enumerate(zip(self.moves, operations, strict=True)):
            slots = self._slots(turn)
            if len(operation) == 2:
                lines.append(move.side_line.format(calc=f"{left}*{right}={left * right}", **slots))
                right = left * right
            if value is not None:
                left = value
            value = _result(left, operation[0], right)
            if value is None:
                return lines, None
            lines.append(self.family.line.format(calc=f"{left}{operation[0]}{right}={value}", **slots))
        return lines, value


def _draft(rng: random.Random, family: Family, steps: int, largest: int) -> _Draft | None:
    """Draw a story with exactly ``steps`` calculations and no number above ``largest``; None if it came to a move that
    no numbers fit."""
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
    return _Draft(family, people, item, moves, steps, value)


def _numbers(rng: random.Random, move: Move, value: int | None, largest: int) -> tuple[int, int] | None:
    """Draw the numbers ``(a, k)`` of a move so that every result is whole, positive and at most ``largest``; None if
    there are none.

    ``value``: the running value before the move, None for an opening. ``a`` is the left operand of an opening, or the
    first factor of a separate product; another move does not use it.
    """
    if move.steps == 2:
        assert value is not None
        room = min(largest, largest - value if move.op == "+*" else value - 1)
        if room < 4:
            return None
        a = rng.randint(2, min(9, room // 2))
        return a, rng.randint(2, max(2, min(12, room // a)))
    left = value
    if left is None and move.op == "*":
        left = rng.randint(2, min(12, largest // 2))
    elif left is None and move.op == "/":
        left = rng.choice([one for one in range(4, largest + 1) if _right_operands("/", move.fixed, one, largest)])
    elif left is None:
        left = rng.randint(3, largest * 3 // 5)
    allowed = _right_operands(move.op, move.fixed, left, largest)
    if allowed:
        return (left, rng.choice(allowed))
    return None


@functools.lru_cache(maxsize=65536)
def _right_operands(op: str, fixed: int | None, left: int, largest: int) -> list[int]:
    """Return all right operands from 2 on that keep ``left op k`` whole, positive, and within bounds that depend on
    ``largest``; with ``fixed`` at most that number."""
    most = {
        "+": min(largest - left, largest * 2 // 5),
        "-": left - 1,
        "*": min(9, largest // left),
        "/": min(9, left - 1),
    }[op]
    return [k for k in range(2, most + 1) if (op != "/" or left % k == 0) and fixed in (None, k)]


def _result(left: int, operation: str, right: int) -> int | None:
    """Return ``left operation right``; None if that is not whole and positive."""
    if operation == "/":
        if left % right == 0:
            return left // right
        return None
    result = {"+": left + right, "-": left - right, "*": left * right}[operation]
    return result if result > 0 else None
