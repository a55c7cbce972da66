"""Result of an evaluation: the numbers drawn from its graded completions (`Outcome`), and its files.

`EvaluationResult.write` leaves `outcomes.jsonl`, `outcomes.parquet` and `summary.json` in a folder;
`EvaluationResult.read` takes the outcomes from there and computes every number again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from statistics import fmean
from typing import Any

from grpo_lab.evaluation import statistics
from grpo_lab.evaluation.calibration import Calibration, agreement, calibrated
from grpo_lab.evaluation.outcomes import Outcome, read_outcome, write_outcomes
from grpo_lab.evaluation.statistics import Interval, Vote
from grpo_lab.evaluation.votes import DECIMAL, vote_key
from grpo_lab.io import write_json
from grpo_lab.reading import read_json_lines, read_record
from grpo_lab.rewards.arithmetic import works_out
from grpo_lab.rewards.completion import reflects
from grpo_lab.verifiers.verdict import CORRECT_FROM


@dataclass(frozen=True)
class EvaluationResult:
    """Outcomes of one model on one set of problems. Every number is computed from them.

    Attributes:
        outcomes: the graded completions.
        settings: how they were made (max_new_tokens, temperature, seed, …).
        seconds: wall-clock seconds of generation and grading together; None: unknown.
    """

    outcomes: tuple[Outcome, ...]
    settings: Mapping[str, Any] = field(default_factory=dict)
    seconds: float | None = None

    @cached_property
    def greedy(self) -> tuple[Outcome, ...]:
        """Return the outcomes of greedy answers."""
        return tuple(outcome for outcome in self.outcomes if outcome.kind == "greedy")

    @cached_property
    def sampled(self) -> tuple[Outcome, ...]:
        """Return the outcomes of samples."""
        return tuple(outcome for outcome in self.outcomes if outcome.kind == "sampled")

    @property
    def n_problems(self) -> int:
        """Return the number of problems with an outcome."""
        return len({outcome.problem for outcome in self.outcomes})

    @cached_property
    def accuracy(self) -> Interval | None:
        """Return the greedy accuracy over the scorable problems, with its 95% Wilson interval. None if no problem was
        scorable."""
        return statistics.accuracy_interval([o.correct for o in self.greedy if o.correct is not None])

    @cached_property
    def accuracy_by(self) -> dict[str, Interval]:
        """Return the greedy accuracy for each value of the column that the setting `by` names, numbers sorted by
        value."""
        found: dict[str, list[bool]] = {}
        for one in self.greedy:
            if one.group is not None and one.correct is not None:
                found.setdefault(one.group, []).append(one.correct)
        limits = {group: statistics.accuracy_interval(correct) for group, correct in found.items()}
        return {group: limits[group] for group in sorted(limits, key=_in_order)}  # type: ignore[misc]

    @cached_property
    def sampled_accuracy(self) -> Interval | None:
        """Return the mean over problems of the share of their samples that are correct, with an interval clustered by
        problem. None without scorable samples."""
        return self._interval([fmean(correct for _, correct in votes) for votes in self._votes])

    @cached_property
    def pass_at(self) -> dict[int, Interval]:
        """Return k → unbiased pass@k, averaged over the problems with at least k scorable samples."""
        return self._over_problems(lambda votes, k: statistics.pass_at_k(len(votes), sum(c for _, c in votes), k))

    @cached_property
    def pass_at_by(self) -> dict[str, dict[int, Interval]]:
        """Return `pass_at` over the problems of each value of the column that the setting `by` names, numbers sorted by
        value."""
        found: dict[str, list[Outcome]] = {}
        for one in self.sampled:
            if one.group is not None:
                found.setdefault(one.group, []).append(one)
        return {group: replace(self, outcomes=tuple(found[group])).pass_at for group in sorted(found, key=_in_order)}

    @cached_property
    def majority_at(self) -> dict[int, Interval]:
        """Return k → maj@k. Empty if nothing reads answers, since there is no vote then."""
        if self.settings.get("answers_read", True):
            return self._over_problems(statistics.majority_at_k)
        return {}

    @cached_property
    def _votes(self) -> list[list[Vote]]:
        """Return the scorable samples of each problem as votes, in the order in which they were drawn."""
        votes: dict[int, list[Vote]] = {}
        for outcome in sorted(self.sampled, key=lambda o: (o.problem, o.sample)):
            if outcome.correct is not None:
                name = None
                if outcome.answer is not None:
                    name = vote_key(outcome.answer)
                votes.setdefault(outcome.problem, []).append((name, outcome.correct))
        return list(votes.values())

    def _interval(self, per_problem: list[float]) -> Interval | None:
        """Return the mean over problems with an interval clustered by problem."""
        return statistics.clustered_interval(per_problem, max(map(len, self._votes), default=0))

    def _over_problems(self, estimate: Callable[[list[Vote], int], float]) -> dict[int, Interval]:
        """Return k → mean of ``estimate`` over the problems with at least k scorable samples, for each k that is
        reported."""
        found = {
            k: self._interval([estimate(votes, k) for votes in self._votes if len(votes) >= k])
            for k in statistics.ks_up_to(max(map(len, self._votes), default=0))
        }
        return {k: interval for k, interval in found.items() if interval is not None}

    @property
    def mean_length(self) -> float | None:
        """Return the mean tokens of a greedy completion; None if there is none."""
        return mean(o.tokens for o in self.greedy)

    @property
    def mean_length_correct(self) -> float | None:
        """Return the mean tokens of a correct greedy completion; None if there is none."""
        return mean(o.tokens for o in self.greedy if o.correct is True)

    @cached_property
    def numbers(self) -> dict[str, Any]:
        """Return the numbers of the greedy completions by their names in `summary.json`: `worked_out_share` and so
        on."""
        return _tally(self.greedy, self.accuracy)

    @cached_property
    def calibration(self) -> dict[str, Calibration]:
        """Return how well confidence and correctness agree, by measure of confidence.

        `log_prob`: the probability of a greedy answer per token. `agreement`: the share of a problem's samples that
        give the most frequent answer. A measure that was not recorded is left out.
        """
        sure = [(math.exp(o.log_prob), float(o.score >= CORRECT_FROM)) for o in self.greedy
                if o.log_prob is not None and o.score is not None]  # fmt: skip
        agreed = []
        if max(self.majority_at, default=0) > 1:
            agreed = agreement(self._votes)
        return {name: calibrated(found) for name, found in (("log_prob", sure), ("agreement", agreed)) if found}

    @property
    def stopped(self) -> str | None:
        """Return where the evaluation was stopped by hand; None if it is complete."""
        said = self.settings.get("stopped")
        return None if said is None else str(said)

    @property
    def gaps(self) -> list[str]:
        """Return the reasons, in words, why the result covers fewer problems than were asked for."""
        found = []
        if self.stopped:
            found.append(f"stopped {self.stopped}: a part of the problems, and no fair sample of them")
        left_out = self.settings.get("prompts_too_long")
        if left_out and isinstance(left_out, int):
            found.append(
                f"{left_out:,} of {left_out + self.n_problems:,} problems were left out: their prompts leave no room "
                f"for max_new_tokens={self.settings.get('max_new_tokens')} in the model's context"
            )
        return found

    def summary(self) -> dict[str, Any]:
        """Return the contents of `summary.json`."""
        sampled = None
        if self.sampled:
            sampled = _tally(self.sampled, self.sampled_accuracy) | {
                "pass_at": _plain(self.pass_at),
                "majority_at": _plain(self.majority_at),
            }
            groups = {group: _plain(pass_at) for group, pass_at in self.pass_at_by.items()}
            if groups:
                sampled["pass_at_by"] = {str(self.settings.get("by")): groups}
        return {
            "problems": self.n_problems,
            "greedy": self.numbers | self._by() if self.greedy else None,
            "sampled": sampled,
            "calibration": {name: asdict(found) for name, found in self.calibration.items()},
            "seconds": self.seconds,
            "settings": dict(self.settings),
        }

    def _by(self) -> dict[str, Any]:
        """Return `accuracy_by` as it stands in `summary.json`; empty without the setting `by`."""
        groups = {group: interval.to_dict() for group, interval in self.accuracy_by.items()}
        if groups:
            return {"accuracy_by": {str(self.settings.get("by")): groups}}
        return {}

    def write(self, folder: str | Path) -> Path:
        """Write `outcomes.jsonl` and `outcomes.parquet`, then `summary.json`, into ``folder``; return the folder."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "summary.json").unlink(missing_ok=True)  # of another evaluation
        write_outcomes(self.outcomes, folder)
        write_json(folder / "summary.json", self.summary())
        return folder

    @classmethod
    def read(cls, folder: str | Path) -> EvaluationResult:
        """Read the result that `write` left in ``folder``. Raises ValueError or OSError if a file is damaged or
        missing."""
        folder = Path(folder)
        summary = read_record(folder / "summary.json", {"settings": dict}, "it is not the summary of an evaluation")
        path = folder / "outcomes.jsonl"
        lines = read_json_lines(path, advice="not an outcome")
        outcomes = [read_outcome(row, f"{path}, line {number}: not an outcome:") for number, row in lines]
        return cls(tuple(outcomes), summary["settings"], summary.get("seconds"))


