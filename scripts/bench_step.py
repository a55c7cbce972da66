"""The whole optimizer step, stock TRL against ours: the quick start from its cold start, its time by part.

    python scripts/bench_step.py [--rounds 3] [--steps 8] [--start FOLDER] [--tiny]
    python scripts/bench_step.py --host [--rows 1024]   # what the host does within our update: planning, packing, …

The sides train `recipes/quickstart/dr_grpo.yaml` with the same start, prompts, rewards and settings; TRL's
``loss_type: dr_grpo`` is the same objective as ours. The third side is stock at its best: with the micro-batch that is
the fastest, from 32 completions to all of a step's, each tried once. The sides take turns; the first step of each turn
is not counted.

First all take three steps on the same completions (ours by ``rollout: {generate: stock}``), after which their weights
must agree; else the script fails. In the measured rounds completions differ, and a step costs what its completions
cost. So their mean length and reward are printed beside the seconds of a step, by part, and the quotients.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from bench_search import micro_batches, stock_at_its_best
from bench_tables import spread
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging as hf_logging
from trl import GRPOConfig

from grpo_lab import LabConfig, LabTrainer
from grpo_lab.recipe.data import load_rows
from grpo_lab.recipe.models import load_model
from grpo_lab.recipe.sections import DataSection, ModelSection
from grpo_lab.recipe.yaml import read_yaml
from grpo_lab.rewards import AccuracyReward
from grpo_lab.settings import read
from grpo_lab.trainer.metrics.profile import PARTS, Profile, as_table, by_part, host_table
from grpo_lab.trainer.ranks import RankAwareTrainer, named_place
from grpo_lab.trainer.supervised.methods import cold_start

RECIPE = Path(__file__).resolve().parents[1] / "recipes" / "quickstart" / "dr_grpo.yaml"
SECTIONS = ("name", "model", "data", "cold_start", "evaluation", "rewards", "objective")
#: sizes of stock's micro-batch to try, in completions
MICROS = (32, 64, 128, 256)
#: a tenth of what one step of Adam may move a weight; other gradients than stock's move many by all of it
AGREE = 3.0e-5


class Stock(RankAwareTrainer):
    """TRL's trainer, unchanged but for a name of its loss, by which `Profile` finds the seconds of the update."""

    @named_place("update")
    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        return super().compute_loss(*args, **kwargs)


def started(folder: Path, tiny: bool) -> Path:
    """Return ``folder`` with the quick start's model after its cold start, which is trained if it is not there yet."""
    if (folder / "model.safetensors").is_file():
        return folder
    written = read_yaml(RECIPE)
    model, tokenizer = load_model(read(ModelSection, written["model"], "model"), seed=0)
    arguments = dict(written["cold_start"])
    rows = load_rows(read(DataSection, arguments.pop("data") | ({"n": 640} if tiny else {}), "data"), "data")
    arguments |= {"use_cpu": True, "bf16": False, "disable_tqdm": True} | ({"max_steps": 5} if tiny else {})
    cold_start(model, tokenizer, rows, folder, arguments)
    tokenizer.save_pretrained(folder)
    return folder


def built(trainer_class: type[Any], start: Path, rows: Dataset, **settings: Any) -> Any:
    """Return a trainer of the quick start's RL. ``settings`` go before the recipe's. A ``trainer_class`` of TRL's gets
    the same objective in TRL's settings."""
    written = {name: value for name, value in read_yaml(RECIPE).items() if name not in SECTIONS}
    common = written | {"report_to": "none", "disable_tqdm": True, "top_k": 0} | settings
    args: Any
    if issubclass(trainer_class, LabTrainer):
        args = LabConfig(**common, objective="dr_grpo")
    else:
        common.pop("update", None)
        args = GRPOConfig(**common, loss_type="dr_grpo", scale_rewards="none", beta=0.0)
    reward = AccuracyReward(mode="strict")
    reward(completions=["#### 3x"], solution=["#### 3"])  # starts the reward's worker, which is no part of a step
    return trainer_class(
        model=AutoModelForCausalLM.from_pretrained(start), processing_class=AutoTokenizer.from_pretrained(start),
        reward_funcs=reward, args=args, train_dataset=rows,
    )  # fmt: skip


def trained(kind: str, start: Path, rows: Dataset, steps: int, **more: Any) -> tuple[Any, Profile]:
    """Train ``steps`` steps; return the trainer, and where their time went."""
    with tempfile.TemporaryDirectory() as folder:
        settings = {"output_dir": folder, "max_steps": steps, **more}
        trainer = built(Stock if kind == "stock" else LabTrainer, start, rows, **settings)
        profile = Profile(trainer)
        trainer.add_callback(profile)
        trainer.train()
    return trainer, profile


