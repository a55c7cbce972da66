"""An experiment: every arm trained with every seed; a record for each, a table and a figure of all.

`run_experiment` checks the lab, prepares what its cells share, runs the cells that have no up-to-date record, and
reports all that have one. An arm with a seed is a cell (``labs/cells.py``), with a folder and a process of its own
(``labs/forks.py``). A cell that was broken off continues from what is there. Cells run seed by seed, so that an
experiment that is broken off can still be compared.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from grpo_lab.evaluation.power import power_said
from grpo_lab.io import write_whole_text
from grpo_lab.labs.cells import Found, LabCell, Record, seeds_recorded
from grpo_lab.labs.forks import LOCKED, CellForks
from grpo_lab.recipe.yaml import parsed
from grpo_lab.settings import at_least, one_of
from grpo_lab.visible import print_errors_visibly

Options = argparse.Namespace

GENERATED = "rollout/generated"
"""Key in ``metrics.jsonl``: number of tokens that the policy has written so far."""
OF_THE_CALL = (
    "command", "name", "verbose", "traceback", "seeds", "arms", "folder", "jobs", "at_most", "difference", "spread",
    "run_one", "dry_run",
)  # fmt: skip
"""Options that say which cells run, where and how. No number depends on them."""
MOST_NAMED = 12
"""Cells of one kind that a dry run names."""


def options_of_cell(arm: str, seed: int, options: Options) -> Mapping[str, Any]:
    """Return the settings that a cell is made from by default: all options but those in `OF_THE_CALL`."""
    return {name: value for name, value in vars(options).items() if name not in OF_THE_CALL}


@dataclass(frozen=True)
class Experiment:
    """An experiment: what is run, and how it is shown. All but ``arms``, ``run`` and ``report`` has a default.

    Args:
        arms: their names, in the order of the table.
        run: makes a cell from arm, seed, folder and options, and returns its record. ``memory_mib`` (the most memory
            that the process held above what it held before) and ``process_seconds`` are added to the record.
        report: writes files into ``options.folder`` from records and options, and returns the text to print.
        prepare: makes what the cells begin from, before the first of them.
        seeds: the default seeds of ``grpo-lab lab``.
        imports: modules that cells need; each of the ``--jobs`` processes imports them once.
        in_process: cells are short and train nothing, so they run one after the other in this process.
        result: returns from a record the share by which arms are compared. How many seeds a difference needs is then
            printed before the cells run, and with the report. None: arms are not compared by a share.
        problems: returns from the options how many held-out problems are behind that share; None: unknown.
        settings: returns what a cell is made from, by arm, seed and options; None: that is known after ``prepare``.
        start: returns the folder of the model that an arm's cells begin from, which is compared by its contents; None:
            no such model.
        check: checks arms and options before anything is made, and returns facts for a dry run. It raises ValueError
            for a mistake.
        kept: places in a cell's folder from which ``read`` reads.
        read: returns a record as it is shown, from the record, the cell's folder and the options.
        odd: returns what is odd about the numbers of cells, by the folders of those that are done. It is printed after
            the first of them, and with the report.
    """

    arms: Sequence[str]
    run: Callable[[str, int, Path, Options], Record]
    report: Callable[[Found, Options], str]
    prepare: Callable[[Options], object] = lambda options: None
    seeds: Sequence[int] = (0, 1, 2)
    imports: Sequence[str] = ()
    in_process: bool = False
    result: Callable[[Record], float] | None = None
    problems: Callable[[Options], int | None] = lambda options: None
    settings: Callable[[str, int, Options], Mapping[str, Any] | None] = options_of_cell
    start: Callable[[str, Options], Path | None] = lambda arm, options: None
    check: Callable[[Sequence[str], Options], Mapping[str, str]] = lambda arms, options: {}
    kept: Sequence[str] = ()
    read: Callable[[Record, Path, Options], Record] = lambda record, folder, options: record
    odd: Callable[[Sequence[Path]], Sequence[str]] = lambda folders: ()

    def cell(self, arm: str, seed: int, options: Options) -> LabCell:
        """Return a cell with what it is to be made from now."""
        return LabCell.of(arm, seed, options.folder, self.settings(arm, seed, options), self.start(arm, options))

    def shown(self, cells: Sequence[LabCell], options: Options) -> list[Record]:
        """Return the records of those cells that are up to date, as the report shows them."""
        return [self.read(cell.record(), cell.folder, options) for cell in cells if not cell.due()]

    def power(self, arms: Sequence[str], options: Options) -> str:
        """Say how many seeds a difference needs (`power_said`); empty if arms are not compared by a share.

        All up-to-date records in the folder serve as the pilot, also those of seeds that are not asked for.
        """
        if self.result is None:
            return ""
        found: dict[str, list[float]] = {arm: [] for arm in arms}
        for arm in arms:
            cells = [self.cell(arm, seed, options) for seed in seeds_recorded(options.folder, arm)]
            values = [self.result(one) for one in self.shown(cells, options)]
            found[arm] = [value for value in values if not math.isnan(value)]
        results = [values for values in found.values() if values]
        return power_said(results, len(options.seeds), options.difference, options.spread, self.problems(options))


def parser(doc: str | None, folder: str, seeds: Sequence[int] = (0, 1, 2)) -> argparse.ArgumentParser:
    """Make the parser of a script that is an experiment, with the options that every experiment has.

    Args:
        doc: the script's docstring, shown by ``--help``.
        folder: the default folder.
        seeds: the default seeds.
    """
    found = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(found, folder)
    found.set_defaults(seeds=list(seeds), folder=Path(folder))
    return found


def add_options(found: argparse.ArgumentParser, folder: str) -> None:
    """Add the options that every experiment has. Without a default here, seeds and folder are None if they are not
    given. ``folder`` is named in the help text."""
    found.add_argument("--seeds", type=at_least(0), nargs="+", help="seeds of every arm (default: the lab's)")
    found.add_argument("--arms", nargs="+", help="run only these arms")
    found.add_argument("--folder", type=Path, help=f"default: {folder}")
    found.add_argument("--jobs", type=at_least(1), default=1, help="cells that run at the same time")
    at_most = "run at most N cells; the next call goes on (0: only report)"
    found.add_argument("--at-most", type=at_least(0), metavar="N", help=at_most)
    said: Any = {"metavar": ("KEY", "VALUE"), "help": "change a key of the recipe, for every arm"}
    found.add_argument("--set", nargs=2, action="append", default=[], **said)
    of_difference = "also say how many seeds it takes to see this difference"
    found.add_argument("--difference", type=float, metavar="POINTS", help=of_difference)
    of_spread = "with --difference: the standard deviation over seeds, if no pilot is recorded"
    found.add_argument("--spread", type=float, metavar="POINTS", help=of_spread)
    found.add_argument(
        "--dry-run", action="store_true", help="check all, print which cells would run and why, and stop"
    )
    found.add_argument("--run-one", nargs=2, metavar=("ARM", "SEED"), help=argparse.SUPPRESS)


def changes_asked(options: Options) -> dict[str, Any]:
    """Read the changes of ``--set``, for ``read_recipe``. Raises ValueError for a value that is no YAML."""
    return {key: parsed(value, f"`--set {key}` {value!r}") for key, value in options.set}


def run_experiment(experiment: Experiment, options: Options) -> None:
    """Run the cells without an up-to-date record, then write ``records.json`` and the report of those that have one.

    Raises:
        ValueError: an arm is unknown, or a setting is a mistake.
        SystemExit: cells failed; the others have run by then, and the report is written.
    """
    if options.run_one is not None:
        sys.excepthook = print_errors_visibly  # into the cell's log
        _run_cell(experiment, experiment.cell(options.run_one[0], int(options.run_one[1]), options), options)
        return
    arms = options.arms or experiment.arms
    if unknown := [arm for arm in arms if arm not in experiment.arms]:
        raise ValueError(f"--arms: no arm is called {unknown[0]!r}{one_of(unknown[0], experiment.arms)}")
    cells = _cells(experiment, arms, options)
    due = {cell.name: cell.due() for cell in cells}
    runs = any(due.values()) and options.at_most != 0
    facts: Mapping[str, str] = {}
    if runs or options.dry_run:
        facts = experiment.check(arms, options)
    if options.dry_run:
        from grpo_lab.runs.console import show  # it imports transformers

        show("cells", {**facts, **_plan(due), "folder": str(options.folder)})
        return
    options.folder.mkdir(parents=True, exist_ok=True)
    failed: list[str] = []
    if runs:
        _print(experiment.power(arms, options))
        from grpo_lab.runs.console import quiet  # it imports transformers

        with _told_what_is_done(experiment, arms, options):
            with quiet():
                experiment.prepare(options)
            cells = _cells(experiment, arms, options)
            failed = _run(experiment, [cell for cell in cells if cell.due()][: options.at_most], options)
    _report(experiment, arms, cells, options)
    if failed:
        raise SystemExit(f"not run: {'; '.join(failed)}")


def _cells(experiment: Experiment, arms: Sequence[str], options: Options) -> list[LabCell]:
    """Return the cells of these arms, seed by seed."""
    seeds = dict.fromkeys(options.seeds)
    return [experiment.cell(arm, seed, options) for seed in seeds for arm in dict.fromkeys(arms)]


@contextmanager
def _told_what_is_done(experiment: Experiment, arms: Sequence[str], options: Options) -> Iterator[None]:
    """Raise StoppedByUser, which says how many cells are done, if Ctrl-C comes inside the block."""
    try:
        yield
    except KeyboardInterrupt as stop:
        from grpo_lab.runs.stop_requests import StoppedByUser  # it imports transformers

        cells = _cells(experiment, arms, options)
        done = [cell for cell in cells if not cell.due()]
        said = f"{len(done)} of {len(cells)} cells, in {options.folder}; the same command goes on"
        raise StoppedByUser(said) from stop


def _plan(why: Mapping[str, str]) -> dict[str, str]:
    """Group the cells by their reason to run, for a dry run: heading → names. ``why``: cell → reason, empty if the cell
    is done."""
    by_reason: dict[str, list[str]] = {}
    for name, reason in why.items():
        by_reason.setdefault(_shortened(reason) or "done already", []).append(name)
    return {f"{len(names)} cells, {reason}": _first(names) for reason, names in by_reason.items()}


def _first(names: Sequence[str]) -> str:
    """Return the names of the cells that run first, and how many follow."""
    more = len(names) - MOST_NAMED
    if more <= 1:
        return "; ".join(names)
    return "; ".join([*names[:MOST_NAMED], f"and {more} more"])


def _run(experiment: Experiment, cells: Sequence[LabCell], options: Options) -> list[str]:
    """Run the cells, side by side if ``--jobs`` asks for it. Return a sentence for each that has no record
    afterwards."""
    if experiment.in_process:
        for cell in cells:
            _run_cell(experiment, cell, options)
        return []
    failed = list[str]()
    done = list[Path]()
    idle = SimpleQueue[CellForks]()
    with ExitStack() as stack, ThreadPoolExecutor(options.jobs) as pool:
        for _ in range(min(options.jobs, len(cells))):
            idle.put(stack.enter_context(CellForks(experiment.imports)))
        for cell, why in zip(cells, pool.map(partial(_in_own_process, idle), cells), strict=True):
            if why:
                failed.append(why)
                continue
            done.append(cell.folder)
            if len(done) == 1:
                _print(*experiment.odd(done))
    return failed


def _report(experiment: Experiment, arms: Sequence[str], cells: Sequence[LabCell], options: Options) -> None:
    """Report the cells with an up-to-date record; name those whose record is out of date."""
    done: Found = {}
    for arm in arms:
        of_arm = [cell for cell in cells if cell.arm == arm]
        for cell in of_arm:
            if cell.file.is_file() and (why := cell.due()):
                _print(f"not in the table: {cell.name} ({_shortened(why)})")
        if shown := experiment.shown(of_arm, options):
            done[arm] = shown
    _print(*experiment.odd([cell.folder for cell in cells if cell.arm in done and not cell.due()]))
    if done:
        write_whole_text(options.folder / "records.json", json.dumps(done, indent=1))
        _print(experiment.report(done, options), experiment.power(arms, options))


def _shortened(why: str) -> str:
    """Shorten a reason to its first three differences, so that it fits in a line; `stage.json` has all of them."""
    differences = why.split("; ")
    said = "; ".join(differences[:3])
    more = len(differences) - 3
    if more > 0:
        return f"{said}; and {more} more"
    return said


def _print(*said: str) -> None:
    for text in filter(None, said):
        print(f"\n{text}", flush=True)


def records(arms: Sequence[str], options: Options) -> Found:
    """Read the records of all cells that have one, up to date or not. An arm without any has no entry."""
    found: Found = {}
    for arm in arms:
        cells = [LabCell.of(arm, seed, options.folder, None) for seed in options.seeds]
        if recorded := [cell.record() for cell in cells if cell.file.is_file()]:
            found[arm] = recorded
    return found


def _run_cell(experiment: Experiment, cell: LabCell, options: Options) -> None:
    """Run a cell in this process, and write its record."""
    cell.begin()
    held = peak_memory()
    began = time.perf_counter()
    found = experiment.run(cell.arm, cell.seed, cell.folder, options)
    found |= {"memory_mib": peak_memory() - held, "process_seconds": time.perf_counter() - began}
    cell.finish(found, experiment.kept)


def program() -> list[str]:
    """Return the words that start this program again: a script's path, or ``-m`` and a module.

    A package's ``__main__.py`` is not started by its path: the package's folder would then be on ``sys.path``, and its
    modules would be found in place of others of the same name.
    """
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    if spec is None:
        return sys.argv[:1]
    return ["-m", spec.name.removesuffix(".__main__")]


def _in_own_process(idle: SimpleQueue[CellForks], cell: LabCell) -> str | None:
    """Run a cell in a fork of an idle process. Return None if it has a record then, else a sentence that says why
    not."""
    print(f"{cell.name} ... ({_shortened(cell.due())}; {cell.log})", flush=True)
    forks = idle.get()
    try:
        code = forks.run(program(), [*sys.argv[1:], "--run-one", cell.arm, str(cell.seed)], cell.log)
    finally:
        idle.put(forks)
    if code == LOCKED:
        return f"{cell.name}: another process works on it, and writes {cell.log}"
    if code or cell.due():
        return f"{cell.name}: exit code {code}, see {cell.log}"
    return None


def peak_memory() -> float:
    """Return the most memory that this process has held, in MiB; NaN if the system is not Linux. (``ru_maxrss`` would
    count the parent's, too.)"""
    status = Path("/proc/self/status")
    if not status.is_file():
        return math.nan
    for line in status.read_text().splitlines():
        if line.startswith("VmHWM:"):
            return float(line.split()[1]) / 1024
    return math.nan
