"""Watch the ranks of a run: where each one is, which is missing when others wait, and whose weights are not finite.

``named_place`` names what the training thread is doing: its *place*. With several processes a thread on each rank
(``RankWatch``) writes the place every few seconds into the store through which the ranks found each other. A training
step sends nothing. The places of all ranks are read if one rank stays at its place for too long:

    half of ``ddp_timeout``, and nine tenths of it      that rank warns, and says where the others are
    all of it, if torch then raises (gloo; NCCL with    ``RankLost``, which names the missing rank
    ``TORCH_NCCL_BLOCKING_WAIT=1``)
    all of it, if torch does not raise                  NCCL's own watchdog ends the process, without such a message

``ddp_timeout`` also holds on CPU ranks; transformers 5.17 passes it to torch only if there is an accelerator.
"""

from __future__ import annotations

import json
import logging
import os
import re
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from types import FrameType
from typing import Any, Protocol

import torch
from accelerate.utils import gather_object
from torch import distributed
from torch.distributed import distributed_c10d
from trl import GRPOTrainer

from grpo_lab.finite import NumbersError, in_words, is_bad, not_finite_scores

logger = logging.getLogger("grpo_lab")

#: Messages of gloo, NCCL and torch's stores for a time limit that has passed.
LATE = ("Timed out waiting", "Application timeout caused pair closure", "collective operation timeout")
#: Their messages for a connection that the other end has closed.
GONE = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "remote process exited")
#: Each of these messages also contains one of these words, unlike a "Broken pipe" of another library.
OF_TORCH = ("gloo", "NCCL", "ProcessGroup", "TCPStore", "c10d")
#: Files of libraries that only pass calls on: the line that a process is at is the innermost one outside of them.
MACHINERY = re.compile(r"/(torch|accelerate|concurrent/futures|asyncio)/|/(threading|contextlib|selectors)\.py")
#: Seconds to connect to the store, and to wait for its answer: it may be on the machine that was lost.
ANSWERS_WITHIN = 5.0
#: Shares of the limit at which a rank warns if it is still at the same place.
NOTICES = (0.5, 0.9)
#: Number of beats without a new entry after which a rank counts as gone or stopped.
SILENT = 4

#: Which weights ``refuse_bad_weights`` checks, in the words of its message: "the weights … NaN".
TO_START_FROM = "that the training starts from hold"
TRAINED = "that the training has left hold"
TO_SEND = "that the vLLM engine is to sample with hold"

_places: list[str] = []
_changed = time.monotonic()
_watches: list[RankWatch] = []
_spent: dict[str, float] | None = None


class RankLost(RuntimeError):
    """Raised if a collective ended without another rank, which did not come within the time limit or has ended."""


@contextmanager
def named_place(name: str) -> Iterator[None]:
    """Name what this process does inside the block, for messages about ranks and for ``counted``; names nest. Also a
    decorator. Raise RankLost in place of torch's error if a collective passed its time limit or lost its other end."""
    _leave()
    _places.append(name)
    try:
        yield
    except RuntimeError as error:
        kind = how_it_broke(error)
        if kind is None:
            raise
        if _watches:
            raise RankLost(_watches[-1].describe(kind, str(error))) from error
        if kind == "late":
            what = "waited in vain for another rank"
        else:
            what = "lost the connection to another rank"
        said = f"this rank {what} at «{place()}» (time limit: `ddp_timeout`). torch says: {error}"
        raise RankLost(said) from error
    finally:
        _leave()
        _places.pop()


def _leave() -> None:
    """Add the time spent at the current place to that place's sum (``counted``); called before the place changes."""
    global _changed
    if _spent is not None and torch.cuda.is_initialized():  # a GPU that is not used has no work to wait for
        torch.cuda.synchronize()
    now = time.monotonic()
    if _spent is not None:
        _spent[place()] = _spent.get(place(), 0.0) + now - _changed
    _changed = now


@contextmanager
def counted(seconds: dict[str, float]) -> Iterator[None]:
    """Add to ``seconds``, inside the block, the time spent at each place: names as ``place`` returns them → seconds. A
    place's time does not contain that of the places nested in it."""
    global _spent
    _leave()
    _spent = seconds
    try:
        yield
    finally:
        _leave()
        _spent = None


def how_it_broke(error: RuntimeError) -> str | None:
    """Return how a collective failed: ``late`` if its time limit passed, ``gone`` if the other end closed. None for any
    other error, ``RankLost`` included."""
    text = str(error)
    if isinstance(error, RankLost) or not any(word in text for word in OF_TORCH):
        return None
    if any(said in text for said in LATE):
        return "late"
    if any(said in text for said in GONE):
        return "gone"
    return None


def is_of_lost_rank(error: Exception) -> bool:
    """Return whether a collective raised this error for want of another rank: ``RankLost``, or torch's own error."""
    return isinstance(error, RankLost) or (isinstance(error, RuntimeError) and how_it_broke(error) is not None)


def place() -> str:
    """Return the names of the current places, the outermost first; empty outside of all places."""
    return " › ".join(_places)


