"""An experiment: every arm trained from one start with every seed; a record for each, a table and a figure of all.

An arm with a seed is a cell. It works in ``<folder>/<arm>-<seed>``, in a process of its own, and leaves ``arm.json``
there, written last and whole: a cell that has one is never repeated, another begins, or goes on from what is there.
Cells run seed by seed, so that what was broken off still compares. Other options need another folder.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from statistics import fmean
from typing import Any

from grpo_lab.evaluation.power import power_said
from grpo_lab.evaluation.statistics import half_width_over_seeds
from grpo_lab.io import write_whole_text
from grpo_lab.reading import Fields, read_record

Options = argparse.Namespace
Record = dict[str, Any]
Found = dict[str, list[Record]]
"""Arm → its records, one a seed."""
Lines = Mapping[str, Sequence[Sequence[tuple[float, float]]]]
"""Label → curves of (x, y), one a seed."""

GENERATED = "rollout/generated"
"""In ``metrics.jsonl``: tokens that the policy has written until then."""
RECORD: Fields = {"arm": str, "seed": int}
REMOVE = "remove it, and the cell runs again"
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#A8558A", "#6B7280", "#C28E0E")


@dataclass(frozen=True)
class Experiment:
    """What is run, and how it is shown.

    Args:
        arms: their names, in the order of the table.
        run: a cell's arm, seed and folder, and the options → its record, which gets ``memory_mib`` (most that the
            process held above what it held before) and ``process_seconds`` besides.
        report: records and options → the text that is printed; writes its files into ``options.folder``.
        prepare: makes what the cells begin from, before the first of them.
        seeds: of ``grpo-lab lab``, where none are asked for.
        in_process: cells are short and train nothing: they run one after the other, here.
        result: of a record, the share that arms are compared by; how many seeds that needs is said before the cells
            run, and beside the report. None: arms are not compared by one.
        problems: held-out problems behind it.
    """

    arms: Sequence[str]
    run: Callable[[str, int, Path, Options], Record]
    report: Callable[[Found, Options], str]
    prepare: Callable[[Options], object] = lambda options: None
    seeds: Sequence[int] = (0, 1, 2)
    in_process: bool = False
    result: Callable[[Record], float] | None = None
    problems: Callable[[Options], int | None] = lambda options: None

    def power(self, arms: Sequence[str], options: Options) -> str:
        """`power_said` of all records in the folder, of other seeds than ``options.seeds`` too: they are the pilot."""
        if self.result is None:
            return ""
        found: dict[str, list[float]] = {arm: [] for arm in arms}
        for file in sorted(options.folder.glob("*/arm.json")):
            record = read_record(file, RECORD, REMOVE)
            if record["arm"] in found and not math.isnan(value := self.result(record)):
                found[record["arm"]].append(value)
        results = [values for values in found.values() if values]
        return power_said(results, len(options.seeds), options.difference, options.spread, self.problems(options))


def parser(doc: str | None, folder: str, seeds: Sequence[int] = (0, 1, 2)) -> argparse.ArgumentParser:
    """The options that every experiment has."""
    found = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(found, folder)
    found.set_defaults(seeds=list(seeds), folder=Path(folder))
    return found


def add_options(found: argparse.ArgumentParser, folder: str) -> None:
    """The options that every experiment has; seeds and folder are None where they are not given."""
    found.add_argument("--seeds", type=int, nargs="+")
    found.add_argument("--arms", nargs="+", help="only these")
    found.add_argument("--folder", type=Path, help=f"default: {folder}")
    found.add_argument("--jobs", type=int, default=1, help="cells side by side")
    at_most = "cells run in this call; the next one goes on (0: only report)"
    found.add_argument("--at-most", type=int, metavar="N", help=at_most)
    said: Any = {"metavar": ("KEY", "VALUE"), "help": "of the recipe, for every arm; VALUE is JSON"}
    found.add_argument("--set", nargs=2, action="append", default=[], **said)
    found.add_argument("--difference", type=float, metavar="POINTS", help="that is to be seen: how many seeds it needs")
    of_spread = "standard deviation over seeds, if no pilot is recorded"
    found.add_argument("--spread", type=float, metavar="POINTS", help=of_spread)
    found.add_argument("--run-one", nargs=2, metavar=("ARM", "SEED"), help=argparse.SUPPRESS)


def changes_asked(options: Options) -> dict[str, Any]:
    """What ``--set`` says, for ``read_recipe``."""
    return {key: json.loads(value) for key, value in options.set}


def carry_out(experiment: Experiment, options: Options) -> None:
    """Every cell without a record, then ``records.json`` and the report of what there is. ValueError: an arm that there
    is not. SystemExit: cells failed; the others have run, and the report is of them."""
    if options.run_one is not None:
        _run_cell(experiment, options, options.run_one[0], int(options.run_one[1]))
        return
    arms = options.arms or experiment.arms
    if unknown := sorted({*arms} - {*experiment.arms}):
        raise ValueError(f"--arms {', '.join(unknown)}: there are {', '.join(experiment.arms)}")
    options.folder.mkdir(parents=True, exist_ok=True)
    cells = [(arm, seed) for seed in options.seeds for arm in arms]
    waiting = [cell for cell in cells if not record_file(options.folder, *cell).is_file()][: options.at_most]
    if waiting:
        _print(experiment.power(arms, options))
        experiment.prepare(options)
    if experiment.in_process:
        for arm, seed in waiting:
            _run_cell(experiment, options, arm, seed)
        waiting = []
    with ThreadPoolExecutor(options.jobs) as pool:
        ran = pool.map(lambda cell: _in_own_process(options.folder, *cell), waiting)
        failed = [why for why in ran if why]
    if done := records(arms, options):
        write_whole_text(options.folder / "records.json", json.dumps(done, indent=1))
        _print(experiment.report(done, options), experiment.power(arms, options))
    if failed:
        raise SystemExit(f"not run: {'; '.join(failed)}")


def _print(*said: str) -> None:
    for text in filter(None, said):
        print(f"\n{text}", flush=True)


def record_file(folder: Path, arm: str, seed: int) -> Path:
    return folder / f"{arm.replace(', ', '_').replace(' ', '_')}-{seed}" / "arm.json"


def records(arms: Sequence[str], options: Options) -> Found:
    """Of the cells that are done; an arm of which none is has no entry."""
    found: Found = {}
    for arm in arms:
        for file in (record_file(options.folder, arm, seed) for seed in options.seeds):
            if file.is_file():
                found.setdefault(arm, []).append(read_record(file, RECORD, REMOVE))
    return found


def _run_cell(experiment: Experiment, options: Options, arm: str, seed: int) -> None:
    record = record_file(options.folder, arm, seed)
    held, began = peak_memory(), time.perf_counter()
    found = {"arm": arm, "seed": seed, **experiment.run(arm, seed, record.parent, options)}
    found |= {"memory_mib": peak_memory() - held, "process_seconds": time.perf_counter() - began}
    record.parent.mkdir(parents=True, exist_ok=True)
    write_whole_text(record, json.dumps(found))


def program() -> list[str]:
    """How this process was started, without its words: a script by its path, a package (``python -m``) by its name,
    since its ``__main__.py`` run as a script would find the package's own modules in place of others."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    return [sys.executable, *(sys.argv[:1] if spec is None else ["-m", spec.name.removesuffix(".__main__")])]


