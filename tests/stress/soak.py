"""A long run of the tiny model: do memory, descriptors and processes stay flat?

    python tests/stress/soak.py [--of transformers vllm] [--steps 2000] [--folder runs/soak]
                                [--figure docs/images/soak.png]

The main job itself (``grpo-lab train``): real word problems, the accuracy reward, a second one that keeps the pool of
verifiers at work, twenty checkpoints of which two are kept. Completions are made by transformers, or by a vLLM engine
in the process whose weights are synced and proven at every step. ``soak_watch.Watch`` writes a line every 5 steps.
After the warm-up (the first fifth) a line is fitted to the means of 20 blocks of steps. Memory remembers, and so do its
blocks: with the lag-1 correlation r of their residuals (0 where it is negative) they count as 20·(1 − r)/(1 + r)
independent ones, in the error and in the degrees of freedom of Student's t. Simulated, the interval of what wanders and
does not grow holds 0 in 95% (no memory), 92% (a memory of 50 steps), 83% (250 steps) and 72% (a random walk) of the
runs; with r left out in 95, 84, 55 and 30%. Flat: all that the interval allows over 1,000 steps is within the limit of
the column. Not flat: it lies beyond 0 and allows more than the limit. Else it is open, and a longer run would tell. A
side whose file is there to its last step is not run again.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import subprocess
import sys
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import yaml
from scipy import stats

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
RECIPE: dict[str, Any] = {
    "name": "soak",
    "model": {
        "tiny": {"architecture": "qwen2", "hidden_size": 64, "num_heads": 2, "num_layers": 2, "max_positions": 256}
    },
    "data": {"loader": "word_problems", "n": 512},
    "rewards": ["accuracy", "soak_watch:fractions"],
    "objective": "dr_grpo",
    "num_generations": 4,
    "per_device_train_batch_size": 8,
    "max_completion_length": 16,
    "learning_rate": 1e-4,
    "lr_scheduler_type": "constant",
    "logging_steps": 10,
    "save_strategy": "steps",
    "save_total_limit": 2,
    "gradient_checkpointing": False,
    "disable_tqdm": True,
    "use_cpu": True,
    "bf16": False,
    "seed": 0,
}
ENGINE: dict[str, Any] = {
    "use_vllm": True,
    "vllm_mode": "colocate",
    "rollout": {"verify_every": 1, "engine": {"kv_cache_gib": 0.25, "max_model_len": 256}},
}
SIDES: dict[str, dict[str, Any]] = {"transformers": {}, "vllm": ENGINE}
WARM_UP = 0.2
BLOCKS = 20
#: column → what it is called, and how much of it over 1,000 steps would still be called flat
COLUMNS: dict[str, tuple[str, float]] = {
    "rss": ("memory, MiB", 10.0),
    "rss_of_children": ("memory of its processes, MiB", 10.0),
    "descriptors": ("descriptors", 0.5),
    "processes": ("processes", 0.1),
    "threads": ("threads", 0.1),
    "python_objects": ("Python objects", 1000.0),
}


@dataclass(frozen=True)
class Slope:
    """Of one column, per 1,000 optimizer steps, with its 95% interval; ``first`` and ``last`` are the means of the
    first and last block."""

    first: float
    last: float
    slope: float
    low: float
    high: float

    def flat(self, limit: float) -> bool | None:
        """Whether it stays within ``limit``; None where the interval holds 0 and more than the limit."""
        if max(abs(self.low), abs(self.high)) <= limit:
            return True
        return None if self.low <= 0.0 <= self.high else False


def slope_of(steps: list[int], values: list[float], blocks: int = BLOCKS) -> Slope:
    """A line through the means of ``blocks`` runs of neighbouring samples, by least squares, and its interval from as
    many as are independent.

    Raises:
        ValueError: fewer than two samples a block.
    """
    if len(values) < 2 * blocks:
        raise ValueError(f"{len(values)} samples after the warm-up are too few for {blocks} blocks of at least two")
    edges = [round(i * len(values) / blocks) for i in range(blocks + 1)]
    parts = list(itertools.pairwise(edges))
    x = [math.fsum(steps[a:b]) / (b - a) / 1000 for a, b in parts]
    y = [math.fsum(values[a:b]) / (b - a) for a, b in parts]
    line = stats.linregress(x, y)
    error = float(line.stderr) if len(set(y)) > 1 else 0.0  # of a column that never moves scipy has no error
    memory = _memory([b - float(line.intercept) - float(line.slope) * a for a, b in zip(x, y, strict=True)])
    shrink = (1 - memory) / (1 + memory)
    half = float(stats.t.ppf(0.975, max(1.0, blocks * shrink - 2))) * error / math.sqrt(shrink)
    return Slope(y[0], y[-1], float(line.slope), float(line.slope) - half, float(line.slope) + half)


def _memory(residuals: list[float]) -> float:
    """Lag-1 correlation of a line's residuals, 0 to 0.9."""
    spread = math.fsum(r * r for r in residuals)
    found = math.fsum(a * b for a, b in itertools.pairwise(residuals)) / spread if spread > 0.0 else 0.0
    return min(max(found, 0.0), 0.9)


