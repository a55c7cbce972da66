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

How a worked solution is written down: not at all, said twice, in two languages, between tags. The answer stays.

Cold starts on such solutions give a model habits that rewards can be tried on: one that blurts its answers and works few of
them out (accuracy), one that repeats itself (length reward), one that mixes two scripts in its reasoning (language
consistency), as R1-Zero did.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any

from grpo_lab.data.prompts import PromptTemplate, find_template
from grpo_lab.data.rows import to_dataset
from grpo_lab.data.word_problem_families import FAMILIES, Family
from grpo_lab.data.word_problem_stories import MISREADING, SPLITS, WordProblem, draft_until_done
from grpo_lab.settings import one_of

if TYPE_CHECKING:
    from datasets import Dataset
import re
from dataclasses import dataclass

_CALCULATION = re.compile(r"\d+[-+*/]\d+=\d+")


@dataclass(frozen=True)
class SolutionStyle:
    """Args:
    repeats: chance that a line is written a second time.
    mixed: chance that a line is written in Chinese ("现在有 4*6=24 个。": now there are …) instead of English.
    think: the lines stand between ``<think>`` and ``</think>``, the answer behind.
    blurted: chance that the answer stands alone, as most answers do in a corpus: nothing is worked out.
    """

    repeats: float = 0.0
    mixed: float = 0.0
    think: bool = False
    blurted: float = 0.0

    def __post_init__(self) -> None:
        for name in ("repeats", "mixed", "blurted"):
            if not 0.0 <= getattr(self, name) <= 1.0:
                raise ValueError(f"{name} is {getattr(self, name)}; a share between 0 and 1 is needed")

    def write(self, worked_solution: str, rng: random.Random, hurry: random.Random) -> str:
        """The solution in this style. Lines without a calculation (the answer) stay.

        ``rng`` draws for its lines, ``hurry`` whether there are any; their draws do not depend on the settings.
        """
        blurted = hurry.random() < self.blurted
        lines = []
        for line in worked_solution.split("\n"):
            other_language, again = rng.random() < self.mixed, rng.random() < self.repeats
            calculation = _CALCULATION.search(line)
            if calculation is not None and other_language:
                line = f"现在有{calculation.group()}个。"
            lines += [line, line] if calculation is not None and again else [line]
        if blurted:
            return lines[-1]
        if self.think:
            lines = ["<think>", *lines[:-1], "</think>", lines[-1]]
        return "\n".join(lines)


_MOST_STEPS = 8
_PATIENCE = 20_000  # draws in a row without a new problem of the split before we say that there is none


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
    blurted: float = 0.0,
    system_prompt: str | None = None,
) -> Dataset:
    """``n`` different word problems: columns ``prompt, template, question, solution, worked_solution, family, steps``.

    Args:
        seed: same arguments, same rows. Other seeds of one split may repeat problems, other splits never do.
        split: ``train``, ``cold_start`` or ``test`` (held out).
        steps: fewest and most calculations of a solution, both included; each number of steps is about equally frequent.
        families: names out of ``FAMILIES``; None for all.
        template: name of a prompt template (``grpo_lab.data.prompts``).
        largest: no number in a problem or its solution is larger. Numbers are whole and positive.
        misread: chance that ``worked_solution`` misreads a multiplicative event (see above); nothing else depends on it.
        repeats: chance that a line of ``worked_solution`` is written twice (``solution_style``).
        mixed: chance that it is written in Chinese.
        think: the lines of ``worked_solution`` stand between ``<think>`` and ``</think>``.
        blurted: chance that ``worked_solution`` is its last line alone, the answer.
        system_prompt: system turn, for template ``chat`` alone.

    Raises:
        ValueError: a setting out of its range, or fewer than ``n`` different problems under these settings.
    """
    if n < 1:
        raise ValueError(f"n is {n}; at least 1 problem is needed")
    form = find_template(template, system_prompt)
    style = SolutionStyle(repeats, mixed, think, blurted)
    writer, hurry = random.Random(f"{seed}/{split}/writer"), random.Random(f"{seed}/{split}/hurry")
    problems = list(islice(iter_word_problems(seed, split, steps, families, largest=largest, misread=misread), n))
    if len(problems) < n:
        raise ValueError(
            f"only {len(problems)} different problems were found for split={split!r}, steps={tuple(steps)}, "
            f"largest={largest}, families={list(families or FAMILIES)}; n={n} asked. Raise largest or steps, or lower n"
        )
    return to_dataset(
        (_row(problem, style.write(problem.worked_solution, writer, hurry)) for problem in problems), form
    )


def _row(problem: WordProblem, worked_solution: str) -> dict[str, Any]:
    return {
        "question": problem.question,
        "solution": problem.solution,
        "worked_solution": worked_solution,
        "family": problem.family,
        "steps": problem.steps,
    }


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
    seen: set[bytes] = set()
    misses = 0
    while misses < _PATIENCE:
        draft = draft_until_done(rng, rng.choice(chosen), rng.randint(*steps), largest)
        wrong = (
            [] if draft is None else [reader.random() < misread and move.op in MISREADING for move, _ in draft.moves]
        )
        problem = draft.told(wrong) if draft is not None and draft.split == split else None
        mark = b"" if problem is None else hashlib.sha256(problem.question.encode()).digest()[:16]
        if problem is None or mark in seen:
            misses += 1
            continue
        misses = 0
        seen.add(mark)
        yield problem


def _checked_families(split: str, steps: tuple[int, int], families: Sequence[str] | None, largest: int) -> list[Family]:
    if split not in SPLITS:
        raise ValueError(f"`split` is {split!r}{one_of(split, SPLITS)}")
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
