"""long2short: rows that teach a model to be right in fewer tokens, built from its own samples.

Kimi k1.5 (arXiv 2501.12599, section 2.4) names four ways. Two are data sets built here, one is `weights.py`, and RL
with a length penalty is a reward:

    shortest rejection sampling   of n = 8 samples the shortest right one becomes an SFT row
    DPO                           chosen: the shortest right one; rejected: longer ones, that is wrong ones and right ones
                                  at least 1.5 times as long as the chosen one
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from grpo_lab.curation.pass_rate import PassRate

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


def sampled(
    problems: Sequence[Mapping[str, Any]], rates: Sequence[PassRate], length: Length, prompt_column: str = "prompt"
) -> list[Sampled]:
    """Problems and their `pass_rates` results as builders want them; `length` counts the tokens of a completion."""
    rows: list[Sampled] = []
    for problem, rate in zip(problems, rates, strict=True):
        if rate.completions is None:
            raise ValueError("these pass rates were made with keep_completions=False; long2short needs the completions")
        columns = {name: value for name, value in problem.items() if name != prompt_column}
        lengths = [length(completion) for completion in rate.completions]
        rows.append(Sampled(problem[prompt_column], rate.completions, rate.scores, lengths, columns))
    return rows


def shortest_correct(rows: Sequence[Sampled], success_at: float = 1.0) -> list[dict[str, Any]]:
    """SFT rows `prompt, completion, length, …columns`: the shortest right completion of every problem that has one."""
    built: list[dict[str, Any]] = []
    for row in rows:
        right = _right(row, success_at)
        if right:
            best = right[0]
            built.append(
                {**row.columns, "prompt": row.prompt, "completion": row.completions[best], "length": row.lengths[best]}
            )
    return built


def preference_pairs(
    rows: Sequence[Sampled],
    ratio: float = 1.5,
    *,
    success_at: float = 1.0,
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
    if pairs_per_problem is not None and pairs_per_problem < 1:
        raise ValueError(f"pairs_per_problem={pairs_per_problem}; at least 1, or None for all")
    built: list[dict[str, Any]] = []
    for row in rows:
        right = _right(row, success_at)
        if not right:
            continue
        best = right[0]
        rejected = [(index, "longer") for index in right[1:] if row.lengths[index] >= ratio * max(row.lengths[best], 1)]
        rejected += [
            (index, "wrong")
            for index, score in enumerate(row.scores)
            if score is not None
            and score < success_at
            and (not wrong_must_be_longer or row.lengths[index] > row.lengths[best])
        ]
        rejected = [(index, why) for index, why in rejected if row.completions[index] != row.completions[best]]
        rejected.sort(key=lambda pair: (-row.lengths[pair[0]], pair[0]))
        built += [_pair(row, best, index, why) for index, why in rejected[:pairs_per_problem]]
    return built


def _right(row: Sampled, success_at: float) -> list[int]:
    """Indices of the right completions, shortest first, ties in the order they were sampled."""
    right = [index for index, score in enumerate(row.scores) if score is not None and score >= success_at]
    return sorted(right, key=lambda index: (row.lengths[index], index))


def _pair(row: Sampled, chosen: int, rejected: int, why: str) -> dict[str, Any]:
    return {
        **row.columns,
        "prompt": row.prompt,
        "chosen": row.completions[chosen],
        "rejected": row.completions[rejected],
        "chosen_length": row.lengths[chosen],
        "rejected_length": row.lengths[rejected],
        "rejected_because": why,
    }
