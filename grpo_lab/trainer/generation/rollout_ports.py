"""Ports of this room: what generation ahead of its turn asks of the run, and what the talk with a server asks of TRL's
engine. mypy holds the files that take them to these lists (``pyproject.toml``)."""

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
    """Callbacks of a trainer for the events of its engine; the defaults are those of an engine that nobody trains with.

    Args:
        waiting: context around a wait for a server, which a signal may break off.
        synced: is given the bytes of tensors of each sync.
        on_fault: is given the fault of log-probs that are not finite; ``None``: it is raised.
        prove: proves the weights of a server that came back, by the prompts of the generation that failed.
    """

    waiting: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext
    synced: Callable[[int], None] = lambda moved: None
    on_fault: Callable[[Exception], None] | None = None
    prove: Callable[[list[list[int]]], None] | None = None


class EnginePort(Protocol):
    """TRL's ``VLLMGeneration``, as ``trl_engine`` completes it, in server mode."""

    accelerator: Any
    model: Any
    processing_class: Any
    max_completion_length: int | None
    server_base_url: str | None
    server_host: str
    server_port: int
    server_timeout: float
    group_port: int
    #: the client of the server; another one where the server was lost and is back
    vllm_client: Any
    #: tokens of prompt and completion together that the engine takes, and of a page of its cache
    context: int
    page: int
    adapters: AdapterFiles | None
    hooks: EngineHooks


class RolloutPort(Protocol):
    """The run, for ``overlap``, ``partial`` and ``read_ahead``; ``LabTrainer`` is one."""

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
