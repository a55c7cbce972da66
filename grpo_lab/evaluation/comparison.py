"""Two or more runs side by side: what was set differently, what came out, a paired test on the held-out problems.

`compare` reads the runs and makes a `Comparison`; `print_comparison` and `write_comparison` show it. A paired test
needs answers to the same problems, judged alike. Problems are recognised by question and gold answer, not by their
place in the data. If two runs share no problem, or were judged by different rewards, no test is made, and the reason is
given.
"""

from __future__ import annotations

import html
import json
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo_lab.evaluation.outcomes import Outcome
from grpo_lab.evaluation.page import Page, Section, Table, flat, text_of
from grpo_lab.evaluation.panels import CURVES, comparison_figures
from grpo_lab.evaluation.pipeline_sections import pipeline_sections
from grpo_lab.evaluation.result import EvaluationResult
from grpo_lab.evaluation.run_record import CURATION, EVALUATION, RunRecord, StagesOf, as_left, read_run
from grpo_lab.evaluation.statistics import Interval, mcnemar_exact, paired_difference
from grpo_lab.evaluation.terminal import NOT_RECORDED, Terminal, comparison_rows, points, print_table
from grpo_lab.reading import parse_json

MOST_RUNS = 8
"""Largest number of runs that a chart can tell apart."""
_JUDGING = ("judge", "mode", "reward")
"""Settings of an evaluation that must agree for a paired test."""
_CONDITIONS = ("template", "max_new_tokens", "n_samples", "temperature", "limit")
"""Settings of an evaluation that are named in a note if they differ."""
_NOT_SETTINGS = (
    "name", "fingerprint", "seconds", "finished", "started", "expected", "versions", "parameters", "left",
)  # fmt: skip
CAVEAT = (
    "The test asks whether the two models differ on problems such as these. It knows nothing of the luck of one "
    "training: another seed of either run moves its accuracy too."
)
_RESULTS = "Brackets: 95% intervals; Wilson for greedy accuracy, clustered by problem for samples. – : not recorded."
_TESTS = (
    "Difference in percentage points with the 95% interval for matched pairs (Agresti and Min); p: McNemar's exact "
    "test, two-sided."
)
_ON_TERMINAL = ("greedy accuracy before", "greedy accuracy", "tokens, mean", "thinking, mean", "truncated")
"""Rows of `result_rows` that are printed on a terminal, beside the measures; all of them would not fit."""
MARK = "grpo_lab comparison"
"""Name of the tag by which a page is known as a comparison. Its content lists the folders of the runs."""
_RUNS = re.compile(rf'<meta name="{MARK}" content="(\[[^"]*)">')


@dataclass(frozen=True)
class PairedTest:
    """Test of one run against another, on the problems that both answered and that could be scored.

    Attributes:
        name: the tested run.
        against: the run that it is compared with.
        difference: share of problems that ``name`` solved less that of ``against``, with its 95% interval; None: no
            test was made.
        gained: number of problems that only ``name`` solved.
        lost: number of problems that only ``against`` solved.
        p_value: two-sided p of McNemar's exact test; None: no test was made.
        why_not: the reason why no test was made; empty if there is one.
    """

    name: str
    against: str
    difference: Interval | None
    gained: int = 0
    lost: int = 0
    p_value: float | None = None
    why_not: str = ""


@dataclass(frozen=True)
class Comparison:
    """Runs side by side.

    Attributes:
        runs: the runs; the first is the baseline.
        differing: each setting that differs between runs, and its value in each run.
        tests: the test of each other run against the baseline, in the order of the runs.
        notes: sentences that a reader has to know before believing the numbers.
    """

    runs: list[RunRecord]
    differing: list[tuple[str, list[Any]]]
    tests: list[PairedTest]
    notes: list[str]


