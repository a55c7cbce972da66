"""The sources' comparisons: every arm from one cold start, on the same problems, with the same number of completions.

    python scripts/compare_methods.py supervision     # RFT, Online RFT, GRPO with outcome and with process supervision
    python scripts/compare_methods.py trio            # SFT, Expert Iteration, GRPO
    python scripts/compare_methods.py critic          # Dr.GRPO, PPO, Kimi's mirror descent with and without optimizer reset
    python scripts/compare_methods.py all --jobs 2

The start is the quick start's cold start (seed 0), which blurts most answers. Seeds change the problems and the sampling. An arm runs in a process of its own
and leaves ``arm.json``; killed anywhere, the same command goes on (a trainer's arm from its last checkpoint). An arm that two comparisons name runs once.
Prints a table a comparison and writes it, with ``points.json`` and a figure, into --folder.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from arm_report import draw, table
from arm_runs import HeldOut, peak_memory, points_of, points_of_rounds, shared_start

from grpo_lab.io import write_whole_text
from grpo_lab.pipelines.train import train
from grpo_lab.recipe.job import lab_config, numbers_read
from grpo_lab.recipe.models import load_model
from grpo_lab.recipe.rows import load_rows
from grpo_lab.recipe.sections import read_recipe

ROOT = Path(__file__).resolve().parents[1]
QUICK = "recipes/quickstart/dr_grpo.yaml"
ACCURACY = {"name": "accuracy", "mode": "strict"}
PROBLEMS, EACH = 32, 8
"""Problems of a batch of completions, and completions of each."""
TOKENS = 56
"""Longest completion; the longest solution has 45."""


@dataclass(frozen=True)
class Arm:
    """A recipe with changes. ``updates``: optimizer steps a batch of completions; ``rounds``: into how many rounds the batches are put."""

    recipe: str = QUICK
    changes: Mapping[str, Any] = field(default_factory=dict)
    updates: int = 1
    rounds: int = 1
    trained_by: str = "trainer"


def _kimi(**changes: Any) -> Arm:
    two = {"per_device_train_batch_size": PROBLEMS * EACH // 2, "steps_per_generation": 2}
    return Arm(changes={"objective": {"name": "mirror_descent", "tau": 0.1}, **two, **changes}, updates=2)


ARMS: dict[str, Arm] = {
    "SFT": Arm(trained_by="solutions"),
    "RFT": Arm("recipes/quickstart/rft.yaml", trained_by="rounds"),
    "Online RFT": Arm("recipes/quickstart/online_rft.yaml", rounds=12, trained_by="rounds"),
    "Expert Iteration": Arm("recipes/quickstart/expert_iteration.yaml", rounds=3, trained_by="rounds"),
    "GRPO, outcome": Arm(changes={"objective": "grpo", "rewards": [ACCURACY]}),
    "GRPO, process": Arm(
        changes={
            "objective": {"name": "grpo", "advantage": "process"},
            "rewards": [ACCURACY, {"name": "equation_steps", "weight": 1.0}],
        }
    ),
    "Dr.GRPO": Arm(changes={"rewards": [ACCURACY]}),
    "PPO": Arm("recipes/quickstart/ppo.yaml", updates=4),
    "Kimi, reset": _kimi(reset_optimizer=True, rewards=[ACCURACY], learning_rate=2.0e-4),
    "Kimi, no reset": _kimi(rewards=[ACCURACY], learning_rate=3.0e-4),
}
COMPARISONS = {
    "supervision": ("RFT", "Online RFT", "GRPO, outcome", "GRPO, process"),
    "trio": ("SFT", "Expert Iteration", "GRPO, outcome"),
    "critic": ("Dr.GRPO", "PPO", "Kimi, reset", "Kimi, no reset"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("comparison", choices=[*COMPARISONS, "all"])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--arms", nargs="+", choices=sorted(ARMS), help="only these")
    parser.add_argument("--steps", type=int, default=48, help=f"batches of {PROBLEMS} x {EACH} completions")
    parser.add_argument("--every", type=int, default=5, help="batches from one held-out measurement to the next")
    parser.add_argument("--held-out", type=int, default=300, help="held-out problems of a measurement")
    parser.add_argument("--folder", type=Path, default=Path("runs/compare/methods"))
    parser.add_argument("--jobs", type=int, default=1, help="arms side by side")
    parser.add_argument(
        "--set",
        nargs=2,
        action="append",
        default=[],
        metavar=("KEY", "VALUE"),
        help="for the start and the arms of a trainer",
    )
    parser.add_argument("--run-one", nargs=2, metavar=("ARM", "SEED"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.run_one:
        return run_arm(args.run_one[0], int(args.run_one[1]), args)
    chosen = list(COMPARISONS) if args.comparison == "all" else [args.comparison]
    missing = run_all([arm for one in chosen for arm in COMPARISONS[one]], args)
    for one in chosen:
        report(one, args)
    if missing:
        raise SystemExit(f"not run: {'; '.join(missing)}")
    return None


def run_all(arms: Sequence[str], args: argparse.Namespace) -> list[str]:
    """Every arm without a record, seed by seed, so that a stopped comparison still compares; what failed, in words."""
    wanted = [arm for arm in dict.fromkeys(arms) if arm in (args.arms or ARMS)]
    shared_start(read_recipe(ROOT / QUICK, changes_of_all(args)), args.folder / "cold_start")
    jobs = [(arm, seed) for seed in args.seeds for arm in wanted if not record_of(arm, seed, args).is_file()]
    with ThreadPoolExecutor(args.jobs) as pool:
        return [why for why in pool.map(lambda job: in_own_process(*job, args), jobs) if why]


def in_own_process(arm: str, seed: int, args: argparse.Namespace) -> str | None:
    """Why the arm has no record after this; None if it has."""
    settings = [
        f"--steps={args.steps}",
        f"--every={args.every}",
        f"--held-out={args.held_out}",
        f"--folder={args.folder}",
    ]
    settings += [word for pair in args.set for word in ("--set", *pair)]
    log = Path(f"{folder_of(arm, seed, args)}.log")
    print(f"{arm}, seed {seed} ... ({log})", flush=True)
    with log.open("a", encoding="utf-8") as file:
        command = [sys.executable, __file__, "all", *settings, "--run-one", arm, str(seed)]
        code = subprocess.run(command, stdout=file, stderr=subprocess.STDOUT, check=False).returncode
    if code == 0 and record_of(arm, seed, args).is_file():
        return None
    return f"{arm}, seed {seed}: exit code {code}, see {log}"


def run_arm(arm: str, seed: int, args: argparse.Namespace) -> None:
    """In the arm's process: train, then write the record."""
    libraries = peak_memory()
    began = time.perf_counter()
    points = TRAINED_BY[ARMS[arm].trained_by](ARMS[arm], seed, folder_of(arm, seed, args), args)
    record = {"arm": arm, "seed": seed, "points": points, "memory_mib": peak_memory() - libraries}
    write_whole_text(record_of(arm, seed, args), json.dumps({**record, "process_seconds": time.perf_counter() - began}))


