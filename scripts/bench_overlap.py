"""Overlapped rollouts: a vLLM server on one core, the trainer on the other; the whole step, in one run.

    python scripts/bench_overlap.py                  # two idle cores, about half an hour
    python scripts/bench_overlap.py --tiny           # a check that it runs: three batches of a tiny model

Compared are

    ours, rollout.overlap: 1    against    ours, synchronous    against    stock TRL at its best, synchronous

with the same model, prompts, completion length and sampler correction (`token_truncate`). Stock is
``trl.GRPOTrainer`` itself; only its requests and weights go to the server by our client, since TRL's own needs NCCL.
Its micro-batch is the fastest of ``--micros``, each tried over two batches. A 64th of the vocabulary ends a completion,
so that lengths vary.

A cell ``DEAD:PASSES`` sets how long the update takes compared with the generation: by the number of dead groups in each
batch (all their completions get the same reward) and by the passes over a batch. Both are measured on the synchronous
side, for each batch k: generation g_k, weight sync s_k, the rest u_k. While weights are sent neither side works, so at
best a batch takes max(g_{k+1}, u_k) + s_k. Lengths vary, so this is more than max(g, u) + s of the medians.

The sides take turns ``--rounds`` times; the first two batches of each turn are not counted. Printed are medians, with
the smallest and the largest over the rounds.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from bench_search import micro_batches, stock_at_its_best
from bench_shapes import SHAPES, build
from bench_tables import spread
from datasets import Dataset
from transformers import GenerationConfig, TrainerCallback
from trl import GRPOTrainer
from trl.trainer import grpo_trainer

from grpo_lab import LabConfig, LabTrainer
from grpo_lab.engines.vllm.engine import EngineOptions
from grpo_lab.engines.vllm.server import Server, ServerOptions
from grpo_lab.testing import tiny_tokenizer
from grpo_lab.trainer.generation.trl_engine import engine_class
from grpo_lab.trainer.trl_bridge import replaced

GROUP = 8
SKIPPED = 2


@dataclass
class Times:
    """Seconds of a generation batch, medians over the batches of a turn.

    Attributes:
        batch: all of it.
        generation: the part in which the trainer waits for generation.
        sync: weight sync.
        ideal: what a batch would take if the next one were generated while it is trained on.
    """

    batch: float
    generation: float
    sync: float
    ideal: float

    @staticmethod
    def of(batches: list[float], generations: list[float], syncs: list[float]) -> Times:
        """Return the medians; the three lists have an entry for each batch."""
        rests = [batch - made - sync for batch, made, sync in zip(batches, generations, syncs, strict=True)]
        pairs = zip(rests, generations[1:], syncs)
        ideal = statistics.median(max(rest, next_made) + sync for rest, next_made, sync in pairs)
        return Times(statistics.median(batches), statistics.median(generations), statistics.median(syncs), ideal)


class Clock(TrainerCallback):
    """Callback that notes the seconds of each generation batch, of its generation (as long as the trainer waits for it)
    and of its weight sync. ``passes``: optimizer steps of a batch."""

    def __init__(self, trainer: Any, passes: int) -> None:
        self.passes = passes
        self.batches: list[float] = []
        self.generations: list[float] = []
        self.syncs: list[float] = []
        timed(trainer.vllm_generation, "generate", self.generations)
        timed(trainer.vllm_generation, "sync_weights", self.syncs)
        trainer.add_callback(self)

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step % self.passes == 0:
            self.began = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step % self.passes == 0:
            self.batches.append(time.perf_counter() - self.began)


def timed(owner: Any, name: str, seconds: list[float]) -> None:
    """Make each call of ``owner.name`` append its duration to ``seconds``."""
    inner = getattr(owner, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter()
        try:
            return inner(*args, **kwargs)
        finally:
            seconds.append(time.perf_counter() - start)

    setattr(owner, name, call)


class Reward:
    """Reward: the share of odd tokens; always 1 for the first ``dead`` of the ``prompts`` in each batch."""

    __name__ = "odd_share"

    def __init__(self, dead: int, prompts: int) -> None:
        self.dead = dead
        self.prompts = prompts

    def __call__(self, number: list[int], completion_ids: list[list[int]], **_: Any) -> list[float]:
        odd = [sum(token % 2 for token in ids) / max(len(ids), 1) for ids in completion_ids]
        return [1.0 if n % self.prompts < self.dead else share for n, share in zip(number, odd, strict=True)]


def trainer_of(side: str, folder: str, url: str, dead: int, passes: int, asked: argparse.Namespace, **more: Any) -> Any:
    """Return the trainer of a side (``stock``, ``synchronous``, ``overlapped``), with ``more`` settings beside those of
    all sides."""
    prompts = asked.prompts * asked.batches
    text = ["Tom has " + " and ".join(f"{(n * 7 + i) % 90} apples" for i in range(8)) for n in range(prompts)]
    rows = Dataset.from_dict({"prompt": text, "number": list(range(prompts))})
    settings: dict[str, Any] = {
        "output_dir": f"{folder}/run", "use_vllm": True, "vllm_mode": "server", "vllm_server_base_url": url,
        "vllm_importance_sampling_mode": "token_truncate", "num_generations": GROUP, "shuffle_dataset": False,
        "per_device_train_batch_size": asked.prompts * GROUP, "max_completion_length": asked.tokens,
        "max_steps": asked.batches * passes, "num_iterations": passes,
        "learning_rate": 1e-6, "logging_steps": 1000, "save_strategy": "no",
        "report_to": "none", "use_cpu": True, "bf16": False, "disable_tqdm": True, **more,
    }  # fmt: skip
    settings["rollout"] = {"overlap": int(side == "overlapped")}
    arguments = {
        "train_dataset": rows,
        "processing_class": tiny_tokenizer(),
        "reward_funcs": Reward(dead, asked.prompts),
    }
    args = LabConfig(**settings, objective=None if side == "stock" else "grpo")
    if side != "stock":
        return LabTrainer(model=f"{folder}/model", args=args, **arguments)
    with replaced(grpo_trainer, "VLLMGeneration", engine_class(args.lab_settings.rollout, args)):
        return GRPOTrainer(model=f"{folder}/model", args=args, **arguments)


def seconds(side: str, folder: str, url: str, dead: int, passes: int, asked: argparse.Namespace, **more: Any) -> Times:
    """Train a side once, and return its medians over the batches, without the first ones."""
    trainer = trainer_of(side, folder, url, dead, passes, asked, **more)
    clock = Clock(trainer, passes)
    trainer.train()
    skipped = min(SKIPPED, asked.batches - 2)
    return Times.of(clock.batches[skipped:], clock.generations[skipped:], clock.syncs[skipped:])


def serve(model: Path, log: Path, port: int, context: int = 512) -> Server:
    """Start a vLLM server on the last core, and leave the first one to the trainer. ``context``: most tokens of a
    prompt with its completion."""
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, cores[-1:])
    options = ServerOptions(str(model), port, EngineOptions(kv_cache_gib=0.5, max_model_len=context))
    server = Server(options, log=log, start_timeout=600).start()
    os.sched_setaffinity(0, cores[:1])
    return server


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="10M", choices=["tiny", "10M", "0.5B"])
    parser.add_argument("--prompts", type=int, default=8, help="groups of 8 in a generation batch")
    parser.add_argument("--tokens", type=int, default=128, help="of a completion, at most")
    parser.add_argument("--batches", type=int, default=7, help="generation batches a side")
    parser.add_argument(
        "--cells", nargs="+", default=["7:1", "5:1", "3:1", "0:1", "0:2"], metavar="DEAD:PASSES",
        help="dead groups of each batch, passes over it",
    )  # fmt: skip
    parser.add_argument("--stock", nargs="*", default=["5:1", "0:1"], help="those of them beside stock TRL")
    parser.add_argument("--micros", type=int, nargs="+", default=[8, 16, 32, 64], help="stock's micro-batches to try")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--port", type=int, default=8765, help="of the server")
    parser.add_argument("--tiny", action="store_true", help="a smoke")
    asked = parser.parse_args()
    if asked.tiny:
        asked.shape = "tiny"
        asked.tokens = 16
        asked.batches = 3
        asked.cells = ["5:1"]
        asked.rounds = 1
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        size = build(Path(folder) / "model", asked.shape)
        tiny_tokenizer().save_pretrained(f"{folder}/model")
        words = SHAPES[asked.shape]["vocab_size"]
        GenerationConfig(eos_token_id=list(range(words - words // 64, words))).save_pretrained(f"{folder}/model")
        server = serve(Path(folder) / "model", Path(folder) / "server.log", asked.port)
        try:
            print(
                f"Qwen2 of {size / 1e6:.1f} M parameters, {asked.prompts} x {GROUP} completions, {asked.tokens} tokens"
            )
            print("| dead | passes | side | s a batch | generation | sync | against synchronous | ideal | of ideal |")
            print("|---|---|---|---|---|---|---|---|---|")
            for cell in asked.cells:
                table(cell, folder, server.options.base_url, asked)
        finally:
            server.stop()


def best_of_stock(cell: tuple[int, int], folder: str, url: str, asked: argparse.Namespace) -> dict[str, Any]:
    """Return the settings with which stock's batch is fastest, and print what was tried."""
    short = argparse.Namespace(**{**vars(asked), "batches": 2})

    def batch(**settings: Any) -> float:
        return seconds("stock", folder, url, *cell, short, **settings).batch

    best = stock_at_its_best(micro_batches(asked.prompts * GROUP, asked.micros), batch)
    tried = ", ".join(f"{one['per_device_train_batch_size']} rows {one['s']:.2f} s" for one in best.tries)
    print(f"stock's micro-batch, {cell[0]} dead: {tried}", file=sys.stderr, flush=True)
    return best.settings


