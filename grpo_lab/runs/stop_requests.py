"""Requests to stop, in every command. Current work is finished or dropped, finished work is kept, and the same command
goes on later.

    a batch of samples    is finished and written
    an optimizer step     is finished, with a checkpoint (``trainer.resume.stop``, ``trainer.supervised.stoppable``)
    an evaluation         keeps its answers in `grpo-lab evaluate`; within a run it is repeated as a whole
    anything else         ends at once, and is done again

SIGTERM, SIGUSR1, a stop file (``stop_file``, else ``STOP`` in the folder) and ``max_hours`` request a stop. The last
two are checked before each batch, after each step, and once a second by a thread. Ctrl-C ends everything at once but an
optimizer step, which ends at the second one.
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
WAITED = f"{STOP_FILE} ({{}} was there before this start, and is removed now)"
SECONDS_BETWEEN_LOOKS = 1.0


class Interrupted(Exception):
    """Raised if the run was asked to stop and has what it needs to go on."""

    def __init__(self, name: str, step: int | None, folder: Path) -> None:
        if step is None:
            place = "outside of the training"
        else:
            place = f"at step {step}, with a checkpoint"
        super().__init__(f"{name}: stopped {place}; {folder} can be gone on with by the same command")


class StoppedByUser(KeyboardInterrupt):
    """Raised for Ctrl-C in a command that reports itself what it kept."""

    def __init__(self, what: str) -> None:
        super().__init__(what)
        self.what = what


class StopRequests:
    """Listens for stop requests, as ``with StopRequests(folder, …) as stop:``; without ``with`` it hears no signal."""

    def __init__(self, folder: Path, max_hours: float | None = None, stop_file: str | None = None) -> None:
        self.folder = folder
        self.max_hours = max_hours
        if stop_file is None:
            self.file = folder / "STOP"
        else:
            self.file = Path(stop_file)
        self.name: str | None = None
        self._seen: str | None = None  # the request that the thread found
        self._held = 0
        self._before: Handlers = {}
        self._over = threading.Event()
        self._asks = threading.Lock()

    def __enter__(self) -> StopRequests:
        self._before = handle(self._heard, *SIGNALS)
        if self._before:
            threading.Thread(target=self._look_now_and_then, name="stop file, max_hours", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        try:
            with self._asks:  # the thread sends no more signals
                self._over.set()
        finally:
            put_back(self._before)

    def heed_waiting(self, new: bool) -> None:
        """Handle a stop file that exists at the start. In a ``new`` run, an older file was meant for an earlier run and
        is removed. Otherwise remove it and raise ``Interrupted``, so that the same command goes on next time."""
        if not self.file.is_file():
            return
        if not new:
            remove(self.file)
            raise Interrupted(WAITED.format(self.file), None, self.folder)
        if is_of_an_earlier_run(self.file):
            log.warning("%s is older than this run and was meant for an earlier one: it is removed", self.file)
            remove(self.file)

    def _heard(self, number: int, frame: Any) -> None:
        if number == signal.SIGUSR1 and self._seen:
            name = self._seen
        else:
            name = signal.Signals(number).name
        if name == CTRL_C and self.name is not None:
            raise KeyboardInterrupt  # the second one
        first = self.name is None
        self.name = self.name or name
        if not self._held:
            self._leave()
        elif first:
            log.warning("%s: what is under way is finished and kept first", name)

    def _look_now_and_then(self) -> None:
        while not self._over.wait(SECONDS_BETWEEN_LOOKS):
            self._seen = self._standing()
            if self._seen is not None:
                with self._asks:
                    if not self._over.is_set():  # else SIGUSR1 ends the process, whose handlers are put back
                        os.kill(os.getpid(), signal.SIGUSR1)
                return

    def _standing(self) -> str | None:
        late = self.max_hours is not None and hours_of_this_process() >= self.max_hours
        if self.file.is_file():
            return STOP_FILE
        return MAX_HOURS if late else None

    def asked(self) -> str | None:
        """Return the name of the first request so far; None if there is none."""
        self.name = self.name or self._standing()
        return self.name

    def check(self) -> None:
        """Stop here if it was requested: raise ``Interrupted``, or ``StoppedByUser`` after Ctrl-C."""
        if self.asked() is not None:
            self._leave()

    def _leave(self, step: int | None = None) -> None:
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
        """Let no signal interrupt the block; a requested stop happens where it calls ``check``, and at its end."""
        with self.defer_signals():
            yield
        self.check()

    @contextlib.contextmanager
    def defer_signals(self, *more: int) -> Iterator[None]:
        """Let the signals, and ``more``, record a request without interrupting the block. With Ctrl-C in ``more``, a
        second one ends the block."""
        before = {}
        if self._before:
            before = handle(self._heard, *more)
        self._held += 1
        try:
            yield
        finally:
            self._held -= 1
            put_back(before)

    @contextlib.contextmanager
    def training(self, place: Path, identity: str) -> Iterator[StoppableTraining]:
        """Yield the object that runs a training and stops it between steps. Ctrl-C waits for the step's end, too."""
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
    """Raise ``Interrupted``, on every process, if a stop file exists when a run is about to go on. It is meant for this
    run (a job that waits in a queue). The file is removed, so the same command goes on next time."""
    file = stop_file(config)
    main = PartialState().is_main_process
    if any(gather_object([main and file.exists()])):
        if main:
            remove(file)
        raise Interrupted(WAITED.format(file), None, folder)


@contextlib.contextmanager
def as_ctrl_c() -> Iterator[list[str]]:
    """Let SIGTERM and SIGUSR1 end the block as Ctrl-C does, which keeps what can be kept. Yield the list of their
    names, as they come."""
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
    """Handle SIGTERM and SIGUSR1 around `grpo-lab train`: outside of its training they end it at once, with the same
    exit code. Without checkpoints a signal ends the process. SIGUSR1 is there for launchers (torch elastic) that kill
    their workers 30 seconds after a SIGTERM (``scripts/slurm/train.sbatch``)."""

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
