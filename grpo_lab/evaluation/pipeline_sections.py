"""Pipelines on a page and on the terminal: a drawing and a table of the stages, accuracy by stage and task, curves.

`status` and `show` print a pipeline; `pipeline_sections` makes the sections of a page. For several runs of one pipeline
a number is the mean over the runs that have it, with the lowest and the highest in brackets.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from textwrap import wrap
from types import SimpleNamespace

from rich.console import Console
from rich.panel import Panel
from rich.text import Text

from grpo_lab.evaluation.page import Section, Table
from grpo_lab.evaluation.panels import CURVES, comparison_figures
from grpo_lab.evaluation.run_record import (
    BROKEN_OFF,
    DONE,
    EVALUATE,
    RUNNING,
    STAGES,
    WAITING,
    PipelineStage,
    RunRecord,
    read_run,
    read_stages,
)
from grpo_lab.evaluation.statistics import is_number
from grpo_lab.evaluation.terminal import Terminal, duration, fits, print_table


def _share(value: float) -> str:
    """Format a share in per cent, and a number above 1 as a count. ``thinking`` is a share in some kinds of stage, and
    a number of tokens in others."""
    if value <= 1:
        return f"{value:.1%}"
    return f"{value:,.0f}"


_SHARES = ("accuracy", "thinking", "no_thinking", "pass_at_8", "pass_at_16", "mode_following", "format")
FACTS: dict[str, Callable[[float], str]] = {
    **dict.fromkeys((*_SHARES, "language", "pair_accuracy"), _share),
    "length": "{:.1f}".format,
    **dict.fromkeys(("rows", "kept", "steps"), "{:,.0f}".format),
    **dict.fromkeys(("loss", "reward"), "{:.3g}".format),
    "tokens": "{:,.0f}".format,
    "seconds": duration,
}
"""Fact of a stage → function that writes it. These are the columns of the stages' table."""
OUT_OF = "out_of"
"""Name of the fact that says how many rows a stage chose its ``rows`` from."""
_COST = {"seconds": "time", "tokens": "tokens generated"}
_START = "start model"
#: Words in a stage's name that do not name a task.
_JOINED = ("", "after", "of", "on", "evaluate", "evaluation", "eval", "score", "measured")
#: How the titles of the figures begin that `curves_section` keeps.
_CURVES = ("Reward", "Held-out accuracy", "Lengths of correct and incorrect answers: all", "Dead", "KL to", "Entropy")
_MOST_LINES = 8
_OF_RUNS = "Mean over the runs, in brackets the lowest and the highest."
WIDTH = 330.0
DROP = 24.0
LINE = 17.0
LANE = 9.0
"""Pixels: the width of a box, and the distances between two boxes, two lines, and two arrows beside the boxes."""
CHARACTERS = 42
"""Largest number of characters in a line of a box."""


def status(folder: Path, console: Console | None = None, stages: Sequence[PipelineStage] = ()) -> None:
    """Print a table of the pipeline in ``folder``, a row for each stage. On a narrow terminal all facts of a stage are
    in one column.

    Args:
        folder: the pipeline's output folder.
        console: where to print.
        stages: the stages as they are now; default: as the folder's last run left them.

    Raises:
        ValueError: the folder holds no pipeline.
    """
    run = _pipeline_in(folder, stages)
    console = console or Terminal()
    table = stages_table([run])
    done = sum(one.status == DONE for one in run.stages)
    title = f"{run.summary.get('name')}: {done} of {len(run.stages)} stages done"
    if fits(console, table.head, table.rows):
        print_table(console, title, table.head, table.rows)
    else:
        rows = []
        for stage, *facts, took in table.rows:
            said = [f"{name} {cell}".strip() for name, cell in zip(["", *table.head[2:]], facts) if cell]
            rows.append([stage, took, ", ".join(said)])
        print_table(console, title, ["stage", "time", "kind, facts"], rows, text=(0, 2))
    for line in open_questions(run.stages):
        console.print(line, soft_wrap=True)


def open_questions(stages: Sequence[PipelineStage]) -> list[str]:
    """Return a line for each stage that has failed, has to be repeated, or was edited, with the reason."""
    found = []
    for one in stages:
        if one.error:
            found.append(f"{one.name}: {one.status}: {one.error}")
        elif one.status not in (DONE, WAITING, RUNNING, BROKEN_OFF) and one.why not in one.status:
            found.append(f"{one.name}: {one.status}: {one.why}")
    return found


def show(folder: Path, console: Console | None = None, stages: Sequence[PipelineStage] = ()) -> None:
    """Print each stage of the pipeline in ``folder`` as a box with its facts and its inputs. Arguments and errors are
    those of `status`."""
    for one in _pipeline_in(folder, stages).stages:
        taken = [f"← {found.get('from')}" for found in one.inputs.values()]
        said = Text("\n".join([", ".join(words) for words in _words(one)] + taken))
        (console or Terminal()).print(Panel(said, title=Text(one.name), title_align="left", width=80))


