"""Select: what a training learns from a model's own judged samples. Functions of the samples: same samples, same rows.

Keep       right answers that differ → SFT rows (`right_answers`)
Contrast   a right answer against a wrong one of the same problem → pairs (`contrast_pairs`)
Shortest   the shortest right answer of each problem → SFT rows (`shortest_correct`)
Shorter    the shortest right answer against longer and wrong ones → pairs (`preference_pairs`)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

from grpo_lab.curation import Sampled, contrast_pairs, preference_pairs, right_answers, shortest_correct
from grpo_lab.curation.rejection import normalised
from grpo_lab.rewards.arithmetic import calculates_right, equation_list
from grpo_lab.settings import Number, Positive, Switch, settings

GOLD = "worked_solution"
"""Column of the reference solutions that `keep.gold` learns from."""
ROWS = "rows.jsonl"
"""What is trained on."""
Distinct = Literal["equations", "words", "text"]


@settings()
class Keep:
    """``keep``: which right answers are imitated (`right_answers`).

    Args:
        per_problem: most answers a problem; None keeps all that differ.
        distinct: what makes two answers one: the list of their ``equations``, their ``words``, or the ``text`` itself.
        gold: the rows' ``worked_solution`` is learned beside the model's own answers.
        right_calculations: an answer with an equation that does not hold is left out, right or not.
    """

    per_problem: Positive | None = None
    distinct: Distinct = "equations"
    gold: Switch = False
    right_calculations: Switch = False


@settings()
class Contrast:
    """``pairs`` of a right and a wrong answer (`contrast_pairs`).

    Args:
        per_problem: most pairs a problem; None: every answer that differs is in one.
        distinct: as in `Keep`.
    """

    per_problem: Positive | None = None
    distinct: Distinct = "words"


@settings()
class Shortest:
    """The shortest right answer of each problem (`shortest_correct`)."""


@settings()
class Shorter:
    """``pairs`` of a short right answer and longer or wrong ones (`preference_pairs`)."""

    ratio: Number = 1.5
    wrong_must_be_longer: Switch = False
    pairs_per_problem: Positive | None = None


How = Keep | Contrast | Shortest | Shorter


def select(samples: Sequence[Sampled], how: How) -> tuple[list[dict[str, Any]], dict[str, int]]:
    """Rows or pairs, and what was counted."""
    if isinstance(how, Keep):
        return right_answers(
            list(samples),
            per_problem=how.per_problem,
            same=_SAME[how.distinct],
            sound=calculates_right if how.right_calculations else None,
            gold=GOLD if how.gold else None,
        )
    if isinstance(how, Contrast):
        return contrast_pairs(list(samples), per_problem=how.per_problem, same=_SAME[how.distinct])
    if isinstance(how, Shortest):
        return shortest_correct(samples), {}
    most = how.pairs_per_problem
    longer = how.wrong_must_be_longer
    return preference_pairs(samples, how.ratio, wrong_must_be_longer=longer, pairs_per_problem=most), {}


def _equations_or_words(text: str) -> Any:
    """By its equations; an answer without any by its words: two proofs in words are two ways."""
    return equation_list(text) or normalised(text)


_SAME: dict[str, Callable[[str], Any]] = {"equations": _equations_or_words, "words": normalised, "text": str}
