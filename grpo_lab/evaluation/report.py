"""`write_report`: one HTML file about one run. No scripts, no network, every text of the model's escaped."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from grpo_lab.evaluation.files import encodable, write_text
from grpo_lab.evaluation.health import verdicts
from grpo_lab.evaluation.page import page
from grpo_lab.evaluation.panels import panel_views
from grpo_lab.evaluation.result import paired_gain
from grpo_lab.evaluation.run_record import RunRecord, read_run
from grpo_lab.evaluation.samples import choose_samples, visible
from grpo_lab.evaluation.terminal import comparison_rows, describe_sampling, duration

SUMMARY_ORDER = [
    "model",
    "dataset",
    "template",
    "objective",
    "advantage",
    "steps",
    "seed",
    "seconds",
    "started",
    "device",
]
"""run.json's keys that come first; the others follow in their own order, mappings as lists of their own."""

SUMMARY_NAMES = {"seconds": "time"}


def write_report(run_dir: str | Path) -> Path:
    """`report.html` in ``run_dir`` from what the run left there (see `run_record`). Returns its path.

    A piece that is missing is called "not recorded" in its place; a damaged one is named under "Notices".

    Raises:
        ValueError: ``run_dir`` is not a folder, or holds nothing of a run: its `report.html`, if any, is somebody else's.
    """
    record = read_run(run_dir)
    if not record.recorded:
        raise ValueError(_nothing_of_a_run(record.folder))
    path = record.folder / "report.html"
    write_text(path, encodable(_render(record)))
    return path


def _nothing_of_a_run(folder: Path) -> str:
    if (folder / "curation.json").is_file():
        return f"{folder} holds a curation, and `grpo-lab curate` with its recipe writes its report.html; nothing was changed"
    if (folder / "outcomes.jsonl").is_file():
        return (
            f"{folder} holds one evaluation and no run; `grpo-lab compare` shows evaluations side by side; nothing was "
            "changed"
        )
    return (
        f"{folder} holds nothing of a run (run.json, metrics.jsonl, evaluation/before, after or step_<n>), so there is "
        "nothing to report; nothing was changed"
    )


def _render(record: RunRecord) -> str:
    before, after = record.before, record.after
    return page(
        "report.html.j2",
        title=_title(record),
        before=before,
        after=after,
        gain=paired_gain(before, after) if before and after else None,
        notices=[visible(notice) for notice in [*record.notices, *gaps_of(record)]],
        summary=summary_groups(record.summary),
        comparison=comparison_rows(before, after) if after else [],
        sampling=describe_sampling(after) if after else "",
        health=verdicts(record),
        panels=panel_views(record),
        metrics=metric_rows(record),
        choice=choose_samples(before, after),
    )


def gaps_of(record: RunRecord) -> list[str]:
    """What its evaluations do not cover, in words."""
    evaluations = [("before", record.before), *((f"step_{n}", e) for n, e in record.during), ("after", record.after)]
    return [f"evaluation/{name}: {gap}" for name, result in evaluations if result for gap in result.gaps]


def _title(record: RunRecord) -> str:
    name = record.summary.get("name")
    return name if isinstance(name, str) and name else record.folder.resolve().name


@dataclass(frozen=True)
class SummaryGroup:
    """A list of (name, text) under a heading."""

    name: str
    entries: list[tuple[str, str]]


def summary_groups(summary: Mapping[str, Any]) -> list[SummaryGroup]:
    """run.json as lists of (name, text): its plain values first, then a list for each mapping in it."""
    ordered = [k for k in SUMMARY_ORDER if k in summary] + [k for k in summary if k not in SUMMARY_ORDER]
    plain: list[tuple[str, str]] = []
    groups: list[SummaryGroup] = []
    for key in ordered:
        value = summary[key]
        if key == "name":  # the page's heading
            continue
        if isinstance(value, Mapping) and key not in ("objective", "advantage"):
            entries = [(str(name), text_of(name, inner)) for name, inner in value.items()]
            groups.append(SummaryGroup(str(key).replace("_", " "), entries or [("", "none")]))
        else:
            plain.append((SUMMARY_NAMES.get(key, str(key).replace("_", " ")), text_of(key, value)))
    return [SummaryGroup("run", plain), *groups] if plain else groups


def text_of(key: object, value: Any) -> str:
    """A value of run.json as a reader wants it; ``key`` `seconds` is a duration."""
    if str(key) == "seconds" and isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e12:
        return duration(value)
    if isinstance(value, Mapping):
        return ", ".join(f"{name}: {text_of(name, inner)}" for name, inner in value.items())
    if isinstance(value, list):
        return ", ".join(text_of("", inner) for inner in value)
    if isinstance(value, float):
        return f"{value:.6g}"
    if value is None or isinstance(value, bool):
        return {None: "none", True: "yes", False: "no"}[value]
    return visible(str(value))


def metric_rows(record: RunRecord) -> list[tuple[str, str, str, str, str, int]]:
    """(metric, start, end, lowest, highest, logged steps); start and end are means of the first and last tenth."""
    rows = []
    for name, series in sorted(record.metrics.items()):
        values = [value for _, value in series]
        tenth = max(1, len(values) // 10)
        numbers = [fmean(values[:tenth]), fmean(values[-tenth:]), min(values), max(values)]
        start, end, low, high = (f"{number:.4g}" for number in numbers)
        rows.append((visible(name), start, end, low, high, len(values)))
    return rows