def _pipeline_in(folder: Path, stages: Sequence[PipelineStage]) -> RunRecord:
    """Read the pipeline in ``folder``, with ``stages`` in place of the recorded ones if there are any. Raises
    ValueError if there is none."""
    run = RunRecord(folder)
    read_stages(run)
    run.stages = list(stages) or run.stages
    if not run.stages:
        why = "; ".join(run.notices) or f"no {STAGES} with stages is there"
        raise ValueError(f"{str(folder)!r} holds no pipeline ({why}); name the `output_dir` of one")
    return run


def pipeline_sections(runs: Sequence[RunRecord]) -> list[Section]:
    """Make the sections about those of ``runs`` that are pipelines; the drawing is of the first."""
    runs = [run for run in runs if run.stages]
    if not runs:
        return []
    whose = ""
    of_runs = ""
    if len(runs) > 1:
        whose = f"Those of {runs[0].name}."
        of_runs = _OF_RUNS
    return [
        Section("Stages", whose, drawing=drawing(runs[0].stages)),
        Section("Results and cost of the stages", of_runs, table=stages_table(runs)),
        Section("Stage × task", "How right the model is that a stage left, on each task.", table=matrix_table(runs)),
        curves_section(runs),
    ]


def drawing(stages: Sequence[PipelineStage]) -> SimpleNamespace:
    """Lay the stages out as boxes, one under the other, in pixels for `figure.html.j2`.

    An input from the stage just before is an arrow between the boxes; one from an earlier stage is a line beside them.
    """
    boxes: dict[str, SimpleNamespace] = {}
    lanes: dict[str, float] = {}
    arrows = []
    top = 1.0
    for stage in stages:
        lines = _lines_in(stage)
        for other in stage.before:
            if other == list(boxes)[-1]:
                arrows.append((f"M20 {top - DROP:g}v{DROP - 7:g}", f"M16 {top - 7:g}h8l-4 7z"))
            else:
                x = lanes.setdefault(other, WIDTH + 12 + LANE * len(lanes))
                y = top + 15
                path = f"M{WIDTH + 1:g} {boxes[other].bottom - 12:g}H{x:g}V{y:g}H{WIDTH + 7:g}"
                arrows.append((path, f"M{WIDTH + 8:g} {y - 4:g}v8l-7 -4z"))
        height = 28 + LINE * len(lines)
        boxes[stage.name] = SimpleNamespace(
            name=stage.name[: CHARACTERS - 4],
            y=top,
            height=height,
            bottom=top + height,
            state=re.sub(r"\W+", "-", stage.status),
            lines=lines,
        )
        top += height + DROP
    size = {"width": max([WIDTH, *lanes.values()]) + 4, "height": top - DROP + 2}
    return SimpleNamespace(**size, box=WIDTH, boxes=list(boxes.values()), arrows=arrows)


def _lines_in(stage: PipelineStage) -> list[str]:
    """Return the lines of a stage's box, broken between facts and not inside one."""
    lines = []
    for words in _words(stage):
        unbroken = ", ".join(word.replace(" ", "\u00a0") for word in words)
        lines += [line.replace("\u00a0", " ") for line in wrap(unbroken, CHARACTERS)]
    return lines


def _words(stage: PipelineStage) -> list[list[str]]:
    """Describe a stage in two lists of words: its kind, status and time; then its facts."""
    found = numbers_of(stage)
    took = []
    if "seconds" in found:
        took = [duration(found.pop("seconds"))]
    each = {name: [value] for name, value in found.items()}
    facts = [f"{name.replace('_', ' ')} {_cell(each, name)}" for name in FACTS if name in found]
    return [[stage.kind, stage.status, *took], facts]


def numbers_of(stage: PipelineStage) -> dict[str, float]:
    """Return the numeric facts of a stage, its seconds among them; of an interval the value."""
    found = {name: one.get("value") if isinstance(one, Mapping) else one for name, one in stage.results.items()}
    found["seconds"] = stage.seconds or None
    found.setdefault(OUT_OF, found.get("traces"))  # the name of this fact in stages that filter traces
    return {name: float(one) for name, one in found.items() if is_number(one)}


