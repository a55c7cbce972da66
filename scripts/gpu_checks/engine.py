"""Sections about an engine in the trainer's process, one for each kind of engine: some steps are trained, every sync of
weights is proven, and what is special in that kind is checked.

Engines have no captured graphs here (``enforce_eager``), which halves the time of their start; those of the timed
sections have. The KV cache has a fixed size in bytes: an engine that measured the free memory would count what the
engines beside it use.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from gpu_checks.section import Row, Setting, below, verdict
from gpu_checks.update import adapter
from gpu_checks.whole_step import GROUPS, model_folder, prompts, reward, stop_tokens
from grpo_lab import LabConfig, LabTrainer
from grpo_lab.engines.weights.proof import tolerance_for

GROUP = 8


@dataclass(frozen=True)
class Kind:
    """A kind of engine, and how it is checked.

    Attributes:
        shape: shape of the model on a GPU.
        tokens, tiny_tokens: most tokens of a completion, and in the tiny form.
        settings, rollout, engine: further settings of the trainer, of ``rollout`` and of ``rollout.engine``.
        lora: whether an adapter is trained.
        stop: a token in so many ends a completion; 0: completions have full length.
        steps: optimizer steps.
        half: whether training is in bfloat16 on a GPU.
        looks: returns further verdicts from the trainer after its steps.
    """

    shape: str = "small"
    tokens: int = 64
    tiny_tokens: int = 8
    settings: dict[str, Any] = field(default_factory=dict)
    rollout: dict[str, Any] = field(default_factory=dict)
    engine: dict[str, Any] = field(default_factory=dict)
    lora: bool = False
    stop: int = 0
    steps: int = 3
    half: bool = True
    looks: Callable[[Any], Iterator[Row]] = lambda trainer: iter(())


def lengths_vary(trainer: Any) -> Iterator[Row]:
    """Check that stop tokens end completions: their mean length is well below the longest."""
    means = logged(trainer, "completions/mean_length")
    longest = trainer.args.max_completion_length
    asked = f"mean completion length, of {longest} at most, where stop tokens end completions"
    yield verdict(asked, means[-1], f"< {0.8 * longest:.0f}", 1 <= means[-1] < 0.8 * longest)


def adapter_alone(trainer: Any) -> Iterator[Row]:
    """Check that a sync sends no more than the adapter."""
    trained = sum(weight.numel() * 4 for name, weight in trainer.model.named_parameters() if "lora_" in name)
    yield below("bytes of a sync, against the adapter's in float32", logged(trainer, "rollout/sync_bytes")[-1], trained)


def several_policies(trainer: Any) -> Iterator[Row]:
    """Check that completions that were cut are continued by the next policy."""
    segments = max(logged(trainer, "rollout/segments"))
    yield verdict("policies a completion, where completions are cut and gone on with", segments, "> 1", segments > 1)
    yield verdict("groups left waiting at the end", logged(trainer, "rollout/waiting")[-1])


KINDS = {
    "lengths": Kind("0.5B", tokens=256, tiny_tokens=24, stop=100, looks=lengths_vary),
    "adapter": Kind("0.5B", steps=2, rollout={"sync": "adapter"}, lora=True, looks=adapter_alone),  # 21 s a step
    "merged": Kind(lora=True),
    "partial": Kind(steps=6, rollout={"cut_after": 24}, looks=several_policies),
    "float32": Kind(engine={"dtype": "float32"}, half=False),
    "sleep": Kind(settings={"vllm_enable_sleep_mode": True}),
}


def section(setting: Setting, kind: str) -> Iterator[Row]:
    """Train some steps with every sync proven, and check what is special in the kind."""
    chosen = KINDS[kind]
    trainer = trainer_of(setting, kind)
    engine = trainer.vllm_generation.llm.llm_engine.model_config.dtype
    trainer.train()
    training = torch.bfloat16 if setting.gpu and chosen.half else torch.float32
    limit = tolerance_for(engine, training, on_gpu=setting.gpu)
    gaps = logged(trainer, "rollout/sync_gap")
    asked = "gap of the engine's log-probs after a sync, nats a token, largest of all syncs"
    yield below(asked, max(gaps), limit, syncs=len(gaps), engine=str(engine).removeprefix("torch."))
    sampled = max(logged(trainer, "sampling/sampling_logp_difference/mean"))
    if "cut_after" not in chosen.rollout:  # there tokens are of older policies
        yield below("gap of the log-probs of what was sampled and trained on", sampled, limit)
    yield from chosen.looks(trainer)


def built(setting: Setting, kind: str) -> Iterator[Row]:
    """Check model and settings alone, on a machine that cannot have this kind of engine."""
    settings = arguments(setting, kind)
    model_folder(setting, "tiny")
    LabConfig(**settings)
    yield verdict("its settings are accepted", "yes")


def trainer_of(setting: Setting, kind: str) -> Any:
    settings = arguments(setting, kind)
    return LabTrainer(
        model=str(model_folder(setting, shape_of(setting, kind))),
        reward_funcs=reward,
        args=LabConfig(**settings),
        train_dataset=prompts(setting, GROUPS * settings["max_steps"], 64),
        peft_config=adapter() if KINDS[kind].lora else None,
    )


def shape_of(setting: Setting, kind: str) -> str:
    return "tiny" if setting.tiny else KINDS[kind].shape


def arguments(setting: Setting, kind: str) -> dict[str, Any]:
    """Return the trainer's settings. The learning rate moves weights by more than bfloat16 rounds away, so that an
    engine that did not get them would show."""
    chosen = KINDS[kind]
    tokens = chosen.tiny_tokens if setting.tiny else chosen.tokens
    cut = {"cut_after": max(tokens // 3, 1)} if "cut_after" in chosen.rollout else {}
    engine = {"kv_cache_gib": 0.25 if setting.tiny else 1.0, "max_model_len": 128 + tokens, "enforce_eager": True}
    settings: dict[str, Any] = {
        "output_dir": str(setting.own / "out"), "objective": "dr_grpo", "num_generations": GROUP,
        "per_device_train_batch_size": GROUPS * GROUP, "max_completion_length": tokens,
        "max_steps": chosen.steps, "learning_rate": 1e-4, "use_vllm": True,
        "vllm_mode": "colocate", "vllm_gpu_memory_utilization": 0.05,
        "rollout": {"verify_every": 1, "engine": engine | chosen.engine, **chosen.rollout, **cut},
        "logging_steps": 1, "save_strategy": "no", "report_to": "none", "disable_tqdm": True,
        "use_cpu": not setting.gpu, "bf16": setting.gpu and chosen.half, "seed": 0,
    }  # fmt: skip
    if chosen.stop:
        settings["generation_kwargs"] = {
            "stop_token_ids": stop_tokens(shape_of(setting, kind), 8 if setting.tiny else chosen.stop)
        }
    return settings | chosen.settings


def logged(trainer: Any, name: str) -> list[float]:
    """Return all logged values of a metric."""
    return [row[name] for row in trainer.state.log_history if name in row]
