"""Endless, seeded coding tasks with tests, for runs that need no download.

    Write a Python function f(x). x is a list of whole numbers. Add 3 to each number. Keep the even numbers. Return
    their sum.

    def f(x):
        x = [n + 3 for n in x]
        x = [n for n in x if n % 2 == 0]
        return sum(x)

A task is a chain of steps; its tests are assertions on drawn lists, computed by running the steps here; each step
changes some test's answer. **Splits are disjoint by construction**, as in ``word_problems``: the hash of the program
decides.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from grpo_lab.data.made import checked_range, checked_split, different, split_of, take
from grpo_lab.data.prompts import PromptTemplate, find_template
from grpo_lab.data.rows import to_dataset

if TYPE_CHECKING:
    from datasets import Dataset

Numbers = list[int]


@dataclass(frozen=True)
class Step:
    """One step of a chain: in words, as a line of Python, and as what it does. ``{k}`` is its number."""

    words: str
    code: str
    does: Callable[[Numbers, int], Any]
    numbers: tuple[int, ...] = (0,)


MIDDLE = (
    Step("Add {k} to each number.", "x = [n + {k} for n in x]", lambda x, k: [n + k for n in x], (1, 2, 3, 4, 5, 7)),
    Step("Take {k} from each number.", "x = [n - {k} for n in x]", lambda x, k: [n - k for n in x], (1, 2, 3, 4, 5, 7)),
    Step("Multiply each number by {k}.", "x = [n * {k} for n in x]", lambda x, k: [n * k for n in x], (2, 3, 4, 5)),
    Step("Square each number.", "x = [n * n for n in x]", lambda x, k: [n * n for n in x]),
    Step("Keep the even numbers.", "x = [n for n in x if n % 2 == 0]", lambda x, k: [n for n in x if n % 2 == 0]),
    Step("Keep the odd numbers.", "x = [n for n in x if n % 2 == 1]", lambda x, k: [n for n in x if n % 2 == 1]),
    Step(
        "Keep the numbers above {k}.",
        "x = [n for n in x if n > {k}]",
        lambda x, k: [n for n in x if n > k],
        (0, 2, 4, 6, 8),
    ),
    Step(
        "Keep the numbers below {k}.",
        "x = [n for n in x if n < {k}]",
        lambda x, k: [n for n in x if n < k],
        (4, 6, 8, 10),
    ),
    Step("Drop the first {k} numbers.", "x = x[{k}:]", lambda x, k: x[k:], (1, 2, 3)),
    Step("Reverse the list.", "x = x[::-1]", lambda x, k: x[::-1]),
    Step("Sort the list.", "x = sorted(x)", lambda x, k: sorted(x)),
    Step("Drop repeated numbers.", "x = list(dict.fromkeys(x))", lambda x, k: list(dict.fromkeys(x))),
)
LAST = (
    Step("Return their sum.", "return sum(x)", lambda x, k: sum(x)),
    Step("Return how many there are.", "return len(x)", lambda x, k: len(x)),
    Step("Return the list.", "return x", lambda x, k: x),
    Step("Return the largest, or 0 if there is none.", "return max(x, default=0)", lambda x, k: max(x, default=0)),
    Step("Return the smallest, or 0 if there is none.", "return min(x, default=0)", lambda x, k: min(x, default=0)),
)
Chain = tuple[tuple[Step, int], ...]


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
    """``n`` different tasks: columns ``prompt, template, question, tests, solution, worked_solution, steps``.

    ``tests`` is a text of assertions, ``solution`` the program that the task was made with, ``worked_solution`` the
    same in a fenced block.

    ``seed``, ``split``, ``template`` and ``system_prompt`` are those of ``word_problems``.

    Args:
        steps: fewest and most steps before the ``return``, both included.
        tests: assertions of each task.

    Raises:
        ValueError: a setting out of its range, or fewer than ``n`` different tasks under these settings.
    """
    form = find_template(template, system_prompt)
    if tests < 1:
        raise ValueError(f"tests is {tests}; at least 1 is needed")
    sizes = checked_range("steps", steps, 1, 6)
    rng = random.Random(f"coding_tasks/{seed}/{split}")

    def draw() -> tuple[str, dict[str, Any]] | None:
        chain = _drawn(rng, rng.randint(*sizes))
        program = _program(chain)
        lists = [[rng.randint(0, 12) for _ in range(rng.randint(3, 7))] for _ in range(tests)]
        return (program, _row(chain, program, lists)) if _every_step_counts(chain, lists) else None

    rows = different(draw, checked_split(split), split_of)
    return to_dataset(take(rows, n, "tasks", "Raise steps", split=split, steps=sizes), form)


def _drawn(rng: random.Random, steps: int) -> Chain:
    chosen = [*rng.sample(MIDDLE, steps), rng.choice(LAST)]
    return tuple((step, rng.choice(step.numbers)) for step in chosen)


def run(chain: Chain, numbers: Numbers) -> Any:
    """What the chain makes of ``numbers``."""
    value: Any = list(numbers)
    for step, k in chain:
        value = step.does(value, k)
    return value


def _every_step_counts(chain: Chain, lists: list[Numbers]) -> bool:
    """Each step changes some test's answer: a program without it fails."""
    answers = [run(chain, numbers) for numbers in lists]
    shorter = [chain[:place] + chain[place + 1 :] for place in range(len(chain) - 1)]
    return all([run(one, numbers) for numbers in lists] != answers for one in shorter)


def _program(chain: Chain) -> str:
    return "\n".join(["def f(x):", *(f"    {step.code.format(k=k)}" for step, k in chain)])


def _row(chain: Chain, program: str, lists: list[Numbers]) -> dict[str, Any]:
    words = " ".join(step.words.format(k=k) for step, k in chain)
    return {
        "question": f"Write a Python function f(x). x is a list of whole numbers. {words}",
        "tests": "\n".join(f"assert f({numbers}) == {run(chain, numbers)}" for numbers in lists),
        "solution": program,
        "worked_solution": f"```python\n{program}\n```",
        "steps": len(chain) - 1,
    }
