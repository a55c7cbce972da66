"""Asked to stop: by whom, agreed over the ranks once an optimizer step, and a checkpoint of the step under way.

    who asks           when it is heard                                  how ``train()`` ends after the checkpoint
    SIGTERM            ``save_strategy`` is not ``no``, or               it ends by the signal, as it would have
                       ``enable_jit_checkpoint``                         (``enable_jit_checkpoint``: returns, as HF's)
    SIGINT (Ctrl-C)    likewise                                          ``KeyboardInterrupt`` that names the checkpoint
    a stop file        always: ``stop_file``, else ``STOP`` in           it returns; the file is removed
                       ``output_dir``
    ``max_hours``      where it is set: hours of this process, from its  it returns
                       start

Whatever happens meanwhile (generation, scoring, update, saving) ends first: the request is answered at the end of the
optimizer step, after its log line, where a resume is exact to the bit; in an evaluation or while a checkpoint is
written, at its end. An evaluation that is due at that step is the resumed run's (``due_evaluation``). With several
ranks one that was asked is enough. A second Ctrl-C ends at once, without a checkpoint; so does, in a run of one
process, a signal while the trainer waits for a server, with a checkpoint of the last step. A stop file that is older
than the process is of an earlier run: a training that begins at its first step removes it.

HF's own answer to SIGTERM (transformers 5.17) comes inside whichever of its events is next: before the optimizer's
step, where a resume has other completions, or before that step is logged. Ours takes its place.

An evaluation that was due at that step would have come before the checkpoint and drawn from training's random numbers.
The checkpoint comes first and says that one is due; the resumed run makes it as soon as it has the checkpoint's random
numbers. The same of ``eval_strategy: epoch`` with ``save_strategy: steps``, whose checkpoint of the last step is
written before the evaluation.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import torch
from accelerate.utils import gather_object
from transformers import TrainerCallback
from transformers.trainer_jit_checkpoint import JITCheckpointCallback
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from grpo_lab.signals import Handlers, handle, put_back
from grpo_lab.trainer.ranks import at
from grpo_lab.trainer.resume.state import SavedState, read_state, write_state

if TYPE_CHECKING:
    from trl import GRPOTrainer


class DueEvaluation(TrainerCallback):  # type: ignore[misc]
    """One for a trainer; comes before all other callbacks.

    Limit: where the evaluation itself ends the training (early stopping) one more step is made.
    """

    def __init__(self, trainer: GRPOTrainer) -> None:
        self._trainer = weakref.ref(trainer)
        self.left_out = False
        self._loaded = False
        self._made_at = -1  # the last step after which there was an evaluation

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._made_at = -1 if self._loaded else state.global_step  # of a checkpoint that says of none

    def on_evaluate(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._made_at = state.global_step

    def leave_out_the_epochs(self, args: Any, state: Any) -> bool:
        """At the last step of an epoch: ``eval_strategy: epoch`` would have one when the step is over. Whether it is
        left out."""
        found = self._epochs_is_ahead(args, state)
        self.left_out |= found
        return found

    def _epochs_is_ahead(self, args: Any, state: Any) -> bool:
        """``eval_strategy: epoch`` at the end of an epoch, which the run's last step ends, too; not made yet."""
        over = state.epoch is not None and (_is_whole(state.epoch) or state.global_step >= state.max_steps)
        return _by_epoch(args) and over and args.eval_delay <= state.epoch and self._made_at != state.global_step

    def leave_out(self, control: Any) -> None:
        """Whatever is due at this step comes after the resume."""
        self.left_out, control.should_evaluate = self.left_out or bool(control.should_evaluate), False

    def state(self) -> dict[str, int] | None:
        """That one is due, for a checkpoint; None where none is."""
        trainer = self._trainer()
        if trainer is None or not (self.left_out or self._epochs_is_ahead(trainer.args, trainer.state)):
            return None
        return {"step": trainer.state.global_step}

    def load(self, saved: SavedState | None) -> None:
        """Whether ``state`` said so; the same on every rank, which all come here."""
        here = saved is not None and "evaluation_due" in saved.entries
        self.left_out, self._loaded = False, any(gather_object([here]))

    def make_up(self) -> None:
        """Where the checkpoint says that one is due; its random numbers have just been loaded."""
        loaded, self._loaded = self._loaded, False
        trainer = self._trainer()
        if trainer is None:
            return
        args, state = trainer.args, trainer.state
        strategy = str(getattr(args.eval_strategy, "value", args.eval_strategy))
        if not loaded or trainer.eval_dataset is None or strategy == "no":
            return
        if _by_epoch(args) and not _is_whole(state.epoch) and state.global_step < state.max_steps:
            return  # the last step of a run that is longer now
        trainer.recorder.say(f"the evaluation that was due after step {state.global_step} is made up")
        metrics = trainer._evaluate(None, None)
        best = trainer._determine_best_metric(metrics=metrics, trial=None)
        place = os.path.join(args.output_dir, f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}")
        if best and os.path.exists(place):
            state.best_model_checkpoint = place


