"""SIGTERM with ``enable_jit_checkpoint``: the run ends after its checkpoint, not finished, to be gone on with."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

#: Exit code of a run that ended on a signal after its checkpoint (EX_TEMPFAIL: try again later). Not 0: it is not finished.
EXIT_INTERRUPTED = 75


class Interrupted(Exception):
    """The run was asked to end, has what it needs to go on, and can be resumed."""

    def __init__(self, name: str, step: int | None, folder: Path) -> None:
        place = "outside of the training" if step is None else f"at step {step}, with a checkpoint"
        super().__init__(f"{name}: stopped {place}; {folder} can be gone on with by --resume")


class Termination:
    """Remembers that the run was asked to end, beside transformers' own handler, which saves the checkpoint.

    SIGUSR1 asks for the same: a launcher (torch elastic) that gets SIGTERM kills its workers 30 seconds later, and one that
    ignores SIGUSR1 leaves them their time (``scripts/slurm/train.sbatch``). Outside of the training, where there is nothing to
    save, SIGUSR1 ends the run at once. Without ``enable_jit_checkpoint`` nothing is touched: the process ends at once, and the
    last checkpoint is what there is.
    """

    def __init__(self, folder: Path, enabled: bool) -> None:
        self.asked: str | None = None
        self.folder, self.enabled = folder, enabled
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Termination:
        if self.enabled:
            self._before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)}
            signal.signal(signal.SIGUSR1, self._leave)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    @contextmanager
    def in_training(self, trainer: Any) -> Iterator[None]:
        """While ``trainer`` trains. transformers' handler is in place since the trainer was built."""
        if self.enabled:
            saves = signal.getsignal(signal.SIGTERM)
            for number in self._before:
                signal.signal(number, self._noting(saves))
        try:
            yield
        finally:
            if self.enabled:
                signal.signal(signal.SIGTERM, self._before[signal.SIGTERM])
                signal.signal(signal.SIGUSR1, self._leave)

    def _noting(self, saves: Any) -> Callable[[int, Any], None]:
        def note(number: int, frame: Any) -> None:
            self.asked = signal.Signals(number).name
            saves(number, frame)

        return note

    def _leave(self, number: int, _frame: Any) -> None:
        raise Interrupted(signal.Signals(number).name, None, self.folder)