def line_of(thread: int) -> tuple[str, bool]:
    """Return where a thread is, its innermost line outside of ``MACHINERY``, and whether it waits for other ranks (in
    ``torch.distributed``). ``thread``: the thread's identifier."""
    frame: FrameType | None = sys._current_frames().get(thread)
    waits = False
    while frame is not None:
        file = frame.f_code.co_filename.replace("\\", "/")
        waits |= "/torch/distributed/" in file
        if not MACHINERY.search(file):
            return f"{'/'.join(file.split('/')[-2:])}:{frame.f_lineno} in {frame.f_code.co_name}", waits
        frame = frame.f_back
    return "an unknown line", waits


class RankWatch:
    """Context manager around a training, in which a thread writes every few seconds where this rank is, and warns if
    the rank stays at one place for too long. With one process it does nothing.

    Attributes:
        rank, ranks: this process's rank, and the number of processes.
        limit: seconds that ranks wait for each other (``ddp_timeout``).
        beat: seconds between two entries in the store.
    """

    def __init__(self, trainer: GRPOTrainer) -> None:
        self._trainer = trainer
        self.rank = trainer.accelerator.process_index
        self.ranks = trainer.accelerator.num_processes
        self.limit = float(trainer.args.ddp_timeout)
        self.beat = min(10.0, max(0.5, self.limit / 8))
        self._end = threading.Event()
        self._store: Any = None
        self._why_no_store = "the launcher set no MASTER_ADDR and MASTER_PORT"

    def __enter__(self) -> RankWatch:
        """Connect to the ranks' store, write this rank's first entry and start the thread."""
        if self.ranks == 1:
            return self
        self._thread_that_trains = threading.get_ident()
        host = os.environ.get("MASTER_ADDR")
        port = os.environ.get("MASTER_PORT")
        if host and port:
            try:  # a client of our own: a waiting thread may hold torch's
                self._store = distributed.TCPStore(
                    host, int(port), is_master=False, wait_for_workers=False, timeout=timedelta(seconds=ANSWERS_WITHIN)
                )
            except (OSError, RuntimeError, ValueError) as failure:
                self._why_no_store = str(failure)
        _watches.append(self)
        self._write()  # at once: a rank may end within its first beat
        self._thread = threading.Thread(target=self._watch, name="grpo_lab rank watch", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.ranks > 1:
            self._end.set()
            self._thread.join(timeout=2 * self.beat)
            _watches.remove(self)

    def describe(self, kind: str, said: str) -> str:
        """Return the message for a failed collective of this rank. ``kind`` is what ``how_it_broke`` returned, ``said``
        is torch's message."""
        here = f"rank {self.rank} of {self.ranks}"
        where = f"at «{place()}», step {self._step()}"
        if kind == "late":
            what = f"{here} waited {self.limit:.0f} s {where}, and not all ranks came (`ddp_timeout`)"
            then = "Look at what the missing rank does (`py-spy dump --pid …`); is it only slow, raise `ddp_timeout`"
        else:
            what = f"{here} lost the connection to another rank {where}"
            then = "A rank that ended has its own error in its log, and it comes first"
        self._write()
        again = "The run goes on from its last checkpoint with --resume"
        return f"{what}. {self.others()}. {then}. {again}. torch says: {said}"

    def others(self) -> str:
        """Return sentences that say where the other ranks are: first those that do not wait, since the missing rank is
        among them."""
        try:
            if self._store is None:
                raise OSError(self._why_no_store)
            found = [(rank, self._read(rank)) for rank in range(self.ranks) if rank != self.rank]
        except (OSError, RuntimeError, ValueError) as failure:
            return f"Where the other ranks are is not known ({failure})"
        said = []
        for rank, entry in sorted(found, key=lambda one: one[1] is not None and one[1]["waits"]):
            if entry is None:
                silent = "has said nothing: it has not begun to train, or not as grpo_lab.LabTrainer"
                said.append(f"Rank {rank} {silent}")
                continue
            verb = "waits" if entry["waits"] else "is"
            quiet = time.time() - entry["written"]
            if quiet > SILENT * self.beat:
                verb = f"was last heard of {quiet:.0f} s ago (ended, or stopped), then"
            said.append(f"Rank {rank} {verb} {entry['where']}")
        return ". ".join(said)

    def _watch(self) -> None:
        """Write this rank's entry at each beat, and warn at ``NOTICES``; what the thread runs."""
        warned = 0.0  # the share of the limit at the last warning of this place
        while not self._end.wait(self.beat):
            self._write()
            here = time.monotonic() - _changed
            due = max((share for share in NOTICES if here >= share * self.limit), default=0.0)
            if due > warned:
                logger.warning(
                    "rank %d of %d is %s. %s. Ranks wait %.0f s for each other (`ddp_timeout`)",
                    *(self.rank, self.ranks, self._entry()["where"], self.others(), self.limit),
                )
            warned = due

    def _entry(self) -> dict[str, Any]:
        """Return what the store holds of this rank: where it is, whether it waits for others, the time of writing."""
        line, waits = line_of(self._thread_that_trains)
        where = f"at «{place() or 'the beginning'}», step {self._step()}, for {time.monotonic() - _changed:.0f} s"
        where += f": {line} (pid {os.getpid()} on {socket.gethostname()})"
        return {"where": where, "waits": waits, "written": time.time()}

    def _write(self) -> None:
        """Write this rank's entry into the store; once that fails, do without the store."""
        if self._store is not None:
            try:
                self._store.set(key_of(self.rank), json.dumps(self._entry()))
            except (OSError, RuntimeError) as failure:  # the store's machine is gone: the others' entries, too
                self._store = None
                self._why_no_store = str(failure)

    def _read(self, rank: int) -> dict[str, Any] | None:
        """Return the last entry of a rank; None if it has written none."""
        key = key_of(rank)
        if self._store.check([key]):
            return dict(json.loads(self._store.get(key)))
        return None

    def _step(self) -> int:
        return int(self._trainer.state.global_step) + 1


def key_of(rank: int) -> str:
    """Return the key under which a rank writes into the store. It contains torchrun's restart count: entries from
    before a restart are not read."""
    return f"grpo_lab/place/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}/{rank}"


def hold_time_limit(args: Any) -> None:
    """Apply ``args.ddp_timeout`` to gloo's collectives; transformers applies it to those of accelerators. Raise
    ValueError if it is no positive number of seconds."""
    limit = args.ddp_timeout
    if not isinstance(limit, int | float) or limit <= 0:
        must = "it must be a positive number of seconds (how long ranks wait for each other)"
        raise ValueError(f"`ddp_timeout` is {limit!r}; {must}")
    if distributed.is_available() and distributed.is_initialized() and distributed.get_backend() == "gloo":
        distributed_c10d._set_pg_timeout(args.ddp_timeout_delta)


class RankAwareTrainer(GRPOTrainer):
    """``GRPOTrainer`` whose methods name the place where a rank is (``named_place``), under a ``RankWatch``. If
    sampling fails because scores are not finite, it raises ``NumbersError`` in place of torch's error."""

    def train(self, *args: Any, **kwargs: Any) -> Any:
        with RankWatch(self), named_place("training"):
            return super().train(*args, **kwargs)

    @named_place("step")
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        return super().training_step(*args, **kwargs)

    @named_place("generation")
    def _generate(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return super()._generate(*args, **kwargs)
        except RuntimeError as error:
            if "probability tensor" not in str(error):
                raise
            raise NumbersError(not_finite_scores(self.model)) from error

    @named_place("rewards")
    def _calculate_rewards(self, *args: Any, **kwargs: Any) -> Any:
        return super()._calculate_rewards(*args, **kwargs)

    @named_place("evaluation")
    def evaluate(self, *args: Any, **kwargs: Any) -> Any:
        return super().evaluate(*args, **kwargs)


class OnRanks(Protocol):
    """Protocol of an object with a model and the accelerator of its ranks: a trainer, or TRL's ``VLLMGeneration``."""

    model: Any
    accelerator: Any


def refuse_bad_weights(trainer: Any, which: str) -> None:
    """Raise an error, on every rank, if the weights hold NaN or infinities. Sampling from such weights fails, too, but
    with an error of torch that names neither cause nor tensors.

    Args:
        which: TO_START_FROM, TRAINED or TO_SEND, for the message.

    Raises:
        NumbersError: some weights are not finite; the message names them.
        ValueError: ``which`` is TRAINED, and no step was trained.
    """
    if bad := names_of_bad(trainer):
        optimizer = "the optimizer (weights in fp16, `adam_epsilon`, `learning_rate`)"
        blame = {
            TO_START_FROM: "how the model or the checkpoint was made, saved or converted (bf16, fp16)",
            TO_SEND: f"{optimizer}; nothing was sent",
        }.get(which, f"{optimizer}; nothing is saved")
        raise NumbersError(f"the weights {which} NaN or infinities, {bad}: look at {blame}")
    if which == TRAINED and not trainer.state.global_step:
        each = "`per_device_train_batch_size` × `gradient_accumulation_steps` × processes"
        raise ValueError(f"no step was trained: {len(trainer.train_dataset)} rows are no whole batch of {each}")


def names_of_bad(held: OnRanks) -> str | None:
    """Return in words the names of the tensors that are not finite on some rank; None if there are none. A collective.

    A weight is bad with NaN or infinities in it, a buffer with NaN only, since masks hold infinities. If all are good,
    one number per rank is gathered and read.
    """
    model = held.model
    device = held.accelerator.device
    with named_place("whether the weights are finite"):
        flags = {name: is_bad(one) for name, one in model.named_parameters()}
        flags |= {name: is_bad(one, infinite=False) for name, one in model.named_buffers()}
        bad = torch.stack([torch.zeros((), dtype=torch.bool, device=device), *(f.to(device) for f in flags.values())])
        if not bool(held.accelerator.gather(bad.any().reshape(1)).any()):
            return None
        here = [name for name, one in zip(flags, bad[1:].tolist(), strict=True) if one]
        names = sorted({name for of_rank in gather_object([here]) for name in of_rank})
    return in_words(names, len(flags))
