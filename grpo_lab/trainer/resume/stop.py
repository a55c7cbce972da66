"""Stop a training on request: ranks agree once per optimizer step, and a checkpoint of the current step is written.

    who asks           condition                                         how ``train()`` ends after the checkpoint
    SIGTERM            ``save_strategy`` is not ``no``, or               it ends by the signal, as it would have
                       ``enable_jit_checkpoint``                         (``enable_jit_checkpoint``: returns, as HF's)
    SIGINT (Ctrl-C)    likewise                                          ``KeyboardInterrupt`` that names the checkpoint
    a stop file        always: ``stop_file``, else ``STOP`` in           it returns; the file is removed
                       ``output_dir``
    ``max_hours``      if it is set: hours of this process, from its     it returns
                       start

The request is answered at the end of the optimizer step, after its log line, where a resume is exact to the bit. During
an evaluation, or while a checkpoint is written, it is answered at the end of that. With several ranks, a request to one
is enough. Special cases:

- A second Ctrl-C ends the run at once, without a checkpoint.
- In a run of one process, a signal during a wait for a server ends it at once, with a checkpoint of the last step.
- A stop file that is older than the process was meant for an earlier run. A training from its first step removes it.
- HF's own answer to SIGTERM (transformers 5.17) is replaced. It comes inside whichever of HF's events is next, where a
  resume would have other completions, or the step is not logged.

An evaluation that is due at that step would have come before the checkpoint, and would have drawn from the training's
random numbers. Here the checkpoint comes first, and records that an evaluation is due. The resumed run makes up for it
as soon as it has the checkpoint's random numbers (``DueEvaluation``). The same holds for ``eval_strategy: epoch`` with
``save_strategy: steps``, where the checkpoint of an epoch's last step is written before the epoch's evaluation.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import torch
from accelerate.utils import gather_object
from transformers import TrainerCallback
from transformers.trainer_jit_checkpoint import JITCheckpointCallback
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
from trl import GRPOTrainer

from grpo_lab.signals import Handlers, handle, put_back
from grpo_lab.trainer.ranks import named_place
from grpo_lab.trainer.resume.state import SavedState, read_state, write_state

logger = logging.getLogger("grpo_lab")

STOP_FILE = "stop file"
MAX_HOURS = "max_hours"
CTRL_C = "SIGINT"
#: Reasons to stop; "": none. If there are two at once, the later one in this list is named.
REASONS = ("", STOP_FILE, MAX_HOURS, CTRL_C, "SIGUSR1", "SIGTERM")


class DueEvaluation(TrainerCallback):  # type: ignore[misc]
    """Callback that makes the evaluation in a resumed run that was left out at a stop; one per trainer, before all
    other callbacks. Limit: if that evaluation ends the training (early stopping), one more step is made.

    Attributes:
        left_out: whether an evaluation was due at the stop, which the next checkpoint is to record.
    """

    holds = "that the resumed run evaluates first, where an evaluation was left out for a stop or is still ahead"

    def __init__(self, trainer: GRPOTrainer) -> None:
        self.trainer: Any = trainer
        self.left_out = self._loaded = False
        self._made_at = -1  # the last step after which there was an evaluation

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._made_at = -1 if self._loaded else state.global_step  # none is due here unless an entry says so

    def on_evaluate(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._made_at = state.global_step

    def epochs_is_ahead(self) -> bool:
        """Return whether an epoch or the run ends at this step, and the evaluation of ``eval_strategy: epoch`` that
        belongs to it has not been made yet."""
        args = self.trainer.args
        state = self.trainer.state
        over = state.epoch is not None and (state.epoch == int(state.epoch) or state.global_step >= state.max_steps)
        by_epoch = bool(args.eval_strategy == "epoch")
        return by_epoch and over and args.eval_delay <= state.epoch and self._made_at != state.global_step

    def save(self, _folder: Path) -> dict[str, int] | None:
        """Return the checkpoint entry if an evaluation is due, else None."""
        if self.left_out or self.epochs_is_ahead():
            return {"step": self.trainer.state.global_step}
        return None

    def load(self, saved: SavedState | None) -> None:
        """Read whether the checkpoint says that an evaluation is due. Every rank calls this and gets the same
        answer."""
        here = saved is not None and "evaluation_due" in saved.entries
        self.left_out = False
        self._loaded = any(gather_object([here]))

    def make_up(self) -> None:
        """Evaluate if the loaded checkpoint says that an evaluation is due, and record the best checkpoint as HF does.
        It is called once the checkpoint's random numbers are loaded."""
        loaded = self._loaded
        self._loaded = False
        trainer = self.trainer
        args = self.trainer.args
        state = self.trainer.state
        if not loaded or trainer.eval_dataset is None or args.eval_strategy == "no":
            return
        if args.eval_strategy == "epoch" and state.epoch != int(state.epoch) and state.global_step < state.max_steps:
            return  # it was the run's last step, and the run is longer now
        trainer.recorder.say(f"the evaluation that was due after step {state.global_step} is made up")
        best = trainer._determine_best_metric(metrics=trainer._evaluate(None, None), trial=None)
        place = _checkpoint(args, state)
        if best and os.path.exists(place):
            state.best_model_checkpoint = place


