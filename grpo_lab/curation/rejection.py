"""Rows built from a model's own samples: the right ones to imitate, right ones to prefer to wrong ones, short ones to
long ones.

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

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from grpo_lab.curation.duplicates import words_of
from grpo_lab.curation.pass_rate import PassRate
from grpo_lab.verifiers.verdict import CORRECT_FROM

Length = Callable[[Any], int]  # completion -> length, in tokens of the model that will be trained


@dataclass(frozen=True)
class Sampled:
    """One problem with its completions. `scores` and `lengths` run along `completions`; None = unscorable."""

    prompt: Any
    completions: Sequence[Any]
    scores: Sequence[float | None]
    lengths: Sequence[int]
    columns: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        counts = {len(self.completions), len(self.scores), len(self.lengths)}
        if len(counts) != 1:
            raise ValueError(
                f"{len(self.completions)} completions, {len(self.scores)} scores and {len(self.lengths)} lengths "
                "of one problem; they have to be as many"
            )


def sampled(problems: Sequence[Mapping[str, Any]], rates: Sequence[PassRate], length: Length) -> list[Sampled]:
    """Problems and their `pass_rates` results as builders want them; `length` counts the tokens of a completion."""
    rows: list[Sampled] = []
    for problem, rate in zip(problems, rates, strict=True):
        columns = {name: value for name, value in problem.items() if name != "prompt"}
        lengths = [length(completion) for completion in rate.completions]
        rows.append(Sampled(problem["prompt"], rate.completions, rate.scores, lengths, columns))
    return rows


def shortest_correct(rows: Sequence[Sampled]) -> list[dict[str, Any]]:
    """SFT rows `prompt, completion, length, …columns`: the shortest right completion of every problem that has one."""
    chosen = [(row, right[0]) for row in rows if (right := _shortest_first(row))]
    return [
        {**row.columns, "prompt": row.prompt, "completion": row.completions[best], "length": row.lengths[best]}
        for row, best in chosen
    ]


def preference_pairs(
    rows: Sequence[Sampled],
    ratio: float = 1.5,
    *,
    wrong_must_be_longer: bool = False,
    pairs_per_problem: int | None = None,
) -> list[dict[str, Any]]:
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
    built: list[dict[str, Any]] = []
    for row in rows:
        right = _shortest_first(row)
        if not right:
            continue
        best = right[0]
        longer = [place for place in right[1:] if row.lengths[place] >= ratio * max(row.lengths[best], 1)]
        wrong = [place for place in _wrong(row) if not wrong_must_be_longer or row.lengths[place] > row.lengths[best]]
        rejected = [(place, "longer") for place in longer] + [(place, "wrong") for place in wrong]
        rejected = [(place, why) for place, why in rejected if row.completions[place] != row.completions[best]]
        rejected.sort(key=lambda pair: (-row.lengths[pair[0]], pair[0]))
        built += [
            {**row.columns, **_pair(row, best, place), "rejected_because": why}
            for place, why in rejected[:pairs_per_problem]
        ]
    return built


Same = Callable[[str], Hashable]


@dataclass(frozen=True)
class Counts:
    """What a selection saw and left.

    problems, solved   problems sampled, and those with a right sample (that passed ``sound``)
    samples, scored, right, unsound   completions; unsound: right, but ``sound`` refused them
    ways   ways of solving over all problems before the limit a problem, gold ones not counted
    kept, gold   rows or pairs that are left, and how many of them are gold
    """

    problems: int
    solved: int
    samples: int
    scored: int
    right: int
    unsound: int
    ways: int
    kept: int
    gold: int = 0

    def facts(self) -> dict[str, int]:
        return asdict(self)


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
) -> tuple[list[dict[str, Any]], Counts]:
    """SFT rows `prompt, completion, source` (``own`` or ``gold``), problem by problem, and what was counted.

    Args:
        per_problem: most own answers of a problem, the ways found first; None keeps all.
        same: text → what makes two answers one way. Of several the first stays, unless a later one is farther from the
            other ways (sum of the edit distances), as in the paper's algorithm 1.
        sound: a right answer that it refuses is left out.
        gold: column with a reference solution that goes first and is never left out; own answers of its way are.
    Raises: ValueError for a limit below 1, or a column that a problem does not have.
    """
    _check_limit(per_problem)
    built: list[dict[str, Any]] = []
    right = unsound = solved = ways = 0
    for row in rows:
        good = [text_of(row.completions[place]) for place in _right(row)]
        passed = [text for text in good if sound is None or sound(text)]
        reference = None if gold is None else _gold(row, gold)
        own = _ways(passed, same, reference)
        right += len(good)
        unsound += len(good) - len(passed)
        solved += bool(passed)
        ways += len(own)
        if reference is not None:
            built.append({"prompt": row.prompt, "completion": in_form_of(row.prompt, reference), "source": "gold"})
        built += [
            {"prompt": row.prompt, "completion": in_form_of(row.prompt, text), "source": "own"}
            for text in own[:per_problem]
        ]
    golds = sum(one["source"] == "gold" for one in built)
    return built, Counts(*_seen(rows, solved), right, unsound, ways, len(built), golds)


def contrast_pairs(
    rows: Sequence[Sampled], *, per_problem: int | None = None, same: Same = normalised
) -> tuple[list[dict[str, Any]], Counts]:
    """DPO rows `prompt, chosen, rejected, chosen_length, rejected_length`, problem by problem, and what was counted.

    With R ways of being right and W of being wrong (the first sample of each), pair i is (right[i mod R], wrong[i mod
    W]), i < max(R, W) and < ``per_problem``: every way is used before one is used again. Unscorable completions are on
    neither side.
    """
    _check_limit(per_problem)
    built: list[dict[str, Any]] = []
    right = solved = ways = 0
    for row in rows:
        places = _right(row)
        chosen, rejected = _firsts(row, places, same), _firsts(row, _wrong(row), same)
        right, solved, ways = right + len(places), solved + bool(places), ways + len(chosen)
        if chosen and rejected:
            count = max(len(chosen), len(rejected))
            for number in range(count if per_problem is None else min(count, per_problem)):
                built.append(_pair(row, chosen[number % len(chosen)], rejected[number % len(rejected)]))
    return built, Counts(*_seen(rows, solved), right, 0, ways, len(built))


def text_of(completion: Any) -> str:
    """Of a completion: itself, or its last message's."""
    return completion if isinstance(completion, str) else str(completion[-1]["content"])


