"""Generate seeded rows without a download: Countdown games, numbers to sort, and coding tasks. The helpers here also
serve ``word_problems`` and ``proofs``.

**Splits are disjoint by construction**: a row's content is hashed, and the hash alone decides its split. So a test row
is never a training row, whatever the seeds and sizes.

All generators work alike. A function draws one random row with a key. ``different`` calls it again and again, and keeps
the rows that are new and whose key belongs to the split. ``take`` collects ``n`` of them, or raises ValueError.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any, TypeVar

from grpo_lab.data.prompts import PromptTemplate, find_template
from grpo_lab.data.rows import Row, to_dataset
from grpo_lab.settings import one_of

if TYPE_CHECKING:
    from datasets import Dataset

T = TypeVar("T")
Mark = TypeVar("Mark", bound=Hashable)
PATIENCE = 20_000
"""The generator stops after this many draws in a row that gave no new row of the split."""
_OF_TENTH = ("test",) * 2 + ("cold_start",) * 3 + ("train",) * 5
"""The split of each tenth of all content: hash modulo 10 → split."""
SPLITS = tuple(dict.fromkeys(_OF_TENTH))


def split_of(content: str, of_tenth: Sequence[str] = _OF_TENTH, digits: int = 8) -> str:
    """Return the split to which ``content`` belongs by its hash. By default that is ``train`` for half of all content,
    ``cold_start`` for three tenths, ``test`` for two.

    ``of_tenth``: the split of each remainder; ``digits``: number of the hash's bytes that count.
    """
    digest = hashlib.sha256(content.encode()).digest()
    return of_tenth[int.from_bytes(digest[:digits], "big") % len(of_tenth)]


def different(draw: Callable[[], tuple[Mark, T] | None], split: str, find_split: Callable[[Mark], str]) -> Iterator[T]:
    """Yield different rows of a split; end after ``PATIENCE`` draws in a row without a new one.

    Args:
        draw: function that draws a row and returns (key, row), or None if the draw led nowhere. Rows with the same key
            count as the same.
        split: the split whose rows are yielded.
        find_split: function that returns the split to which a key belongs.
    """
    seen: set[Mark] = set()
    misses = 0
    while misses < PATIENCE:
        drawn = draw()
        misses += 1
        if drawn is not None and drawn[0] not in seen and find_split(drawn[0]) == split:
            misses = 0
            seen.add(drawn[0])
            yield drawn[1]


def take(rows: Iterator[T], n: int, what: str, advice: str, **settings: Any) -> list[T]:
    """Return the first ``n`` rows. Raises ValueError if there are fewer; its message says how many ``what`` there are
    for which ``settings``, and gives the ``advice``."""
    if n < 1:
        raise ValueError(f"n is {n}; at least 1 is needed")
    found = list(islice(rows, n))
    if len(found) < n:
        said = ", ".join(f"{name}={value!r}" for name, value in settings.items())
        raise ValueError(f"only {len(found)} different {what} were found for {said}; n={n} asked. {advice}, or lower n")
    return found


def checked_split(split: str, splits: Sequence[str] = SPLITS) -> str:
    """Return ``split``. Raises ValueError if it is none of ``splits``."""
    if split not in splits:
        raise ValueError(f"`split` is {split!r}{one_of(split, splits)}")
    return split


def checked_range(name: str, pair: Sequence[int], low: int, high: int) -> tuple[int, int]:
    """Return ``pair`` as ``(fewest, most)``. Raises ValueError unless ``low <= fewest <= most <= high``; ``name`` is
    the argument, for the message."""
    if len(pair) != 2 or not low <= pair[0] <= pair[1] <= high:
        raise ValueError(f"{name} is {pair!r}; a pair (fewest, most) with {low} <= fewest <= most <= {high} is needed")
    return pair[0], pair[1]


def countdown(
    n: int,
    seed: int = 0,
    split: str = "train",
    numbers: tuple[int, int] = (3, 4),
    template: str | PromptTemplate = "chat",
    *,
    largest: int = 25,
    largest_target: int = 100,
    system_prompt: str | None = None,
) -> Dataset:
    """Generate ``n`` different games of Countdown: reach a target with each given number exactly once. Columns
    ``prompt, template, question, numbers, target, solution, worked_solution``.

    Every game has a known solution: numbers are drawn, then two at a time are combined until one is left, the target.
    ``seed``, ``split``, ``template`` and ``system_prompt`` are those of ``word_problems``.

    Args:
        numbers: fewest and most numbers of a game, both included.
        largest: no given number is larger. All are whole and positive, as is every step of the known solution.
        largest_target: no target is larger.
    """
    form = find_template(template, system_prompt)
    if largest < 2 or largest_target < 2:
        raise ValueError(f"largest is {largest}, largest_target {largest_target}; at least 2 is needed")
    sizes = checked_range("numbers", numbers, 2, 8)
    rng = random.Random(f"countdown/{seed}/{split}")
    rows = different(lambda: _game(rng, rng.randint(*sizes), largest, largest_target), checked_split(split), split_of)
    limits = {"split": split, "numbers": sizes, "largest": largest, "largest_target": largest_target}
    return to_dataset(take(rows, n, "games", "Raise largest or numbers", **limits), form)


def _game(rng: random.Random, size: int, largest: int, largest_target: int) -> tuple[str, Row] | None:
    """Draw a game of ``size`` numbers. Return its key (numbers sorted, target) and row; None if the target is 1 or
    above ``largest_target``, or is one of the numbers."""
    numbers = [rng.randint(1, largest) for _ in range(size)]
    left = [(number, str(number)) for number in numbers]
    steps: list[str] = []
    while len(left) > 1:
        (a, first), (b, second) = rng.sample(left, 2)
        left.remove((a, first))
        left.remove((b, second))
        ways = [("+", a + b), ("*", a * b)]  # that leave a whole and positive number
        ways += [("-", a - b)] if a > b else []
        ways += [("/", a // b)] if a % b == 0 and b > 1 else []
        sign, value = rng.choice(ways)
        steps.append(f"{a} {sign} {b} = {value}")
        left.append((value, f"({first} {sign} {second})"))
    target = left[0][0]
    expression = left[0][1][1:-1]
    if not 2 <= target <= largest_target or target in numbers:
        return None
    given = ", ".join(map(str, numbers))
    return f"countdown {(tuple(sorted(numbers)), target)}", {
        "question": f"Use each of the numbers {given} exactly once, with + - * / and brackets, to make {target}. "
        "End with <answer>your expression</answer>.",
        "numbers": numbers,
        "target": target,
        "solution": expression,
        "worked_solution": "\n".join([*steps, f"<answer>{expression}</answer>"]),
    }


_SORTING_TENTH = ("test",) * 2 + ("cold_start",) * 2 + ("train",) * 6
"""The same as ``_OF_TENTH`` for the rows of ``sorting``."""
SORTING_SPLITS = tuple(dict.fromkeys(_SORTING_TENTH))


def sorting(
    n: int,
    seed: int = 0,
    split: str = "train",
    length: int = 4,
    vocabulary: int = 10,
    template: str | PromptTemplate = "chat",
    *,
    system_prompt: str | None = None,
) -> Dataset:
    """Generate ``n`` different rows of numbers to sort, all equally likely, to study a reward that can be gamed.
    Columns ``prompt, template, question, solution, worked_solution, numbers``.

        prompt        4 2 4 4
        solution      2 4 4 4
        numbers       [4, 2, 4, 4]          (what ``grpo_lab.rewards.SortingReward`` reads)

    **A cold start on the form alone**: ``worked_solution`` has random numbers, as many as the prompt. A model that
    sorts later has learnt it from a reward. Source: the sorting chapter of CS336 lecture 17 (L = 4 of V = 10).

    ``seed``, ``split``, ``template`` and ``system_prompt`` are those of ``word_problems``.

    Args:
        length: L, how many numbers a prompt has.
        vocabulary: V; numbers are 0 … V − 1, drawn with replacement.
    """
    checked_split(split, SORTING_SPLITS)
    for name, value, least in (("length", length, 1), ("vocabulary", vocabulary, 2)):
        if value < least:
            raise ValueError(f"{name} is {value}; at least {least} is needed")
    form = find_template(template, system_prompt)
    rng = random.Random(f"{seed}/{split}")
    writer = random.Random(f"{seed}/{split}/writer")

    def draw() -> tuple[tuple[int, ...], tuple[int, ...]]:
        numbers = tuple(rng.randrange(vocabulary) for _ in range(length))
        return numbers, numbers

    rows = different(draw, split, lambda numbers: split_of(_spaced(sorted(numbers)), _SORTING_TENTH, digits=4))
    limits = {"split": split, "length": length, "vocabulary": vocabulary}
    return to_dataset(
        (
            {
                "question": _spaced(numbers),
                "solution": _spaced(sorted(numbers)),
                "worked_solution": _spaced([writer.randrange(vocabulary) for _ in numbers]),
                "numbers": list(numbers),
            }
            for numbers in take(rows, n, "prompts", "Raise length or vocabulary", **limits)
        ),
        form,
    )


def _spaced(numbers: Sequence[int]) -> str:
    return " ".join(map(str, numbers))


@dataclass(frozen=True)
class Step:
    """A step of a coding task on a list ``x``: in words, and as a line of Python. ``{k}`` in both stands for a number
    out of ``numbers``."""

    words: str
    code: str
    numbers: tuple[int, ...] = (0,)


MIDDLE = (
    Step("Add {k} to each number.", "x = [n + {k} for n in x]", (1, 2, 3, 4, 5, 7)),
    Step("Take {k} from each number.", "x = [n - {k} for n in x]", (1, 2, 3, 4, 5, 7)),
    Step("Multiply each number by {k}.", "x = [n * {k} for n in x]", (2, 3, 4, 5)),
    Step("Square each number.", "x = [n * n for n in x]"),
    Step("Keep the even numbers.", "x = [n for n in x if n % 2 == 0]"),
    Step("Keep the odd numbers.", "x = [n for n in x if n % 2 == 1]"),
    Step("Keep the numbers above {k}.", "x = [n for n in x if n > {k}]", (0, 2, 4, 6, 8)),
    Step("Keep the numbers below {k}.", "x = [n for n in x if n < {k}]", (4, 6, 8, 10)),
    Step("Drop the first {k} numbers.", "x = x[{k}:]", (1, 2, 3)),
    Step("Reverse the list.", "x = x[::-1]"),
    Step("Sort the list.", "x = sorted(x)"),
    Step("Drop repeated numbers.", "x = list(dict.fromkeys(x))"),
)
LAST = (
    Step("Return their sum.", "return sum(x)"),
    Step("Return how many there are.", "return len(x)"),
    Step("Return the list.", "return x"),
    Step("Return the largest, or 0 if there is none.", "return max(x, default=0)"),
    Step("Return the smallest, or 0 if there is none.", "return min(x, default=0)"),
)


def coding_tasks(
    n: int,
    seed: int = 0,
    split: str = "train",
    steps: tuple[int, int] = (1, 3),
    template: str | PromptTemplate = "chat",
    *,
    tests: int = 5,
    system_prompt: str | None = None,
) -> Dataset:
    """Generate ``n`` different coding tasks: columns ``prompt, template, question, tests, solution, worked_solution,
    steps``.

        Write a Python function f(x). x is a list of whole numbers. Add 3 to each number. Keep the even numbers. Return
        their sum.

    A task is a chain of steps. ``tests`` is a text of assertions on random lists; running the program here gives the
    expected values. Without any one of its steps a program fails some test. ``solution`` is the program that the task
    was made with, ``worked_solution`` the same in a fenced block. ``seed``, ``split``, ``template`` and
    ``system_prompt`` are those of ``word_problems``.

    Args:
        steps: fewest and most steps before the ``return``, both included.
        tests: assertions of each task.
    """
    form = find_template(template, system_prompt)
    if tests < 1:
        raise ValueError(f"tests is {tests}; at least 1 is needed")
    sizes = checked_range("steps", steps, 1, 6)
    rng = random.Random(f"coding_tasks/{seed}/{split}")
    rows = different(lambda: _task(rng, rng.randint(*sizes), tests), checked_split(split), split_of)
    return to_dataset(take(rows, n, "tasks", "Raise steps", split=split, steps=sizes), form)


def _task(rng: random.Random, steps: int, tests: int) -> tuple[str, Row] | None:
    """Draw a task with ``steps`` steps before its ``return``. Return its program, which is its key, and its row; None
    if a program without one of these steps would pass the tests."""
    chain = [(step, rng.choice(step.numbers)) for step in (*rng.sample(MIDDLE, steps), rng.choice(LAST))]
    lists = [[rng.randint(0, 12) for _ in range(rng.randint(3, 7))] for _ in range(tests)]

    def answers(steps: Sequence[tuple[Step, int]]) -> tuple[str, list[Any]]:
        """Return the program of some steps, and what it returns for each of the lists."""
        program = "\n".join(["def f(x):", *(f"    {step.code.format(k=k)}" for step, k in steps)])
        made: dict[str, Any] = {}
        exec(program, made)  # lines of the tables above
        return program, [made["f"](numbers) for numbers in lists]

    program, right = answers(chain)
    if any(answers(chain[:place] + chain[place + 1 :])[1] == right for place in range(steps)):
        return None
    words = " ".join(step.words.format(k=k) for step, k in chain)
    return program, {
        "question": f"Write a Python function f(x). x is a list of whole numbers. {words}",
        "tests": "\n".join(f"assert f({numbers}) == {answer}" for numbers, answer in zip(lists, right, strict=True)),
        "solution": program,
        "worked_solution": f"```python\n{program}\n```",
        "steps": steps,
    }
