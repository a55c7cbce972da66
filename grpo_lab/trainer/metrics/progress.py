"""Progress of a run that trains: one line in place of HF's dictionary of metrics, and a verdict on whether it works.

Both read the log and do not change it. Trainings of the command line have the line; a ``LabTrainer`` has both if
`objective` is set.
"""

from __future__ import annotations

import logging
import sys
from typing import Any

from transformers import TrainerCallback
from transformers.trainer_callback import ProgressCallback
from trl import GRPOTrainer

from grpo_lab.diagnostics import Diagnosis, Facts, diagnose

logger = logging.getLogger("grpo_lab")

#: Seconds between two updates of the progress bar if stderr is no terminal, since a log file keeps each of them.
SECONDS_IN_A_FILE = 30.0
#: (metric, its name on the line, its format). The first two of these metrics that were logged are shown.
SHOWN = (("reward", "reward", "{:.3g}"), ("completions/mean_length", "length", "{:.0f}"), ("loss", "loss", "{:.3g}"))


class OneLine(ProgressCallback):  # type: ignore[misc]
    """HF's progress bar, which shows the last reward and length in place of a dictionary per log, and one line per
    evaluation."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        super().on_train_begin(args, state, control, **more)
        if self.training_bar is not None and not sys.stderr.isatty():
            self.training_bar.mininterval = self.training_bar.maxinterval = SECONDS_IN_A_FILE

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any) -> None:
        if self.training_bar is None or not logs:
            return
        if "loss" in logs:
            self.training_bar.set_postfix_str(in_short(logs), refresh=False)
        elif "eval_loss" in logs:
            found = {name.removeprefix("eval_"): value for name, value in logs.items() if name.startswith("eval_")}
            self.training_bar.write(f"step {state.global_step}: evaluation: {in_short(found)}", file=sys.stderr)


def in_short(logs: dict[str, Any]) -> str:
    """Return the main metrics in short: ``reward 0.52, length 27``."""
    found = [f"{name} {how.format(logs[key])}" for key, name, how in SHOWN if isinstance(logs.get(key), int | float)]
    return ", ".join(found[:2])


class AsStock(ProgressCallback):  # type: ignore[misc]
    """HF's own progress bar, if a user asks for it: ``one_line_for`` does not replace it."""


def one_line_for(trainer: GRPOTrainer) -> None:
    """Replace HF's own bar by ``OneLine``, unless `log_level` is ``info`` or more verbose. A notebook's table, a team's
    own callback and `disable_tqdm` (HF's printer of every metric) stay as they are."""
    callbacks = trainer.callback_handler.callbacks
    for place, callback in enumerate(callbacks):
        if type(callback) is ProgressCallback and trainer.args.log_level not in ("debug", "detail", "info"):
            callbacks[place] = OneLine(callback.max_str_len)


class HealthLine(TrainerCallback):  # type: ignore[misc]
    """Logs a verdict on the run (``diagnostics.diagnose``) when it changes, every ``every`` logs, and at the end; as a
    warning if something looks wrong.

    ``LabTrainer`` adds it if `objective` is set. A drop-in run gets it with ``callbacks=[HealthLine()]``. It reads
    ``state.log_history``, which checkpoints contain, so a resumed run knows the log from before.

    Args:
        every: number of logs after which an unchanged verdict is logged again.
        own_loss: whether the loss is a team's, so that its value cannot be interpreted here.
        success: the smallest reward that the advantage rule counts as a success, if it has such a bound.
    """

    def __init__(self, every: int = 20, own_loss: bool = False, success: float | None = None) -> None:
        self.every = every
        self.own_loss = own_loss
        self.success = success
        self.said: Diagnosis | None = None
        self._since = 0

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **more: Any) -> None:
        """Judge the run from its log so far, on the main process, and log the verdict if it is due."""
        if not state.is_world_process_zero or not logs or "loss" not in logs:
            return
        optimizer = more.get("optimizer")
        updates = args.steps_per_generation * args.num_iterations
        moves = None
        if optimizer is not None:
            moves = any(float(group["lr"]) != 0 for group in optimizer.param_groups)
        steps = updates / args.gradient_accumulation_steps
        facts = Facts(steps, int(state.max_steps), self.own_loss, moves, self.success)
        verdict = diagnose([row for row in state.log_history if "loss" in row], facts)
        self._since += 1
        ends = state.global_step >= state.max_steps
        if self.said is None or verdict.names != self.said.names or self._since >= self.every or ends:
            logger.log(logging.INFO if verdict.healthy else logging.WARNING, "%s", verdict.line)
            self.said = verdict
            self._since = 0
