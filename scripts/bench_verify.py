"""Verification beside TRL's ``accuracy_reward``: seconds on real model outputs, from the first call on, and every
verdict compared.

    python scripts/bench_verify.py [--rounds 3] [--call 64] [--data ../shared/data]

All sides judge the same texts in the same order, in calls of ``--call`` completions, each side in a process of its own,
in turn. Only the calls are timed. Before them come imports, the reward's construction, and for TRL one call on another
row, which builds math-verify's tables. Ours starts cold (``cold``), or with the warm-up that ``LabTrainer`` gives it
while a model loads (``warm``).

GSM8K outputs end in ``A: 18``, which TRL does not read: there the last line becomes ``The answer is $\\boxed{18}$`` for
all sides. A question has four outputs; in ``gsm8k, 8 each`` every one stands twice, as in a group of eight that repeats
itself. Reference answers stand between dollars, since TRL reads no bare LaTeX. Nearly all real answers are decided
without a worker process; in ``math, workers only`` that path is off, so that workers judge them all.

Printed is a line for each set of outputs, with the seconds of the first call and of all, and below it each verdict in
which the two differ.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench_tables import spread

_FILES = {
    "gsm8k": "gsm8k/gsm8k_model_outputs.jsonl",
    "gsm8k, 8 each": "gsm8k/gsm8k_model_outputs.jsonl",
    "math": "math/math_model_outputs.jsonl",
    "math, workers only": "math/math_model_outputs.jsonl",
    "math, run on": "math/math_model_outputs_base_runon.jsonl",
}
_SIDES = ("trl", "cold", "warm")
_WARM_SECONDS = 3.0  # a model takes longer to load
Rows = list[tuple[str, str]]


def rows_of(name: str, data: Path) -> Rows:
    """Return (completion, reference answer) of all rows of a set."""
    with open(data / _FILES[name], encoding="utf-8") as file:
        rows = [json.loads(line) for line in file]
    pairs = [(row["output_text"], f"${row['gold_answer']}$") for row in rows]
    if name.startswith("gsm8k"):
        pairs = [(_boxed(text), gold) for text, gold in pairs]
    return [pair for pair in pairs for _ in range(2)] if "8 each" in name else pairs


def _boxed(text: str) -> str:
    """Return an output of GSM8K with its last answer in a box."""
    head, marker, answer = text.rpartition("A: ")
    return f"{head}The answer is $\\boxed{{{answer.strip()}}}$" if marker else text


def trl_side() -> Callable[[Rows], list[float | None]]:
    """Return a function that judges rows by TRL's reward, warmed up."""
    from trl.rewards import accuracy_reward

    def call(rows: Rows) -> list[float | None]:
        messages = [[{"role": "assistant", "content": text}] for text, _ in rows]
        return list(accuracy_reward(messages, [gold for _, gold in rows]))

    call([("It is $\\boxed{\\frac{1}{2}}$.", "$0.5$")])
    return call


def our_side(rows: Rows, warm: bool, fast_path: bool) -> Callable[[Rows], list[float | None]]:
    """Return a function that judges rows by our reward. ``fast_path``: whether answers may be decided without a
    worker."""
    from grpo_lab.rewards import AccuracyReward

    reward = AccuracyReward(fast_path=fast_path)
    if warm:
        reward.warm_up(["$x^2+1$"])
        time.sleep(_WARM_SECONDS)

    def call(some: Rows) -> list[float | None]:
        messages = [[{"role": "assistant", "content": text}] for text, _ in some]
        return reward(completions=messages, solution=[gold for _, gold in some])

    return call


def one_side(side: str, name: str, data: Path, size: int) -> dict[str, Any]:
    """Judge a set in this process; return the seconds of the first call and of all, and the verdicts."""
    rows = rows_of(name, data)
    call = trl_side() if side == "trl" else our_side(rows, side == "warm", "workers only" not in name)
    seconds = []
    verdicts = []
    for start in range(0, len(rows), size):
        begun = time.perf_counter()
        verdicts += call(rows[start : start + size])
        seconds.append(time.perf_counter() - begun)
    return {"first": seconds[0], "all": sum(seconds), "verdicts": verdicts}


def measured(side: str, name: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Return `one_side` of a new process."""
    command = [sys.executable, __file__, "--side", side, "--name", name, "--call", str(arguments.call)]
    done = subprocess.run(
        [*command, "--data", str(arguments.data)], check=True, stdout=subprocess.PIPE, text=True, timeout=900
    )
    return dict(json.loads(done.stdout.splitlines()[-1]))


def report(name: str, runs: dict[str, list[dict[str, Any]]], rows: Rows) -> str:
    """Return a set's line of the table, and a line for each verdict that differs. Fails if our sides differ."""

    def seconds(side: str, key: str) -> list[float]:
        return [run[key] for run in runs[side]]

    cells = [name, f"{len(rows):,}"]
    for key in ("first", "all"):
        trl = seconds("trl", key)
        cells.append(spread(trl))
        for side in _SIDES[1:]:
            ours = seconds(side, key)
            ratios = [theirs / one for theirs, one in zip(trl, ours, strict=True)]
            cells.append(f"{spread(ours)}, **{spread(ratios)}×**")
    verdicts = runs["cold"][0]["verdicts"]
    assert all(run["verdicts"] == verdicts for side in _SIDES[1:] for run in runs[side])
    pairs = zip(rows, runs["trl"][0]["verdicts"], verdicts, strict=True)
    different = [(row, a, b) for row, a, b in pairs if a != b]
    cells.append(f"{len(rows) - len(different):,} of {len(rows):,}")
    lines = ["| " + " | ".join(cells) + " |"]
    lines += [
        f"    gold {gold!r}: TRL {a}, ours {b}; ends {text[-160:]!r}" for (text, gold), a, b in dict.fromkeys(different)
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--call", type=int, default=64)
    parser.add_argument("--data", type=Path, default=Path("../shared/data"))
    parser.add_argument("--side", choices=_SIDES)
    parser.add_argument("--name", choices=list(_FILES))
    arguments = parser.parse_args()
    if arguments.side:
        print(json.dumps(one_side(arguments.side, arguments.name, arguments.data, arguments.call)))
        return
    print(
        "| outputs | rows | first call: TRL s | ours, cold | ours, warm | all calls: TRL s | ours, cold | ours, warm "
        "| equal verdicts |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    for name in [arguments.name] if arguments.name else _FILES:
        runs: dict[str, list[dict[str, Any]]] = {side: [] for side in _SIDES}
        for _ in range(arguments.rounds):
            for side in _SIDES:
                runs[side].append(measured(side, name, arguments))
        print(report(name, runs, rows_of(name, arguments.data)), flush=True)


if __name__ == "__main__":
    main()
