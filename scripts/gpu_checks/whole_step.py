"""Sections about a whole optimizer step of stock and of ours: seconds and share of each part, rollout tokens a second,
and the gap of log-probs after a weight sync.

The parts are *sync* (weights into the engine), *generate* (completions), *score* (rewards, advantages, and in stock TRL
the forward passes for the importance correction) and *update* (everything else between two optimizer steps). With an
engine stop tokens end completions, so that their lengths vary as a trained model's do; without one all have full
length. Five of eight groups are dead. The first two steps, in which ours also proves the sync, are not timed.
"""

from __future__ import annotations

import os
import random
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import torch
from bench_shapes import config_of
from bench_update_sides import GROUP, synchronize
from datasets import Dataset
from transformers import Qwen2ForCausalLM, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from gpu_checks.section import Row, Setting, below, faster, verdict
from grpo_lab import LabConfig, LabTrainer
from grpo_lab.engines.weights.proof import tolerance_for
from grpo_lab.testing import tiny_tokenizer

GROUPS, DEAD, UNTIMED = 8, 5, 2
PARTS = ("sync", "generate", "score", "update")
#: with an engine: the model's shape, tokens of a prompt, most tokens of a completion; one token in STOP ends it
SHAPE, PROMPT, TOKENS, STOP = "1.5B", 256, 512, 300


class Parts(TrainerCallback):
    """Callback that notes the seconds of each part of every step. A part that runs inside another does not count in
    it."""

    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []

    def watch(self, trainer: Any) -> None:
        """Time the methods of a trainer that make up the parts."""
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
        step = time.perf_counter() - self.began
        now = self.now
        self.steps.append({
            "step": step, "sync": now["sync"], "generate": now["generated"] - now["sync"],
            "score": now["scored"] - now["generated"], "update": step - now["scored"],
        })  # fmt: skip


def wrap(owner: Any, name: str, parts: Parts, part: str) -> None:
    """Make each call of ``owner.name`` add its seconds to a part of the present step."""
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
    """Reward: 1 for all completions of five of eight groups; for the others the sum of the token ids modulo 2."""
    return [1.0 if n % GROUPS < DEAD else float(sum(ids) % 2) for n, ids in zip(number, completion_ids, strict=True)]


def model_folder(setting: Setting, shape: str) -> Path:
    """Return the folder of a model of the shape with random weights, which is made once for all sections. The tokenizer
    is the small one of the tests; the model has more token ids."""
    folder = setting.folder / f"model-{shape}"
    if not folder.exists():
        partial = Path(tempfile.mkdtemp(dir=setting.folder))
        torch.manual_seed(0)
        with torch.device(setting.device):
            model = Qwen2ForCausalLM(config_of(shape))
        model.to(torch.bfloat16 if setting.gpu else torch.float32).save_pretrained(partial)
        tiny_tokenizer().save_pretrained(partial)
        del model
        if folder.exists():  # another section has made it meanwhile, with the same numbers
            return folder
        os.rename(partial, folder)
    return folder


def prompts(setting: Setting, rows: int, tokens: int) -> Dataset:
    """Return ``rows`` prompts of about ``tokens`` tokens. ``number`` counts them: the reward tells by it which groups
    of a step are dead."""
    more = 0 if setting.tiny else max(tokens - 10, 0)
    texts = [f"Tom has {n} apples." + " apples" * more + " How many?" for n in range(rows)]
    return Dataset.from_dict({"prompt": texts, "number": list(range(rows))})