def slopes(rows: list[dict[str, Any]], blocks: int = BLOCKS) -> dict[str, Slope]:
    """By column, after the warm-up; ``python_objects`` stand in every tenth row and have fewer blocks."""
    last = rows[-1]["step"]
    kept = [row for row in rows if row["step"] > WARM_UP * last]
    found = {}
    for name in COLUMNS:
        pairs = [(row["step"], float(row[name])) for row in kept if name in row]
        if len(pairs) >= 8:
            few = min(blocks, len(pairs) // 2)
            found[name] = slope_of([step for step, _ in pairs], [value for _, value in pairs], few)
    return found


def table(found: dict[str, dict[str, Slope]]) -> str:
    lines = [
        "| completions by | column | at first | at last | per 1,000 steps | 95% | flat |",
        "|---|---|---:|---:|---:|---:|---|",
    ]
    for side, columns in found.items():
        for name, one in columns.items():
            said, limit = COLUMNS[name]
            numbers = f"{one.first:.1f} | {one.last:.1f} | {one.slope:+.2f} | {one.low:+.2f} to {one.high:+.2f}"
            verdict = {True: "yes", False: "**no**", None: "open"}[one.flat(limit)]
            lines.append(f"| {side} | {said} | {numbers} | {verdict} |")
    return "\n".join(lines)


def read_rows(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()] if file.is_file() else []


def soaked(side: str, steps: int, every: int, folder: Path) -> list[dict[str, Any]]:
    """The rows of a run of that length; made, in a process of its own, where they are not there."""
    folder = folder.resolve() / side
    file = folder / "watch.jsonl"
    rows = read_rows(file)
    if rows and rows[-1]["step"] >= steps - every:
        return rows
    folder.mkdir(parents=True, exist_ok=True)
    file.unlink(missing_ok=True)
    watch = {"name": "soak_watch:Watch", "file": str(file), "every": every}
    recipe = {
        **RECIPE,
        **SIDES[side],
        "callbacks": [watch],
        "max_steps": steps,
        "save_steps": max(1, steps // 20),
        "output_dir": str(folder / "run"),
    }
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    command = [
        sys.executable,
        str(ROOT / "scripts" / "train.py"),
        "--config",
        str(folder / "recipe.yaml"),
        "--overwrite",
    ]
    known = {
        "PYTHONPATH": os.pathsep.join([str(HERE), str(ROOT), os.environ.get("PYTHONPATH", "")]),
        "OMP_NUM_THREADS": "1",
    }
    with (folder / "log.txt").open("w") as log:
        done = subprocess.run(
            command, cwd=HERE, env=os.environ | known, stdout=log, stderr=subprocess.STDOUT, check=False
        )
    if done.returncode != 0:
        sys.exit(f"{side}: exit code {done.returncode}; see {folder / 'log.txt'}")
    return read_rows(file)


def draw(found: dict[str, list[dict[str, Any]]], path: Path) -> None:
    """One panel a column, a line a side."""
    if find_spec("matplotlib") is None:
        print(f"no figure {path}: matplotlib is not installed (pip install 'grpo_lab[figures]')")
        return
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10.5, 5.0))
    axes = figure.subplots(2, 3, sharex=True)
    for axis, (name, (said, _)) in zip(axes.flat, COLUMNS.items(), strict=True):
        for side, rows in found.items():
            pairs = [(row["step"], row[name]) for row in rows if name in row]
            axis.plot([step for step, _ in pairs], [value for _, value in pairs], linewidth=1, label=side)
        axis.set_title(said, fontsize=9)
        axis.set_ylim(0, 1.1 * max(row[name] for rows in found.values() for row in rows if name in row))
        axis.tick_params(labelsize=8)
    axes.flat[0].legend(fontsize=8)
    figure.supxlabel("optimizer step", fontsize=9)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    print(f"figure: {path}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--of", nargs="+", choices=sorted(SIDES), default=list(SIDES))
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--every", type=int, default=5)
    parser.add_argument("--folder", type=Path, default=Path("runs/soak"))
    parser.add_argument("--figure", type=Path)
    args = parser.parse_args()
    rows = {side: soaked(side, args.steps, args.every, args.folder) for side in args.of}
    found = {side: slopes(one) for side, one in rows.items()}
    print(table(found))
    draw(rows, args.figure or args.folder / "soak.png")
    leaks = [
        f"{side}: {COLUMNS[name][0]}"
        for side, columns in found.items()
        for name, one in columns.items()
        if one.flat(COLUMNS[name][1]) is False
    ]
    if leaks:
        sys.exit(f"not flat: {'; '.join(leaks)}")


if __name__ == "__main__":
    main()
