"""Process supervision beside outcome supervision on the quick start's problems: one cold start, equal numbers of updates.

    python scripts/compare_process.py                 # 3 seeds x 2 arms: table, figure, comparison.json under runs/compare/process
    python scripts/compare_process.py --stop-after 1  # at most one training now; the next call goes on with the rest

Both arms are GRPO on the same rows with the same settings, from the quick start's own cold start (seed 0), which blurts most answers. "outcome" has the
accuracy of the final answer; "steps and outcome" has ``EquationSteps`` beside it (``advantage: process``, both weights 1). The cold start is
shared; seeds change the problems and the sampling. The outcome arm logs the share of right equations, too (weight 0).
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from statistics import fmean
from typing import Any

from arm_runs import pyplot_if_there, shared_start, smooth, spread

from grpo_lab.pipelines.train import train
from grpo_lab.recipe.sections import read_recipe
from grpo_lab.rewards import EquationSteps
from grpo_lab.rewards.completion import completion_text

RECIPE = "recipes/quickstart/dr_grpo.yaml"
ACCURACY = {"name": "accuracy", "mode": "strict"}
ARMS: dict[str, dict[str, Any]] = {
    "outcome": {
        "objective": "grpo",
        "rewards": [ACCURACY, {"name": "compare_process:equation_steps", "weight": 0.0}],
    },
    "steps and outcome": {
        "objective": {"name": "grpo", "advantage": "process"},
        "rewards": [ACCURACY, {"name": "equation_steps", "weight": 1.0}],
    },
}
COLD_SEED = 0
TRAINING = {"max_steps": 40, "per_device_train_batch_size": 128}
CURVES = {
    "accuracy of the samples": "rewards/accuracy_reward/mean",
    "share of right equations": "rewards/equation_steps/mean",
    "tokens of a completion": "completions/mean_length",
}


def equation_steps(completions: list[Any], **_: Any) -> list[float | None]:
    """Share of a completion's judged lines that hold; for the log of the arm that is not trained on it."""
    return [share_right(completion_text(completion)) for completion in completions]


def share_right(text: str) -> float | None:
    scores = [score for score in EquationSteps.judge(text.split("\n")) if score is not None]
    return fmean(scores) if scores else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--folder", type=Path, default=Path("runs/compare/process"))
    parser.add_argument("--stop-after", type=int, default=len(ARMS) * 100, help="trainings in this call")
    parser.add_argument("--set", nargs=2, action="append", default=[], metavar=("KEY", "VALUE"), help="for every run")
    args = parser.parse_args()
    left, found = args.stop_after, {arm: [] for arm in ARMS}
    for seed in args.seeds:  # seed by seed, so that a stopped experiment still compares
        for arm in ARMS:
            made = args.folder / f"{arm.replace(' ', '_')}-{seed}" / "arm.json"
            if not made.is_file():
                if left == 0:
                    continue
                left -= 1
                run_arm(arm, seed, args.folder, {key: json.loads(value) for key, value in args.set})
            found[arm].append(json.loads(made.read_text()))
        print("\n" + table(found), flush=True)
    (args.folder / "comparison.json").write_text(json.dumps(found, indent=1))
    draw(found, args.folder / "process.png")


def cold_start(folder: Path) -> Path:
    """The cold start that all runs begin from, made once."""
    return shared_start(read_recipe(RECIPE, {"cold_start.data.seed": COLD_SEED}), folder / "cold_start", COLD_SEED)


def run_arm(arm: str, seed: int, folder: Path, extra: dict[str, Any]) -> None:
    output = folder / f"{arm.replace(' ', '_')}-{seed}"
    settings = {"output_dir": str(output), "seed": seed, "data.seed": seed, "name": arm, "disable_tqdm": True}
    settings |= {"model": {"path": str(cold_start(folder))}, "cold_start": None, **TRAINING, **extra}
    outcome = train(read_recipe(RECIPE, {**settings, **ARMS[arm]}), overwrite=True)
    rows = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    curves = {metric: [row[metric] for row in rows if metric in row] for metric in CURVES.values()}
    made = {"before": figures(outcome.before), "after": figures(outcome.after), "curves": curves}
    (output / "arm.json").write_text(json.dumps(made))


def figures(result: Any) -> dict[str, float]:
    """Of the greedy answers to held-out problems."""
    texts = [completion_text(outcome.completion) for outcome in result.greedy]
    shares = [share for share in map(share_right, texts) if share is not None]
    return {
        "accuracy": result.accuracy.value,
        "right equations": fmean(shares) if shares else float("nan"),
        "equations a solution": fmean(sum(s is not None for s in EquationSteps.judge(t.split("\n"))) for t in texts),
    }


def table(found: dict[str, list[dict[str, Any]]]) -> str:
    runs = {
        "before": [r["before"] for r in found["outcome"]],
        **{a: [r["after"] for r in rs] for a, rs in found.items()},
    }
    names = list(next(iter(runs.values()))[0])
    lines = ["| arm | " + " | ".join(names) + " |", "|---|" + "---|" * len(names)]
    lines += [
        f"| {arm} | " + " | ".join(spread([r[n] for r in rs]) for n in names) + " |" for arm, rs in runs.items() if rs
    ]
    pairs = list(zip(*found.values(), strict=False))
    gain = [b["after"]["accuracy"] - a["after"]["accuracy"] for a, b in pairs]
    area = {arm: [fmean(r["curves"]["rewards/accuracy_reward/mean"]) for r in rs] for arm, rs in found.items() if rs}
    lines += [f"accuracy of the samples over all steps, {arm}: {spread(values)}" for arm, values in area.items()]
    return "\n".join([*lines, f"gain in accuracy, seed by seed: {spread(gain)}"])


def draw(found: dict[str, list[dict[str, Any]]], path: Path) -> None:
    """One panel a metric: thin lines the seeds (running mean of 10 updates), thick their mean."""
    pyplot = pyplot_if_there(path)
    if pyplot is None:
        return
    figure, axes = pyplot.subplots(1, len(CURVES), figsize=(4.6 * len(CURVES), 3.2))
    for axis, (title, metric) in zip(axes, CURVES.items(), strict=True):
        for colour, (arm, runs) in zip(("#0072B2", "#D55E00"), found.items(), strict=True):
            curves = [smooth(run["curves"][metric]) for run in runs]
            for curve in curves:
                axis.plot(curve, color=colour, alpha=0.35, linewidth=0.8)
            if curves:
                axis.plot([fmean(at) for at in zip(*curves, strict=False)], color=colour, linewidth=2, label=arm)
        axis.set(title=title, xlabel="optimizer steps")
        axis.grid(alpha=0.25)
    axes[0].legend(fontsize=8, frameon=False)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    main()
