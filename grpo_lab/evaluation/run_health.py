"""Health of a run: what ``grpo_lab.diagnostics`` says of its logged metrics.

`windows` and `facts_of` turn a `RunRecord` into what the rules read.
"""

from __future__ import annotations

from grpo_lab.diagnostics import Diagnosis, Facts, diagnose
from grpo_lab.evaluation.run_record import RunRecord


def last_verdict(record: RunRecord) -> Diagnosis | None:
    """Return the diagnosis of a run at its last logging window; None if no training was logged."""
    found = windows(record)
    if found:
        return diagnose(found, facts_of(record))
    return None


def left_out(record: RunRecord) -> str | None:
    """Say how many optimizer steps of a run were left out because a number was not finite; None if none was."""
    metrics = {name: series for name, series in record.metrics.items() if not name.startswith("eval_")}
    ends = sorted({step for series in metrics.values() for step, _ in series})
    length = {end: end - begin for begin, end in zip([0, *ends], ends, strict=False)}
    counts = {  # ``guard/*`` are shares of a logging window's steps
        name.removeprefix("guard/"): round(sum(share * length[step] for step, share in series))
        for name, series in metrics.items()
        if name.startswith("guard/")
    }
    if not (steps := counts.pop("left_out", 0)):
        return None
    kinds = ", ".join(f"{kind} {count}" for kind, count in counts.items() if count)
    return f"{steps} of {ends[-1]} optimizer steps were left out, not finite: {kinds} (bad_steps/)"


def windows(record: RunRecord) -> list[dict[str, float]]:
    """Return the logging windows of training, by rising step. A row counts as one if it has a `loss`, or the learning
    rate, which is there even if the loss was NaN."""
    rows: dict[int, dict[str, float]] = {}
    for name, series in record.metrics.items():
        if not name.startswith("eval_"):
            for step, value in series:
                rows.setdefault(step, {"step": float(step)})[name] = value
    return [row for _, row in sorted(rows.items()) if row.keys() & {"loss", "learning_rate"}]


def facts_of(record: RunRecord) -> Facts:
    """Return the facts that the rules of ``grpo_lab.diagnostics`` need, from `run.json`.

    A setting that is missing there has its default. Updates are unknown if `generation_batch_size` is set, or if
    there are no settings at all; the last step is unknown without `max_steps`.
    """
    settings = record.summary.get("settings")
    if not isinstance(settings, dict):
        return Facts()
    accumulation = settings.get("gradient_accumulation_steps", 1)
    named = [accumulation, settings.get("steps_per_generation") or accumulation, settings.get("num_iterations", 1)]
    last = settings.get("max_steps", 0)
    known = all(isinstance(n, int) and n > 0 for n in named) and settings.get("generation_batch_size") is None
    updates = None
    if known:
        updates = named[1] * named[2] / named[0]
    return Facts(updates, last if isinstance(last, int) else 0, bool(record.summary.get("own_loss")))
