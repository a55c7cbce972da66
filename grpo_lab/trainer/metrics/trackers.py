"""Trackers (``report_to``) of a command's trainings: each training has a run of its own, which a resume continues. A
tracker that fails during a training is dropped, and the training goes on.

transformers' callbacks assume one training per process. In a pipeline, wandb's callback would put every stage into one
run, and trackio's would choose a new name at every start. tensorboard's would write a resumed training into a second
folder, as a second curve (and a supervised stage into the model's own folder, which is moved to its place once it is
whole).
"""

from __future__ import annotations

import copy
import logging
import os
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from transformers import TrainerCallback
from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK

from grpo_lab.io import write_json
from grpo_lab.reading import read_record

logger = logging.getLogger("grpo_lab")

FILE = "trackers.json"
"""File in the folder of a training that holds the identity of its run in the trackers."""


@contextmanager
def tracked(trainer: Any, folder: Path) -> Iterator[None]:
    """Return a context in which the training of ``trainer`` has a run of its own in every tracker: each tracker's
    callback is wrapped (``Attended``). The run's identity is kept in ``folder``. At the end of the block the run is
    closed."""
    known = tuple(INTEGRATION_TO_CALLBACK.values())
    callbacks = trainer.callback_handler.callbacks
    run = TrackedRun(folder)
    attended = {id(one): Attended(one, run) for one in callbacks if isinstance(one, known)}
    trainer.callback_handler.callbacks = [attended.get(id(one), one) for one in callbacks]
    try:
        yield
    finally:
        for one in attended.values():
            one.end()


class TrackedRun:
    """The run that a training has in the trackers.

    Attributes:
        folder: the training's folder.
        name: the run's name if the settings give none: the last two parts of the folder's path, by which the stages of
            a pipeline, the rounds of a command and the cells of a lab can be told apart.
        identity: time and random characters; empty before ``begin``.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.name = "/".join(folder.absolute().parts[-2:])
        self.identity = ""

    def begin(self, step: int) -> None:
        """Set the identity: the recorded one if the training resumes after ``step`` > 0 optimizer steps, else a new
        one, which is recorded. Raise ValueError if the record is damaged."""
        if self.identity:
            return
        file = self.folder / FILE
        if step and file.is_file():
            advice = "remove it, and the tracker has a second run from here on"
            self.identity = read_record(file, {"run": str}, advice)["run"]
        if not self.identity:
            self.identity = f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"
            self.folder.mkdir(parents=True, exist_ok=True)
            write_json(file, {"run": self.identity})


class Attended(TrainerCallback):  # type: ignore[misc]
    """Wraps a tracker's callback and forwards every event to it. If the tracker cannot begin, the training ends with a
    ValueError. A later error is logged once, and the tracker gets no more events.

    Args:
        inner: the tracker's callback.
        run: the training's run.
    """

    def __init__(self, inner: Any, run: TrackedRun) -> None:
        self.inner = inner
        self.run = run
        self.kind = next(name for name, kind in INTEGRATION_TO_CALLBACK.items() if type(inner) is kind)
        self.lost = False
        self._close: Callable[[], object] | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        try:
            if state.is_world_process_zero:
                self.run.begin(state.global_step)
                OPENED.get(self.kind, lambda *_: None)(self, args, state)
            self.inner.on_train_begin(self._named(args), state, control, **more)
        except Exception as error:
            raise ValueError(
                f"`report_to` names {self.kind!r}, which cannot begin: {type(error).__name__}: {error}. Mend that, or "
                "leave it out"
            ) from error

    def _named(self, args: Any) -> Any:
        """Return ``args`` with the run's name in ``run_name``, if that is not set."""
        if args.run_name is not None or not self.run.identity:
            return args
        named = copy.copy(args)
        # trackio knows a run by its name alone
        if self.kind == "trackio":
            named.run_name = f"{self.run.name}-{self.run.identity}"
        else:
            named.run_name = self.run.name
        return named

    def hear(self, event: str, args: Any, state: Any, control: Any, **more: Any) -> None:
        """Forward ``event`` (the name of a callback's method) to the tracker; do nothing once an event has failed."""
        if self.lost:
            return
        try:
            getattr(self.inner, event)(self._named(args), state, control, **more)
        except Exception as error:
            self.lost = True
            logger.warning(
                "%s (`report_to`) failed at step %d and gets no more of this training, which goes on: %s: %s. "
                "metrics.jsonl has every number",
                self.kind,
                state.global_step,
                type(error).__name__,
                error,
            )

    def end(self) -> None:
        """Close what ``OPENED`` has opened for this training."""
        if self._close is not None:
            with suppress(Exception):
                self._close()


def _passed_on(event: str) -> Callable[..., None]:
    """Return a method of ``Attended`` that forwards ``event``."""

    def heard(self: Attended, args: Any, state: Any, control: Any, **more: Any) -> None:
        self.hear(event, args, state, control, **more)

    return heard


for _event in dir(TrainerCallback):
    if _event.startswith("on_") and _event != "on_train_begin":
        setattr(Attended, _event, _passed_on(_event))


def _wandb(tracker: Attended, args: Any, state: Any) -> None:
    """Open wandb's run under the training's identity, by which wandb continues it on a resume. Do nothing if a team has
    opened a run itself."""
    import wandb

    if wandb.run is not None:
        return
    project = os.getenv("WANDB_PROJECT", "huggingface")
    chosen = os.getenv("WANDB_RUN_ID") or tracker.run.identity
    name = args.run_name or tracker.run.name
    opened = wandb.init(project=project, id=chosen, name=name, resume="allow")
    tracker._close = opened.finish


def _tensorboard(tracker: Attended, args: Any, state: Any) -> None:
    """Open a folder that all sessions of a training share, and have tensorboard drop what it holds of steps after the
    one in ``state``."""
    given = tracker.inner.logging_dir  # TENSORBOARD_LOGGING_DIR: one place for several trainings
    if given is None:
        place = tracker.run.folder / "runs"
    else:
        place = Path(given) / (args.run_name or tracker.run.name)
    purged = None
    if state.global_step:
        purged = state.global_step + 1
    writer = tracker.inner._SummaryWriter(str(place / tracker.run.identity), purge_step=purged)
    tracker.inner.tb_writer = writer
    tracker._close = writer.close


OPENED: dict[str, Callable[[Attended, Any, Any], None]] = {"wandb": _wandb, "tensorboard": _tensorboard}
"""Name of a tracker → function that opens its run, before the tracker's own callback would."""
