"""Build training rows from a model's own samples: right answers to imitate (SFT), or preference pairs (DPO).

    right_answers      right → (calculations hold) → one per way of solving → at most k per problem → SFT rows
    contrast_pairs     a right and a wrong answer to the same problem, at most k pairs → DPO rows
    shortest_correct   the shortest right answer to each problem → SFT rows
    preference_pairs   the shortest right answer against wrong ones, and right ones at least 1.5 times as long
                       → DPO rows

The first two keep one answer per way of solving. Two answers solve a problem the same way if the function ``same`` maps
their texts to the same value: the list of their equations (RFT, arXiv 2308.01825, section 3.3), or their normalised
words. The last two are methods of long2short (Kimi k1.5, arXiv 2501.12599, section 2.4, with n = 8 samples a problem;
its two other methods are `weights.py` and RL with a length penalty). The same samples always give the same rows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from grpo_lab.curation.duplicates import words_of
from grpo_lab.curation.pass_rate import PassRate
from grpo_lab.verifiers.verdict import CORRECT_FROM

#: Least length of a rejected right completion, in lengths of the chosen one.
LONGER = 1.5

Length = Callable[[Any], int]  # completion -> length, in tokens of the model that will be trained
Same = Callable[[str], Hashable]  # text -> way of solving: a key that is equal for the same way
Rows = list[dict[str, Any]]


@dataclass(frozen=True)
class Sampled:
    """A problem and its sampled completions.

    Attributes:
        prompt: the prompt, a text or message list.
        completions: the completions.
        scores: one per completion; None: it could not be scored.
        lengths: tokens of each completion.
        columns: the problem's other columns.
    """

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
        """Indices of the right completions."""
        return [place for place, score in enumerate(self.scores) if score is not None and score >= CORRECT_FROM]

    @property
    def wrong(self) -> list[int]:
        """Indices of the wrong completions. One that could not be scored is neither right nor wrong."""
        return [place for place, score in enumerate(self.scores) if score is not None and score < CORRECT_FROM]

    @property
    def right_by_length(self) -> list[int]:
        """Indices of the right completions, shortest first; ties in the order they were sampled."""
        return sorted(self.right, key=lambda place: self.lengths[place])


def sampled(problems: Sequence[Mapping[str, Any]], rates: Sequence[PassRate], length: Length) -> list[Sampled]:
    """Combine problems with their results of `pass_rates`, in the same order; `length` counts a completion's tokens."""
    rows: list[Sampled] = []
    for problem, rate in zip(problems, rates, strict=True):
        columns = {name: value for name, value in problem.items() if name != "prompt"}
        lengths = [length(completion) for completion in rate.completions]
        rows.append(Sampled(problem["prompt"], rate.completions, rate.scores, lengths, columns))
    return rows


def shortest_correct(rows: Sequence[Sampled]) -> Rows:
    """Return an SFT row `prompt, completion, length, …columns` for each solved problem, with its shortest right
    completion."""
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
    """Return DPO rows `prompt, chosen, rejected, chosen_length, rejected_length, rejected_because, …columns`.

    Chosen is a problem's shortest right completion. Rejected are wrong ones (`rejected_because`: `wrong`), and right
    ones that are much longer (`longer`). Completions without a score are never used, nor one equal to the chosen one.

    Args:
        rows: problems with their samples.
        ratio: a right completion is rejected if it is at least `ratio` times as long as the chosen one; > 1.
        wrong_must_be_longer: whether a wrong completion is rejected only if it is longer than the chosen one, which is
            the report's wording ("longer responses are treated as negative samples, including wrong longer responses").
        pairs_per_problem: most pairs per problem, the longest rejected first; None keeps all.
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
    """Return the words of a text without case, layout and punctuation, as a key for ``same``. The key of a text without
    words is the text."""
    return tuple(words_of(text)) or text.strip()


def right_answers(
    rows: Sequence[Sampled],
    *,
    per_problem: int | None = None,
    same: Same = normalised,
    sound: Callable[[str], bool] | None = None,
    gold: str | None = None,
) -> tuple[Rows, dict[str, int]]:
    """Return SFT rows `prompt, completion, source, …columns`, problem by problem, and counts. The source is ``own`` for
    an answer of the model, ``gold`` for a reference solution.

    Args:
        rows: problems with their samples.
        per_problem: most own answers per problem, in the order in which their ways were found; None keeps all.
        same: maps a text to its way of solving. Of the answers of one way the first is kept, unless a later one is
            farther from the other ways (sum of the edit distances), as in algorithm 1 of RFT.
        sound: right answers for which it returns False are left out; None keeps all.
        gold: column with a reference solution. It comes first and is always kept; own answers of its way are left out.

    Returns the rows, and these counts:

        problems, solved   problems sampled, and those with a right sample (that passed ``sound``)
        samples, scored, right, unsound   completions; unsound: right, but refused by ``sound``
        ways   ways of solving over all problems, before the limit ``per_problem``, without gold ones
        kept, gold   rows or pairs returned, and how many of them are gold

    Raises ValueError if ``per_problem`` is below 1, or a problem does not have the column ``gold``.
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
    """Return DPO rows `prompt, chosen, rejected, chosen_length, rejected_length`, problem by problem, and the counts of
    `right_answers`.

    A problem has R ways among its right samples and W among its wrong ones, each with its first sample. Pair i is
    (right[i mod R], wrong[i mod W]) for i < max(R, W) and i < ``per_problem``: every way is used before one is used
    again. Without right or without wrong samples a problem has no pair.
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
    """Return the text of a completion: the string itself, or the content of its last message."""
    if isinstance(completion, str):
        return completion
    return str(completion[-1]["content"])


def in_form_of(prompt: Any, text: str) -> Any:
    """Return a completion's text in the form of its prompt: as a text, or as a list of one assistant message."""
    if isinstance(prompt, str):
        return text
    return [{"role": "assistant", "content": text}]


def _ways(texts: list[str], same: Same, reference: str | None) -> list[str]:
    """Return one text per way of solving, in the order in which the ways appear, without the way of ``reference``. Of
    the texts of one way the choice is that of ``right_answers``."""
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
            of_new, of_kept = (sum(Levenshtein.distance(one, other) for other in others) for one in (text, first))
            if of_new > of_kept:
                kept[way] = text
    return list(kept.values())


def _firsts(row: Sampled, places: list[int], same: Same) -> list[int]:
    """Return the index of the first completion of each way among the completions at ``places``, in order."""
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
    """Return the counts that ``right_answers`` describes; ``found`` has those that were made on the way."""
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
