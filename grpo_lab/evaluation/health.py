"""Whether a run works, read from its folder: the verdicts of ``grpo_lab.diagnostics`` on ``metrics.jsonl``."""

from __future__ import annotations

from pathlib import Path

from grpo_lab.diagnostics import Facts, Verdict, changes, diagnose
from grpo_lab.evaluation.run_record import RunRecord, read_run

GUARD = "guard/"

SHOWN = 5
"""Verdicts in a report, the last ones."""


def verdicts(record: RunRecord) -> list[Verdict]:
    """The last verdicts, each where something changed, the last window's at the end; empty where no training was logged.

    Values that are not finite stand under the report's notices: `read_run` keeps none.
    """
    return list(changes(windows(record), facts_of(record)))[-SHOWN:]


def last_verdict(folder: str | Path) -> Verdict | None:
    """What the last window of the run in ``folder`` says; None where no training was logged."""
    record = read_run(folder)
    found = windows(record)
    return diagnose(found, facts_of(record)) if found else None


def left_out(folder: str | Path) -> str | None:
    """How many optimizer steps of the run in ``folder`` the guard left out, and why; None where it left out none.

    ``guard/*`` are shares of a logging window's steps; times its steps they are counts.
    """
    metrics = {name: series for name, series in read_run(folder).metrics.items() if not name.startswith("eval_")}
    ends = sorted({step for series in metrics.values() for step, _ in series})
    length = {end: end - begin for begin, end in zip([0, *ends], ends, strict=False)}
    counts = {
        name.removeprefix(GUARD): round(sum(share * length[step] for step, share in series))
        for name, series in metrics.items()
        if name.startswith(GUARD)
    }
    if not (steps := counts.pop("left_out", 0)):
        return None
    kinds = ", ".join(f"{kind} {count}" for kind, count in counts.items() if count)
    return f"{steps} of {ends[-1]} optimizer steps were left out, not finite: {kinds} (bad_steps/)"


def windows(record: RunRecord) -> list[dict[str, float]]:
    """The logging windows of training, as they were logged: those with a `loss`, or, where that was NaN, with the learning rate."""
    rows: dict[int, dict[str, float]] = {}
    for name, series in record.metrics.items():
        if not name.startswith("eval_"):
            for step, value in series:
                rows.setdefault(step, {"step": float(step)})[name] = value
    return [row for _, row in sorted(rows.items()) if row.keys() & {"loss", "learning_rate"}]


def facts_of(record: RunRecord) -> Facts:
    """From the settings in run.json; what they leave open is not known."""
    settings = record.summary.get("settings")
    if not isinstance(settings, dict):
        return Facts()
    accumulation = settings.get("gradient_accumulation_steps", 1)
    named = [accumulation, settings.get("steps_per_generation") or accumulation, settings.get("num_iterations", 1)]
    last = settings.get("max_steps", 0)
    known = all(isinstance(n, int) and n > 0 for n in named) and settings.get("generation_batch_size") is None
    return Facts(named[1] * named[2] / named[0] if known else None, last if isinstance(last, int) else 0)


__all__ = ["facts_of", "last_verdict", "left_out", "verdicts", "windows"]
