"""SIGTERM with ``enable_jit_checkpoint``: the run ends after its checkpoint, not finished, to be gone on with."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

#: Exit code of a run that ended on a signal after its checkpoint (EX_TEMPFAIL: try again later). Not 0: it is not finished.
EXIT_INTERRUPTED = 75


class Interrupted(Exception):
    """The run was asked to end, has a checkpoint, and can be resumed."""

    def __init__(self, name: str, step: int, folder: Path) -> None:
        super().__init__(f"{name}: stopped at step {step} of {folder}, with a checkpoint; go on with --resume")
        self.name, self.step = name, step


class Termination:
    """Remembers that the run was asked to end, beside transformers' own handler, which saves the checkpoint.

    SIGUSR1 asks for the same: a launcher (torch elastic) that gets SIGTERM kills its workers 30 seconds later, and one that
    ignores SIGUSR1 leaves them their time (``scripts/slurm/train.sbatch``). Without ``enable_jit_checkpoint`` nothing is
    touched: the process ends at once, and the last checkpoint is what there is.
    """

    def __init__(self) -> None:
        self.asked: str | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Termination:
        self._before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)}
        return self

    def listen(self, trainer: Any) -> None:
        """To be called when the trainer is built: transformers' handler is in place since then."""
        if trainer.args.enable_jit_checkpoint:
            saves = signal.getsignal(signal.SIGTERM)
            for number in self._before:
                signal.signal(number, self._handler(saves))

    def _handler(self, saves: Any) -> Callable[[int, Any], None]:
        def note(number: int, frame: Any) -> None:
            self.asked = signal.Signals(number).name
            saves(number, frame)

        return note

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
