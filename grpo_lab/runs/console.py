"""Terminal output of a command: settings in words, the plan of a dry run, and quieter libraries.

``quiet`` reduces what torch, transformers, TRL and their like print to one line of progress. It switches off the bars
of loading, saving and mapping, the dictionary of metrics that a trainer prints at each log, and the notes and warnings
that are meant for the libraries' own developers. Errors, warnings about weights and data, and this package's own lines
stay.
"""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from textwrap import wrap
from typing import Any

from rich.text import Text
from transformers.trainer_callback import TrainerCallback

from grpo_lab.evaluation.terminal import Terminal
from grpo_lab.io import is_local
from grpo_lab.recipe.data import MADE
from grpo_lab.recipe.sections import DataSection, RewardSection
from grpo_lab.trainer.metrics.progress import AsStock, OneLine

TALKATIVE = ("vllm", "trl", "accelerate", "peft", "torch")
"""Loggers that show their warnings and errors, and nothing below."""
NOTES = ("transformers.trainer", "transformers.trainer_utils", "transformers.generation")
"""Loggers that show their errors alone. Their warnings say that special tokens were aligned, or that a sampler does not
read a generation flag. What transformers says of missing weights comes from another logger, and stays."""
FOR_DEVELOPERS = r"(torch|transformers|trl|accelerate|peft|datasets|huggingface_hub|vllm)(\.|$)"
"""Modules whose FutureWarnings and DeprecationWarnings are hidden, as a pattern."""
NO_ACCELERATOR = r".*pin_memory.*no accelerator"
"""Pattern of torch's warning, hidden too, that pinned memory is of no use without an accelerator."""
EXPERIMENTAL = r"You are (importing from 'trl\.experimental'|using '\w+', which is an experimental feature)"
"""Pattern of TRL's warning that a feature is experimental. It is hidden, since this package uses such features
knowingly: SimPO (`grpo-lab long2short`), `rollout_func` (thinking budgets) and `environment_factory`."""


def describe(settings: Any) -> str:
    """Describe settings in words, on one line, for a plan or a report.

    ``settings``: a section of a recipe (fields that are None are left out), a tuple of sections, or None, which reads
    "not applied". Anything else is its ``str``.
    """
    if settings is None:
        return "not applied"
    if isinstance(settings, DataSection):
        rest = ", ".join(f"{name} {_inner(value)}" for name, value in settings.arguments.items())
        limit = ""
        if settings.limit is not None:
            limit = f", the first {settings.limit:,}"
        return f"{settings.loader} ({rest}, template {settings.template}{limit})"
    if isinstance(settings, RewardSection):
        return " ".join([settings.name, *(f"{name}={value}" for name, value in settings.arguments.items())])
    if isinstance(settings, tuple):
        return "; ".join(describe(one) for one in settings)
    if is_dataclass(settings):
        pairs = [(f.name, getattr(settings, f.name)) for f in fields(settings)]
        return ", ".join(f"{name.replace('_', ' ')} {describe(value)}" for name, value in pairs if value is not None)
    return str(settings)


def settings_in_words(training: Mapping[str, Any]) -> str:
    """Describe the arguments that a recipe gives to a TRL trainer; none of them read "TRL's defaults"."""
    return ", ".join(f"{name} {value}" for name, value in training.items()) or "TRL's defaults"


def _inner(value: Any) -> Any:
    """Describe a mapping inside a section, such as a task of a mixture, in brackets; return other values unchanged."""
    if not isinstance(value, Mapping):
        return value
    return f"({', '.join(f'{name} {one}' for name, one in value.items())})"


def count_of(rows: Any, section: DataSection) -> str:
    """Describe how many rows there are, and where they come from.

    ``rows`` may be None, for rows that a dry run could not load. Rows that the loader generates are counted by the
    recipe (``n``, at most ``limit``), loaded or not.
    """
    asked = section.arguments.get("n")
    if section.loader in MADE and isinstance(asked, int):
        count = f"{min(asked, section.limit or asked):,}"
    elif rows is None:
        count = "not loaded here"
    else:
        count = f"{len(rows):,}"
    return f"{count} from {describe(section)}"


def model_of(path: str) -> str:
    """Describe a model by its path; of a hub name also say that it is loaded when sampling starts."""
    if is_local(path):
        return path
    return f"{path} (a hub name: loaded when sampling starts)"


def show(name: str, facts: Mapping[str, str], console: Terminal | None = None) -> None:
    """Print the plan of a dry run, a fact per line. Long lines wrap only between words: a folder can be copied."""
    console = console or Terminal()
    console.print(f"{name}: what will happen\n", style="italic", soft_wrap=True)
    room = max(map(len, facts), default=0)
    for fact, value in facts.items():
        words = wrap(str(value), max(20, console.width - room - 5), break_long_words=False, break_on_hyphens=False)
        for place, line in enumerate(words or [""]):
            title = "" if place else fact
            console.print(Text.assemble("  ", (title.ljust(room), "bold"), "   ", line), soft_wrap=True)
    console.print()


class NoLine(TrainerCallback):  # type: ignore[misc]
    """Callback that prints nothing.

    It stands in for transformers' `PrinterCallback`, which prints the metrics of each log as a dictionary when
    ``disable_tqdm`` switches the progress bar off.
    """


@contextlib.contextmanager
def quiet(verbose: bool = False) -> Iterator[None]:
    """Reduce what the libraries print during the block to a line of progress, by their own switches, which are put back
    afterwards. With ``verbose`` they print as usual."""
    from transformers import trainer

    callbacks: dict[str, Any] = {"DEFAULT_PROGRESS_CALLBACK": OneLine, "PrinterCallback": NoLine}
    if verbose:
        callbacks = {"DEFAULT_PROGRESS_CALLBACK": AsStock}
    with contextlib.ExitStack() as stack:
        for name, callback in callbacks.items():
            stack.callback(setattr, trainer, name, getattr(trainer, name))
            setattr(trainer, name, callback)  # as transformers itself replaces it in notebooks
        if not verbose:
            _silence(stack)
        yield


def _silence(stack: contextlib.ExitStack) -> None:
    """Silence loggers, bars (loading, saving, mapping rows) and warnings until ``stack`` closes."""
    import datasets
    from tqdm.contrib.logging import logging_redirect_tqdm
    from transformers.utils import logging as theirs

    levels = dict.fromkeys(TALKATIVE, logging.WARNING) | dict.fromkeys(NOTES, logging.ERROR)
    for name, level in levels.items():
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
    for category in (FutureWarning, DeprecationWarning):
        warnings.filterwarnings("ignore", category=category, module=FOR_DEVELOPERS)
    warnings.filterwarnings("ignore", message=NO_ACCELERATOR, category=UserWarning, module=FOR_DEVELOPERS)
    warnings.filterwarnings("ignore", message=EXPERIMENTAL, category=UserWarning)
    stack.enter_context(logging_redirect_tqdm())
