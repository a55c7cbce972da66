"""``grpo-lab lab``: its options, and the lab that is asked for."""

from __future__ import annotations

import argparse
from importlib import import_module
from pathlib import Path

from grpo_lab.labs import LABS
from grpo_lab.labs.arms import Arms, shipped_labs
from grpo_lab.labs.experiment import Experiment, add_options, run_experiment


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``grpo-lab lab``: the lab's name, and the options of every experiment."""
    known = ", ".join(f"`{name}`" for name in sorted([*LABS, *shipped_labs()]))
    parser.add_argument("name", metavar="NAME", help=f"{known} (docs/labs.md), or the path of a lab.yaml")
    add_options(parser, "runs/labs/NAME")
    parser.add_argument("--recipe", help="another recipe than the lab's: a path, or a name below recipes/")
    parser.add_argument("--start", type=Path, help="a model to begin from, in place of the lab's own start")


def run(known: argparse.Namespace) -> None:
    """Run the cells of a lab that have no up-to-date record; print the report, which is also written into the folder.
    Raises ValueError for an option that has no effect on this lab."""
    if known.name in LABS:
        lab: Experiment = import_module(f"grpo_lab.labs.{known.name}").LAB
        _refuse_unused(known, lab)
    else:
        lab = Arms.read(known.name).experiment()
    known.folder = known.folder or Path("runs/labs") / _name_of(Path(known.name))
    known.seeds = known.seeds or [*lab.seeds]
    run_experiment(lab, known)


def _refuse_unused(known: argparse.Namespace, lab: Experiment) -> None:
    """Raise ValueError for an option that a lab of a module does not read. None of them reads ``--recipe`` and
    ``--start``; one that trains nothing does not read ``--set`` either."""
    why = "has a recipe of its own"
    given = {"--recipe": known.recipe, "--start": known.start}
    if lab.in_process:
        why = "trains nothing"
        given["--set"] = known.set
    unused = [option for option, value in given.items() if value]
    if unused:
        raise ValueError(f"{unused[0]} has no effect: lab {known.name!r} {why}, so leave it out")


def _name_of(lab: Path) -> str:
    """Return a lab's name: that of its file, or of its folder if the file is called ``lab.yaml``."""
    if lab.stem == "lab":
        return lab.resolve().parent.name
    return lab.stem