def paired_gain(before: EvaluationResult, after: EvaluationResult) -> Interval | None:
    """Compute the change in greedy accuracy, after − before, on the problems that are scorable in both results, with
    95% confidence limits. None if there are no such problems, or if their questions differ."""
    old = {o.problem: o for o in before.greedy if o.correct is not None}
    new = {o.problem: o for o in after.greedy if o.correct is not None}
    shared = sorted(old.keys() & new.keys())
    if any(old[i].question != new[i].question for i in shared):
        return None
    return statistics.paired_difference([bool(old[i].correct) for i in shared], [bool(new[i].correct) for i in shared])


def mean(values: Iterable[float | None]) -> float | None:
    """Average the values that are not None (of flags: the share that is set); None if there are none."""
    there = [one for one in values if one is not None]
    return fmean(there) if there else None


def _plain(intervals: Mapping[int, Interval]) -> dict[str, Any]:
    """Return intervals by k as they stand in `summary.json`."""
    return {str(k): interval.to_dict() for k, interval in intervals.items()}


def _in_order(group: str) -> tuple[bool, float, str]:
    """Return the sort key of a group: numbers come first, by value, then other texts."""
    number = None
    if DECIMAL.fullmatch(group):
        number = float(group)
    return number is None, number or 0.0, group


