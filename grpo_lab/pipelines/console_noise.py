"""What the libraries print of a run, reduced to a line of progress: only around the command line's own runs, never at
import.

(A team's own trainer has the line of progress, too, where `objective` is set: ``grpo_lab.trainer.metrics.progress``.)

Silenced by the libraries' own switches: bars for loading weights, saving and mapping rows; a dictionary of metrics per
log; notes on special tokens and generation flags; warnings for the libraries' developers. Errors, warnings about
weights and data, and this package's own lines stay. The metrics are in ``metrics.jsonl``. ``--verbose`` changes nothing
of what the libraries print.
"""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Iterator

from transformers.trainer_callback import TrainerCallback

from grpo_lab.trainer.metrics.progress import AsStock, OneLine

TALKATIVE = ("vllm", "trl", "accelerate", "peft", "torch")
"""Loggers heard from warnings up."""

NOTES = ("transformers.trainer", "transformers.trainer_utils", "transformers.generation")
"""Loggers heard from errors up: special tokens aligned, generation flags that a sampler does not read. What
transformers says of weights that a checkpoint lacks comes from elsewhere, and stays."""

FOR_DEVELOPERS = r"(torch|transformers|trl|accelerate|peft|datasets|huggingface_hub|vllm)(\.|$)"
NO_ACCELERATOR = r".*pin_memory.*no accelerator"
EXPERIMENTAL = r"You are (importing from 'trl\.experimental'|using '\w+', which is an experimental feature)"
"""TRL's SimPO, which long2short uses knowingly; `rollout_func` (thinking budgets) and `environment_factory`."""


class NoLine(TrainerCallback):  # type: ignore[misc]
    """In place of HF's printer of dictionaries, where ``disable_tqdm`` asks for no bar."""


ONE_LINE = {"DEFAULT_PROGRESS_CALLBACK": OneLine, "PrinterCallback": NoLine}


@contextlib.contextmanager
def quiet(verbose: bool = False) -> Iterator[None]:
    """Inside the block the libraries keep to a line of progress; afterwards everything is as it was.

    Args:
        verbose: change nothing.
    """
    with contextlib.ExitStack() as stack:
        if verbose:
            _show_with(stack, DEFAULT_PROGRESS_CALLBACK=AsStock)
        else:
            _show_with(stack, **ONE_LINE)
            _silence(stack)
        yield


def _show_with(stack: contextlib.ExitStack, **names: type[TrainerCallback]) -> None:
    """What every ``transformers.Trainer`` made inside shows its progress with, as notebooks replace it."""
    from transformers import trainer

    for name, ours in names.items():
        stack.callback(setattr, trainer, name, getattr(trainer, name))
        setattr(trainer, name, ours)


def _silence(stack: contextlib.ExitStack) -> None:
    """Loggers, bars (loading, saving, mapping rows) and warnings."""
    import datasets
    from tqdm.contrib.logging import logging_redirect_tqdm
    from transformers.utils import logging as theirs

    for name, level in {**dict.fromkeys(TALKATIVE, logging.WARNING), **dict.fromkeys(NOTES, logging.ERROR)}.items():
        logger = logging.getLogger(name)
        stack.callback(logger.setLevel, logger.level)
        logger.setLevel(level)
    if theirs.is_progress_bar_enabled():
        stack.callback(theirs.enable_progress_bar)
    if not datasets.are_progress_bars_disabled():
        stack.callback(datasets.enable_progress_bars)
    theirs.disable_progress_bar()
    datasets.disable_progress_bars()
    stack.enter_context(warnings.catch_warnings())
    for category in (FutureWarning, DeprecationWarning, UserWarning):
        message = NO_ACCELERATOR if category is UserWarning else ""
        warnings.filterwarnings("ignore", message=message, category=category, module=FOR_DEVELOPERS)
    warnings.filterwarnings("ignore", message=EXPERIMENTAL, category=UserWarning)
    stack.enter_context(logging_redirect_tqdm())
