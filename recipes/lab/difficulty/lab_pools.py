"""Problems to choose from, with their pass rates at the start, and what each arm of the difficulty lab has of them."""

from __future__ import annotations

import argparse
import json
import random
from typing import Any

import pyarrow.parquet as pq

from grpo_lab.io import write_whole_text
from grpo_lab.pipelines.curate import curate, curation_recipe_from

WORDS = {"loader": "word_problems", "steps": [1, 3], "largest": 20, "template": "chat"}
POOL, PROBLEMS = 600, 128
"""Problems to choose from, and those of an arm that chooses."""
OF_ALL: dict[str, dict[str, Any]] = {
    "uniform": {},
    "prioritized": {"sampler": {"name": "prioritized"}},
    "resample": {"update": {"dead_groups": "resample"}},
}


def pools(options: argparse.Namespace) -> None:
    """A seed's problems with their pass rates: ten samples each of the start, which nobody counts as rollouts of a
    training."""
    common = {
        "max_completion_length": 56,
        "batch_size": 320,
        "use_cpu": True,
        "filters": {"band": {"low": 0.0, "high": 1.0}},
    }
    for seed in options.seeds:
        data = {**WORDS, "n": POOL, "seed": seed, "split": "train"}
        of_seed = {"name": f"pool-{seed}", "model": {"path": str(options.start)}, "data": data, "seed": seed}
        curate(curation_recipe_from({**common, **of_seed, "output_dir": str(options.folder / f"pool-{seed}")}))


def chosen(arm: str, seed: int, options: argparse.Namespace) -> dict[str, Any]:
    """``curated``: problems with 0 < p < 1; ``random``: as many of the pool; ``hardest``: as many of the least p; the
    others have the whole pool. ValueError: the start gets too few right at times."""
    rows = pq.read_table(options.folder / f"pool-{seed}" / "all.parquet").to_pylist()
    draw = random.Random(f"{arm}/{seed}")
    if arm == "hardest":
        rows = sorted(draw.sample(rows, len(rows)), key=lambda row: row["pass_rate"])[:PROBLEMS]
    elif arm not in OF_ALL:
        among = [row for row in rows if row["kept"] or arm == "random"]
        if len(among) < PROBLEMS:
            raise ValueError(
                f"only {len(among)} of {POOL} problems are in the band, {PROBLEMS} are needed: take another start"
            )
        rows = draw.sample(among, PROBLEMS)
    file = options.folder / f"{arm}-{seed}.jsonl"
    lines = [
        json.dumps({key: value for key, value in row.items() if key not in ("kept", "dropped_by")}) for row in rows
    ]
    write_whole_text(file, "\n".join(lines) + "\n")
    return {"data": {"loader": "file", "source": str(file), "template": "chat"}, **OF_ALL.get(arm, {})}
