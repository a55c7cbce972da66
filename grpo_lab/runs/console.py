"""Terminal output of a command: settings in words, and the plan of a dry run. Of what the libraries print it leaves a
line of progress: no bars for loading, saving and mapping, no dictionary of metrics per log, no notes and warnings for
their developers. Errors, warnings about weights and data, and this package's own lines stay."""

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
"""Loggers of which warnings and errors are shown."""
NOTES = ("transformers.trainer", "transformers.trainer_utils", "transformers.generation")
"""Loggers of which errors alone are shown. Their warnings say that special tokens were aligned, or that a sampler does
not read a generation flag. What transformers says of missing weights comes from another logger, and stays."""
FOR_DEVELOPERS = r"(torch|transformers|trl|accelerate|peft|datasets|huggingface_hub|vllm)(\.|$)"
NO_ACCELERATOR = r".*pin_memory.*no accelerator"
EXPERIMENTAL = r"You are (importing from 'trl\.experimental'|using '\w+', which is an experimental feature)"
"""Warnings that are hidden: TRL's SimPO, which long2short uses knowingly, `rollout_func` (thinking budgets) and
`environment_factory` are experimental."""


def describe(settings: Any) -> str:
    """Return settings in words; None reads "not applied"."""
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
    """Return the settings of a TRL trainer in words."""
    return ", ".join(f"{name} {value}" for name, value in training.items()) or "TRL's defaults"


def _inner(value: Any) -> Any:
    """Return a section inside a section, as of a mixture's task, in words."""
    if not isinstance(value, Mapping):
        return value
    return f"({', '.join(f'{name} {one}' for name, one in value.items())})"


def count_of(rows: Any, section: DataSection) -> str:
    """Return the number of rows and their source, in words. For generated rows it is the number in the recipe."""
    count = None if rows is None else len(rows)
    if section.loader in MADE and isinstance(section.arguments.get("n"), int):
        count = min(section.arguments["n"], section.limit or section.arguments["n"])
    return f"{'not loaded here' if count is None else f'{count:,}'} from {describe(section)}"


def model_of(path: str) -> str:
    """Return the path of a saved model; add to a hub name when it will be loaded."""
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
    """Replaces transformers' `PrinterCallback`, which prints dictionaries if ``disable_tqdm`` switches the bar off."""


@contextlib.contextmanager
def quiet(verbose: bool = False) -> Iterator[None]:
    """Inside the block, reduce what the libraries print to a line of progress, by their own switches; restore them
    afterwards. With ``verbose`` they print as usual."""
    from transformers import trainer

    ours: dict[str, Any] = {"DEFAULT_PROGRESS_CALLBACK": OneLine, "PrinterCallback": NoLine}
    with contextlib.ExitStack() as stack:
        for name, shown in ({"DEFAULT_PROGRESS_CALLBACK": AsStock} if verbose else ours).items():
            stack.callback(setattr, trainer, name, getattr(trainer, name))
            setattr(trainer, name, shown)  # as notebooks replace it
        if not verbose:
            _silence(stack)
        yield


def _silence(stack: contextlib.ExitStack) -> None:
    """Silence loggers, bars (loading, saving, mapping rows) and warnings until ``stack`` closes."""
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
        message = ""
        if category is UserWarning:
            message = NO_ACCELERATOR
        warnings.filterwarnings("ignore", message=message, category=category, module=FOR_DEVELOPERS)
    warnings.filterwarnings("ignore", message=EXPERIMENTAL, category=UserWarning)
    stack.enter_context(logging_redirect_tqdm())