def compare(folders: Sequence[str | Path], stages: StagesOf = as_left) -> Comparison:
    """Compare the runs in ``folders``: outputs of `train` or `long2short`, or of `evaluate --output`.

    ``stages``: a function that returns the current stages of a pipeline's folder.

    Raises:
        ValueError: there are fewer than two folders or more than ``MOST_RUNS``, one is named twice, or one holds
            nothing of a run.
    """
    paths = [Path(folder) for folder in folders]
    if not 2 <= len(paths) <= MOST_RUNS:
        raise ValueError(f"a comparison is of 2 to {MOST_RUNS} runs, got {len(paths)}")
    if len({path.resolve() for path in paths}) < len(paths):
        raise ValueError(f"one run is named twice among {', '.join(map(str, paths))}")
    runs = [read_run(path) for path in paths]
    for run, name in zip(runs, _names(runs), strict=True):
        run.name = name
        run.stages = list(stages(run.folder)) or run.stages
        if run.kind in ("", CURATION):
            said = "holds nothing of a run and no evaluation; name output folders of train or evaluate"
            raise ValueError(f"{run.folder} {said}")
        if run.kind == EVALUATION and run.after:
            model = run.after.settings.get("model", "not recorded")
            run.notices.append(f"one evaluation and no run; the model is {model}")
    tests = [paired_test(run, runs[0]) for run in runs[1:]]
    return Comparison(runs, _differing(runs), tests, _notes(runs, tests))


def paired_test(run: RunRecord, baseline: RunRecord) -> PairedTest:
    """Test ``run`` against ``baseline`` on the greedy answers to the problems that both have. If no test can be made,
    the result says why."""
    new = run.after
    old = baseline.after
    missing = [one.name for one, result in ((baseline, old), (run, new)) if result is None or not result.greedy]
    if new is None or old is None or missing:
        return PairedTest(run.name, baseline.name, None, why_not=f"no held-out outcomes of {' and '.join(missing)}")
    for key, said in _different(old, new, _JUDGING):
        return PairedTest(run.name, baseline.name, None, why_not=f"judged differently: {key} {said}")
    pairs = shared_problems(old, new)
    if not pairs:
        return PairedTest(run.name, baseline.name, None, why_not="evaluated on other problems: none is shared")
    before = [bool(a.correct) for a, _ in pairs]
    after = [bool(b.correct) for _, b in pairs]
    gained = sum(b and not a for a, b in zip(before, after, strict=True))
    lost = sum(a and not b for a, b in zip(before, after, strict=True))
    found = paired_difference(before, after)
    return PairedTest(run.name, baseline.name, found, gained, lost, mcnemar_exact(gained, lost))


