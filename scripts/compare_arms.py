"""Train several variants ("arms") of one recipe from one cold start, several seeds each, and compare them.

    python scripts/compare_arms.py length      # Kimi's length reward: none, after a warm-up, large from step 0
    python scripts/compare_arms.py language    # R1's language consistency: without and with, on a bilingual cold start
    python scripts/compare_arms.py objective   # mirror descent with and without optimizer reset, against Dr.GRPO

Seeds change the order of the problems and the sampling; the cold start is shared. Every run is a folder under --folder and is
not repeated when it is there. Prints a table (mean and 95% interval over seeds, Student's t), writes arms.json and curves.png.
"""

from __future__ import annotations

import argparse
import json
import math
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from arm_runs import COLOURS, pyplot_if_there, shared_start, smooth, spread

from grpo_lab.evaluation import EvaluationResult
from grpo_lab.pipelines.train import train
from grpo_lab.recipe.sections import Recipe, read_recipe
from grpo_lab.rewards import LanguageConsistencyReward


@dataclass(frozen=True)
class Experiment:
    """A recipe, its arms (name → what is changed), and the curves to draw (title → metric)."""

    recipe: str
    arms: dict[str, dict[str, Any]]
    curves: dict[str, str]


ACCURACY = {"name": "accuracy", "mode": "strict"}
EXPERIMENTS = {
    "length": Experiment(
        "recipes/kimi/quickstart.yaml",
        {
            "no length reward": {"rewards": [ACCURACY], "trainer": "LabTrainer", "reset_optimizer": True},
            "after a warm-up": {},
            "large from step 0": {"rewards": [ACCURACY, {"name": "kimi_length", "weight": 4.0}]},
        },
        {"accuracy of the samples": "rewards/accuracy_reward/mean", "tokens of right answers": "completions/mean_length_correct"},
    ),
    "language": Experiment(
        "recipes/r1/quickstart.yaml",
        {"without": {"rewards": [ACCURACY, {"name": "language_consistency", "target": "en", "weight": 0.0}]}, "with": {}},
        {"accuracy of the samples": "rewards/accuracy_reward/mean", "share of target-language words": "rewards/language_consistency_reward/mean"},
    ),
    "objective": Experiment(
        "recipes/kimi/quickstart.yaml",
        {
            "mirror descent, reset": {"rewards": [ACCURACY], "trainer": "LabTrainer", "reset_optimizer": True},
            "mirror descent": {"rewards": [ACCURACY], "trainer": "LabTrainer", "learning_rate": 3.0e-4},
            "Dr.GRPO": {"rewards": [ACCURACY], "trainer": "LabTrainer", "objective": "dr_grpo", "learning_rate": 3.0e-4},
        },
        {"accuracy of the samples": "rewards/accuracy_reward/mean"},
    ),
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("experiment", choices=sorted(EXPERIMENTS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--folder", type=Path, default=Path("runs/compare"))
    parser.add_argument("--arms", nargs="*", help="only these")
    parser.add_argument("--set", nargs=2, action="append", default=[], metavar=("KEY", "VALUE"), help="for every arm")
    args = parser.parse_args()
    experiment = EXPERIMENTS[args.experiment]
    folder = args.folder / args.experiment
    start = shared_start(read_recipe(experiment.recipe), folder / "cold_start")
    found: dict[str, list[dict[str, Any]]] = {}
    for seed in args.seeds:  # seed by seed, so that a stopped experiment still compares
        for arm in args.arms or experiment.arms:
            found.setdefault(arm, []).append(run_arm(experiment, arm, seed, start, folder, dict(args.set)))
            print("\n" + table(found), flush=True)
    (folder / "arms.json").write_text(json.dumps(found, indent=1))
    draw(experiment, found, folder / "curves.png")
    print(f"curves: {folder / 'curves.png'}")


def run_arm(
    experiment: Experiment, arm: str, seed: int, start: Path, folder: Path, extra: dict[str, Any]
) -> dict[str, Any]:
    output = folder / f"{arm.replace(' ', '_')}-{seed}"
    if not (output / "arm.json").is_file():
        changes = {**experiment.arms[arm], **{key: json.loads(value) for key, value in extra.items()}}
        settings = {"model": {"path": str(start)}, "cold_start": None, "output_dir": str(output), "seed": seed}
        settings |= {"data.seed": seed, "evaluation.n_samples": 2, "disable_tqdm": True, "name": arm}
        outcome = train(read_recipe(experiment.recipe, {**settings, **changes}), overwrite=True)
        rows = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
        curves = {name: [row.get(name) for row in rows if "reward" in row] for name in experiment.curves.values()}
        recipe = read_recipe(experiment.recipe)
        found = {"before": figures(outcome.before, recipe), "after": figures(outcome.after, recipe), "curves": curves}
        (output / "arm.json").write_text(json.dumps(found))
    loaded: dict[str, Any] = json.loads((output / "arm.json").read_text())
    return loaded


def figures(result: EvaluationResult | None, recipe: Recipe) -> dict[str, float]:
    """Greedy accuracy, and of two samples a problem: accuracy, tokens of right answers, share of target-language words."""
    assert result is not None
    assert result.accuracy is not None
    assert result.sampled_accuracy is not None
    right = [o.tokens for o in result.sampled if o.correct]
    target = next(
        (str(r.arguments.get("target", "en")) for r in recipe.rewards if r.name == "language_consistency"), "en"
    )
    shares = LanguageConsistencyReward(target)(completions=[o.completion for o in result.sampled])
    return {
        "accuracy": result.accuracy.value,
        "sampled accuracy": result.sampled_accuracy.value,
        "tokens of right answers": fmean(right) if right else math.nan,
        f"share of {target} words": fmean(share for share in shares if share is not None),
    }


def table(found: dict[str, list[dict[str, Any]]]) -> str:
    names = list(next(iter(found.values()))[0]["after"])
    lines = ["| arm | seeds | " + " | ".join(names) + " |", "|---|---|" + "---|" * len(names)]
    first = next(iter(found.values()))[:1]
    lines.append("| before | – | " + " | ".join(spread([r["before"][n] for r in first]) for n in names) + " |")
    for arm, runs in found.items():
        lines.append(
            f"| {arm} | {len(runs)} | " + " | ".join(spread([r["after"][n] for r in runs]) for n in names) + " |"
        )
    return "\n".join(lines)


def draw(experiment: Experiment, found: dict[str, list[dict[str, Any]]], path: Path) -> None:
    """One panel a metric: thin lines the seeds (running mean of 10 batches), thick their mean."""
    pyplot = pyplot_if_there(path)
    if pyplot is None:
        return
    figure, axes = pyplot.subplots(
        1, len(experiment.curves), figsize=(5.2 * len(experiment.curves), 3.4), squeeze=False
    )
    for axis, (title, metric) in zip(axes[0], experiment.curves.items(), strict=True):
        for colour, (arm, runs) in zip(COLOURS[: len(found)], found.items(), strict=True):
            curves = [smooth([v for v in run["curves"][metric] if v is not None]) for run in runs]
            curves = [curve for curve in curves if curve]
            for curve in curves:
                axis.plot(curve, color=colour, alpha=0.35, linewidth=0.8)
            if curves:
                axis.plot([fmean(at) for at in zip(*curves, strict=False)], color=colour, linewidth=2, label=arm)
        axis.set(title=title, xlabel="generation batches")
        axis.grid(alpha=0.25)
        axis.legend(fontsize=8, frameon=False)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    main()
