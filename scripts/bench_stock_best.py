"""The policy update against stock TRL at its best: settings of stock's that leave its result alone are searched.

    make bench-stock-best                        # CPU: four cells
    python scripts/bench_stock_best.py --quick   # a check that it runs
    python scripts/bench_stock_best.py --gpu     # Qwen2.5's 0.5B shape, bf16

A cell is a share of dead groups and a mean length of completions. In each cell stock takes one step with every
micro-batch of ``--micros``, without gradient checkpointing (TRL's default), and without and with Liger's kernels if
they are installed. Nothing else changes its speed, since TRL pads all rows of a generation batch alike. The fastest is
*stock at its best*. Then stock with TRL's default settings, stock at its best and ours in its default bins take turns
``--repeats`` times.

Printed for each cell and side: seconds of a step and their quotients, with the spread over the repeats; live tokens a
second; the operations of the live tokens as a share of this device's own matrix products (MFU of live tokens); peak
memory. Further the least seconds that a step takes on paper, by its operations and by the bytes it moves, and how far
the gradients are apart.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean, median
from typing import Any

import bench_update_sides
import torch
from bench_search import liger, stock_at_its_best
from bench_shapes import build
from bench_tables import spread, table
from bench_update_sides import GROUP, LENGTHS, Rollouts, Side, run
from gpu_checks.work import live, needed_flops, shape_of
from tqdm.auto import tqdm
from trl import GRPOTrainer

from grpo_lab import LabTrainer

#: TRL's own defaults for what is searched
DEFAULTS = {"micro": 8, "gradient_checkpointing": True}


@dataclass
class Cell:
    """One share of dead groups and one mean length of completions, with its runs.

    Attributes:
        args: options of the command line.
        folder: the model.
        shape: name of the model's shape.
        dead: number of dead groups.
        length: mean length of completions, in tokens.
        searched: the settings of stock that were tried, with their seconds.
    """

    args: argparse.Namespace
    folder: Path
    shape: str
    dead: int
    length: int
    searched: list[dict[str, Any]] = field(default_factory=list)

    def side(self, kind: type, micro: int, **more: Any) -> Side:
        """Train one step with a trainer class, micro-batches of ``micro`` rows and ``more`` settings."""
        asked = argparse.Namespace(**{**vars(self.args), "micro": micro, "checkpointing": False})
        return run(kind, self.folder, asked, self.dead, False, "sgd", max_completion_length=4 * self.length, **more)

    def search(self) -> dict[str, Any]:
        """Return the fastest of stock's settings, and note all tries in ``searched``."""
        micros = [micro for micro in self.args.micros if self.args.rows % micro == 0]
        candidates = [{"micro": micro, **more} for more in liger() for micro in micros]
        best = stock_at_its_best(candidates, lambda **settings: self.side(GRPOTrainer, **settings).seconds)
        self.searched = best.tries
        return best.settings

    def measured(self, peak_flops: float, peak_bytes: float) -> dict[str, Any]:
        """Measure all sides, and return the cell's row of the table. The arguments are the device's own rates, in
        operations and in bytes a second (`rates`)."""
        best = self.search()
        ways = {
            "stock": (GRPOTrainer, DEFAULTS),
            "stock at its best": (GRPOTrainer, best),
            "ours": (LabTrainer, {"micro": DEFAULTS["micro"]}),
        }
        found: dict[str, list[Side]] = {name: [] for name in ways}
        for _ in range(self.args.repeats):
            for name, (kind, settings) in ways.items():
                found[name].append(self.side(kind, **settings))
        seconds = {name: [one.seconds for one in sides] for name, sides in found.items()}
        rows = live(Rollouts(self.args.rows, self.dead, 100), 0)
        flops = needed_flops(shape_of(self.shape), rows, adapter=False)
        tokens = sum(map(sum, rows))
        ours = found["ours"][0]
        row: dict[str, Any] = {"dead": self.dead * GROUP / self.args.rows, "mean length": self.length}
        row |= {f"{name}, s": spread(values) for name, values in seconds.items()}
        row |= {
            f"{name} over ours": spread([a / b for a, b in zip(values, seconds["ours"], strict=True)])
            for name, values in seconds.items() if name != "ours"
        }  # fmt: skip
        row |= {f"{name}, live tokens/s": tokens / median(values) for name, values in seconds.items()}
        row |= {f"{name}, MFU": flops / median(values) / peak_flops for name, values in seconds.items()}
        row |= {f"{name}, MiB": max(one.peak for one in sides) for name, sides in found.items()}
        weights = ours.gradient.numel() * 4
        row |= {
            "floor, operations, s": flops / peak_flops,
            "floor, bytes, s": 3 * weights / peak_bytes,
            "gradient apart": apart(ours, found["stock"][0]),
            "best stock's": apart(found["stock at its best"][0], found["stock"][0]),
        }
        return row


