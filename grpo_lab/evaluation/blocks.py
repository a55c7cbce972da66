"""Blocks of an evaluation: its prompts in portions that ranks share, each saved to disk when it is graded."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from grpo_lab.evaluation.outcomes import Kind, Outcome, read_outcome
from grpo_lab.io import append_json_line
from grpo_lab.reading import json_lines
from grpo_lab.visible import encodable

KEPT = "answers.{}.jsonl"
"""Name of the file with a rank's finished blocks; it is kept until the result is written."""


def rank_and_ranks() -> tuple[int, int]:
    """Return this process's rank and the number of ranks, as the launcher numbers them. With several, accelerate
    selects this rank's device."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return 0, 1
    from accelerate import PartialState

    state = PartialState()
    return state.process_index, state.num_processes


class Blocks:
    """The blocks of an evaluation: portions of its prompts, which ranks share and save to disk.

    An evaluation calls `begin`, then for each pass `left`, and `keep` for each block of it, and `outcomes` at the end
    of the pass. A block that was saved for the same model, rows and settings is read and not made again.

    Args:
        size: completions of a block; 0: one block has all prompts, and each process makes it alone.
        folder: where finished blocks are saved; None: nowhere.
        identity: what tells the model from others, anything that JSON can hold.
        in_step: ranks must call the generator equally often, as with weights that are sharded over them. A rank without
            a block in the last turn then makes an empty call.
    """

    def __init__(self, size: int = 0, folder: Path | None = None, identity: Any = None, in_step: bool = False) -> None:
        self.size = size
        self.folder = folder
        self.identity = identity
        self.in_step = in_step
        self.rank, self.ranks = rank_and_ranks() if size else (0, 1)

    def begin(self, settings: Mapping[str, Any], asked: Sequence[Any]) -> None:
        """Begin an evaluation with these ``settings``: read its saved blocks, and exchange them with the other ranks.
        ``asked``: the problems, each with its `prompt`."""
        # `default=str` writes a problem's repr, so the name and the fields of its class are part of the digest.
        answers_depend_on = json.dumps([self.identity, settings, asked], sort_keys=True, default=str)
        self.digest = hashlib.sha256(answers_depend_on.encode()).hexdigest()
        self.asked = asked
        self.found = dict[str, list[Outcome]]()
        for file in sorted(self.folder.glob(KEPT.format("*"))) if self.folder else []:
            self._read(file)
        self._exchange()

    def left(self, kind: Kind, n: int, progress: bool) -> Iterator[tuple[str, int, list[Any]]]:
        """Yield the blocks of a pass that this rank has to make: name, first, problems.

        The longest prompts come first, so that a batch that is too large fails at once and not after an hour. ``first``
        is the place of the block's first problem in this order; the block's seed follows from it. An empty call
        (``in_step``) has no name and no problems.

        Args:
            kind: the pass.
            n: completions of a problem.
            progress: show a progress bar, on the first rank; there is none if one block has all prompts.
        """
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
        """Keep a block's outcomes, and save them to disk if the block is ``whole``."""
        if name:
            self.found[name] = found
        if name and whole and self.folder is not None:
            self.folder.mkdir(parents=True, exist_ok=True)
            row = {"of": self.digest, "block": name, "outcomes": [encodable(asdict(one)) for one in found]}
            append_json_line(self.folder / KEPT.format(self.rank), row)

    def outcomes(self, kind: Kind, of_all: bool = True) -> list[Outcome]:
        """Return the outcomes of a pass so far, in the order of the rows. ``of_all``: wait for all ranks, and include
        theirs."""
        if of_all:
            self._exchange()
        every = [one for name, block in self.found.items() if name.startswith(f"{kind} ") for one in block]
        return sorted(every, key=lambda one: (one.problem, one.sample))

    def _exchange(self) -> None:
        """Give every rank the blocks of all ranks."""
        if self.ranks > 1:
            from accelerate.utils import gather_object

            self.found = {name: one for of_rank in gather_object([self.found]) for name, one in of_rank.items()}

    def _read(self, file: Path) -> None:
        """Read this evaluation's blocks from a file. A line that was cut off, or a block of another evaluation, is
        skipped."""
        for number, row in json_lines(file):
            if isinstance(row, dict) and row.get("of") == self.digest and isinstance(row.get("outcomes"), list):
                block = [read_outcome(one, f"{file}, line {number}: not an outcome:") for one in row["outcomes"]]
                self.found[str(row.get("block"))] = block
