"""Requests to stop, in every command. Current work is finished or dropped, finished work is kept, and the same command
goes on later.

    a batch of samples    is finished and written
    an optimizer step     is finished, with a checkpoint (``trainer.resume.stop``, ``trainer.supervised.stoppable``)
    an evaluation         keeps its answers in `grpo-lab evaluate`; within a run it is repeated as a whole
    anything else         ends at once, and is done again

SIGTERM, SIGUSR1, a stop file (``stop_file``, else ``STOP`` in the folder) and ``max_hours`` request a stop. The last
two are checked before each batch, after each step, and once a second by a thread. Ctrl-C ends everything at once,
except a training: it finishes its optimizer step, and a second Ctrl-C ends it at once.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from accelerate import PartialState
from accelerate.utils import gather_object

from grpo_lab.signals import Handlers, handle, put_back
from grpo_lab.trainer.resume.stop import (
    CTRL_C,
    MAX_HOURS,
    STOP_FILE,
    hours_of_this_process,
    is_of_an_earlier_run,
    remove,
    stop_file,
)
from grpo_lab.trainer.supervised.stoppable import StoppableTraining, TrainingStopped

log = logging.getLogger("grpo_lab")

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
"""Signals that request a stop."""
WAITED = f"{STOP_FILE} ({{}} was there before this start, and is removed now)"
"""Name of the request by a stop file that was there before its run started."""
SECONDS_BETWEEN_LOOKS = 1.0
"""Seconds after which the thread looks again for a stop file and at ``max_hours``."""


class Interrupted(Exception):
    """The run was asked to stop, has stopped, and can be continued by the same command."""

    def __init__(self, name: str, step: int | None, folder: Path) -> None:
        """``name``: of the request; ``step``: the optimizer step whose checkpoint was written, None outside of a
        training; ``folder``: the run's."""
        if step is None:
            place = "outside of the training"
        else:
            place = f"at step {step}, with a checkpoint"
        super().__init__(f"{name}: stopped {place}; {folder} can be gone on with by the same command")


class StoppedByUser(KeyboardInterrupt):
    """Ctrl-C ended a command, which reports itself what it has kept (``what``, in words)."""

    def __init__(self, what: str) -> None:
        super().__init__(what)
        self.what = what


