"""Select what to train on from a model's own judged samples, by one of five ways. Same samples, same rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

from grpo_lab.curation import Sampled, contrast_pairs, preference_pairs, right_answers, shortest_correct
from grpo_lab.curation.rejection import LONGER, normalised
from grpo_lab.io import write_json_lines
from grpo_lab.rewards.arithmetic import calculates_right, equation_list
from grpo_lab.rewards.comparisons import Judge
from grpo_lab.runs.console import describe
from grpo_lab.runs.stage import Facts, Workspace
from grpo_lab.settings import Number, Positive, Switch, Whole, settings
from grpo_lab.stages.sample import OF_A_LINE, check_lines, samples_in
from grpo_lab.verifiers.verdict import CORRECT_FROM
from grpo_lab.visible import encodable

GOLD, ROWS = "worked_solution", "rows.jsonl"
"""Column of the reference solutions that `keep.gold` learns from, and file of the rows that are trained on."""
Distinct = Literal["equations", "words", "text"]


def _equations_or_words(text: str) -> Any:
    """Return what an answer is compared by: its equations, or its words if it has none. So two proofs in different
    words count as two answers."""
    return equation_list(text) or normalised(text)


SAME: dict[str, Callable[[str], Any]] = {"equations": _equations_or_words, "words": normalised, "text": str}
"""Value of `distinct` → function of an answer. Two answers for which it returns the same count as one."""


@settings()
class Keep:
    """``keep``: which right answers are imitated (`right_answers`).

    Args:
        per_problem: most answers per problem; None keeps all that differ.
        distinct: two answers count as one if they share this: the list of their ``equations``, their ``words``, or the
            ``text``.
        gold: learn the rows' ``worked_solution``, too.
        right_calculations: leave out right answers with an equation that does not hold.
    """

    needs: ClassVar[str] = "right on some"
    per_problem: Positive | None = None
    distinct: Distinct = "equations"
    gold: Switch = False
    right_calculations: Switch = False

    def rows(self, samples: Sequence[Sampled]) -> tuple[list[dict[str, Any]], dict[str, int]]:
        sound = None
        if self.right_calculations:
            sound = calculates_right
        given: Any = {"per_problem": self.per_problem, "same": SAME[self.distinct], "sound": sound}
        return right_answers(samples, **given, gold=GOLD if self.gold else None)


@settings()
class Contrast:
    """``contrast``: pairs of a right and a wrong answer to a problem (`contrast_pairs`), at most ``per_problem`` of
    each problem. ``distinct``: see `Keep`."""

    needs: ClassVar[str] = "right and wrong on the same"
    per_problem: Positive | None = None
    distinct: Distinct = "words"

    def rows(self, samples: Sequence[Sampled]) -> tuple[list[dict[str, Any]], dict[str, int]]:
        return contrast_pairs(samples, per_problem=self.per_problem, same=SAME[self.distinct])


@settings()
class Shortest:
    """``shortest``: the shortest right answer of each problem (`shortest_correct`)."""

    needs: ClassVar[str] = "right on some"

    def rows(self, samples: Sequence[Sampled]) -> tuple[list[dict[str, Any]], dict[str, int]]:
        return shortest_correct(samples), {}


@settings()
class Shorter:
    """``shorter``: pairs of a problem's shortest right answer with longer or wrong ones (`preference_pairs`).

    Args:
        ratio: a right answer is rejected if it is at least this many times as long as the shortest one.
        wrong_must_be_longer: whether a wrong answer is rejected only if it is longer than the shortest right one.
        pairs_per_problem: most pairs of a problem, the longest rejected answers first; None: all.
    """

    needs: ClassVar[str] = "right, and also wrong or longer, on the same"
    ratio: Number = LONGER
    wrong_must_be_longer: Switch = False
    pairs_per_problem: Positive | None = None

    def rows(self, samples: Sequence[Sampled]) -> tuple[list[dict[str, Any]], dict[str, int]]:
        limits: Any = {"wrong_must_be_longer": self.wrong_must_be_longer, "pairs_per_problem": self.pairs_per_problem}
        return preference_pairs(samples, self.ratio, **limits), {}


@settings()
class Judged:
    """``judged``: pairs of any two answers to a problem, ordered by a simulated judge that may err (`Judge`).

    Args:
        temperature, longer, seed: the judge's noise, its liking for longer answers, and its seed.
        per_problem: most pairs of a problem; None: all.

    A sample's score is its quality. The counts say how many pairs are ``wrong`` (the rejected answer is the better
    one), ``ties``, and ``longer`` (the chosen answer is the longer one).
    """

    needs: ClassVar[str] = "of different quality on the same, for a judge without noise"
    temperature: Number = 0.0
    longer: Number = 0.0
    seed: Whole = 0
    per_problem: Positive | None = None

    def rows(self, samples: Sequence[Sampled]) -> tuple[list[dict[str, Any]], dict[str, int]]:
        judge = Judge(self.temperature, self.longer, self.seed)
        rows: list[dict[str, Any]] = []
        for one in samples:
            pairs = judge.pairs(one.prompt, one.completions, one.scores, one.lengths, self.per_problem)
            for chosen, rejected in pairs:
                rows.append({
                    "prompt": one.prompt,
                    "chosen": one.completions[chosen],
                    "rejected": one.completions[rejected],
                    "chosen_length": one.lengths[chosen],
                    "rejected_length": one.lengths[rejected],
                    "chosen_quality": one.scores[chosen],
                    "rejected_quality": one.scores[rejected],
                })  # fmt: skip
        gaps = [row["chosen_quality"] - row["rejected_quality"] for row in rows]
        longer = sum(row["chosen_length"] > row["rejected_length"] for row in rows)
        return rows, {"wrong": sum(gap < 0 for gap in gaps), "ties": gaps.count(0), "longer": longer}


Way = Keep | Contrast | Shortest | Shorter | Judged
"""A way to select. ``rows(samples)`` returns the rows to train on and counts for the stage's facts; ``needs`` says what
the model must be for the way to find a row."""


@settings()
class Select:
    """``select``: choose rows to train on from samples, by exactly one of the five ways."""

    leaves: ClassVar[Mapping[str, str]] = {"rows": ROWS}
    samples: str
    keep: Keep | None = None
    contrast: Contrast | None = None
    shortest: Shortest | None = None
    shorter: Shorter | None = None
    judged: Judged | None = None

    def __post_init__(self) -> None:
        if len(self._ways()) != 1:
            raise ValueError(
                "a stage `select` needs exactly one of `keep`, `contrast`, `shortest`, `shorter`, `judged`"
            )

    def _ways(self) -> list[Way]:
        return [way for way in (self.keep, self.contrast, self.shortest, self.shorter, self.judged) if way is not None]

    def plan(self) -> str:
        check_lines(self.samples, "samples", OF_A_LINE)
        return f"{type(self._ways()[0]).__name__.lower()} {describe(self._ways()[0])}".strip()

    def run(self, workspace: Workspace) -> Facts:
        samples = samples_in(Path(self.samples))
        return {**choose(samples, self._ways()[0], workspace.folder), "out_of": sum(len(one.scores) for one in samples)}


def choose(samples: Sequence[Sampled], way: Way, folder: Path, who: str = "", otherwise: str = "") -> Facts:
    """Select rows by ``way``, write them to `rows.jsonl` in ``folder``, and return the counts. Raises ValueError if
    there is no row; the message begins with ``who`` and ends with ``otherwise``."""
    rows, counts = way.rows(samples)
    if not rows:
        scores = [score for one in samples for score in one.scores]
        scored = [score for score in scores if score is not None]
        right = sum(score >= CORRECT_FROM for score in scored)
        raise ValueError(
            f"{who}no row to train on out of {len(samples)} problems: of {len(scores)} samples {len(scored)} could be "
            f"scored and {right} are right, and the model has to be {way.needs}. Raise `n_samples`, or take other "
            f"`data` (or `reward`, where nothing could be scored){otherwise}"
        )
    write_json_lines(folder / ROWS, [encodable(row) for row in rows])
    return {**counts, "rows": len(rows)}