class StopOnRequest(TrainerCallback):  # type: ignore[misc]
    """Callback that ends a training on request; one per trainer.

    Attributes:
        reason: why the training stops, one of ``REASONS``, the same on every rank; None while nobody has asked.
        returns: whether ``train()`` returns after a signal other than Ctrl-C; else the signal is raised again.
        signals: the signals that stop the training, beside Ctrl-C.
        broke_off_a_wait: name of the signal that ended a wait for a server, or None.
    """

    def __init__(self, trainer: GRPOTrainer, due: DueEvaluation) -> None:
        self.trainer = trainer
        self._due = due
        self.signals = [signal.SIGTERM]
        self.returns = bool(trainer.args.enable_jit_checkpoint)
        self._before: Handlers = {}
        self._waiting = False
        self._forget()
        callbacks = trainer.callback_handler.callbacks
        for hfs in [one for one in callbacks if type(one) is JITCheckpointCallback]:  # HF's own answer
            callbacks.remove(hfs)
            if hfs.jit_manager is not None:
                put_back({signal.SIGTERM: hfs.jit_manager._original_sigterm_handler})

    def _forget(self) -> None:
        """Clear the requests of an earlier training."""
        self.reason: str | None = None
        self.broke_off_a_wait: str | None = None
        self._asked: str | None = None  # the signal that this process got
        self._saved: int | None = None  # step of the newest checkpoint of this training

    def _heard(self, number: int, frame: Any) -> None:
        """Handle a signal. The first one is noted, and the step is finished. A second Ctrl-C, or a signal in a wait for
        a server, raises KeyboardInterrupt. Outside of a training the earlier handlers get the signal."""
        name = signal.Signals(number).name
        # while the trainer waits for a server, there may be no end of the step to wait for
        breaks_off = self._waiting and self.trainer.accelerator.num_processes == 1
        if not self.trainer.is_in_train:
            self.put_back()
            signal.raise_signal(number)  # for the earlier handler
        elif self._asked is None and not breaks_off:
            self._asked = name
            again = ""
            if name == CTRL_C:
                again = "; a second Ctrl-C ends at once, without one"
            logger.warning("%s: this step is finished and a checkpoint written%s", name, again)
        elif self._asked is None or name == CTRL_C:  # a second SIGTERM is ignored: a scheduler may send two
            self.broke_off_a_wait = name if self._asked is None else None
            before = self._before.get(number)
            self.put_back()
            if callable(before) and name == CTRL_C:
                before(number, frame)
            raise KeyboardInterrupt

    @contextlib.contextmanager
    def wait(self) -> Iterator[None]:
        """Return a context around a wait for a server, in which a signal ends a run of one process at once; it can be
        nested. With several processes it changes nothing."""
        before = self._waiting
        self._waiting = True
        try:
            yield
        finally:
            self._waiting = before

    def _is_asked(self, args: Any) -> bool:
        """Return whether any process was asked to stop, and set ``reason``. Every rank calls this, and all get the same
        answer."""
        if self.reason is None and self.trainer.is_in_train:
            code = REASONS.index(self._asked_here(args))
            accelerator = self.trainer.accelerator
            if accelerator.num_processes > 1:
                with named_place("whether one was asked to stop"):
                    codes = accelerator.gather(torch.tensor([code], dtype=torch.long, device=accelerator.device))
                code = int(codes.max())
            self.reason = REASONS[code] or None
        return self.reason is not None

    def _asked_here(self, args: Any) -> str:
        """Return the reason for which this process is asked to stop, one of ``REASONS``. The first process also looks
        for a stop file, and at the hours."""
        if self._asked is not None:
            return self._asked
        if args.process_index != 0:
            return ""
        if stop_file(args).exists():
            return STOP_FILE
        limit = getattr(args, "max_hours", None)
        if limit is not None and hours_of_this_process() >= limit:
            return MAX_HOURS
        return ""

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._forget()
        file = stop_file(args)
        # a file that came since this process was started is meant for this run
        if not args.process_index and not state.global_step and file.exists() and is_of_an_earlier_run(file):
            logger.warning("%s is older than this run and was meant for an earlier one: it is removed", file)
            remove(file)
        if (args.save_strategy != "no" or args.enable_jit_checkpoint) and not self._before:
            self._before = handle(self._heard, signal.SIGINT, *self.signals)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self._is_asked(args):
            control.should_training_stop = control.should_save = True
            # an evaluation that is due is made after the resume
            self._due.left_out |= bool(control.should_evaluate) or self._due.epochs_is_ahead()
            control.should_evaluate = False

    def on_evaluate(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self._is_asked(args):
            control.should_training_stop = control.should_save = True

    def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self._is_asked(args):
            control.should_training_stop, control.should_evaluate = True, False
            control.should_save = self._saved != state.global_step
            self._leave_out_the_epochs(args, state)

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._saved = state.global_step
        if not self._is_asked(args):
            return
        control.should_training_stop = True
        self._leave_out_the_epochs(args, state)
        state.best_model_checkpoint = None  # else HF loads the best one at the end, and may remove this one
        if self.reason == STOP_FILE and args.process_index == 0:
            remove(stop_file(args))  # a resumed run would stop at once
        said = kept(_checkpoint(args, state), state.global_step)
        if self.reason == CTRL_C:
            self.put_back()
            raise KeyboardInterrupt(said)
        if args.process_index == 0:
            logger.warning("%s: %s", self.reason, said)

    def _leave_out_the_epochs(self, args: Any, state: Any) -> None:
        """Record that the evaluation of ``eval_strategy: epoch`` is left out, if it is due; also in the checkpoint of
        this step, if it is written already."""
        if self._due.epochs_is_ahead():
            self._due.left_out = True
            if self._saved == state.global_step and args.should_save:
                place = Path(_checkpoint(args, state))
                write_state(place, {**read_state(place).entries, "evaluation_due": self._due.save(place)})

    def put_back(self) -> None:
        """Restore the earlier signal handlers."""
        if threading.current_thread() is threading.main_thread():
            put_back(self._before)
            self._before = {}

    @property
    def late(self) -> str | None:
        """Name of the signal that came too late to be answered, or None."""
        if self.reason is None:
            return self._asked
        return None

    @contextlib.contextmanager
    def in_force(self) -> Iterator[None]:
        """Return a context around ``train()``. After it the earlier handlers are back. If a signal stopped the
        training, it is raised again for them; Ctrl-C is raised as KeyboardInterrupt."""
        try:
            yield
        finally:
            self.put_back()
        name = self._asked or self.reason
        if name == CTRL_C:
            raise KeyboardInterrupt
        if name is not None and name.startswith("SIG") and not self.returns:
            signal.raise_signal(signal.Signals[name])


def _checkpoint(args: Any, state: Any) -> str:
    """Return the path of the checkpoint of the current step, whether it exists or not."""
    return os.path.join(args.output_dir, f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}")


def stop_file(args: Any) -> Path:
    """Return the path of the file whose existence asks a run to stop: ``stop_file``, else ``STOP`` in
    ``output_dir``."""
    given = getattr(args, "stop_file", None)
    if given is None:
        return Path(args.output_dir) / "STOP"
    return Path(given)


def remove(file: Path) -> None:
    """Remove a stop file that was answered; warn if that fails."""
    try:
        file.unlink(missing_ok=True)
    except OSError as error:
        logger.warning("the stop file %s cannot be removed (%s): take it away before the run goes on", file, error)


def started(pid: int | None = None) -> float:
    """Return when a process (by default this one) was started, in seconds since 1970, exact to a hundredth. psutil is
    only used where there is no /proc: it knows the machine's start in whole seconds only, to which the kernel's ticks
    are added."""
    try:
        ticks = int(Path(f"/proc/{pid or os.getpid()}/stat").read_text().rpartition(")")[2].split()[19])
        since_start = time.clock_gettime(time.CLOCK_BOOTTIME)
    except (OSError, AttributeError):  # not Linux
        return float(psutil.Process(pid).create_time())
    return time.time() - since_start + ticks / os.sysconf("SC_CLK_TCK")


_STARTED = started()  # by the clock at the start of this process


def is_of_an_earlier_run(file: Path) -> bool:
    """Return whether ``file`` is older than this process. The clock may have been set since the start, so the process's
    start is computed by the clock of now and by that of then, and the earlier one counts."""
    return file.stat().st_mtime < min(started(), _STARTED)


def hours_of_this_process() -> float:
    """Return the hours since this process was started. Loading and waiting count; earlier processes of a resumed run do
    not."""
    return (time.time() - started()) / 3600


def kept(folder: str, step: int) -> str:
    """Return the message at the end of an interrupted run: which checkpoint was written, and how to continue."""
    return (
        f"interrupted after step {step}; a checkpoint was written to {folder}. Go on: `grpo-lab train … --resume`, or "
        f"trainer.train(resume_from_checkpoint={folder!r})"
    )
