"""What a page says of pipelines: their stages drawn and in a table, stage × task, curves, cost, what went into each.

One pipeline, or several runs of it: a number is then the mean over the runs that have it, with the lowest and the
highest in brackets.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from statistics import fmean

from grpo_lab.evaluation.charts import Line, figure
from grpo_lab.evaluation.drawing import Drawn, drawing
from grpo_lab.evaluation.page import Bar, Card, Section, Table, text_of
from grpo_lab.evaluation.panels import CURVES, comparison_figures
from grpo_lab.evaluation.run_record import PipelineStage, RunRecord, read_run
from grpo_lab.evaluation.statistics import is_number
from grpo_lab.evaluation.terminal import duration

SHARE, COUNT = "{:.1%}".format, "{:,.0f}".format
_SHARES = ("accuracy", "pass_at_4", "pass_at_8", "pass_at_16", "mode_following", "format", "language", "pair_accuracy")
FACTS: dict[str, Callable[[float], str]] = {
    **dict.fromkeys(_SHARES, SHARE),
    "length": "{:.1f}".format,
    **dict.fromkeys(("rows", "kept", "steps"), COUNT),
    "loss": "{:.3g}".format,
    "tokens": COUNT,
    "seconds": duration,
}
"""Facts that stages share, the columns of their table, and how each is written."""
DONE = "done"
_COST = {"seconds": "time", "tokens": "tokens generated"}
_START = "start model"
_JOINED = ("", "after", "of", "on", "evaluate", "evaluation", "eval", "score", "measured")
_CURVES = ("Reward", "Held-out accuracy", "Lengths of correct and incorrect answers: all", "Dead", "KL to", "Entropy")
_MOST_LINES = 8
_OF_RUNS = "Mean over the runs, in brackets the lowest and the highest."


def pipeline_sections(runs: Sequence[RunRecord]) -> list[Section]:
    """Of one pipeline, or of those among several runs."""
    runs = [run for run in runs if run.stages]
    if not runs:
        return []
    several = len(runs) > 1
    drawn = stages_drawing(runs[0].stages, f"Those of {runs[0].name}." * several)
    table = Section("Results of the stages", _OF_RUNS * several, table=stages_table(runs))
    return [drawn, table, matrix_section(runs), curves_section(runs), cost_section(runs)]


def pipeline_card(run: RunRecord) -> Card:
    """How far it is, and what that took."""
    total = {name: sum(numbers_of(one).get(name, 0.0) for one in run.stages) for name in _COST}
    cost = [duration(total["seconds"]), *([f"{COUNT(total['tokens'])} tokens generated"] if total["tokens"] else [])]
    done = sum(one.status == DONE for one in run.stages)
    return Card("Stages done", f"{done}", f" of {len(run.stages)}", ", ".join(cost))


def numbers_of(stage: PipelineStage) -> dict[str, float]:
    """Its facts that are numbers, of an interval the value; and its seconds."""
    found = {name: one.get("value") if isinstance(one, Mapping) else one for name, one in stage.results.items()}
    found["seconds"] = stage.seconds or None
    return {name: float(one) for name, one in found.items() if is_number(one)}


def stages_drawing(stages: Sequence[PipelineStage], lead: str) -> Section:
    """One drawing for a wide screen, one for a phone."""
    drawn = []
    for one in stages:
        found = numbers_of(one)
        facts = [f"{name.replace('_', ' ')} {FACTS[name](found[name])}" for name in FACTS if name in found]
        took = [facts.pop()] if "seconds" in found else []
        about = [one.kind, *took, *([] if one.status == DONE else [one.status])]
        state = one.status if one.status in (DONE, "waiting") else "running"
        drawn.append(Drawn(one.name, state, [word.removeprefix("seconds ") for word in about], facts, one.before))
    shapes = (("wide", 4, 246.0), ("narrow", 2, 166.0))
    return Section("Stages", lead, drawings=[(seen, drawing(drawn, most, width)) for seen, most, width in shapes])


def stages_table(runs: Sequence[RunRecord]) -> Table:
    """One row a stage, one column for each of `FACTS` that a stage has; the last row: tokens and time of all."""
    found = _by_stage(runs)
    columns = [name for name in FACTS if any(name in values for values in found.values())]
    rows = [
        [f"{number}. {name}", kind, *(_said(values.get(column, ()), column) for column in columns)]
        for number, ((name, kind), values) in enumerate(found.items(), start=1)
    ]
    total = {name: [sum(numbers_of(one).get(name, 0.0) for one in run.stages) for run in runs] for name in _COST}
    rows.append(["all stages", "", *(_said(total.get(column, ()), column) for column in columns)])
    head = ["stage", "kind", *(_COST.get(name, name.replace("_", " ")) for name in columns)]
    return Table(head, rows, packed=True)


def matrix(runs: Sequence[RunRecord]) -> dict[str, dict[str, list[float]]]:
    """Stage → task → accuracy in each run, from the stages that evaluate the model of another: they are called by that
    one and by the task (`fusion-maths`). A further condition (``accuracy.no-thinking``) is a task of its own, a budget
    is none; who takes no stage's model is about the start model."""
    found: dict[str, dict[str, list[float]]] = {}
    for run in runs:
        for one in run.stages:
            if one.kind != "evaluate":
                continue
            of = one.inputs.get("model", {}).get("from", "").partition(".")[0]
            words = re.split("[-_ ]+", re.sub(rf"(^|[-_]){re.escape(of)}(?=[-_]|$)", " ", one.name, count=1))
            task = " ".join(word for word in words if word not in _JOINED) or "held-out problems"
            for name, value in numbers_of(one).items():
                fact, _, condition = name.partition(".")
                if fact == "accuracy" and not re.search("budget|against", condition):
                    named = ", ".join(filter(None, (task, condition)))
                    found.setdefault(of or _START, {}).setdefault(named, []).append(value)
    order = [_START, *dict.fromkeys(one.name for run in runs for one in run.stages)]
    return {of: found[of] for of in order if of in found}


