"""The page about a training, a shortening (`long2short`) or a lone evaluation, and the sections that other pages share with it."""

from __future__ import annotations

from statistics import fmean

from grpo_lab.evaluation.page import Card, Page, Section, Table, about, settings_section
from grpo_lab.evaluation.panels import EVALUATIONS, panel_figures, unit_of
from grpo_lab.evaluation.result import EvaluationResult, paired_gain
from grpo_lab.evaluation.run_record import EVALUATION, LONG2SHORT, RunRecord, verdicts
from grpo_lab.evaluation.samples import choose_samples
from grpo_lab.evaluation.terminal import comparison_rows, describe_sampling

CURVES = (
    "Faint: as logged. Bold: centred moving average; its window, in logged steps, stands under each plot. The numbers in a legend "
    "are its first and last value."
)
_WORKING = (
    "What the logged metrics say, each line where that changed, the last one at the end of training (docs/health.md)."
)


def run_page(record: RunRecord) -> Page:
    """What ``record`` has; what it lacks is named at the end."""
    trained = record.kind not in (EVALUATION, LONG2SHORT)
    settings = record.summary or (record.after.settings if record.after and record.kind == EVALUATION else {})
    figures, missing = panel_figures(record)
    if not record.metrics:
        figures = figures if record.during else []
        missing = ["Curves (metrics.jsonl)"] * trained + [EVALUATIONS] * (not (record.before or record.after))
    if record.kind != EVALUATION and bool(record.before) != bool(record.after):
        missing.append(
            "Evaluation after (evaluation/after)" if record.before else "Evaluation before (evaluation/before)"
        )
    return Page(
        kind="training report" if trained else f"{record.kind} report",
        title=title_of(record),
        about=about(settings, "model", "data", "template", "method", "objective", "trained", "rows", "seconds"),
        cards=[*accuracy_cards(record), *([] if trained else _length_card(record))],
        notices=notices_of(record),
        sections=[
            Section("Is it working?", points=[one.line for one in verdicts(record)], foot=_WORKING),
            Section("Curves", CURVES, figures=figures),
            *evaluation_sections(record),
            _metrics_section(record),
            settings_section(settings),
        ],
        missing=missing if settings else [*missing, "Settings (run.json)"],
    )


def title_of(record: RunRecord) -> str:
    """The run's name, else its folder's."""
    name = record.summary.get("name")
    return name if isinstance(name, str) and name else record.folder.resolve().name


def notices_of(record: RunRecord) -> list[str]:
    """What could not be read, and what the evaluations do not cover."""
    evaluations = [("before", record.before), *((f"step_{n}", e) for n, e in record.during), ("after", record.after)]
    gaps = [f"evaluation/{name}: {gap}" for name, result in evaluations if result for gap in result.gaps]
    return [*record.notices, *gaps]


def accuracy_cards(record: RunRecord) -> list[Card]:
    """Held-out accuracy before and after, and the gain on the same problems, as far as they were measured."""
    before, after = record.before, record.after
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
    before, after = record.before, record.after
    if after is None or after.mean_length_correct is None:
        return []
    earlier = before.mean_length_correct if before else None
    note = f"all answers: {after.mean_length:.1f}" if earlier is None else f"before: {earlier:.1f}"
    return [Card("Length of right answers", f"{after.mean_length_correct:.1f}", " tokens", note)]


def evaluation_sections(record: RunRecord) -> list[Section]:
    """The model's answers, and all numbers of the evaluations."""
    before, after = record.before, record.after
    now = after or before
    if now is None:
        return []
    choice = choose_samples(before, after)
    both = before is not None and after is not None
    lead = ""
    if choice.counts:
        lead = (
            "Greedy answers to the same held-out problems; the first problems of each kind in the order of the data, so nothing is "
            "picked for looks."
        )
    elif not choice.comparable:
        lead = "The evaluations before and after were made on different problems, so only the later one is shown."
    title = "Answers before and after" if both else "Answers"
    names = ["before", "after", "change, points or tokens"] if both else ["result" if after else "before"]
    rows = comparison_rows(before if both else None, now)
    table = Table(
        [f"{now.n_problems:,} held-out problems", *names],
        [(name, *cells) if both else (name, cells[1]) for name, *cells in rows],
        stacked=False,
    )
    return [
        Section(title, lead, choice.counts, samples=choice.samples),
        Section("Evaluation", table=table, foot=_how_measured(now)),
    ]


def _how_measured(result: EvaluationResult) -> str:
    sampling = describe_sampling(result)
    return (
        "Brackets: 95% intervals; Wilson for greedy accuracy, clustered by problem for samples, paired for the change in greedy "
        f"accuracy.{f' Samples: {sampling}.' if sampling else ''} – : not recorded."
    )


def _metrics_section(record: RunRecord) -> Section:
    """Each metric over the run; start and end are means of the first and last tenth."""
    rows = []
    for name, series in sorted(record.metrics.items()):
        values = [value for _, value in series]
        tenth = max(1, len(values) // 10)
        numbers = [fmean(values[:tenth]), fmean(values[-tenth:]), min(values), max(values)]
        rows.append([name, unit_of(name), *(f"{number:.4g}" for number in numbers), f"{len(values):,}"])
    head = ["metric", "unit", "start", "end", "lowest", "highest", "logged"]
    foot = "Start and end are means over the first and the last tenth of the logged steps."
    return Section(
        "Metrics", table=Table(head, rows, packed=True), foot=foot, folded=f"{len(rows)} metrics over the run"
    )
