"""Labs: what RL does to a model, each an experiment (arms × seeds) with a table and a figure of its own.

``grpo-lab lab NAME`` runs ``LAB`` of ``grpo_lab/labs/NAME.py``, or ``recipes/lab/NAME/lab.yaml`` (a team's: by its
path), into ``runs/labs/NAME``. A new lab that trains costs that file; another one a file and a line here.
"""

from __future__ import annotations

import argparse
from importlib import import_module
from pathlib import Path

LABS = {
    "kl": "value and gradient of every KL estimator, by exact enumeration (seconds)",
    "overoptimisation": "proxy and truth over the distance to the start, by who taught the proxy (trains)",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``grpo-lab lab``: which one, and those that every experiment has."""
    from grpo_lab.labs.arms import shipped_labs
    from grpo_lab.labs.experiment import add_options

    known = ", ".join(f"`{name}`" for name in sorted([*LABS, *shipped_labs()]))
    parser.add_argument("name", metavar="NAME", help=f"{known} (docs/labs.md), or the path of a lab.yaml")
    add_options(parser, "runs/labs/NAME")
    parser.add_argument("--recipe", help="another than the lab's: a path, or one below recipes/")
    parser.add_argument("--start", type=Path, help="a model to begin from, in place of the recipe's cold start")


def run(known: argparse.Namespace) -> None:
    """The lab, or what of it has no record yet; its report is printed and stands in the folder."""
    from grpo_lab.labs.experiment import Experiment, carry_out

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
        from grpo_lab.labs.arms import Arms

        lab = Arms.read(known.name).experiment()
    file = Path(known.name)
    known.folder = known.folder or Path("runs/labs") / (file.stem if file.stem != "lab" else file.resolve().parent.name)
    known.seeds = known.seeds or [*lab.seeds]
    carry_out(lab, known)
