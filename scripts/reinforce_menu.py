"""The REINFORCE menu on the quick start's problems: 4 deltas x 3 losses, one cold start, equal numbers of rollouts and updates.

    python scripts/reinforce_menu.py                       # 12 runs: table, figure, menu.json under runs/reinforce_menu
    python scripts/reinforce_menu.py --gamma 0.98          # returns discounted per token (`advantage: returns`)
    python scripts/reinforce_menu.py --stop-after 4        # four trainings now; the next call goes on with the rest
    python scripts/reinforce_menu.py --start FOLDER        # from a model that is there, in place of the cold start

Deltas: raw, centred, normalised by the group's standard deviation, only the group's maximum. Losses: naive (-A log pi), unclipped (-ratio A), clipped. Every
rollout gets several updates with its log-probs frozen as old ones (`num_iterations`), so that the three losses differ. A finished
run is a folder with arm.json and is not repeated; one that was broken off goes on from its last checkpoint. Of another --gamma or --set
use another --folder.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from statistics import fmean
from typing import Any

from arm_runs import pyplot_if_there, smooth, spread

from grpo_lab.pipelines.train import train
from grpo_lab.recipe.models import load_model
from grpo_lab.recipe.rows import load_rows
from grpo_lab.recipe.sections import read_recipe
from grpo_lab.trainer.supervised.cold_start import cold_start

RECIPE = "recipes/quickstart/dr_grpo.yaml"
DELTAS = {"raw": "raw", "centred": "group_mean", "normalised": "group_zscore", "only the maximum": "group_max"}
LOSSES = {"naive": "reinforce", "unclipped": "unclipped", "clipped": "clipped"}
TRAINING: dict[str, Any] = {
    "max_steps": 80,
    "num_iterations": 4,
    "per_device_train_batch_size": 128,
    "save_strategy": "steps",
    "save_steps": 20,
    "save_total_limit": 1,
    "disable_tqdm": True,
}
CURVE = "rewards/accuracy_reward/mean"
Found = dict[str, dict[str, list[dict[str, Any]]]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--folder", type=Path, default=Path("runs/reinforce_menu"))
    parser.add_argument("--gamma", type=float, help="discount of the return, per token")
    parser.add_argument("--start", type=Path, help="model to start from; default: the recipe's cold start, made once")
    parser.add_argument("--stop-after", type=int, default=10_000, help="trainings in this call")
    parser.add_argument("--set", nargs=2, action="append", default=[], metavar=("KEY", "VALUE"), help="for every run")
    args = parser.parse_args()
    left, extra = args.stop_after, {key: json.loads(value) for key, value in args.set}
    found: Found = {delta: {loss: [] for loss in LOSSES} for delta in DELTAS}
    for seed in args.seeds:  # seed by seed, so that a stopped menu still compares
        for delta in DELTAS:
            for loss in LOSSES:
                output = args.folder / f"{delta.replace(' ', '_')}-{loss}-{seed}"
                if not (output / "arm.json").is_file():
                    if left == 0:
                        continue
                    left -= 1
                    run_arm(delta, loss, seed, output, args, extra)
                found[delta][loss].append(json.loads((output / "arm.json").read_text()))
    (args.folder / "menu.json").write_text(json.dumps(found, indent=1))
    print(table(found))
    draw(found, args.folder / "menu.png")


def algorithm(delta: str, loss: str, gamma: float | None) -> dict[str, Any]:
    """One cell of the menu as a recipe's settings."""
    rule: Any = DELTAS[delta] if gamma is None else {"name": "returns", "gamma": gamma, "delta": DELTAS[delta]}
    return {"objective": {"name": "reinforce", "surrogate": LOSSES[loss], "advantage": rule}}


def shared_start(folder: Path) -> Path:
    """The quick start's cold start, made once."""
    start = folder / "cold_start"
    if not (start / "tokenizer_config.json").is_file():
        recipe = read_recipe(RECIPE)
        assert recipe.cold_start is not None
        model, tokenizer = load_model(recipe.model, 0)
        rows = load_rows(recipe.cold_start.data, "cold_start.data")
        settings = {"seed": 0, "use_cpu": True, "bf16": False, **recipe.cold_start.arguments}
        cold_start(model, tokenizer, rows, start, settings).save_pretrained(start)
        tokenizer.save_pretrained(start)
    return start


def run_arm(delta: str, loss: str, seed: int, output: Path, args: argparse.Namespace, extra: dict[str, Any]) -> None:
    start = args.start or shared_start(args.folder)
    settings = {"output_dir": str(output), "seed": seed, "data.seed": seed, "name": f"{delta}, {loss}"}
    settings |= {"model": {"path": str(start)}, "cold_start": None, **TRAINING, **extra}
    recipe = read_recipe(RECIPE, {**settings, **algorithm(delta, loss, args.gamma)})
    begun = any(output.glob("checkpoint-*"))
    outcome = train(recipe, resume=begun, overwrite=not begun)
    assert outcome.before is not None
    assert outcome.after is not None
    rows = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    made = {
        "before": outcome.before.accuracy.value,
        "after": outcome.after.accuracy.value,
        "curve": [row[CURVE] for row in rows if CURVE in row],
        "entropy": next((row["entropy"] for row in reversed(rows) if "entropy" in row), None),
    }
    (output / "arm.json").write_text(json.dumps(made))


def table(found: Found) -> str:
    """Held-out accuracy after training, and of the samples over the last quarter of it, by delta and loss."""
    made = [run for losses in found.values() for runs in losses.values() for run in runs]
    lines = [
        f"Before: {spread([made[0]['before']])} (greedy, held-out). After, and of the samples of the last quarter:"
    ]
    lines += ["| delta | " + " | ".join(LOSSES) + " |", "|---|" + "---|" * len(LOSSES)]
    for delta, losses in found.items():
        cells = [
            f"{spread([run['after'] for run in runs])}; {spread([late(run['curve']) for run in runs])}" if runs else "–"
            for runs in losses.values()
        ]
        lines.append(f"| {delta} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def late(curve: list[float]) -> float:
    return fmean(curve[-max(1, len(curve) // 4) :])


def draw(found: Found, path: Path) -> None:
    """One panel a delta, one line a loss: accuracy of the samples, running mean of 5 rollouts; thin lines the seeds."""
    pyplot = pyplot_if_there(path)
    if pyplot is None:
        return
    figure, axes = pyplot.subplots(1, len(found), figsize=(3.6 * len(found), 3.2), sharey=True)
    for axis, (delta, losses) in zip(axes, found.items(), strict=True):
        for colour, (loss, runs) in zip(("#0072B2", "#D55E00", "#009E73"), losses.items(), strict=True):
            curves = [smooth(run["curve"], 5) for run in runs]
            for curve in curves if len(curves) > 1 else []:
                axis.plot(curve, color=colour, alpha=0.35, linewidth=0.8)
            if curves:
                axis.plot([fmean(at) for at in zip(*curves, strict=False)], color=colour, linewidth=2, label=loss)
        axis.set(title=delta, xlabel="rollouts")
        axis.grid(alpha=0.25)
    axes[0].set_ylabel("accuracy of the samples")
    axes[0].legend(fontsize=8, frameon=False)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    main()