def stop_tokens(shape: str, every: int) -> list[int]:
    """Return the token ids that end completions: a share 1 / ``every`` of all, so that with random weights each token
    ends a completion with about that probability."""
    words = config_of(shape).vocab_size
    return sorted(random.Random(0).sample(range(words // 2, words), words // every))


def arguments(setting: Setting, engine: bool) -> dict[str, Any]:
    """Return the settings of both sides. The learning rate moves weights by more than bfloat16 rounds away, so that an
    engine that did not get them would show."""
    tokens = 16 if setting.tiny else TOKENS if engine else 64
    shape = "tiny" if setting.tiny else SHAPE
    vllm = {
        "use_vllm": True, "vllm_mode": "colocate", "vllm_gpu_memory_utilization": 0.3,
        "vllm_max_model_length": PROMPT + 64 + tokens,
        "generation_kwargs": {"stop_token_ids": stop_tokens(shape, 16 if setting.tiny else STOP)},
    }  # fmt: skip
    return {
        "output_dir": str(setting.own / "out"), "per_device_train_batch_size": 16 if setting.tiny else 8,
        "gradient_accumulation_steps": 4 if setting.tiny else 8, "num_generations": GROUP,
        "max_completion_length": tokens, "max_steps": UNTIMED + (1 if setting.tiny else 3), "learning_rate": 1e-4,
        "loss_type": "dr_grpo", "scale_rewards": "none", "logging_steps": 1, "save_strategy": "no", "report_to": "none",
        "disable_tqdm": True, "use_cpu": not setting.gpu, "bf16": setting.gpu, "seed": 0, **(vllm if engine else {}),
    }  # fmt: skip


def run(setting: Setting, kind: Any, *, engine: bool) -> tuple[Row, Any]:
    """Train once with a trainer class; return its row, with medians of the timed steps, and the trainer."""
    trainer = trainer_of(setting, kind, engine)
    parts = Parts()
    trainer.add_callback(parts)
    parts.watch(trainer)
    trainer.train()
    timed = parts.steps[UNTIMED:]
    found = {name: median(step[name] for step in timed) for name in ("step", *PARTS)}
    lengths = [row["completions/mean_length"] for row in trainer.state.log_history if "completions/mean_length" in row]
    made = GROUPS * GROUP * median(lengths[UNTIMED:])
    row: Row = {"side": "ours" if issubclass(kind, LabTrainer) else "stock", "step s": found["step"]}
    row |= {f"{name} s": found[name] for name in PARTS}
    row |= {f"{name} %": 100 * found[name] / found["step"] for name in PARTS}
    return row | {"mean tokens": median(lengths[UNTIMED:]), "rollout tokens/s": made / found["generate"]}, trainer


def trainer_of(setting: Setting, kind: Any, engine: bool) -> Any:
    settings = arguments(setting, engine)
    shape = "tiny" if setting.tiny else SHAPE if engine else "0.5B"
    ours = issubclass(kind, LabTrainer)
    if engine and ours and setting.tiny:
        settings["rollout"] = {"engine": {"kv_cache_gib": 0.25}}
    return kind(
        model=str(model_folder(setting, shape)),
        reward_funcs=reward,
        args=(LabConfig if ours else GRPOConfig)(**settings),
        train_dataset=prompts(setting, GROUPS * settings["max_steps"], PROMPT if engine else 0),
    )


def with_transformers(setting: Setting) -> Iterator[Row]:
    """Compare a step of the 0.5B shape without an engine, with 64 tokens a completion."""
    stock, _ = run(setting, GRPOTrainer, engine=False)
    yield stock
    ours, _ = run(setting, LabTrainer, engine=False)
    yield faster(
        setting, "whole step with transformers' generate, stock over ours", stock["step s"], ours["step s"], **ours
    )
    yield faster(setting, "its update, stock over ours", stock["update s"], ours["update s"])


def stock(setting: Setting) -> Iterator[Row]:
    """Measure a step of stock TRL with an engine."""
    yield measured(run(setting, GRPOTrainer, engine=True)[0])


def ours(setting: Setting) -> Iterator[Row]:
    """Measure a step of ours with an engine, and check the gap of log-probs after the syncs, in nats a token."""
    row, trainer = run(setting, LabTrainer, engine=True)
    gaps = [line["rollout/sync_gap"] for line in trainer.state.log_history if "rollout/sync_gap" in line]
    engine = trainer.vllm_generation.llm.llm_engine.model_config.dtype
    limit = tolerance_for(engine, torch.bfloat16 if setting.gpu else torch.float32)
    yield measured(row)
    yield below("gap of the engine's log-probs after a sync, nats a token", max(gaps), limit, syncs=len(gaps))


def measured(row: Row) -> Row:
    """Return a row as a verdict that is not judged."""
    return verdict(f"seconds of a whole step with vLLM, {row['side']}", row["step s"], **row)


def stock_built(setting: Setting) -> Iterator[Row]:
    """Check settings, model and rows alone, on a machine where stock TRL cannot sync weights into the engine."""
    GRPOConfig(**arguments(setting, engine=True))
    model_folder(setting, "tiny")
    yield verdict("its settings are accepted, prompts are made", len(prompts(setting, GROUPS, PROMPT)))