def table(cell: str, folder: str, url: str, asked: argparse.Namespace) -> None:
    """Measure a cell, and print a line of the table for each side."""
    dead, passes = map(int, cell.split(":"))
    settings: dict[str, dict[str, Any]] = {"synchronous": {}, "overlapped": {}}
    if cell in asked.stock:
        settings = {"stock": best_of_stock((dead, passes), folder, url, asked), **settings}
    sides = tuple(settings)
    rounds = [
        {side: seconds(side, folder, url, dead, passes, asked, **settings[side]) for side in sides}
        for _ in range(asked.rounds)
    ]
    for side in sides:
        times = [one[side] for one in rounds]
        gains = [one["synchronous"].batch / one[side].batch for one in rounds]
        columns = [spread([one.batch for one in times]), spread([one.generation for one in times])]
        columns += [spread([one.sync for one in times]), spread(gains)]
        if side == "overlapped":
            ideal = [one["synchronous"].ideal for one in rounds]
            columns += [
                spread([one["synchronous"].batch / best for one, best in zip(rounds, ideal, strict=True)]),
                spread([best / one["overlapped"].batch for one, best in zip(rounds, ideal, strict=True)]),
            ]
        else:
            columns += ["", ""]
        print(f"| {dead} of {asked.prompts} | {passes} | {side} | {' | '.join(columns)} |", flush=True)


if __name__ == "__main__":
    main()
