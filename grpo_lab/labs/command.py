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
    parser.add_argument("--recipe", help="another than the lab's: a path, or one below recipes/")
    parser.add_argument("--start", type=Path, help="a model to begin from, in place of the lab's own start")


def run(known: argparse.Namespace) -> None:
    """Run the lab's cells that have no up-to-date record; print the report, which is also written into the folder."""
    if known.name in LABS:
        lab: Experiment = import_module(f"grpo_lab.labs.{known.name}").LAB
        given = {"--recipe": known.recipe, "--start": known.start, "--set": lab.in_process and known.set}
        for option in (option for option, value in given.items() if value):
            if lab.in_process:
                why = "trains nothing"
            else:
                why = "has a recipe of its own"
            raise ValueError(f"{option} has no effect: lab {known.name!r} {why}, so leave it out")
    else:
        lab = Arms.read(known.name).experiment()
    file = Path(known.name)
    known.folder = known.folder or Path("runs/labs") / (file.stem if file.stem != "lab" else file.resolve().parent.name)
    known.seeds = known.seeds or [*lab.seeds]
    run_experiment(lab, known)
