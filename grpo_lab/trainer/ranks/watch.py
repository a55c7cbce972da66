"""Who is missing: a thread on each rank says where the rank is, and names the missing one when the others wait in vain.

half of `ddp_timeout` at one place     a warning on each rank that has been there so long
nine tenths                            again (with NCCL the process is then ended by NCCL's own watchdog)
the end                                ``RankLost`` where torch raises: gloo, and NCCL with ``TORCH_NCCL_BLOCKING_WAIT=1``
"""

from __future__ import annotations

import logging
import threading
import time
from typing import Any

from grpo_lab.trainer.ranks import places
from grpo_lab.trainer.ranks.ledger import Entry, Ledger

logger = logging.getLogger("grpo_lab")

NOTICES = (0.5, 0.9)
#: beats without a word after which a rank counts as gone or stopped
SILENT = 4


class RankWatch:
    """From ``__enter__`` to ``__exit__``, in the thread that trains. With one process: nothing.

    Args:
        trainer: its accelerator says which rank this is, its state which step, its arguments the limit.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self.rank, self.ranks = trainer.accelerator.process_index, trainer.accelerator.num_processes
        self.limit = float(trainer.args.ddp_timeout)
        self.beat = min(10.0, max(0.5, self.limit / 8))
        self._end = threading.Event()
        self._ledger: Ledger | None = None
        self._why_no_ledger = ""

    def __enter__(self) -> RankWatch:
        if self.ranks == 1:
            return self
        self._thread_that_trains = places.this_thread()
        try:
            self._ledger = Ledger(self.rank, self.ranks)
        except (OSError, RuntimeError, ValueError) as failure:
            self._why_no_ledger = str(failure)
        places._told.append(self.told)
        self._thread = threading.Thread(target=self._watch, name="grpo_lab rank watch", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.ranks == 1:
            return
        self._end.set()
        self._thread.join(timeout=2 * self.beat)
        places._told.remove(self.told)

    def told(self, kind: str, said: str) -> str:
        """The message of an error that ended a collective of this rank."""
        here = f"rank {self.rank} of {self.ranks}"
        where = f"at «{places.place()}», step {self._step()}"
        if kind == "late":
            what = f"{here} waited {self.limit:.0f} s {where}, and not all ranks came (`ddp_timeout`)"
            then = (
                "Look at what that rank does there (`py-spy dump --pid …`); where it is only slow, raise `ddp_timeout`"
            )
        else:
            what = f"{here} lost the connection to another rank {where}"
            then = "A rank that ended has its own error in its log, and it comes first"
        self._write()
        return f"{what}. {self.others(lost=kind != 'late')}. {then}. The run goes on from its last checkpoint with --resume. torch says: {said}"

    def others(self, lost: bool = False) -> str:
        """Where the other ranks are, those that are missing first. ``lost``: one of them has ended, and its last word may be older."""
        try:
            if self._ledger is None:
                raise OSError(self._why_no_ledger)
            found = self._ledger.others()
        except (OSError, RuntimeError, ValueError) as failure:
            return f"Where the other ranks are is not known ({failure})"
        missing, apart, waiting = [], [], []
        for rank, entry in found.items():
            if entry is None:
                missing.append(
                    f"Rank {rank} has said nothing: it has not begun to train, or not as grpo_lab.LabTrainer"
                )
            elif (quiet := time.time() - entry.told) > SILENT * self.beat:
                missing.append(f"Rank {rank} was last heard of {quiet:.0f} s ago (ended, or stopped), then at {entry}")
            elif lost and not (entry.waits and entry.place == places.place() and entry.step == self._step()):
                missing.append(f"Rank {rank} was last heard of {quiet:.0f} s ago, then at {entry}")
            elif not entry.waits:
                missing.append(f"Rank {rank} is at {entry}")
            elif entry.place != places.place() or entry.step != self._step():
                apart.append(f"Rank {rank} waits elsewhere, at {entry}")
            else:
                waiting.append(str(rank))
        return ". ".join([*missing, *apart, *([f"At the same place: rank {', '.join(waiting)}"] if waiting else [])])

    # -- the thread --------------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        noticed: tuple[float, float] = (0.0, 0.0)  # since when at this place, the last notice
        while not self._end.wait(self.beat):
            self._write()
            here = places.seconds_here()
            since = time.monotonic() - here
            if since > noticed[0] + 0.1:
                noticed = (since, 0.0)
            due = max((share for share in NOTICES if here >= share * self.limit), default=0.0)
            if due > noticed[1]:
                noticed = (noticed[0], due)
                logger.warning(
                    "rank %d of %d is at %s. %s. Ranks wait %.0f s for each other (`ddp_timeout`)",
                    *(self.rank, self.ranks, self._entry(), self.others(), self.limit),
                )

    def _entry(self) -> Entry:
        line, waits = places.line_of(self._thread_that_trains)
        return Entry.of(places.place(), line, waits, self._step(), places.seconds_here())

    def _write(self) -> None:
        if self._ledger is None:
            return
        try:
            self._ledger.write(self._entry())
        except (OSError, RuntimeError) as failure:  # the store's machine is gone: the others' entries, too
            self._ledger, self._why_no_ledger = None, str(failure)

    def _step(self) -> int:
        return int(self._trainer.state.global_step) + 1


__all__ = ["RankWatch"]