def _by_epoch(args: Any) -> bool:
    return str(getattr(args.eval_strategy, "value", args.eval_strategy)) == "epoch"


def _is_whole(epoch: float) -> bool:
    return epoch == int(epoch)


logger = logging.getLogger("grpo_lab")

STOP_FILE, MAX_HOURS, CTRL_C = "stop file", "max_hours", "SIGINT"
#: of two that ask at once the later one here is named
REASONS = ("", STOP_FILE, MAX_HOURS, CTRL_C, "SIGUSR1", "SIGTERM")


class StopOnRequest(TrainerCallback):  # type: ignore[misc]
    """One for a trainer.

    Attributes:
        reason: why the training stopped, one of ``REASONS``, the same on every rank; ``None`` while nobody asked.
        returns: after a signal but Ctrl-C ``train()`` returns; else the signal is passed on.
        signals: which of them, beside Ctrl-C.
        broke_off_a_wait: the signal that ended a wait for a server.
    """

    def __init__(self, trainer: GRPOTrainer, due: DueEvaluation) -> None:
        self._trainer, self._due = weakref.ref(trainer), due
        self.signals = [signal.SIGTERM]
        self.returns = bool(trainer.args.enable_jit_checkpoint)
        self._before: Handlers = {}
        self._waiting = False
        self._forget()
        _without_hfs(trainer)

    def _forget(self) -> None:
        self.reason: str | None = None
        self.broke_off_a_wait: str | None = None
        self._asked: str | None = None  # this process
        self._saved: int | None = None  # step of the newest checkpoint of this training

    # -- who asks ------------------------------------------------------------------------------------------------------

    def _heard(self, number: int, frame: Any) -> None:
        """The handler: a note, and the step goes on."""
        trainer, name = self._trainer(), signal.Signals(number).name
        under_way = trainer is not None and trainer.is_in_train
        if not under_way:
            self.put_back()
            signal.raise_signal(number)  # to whoever would have had it
        elif self._asked is None and not self._breaks_off():
            self._asked = name
            again = "; a second Ctrl-C ends at once, without one" if name == CTRL_C else ""
            logger.warning("%s: this step is finished and a checkpoint written%s", name, again)
        elif self._asked is None or name == CTRL_C:  # a scheduler may say SIGTERM twice
            self.broke_off_a_wait = name if self._asked is None else None
            before = self._before.get(number)
            self.put_back()
            if callable(before) and name == CTRL_C:
                before(number, frame)
            raise KeyboardInterrupt

    def _breaks_off(self) -> bool:
        """While the trainer waits for a server, there may be no end of the step to wait for."""
        trainer = self._trainer()
        return self._waiting and trainer is not None and trainer.accelerator.num_processes == 1

    @contextlib.contextmanager
    def wait(self) -> Iterator[None]:
        """Around a wait for a server."""
        self._waiting = True
        try:
            yield
        finally:
            self._waiting = False

    def _is_asked(self, args: Any) -> bool:
        """Whether any process was asked; the same answer on all of them, which all come here."""
        trainer = self._trainer()
        if self.reason is None and trainer is not None and trainer.is_in_train:
            code = REASONS.index(self._asked or (self._standing(args) if args.process_index == 0 else ""))
            accelerator = trainer.accelerator
            if accelerator.num_processes > 1:
                with at("whether one was asked to stop"):
                    codes = accelerator.gather(torch.tensor([code], dtype=torch.long, device=accelerator.device))
                code = int(codes.max())
            self.reason = REASONS[code] or None
        return self.reason is not None

    def _standing(self, args: Any) -> str:
        """What the main process looks at once a step: the file, and the time."""
        if stop_file(args).exists():
            return STOP_FILE
        limit = getattr(args, "max_hours", None)
        return MAX_HOURS if limit is not None and hours_of_this_process() >= limit else ""

    # -- HF's events ---------------------------------------------------------------------------------------------------

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._forget()
        self._without_an_earlier_runs_file(args, state)
        saves = str(getattr(args.save_strategy, "value", args.save_strategy)) != "no" or args.enable_jit_checkpoint
        if saves and not self._before:
            self._before = handle(self._heard, signal.SIGINT, *self.signals)

    def _without_an_earlier_runs_file(self, args: Any, state: Any) -> None:
        """It came too late for the run that it was meant for; one that came while this process was set up is meant for
        this one."""
        file = stop_file(args)
        if args.process_index or state.global_step or not file.exists():
            return
        if is_of_an_earlier_run(file):
            logger.warning("%s is older than this run and was meant for an earlier one: it is removed", file)
            remove(file)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self._is_asked(args):
            control.should_training_stop = control.should_save = True
            self._due.leave_out(control)
            self._due.leave_out_the_epochs(args, state)

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
        if self._is_asked(args):
            control.should_training_stop = True
            self._leave_out_the_epochs(args, state)
            self._kept(args, state)

    def _leave_out_the_epochs(self, args: Any, state: Any) -> None:
        """Also beside a checkpoint of this step that is there already."""
        if self._due.leave_out_the_epochs(args, state) and self._saved == state.global_step and args.should_save:
            place = f"{args.output_dir}/{PREFIX_CHECKPOINT_DIR}-{state.global_step}"
            write_state(place, {**read_state(place).entries, "evaluation_due": self._due.state()})

    def _kept(self, args: Any, state: Any) -> None:
        folder = f"{args.output_dir}/{PREFIX_CHECKPOINT_DIR}-{state.global_step}"
        state.best_model_checkpoint = (
            None  # HF would load it at the end, and with `save_total_limit: 1` remove this one
        )
        if self.reason == STOP_FILE and args.process_index == 0:
            remove(stop_file(args))  # a resumed run would stop at once
        if self.reason == CTRL_C:
            self.put_back()
            raise KeyboardInterrupt(kept(folder, state.global_step))
        if args.process_index == 0:
            logger.warning("%s: %s", self.reason, kept(folder, state.global_step))

    # -- the end -------------------------------------------------------------------------------------------------------

    def put_back(self) -> None:
        """The handlers as they were."""
        if threading.current_thread() is threading.main_thread():
            put_back(self._before)
            self._before = {}

    @property
    def late(self) -> str | None:
        """What this process was asked after the last moment at which it could be answered."""
        return self._asked if self.reason is None else None

    @contextlib.contextmanager
    def in_force(self) -> Iterator[None]:
        """Around ``train()``: the handlers come back however it ends; after one that ended by itself the signal is
        passed on."""
        try:
            yield
        finally:
            self.put_back()
        self._pass_on()

    def _pass_on(self) -> None:
        """The signal goes to whoever would have had it."""
        name = self._asked or self.reason
        if name == CTRL_C:
            raise KeyboardInterrupt
        if name is not None and name.startswith("SIG") and not self.returns:
            signal.raise_signal(signal.Signals[name])