def matrix_section(runs: Sequence[RunRecord]) -> Section:
    """The accuracy on each task after each stage: drawn, and as a table."""
    found = matrix(runs)
    tasks = list(dict.fromkeys(task for row in found.values() for task in row))
    rows = [
        [f"{number}. {of}", *(_said(row.get(task, ()), "accuracy") for task in tasks)]
        for number, (of, row) in enumerate(found.items(), start=1)
    ]
    lines = []
    for task in tasks:
        at = [(float(n), row[task]) for n, row in enumerate(found.values(), start=1) if task in row]
        errors = [(min(one), max(one)) for _, one in at] if len(runs) > 1 else []
        lines.append(Line(task, [(n, fmean(one)) for n, one in at], errors, markers=True))
    meaning = f"One line a task, over the rows of the table below. {_OF_RUNS if len(runs) > 1 else ''}"
    drawn = figure("Accuracy on each task", meaning, lines, "share of problems correct", share=True, x_unit="row")
    lead = "How right the model is that a stage left, on each task that it was evaluated on."
    table = Table(["after", *tasks], rows, stacked=len(tasks) > 3)
    return Section("Stage × task", lead, figures=[drawn] if drawn and len(found) > 1 else [], table=table)


def curves_section(runs: Sequence[RunRecord]) -> Section:
    """The main curves of the stages that logged some, one line a stage."""
    found = []
    for run in runs:
        for one in run.stages:
            if (run.folder / one.name / "metrics.jsonl").is_file():
                name = f"{run.name}: {one.name}" if len(runs) > 1 else one.name
                found.append(replace(read_run(run.folder / one.name), name=name))
    figures = [one for one in comparison_figures(found[:_MOST_LINES]) if one.title.startswith(_CURVES)] if found else []
    more = f" The first {_MOST_LINES} of {len(found)} are drawn." if len(found) > _MOST_LINES else ""
    foot = f"What else a stage logged: report.html in its folder.{more}" if figures else ""
    return Section("Curves of the stages", f"One line a stage. {CURVES}", figures=figures, foot=foot)


def cost_section(runs: Sequence[RunRecord]) -> Section:
    """Time and tokens of each stage, and its share of all."""
    found = _by_stage(runs)
    mean = {column: [fmean(values.get(column, [0.0])) for values in found.values()] for column in _COST}
    columns = [column for column in _COST if sum(mean[column])]
    rows: list[list[str | Bar]] = []
    for place, (name, _) in enumerate(found):
        rows.append([name])
        for column in columns:
            share = mean[column][place] / sum(mean[column])
            rows[-1] += [f"{FACTS[column](mean[column][place])}, {share:.0%}", Bar(round(1000 * share), 0, 1000)]
    head = ["stage", *(name for column in columns for name in (_COST[column], ""))]
    return Section("Cost", table=Table(head, rows if columns else []))


def made_section(stages: Sequence[PipelineStage]) -> Section:
    """What each stage took from the stages before it, what it dropped of that, and why it was done."""
    rows = []
    for one in stages:
        takes = ", ".join(f"{setting}: {taken.get('from')}" for setting, taken in one.inputs.items())
        rows.append([one.name, takes, text_of("", one.results.get("dropped") or ""), one.why])
    head = ["stage", "takes", "dropped rows, by reason", "why it was done"]
    return Section("What the stages were made from", table=Table(head, rows, words={1, 2, 3}))


def _by_stage(runs: Sequence[RunRecord]) -> dict[tuple[str, str], dict[str, list[float]]]:
    """(stage, kind) → fact → the value in each run that has it."""
    found: dict[tuple[str, str], dict[str, list[float]]] = {}
    for one in (one for run in runs for one in run.stages):
        row = found.setdefault((one.name, one.kind), {})
        for name, value in numbers_of(one).items():
            row.setdefault(name, []).append(value)
    return found


def _said(values: Sequence[float], name: str) -> str:
    """Their mean, and the lowest and the highest of several."""
    if not values:
        return ""
    mean, low, high = (FACTS[name](of(values)) for of in (fmean, min, max))
    return mean if low == high else f"{mean} [{low}, {high}]"