def stages_table(runs: Sequence[RunRecord]) -> Table:
    """Make a table with a row for each stage, and a column for each of `FACTS` that some stage has.

    The last row sums tokens and time. Stages of the same name and different kinds have a row each.
    """
    found: dict[tuple[str, str], dict[str, list[float]]] = {}
    kinds: dict[tuple[str, str], str] = {}
    total: dict[str, list[float]] = {name: [0.0] * len(runs) for name in _COST}
    for place, run in enumerate(runs):
        for one in run.stages:
            key = (one.name, one.kind)
            kinds[key] = one.kind if one.status == DONE else f"{one.kind}, {one.status}"
            for name, value in numbers_of(one).items():
                found.setdefault(key, {}).setdefault(name, []).append(value)
                if name in total:
                    total[name][place] += value
    columns = [name for name in FACTS if any(name in values for values in found.values())]
    rows = [
        [f"{number}. {name}", kinds[name, kind], *(_cell(found.get((name, kind), {}), column) for column in columns)]
        for number, (name, kind) in enumerate(kinds, start=1)
    ]
    rows.append(["all stages", "", *(_said(total.get(column, ()), column) for column in columns)])
    return Table(["stage", "kind", *(_COST.get(name, name.replace("_", " ")) for name in columns)], rows, packed=True)


def matrix(runs: Sequence[RunRecord]) -> dict[str, dict[str, list[float]]]:
    """Return stage → task → accuracy in each run, from the stages that evaluate another stage's model.

    The name of such a stage holds both: `fusion-maths` is the task maths, after the stage fusion. A further condition
    (``accuracy.no-thinking``) makes a task of its own; a thinking budget does not. If the evaluated model comes from no
    stage, it is the start model. If runs have stages of one name and different kinds, the kind is added to the name.
    """
    found: dict[str, dict[str, list[float]]] = {}
    kinds: dict[str, list[str]] = {}
    for name, kind in dict.fromkeys((one.name, one.kind) for run in runs for one in run.stages):
        kinds.setdefault(name, []).append(kind)
    for run in runs:
        of_kind = {one.name: one.kind for one in run.stages}
        for evaluation in (one for one in run.stages if one.kind == EVALUATE):
            model = evaluation.inputs.get("model", {}).get("from", "").partition(".")[0]
            row = model or _START
            if len(kinds.get(model, ())) > 1:
                row = f"{model} ({of_kind.get(model)})"
            task = _task_of(evaluation.name, model)
            for name, value in numbers_of(evaluation).items():
                fact, _, condition = name.partition(".")
                if fact == "accuracy" and not re.search("budget|against", condition):
                    column = ", ".join(filter(None, (task, condition)))
                    found.setdefault(row, {}).setdefault(column, []).append(value)
    order = [_START]
    for name, several in kinds.items():
        order += [f"{name} ({kind})" for kind in several] if len(several) > 1 else [name]
    return {row: found[row] for row in order if row in found}


def _task_of(name: str, model: str) -> str:
    """Return what the stage ``name`` evaluates ``model`` on: the words of its name that are not the model's."""
    without_model = re.sub(rf"(^|[-_]){re.escape(model)}(?=[-_]|$)", " ", name, count=1)
    words = re.split("[-_ ]+", without_model)
    return " ".join(word for word in words if word not in _JOINED) or "held-out problems"


def matrix_table(runs: Sequence[RunRecord]) -> Table:
    """Make a table of accuracy: a row for each stage, a column for each task."""
    found = matrix(runs)
    tasks = list(dict.fromkeys(task for row in found.values() for task in row))
    rows = [
        [f"{number}. {of}", *(_said(row.get(task, ()), "accuracy") for task in tasks)]
        for number, (of, row) in enumerate(found.items(), start=1)
    ]
    return Table(["after", *tasks], rows, stacked=len(tasks) > 3)


def curves_section(runs: Sequence[RunRecord]) -> Section:
    """Draw the main curves of the stages that logged metrics, a line for each stage."""
    found = []
    for folder, name, stage in [(run.folder, run.name, one.name) for run in runs for one in run.stages]:
        if (folder / stage / "metrics.jsonl").is_file():
            named = f"{name}: {stage}" if len(runs) > 1 else stage
            found.append(replace(read_run(folder / stage), name=named))
    figures = []
    if found:
        figures = [one for one in comparison_figures(found[:_MOST_LINES]) if one.title.startswith(_CURVES)]
    foot = ""
    if len(found) > _MOST_LINES:
        foot = f"The first {_MOST_LINES} of {len(found)} stages are drawn."
    return Section("Curves of the stages", f"One line a stage. {CURVES}", figures=figures, foot=foot)


def _cell(found: Mapping[str, Sequence[float]], name: str) -> str:
    """Format one fact of a stage; for chosen rows, also the number of rows that they were chosen from."""
    said = _said(found.get(name, ()), name)
    total = found.get(OUT_OF)
    if said and total and name == "rows":
        return f"{said} of {_said(total, 'rows')}"
    return said


def _said(values: Sequence[float], name: str) -> str:
    """Format the mean of ``values``, with the lowest and the highest if these are written differently."""
    if not values:
        return ""
    mean, low, high = (FACTS[name](of(values)) for of in (fmean, min, max))
    if low == high:
        return mean
    return f"{mean} [{low}, {high}]"
