"""Overlapped rollouts: a vLLM server on one core, the trainer on the other; the whole step, in one run.

    ours, rollout.overlap: 1       against       ours, synchronous       against       stock TRL, synchronous

Same model, prompts, completion length and sampler correction (`token_truncate`). Stock is ``trl.GRPOTrainer`` itself;
its requests and weights take our client's way, since TRL's own needs NCCL. A 64th of the vocabulary ends a completion,
so that lengths vary. How long the update takes beside the generation is set by the dead groups of each batch, whose
completions all get the same reward, and by the passes over it; what that comes to is measured on the synchronous side:
generation g, the rest u; the ideal of overlap is (g + u) / max(g, u). Each side runs once, the first two batches are
left out, medians.

    python scripts/bench_overlap.py                  # two idle cores, about 15 minutes
    python scripts/bench_overlap.py --tiny           # does it run: two batches of a tiny model
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from bench_shapes import SHAPES, build
from datasets import Dataset
from transformers import GenerationConfig, TrainerCallback
from trl import GRPOTrainer
from trl.trainer import grpo_trainer

from grpo_lab import LabConfig, LabTrainer
from grpo_lab.engines.vllm.engine import EngineOptions
from grpo_lab.engines.vllm.server import Server, ServerOptions
from grpo_lab.testing import tiny_tokenizer
from grpo_lab.trainer.generation.engine import engine_class
from grpo_lab.trainer.trl_bridge import replaced

GROUP = 8


class Clock(TrainerCallback):
    """Seconds a generation batch, and those of them that its generation took where the trainer waits for it."""

    def __init__(self, trainer: Any, passes: int) -> None:
        self.passes, self.batches, self.generations = passes, list[float](), list[float]()
        generate = trainer.vllm_generation.generate

        def timed(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return generate(*args, **kwargs)
            finally:
                self.generations.append(time.perf_counter() - start)

        trainer.vllm_generation.generate = timed
        trainer.add_callback(self)

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step % self.passes == 0:
            self.began = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step % self.passes == 0:
            self.batches.append(time.perf_counter() - self.began)


class Reward:
    """Share of odd tokens; of the first ``dead`` prompts of each batch of ``prompts`` always 1."""

    __name__ = "odd_share"

    def __init__(self, dead: int, prompts: int) -> None:
        self.dead, self.prompts = dead, prompts

    def __call__(self, number: list[int], completion_ids: list[list[int]], **_: Any) -> list[float]:
        odd = [sum(token % 2 for token in ids) / max(len(ids), 1) for ids in completion_ids]
        return [1.0 if n % self.prompts < self.dead else share for n, share in zip(number, odd, strict=True)]


def trainer_of(side: str, folder: str, url: str, dead: int, passes: int, asked: argparse.Namespace) -> Any:
    prompts = asked.prompts * asked.batches
    text = ["Tom has " + " and ".join(f"{(n * 7 + i) % 90} apples" for i in range(8)) for n in range(prompts)]
    rows = Dataset.from_dict({"prompt": text, "number": list(range(prompts))})
    settings: dict[str, Any] = {
        "output_dir": f"{folder}/run", "use_vllm": True, "vllm_mode": "server", "vllm_server_base_url": url,
        "vllm_importance_sampling_mode": "token_truncate", "num_generations": GROUP, "shuffle_dataset": False,
        "per_device_train_batch_size": asked.prompts * GROUP, "max_completion_length": asked.tokens,
        "max_steps": asked.batches * passes, "num_iterations": passes,
        "learning_rate": 1e-6, "logging_steps": 1000, "save_strategy": "no",
        "report_to": "none", "use_cpu": True, "bf16": False, "disable_tqdm": True,
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


def seconds(side: str, folder: str, url: str, dead: int, passes: int, asked: argparse.Namespace) -> tuple[float, float]:
    """(a generation batch, its generation) in seconds, medians without the first two."""
    trainer = trainer_of(side, folder, url, dead, passes, asked)
    clock = Clock(trainer, passes)
    trainer.train()
    skipped = min(2, asked.batches - 1)
    return statistics.median(clock.batches[skipped:]), statistics.median(clock.generations[skipped:])


def serve(model: Path, log: Path, port: int, context: int = 512) -> Server:
    """On the last core; the trainer keeps the first. ``context``: tokens of a prompt and its completion."""
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
    parser.add_argument("--port", type=int, default=8765, help="of the server")
    parser.add_argument("--tiny", action="store_true", help="a smoke")
    asked = parser.parse_args()
    if asked.tiny:
        asked.shape, asked.tokens, asked.batches, asked.cells = "tiny", 16, 3, ["5:1"]
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
            print("| dead | passes | side | s a batch | of it generation | against synchronous | ideal | of ideal |")
            print("|---|---|---|---|---|---|---|---|")
            for cell in asked.cells:
                table(cell, folder, server.options.base_url, asked)
        finally:
            server.stop()


def table(cell: str, folder: str, url: str, asked: argparse.Namespace) -> None:
    dead, passes = map(int, cell.split(":"))
    sides = (*(["stock"] if cell in asked.stock else []), "synchronous", "overlapped")
    found = {side: seconds(side, folder, url, dead, passes, asked) for side in sides}
    whole, generation = found["synchronous"]
    ideal = whole / max(generation, whole - generation)
    for side, (batch, waited) in found.items():
        gain = whole / batch
        last = f"{ideal:.2f}x | {gain / ideal:.2f}" if side == "overlapped" else "|"
        shape = f"{dead} of {asked.prompts} | {passes}"
        print(f"| {shape} | {side} | {batch:.2f} | {waited:.2f} | {gain:.2f}x | {last} |", flush=True)


if __name__ == "__main__":
    main()
