"""The sorting lab on a language model, one run a reward: what each of them teaches, and what it only seems to.

    python scripts/compare_sorting.py                      # four rewards, seed 0: table, figure and eight answers under runs/compare/sorting
    python scripts/compare_sorting.py --kinds exact --seeds 0 1 2

All runs begin from one cold start (of seed 0: the form of an answer and nothing else). A finished run is not repeated.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from statistics import fmean
from typing import Any

from arm_runs import COLOURS, pyplot_if_there, shared_start, smooth, spread

from grpo_lab.pipelines.train import train
from grpo_lab.recipe.sections import read_recipe
from grpo_lab.rewards import SortingReward

RECIPE = Path(__file__).resolve().parents[1] / "recipes" / "lab" / "sorting" / "dr_grpo.yaml"
KINDS = ("inclusion_ordering_multiset", "inclusion_ordering", "distance", "exact")
MOST = {"inclusion_ordering_multiset": 7, "inclusion_ordering": 7, "distance": 4, "exact": 1}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS, help="rewards that pay, a run each")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--folder", type=Path, default=Path("runs/compare/sorting"))
    parser.add_argument("--set", nargs=2, action="append", default=[], metavar=("KEY", "VALUE"), help="for every run")
    args = parser.parse_args()
    found: dict[str, list[dict[str, Any]]] = {kind: [] for kind in args.kinds}
    for seed in args.seeds:
        for kind in args.kinds:
            found[kind].append(run(kind, seed, args.folder, {key: json.loads(value) for key, value in args.set}))
            print("\n" + table(found), flush=True)
    (args.folder / "table.md").write_text(table(found) + "\n\n" + eight(found) + "\n")
    print("\n" + eight(found))
    draw(found, args.folder / "sorting.png")


def run(kind: str, seed: int, folder: Path, extra: dict[str, Any]) -> dict[str, Any]:
    """Train by ``kind``; curves of all kinds, and held-out answers."""
    output = folder / f"{kind}-{seed}"
    if not (output / "arm.json").is_file():
        start = shared_start(read_recipe(RECIPE, extra), folder / "cold_start")
        watched = [{"name": "sorting", "kind": other, "weight": float(other == kind)} for other in KINDS]
        changes = {"model": {"path": str(start)}, "cold_start": None, "rewards": watched, "output_dir": str(output)}
        changes |= {"name": f"sorting by {kind}", "seed": seed, "data.seed": seed, "disable_tqdm": True}
        outcome = train(read_recipe(RECIPE, {**extra, **changes}), overwrite=True)
        rows = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
        curves = {one: [r[f"rewards/sorting_{one}_reward/mean"] for r in rows if "reward" in r] for one in KINDS}
        dead = [r["groups/dead_share"] for r in rows if "reward" in r]
        made = {"before": answers(outcome.before), "after": answers(outcome.after), "curves": curves, "dead": dead}
        (output / "arm.json").write_text(json.dumps(made))
    loaded: dict[str, Any] = json.loads((output / "arm.json").read_text())
    return loaded


def answers(result: Any) -> list[dict[str, Any]]:
    """The greedy answers to the held-out prompts, each with all its rewards."""
    numbers = [[int(x) for x in outcome.question.split()] for outcome in result.greedy]
    texts = [outcome.completion.strip() for outcome in result.greedy]
    scores = {kind: SortingReward(kind)(completions=texts, numbers=numbers) for kind in KINDS}
    return [
        {"numbers": row, "answer": text, **{kind: scores[kind][i] for kind in KINDS}}
        for i, (row, text) in enumerate(zip(numbers, texts, strict=True))
    ]


def table(found: dict[str, list[dict[str, Any]]]) -> str:
    """Held-out greedy answers: one line a paying reward, one column a reward that judges."""
    lines = ["| paid by | " + " | ".join(f"{kind} (of {MOST[kind]})" for kind in KINDS) + " | dead groups |"]
    lines.append("|---|" + "---|" * (len(KINDS) + 1))
    runs = {kind: one for kind, one in found.items() if one}
    first = next(iter(runs.values()))[0]
    lines.append("| (start) | " + " | ".join(f"{fmean(a[k] for a in first['before']):.3f}" for k in KINDS) + " | – |")
    for kind, one in runs.items():
        judged = [spread([fmean(a[k] for a in run["after"]) for run in one]) for k in KINDS]
        dead = spread([fmean(run["dead"][-20:]) for run in one])
        lines.append(f"| {kind} | " + " | ".join(judged) + f" | {dead} |")
    return "\n".join(lines)


def eight(found: dict[str, list[dict[str, Any]]]) -> str:
    """Held-out prompts that repeat a number, answered by the model that the code's reward trained (else the first): where the two forms differ."""
    kind = "inclusion_ordering" if found.get("inclusion_ordering") else next(k for k, runs in found.items() if runs)
    rows = [a for a in found[kind][0]["after"] if len(set(a["numbers"])) < len(a["numbers"])][:8]
    lines = [f"| prompt | answer, trained by {kind} | code | formula |", "|---|---|---|---|"]
    for row in rows:
        code, formula = row["inclusion_ordering"], row["inclusion_ordering_multiset"]
        lines.append(f"| {' '.join(map(str, row['numbers']))} | {row['answer']} | {code:.0f} | {formula:.0f} |")
    return "\n".join(lines)


def draw(found: dict[str, list[dict[str, Any]]], path: Path) -> None:
    """A panel for each reward that judges the samples, a line for each that pays."""
    pyplot = pyplot_if_there(path)
    if pyplot is None:
        return
    titles = dict(zip(KINDS, ("the formula's reward", "the code's reward", "places right", "sorted"), strict=True))
    figure, axes = pyplot.subplots(1, len(KINDS), figsize=(3.6 * len(KINDS), 3.2))
    for axis, (judge, title) in zip(axes, titles.items(), strict=True):
        for colour, (kind, runs) in zip(COLOURS, found.items(), strict=False):
            curves = [smooth(run["curves"][judge]) for run in runs]
            for curve in curves:
                axis.plot(curve, color=colour, alpha=0.35, linewidth=0.8)
            if curves:
                axis.plot(
                    [fmean(at) for at in zip(*curves, strict=False)],
                    color=colour,
                    linewidth=2,
                    label=f"paid by {titles[kind]}",
                )
        axis.set(title=f"{title} (of {MOST[judge]})", xlabel="optimizer steps", ylim=(0, MOST[judge] * 1.04))
        axis.grid(alpha=0.25)
    axes[-1].legend(fontsize=7, frameon=False)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


if __name__ == "__main__":
    main()
