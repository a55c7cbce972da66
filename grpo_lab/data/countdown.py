"""Endless, seeded games of Countdown: reach a target with each given number exactly once.

Every game has a solution, the one it was made from: numbers are drawn, then two at a time are put together until one is
left. **Splits are disjoint by construction**, as in ``word_problems``: numbers (sorted) and target are hashed, and the
hash decides.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from grpo_lab.data.made import checked_range, checked_split, different, split_of, take
from grpo_lab.data.prompts import PromptTemplate, find_template
from grpo_lab.data.rows import to_dataset

if TYPE_CHECKING:
    from datasets import Dataset


@dataclass(frozen=True)
class Game:
    """Numbers in the order given, the target, an expression that reaches it, and that one's steps, one a line."""

    numbers: tuple[int, ...]
    target: int
    expression: str
    steps: tuple[str, ...]


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
    """``n`` different games: columns ``prompt, template, question, numbers, target, solution, worked_solution``.

    ``seed``, ``split``, ``template`` and ``system_prompt`` are those of ``word_problems``.

    Args:
        numbers: fewest and most numbers of a game, both included.
        largest: no given number is larger. All are whole and positive, as is every step of the solution that the game
            was made from.
        largest_target: no target is larger.

    Raises:
        ValueError: a setting out of its range, or fewer than ``n`` different games under these settings.
    """
    form = find_template(template, system_prompt)
    if largest < 2 or largest_target < 2:
        raise ValueError(f"largest is {largest}, largest_target {largest_target}; at least 2 is needed")
    sizes = checked_range("numbers", numbers, 2, 8)
    rng = random.Random(f"countdown/{seed}/{split}")

    def draw() -> tuple[str, Game] | None:
        game = _drawn(rng, rng.randint(*sizes), largest, largest_target)
        return None if game is None else (f"countdown {(tuple(sorted(game.numbers)), game.target)}", game)

    limits = {"split": split, "numbers": sizes, "largest": largest, "largest_target": largest_target}
    rows = different(draw, checked_split(split), split_of)
    games = take(rows, n, "games", "Raise largest or numbers", **limits)
    return to_dataset((_row(game) for game in games), form)


def _row(game: Game) -> dict[str, Any]:
    given = ", ".join(map(str, game.numbers))
    return {
        "question": f"Use each of the numbers {given} exactly once, with + - * / and brackets, to make {game.target}. "
        "End with <answer>your expression</answer>.",
        "numbers": list(game.numbers),
        "target": game.target,
        "solution": game.expression,
        "worked_solution": "\n".join([*game.steps, f"<answer>{game.expression}</answer>"]),
    }


def _drawn(rng: random.Random, size: int, largest: int, largest_target: int) -> Game | None:
    """One game; None where its result is too large, or where it is one of the numbers."""
    numbers = tuple(rng.randint(1, largest) for _ in range(size))
    left: list[tuple[int, str]] = [(number, str(number)) for number in numbers]
    steps: list[str] = []
    while len(left) > 1:
        (a, first), (b, second) = rng.sample(left, 2)
        left.remove((a, first))
        left.remove((b, second))
        sign, value = rng.choice(_ways(a, b))
        steps.append(f"{a} {sign} {b} = {value}")
        left.append((value, f"({first} {sign} {second})"))
    target, expression = left[0]
    if not 2 <= target <= largest_target or target in numbers:
        return None
    return Game(numbers, target, expression[1:-1], tuple(steps))


def _ways(a: int, b: int) -> list[tuple[str, int]]:
    """The operations that leave a whole and positive number."""
    ways = [("+", a + b), ("*", a * b)]
    ways += [("-", a - b)] if a > b else []
    return ways + ([("/", a // b)] if a % b == 0 and b > 1 else [])
