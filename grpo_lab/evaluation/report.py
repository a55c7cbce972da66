"""`write_report`: one HTML page about what a folder holds, whatever command made it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from grpo_lab.evaluation.comparison import rewrite_comparison
from grpo_lab.evaluation.curation_page import read_curation
from grpo_lab.evaluation.page import Page
from grpo_lab.evaluation.run_page import rounds_page, run_page
from grpo_lab.evaluation.run_record import CURATION, ROUNDS, read_run


def write_report(place: str | Path) -> Path:
    """`report.html` in a folder of `train`, `long2short`, `rounds`, `curate` or `evaluate`, from what lies there.
    Returns its path.

    A piece that is missing is named at the end of the page; a damaged one under "Notices". ``place`` may be the page of
    a comparison: it is made anew from its runs.

    Raises:
        ValueError: there is nothing of ours in ``place``; what is there, is left alone.
    """
    place = Path(place)
    return rewrite_comparison(place) if place.is_file() else report_page(place).write(place / "report.html")


def report_page(folder: Path) -> Page:
    """The page about what ``folder`` holds. Of several things the run's, and a notice names the others."""
    record = read_run(folder)
    if not record.kind:
        raise ValueError(
            f"{folder} holds nothing of ours (run.json, metrics.jsonl, rounds.jsonl, evaluation/, outcomes.jsonl, "
            "curation.json), so "
            "there is nothing to report; nothing was changed"
        )
    if record.kind == CURATION:
        page = read_curation(folder)
    else:
        page = rounds_page(record) if record.kind == ROUNDS else run_page(record)
    others = " and ".join(record.kinds[1:])
    more = [f"the folder also holds what a {others} left; this page is not about that"] if others else []
    return replace(page, notices=[*page.notices, *more])
