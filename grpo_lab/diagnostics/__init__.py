"""``diagnose``: one line on whether a run works, from its logged metrics. Pure: no trainer, no torch, no files."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from grpo_lab.diagnostics.rules import RULES, Facts, History, Rule, recent, step_of

__all__ = ["RULES", "Diagnosis", "Facts", "Rule", "changes", "diagnose"]

#: Number of findings that one line names; the others are counted. The first is often the cause of what follows.
SHOWN = 2


@dataclass(frozen=True)
class Diagnosis:
    """What the rules found in the logging windows of a run.

    Attributes:
        step: optimizer step at the end of the last window.
        wrong: name of the rule, sentence, and settings to look at, of each fault; the most serious first.
        notes: name of the rule, and sentence, of each thing that looks wrong and is not.
        now: reward, length and entropy of the last windows, in words.
    """

    step: int
    wrong: tuple[tuple[str, str, str], ...]
    notes: tuple[tuple[str, str], ...]
    now: str

    @property
    def healthy(self) -> bool:
        return not self.wrong

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the rules that found something wrong. Diagnoses with the same names are the same verdict."""
        return tuple(name for name, _, _ in self.wrong)

    @property
    def line(self) -> str:
        """The diagnosis in one line: "healthy" with the notes, or the first faults with the settings to look at."""
        if self.healthy:
            now = f" ({self.now})" if self.now else ""
            notes = "".join(f"; {sentence}" for _, sentence in self.notes)
            return f"step {self.step}: healthy{now}{notes}"
        said = "; ".join(f"{sentence}. Look at {settings}" for _, sentence, settings in self.wrong[:SHOWN])
        others = self.names[SHOWN:]
        more = f" ({len(others)} more: {', '.join(others)})" if others else ""
        return f"step {self.step}: {said}{more}"


def diagnose(history: History, facts: Facts | None = None) -> Diagnosis:
    """Diagnose a run from its logging windows, oldest first, by every rule.

    A rule whose metric is not logged finds nothing. Raises ValueError if there is no window.
    """
    if not history:
        raise ValueError("no logging window: there is nothing to diagnose")
    found = [(rule, rule.seen(history, facts or Facts())) for rule in RULES]
    wrong = tuple((rule.name, said, rule.settings) for rule, said in found if said and not rule.healthy)
    notes = tuple((rule.name, said) for rule, said in found if said and rule.healthy)
    return Diagnosis(step_of(history[-1]), wrong, notes, _now(history))


def _now(history: History) -> str:
    """Describe reward (beside that of the first window), length and entropy of the last windows, as far as they are
    logged."""
    reward = recent(history, "reward")
    first = recent(history[:1], "reward")
    length = recent(history, "completions/mean_length")
    entropy = recent(history, "entropy")
    said = []
    if reward is not None:
        said.append(f"reward {reward:.3g}" + ("" if first is None else f", first {first:.3g}"))
    if length is not None:
        said.append(f"length {length:.0f}")
    if entropy is not None:
        said.append(f"entropy {entropy:.2g}")
    return "; ".join(said)


def changes(history: History, facts: Facts | None = None) -> Iterator[Diagnosis]:
    """Diagnose a run after each of its windows; yield the first diagnosis, each that finds other faults than the one
    before it, and the last."""
    before: Diagnosis | None = None
    for end in range(1, len(history) + 1):
        verdict = diagnose(history[:end], facts)
        if before is None or verdict.names != before.names or end == len(history):
            yield verdict
        before = verdict
