"""An evaluation in blocks of prompts: each answered, graded and kept on the disk before the next, shared among ranks.

A block's answers follow from its prompts and its seed, not from who makes it or what came before: the result is the
same on any number of ranks, and after a kill.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from grpo_lab.evaluation.result import Kind, Outcome, read_outcome
from grpo_lab.io import json_lines, no_link
from grpo_lab.visible import encodable

KEPT = "answers.{}.jsonl"
"""The finished blocks of a rank, until the result is written."""


def rank_and_ranks() -> tuple[int, int]:
    """As the launcher has numbered them; this rank's device is chosen, too."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return 0, 1
    from accelerate import PartialState

    state = PartialState()
    return state.process_index, state.num_processes


class Blocks:
    """The blocks of an evaluation; those that the same model kept for the same rows and settings are not made again.

    size: completions answered at once; 0: all, by this process alone. folder: where finished blocks are kept; None:
    nowhere. identity: of the model that writes. in_step: ranks generate together, one without a block calls as well.
    """

    def __init__(self, size: int = 0, folder: Path | None = None, identity: Any = None, in_step: bool = False) -> None:
        self.size, self.folder, self.identity, self.in_step = size, folder, identity, in_step
        self.rank, self.ranks = rank_and_ranks() if size else (0, 1)

    def begin(self, settings: Mapping[str, Any], asked: Sequence[Any]) -> None:
        """``asked``: the problems, each with its `prompt`."""
        follows = json.dumps([self.identity, settings, asked], sort_keys=True, default=str)
        self.digest = hashlib.sha256(follows.encode()).hexdigest()
        self.asked, self.found = asked, dict[str, list[Outcome]]()
        for file in sorted(self.folder.glob(KEPT.format("*"))) if self.folder else []:
            self._read(file)
        self._exchange()

    def left(self, kind: Kind, n: int, progress: bool) -> Iterator[tuple[str, int, list[Any]]]:
        """This rank's blocks: name, number of the first problem, problems. Longest prompts first: too large a batch
        shows at once, and not after an hour."""
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
        """A block's outcomes; on the disk as well if they are ``whole``."""
        if name:
            self.found[name] = found
        if name and whole and self.folder is not None:
            self.folder.mkdir(parents=True, exist_ok=True)
            row = {"of": self.digest, "block": name, "outcomes": [encodable(asdict(one)) for one in found]}
            with open(self.folder / KEPT.format(self.rank), "a", encoding="utf-8", opener=no_link) as file:
                file.write(f"\n{json.dumps(row, ensure_ascii=False)}\n")  # a kill may have left half a line before it

    def outcomes(self, kind: Kind, of_all: bool = True) -> list[Outcome]:
        """Those that are there, in the rows' order; ``of_all``: of all ranks, which are waited for."""
        if of_all:
            self._exchange()
        every = [one for name, block in self.found.items() if name.startswith(f"{kind} ") for one in block]
        return sorted(every, key=lambda one: (one.problem, one.sample))

    def _exchange(self) -> None:
        if self.ranks > 1:
            from accelerate.utils import gather_object

            self.found = {name: one for of_rank in gather_object([self.found]) for name, one in of_rank.items()}

    def _read(self, file: Path) -> None:
        """The whole blocks of this evaluation; half a line, and those of another, are made again."""
        for number, row in json_lines(file):
            if isinstance(row, dict) and row.get("of") == self.digest and isinstance(row.get("outcomes"), list):
                block = [read_outcome(one, f"{file}, line {number}: not an outcome:") for one in row["outcomes"]]
                self.found[str(row.get("block"))] = block