def _in_own_process(folder: Path, arm: str, seed: int) -> str | None:
    """Why the cell has no record after this; None if it has."""
    record = record_file(folder, arm, seed)
    log = Path(f"{record.parent}.log")
    print(f"{arm}, seed {seed} ... ({log})", flush=True)
    with log.open("a", encoding="utf-8") as file:
        command = [*program(), *sys.argv[1:], "--run-one", arm, str(seed)]
        code = subprocess.run(command, stdout=file, stderr=subprocess.STDOUT, check=False).returncode
    return None if code == 0 and record.is_file() else f"{arm}, seed {seed}: exit code {code}, see {log}"


def peak_memory() -> float:
    """Most that this process has held until now, MiB (Linux; else NaN). ``ru_maxrss`` counts its parent, too."""
    status = Path("/proc/self/status")
    lines = status.read_text().splitlines() if status.is_file() else []
    return next((float(line.split()[1]) / 1024 for line in lines if line.startswith("VmHWM:")), math.nan)


def markdown(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(row)} |" for row in (heads, ["---"] * len(heads), *rows))


def spread(values: Sequence[float]) -> str:
    """Mean ± 95% interval over seeds (Student's t) and the single values; a seed without a number is left out."""
    values = [value for value in values if not math.isnan(value)]
    form = ",.0f" if any(abs(value) >= 1000 for value in values) else ".3f"
    said = [format(value, form) for value in values]
    if len(values) < 2:
        return said[0] if said else "–"
    return f"{fmean(values):{form}} ± {half_width_over_seeds(values) or 0.0:{form}} ({', '.join(said)})"


