"""Rows built from a model's own samples: right ones to imitate, or to prefer to wrong ones, short ones to long ones.

    right_answers      right → (calculations hold) → one for each way of solving → at most k a problem → SFT rows
    contrast_pairs     a right one against a wrong one of the same problem, at most k pairs → DPO rows
    shortest_correct   of n = 8 samples the shortest right one → SFT rows
    preference_pairs   the shortest right one against longer ones: wrong ones, and right ones at least 1.5 times as long
                       → DPO rows

Two answers are the same way of solving if ``same`` maps their texts to the same value: the list of their equations
(RFT, arXiv 2308.01825, section 3.3), or their normalised words. The last two are long2short's (Kimi k1.5, arXiv
2501.12599, section 2.4; its two other ways are `weights.py` and RL with a length penalty). Same samples, same rows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from grpo_lab.curation.duplicates import words_of
from grpo_lab.curation.pass_rate import PassRate
from grpo_lab.verifiers.verdict import CORRECT_FROM

#: tokens of a rejected completion over those of the chosen one, at least
LONGER = 1.5

Length = Callable[[Any], int]  # completion -> length, in tokens of the model that will be trained
Same = Callable[[str], Hashable]
Rows = list[dict[str, Any]]


@dataclass(frozen=True)
class Sampled:
    """A problem with its completions. `scores` and `lengths` run along `completions`; None = unscorable."""

    prompt: Any
    completions: Sequence[Any]
    scores: Sequence[float | None]
    lengths: Sequence[int]
    columns: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if len({len(self.completions), len(self.scores), len(self.lengths)}) != 1:
            raise ValueError(
                f"{len(self.completions)} completions, {len(self.scores)} scores and {len(self.lengths)} lengths "
                "of one problem; they have to be as many"
            )

    @property
    def right(self) -> list[int]:
        """Places of the right completions."""
        return [place for place, score in enumerate(self.scores) if score is not None and score >= CORRECT_FROM]

    @property
    def wrong(self) -> list[int]:
        return [place for place, score in enumerate(self.scores) if score is not None and score < CORRECT_FROM]

    @property
    def right_by_length(self) -> list[int]:
        """Shortest first; ties in the order they were sampled."""
        return sorted(self.right, key=lambda place: self.lengths[place])


def sampled(problems: Sequence[Mapping[str, Any]], rates: Sequence[PassRate], length: Length) -> list[Sampled]:
    """Problems and their `pass_rates` results as builders want them; `length` counts the tokens of a completion."""
    rows: list[Sampled] = []
    for problem, rate in zip(problems, rates, strict=True):
        columns = {name: value for name, value in problem.items() if name != "prompt"}
        lengths = [length(completion) for completion in rate.completions]
        rows.append(Sampled(problem["prompt"], rate.completions, rate.scores, lengths, columns))
    return rows


def shortest_correct(rows: Sequence[Sampled]) -> Rows:
    """SFT rows `prompt, completion, length, …columns`: the shortest right completion of every problem that has one."""
    return [
        {**row.columns, "prompt": row.prompt, "completion": row.completions[best], "length": row.lengths[best]}
        for row in rows
        for best in row.right_by_length[:1]
    ]


def preference_pairs(
    rows: Sequence[Sampled],
    ratio: float = LONGER,
    *,
    wrong_must_be_longer: bool = False,
    pairs_per_problem: int | None = None,
) -> Rows:
    """DPO rows `prompt, chosen, rejected, chosen_length, rejected_length, rejected_because, …columns`.

    Args:
        ratio: a right completion is rejected if its length is at least `ratio` times that of the chosen one, > 1.
        wrong_must_be_longer: the report's wording ("longer responses are treated as negative samples, including wrong
            longer responses"); False takes every wrong completion.
        pairs_per_problem: keep this many pairs a problem, the longest rejected first; None keeps all.
    Unscorable completions are on neither side; a rejected text equal to the chosen one is no pair.
    """
    if ratio <= 1:
        raise ValueError(f"ratio={ratio}: a rejected right completion has to be longer than the chosen one, ratio > 1")
    _check_limit(pairs_per_problem, "pairs_per_problem")
    built: Rows = []
    for row in rows:
        if not row.right:
            continue
        best, *others = row.right_by_length
        shortest = row.lengths[best]
        rejected = [(place, "longer") for place in others if row.lengths[place] >= ratio * max(shortest, 1)]
        wrong = (place for place in row.wrong if not wrong_must_be_longer or row.lengths[place] > shortest)
        rejected += [(place, "wrong") for place in wrong]
        rejected = [(place, why) for place, why in rejected if row.completions[place] != row.completions[best]]
        rejected.sort(key=lambda pair: (-row.lengths[pair[0]], pair[0]))
        built += [
            {**row.columns, **_pair(row, best, place), "rejected_because": why}
            for place, why in rejected[:pairs_per_problem]
        ]
    return built


def normalised(text: str) -> Hashable:
    """``same`` by words: case, layout and punctuation do not count. A text of symbols only is itself."""
    return tuple(words_of(text)) or text.strip()


def right_answers(
    rows: Sequence[Sampled],
    *,
    per_problem: int | None = None,
    same: Same = normalised,
    sound: Callable[[str], bool] | None = None,
    gold: str | None = None,
) -> tuple[Rows, dict[str, int]]:
    """SFT rows `prompt, completion, source, …columns` (``own`` or ``gold``), problem by problem, and what was counted.

    Args:
        per_problem: most own answers of a problem, the ways found first; None keeps all.
        same: text → what makes two answers one way. Of several the first stays, unless a later one is farther from the
            other ways (sum of the edit distances), as in the paper's algorithm 1.
        sound: a right answer that it refuses is left out.
        gold: column with a reference solution that goes first and is never left out; own answers of its way are.

    Returns: the rows, and the counts
        problems, solved   problems sampled, and those with a right sample (that passed ``sound``)
        samples, scored, right, unsound   completions; unsound: right, but ``sound`` refused them
        ways   ways of solving over all problems before the limit a problem, gold ones not counted
        kept, gold   rows or pairs that are left, and how many of them are gold

    Raises: ValueError for a limit below 1, or a column that a problem does not have.
    """
    _check_limit(per_problem)
    built: Rows = []
    found = Counter[str]()
    for row in rows:
        good = [text_of(row.completions[place]) for place in row.right]
        passed = [text for text in good if sound is None or sound(text)]
        reference = None
        if gold is not None:
            if row.columns.get(gold) is None:
                raise ValueError(f"a problem has no {gold!r}, asked for as gold; its columns: {sorted(row.columns)}")
            reference = str(row.columns[gold])
        own = _ways(passed, same, reference)
        found.update(solved=bool(passed), unsound=len(good) - len(passed), ways=len(own), gold=reference is not None)
        for source, texts in (("gold", [] if reference is None else [reference]), ("own", own[:per_problem])):
            said = [{"completion": in_form_of(row.prompt, text), "source": source} for text in texts]
            built += [{**row.columns, "prompt": row.prompt, **one} for one in said]
    return built, _counts(rows, found, len(built))


def contrast_pairs(
    rows: Sequence[Sampled], *, per_problem: int | None = None, same: Same = normalised
) -> tuple[Rows, dict[str, int]]:
    """DPO rows `prompt, chosen, rejected, chosen_length, rejected_length`, problem by problem, and the counts of
    `right_answers`.

    With R ways of being right and W of being wrong (the first sample of each), pair i is (right[i mod R], wrong[i mod
    W]), i < max(R, W) and < ``per_problem``: every way is used before one is used again.
    """
    _check_limit(per_problem)
    built: Rows = []
    found = Counter[str]()
    for row in rows:
        chosen, rejected = (_firsts(row, places, same) for places in (row.right, row.wrong))
        found.update(solved=bool(chosen), ways=len(chosen))
        count = 0
        if chosen and rejected:
            count = max(len(chosen), len(rejected))
        for number in range(count)[:per_problem]:
            built.append(_pair(row, chosen[number % len(chosen)], rejected[number % len(rejected)]))
    return built, _counts(rows, found, len(built))


def text_of(completion: Any) -> str:
    """Text of a completion: itself, or its last message's."""
    if isinstance(completion, str):
        return completion
    return str(completion[-1]["content"])


