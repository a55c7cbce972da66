"""Stock at its best: the settings that leave stock's result alone and make it fastest, each tried once.

What moves stock's speed and not its result is the micro-batch (TRL pads its rows alike), gradient checkpointing (off in
every benchmark) and Liger's kernels where they are installed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch


@dataclass(frozen=True)
class Best:
    """The fastest settings, and every try with its seconds."""

    settings: dict[str, Any]
    tries: list[dict[str, Any]]


def stock_at_its_best(candidates: Iterable[dict[str, Any]], seconds: Callable[..., float]) -> Best:
    """Try each of ``candidates`` by ``seconds(**settings)``. What runs out of memory takes forever."""
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
    """``rows`` of an optimizer step in micro-batches of each size, as the settings of a transformers trainer."""
    return [
        {"per_device_train_batch_size": micro, "gradient_accumulation_steps": rows // micro}
        for micro in micros
        if rows % micro == 0
    ]


def liger() -> list[dict[str, Any]]:
    """Stock's settings without and, where they are installed, with Liger's kernels."""
    if find_spec("liger_kernel") is None:
        return [{}]
    return [{}, {"use_liger_kernel": True}]
