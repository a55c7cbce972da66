"""How even are live tokens over 8, 64 and 512 ranks: stock TRL's assignment against grpo_lab's plan. No model is run.

    python scripts/simulate_balance.py [--data DIR] [--seeds 5] [--rows-per-rank 8 64 256] > table.md
    python scripts/simulate_balance.py --exchange > bytes.md

The first prints a table of how evenly live tokens are spread, and for how many tokens a step waits. The second prints
how many bytes the ranks receive of 1,024 rows; for it completions are made as long as a reasoning model's, 32 times the
real ones, so that the cut at 512 tokens is one at 16,384.

Lengths are those of real GSM8K model outputs in Qwen3 tokens (prompt with its chat turn, completion cut at
--max-completion). A group of 8 is one question with its own 4 outputs and the 4 of the question with the next longer
outputs. Whole groups are dead, drawn at random. With stock TRL every rank keeps the groups it generated, in order, and
computes all its rows padded to its longest prompt and completion.

Needs `tokenizers` and the data folder ($GRPO_LAB_DATA, else ../shared/data beside the checkout).
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from grpo_lab.update import DEFAULT_OVERHEAD_TOKENS, Plan, Routes, Rows, default_max_tokens, plan_update

GROUP = 8
CHAT_TURN = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
COLUMNS = (
    "ranks",
    "rows/rank",
    "dead",
    "live rows/rank",
    "stock live max/mean",
    "ours live max/mean",
    "(worst seed)",
    "no plan can beat",
    "ours computed max/mean",
    "padding",
    "bins",
    "step tokens stock",
    "step tokens ours",
    "ratio",
    "plan, ms",
)
#: bytes that a rank received for a row with the old policy's and the sampler's log-probs. Before, all rows were
#: gathered with their padding; ids and masks had 8 bytes.
BEFORE = {"prompt token": 16, "completion token": 24, "row": 12}
#: now: ids of 4 bytes, a mask of 1, log-probs of 4; for each row offset and advantage; and of each row on another rank
#: eight numbers of 8 bytes
NOW = {"prompt token": 4, "completion token": 13, "row": 12, "row of others": 64}
EXCHANGE_COLUMNS = (
    *("ranks", "rows/rank", "dead", "MB a rank before", "MB now", "(most)"),
    *("rows moved now", "live max/mean now", "step tokens now", "plan, ms"),
)
LONGER = 32

Lengths = NDArray[np.int64]


@dataclass(frozen=True)
class Groups:
    """Lengths in tokens of every group that can be drawn: ``prompt`` ``[Q]``, ``completion`` ``[Q, 8]``."""

    prompt: Lengths
    completion: Lengths


def data_folder(given: str | None) -> Path:
    """Return the folder of the data; exits if there is none."""
    default = Path(__file__).resolve().parents[2] / "shared" / "data"
    folder = Path(given or os.environ.get("GRPO_LAB_DATA") or default)
    if not (folder / "gsm8k" / "gsm8k_model_outputs.jsonl").is_file():
        sys.exit(f"No gsm8k/gsm8k_model_outputs.jsonl under {folder}; give --data or set GRPO_LAB_DATA.")
    return folder


def real_groups(folder: Path, max_completion: int) -> Groups:
    """Read the real outputs, count their tokens, and form the groups."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / "tokenizers" / "qwen3" / "tokenizer.json"))
    outputs: dict[str, list[str]] = defaultdict(list)
    with open(folder / "gsm8k" / "gsm8k_model_outputs.jsonl", encoding="utf-8") as lines:
        for row in map(json.loads, lines):
            outputs[row["question"]].append(row["output_text"])
    questions = [question for question, texts in outputs.items() if len(texts) == GROUP // 2]
    prompt = np.array([len(one.ids) for one in tokenizer.encode_batch([CHAT_TURN.format(q) for q in questions])])
    texts = [text for question in questions for text in outputs[question]]
    completion = np.array([len(one.ids) + 1 for one in tokenizer.encode_batch(texts)])  # + the end-of-turn token
    completion = np.minimum(completion, max_completion).reshape(len(questions), GROUP // 2)
    order = np.argsort(completion.mean(axis=1), kind="stable")
    following = np.append(order[1:], order[-2])
    return Groups(prompt[order], np.concatenate([completion[order], completion[following]], axis=1))


def one_step(groups: Groups, num_ranks: int, rows_per_rank: int, dead: float, seed: int) -> Rows:
    """Draw the rows of an optimizer step over all ranks; the share ``dead`` of its groups is dead, but never all."""
    rng = np.random.default_rng(seed)
    count = num_ranks * rows_per_rank // GROUP
    drawn = rng.integers(0, groups.prompt.size, count)
    live = rng.permutation(count) >= min(count - 1, round(count * dead))  # at least one live group
    return Rows(np.repeat(groups.prompt[drawn], GROUP), groups.completion[drawn].ravel(), np.repeat(live, GROUP))


def stock(rows: Rows, num_ranks: int) -> tuple[float, int]:
    """Return max/mean of the live tokens on a rank, and the number of tokens for which the step waits, if every rank
    keeps the rows that it generated."""
    prompt, completion, live = (
        np.asarray(one).reshape(num_ranks, -1) for one in (rows.prompt_lengths, rows.completion_lengths, rows.live)
    )
    live_tokens = ((prompt + completion) * live).sum(axis=1)
    padded = prompt.shape[1] * (prompt.max(axis=1) + completion.max(axis=1))
    return float(live_tokens.max() / live_tokens.mean()), int(padded.max())


def table_row(
    groups: Groups, num_ranks: int, rows_per_rank: int, dead: float, seeds: int, micro_batch: int, overhead: int
) -> list[str]:
    """Return a line of the first table: means over the seeds. ``overhead``: cost of a bin, in tokens."""
    plans: list[Plan] = []
    others: list[tuple[float, int, float, float]] = []
    for seed in range(seeds):
        rows = one_step(groups, num_ranks, rows_per_rank, dead, seed)
        prompt = np.asarray(rows.prompt_lengths)
        completion = np.asarray(rows.completion_lengths)
        budget = default_max_tokens(micro_batch, int(prompt.max()), int(completion.max()))
        start = time.process_time()
        plan = plan_update(rows, num_ranks, budget, overhead_tokens=overhead)
        seconds = time.process_time() - start
        longest = int((prompt + completion)[np.asarray(rows.live)].max())
        plans.append(plan)
        others.append((*stock(rows, num_ranks), max(1.0, longest * num_ranks / plan.tokens_live), seconds))
    stock_even, stock_step, bound, seconds = np.mean(others, axis=0)
    even = [over_mean(plan.live_per_rank) for plan in plans]
    step = np.mean([plan.step_tokens for plan in plans])
    live_rows = np.mean([sum(len(one) for bins in plan.bins for one in bins) for plan in plans]) / num_ranks
    return [
        f"{num_ranks}",
        f"{rows_per_rank}",
        f"{dead:.0%}",
        f"{live_rows:.1f}",
        f"{stock_even:.2f}",
        f"{np.mean(even):.3f}",
        f"{max(even):.3f}",
        f"{bound:.3f}",
        f"{np.mean([over_mean(plan.computed_per_rank) for plan in plans]):.3f}",
        f"{np.mean([plan.padding_share for plan in plans]):.1%}",
        f"{np.mean([len(plan.bins[0]) for plan in plans]):.1f}",
        f"{stock_step:,.0f}",
        f"{step:,.0f}",
        f"{stock_step / step:.1f}×",
        f"{1000 * seconds:.0f}",
    ]


def over_mean(per_rank: tuple[int, ...]) -> float:
    """Return the largest number of a rank over the mean of all ranks; 1 if all are 0."""
    total = sum(per_rank)
    return max(per_rank) * len(per_rank) / total if total else 1.0


def received(plan: Plan, rows: Rows, num_ranks: int) -> tuple[Lengths, float]:
    """Return the bytes that each rank receives ``[R]``, and the share of the planned rows that move between ranks."""
    prompt = np.asarray(rows.prompt_lengths)
    completion = np.asarray(rows.completion_lengths)
    each = len(rows) // num_ranks
    routes = Routes.of(plan, completion, each)
    padded = completion.reshape(num_ranks, each).max(axis=1)[routes.homes]
    size = NOW["prompt token"] * prompt[routes.rows] + NOW["row"]
    size += NOW["completion token"] * np.minimum(routes.widths, padded)
    found = np.full(num_ranks, NOW["row of others"] * each * (num_ranks - 1))
    np.add.at(found, routes.ranks[routes.moves], size[routes.moves])
    return found, float(routes.moves.mean()) if routes.rows.size else 0.0


def exchange_row(groups: Groups, num_ranks: int, rows: int, dead: float, seeds: int, micro_batch: int) -> list[str]:
    """Return a line of the table of bytes: means over the seeds."""
    found = []
    for seed in range(seeds):
        table = one_step(groups, num_ranks, rows // num_ranks, dead, seed)
        longest = int(np.max(np.asarray(table.prompt_lengths))), int(np.max(np.asarray(table.completion_lengths)))
        budget = default_max_tokens(min(micro_batch, rows // num_ranks), *longest)
        before = BEFORE["prompt token"] * longest[0] + BEFORE["completion token"] * longest[1] + BEFORE["row"]
        numbers = [before * rows * (num_ranks - 1) / num_ranks / 1e6]
        start = time.process_time()
        plan = plan_update(table, num_ranks, budget)
        seconds = time.process_time() - start
        size, moved = received(plan, table, num_ranks)
        numbers += [size.mean() / 1e6, size.max() / 1e6, moved, over_mean(plan.live_per_rank)]
        numbers += [plan.step_tokens, 1e3 * seconds]
        found.append(numbers)
    was, *now = np.mean(found, axis=0)
    return [
        *(f"{num_ranks}", f"{rows // num_ranks}", f"{dead:.0%}", f"{was:,.0f}", f"{now[0]:.2f}", f"{now[1]:.2f}"),
        *(f"{now[2]:.0%}", f"{now[3]:.3f}", f"{now[4]:,.0f}", f"{now[5]:.0f}"),
    ]


def print_table(columns: tuple[str, ...], rows: Iterator[list[str]]) -> None:
    print("| " + " | ".join(columns) + " |")
    print("|" + " ---: |" * len(columns))
    for cells in rows:
        print("| " + " | ".join(cells) + " |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data")
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 64, 512])
    parser.add_argument("--rows-per-rank", type=int, nargs="+", default=[8, 64, 256], help="multiples of 8")
    parser.add_argument("--dead", type=float, nargs="+", default=[0.0, 0.3, 0.62, 0.9])
    parser.add_argument("--micro-batch", type=int, default=8)
    parser.add_argument("--max-completion", type=int, default=512)
    parser.add_argument("--overhead-tokens", type=int, default=DEFAULT_OVERHEAD_TOKENS)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--exchange", action="store_true", help="bytes that ranks receive, in place of balance")
    parser.add_argument("--rows", type=int, default=1024, help="with --exchange: rows of a step over all ranks")
    args = parser.parse_args()
    if any(rows % GROUP or rows < GROUP for rows in args.rows_per_rank):
        parser.error(f"--rows-per-rank must be multiples of {GROUP}; got {args.rows_per_rank}")
    groups = real_groups(data_folder(args.data), args.max_completion)
    if args.exchange:
        long = Groups(groups.prompt, groups.completion * LONGER)
        cases = ((ranks, dead) for ranks in (2, 4, 8, 16, 32, 64, 128, 256, 512) for dead in (0.0, 0.62))
        table = (exchange_row(long, ranks, args.rows, dead, args.seeds, args.micro_batch) for ranks, dead in cases)
        print_table(EXCHANGE_COLUMNS, table)
        return
    more = (args.seeds, args.micro_batch, args.overhead_tokens)
    every = ((ranks, rows, dead) for ranks in args.ranks for rows in args.rows_per_rank for dead in args.dead)
    print_table(COLUMNS, (table_row(groups, *case, *more) for case in every))


if __name__ == "__main__":
    main()
