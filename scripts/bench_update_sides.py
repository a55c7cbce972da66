"""The two sides of ``bench_update`` and the floor: fixed rollouts, one timed training run, plain Hugging Face on live
tokens.

Not a command: the benchmarks of the update import it. `run` trains one side on `Rollouts` with a `Watch` on it; `floor`
times the least that an update can do.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import time
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from datasets import Dataset
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, PrinterCallback, TrainerCallback
from trl import GRPOConfig

from grpo_lab import LabConfig, LabTrainer
from grpo_lab.testing import tiny_tokenizer

LENGTHS = json.loads((Path(__file__).parent / "gsm8k_token_lengths.json").read_text())["pairs"]
"""Pairs (tokens of a GSM8K question, tokens of a real model's output)."""
GROUP = 8


@dataclass
class Rollouts:
    """Fixed completions in the place of TRL's generation (its ``rollout_func``): random tokens, with the lengths of
    real prompts and outputs.

    Attributes:
        rows: completions of a generation batch.
        dead: number of groups at the beginning of a batch whose rewards are all the same.
        vocabulary: number of token ids to draw from.
        sampler: model that computes log-probs as an engine would report them; None: none are reported.
        calls: number of generation batches so far.
        group: completions of a prompt.
        period: number of generation batches after which the same ones come again; None: never.
    """

    rows: int
    dead: int
    vocabulary: int
    sampler: torch.nn.Module | None = None
    calls: int = 0
    group: int = GROUP
    period: int | None = None

    def __call__(self, prompts: list[str], trainer: Any) -> dict[str, Any]:
        call = self.calls
        self.calls += 1
        made = [self.row(call, r) for r in range(len(prompts))]
        prompt_ids = [list(p) for p, _ in made]
        completion_ids = [list(c) for _, c in made]
        return {"prompt_ids": prompt_ids, "completion_ids": completion_ids, "logprobs": self._sampler_logps(made)}

    def row(self, call: int, row: int) -> tuple[list[int], list[int]]:
        """Return the token ids of prompt and completion of a row, in generation batch number ``call``."""
        call = call % self.period if self.period else call
        group = call * (self.rows // self.group) + row // self.group
        prompt = LENGTHS[group % len(LENGTHS)][0]
        completion = LENGTHS[(call * self.rows + row * 7 + 13) % len(LENGTHS)][1]
        draw = torch.Generator().manual_seed(1_000_003 * group)
        ids = torch.randint(20, self.vocabulary, (prompt,), generator=draw).tolist()
        draw = torch.Generator().manual_seed(1_000_003 * (call * self.rows + row) + 7)
        return ids, torch.randint(20, self.vocabulary, (completion,), generator=draw).tolist()

    @torch.no_grad()
    def _sampler_logps(self, made: list[tuple[list[int], list[int]]]) -> list[list[float]] | None:
        """Return log-probs as an engine with slightly other arithmetic would report them: the sampler model's, plus a
        small noise."""
        if self.sampler is None:
            return None
        found = []
        for prompt, completion in made:
            ids = torch.tensor([prompt + completion])
            logps = self.sampler(input_ids=ids).logits[0, len(prompt) - 1 : -1].float().log_softmax(-1)
            noise = 0.01 * torch.sin(torch.arange(len(completion), dtype=torch.float))
            found.append((logps.gather(1, ids[0, len(prompt) :, None])[:, 0] + noise).tolist())
        return found


class Watch(TrainerCallback):
    """Callback that notes the seconds of each optimizer step without generation and, if ``keep_gradient``, the first
    gradient, whose copying is timed, too."""

    def __init__(self, keep_gradient: bool = True) -> None:
        self.seconds: list[float] = []
        self.generation = 0.0
        self.keep_gradient = keep_gradient
        self.gradient: torch.Tensor | None = None

    def leaves_out_generation(self, trainer: Any) -> None:
        """Make the trainer's generation count its seconds, so that they are left out."""
        generate = trainer._generate

        def timed_generate(prompts: list[Any]) -> Any:
            began = time.perf_counter()
            out = generate(prompts)
            self.generation += time.perf_counter() - began
            return out

        trainer._generate = timed_generate

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        synchronize()
        self.began = time.perf_counter()
        self.generation = 0.0

    def on_pre_optimizer_step(self, *_: Any, model: Any = None, **__: Any) -> None:
        if self.keep_gradient and self.gradient is None:
            self.gradient = torch.cat([p.grad.detach().reshape(-1).float().cpu() for p in model.parameters()])

    def on_step_end(self, *_: Any, **__: Any) -> None:
        synchronize()
        self.seconds.append(time.perf_counter() - self.began - self.generation)


def synchronize() -> None:
    """Wait until the GPU, if there is one, has finished its work."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def reset_peak() -> None:
    """Give free memory back, and begin to measure its peak anew."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    else:
        ctypes.CDLL("libc.so.6").malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")


def peak_mib() -> float:
    """Return the peak of memory since `reset_peak`, in MiB: of the GPU's or, without one, of the process's resident."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 2**20
    line = next(x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith("VmHWM"))
    return int(line.split()[1]) / 1024


@dataclass
class Side:
    """The measurements of one training run.

    Attributes:
        seconds: of all optimizer steps together, without generation.
        peak: peak of memory in MiB.
        gradient: the first step's, in one row.
        moved: difference of the weights after and before the training, in one row.
        tokens: number of tokens that went through the model, padding included.
        each: seconds of each optimizer step.
        silent: share of rows without a gradient in each step; empty if it is not logged.
    """

    seconds: float
    peak: float
    gradient: torch.Tensor
    moved: torch.Tensor
    tokens: float
    each: list[float]
    silent: list[float]


def run(
    kind: type, folder: Path, args: argparse.Namespace, dead: int, corrected: bool, optim: str, **extra: Any
) -> Side:
    """Train once with a trainer class ``kind``; seed, rollouts and rewards are the same for every kind.

    Args:
        kind: ``GRPOTrainer`` or ``LabTrainer``.
        folder: the model.
        args: options of the command line: rows, micro, steps, gpu, checkpointing.
        dead: number of dead groups.
        corrected: whether log-probs of a sampler are reported and corrected for.
        optim: name of the optimizer.
        extra: further settings; None leaves a setting out.
    """
    gc.collect()
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16 if args.gpu else torch.float32)
    sampler = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32) if corrected else None
    rollouts = Rollouts(args.rows, dead, model.config.vocab_size, sampler)

    watch = Watch()
    chosen = {name: value for name, value in (settings(folder, args, optim) | extra).items() if value is not None}
    trainer = trainer_of(kind, model, rollouts, chosen, watch)
    if corrected:  # log-probs arrive as from vLLM; no engine is needed for what happens after generation
        trainer.use_vllm = True
        trainer._last_loaded_step = -1
        trainer.vllm_generation = SimpleNamespace(sync_weights=lambda: None)
    start = flat(model)
    reset_peak()
    trainer.train()
    peak = peak_mib()
    assert watch.gradient is not None
    tokens = sum(tokens_computed(trainer, rollouts))
    silent = [row["update/silent_share"] for row in trainer.state.log_history if "update/silent_share" in row]
    return Side(sum(watch.seconds), peak, watch.gradient, flat(model) - start, tokens, watch.seconds, silent)


def trainer_of(
    kind: type, model: torch.nn.Module, rollouts: Rollouts, arguments: dict[str, Any], watch: Watch, **more: Any
) -> Any:
    """Return a trainer with fixed rollouts and rewards, and the watch on it. ``arguments``: its settings; ``more``:
    further arguments of its constructor (``peft_config``)."""

    def reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
        return [
            1.0 if r // rollouts.group < rollouts.dead else float(sum(ids) % 2) for r, ids in enumerate(completion_ids)
        ]

    prompts = rollouts.rows // rollouts.group * arguments["max_steps"]
    trainer = kind(
        model=model,
        reward_funcs=reward,
        args=(LabConfig if issubclass(kind, LabTrainer) else GRPOConfig)(**arguments),
        train_dataset=Dataset.from_dict({"prompt": [f"{i}" for i in range(prompts)]}),
        processing_class=tiny_tokenizer(),
        rollout_func=rollouts,
        callbacks=[watch],
        **more,
    )
    trainer.remove_callback(PrinterCallback)
    watch.leaves_out_generation(trainer)
    return trainer


def tokens_computed(trainer: Any, rollouts: Rollouts) -> list[float]:
    """Return the number of tokens of each generation batch that went through the model, padding included. Ours logs
    them; stock computes every row padded to the longest prompt and the longest completion."""
    logged = [row["update/tokens_computed"] for row in trainer.state.log_history if "update/tokens_computed" in row]
    return logged or [float(padded_tokens(rollouts, call)) for call in range(rollouts.calls)]


def settings(folder: Path, args: argparse.Namespace, optim: str) -> dict[str, Any]:
    """Return the settings that all sides share."""
    return {
        "output_dir": str(folder / "out"), "per_device_train_batch_size": args.micro,
        "gradient_accumulation_steps": args.rows // args.micro, "num_generations": GROUP, "max_completion_length": 512,
        "max_steps": args.steps, "learning_rate": 1.0 if optim == "sgd" else 1e-5, "optim": optim,
        "lr_scheduler_type": "constant", "max_grad_norm": 0.0, "loss_type": "dr_grpo", "scale_rewards": "none",
        "logging_steps": 1, "save_strategy": "no", "report_to": "none", "disable_tqdm": True, "use_cpu": not args.gpu,
        "bf16": args.gpu, "gradient_checkpointing": args.checkpointing, "seed": 0,
        "vllm_importance_sampling_mode": "token_truncate",
    }  # fmt: skip


def flat(model: torch.nn.Module) -> torch.Tensor:
    """Return all weights of a model in one row, in float32 on the CPU."""
    return torch.cat([p.detach().reshape(-1).float().cpu() for p in model.parameters()])


def padded_tokens(rollouts: Rollouts, call: int) -> int:
    """Return the number of tokens of a generation batch with all rows padded to the longest prompt and completion."""
    made = [rollouts.row(call, r) for r in range(rollouts.rows)]
    return rollouts.rows * (max(len(p) for p, _ in made) + max(len(c) for _, c in made))


def floor(folder: Path, args: argparse.Namespace, dead: int) -> float:
    """Return the seconds of a plain forward and backward on exactly the live tokens, with the LM head on completion
    tokens only, as ours has it.

    Sequences are joined to rows as long as the longest live one. Positions start anew with each sequence, so that
    attention stays inside of sequences, and hardly any position is padding.
    """
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16 if args.gpu else torch.float32)
    model = model.to("cuda" if args.gpu else "cpu").train()
    rollouts = Rollouts(args.rows, dead, model.config.vocab_size)
    reset_peak()
    total = 0.0
    for call in range(args.steps):
        live = sorted(
            (rollouts.row(call, r) for r in range(dead * GROUP, args.rows)), key=lambda row: -sum(map(len, row))
        )
        batches = packed(live, args.micro * sum(map(len, live[0])) // 2)
        synchronize()
        began = time.perf_counter()
        for ids, positions, targets in batches:
            ids, positions, targets = (x.to(model.device) for x in (ids, positions, targets))
            states = model.model(input_ids=ids, position_ids=positions, use_cache=False).last_hidden_state
            scored = targets != -100
            cross_entropy(model.lm_head(states[scored]).float(), targets[scored], reduction="sum").backward()
        synchronize()
        total += time.perf_counter() - began
        model.zero_grad()
    return total


def packed(live: list[tuple[list[int], list[int]]], budget: int) -> list[tuple[torch.Tensor, ...]]:
    """Join sequences to rows as long as the longest one (first-fit decreasing), and rows to batches of at most
    ``budget`` tokens. ``live`` is sorted, the longest first.

    Returns (ids, positions, targets) of each batch, each ``[rows, tokens]``. A target stands where its token is
    predicted, and −100 elsewhere.
    """
    width = sum(map(len, live[0]))
    rows: list[list[tuple[list[int], list[int]]]] = []
    for sequence in live:
        home = next((row for row in rows if filled(row) + sum(map(len, sequence)) <= width), None)
        if home is None:
            rows.append([sequence])
        else:
            home.append(sequence)
    rows.sort(key=filled, reverse=True)
    count = max(1, budget // width)
    return [laid_out(rows[at : at + count]) for at in range(0, len(rows), count)]


def filled(row: list[tuple[list[int], list[int]]]) -> int:
    """Return the number of tokens in a row of sequences."""
    return sum(len(prompt) + len(completion) for prompt, completion in row)


def laid_out(rows: list[list[tuple[list[int], list[int]]]]) -> tuple[torch.Tensor, ...]:
    """Return (ids, positions, targets) of a batch of rows, padded on the right."""
    longest = max(map(filled, rows))
    columns: tuple[list[list[int]], ...] = ([], [], [])
    for row in rows:
        ids = [i for prompt, completion in row for i in prompt + completion]
        positions = [i for prompt, completion in row for i in range(len(prompt) + len(completion))]
        targets = [t for prompt, completion in row for t in [-100] * (len(prompt) - 1) + completion + [-100]]
        for column, values, fill in zip(columns, (ids, positions, targets), (0, 0, -100), strict=True):
            column.append(values + [fill] * (longest - len(ids)))
    return tuple(torch.tensor(column) for column in columns)
