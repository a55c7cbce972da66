"""A run that was asked to stop: it ends after its checkpoint, not finished, to be gone on with."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from accelerate import PartialState
from accelerate.utils import gather_object

#: Exit code of a run that stopped on request after its checkpoint (EX_TEMPFAIL: try again later). Not 0: it is not finished.
EXIT_INTERRUPTED = 75

#: Exit code of a run whose checkpoint could not be written (EX_IOERR).
EXIT_NOT_WRITTEN = 74

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


class Interrupted(Exception):
    """The run was asked to end, has what it needs to go on, and can be resumed."""

    def __init__(self, name: str, step: int | None, folder: Path, again: str = "--resume") -> None:
        place = "outside of the training" if step is None else f"at step {step}, with a checkpoint"
        super().__init__(f"{name}: stopped {place}; {folder} can be gone on with by {again}")


class Kept(KeyboardInterrupt):
    """Ctrl-C in a command that knows itself what it kept."""

    def __init__(self, what: str) -> None:
        super().__init__(what)
        self.what = what


def heed_stop_file(config: Any, folder: Path) -> None:
    """A stop file that stands there when a run is to be gone on with: it is meant (a job that waits in a queue), and no step is made.

    Raises:
        Interrupted: on every process; the file is gone, so the next ``--resume`` goes on.
    """
    from grpo_lab.trainer.resume.stop import STOP_FILE, remove, stop_file

    file, main = stop_file(config), PartialState().is_main_process
    if any(gather_object([main and file.exists()])):
        if main:
            remove(file)
        raise Interrupted(f"{STOP_FILE} ({file} was there before this start, and is removed now)", None, folder)


@contextlib.contextmanager
def as_ctrl_c() -> Iterator[list[str]]:
    """SIGTERM and SIGUSR1 end the block as Ctrl-C does, which keeps what can be kept; gives the names of those that came."""
    came: list[str] = []

    def heard(number: int, _frame: Any) -> None:
        came.append(signal.Signals(number).name)
        if len(came) == 1:  # a scheduler may say it twice
            raise KeyboardInterrupt

    here = threading.current_thread() is threading.main_thread()
    before = {number: signal.signal(number, heard) for number in SIGNALS} if here else {}
    try:
        yield came
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)


class Termination:
    """SIGTERM and SIGUSR1 around the stages of a run: during the training the trainer's own handler is in force.

    Outside of it there is nothing to save: the run ends at once, with the same exit code. SIGUSR1 asks for the same as SIGTERM: a
    launcher (torch elastic) that gets SIGTERM kills its workers 30 seconds later, and one that ignores SIGUSR1 leaves them their
    time (``scripts/slurm/train.sbatch``). Where no checkpoints are asked for nothing is touched, and a signal ends the process.
    """

    def __init__(self, folder: Path, config: Any) -> None:
        self.folder = folder
        saves = (
            str(getattr(config.save_strategy, "value", config.save_strategy)) != "no" or config.enable_jit_checkpoint
        )
        self.enabled = bool(saves) and threading.current_thread() is threading.main_thread()
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Termination:
        if self.enabled:
            self._before = {number: signal.signal(number, self._leave) for number in SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def ask(self, trainer: Any) -> None:
        """``trainer`` is about to train: it answers both signals, and comes back here."""
        trainer.parts.stop.signals = list(SIGNALS)
        trainer.parts.stop.returns = True

    def _leave(self, number: int, _frame: Any) -> None:
        raise Interrupted(signal.Signals(number).name, None, self.folder)
