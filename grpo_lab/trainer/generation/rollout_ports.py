"""Protocols: what this package uses of trainer and engine.

``RolloutPort`` lists what files that generate early (``rollout.overlap``, ``rollout.cut_after``) use of the trainer,
and ``EnginePort`` what files that talk to a server use of TRL's engine. mypy holds them to it (``pyproject.toml``).
``EngineHooks`` are the functions that the trainer gives to its engine.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

from grpo_lab.engines.weights.adapter import AdapterFiles
from grpo_lab.trainer.ports import Phase, Recorder


@dataclass(frozen=True)
class EngineHooks:
    """Functions that a trainer gives to its engine; the defaults do for an engine without a trainer.

    Args:
        waiting: returns a context for a wait for a server, in which a signal may end the wait.
        synced: called after each weight sync with the number of bytes that were sent.
        on_fault: called with the error for log-probs that are not finite. ``None``: the error is raised.
        prove: compares the weights of a server that came back with the trainer's; called with the prompts of the
            generation that failed.
    """

    waiting: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext
    synced: Callable[[int], None] = lambda moved: None
    on_fault: Callable[[Exception], None] | None = None
    prove: Callable[[list[list[int]]], None] | None = None


class EnginePort(Protocol):
    """TRL's ``VLLMGeneration``, with what ``trl_engine`` adds to it, as far as code that talks to a server uses it."""

    accelerator: Any
    model: Any
    processing_class: Any
    max_completion_length: int | None
    server_base_url: str | None
    server_host: str
    server_port: int
    server_timeout: float
    group_port: int
    #: Client of the server. It is replaced when a lost server is back.
    vllm_client: Any
    #: Largest number of tokens of prompt and completion together.
    context: int
    #: Number of tokens in a page of the engine's cache of keys and values.
    page: int
    adapters: AdapterFiles | None
    hooks: EngineHooks


class RolloutPort(Protocol):
    """The trainer, as far as ``overlap``, ``partial`` and ``read_ahead`` use it; ``LabTrainer`` is one."""

    accelerator: Any
    args: Any
    model: Any
    state: Any
    phase: Phase
    recorder: Recorder
    vllm_generation: EnginePort
    num_generations: int
    max_completion_length: Any
    temperature: float
    is_in_train: bool

    def add_callback(self, callback: Any) -> None: ...
