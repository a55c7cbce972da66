"""Shared prompts: whole policy updates of stock TRL at its best, ours in bins of rows, and ours with each prompt once.

    python scripts/bench_shared_prompts.py            # idle cores, about 10 minutes
    python scripts/bench_shared_prompts.py --tiny     # a check that it runs: two cells of a tiny model
    python scripts/bench_shared_prompts.py --few-shot ../shared/data   # GSM8K rows behind eight solved ones instead

All sides get the same weights, rewards and fixed rollouts of 8 groups, 5 of them dead (62%). A cell sets the length of
prompts and of completions, which have half to all of that length. Timed is everything of an optimizer step but
generation; the first step is left out, and the sides take turns. Stock takes the micro-batch that is its fastest, each
tried once. The sides of ours are ``update.share_prompts`` ``off``, ``on`` and ``auto``. Printed is a line for each
cell: seconds, their quotients, peak memory, and how far the first gradients are from stock's; above 1e-5 the script
fails.
"""

from __future__ import annotations

import argparse
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
from bench_search import micro_batches, stock_at_its_best
from bench_tables import spread, table
from bench_update_sides import LENGTHS, Rollouts, Watch, peak_mib, reset_peak, trainer_of
from tqdm.auto import tqdm
from transformers import AutoTokenizer, Qwen2Config, Qwen2ForCausalLM
from trl import GRPOTrainer

from grpo_lab import LabTrainer
from grpo_lab.data import load_gsm8k
from grpo_lab.testing import tiny_tokenizer

GROUPS, DEAD, AGREE = 8, 5, 1e-5
SIDES = ("stock", "off", "on", "auto")
MICROS = (2, 4, 8, 16, 32)
#: (tokens of a prompt, most tokens of a completion, completions of a group)
CELLS = ((8, 256, 8), (64, 128, 8), (256, 256, 16), (1024, 128, 8))


