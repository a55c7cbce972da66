"""An evaluation in blocks of prompts: each answered, graded and kept on the disk before the next, shared among ranks.

A block's answers follow from its prompts and its seed, not from who makes it or what came before: the result is the
same on any number of ranks, and after a kill.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from grpo_lab.evaluation.result import Kind, Outcome, read_outcome
from grpo_lab.io import json_lines, no_link
from grpo_lab.visible import encodable

Answered = tuple[list[Outcome], bool]
"""Graded answers, and whether they are only a part: it was asked to stop."""


@dataclass(frozen=True)
class Share:
    """How an evaluation is cut.

    block: completions answered at once; 0: all. folder: where finished blocks are kept (`answers.<rank>.jsonl`); None:
    nowhere. identity: of the model that writes. in_step: ranks generate together, one without a block calls as well.
    """

    block: int = 0
    folder: Path | None = None
    identity: str = ""
    rank: int = 0
    ranks: int = 1
    in_step: bool = False

    def forget(self) -> None:
        """The kept blocks go: their result is written."""
        for file in self.files():
            file.unlink(missing_ok=True)

    def files(self) -> list[Path]:
        """What all ranks kept."""
        return [] if self.folder is None else sorted(self.folder.glob("answers.*.jsonl"))


ALONE = Share()


def digest_of(*parts: Any, **named: Any) -> str:
    """What answers follow from, beside the model."""
    return hashlib.sha256(json.dumps([parts, named], sort_keys=True, default=str).encode()).hexdigest()[:16]


class Blocks:
    """The blocks of one evaluation; those that were kept by the same model, prompts and settings are not made again."""

    def __init__(self, share: Share, digest: str, progress: bool) -> None:
        self.share, self.identity, self.progress = share, f"{digest} {share.identity}", progress
        mine = {name: one for file in share.files() for name, one in self._read(file).items()}
        self.kept = self._of_all(mine)

    def through(
        self, kind: Kind, lengths: Sequence[int], n: int, answered: Callable[[list[int], int], Answered]
    ) -> Answered:
        """All answers of one kind, in the rows' order; ``answered(places, first)`` makes those of a block, whose first
        prompt is the ``first`` of all. Longest prompts first: too large a batch shows at once, and not after an hour.
        """
        from tqdm.auto import tqdm

        share, order = self.share, sorted(range(len(lengths)), key=lambda place: -lengths[place])
        size = max(1, share.block // n) if share.block else len(order)
        starts = [start for start in range(0, len(order), size) if f"{kind} {start}" not in self.kept]
        turns = -(-len(starts) // share.ranks)
        own = starts[share.rank :: share.ranks]
        own += [-1] * (turns - len(own)) if share.in_step else []
        made: dict[str, list[Outcome]] = {}
        silent = not (self.progress and share.block and share.rank == 0)
        for start in tqdm(own, desc=f"evaluating, {kind}", unit="block", disable=silent):
            places = sorted(order[start : start + size]) if start >= 0 else []
            found, stopped = answered(places, max(start, 0))
            if start >= 0:
                made[f"{kind} {start}"] = found
            if stopped:  # others may have ended: nothing is waited for
                return self._all_of(kind, self.kept | made), True
            if start >= 0:
                self._keep(f"{kind} {start}", found)
        self.kept |= self._of_all(made)
        return self._all_of(kind, self.kept), False

    def _of_all(self, mine: dict[str, list[Outcome]]) -> dict[str, list[Outcome]]:
        if self.share.ranks == 1:
            return mine
        from accelerate.utils import gather_object

        return {name: one for of_rank in gather_object([mine]) for name, one in of_rank.items()}

    def _all_of(self, kind: Kind, found: dict[str, list[Outcome]]) -> list[Outcome]:
        every = [one for name, block in found.items() if name.startswith(f"{kind} ") for one in block]
        return sorted(every, key=lambda one: (one.problem, one.sample))

    def _read(self, file: Path) -> dict[str, list[Outcome]]:
        """The whole blocks of this evaluation in ``file``; half a line, and those of another, are made again."""
        found = {}
        for number, row in json_lines(file):
            if isinstance(row, dict) and row.get("of") == self.identity and isinstance(row.get("outcomes"), list):
                block = [read_outcome(one, f"{file}, line {number}: not an outcome:") for one in row["outcomes"]]
                found[str(row.get("block"))] = block
        return found

    def _keep(self, name: str, found: list[Outcome]) -> None:
        if self.share.folder is None:
            return
        self.share.folder.mkdir(parents=True, exist_ok=True)
        row = {"of": self.identity, "block": name, "outcomes": [encodable(asdict(one)) for one in found]}
        place = self.share.folder / f"answers.{self.share.rank}.jsonl"
        with open(place, "a", encoding="utf-8", opener=no_link) as file:
            file.write(f"\n{json.dumps(row, ensure_ascii=False)}\n")  # a kill may have left half a line before it