def by_trainer(arm: Arm, seed: int, output: Path, args: argparse.Namespace) -> list[dict[str, float]]:
    """``grpo-lab train`` with a checkpoint at every measurement; goes on from the last one."""
    every = args.every * arm.updates
    changes = {**changes_of_all(args), **arm.changes, "max_steps": args.steps * arm.updates}
    changes |= {"model": {"path": str(args.folder / "cold_start")}, "cold_start": None, "evaluation": None}
    changes |= {"output_dir": str(output), "name": output.name, "seed": seed, "data.seed": seed, "disable_tqdm": True}
    changes |= {"save_strategy": "steps", "save_steps": every, "save_total_limit": 1, "logging_steps": 1}
    watch = {"name": "arm_runs:HeldOut", "file": str(output / "points.jsonl"), "every": every}
    changes["callbacks"] = [{**watch, "data": held_out_rows(args), "max_new_tokens": TOKENS}]
    recipe = read_recipe(ROOT / arm.recipe, changes)
    resume = (output / "run.json").is_file()
    train(recipe, overwrite=not resume, resume=resume)
    made = lab_config(numbers_read(recipe)).generation_batch_size
    return points_of(output, made)


def by_rounds(arm: Arm, seed: int, output: Path, args: argparse.Namespace) -> list[dict[str, float]]:
    """``grpo-lab rounds``: the same number of completions, sampled in ``arm.rounds`` parts; goes on by itself."""
    from grpo_lab.pipelines.rounds_recipe import read_rounds_recipe
    from grpo_lab.pipelines.run_rounds import run_rounds

    start = args.folder / "cold_start"
    changes = {"model": {"path": str(start)}, "cold_start": None, "evaluation": None, "output_dir": str(output)}
    changes |= {
        "seed": seed,
        "data.seed": seed,
        "n_samples": EACH,
        "rounds.count": arm.rounds,
        "training.disable_tqdm": True,
    }
    changes |= {"rounds.questions": max(1, args.steps * PROBLEMS // arm.rounds), **arm.changes}
    changes |= {"training.save_strategy": "steps", "training.save_steps": args.every, "training.save_only_model": True}
    run_rounds(read_rounds_recipe(ROOT / arm.recipe, changes))
    return points_of_rounds(output, start, held_out_rows(args), TOKENS)


def by_solutions(arm: Arm, seed: int, output: Path, args: argparse.Namespace) -> list[dict[str, float]]:
    """TRL's SFT on the problems' own worked solutions: a teacher's, nothing is generated."""
    from grpo_lab.trainer.supervised.cold_start import cold_start

    recipe = read_recipe(ROOT / arm.recipe, {**changes_of_all(args), "data.seed": seed})
    model, tokenizer = load_model(
        read_recipe(ROOT / QUICK, {"model": {"path": str(args.folder / "cold_start")}}).model, seed
    )
    output.mkdir(parents=True, exist_ok=True)
    (output / "points.jsonl").unlink(missing_ok=True)
    watch = HeldOut(str(output / "points.jsonl"), args.every, held_out_rows(args), TOKENS)
    settings = {
        "per_device_train_batch_size": 64,
        "learning_rate": 5.0e-4,
        "lr_scheduler_type": "linear",
        "adam_beta2": 0.95,
    }
    settings |= {"max_steps": args.steps, "max_length": 256, "gradient_checkpointing": False, "logging_steps": 1}
    settings |= {"seed": seed, "use_cpu": True, "bf16": False, "disable_tqdm": True}
    cold_start(model, tokenizer, load_rows(recipe.data), output, settings, [watch])
    return points_of(output, 0)


TRAINED_BY: dict[str, Callable[..., list[dict[str, float]]]] = {
    "trainer": by_trainer,
    "rounds": by_rounds,
    "solutions": by_solutions,
}


def changes_of_all(args: argparse.Namespace) -> dict[str, Any]:
    return {key: json.loads(value) for key, value in args.set}


def held_out_rows(args: argparse.Namespace) -> dict[str, Any]:
    section = read_recipe(ROOT / QUICK).evaluation
    assert section is not None
    return {
        "loader": section.data.loader,
        "template": section.data.template,
        **section.data.arguments,
        "n": args.held_out,
    }


def folder_of(arm: str, seed: int, args: argparse.Namespace) -> Path:
    return Path(args.folder) / f"{arm.replace(', ', '_').replace(' ', '_')}-{seed}"


def record_of(arm: str, seed: int, args: argparse.Namespace) -> Path:
    return folder_of(arm, seed, args) / "arm.json"


def report(comparison: str, args: argparse.Namespace) -> None:
    """Table, figure and points of what has been run."""
    found: dict[str, list[dict[str, Any]]] = {}
    for arm in COMPARISONS[comparison]:
        records = [record_of(arm, seed, args) for seed in args.seeds]
        if runs := [json.loads(record.read_text()) for record in records if record.is_file()]:
            found[arm] = runs
    if not found:
        return
    written = table(found)
    print(f"\n{comparison}\n{written}", flush=True)
    write_whole_text(args.folder / f"{comparison}.md", written + "\n")
    write_whole_text(args.folder / f"{comparison}.json", json.dumps(found, indent=1))
    draw(found, args.folder / f"{comparison}.png")


if __name__ == "__main__":
    main()
