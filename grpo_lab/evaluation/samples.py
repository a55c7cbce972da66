"""Which problems to show before and after, and what became of all of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from grpo_lab.evaluation.outcomes import Outcome
from grpo_lab.evaluation.result import EvaluationResult

LONGEST_SHOWN = 4_000

# (verdict before, verdict after) → (name, how many are shown). Failures are shown on purpose, next to the gains.
TRANSITIONS: dict[tuple[bool | None, bool | None], tuple[str, int]] = {
    (False, True): ("became correct", 3),
    (True, False): ("became wrong", 2),
    (False, False): ("still wrong", 2),
    (True, True): ("stayed correct", 2),
}
SHOWN_OF_ONE_SIDE = 4


@dataclass(frozen=True)
class Sample:
    """One problem with what the model wrote before and after; a side that was not evaluated is None."""

    kind: str
    before: Outcome | None
    after: Outcome | None

    @property
    def asked(self) -> Outcome:
        """The side that there is, for the problem."""
        assert self.before or self.after
        return self.after or self.before  # type: ignore[return-value]


@dataclass(frozen=True)
class SampleChoice:
    """The first problems of each kind, in the order of the rows: nothing is picked for looks. counts: over all problems."""

    samples: list[Sample]
    counts: list[tuple[str, int]]
    comparable: bool = True


def choose_samples(before: EvaluationResult | None, after: EvaluationResult | None) -> SampleChoice:
    """Examples of every transition between the verdicts of both evaluations, or of one side where they share no problems."""
    old = _by_problem(before)
    new = _by_problem(after)
    shared = sorted(old.keys() & new.keys())
    if not shared:
        alone = [Sample("", old.get(i), new.get(i)) for i in sorted(old or new)]
        return SampleChoice(_first_of_verdicts(alone), [])
    if any(old[i].question != new[i].question for i in shared):
        alone = [Sample("", None, new[i]) for i in sorted(new)]
        return SampleChoice(_first_of_verdicts(alone), [], comparable=False)

    samples: list[Sample] = []
    counts: list[tuple[str, int]] = []
    for verdicts, (name, wanted) in TRANSITIONS.items():
        members = [i for i in shared if (old[i].correct, new[i].correct) == verdicts]
        counts.append((name, len(members)))
        samples += [Sample(name, old[i], new[i]) for i in members[:wanted]]
    unscorable = [i for i in shared if old[i].correct is None or new[i].correct is None]
    if unscorable:
        counts.append(("unscorable", len(unscorable)))
        samples.append(Sample("unscorable", old[unscorable[0]], new[unscorable[0]]))
    return SampleChoice(samples, counts)


def _by_problem(result: EvaluationResult | None) -> dict[int, Outcome]:
    return {} if result is None else {outcome.problem: outcome for outcome in result.greedy}


def _first_of_verdicts(samples: Sequence[Sample]) -> list[Sample]:
    seen: dict[bool | None, list[Sample]] = {}
    for sample in samples:
        seen.setdefault(sample.asked.correct, []).append(sample)
    shown = [one for alike in seen.values() for one in alike[:SHOWN_OF_ONE_SIDE]]
    return sorted(shown, key=lambda sample: sample.asked.problem)
