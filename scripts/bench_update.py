"""The policy update: stock ``trl.GRPOTrainer`` against ours, alternating in one run, on fixed rollouts.

    make bench-update                       # CPU, about 25 minutes on two cores
    python scripts/bench_update.py --quick  # a check that it runs
    python scripts/bench_update.py --only-silent
    python scripts/bench_update.py --gpu    # Qwen2.5-0.5B and 1.5B shapes, bf16, gradient checkpointing on and off

Both sides get the same model, the same completions (with the token lengths of real GSM8K model outputs) and the same
rewards, with a given share of dead groups. Timed is everything between two optimizer steps except generation (which is
scripted) and decoding. Printed are tables:

- by share of dead groups: seconds, speed-up, memory, tokens computed, and the distance from stock of the first gradient
  and of the weights' movement under SGD (and AdamW). *Floor*: a plain Hugging Face forward and backward over exactly
  the live tokens, packed with hardly any padding.
- the same with log-probs of the sampler and importance correction, and with two updates of each batch of completions
- rows without a gradient (``update.silent_rows``), kept and left out in turn: clipped ones in later updates of a batch,
  and ones that the correction rejects in its first and second update

AdamW and all tables but the first are measured only for shares of dead groups between 0.5 and 0.7. ``--only-silent``
prints the last table alone, without dead groups.
"""

from __future__ import annotations

import argparse
import json
import platform
import tempfile
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

import torch
from bench_shapes import build
from bench_tables import spread, table
from bench_update_sides import GROUP, floor, run
from trl import GRPOTrainer

from grpo_lab import LabTrainer


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    """Return the distance of two tensors, relative to the length of the second."""
    return ((a.double() - b.double()).norm() / b.double().norm().clamp(min=1e-300)).item()


