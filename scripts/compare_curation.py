"""Does choosing the data pay? Curated against random problems, and prioritised against uniform sampling.

    python scripts/compare_curation.py --model runs/lab-misreading/cold_start --output runs/compare_curation --seeds 3

Every arm trains the same model by recipes/lab/misreading/dr_grpo.yaml with the same number of rollouts, and is evaluated on the
same held-out problems (greedy, strict):

    random       as many problems as `curated` has, drawn from a pool
    curated      problems of the pool with 0 < p < 1 (10 samples of the model before training)
    uniform      the whole pool, TRL's shuffling
    prioritized  the whole pool, `sampler: prioritized`

Sampling for the pass rates is not counted as rollouts of the training; its number is in the JSON. A seed changes the pool,
the draw and the training. Intervals: Student's t over seeds (95%), of the accuracies and of the paired differences.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path
from statistics import fmean
from typing import Any

RECIPE = Path(__file__).resolve().parents[1] / "recipes" / "lab" / "misreading" / "dr_grpo.yaml"
DATA = {"loader": "word_problems", "steps": [1, 3], "largest": 20, "template": "chat"}
ARMS = ("random", "curated", "uniform", "prioritized")
COMPARED = (("curated", "random"), ("prioritized", "uniform"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="the model that every arm starts from")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--pool", type=int, default=600, help="problems to choose from")
    parser.add_argument("--problems", type=int, default=128, help="problems of `random` and `curated`")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--held-out", type=int, default=500)
    parser.add_argument("--arms", nargs="+", default=ARMS, choices=ARMS)
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)
    accuracies: dict[str, list[float]] = {arm: [] for arm in options.arms}
    for seed in range(options.seeds):
        pool = curated_pool(options, seed)
        for arm in options.arms:
            accuracies[arm].append(accuracy_after(options, arm, seed, pool))
            found = summary(options, accuracies)
            (options.output / "result.json").write_text(json.dumps(found, indent=1))
    print(as_text(found))


def curated_pool(options: argparse.Namespace, seed: int) -> list[dict[str, Any]]:
    """All problems of the pool with `pass_rate` and `kept`; an earlier run's samples are used again."""
    import pyarrow.parquet as pq

    from grpo_lab.pipelines.curate import curate
    from grpo_lab.pipelines.curation_recipe import curation_recipe_from

    done = curate(
        curation_recipe_from(
            {
                "name": f"pool-{seed}",
                "model": {"path": options.model},
                "data": {**DATA, "n": options.pool, "seed": seed, "split": "train"},
                "max_completion_length": 56,
                "batch_size": 320,
                "seed": seed,
                "use_cpu": True,
                "filters": {"band": {"low": 0.0, "high": 1.0}},
                "output_dir": str(options.output / f"pool-{seed}"),
            }
        )
    )
    rows: list[dict[str, Any]] = pq.read_table(done.folder / "all.parquet").to_pylist()
    return rows


def problems_of(options: argparse.Namespace, arm: str, seed: int, pool: list[dict[str, Any]]) -> list[dict[str, Any]]:
    kept = [row for row in pool if row["kept"]]
    if len(kept) < options.problems:
        raise SystemExit(f"only {len(kept)} of {len(pool)} problems are in the band; lower --problems or raise --pool")
    choices = {"random": pool, "curated": kept}
    if arm not in choices:
        return pool
    return random.Random(f"{arm}/{seed}").sample(choices[arm], options.problems)


def accuracy_after(options: argparse.Namespace, arm: str, seed: int, pool: list[dict[str, Any]]) -> float:
    from grpo_lab.pipelines.train import train
    from grpo_lab.recipe.sections import recipe_from
    from grpo_lab.recipe.yaml import read_yaml

    file = options.output / f"{arm}-{seed}.jsonl"
    rows = problems_of(options, arm, seed, pool)
    drop = ("kept", "dropped_by")
    lines = [json.dumps({name: value for name, value in row.items() if name not in drop}) for row in rows]
    file.write_text("\n".join(lines) + "\n")
    written = read_yaml(RECIPE)
    del written["cold_start"]
    written["evaluation"]["data"]["n"] = options.held_out
    written |= {
        "name": f"{arm}-{seed}",
        "model": {"path": options.model},
        "data": {"loader": "file", "source": str(file), "template": "chat"},
        "evaluation": {**written["evaluation"], "before": False},
        "max_steps": options.steps,
        "logging_steps": 10,
        "seed": seed,
        "output_dir": str(options.output / f"{arm}-{seed}"),
    }
    if arm == "prioritized":
        written["sampler"] = {"name": "prioritized"}
    done = train(recipe_from(written), overwrite=True)
    assert done.after is not None
    assert done.after.accuracy is not None
    return float(done.after.accuracy.value)


def summary(options: argparse.Namespace, accuracies: dict[str, list[float]]) -> dict[str, Any]:
    settings = {name: str(value) if isinstance(value, Path) else value for name, value in vars(options).items()}
    done = {arm: values for arm, values in accuracies.items() if values}
    differences = {
        f"{ours} - {theirs}": [a - b for a, b in zip(done[ours], done[theirs], strict=False)]
        for ours, theirs in COMPARED
        if ours in done and theirs in done
    }
    return {
        "settings": settings,
        "rollouts of a training": options.steps * 256,
        "samples for pass rates": options.pool * 10,
        "accuracy": {arm: {"seeds": values, **interval(values)} for arm, values in done.items()},
        "difference": {name: {"seeds": values, **interval(values)} for name, values in differences.items()},
    }


def interval(values: list[float]) -> dict[str, float | None]:
    """Mean and half width of the 95% interval over seeds; None with fewer than two."""
    from grpo_lab.evaluation.statistics import half_width_over_seeds

    return {"mean": fmean(values), "half_width": half_width_over_seeds(values)}


def as_text(found: dict[str, Any]) -> str:
    lines = [f"{found['rollouts of a training']:,} rollouts a training, held-out greedy accuracy, 95% over seeds"]
    for part in ("accuracy", "difference"):
        for name, one in found[part].items():
            width = "one seed" if one["half_width"] is None else f"± {one['half_width']:.3f}"
            lines.append(f"{part:10s} {name:24s} {one['mean']:+.3f} {width}  {[round(v, 3) for v in one['seeds']]}")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
