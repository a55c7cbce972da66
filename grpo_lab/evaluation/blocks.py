"""Blocks of an evaluation: its prompts in portions that ranks share, each saved to disk when it is graded."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from grpo_lab.evaluation.result import Kind, Outcome, read_outcome
from grpo_lab.io import append_json_line
from grpo_lab.reading import json_lines
from grpo_lab.visible import encodable

KEPT = "answers.{}.jsonl"
"""File of a rank's finished blocks, which it keeps until the result is written."""


def rank_and_ranks() -> tuple[int, int]:
    """Return this rank and the number of ranks, as the launcher has numbered them; select this rank's device, too."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return 0, 1
    from accelerate import PartialState

    state = PartialState()
    return state.process_index, state.num_processes


class Blocks:
    """The blocks of an evaluation. Blocks that the same model saved for the same rows and settings are not made again.

    size: completions answered at once; 0: all, by this process alone. folder: where finished blocks are saved; None:
    nowhere. identity: of the model. in_step: ranks generate together, so one without a block makes an empty call.
    """

    def __init__(self, size: int = 0, folder: Path | None = None, identity: Any = None, in_step: bool = False) -> None:
        self.size = size
        self.folder = folder
        self.identity = identity
        self.in_step = in_step
        self.rank, self.ranks = rank_and_ranks() if size else (0, 1)

    def begin(self, settings: Mapping[str, Any], asked: Sequence[Any]) -> None:
        """Read the saved blocks of this evaluation. ``asked``: the problems, each with its `prompt`."""
        follows = json.dumps([self.identity, settings, asked], sort_keys=True, default=str)
        self.digest = hashlib.sha256(follows.encode()).hexdigest()
        self.asked = asked
        self.found = dict[str, list[Outcome]]()
        for file in sorted(self.folder.glob(KEPT.format("*"))) if self.folder else []:
            self._read(file)
        self._exchange()

    def left(self, kind: Kind, n: int, progress: bool) -> Iterator[tuple[str, int, list[Any]]]:
        """Yield this rank's remaining blocks: name, number of the first problem, problems. The longest prompts come
        first: too large a batch fails at once, and not after an hour."""
        from tqdm.auto import tqdm

        order = sorted(range(len(self.asked)), key=lambda place: -len(self.asked[place].prompt.ids))
        size = max(1, self.size // n) if self.size else len(order)
        left = [start for start in range(0, len(order), size) if f"{kind} {start}" not in self.found]
        own = left[self.rank :: self.ranks]
        silent = not (progress and self.size and self.rank == 0)
        for start in tqdm(own, desc=f"evaluating, {kind}", unit="block", disable=silent):
            yield f"{kind} {start}", start, [self.asked[place] for place in sorted(order[start : start + size])]
        if self.in_step and len(own) * self.ranks < len(left):
            yield "", 0, []

    def keep(self, name: str, found: list[Outcome], whole: bool) -> None:
        """Record a block's outcomes; save them to disk if the block is ``whole``."""
        if name:
            self.found[name] = found
        if name and whole and self.folder is not None:
            self.folder.mkdir(parents=True, exist_ok=True)
            row = {"of": self.digest, "block": name, "outcomes": [encodable(asdict(one)) for one in found]}
            append_json_line(self.folder / KEPT.format(self.rank), row)

    def outcomes(self, kind: Kind, of_all: bool = True) -> list[Outcome]:
        """Return the outcomes so far, in the rows' order; ``of_all``: wait for all ranks, and return theirs too."""
        if of_all:
            self._exchange()
        every = [one for name, block in self.found.items() if name.startswith(f"{kind} ") for one in block]
        return sorted(every, key=lambda one: (one.problem, one.sample))

    def _exchange(self) -> None:
        if self.ranks > 1:
            from accelerate.utils import gather_object

            self.found = {name: one for of_rank in gather_object([self.found]) for name, one in of_rank.items()}

    def _read(self, file: Path) -> None:
        """Read the whole blocks of this evaluation from a file; skip half a line, and blocks of another evaluation."""
        for number, row in json_lines(file):
            if isinstance(row, dict) and row.get("of") == self.digest and isinstance(row.get("outcomes"), list):
                block = [read_outcome(one, f"{file}, line {number}: not an outcome:") for one in row["outcomes"]]
                self.found[str(row.get("block"))] = block
