"""What the libraries print of a run, reduced to a line of progress: only around the command line's own runs, never at import.

Silenced by the libraries' own switches: bars for loading weights, saving and mapping rows; a dictionary of metrics per log; notes on
special tokens and generation flags; warnings for the libraries' developers. Errors, warnings about weights and data, and this package's
own lines stay. The metrics are in ``metrics.jsonl``. ``--verbose`` changes nothing of what the libraries print.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import warnings
from collections.abc import Iterator
from typing import Any

from transformers.trainer_callback import ProgressCallback, TrainerCallback

TALKATIVE = ("vllm", "trl", "accelerate", "peft", "torch")
"""Loggers heard from warnings up."""

NOTES = ("transformers.trainer", "transformers.trainer_utils", "transformers.generation")
"""Loggers heard from errors up: special tokens aligned, generation flags that a sampler does not read. What transformers says of
weights that a checkpoint lacks comes from elsewhere, and stays."""

FOR_DEVELOPERS = r"(torch|transformers|trl|accelerate|peft|datasets|huggingface_hub|vllm)(\.|$)"
NO_ACCELERATOR = r".*pin_memory.*no accelerator"
EXPERIMENTAL = r"You are (importing from 'trl\.experimental'|using '\w+', which is an experimental feature)"
"""TRL's SimPO, which long2short uses knowingly; `rollout_func` (thinking budgets) and `environment_factory`."""

SECONDS_IN_A_FILE = 30.0
"""Between two updates of the line of progress where nobody watches: a log file keeps each of them."""

SHOWN = (("reward", "reward", "{:.3g}"), ("completions/mean_length", "length", "{:.0f}"), ("loss", "loss", "{:.3g}"))
"""(metric, its name on the line, how it is written), the first two that are there."""


class OneLine(ProgressCallback):  # type: ignore[misc]
    """HF's bar with the last reward and length in it, in place of a dictionary per log."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        super().on_train_begin(args, state, control, **more)
        if self.training_bar is not None and not sys.stderr.isatty():
            self.training_bar.mininterval = self.training_bar.maxinterval = SECONDS_IN_A_FILE

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any) -> None:
        if self.training_bar is not None and logs and "loss" in logs:
            self.training_bar.set_postfix_str(in_short(logs), refresh=False)


class NoLine(TrainerCallback):  # type: ignore[misc]
    """In place of HF's printer of dictionaries, where ``disable_tqdm`` asks for no bar."""


def in_short(logs: dict[str, Any]) -> str:
    """``reward 0.52, length 27``."""
    found = [f"{name} {how.format(logs[key])}" for key, name, how in SHOWN if isinstance(logs.get(key), int | float)]
    return ", ".join(found[:2])


@contextlib.contextmanager
def quiet(verbose: bool = False) -> Iterator[None]:
    """Inside the block the libraries keep to a line of progress; afterwards everything is as it was.

    Args:
        verbose: change nothing.
    """
    if verbose:
        yield
        return
    from tqdm.contrib.logging import logging_redirect_tqdm

    with _loggers(), _bars(), _callbacks(), warnings.catch_warnings(), logging_redirect_tqdm():
        for category in (FutureWarning, DeprecationWarning, UserWarning):
            message = NO_ACCELERATOR if category is UserWarning else ""
            warnings.filterwarnings("ignore", message=message, category=category, module=FOR_DEVELOPERS)
        warnings.filterwarnings("ignore", message=EXPERIMENTAL, category=UserWarning)
        yield


@contextlib.contextmanager
def _loggers() -> Iterator[None]:
    levels = {**dict.fromkeys(TALKATIVE, logging.WARNING), **dict.fromkeys(NOTES, logging.ERROR)}
    before = {name: logging.getLogger(name).level for name in levels}
    for name, level in levels.items():
        logging.getLogger(name).setLevel(level)
    try:
        yield
    finally:
        for name, level in before.items():
            logging.getLogger(name).setLevel(level)


@contextlib.contextmanager
def _bars() -> Iterator[None]:
    """Bars of ``transformers`` (loading, saving) and ``datasets`` (mapping rows)."""
    import datasets
    from transformers.utils import logging as theirs

    shown = theirs.is_progress_bar_enabled(), not datasets.are_progress_bars_disabled()
    theirs.disable_progress_bar()
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        if shown[0]:
            theirs.enable_progress_bar()
        if shown[1]:
            datasets.enable_progress_bars()


@contextlib.contextmanager
def _callbacks() -> Iterator[None]:
    """What every ``transformers.Trainer`` made inside shows its progress with, as notebooks replace it."""
    from transformers import trainer

    names = {"DEFAULT_PROGRESS_CALLBACK": OneLine, "PrinterCallback": NoLine}
    before = {name: getattr(trainer, name) for name in names}
    for name, ours in names.items():
        setattr(trainer, name, ours)
    try:
        yield
    finally:
        for name, theirs in before.items():
            setattr(trainer, name, theirs)


__all__ = ["OneLine", "in_short", "quiet"]
