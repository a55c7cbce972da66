"""Where every rank is, for the others to read: one short text a rank in the store through which the ranks found each other.

A client of its own: the one of torch's process group may be held by whoever waits in it. Written by a thread every few seconds, read
when something is wrong; a step sends nothing.
"""

from __future__ import annotations

import json
import os
import socket
import time
from dataclasses import asdict, dataclass
from datetime import timedelta

from torch import distributed

#: to connect, and for an answer: the machine of the store may be what was lost
ANSWERS_WITHIN = 5.0


@dataclass(frozen=True)
class Entry:
    """What a rank says of itself. ``seconds``: since when it is there; ``told``: when it said so (its clock, seconds since 1970)."""

    place: str
    line: str
    waits: bool
    step: int
    seconds: float
    pid: int
    host: str
    told: float

    @staticmethod
    def of(place: str, line: str, waits: bool, step: int, seconds: float) -> Entry:
        return Entry(place, line, waits, step, seconds, os.getpid(), socket.gethostname(), time.time())

    def __str__(self) -> str:
        return (
            f"«{self.place}», step {self.step}, for {self.seconds:.0f} s: {self.line} (pid {self.pid} on {self.host})"
        )


class Ledger:
    """The ranks' entries.

    Raises:
        OSError: the launcher named no store. RuntimeError: it does not answer.
    """

    def __init__(self, rank: int, ranks: int) -> None:
        self.rank, self.ranks = rank, ranks
        host, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
        if not host or not port:
            raise OSError("the launcher set no MASTER_ADDR and MASTER_PORT")
        self._store = distributed.TCPStore(
            host, int(port), is_master=False, wait_for_workers=False, timeout=timedelta(seconds=ANSWERS_WITHIN)
        )
        self._of_this_start = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")

    def write(self, entry: Entry) -> None:
        self._store.set(self._key(self.rank), json.dumps(asdict(entry)))

    def others(self) -> dict[int, Entry | None]:
        """By rank; None for one that has said nothing."""
        return {rank: self._read(rank) for rank in range(self.ranks) if rank != self.rank}

    def _read(self, rank: int) -> Entry | None:
        key = self._key(rank)
        return Entry(**json.loads(self._store.get(key))) if self._store.check([key]) else None

    def _key(self, rank: int) -> str:
        return f"grpo_lab/place/{self._of_this_start}/{rank}"


__all__ = ["Entry", "Ledger"]