def apart(one: Side, other: Side) -> float:
    """Return the distance of two gradients, relative to the length of the second."""
    return float((one.gradient.double() - other.gradient.double()).norm() / other.gradient.double().norm())


def lengthen(to: int) -> None:
    """Scale the real lengths of completions so that their mean is ``to`` tokens, for all rollouts after the call."""
    times = to / mean(completion for _, completion in LENGTHS)
    bench_update_sides.LENGTHS = [(prompt, max(1, round(times * completion))) for prompt, completion in LENGTHS]


def rates(device: str, dtype: torch.dtype) -> tuple[float, float]:
    """Measure a device: operations a second of a matrix product, and bytes a second of a copy, each the best of
    five."""
    side = 4096 if device == "cuda" else 1024
    a = torch.randn(side, side, device=device, dtype=dtype)
    large = torch.empty(2**26, device=device)
    product, copy = (fastest(work) for work in (lambda: a @ a, lambda: large.clone()))
    return 2 * side**3 / product, 2 * large.nbytes / copy


def fastest(work: Any) -> float:
    """Return the seconds of the fastest of five calls, after one to warm up."""
    seconds = []
    for _ in range(6):
        bench_update_sides.synchronize()
        begun = time.perf_counter()
        work()
        bench_update_sides.synchronize()
        seconds.append(time.perf_counter() - begun)
    return min(seconds[1:])


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpu", action="store_true")
    parser.add_argument("--quick", action="store_true", help="one cell, 8 rows, two micro-batches, one repeat")
    parser.add_argument("--rows", type=int, default=32, help="completions per optimizer step (groups of 8)")
    parser.add_argument("--micros", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32])
    parser.add_argument("--dead", type=float, nargs="+", default=[0.0, 0.62])
    parser.add_argument("--lengths", type=int, nargs="+", default=[300, 1200])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--shape", help="of scripts/bench_shapes.py; 0.5B on a GPU, else small")
    parser.add_argument("--output", type=Path, help="also write the rows as JSON")
    args = parser.parse_args()
    args.steps = 1
    args.shape = args.shape or ("0.5B" if args.gpu else "small")
    if args.quick:
        args.rows = 16
        args.micros = [4, 8]
        args.dead = [0.62]
        args.lengths = [40]
        args.repeats = 1
    return args


def main() -> None:
    args = arguments()
    device = "cuda" if args.gpu else "cpu"
    peak_flops, peak_bytes = rates(device, torch.bfloat16 if args.gpu else torch.float32)
    print(
        f"torch {torch.__version__}, {torch.get_num_threads()} threads; a product of matrices {peak_flops / 1e9:.0f} "
        f"GFLOP/s, a copy {peak_bytes / 1e9:.1f} GB/s; Liger: {'not ' if len(liger()) == 1 else ''}installed",
        flush=True,
    )
    rows = []
    searched = []
    with tempfile.TemporaryDirectory() as folder:
        size = build(Path(folder), args.shape)
        for length in tqdm(args.lengths, desc="mean lengths"):
            lengthen(length)
            for share in args.dead:
                cell = Cell(args, Path(folder), args.shape, round(share * args.rows / GROUP), length)
                rows.append(cell.measured(peak_flops, peak_bytes))
                searched += [{"dead": share, "mean length": length, **one} for one in cell.searched]
                print(f"\n{table(searched[-len(cell.searched) :])}\n\n{table(rows[-1:])}", flush=True)
    print(
        f"\n### {args.shape} ({size / 1e6:.1f} M parameters), {args.rows} rows: stock's settings\n\n{table(searched)}"
    )
    print(f"\n### One optimizer step\n\n{table(rows)}")
    if args.output:
        args.output.write_text(json.dumps({"searched": searched, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
