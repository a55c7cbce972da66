"""Files of samples, counted without reading them: how many problems they hold, and how many samples a problem."""

from __future__ import annotations

import json
from pathlib import Path


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
