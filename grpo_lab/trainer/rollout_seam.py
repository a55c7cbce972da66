"""Where TRL's rollouts are completed by ours: engine options, a sync that is proven, the thinking budget.

TRL builds its engine in ``VLLMGeneration`` and calls ``sync_weights`` and ``generate`` on it. While the trainer is built that
class is replaced by a subclass (``engine_class``) that starts the engine with the recipe's options and, where the engine packs
its weights (the CPU build), pushes weights in a way that reaches all of them. On a GPU TRL's own sync runs unchanged.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.fsdp import FSDPModule
from trl.generation import vllm_generation as trl_vllm

from grpo_lab.rollouts.engine import EngineOptions, engine_factory
from grpo_lab.rollouts.proof import prove_sync, tolerance_for
from grpo_lab.rollouts.sync import needs_repair, push_weights
from grpo_lab.trainer import server_seam
from grpo_lab.trainer.server_client import ServerSettings
from grpo_lab.trainer.settings import refuse_unknown
from grpo_lab.trainer.thinking_seam import check_budget
from grpo_lab.trainer.trl_bridge import replaced

if TYPE_CHECKING:
    from grpo_lab.trainer.lab_trainer import LabTrainer

FIRST_PROOFS = 2
PROBE_PROMPTS = 4


@dataclass(frozen=True)
class RolloutSettings:
    """``rollout``: how completions are made, beside TRL's ``use_vllm``, ``vllm_mode`` and sampling settings.

    Args:
        verify_every: optimizer steps between proofs of the weight sync, after the first two syncs; 0: never.
        tolerance: largest mean |engine − trainer| in nats per token; ``None``: by dtype (float32 1e-4, float16 0.02,
            bfloat16 0.1).
        engine: options of the engine (``dtype``, ``max_model_len``, ``kv_cache_gib``, ``block_size``, ``seed``, …).
        server: the talk with a server (``weights``, ``request_timeout``, ``retries``, ``backoff``), see ``ServerSettings``.
        thinking_budget: tokens of thinking after which ``budget_text`` is inserted; ``None``: no budget (with any engine).
        budget_text: what is inserted; ``None``: the text of Qwen's documentation (``QWEN3_STOP_TEXT``).
    """

    verify_every: int = 50
    tolerance: float | None = None
    engine: Mapping[str, Any] | None = None
    server: Mapping[str, Any] | None = None
    thinking_budget: int | None = None
    budget_text: str | None = None

    def __post_init__(self) -> None:
        if self.verify_every < 0:
            raise ValueError(
                f"`rollout.verify_every` is {self.verify_every}; it must be 0 (never) or a number of steps"
            )
        EngineOptions.from_mapping(self.engine or {})
        self.server_settings()
        check_budget(self.thinking_budget, self.budget_text)

    def server_settings(self) -> ServerSettings:
        refuse_unknown(self.server or {}, [f.name for f in fields(ServerSettings)], "`rollout.server`")
        return ServerSettings(**(self.server or {}))


def rollout_settings(written: Any, use_vllm: bool, vllm_mode: str = "colocate") -> RolloutSettings:
    """Typed settings. Raises ``ValueError`` for unknown keys and for engine settings that would have no effect."""
    if isinstance(written, str):
        written = json.loads(written)
    if written is None:
        return RolloutSettings()
    if not isinstance(written, Mapping):
        raise ValueError(f"`rollout` is {written!r}; it must be a mapping such as {{verify_every: 50}}")
    refuse_unknown(written, [f.name for f in fields(RolloutSettings)], "`rollout`")
    idle = [name for name in ("verify_every", "tolerance", "engine", "server") if name in written]
    if idle and not use_vllm:
        raise ValueError(
            f"`rollout.{idle[0]}` has an effect only with `use_vllm: true`; leave it out or switch vLLM on"
        )
    if "server" in written and vllm_mode != "server":
        raise ValueError(
            f"`rollout.server` has an effect only with `vllm_mode: server`, and it is {vllm_mode!r}: leave it out"
        )
    if "engine" in written and vllm_mode == "server":
        raise ValueError(
            "`rollout.engine` has no effect with `vllm_mode: server`, where the server was started by itself: leave it out "
            "and give these options to `grpo-lab serve` (--dtype, --max-model-len, …)"
        )
    return RolloutSettings(**written)


def engine_class(settings: RolloutSettings) -> Any:
    """``VLLMGeneration`` with our options and, where it is needed, our sync."""

    class LabVLLMGeneration(trl_vllm.VLLMGeneration):  # type: ignore[misc]
        def _init_vllm(self) -> None:
            if self.mode == "server":
                server_seam.connect(self, settings.server_settings())
                return
            options = EngineOptions.from_mapping(settings.engine or {})
            dtype = next(self.model.parameters()).dtype
            with replaced(trl_vllm, "LLM", engine_factory(options, trainer_dtype=dtype)):
                super()._init_vllm()

        def _iter_named_params(self) -> Any:
            put_away(self.model)
            yield from super()._iter_named_params()

        def sync_weights(self) -> None:
            if self.mode == "server":
                server_seam.sync(self, super().sync_weights)
            elif needs_repair(self.llm):
                push_weights(self.llm, self._iter_named_params())
            else:
                super().sync_weights()

        def generate(self, *args: Any, **kwargs: Any) -> Any:
            if self.mode == "server":
                return server_seam.generate(self, super().generate, *args, **kwargs)
            return super().generate(*args, **kwargs)  # GroupedEngine refuses a NaN log-prob

    return LabVLLMGeneration


def put_away(model: Any) -> None:
    """Shard again what FSDP2 left whole after a forward without a backward (the root's parameters, for the proof).

    TRL reads sharded parameters by ``full_tensor()``, which a whole one does not have.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


class SyncProof:
    """Compares the engine with the trainer after the first syncs and then every ``verify_every`` steps."""

    def __init__(self, trainer: LabTrainer, settings: RolloutSettings) -> None:
        self.trainer = trainer
        self.settings = settings
        self._last = -1
        self._done = 0

    def is_due(self) -> bool:
        step = self.trainer.state.global_step
        if self.settings.verify_every == 0 or step == self._last:
            return False
        return self._done < FIRST_PROOFS or step - self._last >= self.settings.verify_every

    def prove(self, prompt_ids: list[list[int]]) -> None:
        """Draw a probe from the engine, log ``rollout/sync_gap``; raise where the engine holds other weights."""
        trainer, generation = self.trainer, self.trainer.vllm_generation
        self._last, self._done = trainer.state.global_step, self._done + 1
        model = trainer.accelerator.unwrap_model(trainer.model)

        def tolerance(engine: torch.dtype) -> float:
            return self.settings.tolerance or tolerance_for(engine, _training_dtype(trainer, model))

        probe = [list(ids) for ids in dict.fromkeys(tuple(ids) for ids in prompt_ids)][:PROBE_PROMPTS]
        was_training = model.training
        model.eval()
        try:
            if generation.mode == "server":
                gap = server_seam.prove(generation, model, probe, tolerance)
            else:
                limit = tolerance(generation.llm.llm_engine.model_config.dtype)
                gap = prove_sync(generation.llm, model, generation._iter_named_params, probe, tolerance=limit)
        finally:
            model.train(was_training)
        book = trainer.metric_book("train")
        book.add_alike("rollout/sync_gap", torch.tensor([gap.mean]), 1)


def _training_dtype(trainer: LabTrainer, model: Any) -> torch.dtype:
    if trainer.args.bf16:
        return torch.bfloat16
    return torch.float16 if trainer.args.fp16 else next(model.parameters()).dtype


__all__ = ["RolloutSettings", "SyncProof", "engine_class", "rollout_settings"]
