"""Supervised training: TRL's ``SFTTrainer`` against ours, on the cold starts of three recipes, alternating in one run.

    make bench-supervised                             # three recipes, 100 steps, three times each: 10 minutes
    python scripts/bench_supervised.py --steps 5 --rounds 1 --rows 640

All sides get the same model, rows and settings. The third side is stock at its best: with the micro-batch that is the
fastest, from 8 rows to all of a step's, each tried over a fifth of the steps. Tokenizing and the optimizer steps are
timed each by itself. Printed is a line for each recipe: seconds, their quotients, and two checks. ``gradients``: after
one step of SGD, the largest distance of a side's weights from stock's, over the length of stock's step. ``losses
apart``: the largest difference of a logged loss between stock and ours.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import datasets
import torch
import yaml
from bench_search import micro_batches, stock_at_its_best
from bench_tables import spread, table
from datasets import Dataset
from trl import SFTConfig, SFTTrainer

from grpo_lab.recipe.data import load_rows
from grpo_lab.recipe.models import load_model
from grpo_lab.recipe.sections import ColdStartSection, ModelSection
from grpo_lab.settings import read
from grpo_lab.trainer.supervised.methods import train_by, worked_pairs

RECIPES = ("quickstart/dr_grpo.yaml", "lab/chains/dr_grpo.yaml", "verifiable/countdown.yaml")
MICROS = (8, 16, 32, 64)
ONE_STEP = {
    "max_steps": 1, "optim": "sgd", "warmup_steps": 0, "lr_scheduler_type": "constant", "logging_steps": 1,
    "weight_decay": 0.0, "max_grad_norm": 0.0, "learning_rate": 10.0,
}  # fmt: skip
"""Settings of one step of SGD, so long that the rounding of the weights is negligible beside it."""


@dataclass(frozen=True)
class Side:
    """One training: seconds of tokenizing and of the steps, all weights in one row, and the logged losses."""

    tokens_s: float
    training_s: float
    weights: torch.Tensor
    losses: list[float]


def flat(model: torch.nn.Module) -> torch.Tensor:
    """Return all weights of a model in one row, in float64."""
    return torch.cat([parameter.detach().double().flatten() for parameter in model.parameters()])


def stock(model: Any, tokenizer: Any, rows: Dataset, settings: dict[str, Any]) -> Side:
    """Train by TRL's ``SFTTrainer``, whose constructor tokenizes the rows."""
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        args = SFTConfig(output_dir=folder, **settings)
        trainer = SFTTrainer(model=model, args=args, train_dataset=rows, processing_class=tokenizer)
        ready = time.perf_counter()
        trainer.train()
        done = time.perf_counter()
    return Side(ready - began, done - ready, flat(model), losses_of(trainer))


def ours(model: Any, tokenizer: Any, rows: Dataset, settings: dict[str, Any]) -> Side:
    """Train by our `train_by`."""
    at: list[float] = [time.perf_counter()]
    trainers: list[Any] = []

    def train(trainer: Any) -> None:
        at.append(time.perf_counter())
        trainer.train()
        at.append(time.perf_counter())
        trainers.append(trainer)

    with tempfile.TemporaryDirectory() as folder:
        train_by("sft", model, tokenizer, rows, Path(folder), settings, train=train)
    began, ready, done = at
    return Side(ready - began, done - ready, flat(model), losses_of(trainers[0]))


def losses_of(trainer: Any) -> list[float]:
    """Return all losses that a trainer has logged."""
    return [float(line["loss"]) for line in trainer.state.log_history if "loss" in line]


def compare(name: str, args: argparse.Namespace) -> dict[str, Any]:
    """Measure all sides on a recipe's cold start, and return its row of the table."""
    recipe = yaml.safe_load((Path(__file__).parents[1] / "recipes" / name).read_text())
    written = {**recipe["cold_start"], "data": {**recipe["cold_start"]["data"], "n": args.rows}}
    section = read(ColdStartSection, written, "cold_start")
    model_section = read(ModelSection, recipe["model"], "model")
    rows = Dataset.from_list(worked_pairs(load_rows(section.data)))
    settings = {
        **section.arguments, "max_steps": args.steps, "report_to": "none", "save_strategy": "no", "use_cpu": True,
        "bf16": False, "disable_tqdm": True, "logging_steps": max(1, args.steps // 10),
    }  # fmt: skip

    def side(train: Callable[..., Side], **more: Any) -> Side:
        return train(*load_model(model_section, 0), rows, {**settings, **more})

    def seconds(**micro: int) -> float:
        return side(stock, **micro, max_steps=max(1, args.steps // 5)).training_s

    best = stock_at_its_best(micro_batches(settings["per_device_train_batch_size"], MICROS), seconds)
    ways = {"stock": (stock, {}), "best": (stock, best.settings), "ours": (ours, {})}
    sides: dict[str, list[Side]] = {way: [] for way in ways}
    for _ in range(args.rounds):
        for way, (train, more) in ways.items():
            sides[way].append(side(train, **more))
    start = flat(load_model(model_section, 0)[0])
    after = {way: side(train, **more, **ONE_STEP).weights for way, (train, more) in ways.items()}
    step = after["stock"] - start
    apart = [float((after[way] - after["stock"]).norm() / step.norm()) for way in ("best", "ours")]
    seconds_of = {way: [one.training_s for one in found] for way, found in sides.items()}
    pairs = zip(sides["stock"][0].losses, sides["ours"][0].losses, strict=True)
    return {
        "recipe": name,
        "tokens, stock s": median(one.tokens_s for one in sides["stock"]),
        "tokens, ours s": median(one.tokens_s for one in sides["ours"]),
        "training, stock s": spread(seconds_of["stock"]),
        "stock at its best s": spread(seconds_of["best"]),
        "its micro-batch": best.settings["per_device_train_batch_size"],
        "training, ours s": spread(seconds_of["ours"]),
        "stock / ours": spread(ratios(seconds_of["stock"], seconds_of["ours"])),
        "best stock / ours": spread(ratios(seconds_of["best"], seconds_of["ours"])),
        "gradients": max(apart),
        "losses apart": max(abs(one - two) for one, two in pairs),
    }


def ratios(one: list[float], other: list[float]) -> list[float]:
    """Return the quotients of two lists of seconds, round by round."""
    return [a / b for a, b in zip(one, other, strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipes", nargs="+", default=RECIPES, metavar="RECIPE", help="below recipes/")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--rows", type=int, default=6400)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    datasets.disable_progress_bars()
    print(table([compare(name, args) for name in args.recipes]))


if __name__ == "__main__":
    main()
