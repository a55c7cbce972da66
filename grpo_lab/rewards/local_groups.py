"""Finding whole groups among the rows that one process holds, or saying why there are none."""

from __future__ import annotations

import os
from collections.abc import Sequence
from importlib import import_module
from typing import Any

__all__ = ["local_group_sizes"]


def local_group_sizes(prompts: Sequence[Any], num_generations: int | None, name: str) -> list[tuple[int, int]]:
    """``(start, size)`` of each group among local rows, from runs of equal prompts.

    With ``num_generations`` every run must be a multiple of it (the same question may be drawn twice in a row). Without
    it, in a single process, all runs must be equally long and longer than 1: no other reading is safe.
    """
    runs: list[tuple[int, int]] = []
    for row, prompt in enumerate(prompts):
        if runs and prompts[runs[-1][0]] == prompt:
            runs[-1] = (runs[-1][0], runs[-1][1] + 1)
        else:
            runs.append((row, 1))
    lengths = sorted({size for _, size in runs})
    advice = (
        "Stock TRL calls rewards on each process's local rows, so a group that is split over processes reaches its group "
        "reward in pieces. Use grpo_lab.LabTrainer, which gathers first and scores whole groups"
    )
    if num_generations is None:
        processes = _processes()
        if processes > 1:
            raise ValueError(
                f"{name} sees only this process's rows (1 of {processes}) and cannot tell whether its groups are whole. "
                f"{advice}; or give {name} `num_generations`, so that it can check"
            )
        if len(lengths) > 1 or lengths == [1]:
            raise ValueError(
                f"{name} cannot find whole groups: runs of equal prompts have lengths {lengths} (expected one length, > 1; "
                f"give `num_generations` if one prompt can come twice in a row). {advice}"
            )
        return runs
    if any(size % num_generations for size in lengths):
        raise ValueError(
            f"{name} needs whole groups of num_generations={num_generations}, but the local rows hold runs of equal "
            f"prompts of lengths {lengths}. {advice}"
        )
    return [(start + offset, num_generations) for start, size in runs for offset in range(0, size, num_generations)]


def _processes() -> int:
    """How many processes train together, as far as one of them can tell."""
    torch_distributed = import_module("torch.distributed")
    if torch_distributed.is_available() and torch_distributed.is_initialized():
        return int(torch_distributed.get_world_size())
    return int(os.environ.get("WORLD_SIZE", "1"))
