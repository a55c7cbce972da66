"""Who is missing: a thread on each rank says where the rank is, and names the missing one when the others wait in vain.

half of `ddp_timeout` at one place     a warning on each rank that has been there so long
nine tenths                            again (with NCCL the process is then ended by NCCL's own watchdog)
the end                                ``RankLost`` where torch raises: gloo, and NCCL with ``TORCH_NCCL_BLOCKING_WAIT=1``

Where every rank is, for the others to read: one short text a rank in the store through which the ranks found each other.

A client of its own: the one of torch's process group may be held by whoever waits in it. Written by a thread every few seconds, read
when something is wrong; a step sends nothing.

``ddp_timeout`` on CPU ranks, too: transformers 5.17 hands it to torch where there is an accelerator and nowhere else.

TRL's trainer with a name for each part of a step, so that a rank which waits in vain can say where, and for whom.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import threading
import time
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

from torch import distributed
from torch.distributed import distributed_c10d
from trl import GRPOTrainer

from grpo_lab.finite import NumbersError, not_finite_scores
from grpo_lab.trainer.ranks import places
from grpo_lab.trainer.ranks.places import at

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


def hold_time_limit(args: Any) -> None:
    """Let ``args.ddp_timeout`` be the limit of gloo's collectives; accelerators' have it from transformers.

    Raises:
        ValueError: a limit that is no positive number of seconds.
    """
    if not isinstance(args.ddp_timeout, (int, float)) or args.ddp_timeout <= 0:
        raise ValueError(
            f"`ddp_timeout` is {args.ddp_timeout!r}; it must be a positive number of seconds (how long ranks wait for each other)"
        )
    if distributed.is_available() and distributed.is_initialized() and distributed.get_backend() == "gloo":
        distributed_c10d._set_pg_timeout(args.ddp_timeout_delta)


class RankAwareTrainer(GRPOTrainer):
    """``GRPOTrainer``; what it does and returns is unchanged. Raises ``NumbersError`` for torch's word on scores that are not finite."""

    def train(self, *args: Any, **kwargs: Any) -> Any:
        with RankWatch(self), at("training"):
            return super().train(*args, **kwargs)

    @at("step")
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        return super().training_step(*args, **kwargs)

    @at("generation")
    def _generate(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return super()._generate(*args, **kwargs)
        except RuntimeError as error:
            if "probability tensor" not in str(error):
                raise
            raise NumbersError(not_finite_scores(self.model)) from error

    @at("rewards")
    def _calculate_rewards(self, *args: Any, **kwargs: Any) -> Any:
        return super()._calculate_rewards(*args, **kwargs)

    @at("evaluation")
    def evaluate(self, *args: Any, **kwargs: Any) -> Any:
        return super().evaluate(*args, **kwargs)