def compare_reused(folder: Path, args: argparse.Namespace, dead: int) -> dict[str, Any]:
    """Compare the sides with two updates of each batch of completions (`num_iterations` 2), where old log-probs have to
    be computed before the first; return the row of the table."""
    twice = {"num_iterations": 2, "max_steps": 2 * max(1, args.steps // 2)}
    stock, ours = (run(kind, folder, args, dead, False, "sgd", **twice) for kind in (GRPOTrainer, LabTrainer))
    return {
        "dead": dead * GROUP / args.rows, "stock s": stock.seconds, "ours s": ours.seconds,
        "speed-up": stock.seconds / ours.seconds, "stock MiB": stock.peak, "ours MiB": ours.peak,
        "gradient": relative(ours.gradient, stock.gradient), "movement": relative(ours.moved, stock.moved),
    }  # fmt: skip


#: Settings in which part of the rows has no gradient: STALE is GSPO with its authors' clip, after updates on the same
#: batch; REJECTED has bounds of the correction at which the sampler's noise rejects rows.
OURS = {"loss_type": None, "scale_rewards": None}  # the objective decides both
STALE = {**OURS, "objective": "gspo", "epsilon": 3e-4, "epsilon_high": 4e-4}
REJECTED = {**OURS, "objective": "dapo", "vllm_importance_sampling_mode": "sequence_mask"}
REJECTED |= {"vllm_importance_sampling_clip_min": 0.99, "num_iterations": 2, "max_steps": 2}


def compare_silent(folder: Path, args: argparse.Namespace, dead: int) -> list[dict[str, Any]]:
    """Compare ours with rows that have no gradient kept and left out (``update.silent_rows``), in turn; return the rows
    of the table. Seconds are medians of one update, after ``updates before`` others on the same batch; ``movement`` is
    the distance of the weights' movements in all updates so far."""
    rows = []
    kinds = [
        *(("clipped", STALE | {"num_iterations": 1 + n, "max_steps": 1 + n}, n, False) for n in (1, 4)),
        *(("rejected by the correction", REJECTED, n, True) for n in (0, 1)),
    ]
    for what, settings, staleness, corrected in kinds:
        seconds: dict[str, list[float]] = {"keep": [], "skip": []}
        for _ in range(args.floor_repeats):
            sides = {}
            for how, measured in seconds.items():
                update = {"silent_rows": how}
                sides[how] = run(LabTrainer, folder, args, dead, corrected, "sgd", update=update, **settings)
                measured.append(sides[how].each[staleness])
        keep, skip = (median(measured) for measured in seconds.values())
        rows.append({
            "rows": what, "updates before": staleness, "silent": sides["keep"].silent[staleness], "keep s": keep,
            "skip s": skip, "saved": 1 - skip / keep, "movement": relative(sides["skip"].moved, sides["keep"].moved),
        })  # fmt: skip
    return rows


def compare(folder: Path, args: argparse.Namespace, dead: int, corrected: bool) -> dict[str, Any]:
    """Run stock and ours in turn, ``args.repeats`` times, and then ours and the floor in turn, ``args.floor_repeats``
    times; return the row of the table, with medians."""
    stock = []
    ours = []
    for _ in range(args.repeats):
        stock.append(run(GRPOTrainer, folder, args, dead, corrected, "sgd"))
        ours.append(run(LabTrainer, folder, args, dead, corrected, "sgd"))
    stock_s = median(side.seconds for side in stock)
    ours_s = median(side.seconds for side in ours)
    speed_ups = [theirs.seconds / own.seconds for theirs, own in zip(stock, ours, strict=True)]
    row: dict[str, Any] = {
        "dead": dead * GROUP / args.rows, "stock s": stock_s, "ours s": ours_s, "speed-up": spread(speed_ups),
        "stock MiB": max(s.peak for s in stock), "ours MiB": max(s.peak for s in ours), "stock tokens": stock[0].tokens,
        "ours tokens": ours[0].tokens, "gradient": relative(ours[0].gradient, stock[0].gradient),
        "movement": relative(ours[0].moved, stock[0].moved),
    }  # fmt: skip
    if not corrected:
        in_turn = [
            (run(LabTrainer, folder, args, dead, corrected, "sgd").seconds, floor(folder, args, dead))
            for _ in range(args.floor_repeats)
        ]
        beside, row["floor s"] = (median(seconds) for seconds in zip(*in_turn, strict=True))
        row["ours/floor"] = beside / row["floor s"]
        if 0.5 < row["dead"] < 0.7:
            adam = [run(kind, folder, args, dead, corrected, "adamw_torch") for kind in (GRPOTrainer, LabTrainer)]
            row["movement AdamW"] = relative(adam[1].moved, adam[0].moved)
    return row


def draw(rows: list[dict[str, Any]], title: str, path: Path) -> None:
    """Draw the seconds of the update by share of dead groups: bars for stock and ours, a mark for the floor."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axis = pyplot.subplots(figsize=(7.2, 3.4))
    places = range(len(rows))
    axis.bar([x - 0.2 for x in places], [r["stock s"] for r in rows], 0.38, color="#9CA3AF", label="trl.GRPOTrainer")
    axis.bar([x + 0.2 for x in places], [r["ours s"] for r in rows], 0.38, color="#0072B2", label="LabTrainer")
    for x, row in zip(places, rows, strict=True):
        axis.plot([x + 0.0, x + 0.4], [row["floor s"]] * 2, color="#D55E00", label="floor" if x == 0 else None)
        above = max(row["ours s"], row["floor s"])
        median_speed_up = row["speed-up"].split()[0]
        axis.text(x + 0.2, above, f"{median_speed_up}×", ha="center", va="bottom", fontsize=10, weight="bold")
    axis.set_xticks(list(places), [f"{row['dead']:.0%} of groups dead" for row in rows])
    axis.set(ylabel="seconds", title=title)
    axis.spines[["top", "right"]].set_visible(False)
    axis.margins(y=0.25)
    axis.legend(frameon=False, fontsize=9, ncols=3, loc="upper left")
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpu", action="store_true")
    parser.add_argument("--quick", action="store_true", help="five groups, one dead share, one step, one repeat")
    parser.add_argument("--rows", type=int, default=64, help="completions per optimizer step (groups of 8)")
    parser.add_argument("--micro", type=int, default=8)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--repeats", type=int, default=3, help="stock and ours in turn")
    parser.add_argument("--floor-repeats", type=int, default=1, help="ours and the floor in turn")
    parser.add_argument("--dead", type=float, nargs="*", default=[0.0, 0.30, 0.62, 0.90])
    parser.add_argument("--only-silent", action="store_true", help="only the table of rows without a gradient")
    parser.add_argument("--plot", type=Path, help="draw the last table as a picture")
    parser.add_argument("--output", type=Path, help="also write the rows as JSON")
    args = parser.parse_args()
    if args.plot and find_spec("matplotlib") is None:
        parser.error("--plot needs matplotlib: pip install 'grpo_lab[figures]'")
    if args.quick:
        args.rows = 5 * GROUP
        args.steps = 1
        args.dead = [0.62]
        args.repeats = 1
    return args


def bench(folder: Path, args: argparse.Namespace, name: str, parameters: int) -> dict[str, Any]:
    """Measure and print all tables of one model, and return their rows."""
    if args.only_silent:
        rows = compare_silent(folder, args, 0)
        print(f"\n### {name}\n\n{table(rows)}", flush=True)
        return {"silent": rows}
    groups = args.rows // GROUP
    middle = [round(share * groups) for share in args.dead if 0.5 < share < 0.7]
    rows = [compare(folder, args, round(share * groups), corrected=False) for share in args.dead]
    print(f"\n### {name}\n\n{table(rows)}", flush=True)
    corrected = [compare(folder, args, dead, corrected=True) for dead in middle]
    print(f"\nwith sampler log-probs and importance correction:\n\n{table(corrected)}", flush=True)
    if args.plot:
        title = f"Policy update: {parameters / 1e6:.1f} M parameters, {args.rows} rows, {args.steps} steps"
        draw(rows, title, args.plot)
    reused = [compare_reused(folder, args, dead) for dead in middle]
    print(f"\ntwo updates with each batch of completions:\n\n{table(reused)}", flush=True)
    silent = [row for dead in middle for row in compare_silent(folder, args, dead)]
    print(f"\nrows without a gradient, kept and left out:\n\n{table(silent)}", flush=True)
    return {"plain": rows, "corrected": corrected, "reused": reused, "silent": silent}


def main() -> None:
    args = arguments()
    results = {}
    machine = platform.processor() or platform.machine()
    print(f"{machine}, {torch.get_num_threads()} threads, torch {torch.__version__}", flush=True)
    for shape in ["0.5B", "1.5B"] if args.gpu else ["10M"]:
        for checkpointing in [False, True] if args.gpu else [False]:
            args.checkpointing = checkpointing
            with tempfile.TemporaryDirectory() as folder:
                size = build(Path(folder), shape)
                name = (
                    f"{shape} ({size / 1e6:.1f} M parameters), {args.rows} rows, micro-batch {args.micro}, "
                    f"checkpointing {args.checkpointing}"
                )
                results[name] = bench(Path(folder), args, name, size)
    if args.output:
        args.output.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
