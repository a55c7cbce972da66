"""The mapping ``rollout``: how completions are made."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from typing import Annotated, Any, Literal

from pydantic import Field

from grpo_lab.engines.vllm.engine import EngineOptions
from grpo_lab.settings import NULL_IS_DEFAULT, Count, Number, Seconds, must_be, settings

Budget = Annotated[int, Field(ge=0, strict=True), must_be("a number of tokens, 0 or more, or null for no budget")]
Text = Annotated[str, Field(strict=True), must_be("a text that closes the thinking")]
FileName = Annotated[str, Field(strict=True, min_length=1), must_be("the name of a file")]
Gone = Annotated[
    None,
    must_be("left out: whoever runs the server (systemd, Slurm, …) starts it again, and `return_timeout` waits for it"),
]


@settings()
class ServerSettings:
    """``rollout.server``: the talk with the server, beside TRL's ``vllm_server_base_url``, ``vllm_server_timeout``, ….

    Args:
        weights: ``auto``: NCCL between two GPUs, else shared memory; or one of the two by name.
        request_timeout: seconds without an answer after which a request counts as failed. A generation is one request:
            it must be longer than the longest generation.
        silence_timeout: seconds without a sign of work after which a wait ends: a generation during which the server
            counts no token or sleeps; any other request.
        retries: how often a failed request is sent again (not after ``request_timeout``).
        backoff: seconds before the second repetition; doubled each time.
        token_file: file with the server's token; null: ``GRPO_LAB_SERVER_TOKEN`` in the environment, else the file that
            ``grpo-lab serve`` makes for the address. The token itself is never a setting.
        restart: no longer a setting; a recipe that gives a command is refused.
        return_timeout: seconds within which a server that was lost must answer again; null: a lost server ends the run.
    """

    weights: Literal["auto", "nccl", "shared_memory"] = "auto"
    request_timeout: Seconds = 1800.0
    silence_timeout: Seconds = 180.0
    retries: Count = 4
    backoff: Seconds = 1.0
    token_file: FileName | None = None
    restart: Gone = None
    return_timeout: Seconds | None = None


@settings()
class RolloutSettings:
    """``rollout``: how completions are made, beside TRL's ``use_vllm``, ``vllm_mode`` and sampling settings.

    Args:
        verify_every: optimizer steps between proofs of the weight sync, after the first two syncs; 0: never.
        tolerance: largest mean |engine − trainer| in nats per token; ``None``: by dtype (float32 1e-4, float16 0.02,
            bfloat16 0.1).
        engine: options of the engine (``dtype``, ``max_model_len``, ``kv_cache_gib``, ``block_size``, ``seed``, …).
        server: the talk with a server (``weights``, ``request_timeout``, ``retries``, ``backoff``), see
            ``ServerSettings``.
        thinking_budget: tokens of thinking after which ``budget_text`` is inserted; ``None``: no budget (with any
            engine).
        budget_text: what is inserted; ``None``: the text of Qwen's documentation (``QWEN3_STOP_TEXT``).
    """

    verify_every: Count = 50
    tolerance: Number | None = None
    engine: Mapping[str, Any] | None = None
    server: Annotated[ServerSettings, NULL_IS_DEFAULT] = field(default_factory=ServerSettings)
    thinking_budget: Budget | None = None
    budget_text: Text | None = None

    def __post_init__(self) -> None:
        EngineOptions.from_mapping(self.engine or {})
        if self.budget_text is not None and self.thinking_budget is None:
            raise ValueError("`rollout.budget_text` has an effect only with `rollout.thinking_budget`; leave it out")