def in_form_of(prompt: Any, text: str) -> Any:
    """Text after a text prompt, one assistant message after messages."""
    return text if isinstance(prompt, str) else [{"role": "assistant", "content": text}]


def _ways(texts: list[str], same: Same, reference: str | None) -> list[str]:
    """One text for each way, in the order in which the ways turned up; those of ``reference``'s way are left out."""
    from rapidfuzz.distance import Levenshtein

    taken = None if reference is None else same(reference)
    kept: dict[Hashable, str] = {}
    for text in texts:
        way = same(text)
        if reference is not None and way == taken:
            continue
        others = [other for key, other in kept.items() if key != way] + ([] if reference is None else [reference])
        if way not in kept:
            kept[way] = text
        elif text != kept[way]:
            far, near = (sum(Levenshtein.distance(one, other) for other in others) for one in (text, kept[way]))
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


def _right(row: Sampled) -> list[int]:
    return [place for place, score in enumerate(row.scores) if score is not None and score >= CORRECT_FROM]


def _wrong(row: Sampled) -> list[int]:
    return [place for place, score in enumerate(row.scores) if score is not None and score < CORRECT_FROM]


def _shortest_first(row: Sampled) -> list[int]:
    """Places of the right completions; ties in the order they were sampled."""
    return sorted(_right(row), key=lambda place: (row.lengths[place], place))


def _gold(row: Sampled, column: str) -> str:
    if column not in row.columns or row.columns[column] is None:
        raise ValueError(
            f"a problem has no {column!r}, and gold solutions were asked for; its columns: {sorted(row.columns)}"
        )
    return str(row.columns[column])


def _seen(rows: Sequence[Sampled], solved: int) -> tuple[int, int, int, int]:
    scored = sum(score is not None for row in rows for score in row.scores)
    return len(rows), solved, sum(len(row.completions) for row in rows), scored


def _check_limit(limit: int | None, name: str = "per_problem") -> None:
    if limit is not None and limit < 1:
        raise ValueError(f"{name}={limit}; at least 1, or None for all")