def table(found: Found) -> str:
    """Of records with numbers ``after``, and maybe ``before``: the start, then an arm a line, each as `spread`."""
    first = next(iter(found.values()))[0]
    names = list(first["after"])
    rows = [
        [arm, str(len(runs)), *(spread([run["after"].get(name, math.nan) for run in runs]) for name in names)]
        for arm, runs in found.items()
    ]
    if before := first.get("before"):
        rows.insert(0, ["(start)", "–", *(spread([before.get(name, math.nan)]) for name in names)])
    return markdown(["arm", "seeds", *names], rows)


def until(curve: Sequence[tuple[float, float]], tokens: float) -> float:
    """What was there when ``tokens`` had been generated: the value of the last point with no more; NaN if there is
    none. ``curve``: (tokens, value), in their order."""
    return next((value for at, value in reversed(curve) if at <= tokens), math.nan)


def at_equal_tokens(panels: Mapping[str, Lines]) -> str:
    """A table of each arm's values, as `spread`, where the run that generated least of all had generated all; empty
    where there are no curves. ``panels``: title → arm → curves of (tokens, value), one a seed."""
    runs = [curve for lines in panels.values() for curves in lines.values() for curve in curves if curve]
    if not runs:
        return ""
    shared = min(curve[-1][0] for curve in runs)
    arms = dict.fromkeys(arm for lines in panels.values() for arm in lines)
    rows = [
        [arm, *(spread([until(curve, shared) for curve in lines.get(arm, [])]) for lines in panels.values())]
        for arm in arms
    ]
    return f"After {shared / 1e3:,.1f} k generated tokens:\n\n{markdown(['arm', *panels], rows)}"


def over_tokens(found: Found, curves: Mapping[str, str]) -> dict[str, Lines]:
    """Title → arm → running means over a tenth of a run's rows, over the tokens that had been generated, one a seed.
    ``curves``: title → name in the record's ``curves``, pairs of tokens and value. ValueError: an earlier
    release's, which say no tokens."""
    panels: dict[str, Lines] = {}
    for title, name in curves.items():
        logged = {arm: [run["curves"][name] for run in runs if run["curves"][name]] for arm, runs in found.items()}
        panels[title] = {arm: [_smooth(curve) for curve in several] for arm, several in logged.items()}
    return panels


def _smooth(curve: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    if not isinstance(curve[0], Sequence):
        raise ValueError(
            "a record's curves have no generated tokens: an earlier release wrote it. Take another --folder"
        )
    values, width = [value for _, value in curve], max(1, len(curve) // 10)
    return [(at, fmean(values[max(0, place - width + 1) : place + 1])) for place, (at, _) in enumerate(curve)]


def draw(panels: Mapping[str, Lines], path: Path, over: str, stairs: bool = False, target: float | None = None) -> None:
    """A panel a title, two in a row: thin lines the seeds, thick their mean, place by place as far as all seeds go.
    ``over``: what x is; ``stairs``: a value holds until the next one; ``target``: to be reached, dashed."""
    try:
        import matplotlib
    except ModuleNotFoundError:
        why = "matplotlib is not installed (pip install 'grpo_lab[figures]')"
        print(f"no figure {path}: {why}; --at-most 0 draws what is recorded")
        return
    matplotlib.use("Agg")
    from matplotlib import pyplot

    style: Any = {"drawstyle": "steps-post" if stairs else "default"}
    beside = 1 if len(panels) == 1 else 2
    rows = -(-len(panels) // beside)
    figure, axes = pyplot.subplots(rows, beside, figsize=(4.8 * beside, 3.4 * rows), squeeze=False)
    for axis in axes.flat[len(panels) :]:
        axis.set_axis_off()
    for axis, (title, lines) in zip(axes.flat, panels.items(), strict=False):
        for colour, (label, curves) in zip(cycle(COLOURS), lines.items(), strict=False):
            for curve in curves:
                axis.plot(*zip(*curve, strict=True), color=colour, alpha=0.35, linewidth=0.8, **style)
            mean = [[fmean(values) for values in zip(*at, strict=True)] for at in zip(*curves, strict=False)]
            axis.plot(*zip(*mean, strict=True), color=colour, linewidth=2, label=label, **style)
        if target is not None:
            axis.axhline(target, color="black", linestyle="--", linewidth=1)
        axis.set(title=title, xlabel=over)
        axis.xaxis.set_major_formatter("{x:,.9g}")
        axis.locator_params(axis="x", nbins=5)
        axis.grid(alpha=0.25)
        axis.legend(fontsize=8, frameon=False)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