def _tally(outcomes: Sequence[Outcome], accuracy: Interval | None) -> dict[str, Any]:
    """Return the numbers of some completions, by their names in `summary.json`.

    `worked_out_share` counts those that write a calculation down (``grpo_lab.rewards.arithmetic.works_out``),
    `reflection_share` those with a word of reflection (``grpo_lab.rewards.completion.reflects``). `mean_thinking` is
    over those that think.
    """
    measured = outcomes[0].measures if outcomes else ()
    return {
        "completions": len(outcomes),
        "accuracy": accuracy.to_dict() if accuracy else None,
        "correct": sum(o.correct is True for o in outcomes),
        "incorrect": sum(o.correct is False for o in outcomes),
        "mean_length": mean(o.tokens for o in outcomes),
        "mean_length_correct": mean(o.tokens for o in outcomes if o.correct is True),
        "mean_length_incorrect": mean(o.tokens for o in outcomes if o.correct is False),
        "worked_out_share": mean(works_out(o.completion) for o in outcomes),
        "reflection_share": mean(reflects(o.completion) for o in outcomes),
        "measures": {name: mean(o.measures.get(name) for o in outcomes) for name in measured},
        "mean_thinking": mean(o.thinking for o in outcomes),
        "truncated_share": mean(o.truncated for o in outcomes),
        "unscorable_share": mean(o.score is None for o in outcomes),
    }


def number_at(summary: Any, name: str, where: str) -> float:
    """Return the number at a dotted place of ``EvaluationResult.summary``, such as ``greedy.accuracy.value``; NaN if
    None is there.

    Raises:
        ValueError: there is no such place, or it holds no number. The message names ``where``, the setting that asks
            for it.
    """
    for step in name.split("."):
        if not isinstance(summary, Mapping) or step not in summary:
            if isinstance(summary, Mapping):
                there = [*summary]
            else:
                there = summary
            raise ValueError(f"`{where}` is {name!r}: the evaluation's summary has no {step!r} there, but {there}")
        summary = summary[step]
    if isinstance(summary, Mapping | str | bool):
        raise ValueError(f"`{where}` is {name!r}, which is no number but {summary!r}")
    if summary is None:
        return math.nan
    return float(summary)