@dataclass
class Cell(Rollouts):
    """Rollouts with prompts of one length, and completions of half to all of ``completion`` tokens."""

    prompt: int = 0
    completion: int = 0

    def row(self, call: int, row: int) -> tuple[list[int], list[int]]:
        group, place = divmod(row, self.group)
        length = self.completion - place * (self.completion // 2) // (self.group - 1)
        draw = torch.Generator().manual_seed(1_000 * call + group)
        ids = torch.randint(20, self.vocabulary, (self.prompt,), generator=draw).tolist()
        draw = torch.Generator().manual_seed(1_000_000 + 1_000 * (call * self.rows + row))
        made = torch.randint(20, self.vocabulary, (length,), generator=draw)
        made[0] = 20 + (made[1:].sum() + place) % 2  # the sum's parity is the reward: every other row of a live group
        return ids, made.tolist()


@dataclass
class FewShot(Cell):
    """Rollouts whose prompts are GSM8K's training rows behind eight solved ones, and whose completions have the lengths
    of real outputs.

    Token ids are numbered anew from 20 on, so that the vocabulary is small. With the tokenizer's 151,669 tokens the LM
    head would be nearly all of this small model's work, which it is not in a real model.
    """

    prompts: tuple[list[int], ...] = ()

    def row(self, call: int, row: int) -> tuple[list[int], list[int]]:
        draw = torch.Generator().manual_seed(1_000 * call + row)
        length = LENGTHS[(call * self.rows + row * 7 + 13) % len(LENGTHS)][1] + 1
        made = torch.randint(20, self.vocabulary, (length,), generator=draw).tolist()
        made[0] = 20 + (sum(made[1:]) + row) % 2
        return self.prompts[(call * GROUPS + row // self.group) % len(self.prompts)], made


def few_shot(data: Path) -> FewShot:
    """Return the cell of few-shot prompts, from a folder with ``gsm8k/`` and ``tokenizers/qwen3/``."""
    tokenizer = AutoTokenizer.from_pretrained(data / "tokenizers" / "qwen3")
    rows = load_gsm8k(data / "gsm8k", "train", "harness_gsm8k", shots=8).select(range(4 * GROUPS))
    ids = tokenizer(list(rows["prompt"]))["input_ids"]
    number = {token: place for place, token in enumerate(sorted({token for row in ids for token in row}), start=20)}
    prompts = tuple([number[token] for token in row] for row in ids)
    vocabulary = max(20 + len(number), len(tiny_tokenizer()))
    return FewShot(GROUPS * 8, DEAD, vocabulary, group=8, prompts=prompts, completion=512)


def network(hidden: int, layers: int, vocabulary: int = len(tiny_tokenizer())) -> Any:
    """Return a small Qwen2 with random weights, the same at every call."""
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=vocabulary, hidden_size=hidden, intermediate_size=4 * hidden, num_hidden_layers=layers,
        num_attention_heads=hidden // 32, num_key_value_heads=max(hidden // 64, 1), max_position_embeddings=4096,
    )  # fmt: skip
    return Qwen2ForCausalLM(config)


@dataclass
class Measured:
    """One training: seconds of each counted step, peak of memory in MiB above the start, and the first gradient."""

    seconds: list[float]
    peak: float
    gradient: torch.Tensor


def measured(
    side: str, weights: dict[str, Any], size: tuple[int, int], cell: Cell, steps: int, **more: Any
) -> Measured:
    """Train a side once, for ``steps`` counted steps after a first one. ``size``: hidden size and number of layers;
    ``more``: settings beside those of all sides."""
    model = network(*size, cell.vocabulary)
    model.load_state_dict(weights)
    with tempfile.TemporaryDirectory() as folder:
        arguments: dict[str, Any] = {
            "output_dir": folder, "per_device_train_batch_size": 8, "gradient_accumulation_steps": cell.rows // 8,
            "num_generations": cell.group, "max_completion_length": cell.completion, "max_steps": steps + 1,
            "learning_rate": 1e-5, "lr_scheduler_type": "constant", "max_grad_norm": 0.0, "loss_type": "dr_grpo",
            "scale_rewards": "none", "logging_steps": 1, "save_strategy": "no", "report_to": "none",
            "disable_tqdm": True, "use_cpu": True, "bf16": False, "gradient_checkpointing": False, "seed": 0, **more,
        }  # fmt: skip
        kind = GRPOTrainer if side == "stock" else LabTrainer
        arguments |= {} if side == "stock" else {"update": {"share_prompts": side}}
        watch = Watch()
        trainer = trainer_of(kind, model, cell, arguments, watch)
        reset_peak()
        before = peak_mib()
        trainer.train()
    assert watch.gradient is not None
    return Measured(watch.seconds[1:], peak_mib() - before, watch.gradient)


def line(cell: Cell, size: tuple[int, int], rounds: int, steps: int) -> dict[str, Any]:
    """Measure a cell, and return its row of the table. Raises SystemExit if a side's first gradient is not stock's."""
    weights = network(*size, cell.vocabulary).state_dict()

    def seconds(**micro: int) -> float:
        return median(measured("stock", weights, size, replace(cell), 1, **micro).seconds)

    best = stock_at_its_best(micro_batches(cell.rows, MICROS), seconds)
    found: dict[str, list[Measured]] = {side: [] for side in SIDES}
    for _ in range(rounds):
        for side in SIDES:
            more = best.settings if side == "stock" else {}
            found[side].append(measured(side, weights, size, replace(cell), steps, **more))
    expected = found["stock"][0].gradient
    gaps = [float((runs[0].gradient - expected).norm() / expected.norm()) for runs in found.values()]
    if not max(gaps) < AGREE:
        raise SystemExit(f"gradients differ from stock's by {gaps} ({', '.join(SIDES)}): not the same update")
    taken = {side: [median(one.seconds) for one in runs] for side, runs in found.items()}
    lengths = zip(*map(cell.row, [0] * cell.rows, range(cell.rows)))
    prompt, completion = (round(sum(map(len, parts)) / cell.rows) for parts in lengths)
    if not isinstance(cell, FewShot):
        prompt = cell.prompt
        completion = cell.completion
    row: dict[str, Any] = {"prompt": prompt, "completion": completion, "G": cell.group}
    row["stock's micro-batch"] = best.settings["per_device_train_batch_size"]
    row |= {f"{side}, s": median(seconds) for side, seconds in taken.items()}
    for one, other in (("off", "on"), ("stock", "auto"), ("off", "auto")):
        row[f"{one} / {other}"] = spread([a / b for a, b in zip(taken[one], taken[other], strict=True)])
    row |= {f"{side}, MiB": round(median(one.peak for one in runs)) for side, runs in found.items()}
    return row | {"gradients": max(gaps)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--few-shot", type=Path, metavar="DATA", help="a folder with gsm8k/ and tokenizers/qwen3/")
    parser.add_argument("--cells", nargs="+", metavar="PROMPT:COMPLETION:G", help="these alone")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=2, help="counted ones, a round")
    options = parser.parse_args()
    size = (64, 2) if options.tiny else (128, 4)
    shapes = [(int(p), int(c), int(g)) for p, c, g in (cell.split(":") for cell in options.cells or [])]
    shapes = shapes or list(CELLS)
    cells: list[Cell] = [
        Cell(GROUPS * group, DEAD, len(tiny_tokenizer()), group=group, prompt=prompt, completion=completion)
        for prompt, completion, group in ([(16, 24, 8), (64, 16, 4)] if options.tiny else shapes)
    ]
    cells = [few_shot(options.few_shot)] if options.few_shot else cells
    count = sum(p.numel() for p in network(*size, cells[0].vocabulary).parameters())
    print(f"Qwen2 of {count:,} parameters, {GROUPS} groups, {DEAD} dead, {torch.get_num_threads()} threads\n")
    rounds, steps = (1, 1) if options.tiny else (options.rounds, options.steps)
    rows = []
    for cell in tqdm(cells, desc="cells"):
        rows.append(line(cell, size, rounds, steps))
        print(f"\n{table(rows[-1:])}", flush=True)
    print(f"\n{table(rows)}")


if __name__ == "__main__":
    main()
