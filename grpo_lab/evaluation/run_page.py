"""`write_report`: an HTML page about a folder.

`write_report` reads the folder (`read_run`), and `page_of` chooses the page by what is in it. The pages of runs,
pipelines and rounds are made here; that of a curation is in `curation_page.py`, that of several runs in
`comparison.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

from grpo_lab.diagnostics import changes
from grpo_lab.evaluation.charts import Figure, Line, figure
from grpo_lab.evaluation.comparison import rewrite_comparison
from grpo_lab.evaluation.curation_page import read_curation
from grpo_lab.evaluation.page import Card, Page, Section, Table, about, choose_samples, settings_section
from grpo_lab.evaluation.panels import CURVES, EVALUATIONS, WEIGHTS, panel_figures, unit_of, weight_figures
from grpo_lab.evaluation.pipeline_sections import open_questions, pipeline_sections
from grpo_lab.evaluation.result import EvaluationResult, paired_gain
from grpo_lab.evaluation.rounds_sections import accuracy_limits, rounds_sections
from grpo_lab.evaluation.run_health import facts_of, windows
from grpo_lab.evaluation.run_record import (
    CURATION,
    EVALUATION,
    LONG2SHORT,
    PIPELINE,
    ROUNDS,
    TRAINING,
    RunRecord,
    StagesOf,
    as_left,
    read_run,
)
from grpo_lab.evaluation.sweep import read_sweep, sweep_sections
from grpo_lab.evaluation.terminal import comparison_rows, describe_sampling
from grpo_lab.reading import read_record

_WORKING = (
    "What the logged metrics say, each line where that changed, the last one at the end of training (docs/health.md)."
)
_SAME_PROBLEMS = (
    "Greedy answers to the same held-out problems; the first problems of each kind in the order of the data, so "
    "nothing is picked for looks."
)
_OTHER_PROBLEMS = "The evaluations before and after were made on different problems, so only the later one is shown."
_HOW_MEASURED = (
    "Brackets: 95% intervals; Wilson for greedy accuracy, clustered by problem for samples, paired for the change in "
    "greedy accuracy."
)
_CONTROL = (
    "What rewards that know nothing of the answer gain from the same start (a coin, the form alone, the opposite): "
    "grpo-lab lab controls --recipe with this run's recipe (docs/labs/controls.md)."
)


def write_report(place: str | Path, stages: StagesOf = as_left) -> Path:
    """Write `report.html` into a folder of `train`, `long2short`, `rounds`, `curate`, `evaluate` or `pipeline`; return
    its path.

    A missing piece is named at the end of the page, a damaged one under "Notices". If ``place`` is the page of a
    comparison, it is made again from its runs.

    Args:
        place: the folder, or the page of a comparison.
        stages: a function that returns a pipeline's current stages; default: as its last run left them.

    Raises:
        ValueError: there is nothing of ours in ``place``, which is left unchanged.
    """
    place = Path(place)
    if place.is_file():
        return rewrite_comparison(place, stages)
    return report_page(place, stages).write(place / "report.html")


def report_page(folder: Path, stages: StagesOf = as_left) -> Page:
    """Make the page about what ``folder`` holds. ``stages``: as in `write_report`."""
    record = read_run(folder)
    record.stages = list(stages(folder)) or record.stages
    return page_of(record)


def page_of(record: RunRecord) -> Page:
    """Make the page about a record. If its folder holds results of several commands, the page is about the first, and a
    notice names the others.

    Raises:
        ValueError: the record is of nothing that has a page.
    """
    if not record.kind:
        raise ValueError(f"{_without_a_page(record.folder)}; nothing was changed")
    if record.kind == CURATION:
        page = read_curation(record.folder)
    else:
        page = {ROUNDS: rounds_page, PIPELINE: pipeline_page}.get(record.kind, run_page)(record)
    others = " and ".join(record.kinds[1:])
    more = []
    if others:
        more = [f"the folder also holds what a {others} left; this page is not about that"]
    return replace(page, notices=[*page.notices, *more])


def _without_a_page(folder: Path) -> str:
    """Say what a folder without a page of its own holds, and where that is shown."""
    if (folder / "records.json").is_file():
        drawn = "`grpo-lab lab NAME --at-most 0` draws table and figure anew"
        return f"{folder} holds a lab, which has no page: {drawn}, and `report` takes the folder of a cell (ARM-SEED)"
    if (file := folder / "stage.json").is_file():
        stage = read_record(file, {"name": str, "kind": str})
        if stage["kind"] == "cell":
            return f"{folder} holds a cell of a lab: its numbers stand in the table of {folder.parent}"
        said = f"{folder} holds the stage {stage['name']!r} ({stage['kind']}) of a pipeline, whose page shows it"
        return f"{said}: `grpo-lab report {folder.parent}`"
    return (
        f"{folder} holds nothing of ours (run.json, pipeline.json, metrics.jsonl, rounds.jsonl, evaluation/, "
        "outcomes.jsonl, curation.json), so there is nothing to report"
    )


def run_page(record: RunRecord) -> Page:
    """Make the page of a training, a `long2short` or an evaluation. What the record lacks is named at the end."""
    trained = record.kind not in (EVALUATION, LONG2SHORT)
    settings = record.summary or (record.after.settings if record.after and record.kind == EVALUATION else {})
    figures, missing = panel_figures(record)
    if not record.metrics:
        if not record.during:
            figures = []
        missing = []
        if trained:
            missing.append("Curves (metrics.jsonl)")
        if not (record.before or record.after):
            missing.append(EVALUATIONS)
    if record.kind != EVALUATION and bool(record.before) != bool(record.after):
        side = "after" if record.before else "before"
        missing.append(f"Evaluation {side} (evaluation/{side})")
    weights = weight_figures(record)
    points = [one.line for one in changes(windows(record), facts_of(record))][-5:]
    cards = accuracy_cards(record)
    if not trained:
        cards += _length_card(record)
    return Page(
        kind="training report" if trained else f"{record.kind} report",
        title=title_of(record),
        about=about(settings, "model", "data", "template", "method", "objective", "trained", "rows", "seconds"),
        cards=cards,
        notices=notices_of(record),
        sections=[
            Section("Is it working?", points=points, foot=_WORKING),
            Section("Curves", CURVES, figures=figures),
            *([Section("Which answers weigh more", WEIGHTS, figures=weights)] if weights else []),
            *evaluation_sections(record),
            _metrics_section(record),
            settings_section(settings),
        ],
        missing=missing if settings else [*missing, "Settings (run.json)"],
    )


def pipeline_page(record: RunRecord) -> Page:
    """Make the page of a pipeline, from `pipeline.json` and the folders of its stages."""
    stages = record.stages
    done = sum(one.status == "done" for one in record.stages)
    said = {one.name: {"why it was done": one.why, "results": one.results, **_said(one.settings)} for one in stages}
    return Page(
        kind="pipeline report",
        title=title_of(record),
        about=[],
        cards=[*accuracy_cards(record), Card("Stages done", f"{done}", f" of {len(stages)}")],
        notices=[*notices_of(record), *open_questions(stages)],
        sections=[
            *pipeline_sections([record]),
            *evaluation_sections(record),
            settings_section({**record.summary, **said}),
        ],
        missing=[] if stages else ["Stages (pipeline.json)"],
    )


def title_of(record: RunRecord) -> str:
    """Return the run's name, or the folder's name if the run has none."""
    name = record.summary.get("name")
    if isinstance(name, str) and name:
        return name
    return record.folder.resolve().name


def notices_of(record: RunRecord) -> list[str]:
    """List what could not be read, and what the evaluations do not cover."""
    evaluations = [("before", record.before), *((f"step_{n}", e) for n, e in record.during), ("after", record.after)]
    gaps = [f"evaluation/{name}: {gap}" for name, result in evaluations if result for gap in result.gaps]
    return [*record.notices, *gaps]


def accuracy_cards(record: RunRecord) -> list[Card]:
    """Make the cards of held-out accuracy before and after training, and of the gain on the same problems, as far as
    they were measured."""
    before = record.before
    after = record.after
    cards = []
    for name, result in ((" before", before), (" after" if before else "", after)):
        if result is not None and (found := result.accuracy) is not None:
            note = f"95% interval {100 * found.low:.1f} – {100 * found.high:.1f}, n = {found.n:,}"
            cards.append(Card(f"Held-out accuracy{name}", f"{100 * found.value:.1f}", "%", note, result is after))
    if before and after and (gain := paired_gain(before, after)) is not None:
        note = f"95% paired interval {100 * gain.low:+.1f} to {100 * gain.high:+.1f}"
        cards.append(Card("Gain, same problems", f"{100 * gain.value:+.1f}", " points", note))
    return cards


def _length_card(record: RunRecord) -> list[Card]:
    """Make the card of the mean length of right answers, if it was measured."""
    before = record.before
    after = record.after
    if after is None or after.mean_length_correct is None:
        return []
    earlier = None
    if before:
        earlier = before.mean_length_correct
    if earlier is None:
        note = f"all answers: {after.mean_length:.1f}"
    else:
        note = f"before: {earlier:.1f}"
    return [Card("Length of right answers", f"{after.mean_length_correct:.1f}", " tokens", note)]


def evaluation_sections(record: RunRecord) -> list[Section]:
    """Make the sections of the model's answers, of all numbers of the evaluations, and of a sweep over conditions, if
    there is one."""
    before = record.before
    after = record.after
    latest = after or before
    if latest is None:
        return []
    samples, counts, comparable = choose_samples(before, after)
    both = before is not None and after is not None
    if counts:
        lead = _SAME_PROBLEMS
    elif comparable:
        lead = ""
    else:
        lead = _OTHER_PROBLEMS
    foot = _HOW_MEASURED
    if sampling := describe_sampling(latest):
        foot += f" Samples: {sampling}."
    foot += " – : not recorded."
    if both and record.kind == TRAINING:
        foot += f" {_CONTROL}"
    rows: Sequence[Sequence[str]]
    if both:
        names = ["before", "after", "change, points or tokens"]
        rows = comparison_rows(before, latest)
    else:
        names = ["result" if after else "before"]
        rows = [(name, value) for name, _, value, _ in comparison_rows(None, latest)]
    table = Table([f"{latest.n_problems:,} held-out problems", *names], rows, stacked=False)
    if record.kind == EVALUATION:
        where = "."
    else:
        where = f"evaluation/{'after' if after else 'before'}"
    return [
        Section("Answers before and after" if both else "Answers", lead, counts, samples=samples),
        Section("Evaluation", table=table, foot=foot, figures=reliability_figures(before, after)),
        *sweep_sections(read_sweep(record.folder / where)),
    ]


def reliability_figures(before: EvaluationResult | None, after: EvaluationResult | None) -> list[Figure]:
    """Draw reliability diagrams before and after training: the share of right answers in each bin of confidence.

    There is a figure for each measure of confidence that was recorded: agreement of a problem's samples, and the
    answer's probability per token. A calibrated model lies on the diagonal.
    """
    found = []
    for name, of in {"agreement": "agreement of its samples", "log_prob": "its answer's probability per token"}.items():
        lines = []
        for when, result in {"before": before, "after" if before else "result": after}.items():
            if result and (one := result.calibration.get(name)):
                said = f"{when}: ECE {one.ece.value:.3f} [{one.ece.low:.3f}, {one.ece.high:.3f}]"
                lines.append(Line(said, [(bin.confidence, bin.correct) for bin in one.bins], markers=True))
        lines += [Line("calibrated", [(0.0, 0.0), (1.0, 1.0)])] if lines else []
        how: Any = {"unit": "share of answers that are right", "x_unit": of, "share": True}
        found.append(figure(f"Reliability by {name.replace('_', '-')}", "Ten bins of equal width.", lines, **how))
    return [one for one in found if one]


def _metrics_section(record: RunRecord) -> Section:
    """Make a table with a row for each metric. Start and end are means over the first and the last tenth of the logged
    steps."""
    rows = []
    for name, series in sorted(record.metrics.items()):
        values = [value for _, value in series]
        tenth = max(1, len(values) // 10)
        numbers = [fmean(values[:tenth]), fmean(values[-tenth:]), min(values), max(values)]
        rows.append([name, unit_of(name), *(f"{number:.4g}" for number in numbers), f"{len(values):,}"])
    head = ["metric", "unit", "start", "end", "lowest", "highest", "logged"]
    foot = "Start and end are means over the first and the last tenth of the logged steps."
    folded = f"{len(rows)} metrics over the run"
    return Section("Metrics", table=Table(head, rows, packed=True), foot=foot, folded=folded)


def rounds_page(record: RunRecord) -> Page:
    """Make the page of rounds, from `rounds.jsonl`, `run.json` and the evaluations of the start and the last model."""
    run = record.summary
    lines = record.rounds
    settings = {"method": run.get("method"), "seconds": run.get("seconds") or {}, **_said(run.get("recipe"))}
    settings["rounds"] = {"count": run.get("count"), **_said(settings.get("rounds"))}
    shown = {name: value for name, value in settings.items() if value and name != "model_files"}
    return Page(
        kind="rounds report",
        title=title_of(record),
        about=about({**run, **_said(settings.get("model"))}, "method", "path", "seconds"),
        cards=_rounds_cards(record),
        notices=notices_of(record),
        sections=[
            *rounds_sections(lines),
            *evaluation_sections(record),
            settings_section({name: _said(one) if isinstance(one, Mapping) else one for name, one in shown.items()}),
        ],
        missing=[] if lines else ["Rounds (rounds.jsonl)"],
    )


def _said(value: Any) -> dict[str, Any]:
    """Return a mapping without its None values; empty if ``value`` is no mapping."""
    if isinstance(value, Mapping):
        return {name: inner for name, inner in value.items() if inner is not None}
    return {}


def _rounds_cards(record: RunRecord) -> list[Card]:
    """Make the cards of accuracy and of tokens generated. Accuracy is from the evaluations of a finished run, or else
    from the rounds so far."""
    lines = record.rounds
    cards = accuracy_cards(record)
    for line in [] if cards else [line for line in lines if "accuracy" in line]:
        note = "95% interval {:.1f} – {:.1f}".format(*(100 * limit for limit in accuracy_limits(line)))
        cards.append(Card(f"Accuracy, round {line['round']:.0f}", f"{100 * line['accuracy']:.1f}", "%", note))
    if lines and "tokens_total" in lines[-1]:
        cards.append(Card("Tokens generated", f"{lines[-1]['tokens_total']:,.0f}"))
    return cards
