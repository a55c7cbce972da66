"""Stock at its best: TRL's trainer with the settings that make it fastest and do not change its result.

Three settings change its speed and not its result: the size of a micro-batch (TRL pads all rows alike), gradient
checkpointing (off in every benchmark) and Liger's kernels (if they are installed). A benchmark tries each candidate
once, and compares ours with the fastest. Not a command: the benchmarks import it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch


@dataclass(frozen=True)
class Best:
    """The fastest settings, and the settings of every try, with its seconds under ``s``."""

    settings: dict[str, Any]
    tries: list[dict[str, Any]]


def stock_at_its_best(candidates: Iterable[dict[str, Any]], seconds: Callable[..., float]) -> Best:
    """Try each of ``candidates`` once by ``seconds(**settings)``, and return the fastest. Settings that run out of
    memory count as infinitely slow."""
    tries = []
    for settings in candidates:
        try:
            taken = seconds(**settings)
        except torch.OutOfMemoryError:
            taken = float("inf")
        tries.append({**settings, "s": taken})
    best = min(tries, key=lambda one: one["s"])
    return Best({name: value for name, value in best.items() if name != "s"}, tries)


def micro_batches(rows: int, micros: Iterable[int]) -> list[dict[str, int]]:
    """Return the settings of a transformers trainer that cut the ``rows`` of an optimizer step into micro-batches, for
    each size in ``micros`` that divides them."""
    return [
        {"per_device_train_batch_size": micro, "gradient_accumulation_steps": rows // micro}
        for micro in micros
        if rows % micro == 0
    ]


def liger() -> list[dict[str, Any]]:
    """Return the settings to try about Liger's kernels: without them and, if they are installed, with them."""
    if find_spec("liger_kernel") is None:
        return [{}]
    return [{}, {"use_liger_kernel": True}]
