"""One line of progress in place of HF's dictionary of metrics per log: in the command line's runs, and in a team's where `objective` is set."""

from __future__ import annotations

import sys
from typing import Any

from transformers.trainer_callback import ProgressCallback

SECONDS_IN_A_FILE = 30.0
"""Between two updates of the line of progress where nobody watches: a log file keeps each of them."""

SHOWN = (("reward", "reward", "{:.3g}"), ("completions/mean_length", "length", "{:.0f}"), ("loss", "loss", "{:.3g}"))
"""(metric, its name on the line, how it is written), the first two that are there."""


class OneLine(ProgressCallback):  # type: ignore[misc]
    """HF's bar with the last reward and length in it, in place of a dictionary per log; an evaluation gets a line of its own."""

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
    """``reward 0.52, length 27``."""
    found = [f"{name} {how.format(logs[key])}" for key, name, how in SHOWN if isinstance(logs.get(key), int | float)]
    return ", ".join(found[:2])


class AsStock(ProgressCallback):  # type: ignore[misc]
    """HF's own, asked for: ``one_line_for`` leaves it."""


def one_line_for(trainer: Any) -> None:
    """Put ``OneLine`` where HF's own bar is, unless `log_level` asks for ``info`` or more.

    A notebook's table, a team's own callback and `disable_tqdm` (HF's printer of every metric) stay as they are.
    """
    callbacks = trainer.callback_handler.callbacks
    for place, callback in enumerate(callbacks):
        if type(callback) is ProgressCallback and trainer.args.log_level not in ("debug", "detail", "info"):
            callbacks[place] = OneLine(callback.max_str_len)


__all__ = ["AsStock", "OneLine", "in_short", "one_line_for"]
