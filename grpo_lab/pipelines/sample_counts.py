"""Files of samples, counted without reading them: how many problems they hold, and how many samples a problem."""

from __future__ import annotations

import json
import os
from pathlib import Path

from grpo_lab.io import no_link


def problems_in(file: Path) -> int:
    """How many problems a file of samples holds: its whole lines after the header."""
    return max(0, file.read_bytes().count(b"\n") - 1) if file.is_file() else 0


def refuse_other_count(file: Path, n: int, setting: str, instead: str) -> None:
    """ValueError where ``file`` holds another number of samples a problem than ``setting`` asks for; before a model is loaded."""
    if not file.is_file():
        return
    with file.open("rb") as lines:
        first = lines.readline()
    try:
        there = json.loads(first)["n"]
    except (ValueError, KeyError, TypeError):
        return  # torn or of somebody else: said where the samples are read
    if there != n:
        raise ValueError(f"`{setting}` is {n} and {file} holds {there} samples a problem; {instead}")


def trim_to_whole_batches(file: Path, size: int) -> None:
    """Keep the header and the first whole batches of ``size`` problems. The problems of a batch share one stream of random numbers:
    a batch of which a kill left a part is drawn again as a whole, or its rest would be drawn from another stream.
    """
    if not file.is_file():
        return
    lines = file.read_bytes().splitlines(keepends=True)
    whole = [line for line in lines if line.endswith(b"\n")]
    kept = whole[: 1 + (len(whole) - 1) // size * size] if whole else []
    with open(file, "r+b", opener=no_link) as opened:
        opened.truncate(sum(len(line) for line in kept))
        os.fsync(opened.fileno())