class StopRequests:
    """Collects the requests to stop a command that works in ``folder``: ``with StopRequests(folder) as stop: …``.

    Inside ``with``, signals count, and a thread looks for the stop file and at ``max_hours``. Outside of it these two
    count alone, and only where ``asked`` or ``check`` is called.

    Args:
        folder: the run's folder, which messages name.
        max_hours: hours since this process began, after which a stop is requested; None: no limit.
        stop_file: file that requests a stop by being there; None: ``STOP`` in ``folder``.
    """

    def __init__(self, folder: Path, max_hours: float | None = None, stop_file: str | None = None) -> None:
        self.folder = folder
        self.max_hours = max_hours
        if stop_file is None:
            self.file = folder / "STOP"
        else:
            self.file = Path(stop_file)
        self.name: str | None = None
        self._found_by_thread: str | None = None  # request for which the thread has sent, or will send, its signal
        self._deferrals = 0  # how many `defer_signals` blocks are open: above 0, signals do not interrupt
        self._before: Handlers = {}
        self._over = threading.Event()  # set when the `with` block ends
        self._sending = threading.Lock()  # held by the thread while it sends its signal

    def __enter__(self) -> StopRequests:
        self._before = handle(self._heard, *SIGNALS)
        if self._before:
            threading.Thread(target=self._look_now_and_then, name="stop file, max_hours", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        try:
            with self._sending:  # the thread sends no more signals
                self._over.set()
        finally:
            put_back(self._before)

    def heed_waiting(self, new: bool) -> None:
        """Heed a stop file that exists when the run starts.

        If the run is continued, the file was meant for it (a job that waits in a queue): remove the file, so that the
        same command goes on next time, and raise ``Interrupted``. In a ``new`` run a file that is older than this
        process was meant for an earlier run: remove it, and go on. A newer one stays, and stops the run at its first
        check.
        """
        if not self.file.is_file():
            return
        if not new:
            remove(self.file)
            raise Interrupted(WAITED.format(self.file), None, self.folder)
        if is_of_an_earlier_run(self.file):
            log.warning("%s is older than this run and was meant for an earlier one: it is removed", self.file)
            remove(self.file)

    def _heard(self, number: int, frame: Any) -> None:
        """Handle signal ``number``: record the request, and end the work at once unless signals are deferred."""
        name = signal.Signals(number).name
        if number == signal.SIGUSR1 and self._found_by_thread:
            name = self._found_by_thread
        if name == CTRL_C and self.name is not None:
            raise KeyboardInterrupt  # something had asked before: what is deferred ends now
        first = self.name is None
        self.name = self.name or name
        if not self._deferrals:
            self._leave()
        elif first:
            log.warning("%s: what is under way is finished and kept first", name)

    def _look_now_and_then(self) -> None:
        """Wait, in a thread, for a stop file or the end of ``max_hours``; then signal SIGUSR1 to this process, whose
        handler runs in the main thread and can interrupt it."""
        while not self._over.wait(SECONDS_BETWEEN_LOOKS):
            self._found_by_thread = self._request_now()
            if self._found_by_thread is not None:
                with self._sending:
                    if not self._over.is_set():  # else SIGUSR1 ends the process, whose handlers are put back
                        os.kill(os.getpid(), signal.SIGUSR1)
                return

    def _request_now(self) -> str | None:
        """Return the name of the request that the stop file or ``max_hours`` makes now; None if neither does."""
        if self.file.is_file():
            return STOP_FILE
        if self.max_hours is not None and hours_of_this_process() >= self.max_hours:
            return MAX_HOURS
        return None

    def asked(self) -> str | None:
        """Return the name of the first request so far; None if there is none."""
        self.name = self.name or self._request_now()
        return self.name

    def check(self) -> None:
        """Stop here if it was requested: raise ``Interrupted``, or ``StoppedByUser`` after Ctrl-C."""
        if self.asked() is not None:
            self._leave()

    def _leave(self, step: int | None = None) -> None:
        """End the work: raise ``Interrupted``, or ``StoppedByUser`` after Ctrl-C; remove a stop file. ``step``: the
        training's last step, for the message."""
        if self.name == CTRL_C:
            where = ""
            if step is not None:
                where = f" (step {step} of the training under way)"
            raise StoppedByUser(f"what is done{where}, in {self.folder} (the same command goes on)")
        if self.name == STOP_FILE:
            remove(self.file)
        raise Interrupted(str(self.name), step, self.folder)

    @contextlib.contextmanager
    def defer_stop(self) -> Iterator[None]:
        """Let no signal interrupt the block; a stop that is requested meanwhile happens where the block calls
        ``check``, or at its end."""
        with self.defer_signals():
            yield
        self.check()

    @contextlib.contextmanager
    def defer_signals(self, *more: int) -> Iterator[None]:
        """Let the signals that request a stop, and the signals ``more``, be recorded without interrupting the block.

        With SIGINT in ``more``, Ctrl-C is recorded too, and interrupts the block only after an earlier request.
        """
        before = {}
        if self._before:
            before = handle(self._heard, *more)
        self._deferrals += 1
        try:
            yield
        finally:
            self._deferrals -= 1
            put_back(before)

    @contextlib.contextmanager
    def training(self, place: Path, identity: str) -> Iterator[StoppableTraining]:
        """Yield an object that runs a training, ``run(trainer)``, and stops it between two optimizer steps on request.

        Ctrl-C waits for the end of the step, too. ``place``: folder of the checkpoint that a stop leaves;
        ``identity``: digest of what the training depends on (``identity_of``), by which the next start knows that the
        checkpoint is its own. Raises ``Interrupted``, or ``StoppedByUser`` after Ctrl-C, if the training was stopped.
        """
        self.check()
        with self.defer_signals(signal.SIGINT):
            try:
                yield StoppableTraining(place, identity, self.asked)
            except TrainingStopped as stopped:
                self._leave(stopped.step)


def identity_of(rows: Any, made_from: Any) -> str:
    """Return a digest of what a training depends on: its rows, its settings, the model that it begins with."""
    return hashlib.sha256(json.dumps([rows, made_from], sort_keys=True, default=str).encode()).hexdigest()


def heed_stop_file(config: Any, folder: Path) -> None:
    """Raise ``Interrupted``, on every process, if a stop file exists when a training run is about to be resumed.

    The file is meant for this run (a job that waits in a queue). It is removed, so that the same command goes on next
    time. ``config``: the trainer's configuration, which names the file.
    """
    file = stop_file(config)
    main = PartialState().is_main_process
    if any(gather_object([main and file.exists()])):
        if main:
            remove(file)
        raise Interrupted(WAITED.format(file), None, folder)


@contextlib.contextmanager
def as_ctrl_c() -> Iterator[list[str]]:
    """Let SIGTERM and SIGUSR1 raise KeyboardInterrupt in the block, as Ctrl-C does, so that it keeps what it can.

    Yields a list that holds the names of the signals that have come so far; after a real Ctrl-C it is empty.
    """
    came: list[str] = []

    def heard(number: int, _frame: Any) -> None:
        came.append(signal.Signals(number).name)
        if len(came) == 1:  # a scheduler may send it twice
            raise KeyboardInterrupt

    before = handle(heard, *SIGNALS)
    try:
        yield came
    finally:
        put_back(before)


@contextlib.contextmanager
def ended_by_signals(folder: Path, config: Any) -> Iterator[None]:
    """Let SIGTERM and SIGUSR1 raise ``Interrupted`` in the block, which is all of `grpo-lab train`.

    During the training itself the trainer's own handlers are in force (``trainer.resume.stop``), and its stop has the
    same exit code. A recipe that writes no checkpoints keeps the handlers that were there: a signal ends the process.
    SIGUSR1 is for launchers (torch elastic) that kill their workers 30 seconds after a SIGTERM
    (``scripts/slurm/train.sbatch``).
    """

    def leave(number: int, _frame: Any) -> None:
        raise Interrupted(signal.Signals(number).name, None, folder)

    strategy = getattr(config.save_strategy, "value", config.save_strategy)
    before = {}
    if str(strategy) != "no" or config.enable_jit_checkpoint:
        before = handle(leave, *SIGNALS)
    try:
        yield
    finally:
        put_back(before)
