"""The mapping ``rollout``: how completions are made, and what it cannot be combined with."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from grpo_lab.rollouts.engine import EngineOptions
from grpo_lab.trainer.settings.parse import refuse_unknown

WAYS = ("auto", "nccl", "shared_memory")


@dataclass(frozen=True)
class ServerSettings:
    """``rollout.server``: the talk with the server, beside TRL's ``vllm_server_base_url``, ``vllm_server_timeout``, ….

    Args:
        weights: ``auto``: NCCL between two GPUs, else shared memory; or one of the two by name.
        request_timeout: seconds without an answer after which a request counts as failed. A generation is one request: it must
            be longer than the longest generation.
        silence_timeout: seconds without a sign of work after which a wait ends: a generation during which the server counts no
            token or sleeps; any other request.
        retries: how often a failed request is sent again (not after ``request_timeout``).
        backoff: seconds before the second repetition; doubled each time.
    """

    weights: str = "auto"
    request_timeout: float = 1800.0
    silence_timeout: float = 180.0
    retries: int = 4
    backoff: float = 1.0

    def __post_init__(self) -> None:
        if self.weights not in WAYS:
            raise ValueError(f"`rollout.server.weights` is {self.weights!r}; it must be one of {WAYS}")
        for name in ("request_timeout", "silence_timeout", "backoff"):
            if not getattr(self, name) > 0:
                raise ValueError(
                    f"`rollout.server.{name}` is {getattr(self, name)!r}; it must be a number of seconds > 0"
                )
        if self.retries < 0:
            raise ValueError(f"`rollout.server.retries` is {self.retries!r}; it must be ≥ 0")


#: sampling settings of either engine that would override the length limit of a phase, or end it for another reason
_LIMITS = ("max_tokens", "max_new_tokens", "max_length", "stop_strings", "stop", "stop_token_ids", "n")


_CUTS = ("repetition_detection", "max_time")


def check_budget(budget: Any, text: Any) -> None:
    """What can be said about the two settings alone. Raises ``ValueError``."""
    if budget is None:
        if text is not None:
            raise ValueError("`rollout.budget_text` has an effect only with `rollout.thinking_budget`; leave it out")
        return
    if isinstance(budget, bool) or not isinstance(budget, int) or budget < 0:
        raise ValueError(
            f"`rollout.thinking_budget` is {budget!r}; it must be a number of tokens, 0 or more, or null for no budget"
        )
    if text is not None and not isinstance(text, str):
        raise ValueError(f"`rollout.budget_text` is {text!r}; it must be a text that closes the thinking")


def check_thinking(args: Any, settings: RolloutSettings) -> None:
    """What a budget cannot be combined with, as far as the configuration knows. Raises ``ValueError``."""
    budget = settings.thinking_budget
    if budget is None:
        return
    if args.max_completion_length is None:
        raise ValueError(
            f"`rollout.thinking_budget` is {budget} and `max_completion_length` is None: what is left for the answer is the "
            "difference; set it"
        )
    if budget >= args.max_completion_length:
        raise ValueError(
            f"`rollout.thinking_budget` is {budget} and `max_completion_length` is {args.max_completion_length}: the budget, "
            "the inserted text and an answer must fit; lower the one or raise the other"
        )
    if getattr(args, "vllm_structured_outputs_regex", None) is not None:
        raise ValueError(
            "`vllm_structured_outputs_regex` would have to match the thinking and the answer each on its own under "
            "`rollout.thinking_budget`; leave one of them out"
        )
    overriding = [name for name in (*_LIMITS, *_CUTS) if name in (args.generation_kwargs or {})]
    if overriding:
        raise ValueError(
            f"`generation_kwargs.{overriding[0]}` would end the thinking or the answer where `rollout.thinking_budget` cannot "
            "see it; leave one of them out (`max_completion_length` is the limit of a whole completion)"
        )


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