def _different(old: EvaluationResult, new: EvaluationResult, keys: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield (setting, both values in words) for each of ``keys`` that both evaluations have and that differs; the value
    of ``new`` comes first."""
    for key in keys:
        if key in old.settings and key in new.settings and old.settings[key] != new.settings[key]:
            yield key, f"{text_of('', new.settings[key])} and {text_of('', old.settings[key])}"


def shared_problems(old: EvaluationResult, new: EvaluationResult) -> list[tuple[Outcome, Outcome]]:
    """Return pairs (old, new) of scorable greedy answers to the same question with the same gold, in the order of
    ``old``.

    If the rows hold a problem several times, its first answers are paired, then its second ones.
    """
    waiting: dict[tuple[str, str | None], list[Outcome]] = {}
    for outcome in new.greedy:
        if outcome.correct is not None:
            waiting.setdefault((outcome.question, outcome.solution), []).append(outcome)
    pairs = []
    for outcome in old.greedy:
        same = waiting.get((outcome.question, outcome.solution))
        if outcome.correct is not None and same:
            pairs.append((outcome, same.pop(0)))
    return pairs


def _names(records: Sequence[RunRecord]) -> list[str]:
    """Return a name for each run: its own, or its folder's name if two own names are equal, or its whole path if two
    folders' names are equal too."""
    folders = [record.folder.resolve() for record in records]
    own = [str(record.summary.get("name") or folder.name) for record, folder in zip(records, folders, strict=True)]
    for names in (own, [folder.name for folder in folders]):
        if len(set(names)) == len(names):
            return names
    return [str(record.folder) for record in records]


def _differing(records: Sequence[RunRecord]) -> list[tuple[str, list[Any]]]:
    """Return the settings of `run.json` that differ between runs, with the value in each; None for a run without it.
    Nested ones have dotted names."""
    kept = [{name: one for name, one in run.summary.items() if name not in _NOT_SETTINGS} for run in records]
    settings = [{name: one for name, one in flat(some) if one != {}} for some in kept]
    found = []
    for name in dict.fromkeys(name for one in settings for name in one):
        seen = [one.get(name) for one in settings if one]
        if name != "settings.output_dir" and any(value != seen[0] for value in seen):
            found.append((name, [one.get(name) for one in settings]))
    return found


def _notes(runs: Sequence[RunRecord], tests: Sequence[PairedTest]) -> list[str]:
    """List what a reader has to know before believing the tables: what could not be read, what the evaluations do not
    cover, and what each test rests on."""
    notes = [f"{run.name}: {notice}" for run in runs for notice in run.notices]
    notes += [f"{run.name}: {gap}" for run in runs if run.after for gap in run.after.gaps]
    notes += [f"{test.name} and {test.against}: no paired test ({test.why_not})" for test in tests if test.why_not]
    base = runs[0].after
    for run, test in zip(runs[1:], tests, strict=True):
        if base is None or run.after is None or test.difference is None:
            continue
        shared = test.difference.n
        counts = (run.after.n_problems, base.n_problems)
        if shared < max(counts):
            notes.append(
                f"{run.name} and {test.against} share {shared:,} scorable problems of {counts[0]:,} and {counts[1]:,}; "
                "the test is on those"
            )
        for key, said in _different(base, run.after, _CONDITIONS):
            notes.append(f"{run.name} and {test.against} were evaluated with another {key}: {said}")
    made = [test for test in tests if test.p_value is not None]
    if len(made) > 1:
        notes.append(f"{len(made)} tests were made; their p-values are not adjusted for that")
    return notes


def write_comparison(found: Comparison, path: str | Path) -> Path:
    """Write the page of a comparison to ``path``; return the path.

    Raises:
        ValueError: ``path`` is a folder, or a file that is no comparison, or it cannot be written.
    """
    path = Path(path)
    if path.is_dir():
        page = str(path / "comparison.html")
        raise ValueError(f"--output {str(path)!r} is a folder; name the page, such as {page!r}")
    if path.is_file() and MARK not in path.read_text(encoding="utf-8", errors="replace")[:4000]:
        raise ValueError(f"--output {str(path)!r} exists and is no comparison; choose another file")
    folders = [os.path.relpath(run.folder, path.parent) for run in found.runs]
    return comparison_page(found, folders).write(path)


def rewrite_comparison(path: Path, stages: StagesOf = as_left) -> Path:
    """Make the page in ``path`` again from what its runs hold now; return the path. ``stages``: as in `compare`.

    Raises:
        ValueError: the file is no comparison, its list of runs is damaged, or a run is gone.
    """
    marked = _RUNS.search(path.read_text(encoding="utf-8", errors="replace"))
    if marked is None:
        raise ValueError(f"{str(path)!r} is a file and no comparison of runs; it was left as it is")
    folders = parse_json(html.unescape(marked[1]), f"{path}, the list of its runs")
    if not (isinstance(folders, list) and all(isinstance(one, str) for one in folders)):
        raise ValueError(f"{path}: the list of its runs is damaged; make the page anew by `grpo-lab compare`")
    runs = [os.path.normpath(path.parent / folder) for folder in folders]
    return write_comparison(compare(runs, stages), path)


def comparison_page(found: Comparison, folders: Sequence[str] = ()) -> Page:
    """Make the page of a comparison. ``folders``: the runs' folders, relative to that of the page, from which the page
    can be made again."""
    names = [run.name for run in found.runs]
    differing = [
        (name, *(NOT_RECORDED if one is None else text_of(name, one) for one in values))
        for name, values in found.differing
    ]
    settings = Table(["setting", *names], differing, words=range(1, len(names) + 1))
    results = Table(["final evaluation", *names], result_rows(found), stacked=len(names) > 3)
    figures = comparison_figures(found.runs)
    stages = pipeline_sections(found.runs)
    if figures or stages:
        missing = []
    else:
        missing = ["Curves (metrics.jsonl)"]
    return Page(
        kind="comparison",
        title=" · ".join(names),
        about=[str(run.folder) for run in found.runs],
        cards=[],
        notices=found.notes,
        sections=[
            Section("Results", table=results, foot=_RESULTS),
            Section("Paired tests", table=tests_table(found.tests), foot=f"{_TESTS} {CAVEAT}"),
            *stages,
            Section("Curves", f"One line a run. {CURVES}", figures=figures),
            Section("Set differently", table=settings),
        ],
        missing=missing if differing else [*missing, "Settings that differ (run.json)"],
        runs=json.dumps(list(folders)),
    )


def tests_table(tests: Sequence[PairedTest]) -> Table:
    """Make a table with a row for each test."""
    head = ["greedy answers to the same problems", "difference", "right only here", "right only there", "p"]
    return Table(head, [(f"{one.name} − {one.against}", *filter(None, test_cells(one))) for one in tests])


def print_comparison(found: Comparison, console: Terminal | None = None) -> None:
    """Print results, tests and notes. Lines outside the table are not wrapped, so that they can be searched for."""
    console = console or Terminal()
    measures = {name for run in found.runs if run.after for name in run.after.numbers["measures"]}
    rows = [row for row in result_rows(found) if row[0] in {*_ON_TERMINAL, *measures}]
    head, *cells = zip(["", *(run.name for run in found.runs)], *rows, strict=True)
    print_table(console, "", head, cells, header_style="bold", padding=0, pad_edge=False)
    lines = []
    for test in found.tests:
        change, gained, lost, p = test_cells(test)
        if test.difference is not None:
            counts = f"n={test.difference.n}: {gained} right only in the first, {lost} only in the second"
            lines.append(f"{test.name} against {test.against}: {change} points, p {p} ({counts})")
    for line in [*lines, *(f"note: {note}" for note in found.notes), *([CAVEAT] if lines else [])]:
        console.print(line, soft_wrap=True)


def test_cells(test: PairedTest) -> tuple[str, str, str, str]:
    """Return a test as four texts: difference in points with its interval, problems solved only by the first, problems
    solved only by the second, p. Without a test the first says why, and the others are empty."""
    if test.difference is None or test.p_value is None:
        return f"no test: {test.why_not}", "", "", ""
    p = "< 0.0001" if test.p_value < 1e-4 else f"{test.p_value:.2g}"
    return points(test.difference), str(test.gained), str(test.lost), p


def result_rows(found: Comparison) -> list[list[str]]:
    """Return table rows of a quantity and its text for each run: accuracy before training, the numbers of the final
    evaluation, problems, optimizer steps."""
    before = [dict(_column(run.before)).get("greedy accuracy", NOT_RECORDED) for run in found.runs]
    columns = [dict(_column(run.after)) for run in found.runs]
    names = dict.fromkeys(name for column in columns for name in column)
    rows = []
    if any(text != NOT_RECORDED for text in before):
        rows = [["greedy accuracy before", *before]]
    rows += [[name, *(column.get(name, NOT_RECORDED) for column in columns)] for name in names]
    rows.append(["problems", *(f"{run.after.n_problems:,}" if run.after else NOT_RECORDED for run in found.runs)])
    rows.append(["optimizer steps", *(str(run.last_step or NOT_RECORDED) for run in found.runs)])
    return rows


def _column(result: Any) -> list[tuple[str, str]]:
    """Return (quantity, text) for each number of an evaluation; nothing for None."""
    if result is None:
        return []
    return [(name, new) for name, _, new, _ in comparison_rows(None, result)]
