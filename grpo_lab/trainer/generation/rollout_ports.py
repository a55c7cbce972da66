"""Protocols of this package: what early generation uses of the run, and what talking to a server uses of TRL's engine.
mypy checks the files that take them against these lists (``pyproject.toml``)."""

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
    """Callbacks that a trainer gives to its engine; the defaults are those of an engine without a trainer.

    Args:
        waiting: returns the context around a wait for a server, which a signal may interrupt.
        synced: gets the bytes of the tensors of each sync.
        on_fault: gets the error for log-probs that are not finite; ``None``: it is raised.
        prove: proves the weights of a server that came back, with the prompts of the generation that failed.
    """

    waiting: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext
    synced: Callable[[int], None] = lambda moved: None
    on_fault: Callable[[Exception], None] | None = None
    prove: Callable[[list[list[int]]], None] | None = None


class EnginePort(Protocol):
    """TRL's ``VLLMGeneration`` in server mode, with what ``trl_engine`` adds to it."""

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
    #: Largest number of tokens of prompt and completion together. ``page`` is the size of a page of the cache in
    #: tokens.
    context: int
    page: int
    adapters: AdapterFiles | None
    hooks: EngineHooks


class RolloutPort(Protocol):
    """What ``overlap``, ``partial`` and ``read_ahead`` use of the run; ``LabTrainer`` provides it."""

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
