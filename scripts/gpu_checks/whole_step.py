"""A whole optimizer step, stock and ours: seconds and the share of each part, rollout tokens a second, and the gap
after a weight sync.

Parts: *sync* (weights into the engine), *generate* (completions), *score* (rewards, advantages, and in stock TRL the
forward passes for the importance correction), *update* (everything else between two optimizer steps). Random weights
never end a completion, so all have full length: no padding counts in our favour. A set share of groups is dead. The
first two steps, in which ours also proves the sync (the gap), are not timed.
"""

from __future__ import annotations

import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
from bench_shapes import build
from bench_update_sides import GROUP, synchronize
from datasets import Dataset
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from gpu_checks.runner import Row, Setting
from gpu_checks.update import adapter
from grpo_lab import LabConfig, LabTrainer
from grpo_lab.engines.weights.proof import tolerance_for
from grpo_lab.testing import tiny_tokenizer

GROUPS, DEAD, UNTIMED = 8, 5, 2
PARTS = ("sync", "generate", "score", "update")


class Parts(TrainerCallback):
    """Seconds of every step's parts. What is timed inside another is taken off it."""

    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []

    def watch(self, trainer: Any) -> None:
        wrap(trainer, "_generate_and_score_completions", self, "scored")
        wrap(trainer, "_generate", self, "generated")
        if trainer.use_vllm:
            wrap(trainer.vllm_generation, "sync_weights", self, "sync")

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        synchronize()
        self.began = time.perf_counter()
        self.now = dict.fromkeys(("scored", "generated", "sync"), 0.0)

    def on_step_end(self, *_: Any, **__: Any) -> None:
        synchronize()
        step, now = time.perf_counter() - self.began, self.now
        self.steps.append({
            "step": step, "sync": now["sync"], "generate": now["generated"] - now["sync"],
            "score": now["scored"] - now["generated"], "update": step - now["scored"],
        })  # fmt: skip


def wrap(owner: Any, name: str, parts: Parts, part: str) -> None:
    inner = getattr(owner, name)

    def timed(*args: Any, **kwargs: Any) -> Any:
        synchronize()
        began = time.perf_counter()
        out = inner(*args, **kwargs)
        synchronize()
        parts.now[part] += time.perf_counter() - began
        return out

    setattr(owner, name, timed)


def reward(completion_ids: list[list[int]], number: list[int], **_: Any) -> list[float]:
    """Five of eight groups all right, the others by chance."""
    return [1.0 if n % GROUPS < DEAD else float(sum(ids) % 2) for n, ids in zip(number, completion_ids, strict=True)]


def model_folder(setting: Setting) -> Path:
    """The 0.5B shape with random weights; the tokenizer is the small one of the tests, whose ids are the first of the
    model's."""
    folder = setting.folder / "engine"
    if not folder.exists():
        build(folder, "tiny" if setting.tiny else "0.5B")
        tiny_tokenizer().save_pretrained(folder)
    return folder


def arguments(setting: Setting, engine: bool, sleep: bool) -> dict[str, Any]:
    """The learning rate moves weights by more than bfloat16 rounds away, so that an engine that was not told would
    show."""
    tokens = 16 if setting.tiny else 256 if engine else 64
    vllm = {
        "use_vllm": True, "vllm_mode": "colocate", "vllm_gpu_memory_utilization": 0.3, "vllm_enable_sleep_mode": sleep,
        "vllm_max_model_length": 128 + tokens,
    }  # fmt: skip
    return {
        "output_dir": str(setting.folder / "out"), "per_device_train_batch_size": 16 if setting.tiny else 8,
        "gradient_accumulation_steps": 4 if setting.tiny else 8, "num_generations": GROUP,
        "max_completion_length": tokens, "max_steps": UNTIMED + (1 if setting.tiny else 3), "learning_rate": 1e-4,
        "loss_type": "dr_grpo", "scale_rewards": "none", "logging_steps": 1, "save_strategy": "no", "report_to": "none",
        "disable_tqdm": True, "use_cpu": not setting.gpu, "bf16": setting.gpu, "seed": 0, **(vllm if engine else {}),
    }  # fmt: skip


def run(setting: Setting, kind: Any, *, engine: bool, sleep: bool = False, lora: bool = False) -> tuple[Row, Any]:
    """One training run -> its row and the trainer."""
    settings, parts = arguments(setting, engine, sleep), Parts()
    rows = GROUPS * settings["max_steps"]
    if engine and issubclass(kind, LabTrainer) and setting.tiny:
        settings["rollout"] = {"engine": {"kv_cache_gib": 0.25}}
    trainer = kind(
        model=str(model_folder(setting)),
        reward_funcs=reward,
        args=(LabConfig if issubclass(kind, LabTrainer) else GRPOConfig)(**settings),
        train_dataset=Dataset.from_dict(
            {"prompt": [f"Tom has {n} apples. How many?" for n in range(rows)], "number": list(range(rows))}
        ),
        callbacks=[parts],
        peft_config=adapter() if lora else None,
    )
    parts.watch(trainer)
    trainer.train()
    timed = parts.steps[UNTIMED:]
    found = {name: median(step[name] for step in timed) for name in ("step", *PARTS)}
    made = GROUPS * GROUP * settings["max_completion_length"]
    row: Row = {"side": "ours" if issubclass(kind, LabTrainer) else "stock", "step s": found["step"]}
    row |= {f"{name} s": found[name] for name in PARTS}
    row |= {f"{name} %": 100 * found[name] / found["step"] for name in PARTS}
    return row | {"rollout tokens/s": made / found["generate"]}, trainer


def with_transformers(setting: Setting) -> list[Row]:
    return [
        {"completions": "transformers", **run(setting, kind, engine=False)[0]} for kind in (GRPOTrainer, LabTrainer)
    ]


def stock_engine(setting: Setting) -> list[Row]:
    return [{"completions": "vLLM", **run(setting, GRPOTrainer, engine=True)[0]}]


def our_engine(name: str, **options: bool) -> Any:
    """The section of ours with an engine: the gap after the syncs, in nats a token, beside its tolerance."""

    def section(setting: Setting) -> list[Row]:
        row, trainer = run(setting, LabTrainer, engine=True, **options)
        gaps = [line["rollout/sync_gap"] for line in trainer.state.log_history if "rollout/sync_gap" in line]
        engine = trainer.vllm_generation.llm.llm_engine.model_config.dtype
        limit = tolerance_for(engine, torch.bfloat16 if setting.gpu else torch.float32)
        return [
            {"completions": name, **row, "engine": str(engine).removeprefix("torch."), "sync gap": max(gaps)}
            | {"tolerance": limit, "pass": len(gaps) >= 2 and max(gaps) <= limit}
        ]

    return section
