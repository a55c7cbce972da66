"""What a round asks and what it keeps of the answers: functions of the recipe and the samples, without a model."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from grpo_lab.curation import Sampled, contrast_pairs, right_answers
from grpo_lab.curation.rejection import normalised
from grpo_lab.pipelines.rounds_recipe import IMITATE, ContrastSettings, KeepSettings, RoundsRecipe
from grpo_lab.rewards.arithmetic.steps import calculates_right, equation_list

GOLD = "worked_solution"
"""Column of the reference solutions that `keep.gold` learns from."""


def selected(recipe: RoundsRecipe, samples: list[Sampled]) -> tuple[list[dict[str, Any]], dict[str, int]]:
    """The rows or pairs that the recipe takes from the samples, and what was counted."""
    if recipe.method in IMITATE:
        keep = recipe.keep or KeepSettings()
        rows, counts = right_answers(
            samples,
            per_problem=keep.per_problem,
            same=_SAME[keep.distinct],
            sound=calculates_right if keep.right_calculations else None,
            gold=GOLD if keep.gold else None,
        )
    else:
        pairs = recipe.pairs or ContrastSettings()
        rows, counts = contrast_pairs(samples, per_problem=pairs.per_problem, same=_SAME[pairs.distinct])
    return rows, counts.facts()


def check_rows(recipe: RoundsRecipe, rows: Any) -> None:
    """ValueError for rows that the recipe cannot be run on."""
    if recipe.keep is not None and recipe.keep.gold and GOLD not in rows.column_names:
        raise ValueError(f"`keep.gold` needs a column {GOLD!r} in `data`; it has {rows.column_names}")
    asked = recipe.rounds.questions
    if asked is not None and asked > len(rows):
        raise ValueError(
            f"`rounds.questions` is {asked} and `data` has {len(rows)} rows; ask fewer, or leave it out for all"
        )


def questions_of(number: int, total: int, asked: int | None, seed: int) -> list[int]:
    """The rows that round ``number`` (from 1) asks: all, or the next ``asked`` of an order that is drawn anew when fewer are left."""
    if asked is None:
        return list(range(total))
    lap, place = divmod(number - 1, total // asked)
    order = random.Random(f"{seed}/questions/{lap}").sample(range(total), total)
    return order[place * asked : (place + 1) * asked]


def _equations_or_words(text: str) -> Any:
    """By its equations; an answer without any by its words: two proofs in words are two ways."""
    return equation_list(text) or normalised(text)


_SAME: dict[str, Callable[[str], Any]] = {"equations": _equations_or_words, "words": normalised, "text": str}
