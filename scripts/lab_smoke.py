"""Train every preset and every trainer for some steps from the quick start's cold start: does it run, is its loss
finite, does it move the weights?

    make lab-smoke                              # 30 steps each, about 10 minutes: runs/lab_smoke/table.md
    python scripts/lab_smoke.py --only gspo KimiTrainer --steps 5

Presets are taken from the table of objectives and trainers from what the package offers, so a new one is tested without
a change here. The cold start is made once and kept. The table is printed after each run; the script fails if a run
broke, had a loss that is not finite, or did not move the weights. It does not show which is better: for that there is
``grpo-lab lab``.
"""

from __future__ import annotations

import argparse
import json
import math
import time
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

import grpo_lab
from grpo_lab import LabTrainer
from grpo_lab.io import write_whole_text
from grpo_lab.labs.experiment import changes_asked
from grpo_lab.labs.tables import markdown
from grpo_lab.objectives import PRESETS
from grpo_lab.pipelines.train import shared_start, train
from grpo_lab.recipe.sections import read_recipe

QUICK = Path(__file__).resolve().parents[1] / "recipes" / "quickstart" / "dr_grpo.yaml"
ROWS = 64
"""Completions of an optimizer step: 8 for each of 8 problems."""
HEADS = ("name", "loss finite", "reward first", "reward last", "tokens, k", "dead share", "weights moved", "seconds")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--only", nargs="+", choices=sorted(cases()), help="only these presets and trainers")
    parser.add_argument("--folder", type=Path, default=Path("runs/lab_smoke"))
    parser.add_argument("--set", nargs=2, action="append", default=[], metavar=("KEY", "VALUE"), help="for every run")
    args = parser.parse_args()
    extra = changes_asked(args)
    quick = read_recipe(QUICK, extra)
    start = shared_start(quick.model, quick.cold_start, args.folder / "cold_start")
    lines = []
    for name in args.only or cases():
        lines.append(smoke(name, start, args, extra))
        print(as_text(lines), flush=True)
    write_whole_text(args.folder / "table.md", as_text(lines) + "\n")
    if failed := [line["name"] for line in lines if not sound(line)]:
        raise SystemExit(f"not sound: {', '.join(failed)}")


def cases() -> dict[str, dict[str, Any]]:
    """Return name → the settings of a recipe that choose it: ``objective`` for a preset, ``trainer`` for a trainer,
    which brings its own objective and rewards."""
    offered = {name: getattr(grpo_lab, name) for name in grpo_lab.__all__}
    trainers = [
        name
        for name, one in offered.items()
        if isinstance(one, type) and issubclass(one, LabTrainer) and one is not LabTrainer
    ]
    return {
        **{name: {"objective": name} for name in PRESETS},
        **{name: {"trainer": name, "objective": None} for name in trainers},
    }


def smoke(name: str, start: Path, args: argparse.Namespace, extra: Mapping[str, Any]) -> dict[str, Any]:
    """Train one preset or trainer, and return its line of the table, with ``error`` if the run broke."""
    output = args.folder / name
    began = time.perf_counter()
    changes = {**extra, **cases()[name], "model": {"path": str(start)}, "cold_start": None, "evaluation": None}
    changes |= {"output_dir": str(output), "name": name, "max_steps": args.steps, "per_device_train_batch_size": ROWS}
    changes |= {"disable_tqdm": True, "logging_steps": 1}
    try:
        train(read_recipe(QUICK, changes), overwrite=True)
        line = seen_in(output, start)
    except Exception as error:
        traceback.print_exc()
        line = {"error": f"{type(error).__name__}: {error}"}
    return {"name": name, **line, "seconds": time.perf_counter() - began}


def seen_in(output: Path, start: Path) -> dict[str, Any]:
    """Return a line's values from a run's metrics and weights. ``start``: the model that the run began with."""
    rows = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if "loss" in row]
    made = [row for row in steps if "completions/mean_length" in row]
    before, after = (load_file(folder / "model.safetensors") for folder in (start, output))
    moved = max(float((after[key] - weight).abs().max()) for key, weight in before.items())
    return {
        "loss finite": all(math.isfinite(float(row["loss"])) for row in steps) and bool(steps),
        "reward first": made[0]["reward"],
        "reward last": made[-1]["reward"],
        "tokens, k": sum(row["completions/mean_length"] for row in made) * ROWS / 1000,
        "dead share": sum(row["groups/dead_share"] for row in made) / len(made),
        "weights moved": moved,
    }


def sound(line: Mapping[str, Any]) -> bool:
    """Return whether a run ended without an error, with finite losses, and with weights that are finite and moved."""
    return (
        "error" not in line
        and line["loss finite"]
        and math.isfinite(line["weights moved"])
        and line["weights moved"] > 0
    )


def as_text(lines: list[dict[str, Any]]) -> str:
    """Return the table as Markdown."""
    return markdown(
        [*HEADS, "error"], [[*(cell(head, line.get(head)) for head in HEADS), line.get("error", "")] for line in lines]
    )


def cell(head: str, value: Any) -> str:
    """Return the value in the column ``head`` as text; FAILED if there is none."""
    if value is None:
        return "FAILED"
    if isinstance(value, bool):
        return "yes" if value else "NO"
    if isinstance(value, float):
        return f"{value:.1e}" if head == "weights moved" else f"{value:.0f}" if head == "seconds" else f"{value:.3f}"
    return str(value)


if __name__ == "__main__":
    main()