def _without_hfs(trainer: GRPOTrainer) -> None:
    """Take HF's callback out (``enable_jit_checkpoint``), and its handler."""
    for callback in [each for each in trainer.callback_handler.callbacks if type(each) is JITCheckpointCallback]:
        trainer.callback_handler.callbacks.remove(callback)
        if callback.jit_manager is not None:
            put_back({signal.SIGTERM: callback.jit_manager._original_sigterm_handler})


def stop_file(args: Any) -> Path:
    """The file whose presence asks a run to stop: ``stop_file``, else ``STOP`` in ``output_dir``."""
    given = getattr(args, "stop_file", None)
    return Path(args.output_dir) / "STOP" if given is None else Path(given)


def remove(file: Path) -> None:
    """Take a stop file away that was answered; where that cannot be, it is said."""
    try:
        file.unlink(missing_ok=True)
    except OSError as error:
        logger.warning("the stop file %s cannot be removed (%s): take it away before the run goes on", file, error)


def started(pid: int | None = None) -> float:
    """When a process (this one) was started, to a hundredth of a second; seconds since 1970.

    The kernel counts ticks since the machine's start; psutil adds them to that moment in whole seconds.
    """
    try:
        ticks = int(Path(f"/proc/{pid or os.getpid()}/stat").read_text().rpartition(")")[2].split()[19])
        since_start = time.clock_gettime(time.CLOCK_BOOTTIME)
    except (OSError, AttributeError):  # not Linux
        return float(psutil.Process(pid).create_time())
    return time.time() - since_start + ticks / os.sysconf("SC_CLK_TCK")


_STARTED = started()  # by the clock as it was then


def is_of_an_earlier_run(file: Path) -> bool:
    """Whether a stop file is older than this process, by the clock as it is and as it was: one that is set may not take
    a request back."""
    return file.stat().st_mtime < min(started(), _STARTED)


def hours_of_this_process() -> float:
    """Since the process was started: loading and waiting count, what an earlier process of the run took does not."""
    return (time.time() - started()) / 3600


def kept(folder: str, step: int) -> str:
    """What an interrupted run says at its end."""
    return (
        f"interrupted after step {step}; a checkpoint was written to {folder}. Go on: `grpo-lab train … --resume`, or "
        f"trainer.train(resume_from_checkpoint={folder!r})"
    )
