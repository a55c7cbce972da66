"""Who is missing: a thread on each rank says where the rank is, and names the missing one when the others wait in vain.

half of `ddp_timeout` at one place     a warning on each rank that has been there so long nine tenths
again (with NCCL the process is then ended by NCCL's own watchdog) the end                                ``RankLost``
where torch raises: gloo, and NCCL with ``TORCH_NCCL_BLOCKING_WAIT=1``

Each rank writes one short text every few seconds into the store through which the ranks found each other, through a
client of its own (torch's may be held by whoever waits in it); it is read when something is wrong, and a step sends
nothing. ``ddp_timeout`` holds on CPU ranks, too: transformers 5.17 hands it to torch only where there is an
accelerator.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import threading
import time
from datetime import timedelta
from typing import Any

from torch import distributed
from torch.distributed import distributed_c10d
from trl import GRPOTrainer

from grpo_lab.finite import NumbersError, not_finite_scores
from grpo_lab.trainer.ranks import places
from grpo_lab.trainer.ranks.places import at

logger = logging.getLogger("grpo_lab")

#: seconds to connect, and for an answer: the machine of the store may be what was lost
ANSWERS_WITHIN = 5.0
#: shares of the limit at which a rank that is still at the same place warns
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
        self._store: Any = None
        self._why_no_store = ""

    def __enter__(self) -> RankWatch:
        if self.ranks == 1:
            return self
        self._thread_that_trains = threading.get_ident()
        try:
            self._store = launchers_store()
        except (OSError, RuntimeError, ValueError) as failure:
            self._why_no_store = str(failure)
        places._describe.append(self.describe)
        self._thread = threading.Thread(target=self._watch, name="grpo_lab rank watch", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.ranks == 1:
            return
        self._end.set()
        self._thread.join(timeout=2 * self.beat)
        places._describe.remove(self.describe)

    def describe(self, kind: str, said: str) -> str:
        """The message of an error that ended a collective of this rank."""
        here, where = f"rank {self.rank} of {self.ranks}", f"at «{places.place()}», step {self._step()}"
        if kind == "late":
            what = f"{here} waited {self.limit:.0f} s {where}, and not all ranks came (`ddp_timeout`)"
            then = (
                "Look at what the missing rank does (`py-spy dump --pid …`); where it is only slow, raise `ddp_timeout`"
            )
        else:
            what = f"{here} lost the connection to another rank {where}"
            then = "A rank that ended has its own error in its log, and it comes first"
        self._write()
        return (
            f"{what}. {self.others()}. {then}. The run goes on from its last checkpoint with --resume. torch "
            f"says: {said}"
        )

    def others(self) -> str:
        """Where the other ranks are: those that do not wait first, since one of them is missing."""
        try:
            if self._store is None:
                raise OSError(self._why_no_store)
            found = [(rank, self._read(rank)) for rank in range(self.ranks) if rank != self.rank]
        except (OSError, RuntimeError, ValueError) as failure:
            return f"Where the other ranks are is not known ({failure})"
        silent = "has said nothing: it has not begun to train, or not as grpo_lab.LabTrainer"
        said = []
        for rank, entry in sorted(found, key=lambda one: one[1] is not None and one[1]["waits"]):
            if entry is None:
                said.append(f"Rank {rank} {silent}")
                continue
            quiet = time.time() - entry["written"]
            verb = "waits" if entry["waits"] else "is"
            verb = (
                f"was last heard of {quiet:.0f} s ago (ended, or stopped), then" if quiet > SILENT * self.beat else verb
            )
            said.append(f"Rank {rank} {verb} {entry['where']}")
        return ". ".join(said)

    # -- the thread --------------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        entered, warned = 0.0, 0.0  # since when at this place, the share of the limit at the last warning
        while not self._end.wait(self.beat):
            self._write()
            here = places.seconds_here()
            if time.monotonic() - here > entered + 0.1:
                entered, warned = time.monotonic() - here, 0.0
            due = max((share for share in NOTICES if here >= share * self.limit), default=0.0)
            if due > warned:
                warned = due
                logger.warning(
                    "rank %d of %d is %s. %s. Ranks wait %.0f s for each other (`ddp_timeout`)",
                    *(self.rank, self.ranks, self._entry()["where"], self.others(), self.limit),
                )

    def _entry(self) -> dict[str, Any]:
        line, waits = places.line_of(self._thread_that_trains)
        where = f"at «{places.place()}», step {self._step()}, for {places.seconds_here():.0f} s: {line}"
        where += f" (pid {os.getpid()} on {socket.gethostname()})"
        return {"where": where, "waits": waits, "written": time.time()}

    def _write(self) -> None:
        if self._store is None:
            return
        try:
            self._store.set(key_of(self.rank), json.dumps(self._entry()))
        except (OSError, RuntimeError) as failure:  # the store's machine is gone: the others' entries, too
            self._store, self._why_no_store = None, str(failure)

    def _read(self, rank: int) -> dict[str, Any] | None:
        key = key_of(rank)
        return dict(json.loads(self._store.get(key))) if self._store.check([key]) else None

    def _step(self) -> int:
        return int(self._trainer.state.global_step) + 1


def launchers_store() -> Any:
    """A client of the store through which the ranks found each other. OSError where the launcher named none."""
    host, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
    if not host or not port:
        raise OSError("the launcher set no MASTER_ADDR and MASTER_PORT")
    limit = timedelta(seconds=ANSWERS_WITHIN)
    return distributed.TCPStore(host, int(port), is_master=False, wait_for_workers=False, timeout=limit)


def key_of(rank: int) -> str:
    """Where a rank of this start (of torchrun, which may start them again) writes."""
    return f"grpo_lab/place/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}/{rank}"


def hold_time_limit(args: Any) -> None:
    """Let ``args.ddp_timeout`` be the limit of gloo's collectives; accelerators' have it from transformers.

    Raises:
        ValueError: a limit that is no positive number of seconds.
    """
    if not isinstance(args.ddp_timeout, (int, float)) or args.ddp_timeout <= 0:
        raise ValueError(
            f"`ddp_timeout` is {args.ddp_timeout!r}; it must be a positive number of seconds (how long ranks wait "
            "for each other)"
        )
    if distributed.is_available() and distributed.is_initialized() and distributed.get_backend() == "gloo":
        distributed_c10d._set_pg_timeout(args.ddp_timeout_delta)


class RankAwareTrainer(GRPOTrainer):
    """``GRPOTrainer``; what it does and returns is unchanged. Raises ``NumbersError`` for torch's word on scores that
    are not finite."""

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
