"""What a run holds, step by step: a callback for ``soak.py`` (and for any recipe: ``callbacks: [{name:
soak_watch:Watch, file: …}]``)."""

from __future__ import annotations

import functools
import gc
import json
import threading
from pathlib import Path
from typing import Any

import psutil
from transformers import TrainerCallback

MIB = 1024**2


class Watch(TrainerCallback):  # type: ignore[misc]
    """A line of JSON every ``every`` optimizer steps: memory of this process and of those it started (MiB),
    descriptors, processes, threads.

    ``python_objects`` are what the garbage collector tracks, counted every tenth line: a leak in Python shows there
    first.
    """

    def __init__(self, file: str, every: int = 5) -> None:
        self.file, self.every, self.lines = Path(file), every, 0

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step % self.every or not state.is_world_process_zero:
            return
        own = psutil.Process()
        row = {"step": state.global_step, "rss": own.memory_info().rss / MIB, "descriptors": own.num_fds()}
        children = own.children(recursive=True)
        row |= {
            "processes": 1 + len(children),
            "threads": threading.active_count(),
            "rss_of_children": memory(children),
        }
        if self.lines % 10 == 0:
            row["python_objects"] = len(gc.get_objects())
        self.lines += 1
        with self.file.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")


def memory(processes: list[psutil.Process]) -> float:
    total = 0
    for process in processes:
        try:
            total += process.memory_info().rss
        except psutil.NoSuchProcess:
            continue
    return total / MIB


def fractions(completions: list[Any], completion_ids: list[list[int]], **_: Any) -> list[float | None]:
    """Work for the pool of verifiers, which a random model's answers are not: two fractions made of each completion,
    equal or not."""
    texts, golds = [], []
    for ids in completion_ids:
        above, below = 1 + sum(ids), 2 + len(ids)  # pairs that were judged are remembered: nearly all of these are new
        texts.append(f"\\boxed{{\\frac{{{3 * above}}}{{{3 * below}}}}}")
        golds.append(f"\\frac{{{above + sum(ids) % 2}}}{{{below}}}")
    scores: list[float | None] = _accuracy()(completions=texts, solution=golds)
    return scores


@functools.cache
def _accuracy() -> Any:
    from grpo_lab.rewards import AccuracyReward
    from grpo_lab.verifiers import math_equality

    # verdicts that are remembered, 65,536 otherwise: full within the warm-up, so that what is filled is not seen as
    # growth
    math_equality._CACHE_LIMIT = 512
    return AccuracyReward(fast_path=False)
