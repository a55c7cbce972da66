"""Labs: what RL does to a model, each an experiment (arms × seeds) with a table and a figure of its own.

``grpo-lab lab NAME`` runs ``LAB`` of ``grpo_lab/labs/NAME.py`` into ``runs/labs/NAME``; a new lab costs that file and a
line here.
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
    """Of ``grpo-lab lab``: which one, and what every experiment has."""
    from grpo_lab.labs.experiment import add_options

    said = "; ".join(f"`{name}`: {what}" for name, what in LABS.items())
    parser.add_argument("name", choices=[*LABS], help=said)
    add_options(parser, "runs/labs/NAME")


def run(known: argparse.Namespace) -> None:
    """The lab, or what of it has no record yet; its report is printed and stands in the folder."""
    from grpo_lab.labs.experiment import Experiment, carry_out

    lab: Experiment = import_module(f"grpo_lab.labs.{known.name}").LAB
    if lab.in_process and known.set:
        raise ValueError(f"--set has no effect: lab {known.name!r} trains nothing, so it has no recipe; leave it out")
    known.folder = known.folder or Path("runs/labs") / known.name
    known.seeds = known.seeds or [*lab.seeds]
    carry_out(lab, known)