def in_form_of(prompt: Any, text: str) -> Any:
    """Text after a text prompt, one assistant message after messages."""
    if isinstance(prompt, str):
        return text
    return [{"role": "assistant", "content": text}]


def _ways(texts: list[str], same: Same, reference: str | None) -> list[str]:
    """Choose one text for each way, in the order in which the ways turned up; those of ``reference``'s way are left
    out."""
    from rapidfuzz.distance import Levenshtein

    gold = [] if reference is None else [reference]
    taken = [same(text) for text in gold]
    kept: dict[Hashable, str] = {}
    for text in texts:
        way = same(text)
        if way in taken:
            continue
        first = kept.setdefault(way, text)
        if text != first:
            others = [other for key, other in kept.items() if key != way] + gold
            far, near = (sum(Levenshtein.distance(one, other) for other in others) for one in (text, first))
            if far > near:
                kept[way] = text
    return list(kept.values())


def _firsts(row: Sampled, places: list[int], same: Same) -> list[int]:
    """The first completion of each way, in order."""
    found: dict[Hashable, int] = {}
    for place in places:
        found.setdefault(same(text_of(row.completions[place])), place)
    return list(found.values())


def _pair(row: Sampled, chosen: int, rejected: int) -> dict[str, Any]:
    return {
        "prompt": row.prompt,
        "chosen": row.completions[chosen],
        "rejected": row.completions[rejected],
        "chosen_length": row.lengths[chosen],
        "rejected_length": row.lengths[rejected],
    }


def _counts(rows: Sequence[Sampled], found: Counter[str], kept: int) -> dict[str, int]:
    return {
        "problems": len(rows),
        "solved": found["solved"],
        "samples": sum(len(row.completions) for row in rows),
        "scored": sum(score is not None for row in rows for score in row.scores),
        "right": sum(len(row.right) for row in rows),
        "unsound": found["unsound"],
        "ways": found["ways"],
        "kept": kept,
        "gold": found["gold"],
    }


def _check_limit(limit: int | None, name: str = "per_problem") -> None:
    if limit is not None and limit < 1:
        raise ValueError(f"{name}={limit}; at least 1, or None for all")