def training_rows() -> Dataset:
    """Return the recipe's training problems."""
    return load_rows(read(DataSection, read_yaml(RECIPE)["data"], "data"), "data")


def logged(trainer: Any, name: str) -> float:
    """Return the mean of a logged metric over the counted steps."""
    return fmean(line[name] for line in trainer.state.log_history[1:] if name in line)


def host(start: Path, rows: Dataset, options: argparse.Namespace) -> None:
    """Train ours alone, and print where the host's time goes within the update."""
    _, profile = trained("ours", start, rows, options.steps + 1, per_device_train_batch_size=options.rows)
    parts = by_part(profile.seconds, options.steps)
    print(as_table({"ours": parts}, options.steps))
    print(host_table(profile.of_host, parts[PARTS["update"]], options.steps))


def refuse_another_training(start: Path, rows: Dataset, best: dict[str, Any]) -> float:
    """Train stock, stock at its best and ours for three steps on the same completions, and return the largest distance
    of a weight from stock's. Raises SystemExit if it is more than `AGREE`."""
    stock, _ = trained("stock", start, rows, 3)
    stock_at_best, _ = trained("stock", start, rows, 3, **best)
    ours, _ = trained("ours", start, rows, 3, rollout={"generate": "stock"})
    expected = dict(stock.model.named_parameters())
    gap = max(
        float((weight - expected[name]).detach().abs().max())
        for other in (stock_at_best, ours)
        for name, weight in other.model.named_parameters()
    )
    if gap > AGREE:
        raise SystemExit(f"after three steps on the same draws weights differ by {gap:.1e}: not the same training")
    return gap


def compare(start: Path, rows: Dataset, options: argparse.Namespace) -> None:
    """Measure all sides, and print the seconds of a step by part, and the quotients."""

    def seconds(**settings: int) -> float:
        _, profile = trained("stock", start, rows, options.steps + 1, **settings)
        return sum(by_part(profile.seconds, options.steps).values())

    completions = read_yaml(RECIPE)["per_device_train_batch_size"]
    best = stock_at_its_best(micro_batches(completions, MICROS), seconds)
    for one in best.tries:
        print(f"stock in micro-batches of {one['per_device_train_batch_size']}: {one['s']:.3f} s a step")
    gap = refuse_another_training(start, rows, best.settings)
    sides = {"stock TRL": ("stock", {}), "stock at its best": ("stock", best.settings), "ours": ("ours", {})}
    found: dict[str, list[dict[str, float]]] = {name: [] for name in sides}
    said: dict[str, list[tuple[float, float]]] = {name: [] for name in sides}
    for _ in range(options.rounds):
        for name, (kind, settings) in sides.items():
            trainer, profile = trained(kind, start, rows, options.steps + 1, **settings)
            found[name].append(by_part(profile.seconds, options.steps))
            said[name].append((logged(trainer, "completions/mean_length"), logged(trainer, "reward")))
    middle = {name: sorted(runs, key=lambda one: sum(one.values()))[len(runs) // 2] for name, runs in found.items()}
    print(as_table(middle, options.steps))
    whole = {name: [sum(one.values()) for one in runs] for name, runs in found.items()}
    for name, each in whole.items():
        length, reward = (fmean(one[place] for one in said[name]) for place in (0, 1))
        print(f"{name}: {spread(each)} s a step; mean length {length:.1f} tokens, reward {reward:.3f}")
    print(f"weights after three steps on the same draws differ by at most {gap:.1e}; {torch.get_num_threads()} threads")
    for name in ("stock TRL", "stock at its best"):
        ratios = [one / ours for one, ours in zip(whole[name], whole["ours"], strict=True)]
        print(f"whole step, {name} / ours: {spread(ratios)}")


def main() -> None:
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asked.add_argument("--rounds", type=int, default=3)
    asked.add_argument("--steps", type=int, default=8, help="counted ones, a round")
    asked.add_argument("--start", type=Path, default=Path("runs/bench_step/start"))
    asked.add_argument("--tiny", action="store_true", help="a smoke: one round of two steps, hardly a cold start")
    asked.add_argument("--host", action="store_true", help="ours alone, and what its host does within the update")
    asked.add_argument("--rows", type=int, default=1024, help="with --host: completions an optimizer step")
    options = asked.parse_args()
    if options.tiny:
        options.rounds = 1
        options.steps = 2
    hf_logging.set_verbosity_error()
    start = started(options.start, options.tiny)
    rows = training_rows()
    if options.host:
        host(start, rows, options)
    else:
        compare(start, rows, options)


if __name__ == "__main__":
    main()
