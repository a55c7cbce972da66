"""The policy update of this checkout against that of another one (before a change), in turn, on ``bench_update.py``'s
fixed rollouts.

    python scripts/bench_checkouts.py --before ../base [--pairs 4]    # about 10 minutes of a core

Each checkout runs in one process of its own for all cells. The two take turns, so that a busy machine slows both.
Printed is a line for each cell: CPU seconds of the update with one thread (which other jobs hardly change), their
quotient, peaks of resident memory, and whether the two move the weights by the same length.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

HERE = Path(__file__).resolve().parent
#: name → (dead groups of 8, sampler log-probs and correction, further settings)
CELLS: dict[str, tuple[int, bool, dict[str, Any]]] = {
    "0% dead": (0, False, {}),
    "25% dead": (2, False, {}),
    "62% dead": (5, False, {}),
    "88% dead": (7, False, {}),
    "62% dead, corrected": (5, True, {}),
    "62% dead, two updates a batch": (5, False, {"num_iterations": 2, "max_steps": 2}),
}


def serve(folder: str) -> None:
    """Run each cell that a line of stdin names, on the model in ``folder``, and answer with a line of JSON."""
    import time

    import bench_update

    import grpo_lab
    from grpo_lab import LabTrainer

    time.perf_counter = time.process_time
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # a trainer's output must not mix with the answers
    print(json.dumps({"code": grpo_lab.__file__}), file=out, flush=True)
    args = argparse.Namespace(rows=64, micro=8, steps=1, gpu=False, checkpointing=False)
    for line in sys.stdin:
        dead, corrected, further = CELLS[line.strip()]
        side = bench_update.run(LabTrainer, Path(folder), args, dead, corrected, "sgd", **further)
        found = {"seconds": side.seconds, "peak": side.peak, "moved": side.moved.double().norm().item()}
        print(json.dumps(found), file=out, flush=True)


def started(checkout: Path, folder: str) -> subprocess.Popen[str]:
    """Start the process of a checkout, which serves cells. Exits if the process has imported other code."""
    paths = os.pathsep.join([str(checkout), str(HERE)])
    environment = os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "TRL_EXPERIMENTAL_SILENCE": "1"}
    command = [sys.executable, str(Path(__file__).resolve()), "--serve", folder]
    process = subprocess.Popen(
        command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    code = answer(process)["code"]
    if not Path(code).is_relative_to(checkout.resolve()):
        sys.exit(f"{checkout} was to be measured, and {code} was imported")
    return process


def answer(process: subprocess.Popen[str]) -> dict[str, Any]:
    """Read the next line of a process; exits if the process has ended."""
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        sys.exit(f"a run ended early: {process.args}")
    found: dict[str, Any] = json.loads(line)
    return found


def asked(process: subprocess.Popen[str], cell: str) -> dict[str, Any]:
    """Let a process run a cell, and return its answer."""
    assert process.stdin is not None
    print(cell, file=process.stdin, flush=True)
    return answer(process)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path, help="the other checkout")
    parser.add_argument("--pairs", type=int, default=4)
    parser.add_argument("--cells", nargs="*", choices=CELLS, default=list(CELLS))
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        serve(args.serve)
        return
    if args.before is None:
        parser.error("--before names the checkout to compare with")
    import bench_update

    with tempfile.TemporaryDirectory() as folder:
        bench_update.build(Path(folder), "10M")
        sides = [started(checkout, folder) for checkout in (args.before, HERE.parent)]
        print(
            "| cell | before, CPU s | now, CPU s | now / before, median of pairs | single pairs | peak before, MiB | "
            "peak now | weights |"
        )
        print("|---|---|---|---|---|---|---|---|")
        for cell in args.cells:
            for side in sides:
                asked(side, cell)  # the first run of a cell allocates memory
            pairs = []
            for number in range(args.pairs):
                order = sides if number % 2 == 0 else sides[::-1]
                found = [asked(side, cell) for side in order]
                pairs.append(found if number % 2 == 0 else found[::-1])
            print(row(cell, pairs), flush=True)
        for side in sides:
            side.communicate()


def row(cell: str, pairs: list[list[dict[str, Any]]]) -> str:
    """Return a cell's line of the table; a pair holds the answers (before, now)."""
    ratios = [now["seconds"] / before["seconds"] for before, now in pairs]
    before, now = ([pair[side] for pair in pairs] for side in (0, 1))
    same = "equal" if {one["moved"] for one in before} == {one["moved"] for one in now} else "not equal"
    return (
        f"| {cell} | {median(s['seconds'] for s in before):.2f} | {median(s['seconds'] for s in now):.2f} | "
        f"{median(ratios):.3f} | "
        f"{', '.join(f'{ratio:.3f}' for ratio in ratios)} | {median(s['peak'] for s in before):,.0f} | "
        f"{median(s['peak'] for s in now):,.0f} | {same} |"
    )


if __name__ == "__main__":
    main()
