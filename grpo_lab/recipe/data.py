"""Loading the rows of a recipe's ``data`` section, by one of our loaders or a team's function
``"module:attribute"``.

A run calls ``load_rows``. A plan calls ``rows_here``, which gives up on rows that cannot be had yet, and inside
``asking_the_hub_once`` reads no data set twice.
"""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any

from grpo_lab.io import is_local, looks_local
from grpo_lab.recipe.ahead import outlook, to_come
from grpo_lab.recipe.mixture import LOADER, joined
from grpo_lab.recipe.sections import DataSection
from grpo_lab.registry import load_named
from grpo_lab.settings import one_of, read, refuse_misfit, typed

if TYPE_CHECKING:
    from datasets import Dataset

READ = {"file": "accuracy", "gsm8k": "accuracy", "math": "accuracy", "humaneval": "code", "mbpp": "code"}
MADE = {"word_problems": "accuracy", "coding_tasks": "code", "proofs": "proof"}
MADE |= {"countdown": "countdown", "sorting": "sorting"}
"""Our loaders, those that read files or the hub (``READ``) and those that generate rows (``MADE``), each with the
reward that judges answers to its rows."""
LOADERS = {**{name: f"load_{name}" for name in READ}, **{name: name for name in MADE}}
"""Name of a loader in recipes → its function in ``grpo_lab.data``."""
BESIDE = ("loader", "template", "limit")
"""Keys of a section that are not arguments of its loader."""
OF_MIXTURE = ("data", "evaluation.data")
"""Sections that come from a recipe's ``mixture``, so that an error about a task's data names ``mixture.TASK.data``."""


def load_rows(section: DataSection, where: str = "data") -> Dataset:
    """Load the rows that ``section`` describes; they have the column ``prompt``.

    Raises ValueError, which names the setting ``where``, for an unknown loader, wrong arguments, or rows that cannot be
    loaded. A team's loader may raise any error: its file and line are named.
    """
    load, place = _loader_with_arguments(section, where)
    parameters = inspect.signature(load).parameters
    takes_template = "template" in parameters or any(one.kind is one.VAR_KEYWORD for one in parameters.values())
    template = {}
    if takes_template:
        template = {"template": section.template}
    arguments = typed(section.arguments, load, where)
    if load is mixture and where not in OF_MIXTURE:
        load = partial(_tasks_of, f"{where}.{{}}")
    try:
        found = load(**arguments, **template)
    except (ValueError, OSError) as error:
        raise ValueError(f"{place}: {error}") from error
    except MemoryError:
        raise
    except Exception as error:  # a mistake in a team's loader, or in what it was given
        raise ValueError(f"{place}: {type(error).__name__}: {error} ({where_raised(error)})") from error
    if section.loader in LOADERS:
        rows = found
    else:
        rows = _with_prompts(found, section, takes_template, place)
    if section.limit is not None:
        rows = rows.select(range(min(section.limit, len(rows))))
    return rows


def _loader_with_arguments(section: DataSection, where: str) -> tuple[Callable[..., Any], str]:
    """Return the function that loads the rows, and how messages call it. Raises ValueError if the section has an
    argument that the function does not take, or lacks one that it needs."""
    load = loader_of(section.loader, f"{where}.loader")
    place = f"`{where}` (loader {section.loader!r})"
    refuse_misfit(load, section.arguments, place, BESIDE)
    return load, place


def loader_of(name: str, where: str) -> Callable[..., Any]:
    """Return the function of the loader ``name``. Raises ValueError, which names the setting ``where``, if there is
    none."""
    if name == LOADER:
        return mixture
    if ":" in name:
        found: Callable[..., Any] = load_named(name, where)
    elif name in LOADERS:
        found = getattr(import_module("grpo_lab.data"), LOADERS[name])
    else:
        raise ValueError(f"`{where}` is {name!r}{one_of(name, sorted(LOADERS))}, or 'module:attribute'")
    return found


def mixture(template: str = "chat", **tasks: Any) -> Dataset:
    """Load the rows of several tasks and join them (``mixture.joined``).

    ``tasks``: name → a ``data`` section. ``template``: the prompt template of a section that names none.
    """
    return _tasks_of("mixture.{}.data", template, **tasks)


def _tasks_of(places: str, /, template: str, **tasks: Any) -> Dataset:
    """Load the rows of several tasks and join them. ``places`` is a format string that, given a task's name, becomes
    the setting that errors name."""
    parts = {}
    for name, one in tasks.items():
        where = places.format(name)
        if isinstance(one, Mapping):
            one = {"template": template, **one}
        parts[name] = load_rows(read(DataSection, one, where), where)
    return joined(parts)


def where_raised(error: BaseException) -> str:
    """Return the file and line in which ``error`` was raised."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    return f"{last.filename}, line {last.lineno}"


def _with_prompts(found: Any, section: DataSection, own_template: bool, place: str) -> Dataset:
    """Return the rows of a team's loader with prompts: their own or, without a column ``prompt``, those that the
    recipe's template makes of ``question``.

    ``own_template``: whether the loader took the template. Raises ValueError for anything but rows, for no rows, for
    rows without either column, and for a template that would have no effect.
    """
    from datasets import Dataset

    from grpo_lab.data.prompts import find_template
    from grpo_lab.data.rows import dataset_of, to_dataset

    if not isinstance(found, Dataset):
        if not (isinstance(found, list | tuple) and all(isinstance(row, Mapping) for row in found)):
            seen = type(found).__name__
            raise ValueError(f"{place} gave a {seen}; a `datasets.Dataset` or a list of mappings is needed")
        found = dataset_of(found)
    if not len(found):
        raise ValueError(f"{place} gave no rows")
    if "prompt" in found.column_names:
        if section.template != "chat" and not own_template:
            raise ValueError(f"{place}: `template` has no effect, since its rows have a `prompt`; leave it out")
        return found
    if "question" not in found.column_names:
        raise ValueError(f"{place} gave rows with the columns {found.column_names}; `prompt`, or `question`, is needed")
    return to_dataset(found, find_template(section.template))


def loader_signature(name: str, where: str = "data.loader") -> inspect.Signature:
    """Return the signature of the loader ``name``. Raises ValueError, which names the setting ``where``, if there is
    none."""
    return inspect.signature(loader_of(name, where))


def loader_arguments() -> dict[str, list[str]]:
    """Return the names of all arguments of our loaders, each with the loaders that take it."""
    found: dict[str, list[str]] = {}
    for loader in LOADERS:
        for name in loader_signature(loader).parameters:
            found.setdefault(name, []).append(loader)
    return found


def every_argument(section: DataSection) -> dict[str, Any]:
    """Return the arguments that the section's loader gets: the section's own and, for those it leaves out, the
    defaults; without ``template``."""
    parameters = loader_signature(section.loader).parameters.values()
    defaults = {p.name: p.default for p in parameters if p.name != "template" and p.default is not p.empty}
    return {**defaults, **section.arguments}


_ASKED_ONCE: ContextVar[dict[str, Any] | None] = ContextVar("_ASKED_ONCE", default=None)
"""Rows that were loaded inside ``asking_the_hub_once``, by their section as text; None outside of it."""


@contextmanager
def asking_the_hub_once() -> Iterator[None]:
    """Context in which ``rows_here`` reads each section's rows once, and a hub that could not be reached (23 s of
    retries) is not asked again."""
    from datasets import config

    offline = config.HF_HUB_OFFLINE
    place = _ASKED_ONCE.set({})
    try:
        yield
    finally:
        _ASKED_ONCE.reset(place)
        config.HF_HUB_OFFLINE = offline


def not_asked_again(error: Exception) -> None:
    """Switch the ``datasets`` library to offline for the rest of `asking_the_hub_once`, if ``error`` says that the hub
    cannot be reached. Outside of that context do nothing."""
    from datasets import config
    from huggingface_hub.errors import LocalEntryNotFoundError

    away = _caused_by(error, ConnectionError, LocalEntryNotFoundError)
    config.HF_HUB_OFFLINE |= _ASKED_ONCE.get() is not None and away


def rows_here(section: DataSection, where: str) -> Any:
    """Load the rows for a plan. Return None if an earlier stage has still to write them or, in a dry run, if they are
    on the hub and it cannot be reached. Other errors are those of ``load_rows``."""
    from datasets.exceptions import DatasetsError

    loaded = _ASKED_ONCE.get()
    if loaded is not None and str(section) in loaded:
        return loaded[str(section)]
    if to_come(section.arguments):
        _loader_with_arguments(section, where)
        return None
    found = None
    try:
        found = load_rows(section, where)
    except ValueError as error:
        source = section.arguments.get("source")
        local = source is not None and (is_local(source) or looks_local(str(source)))
        of_the_hub = section.loader in (*READ, LOADER) and not local and _caused_by(error, OSError, DatasetsError)
        if not (of_the_hub and outlook().here_only):
            raise
        not_asked_again(error)
    if loaded is not None:
        loaded[str(section)] = found
    return found


def _caused_by(error: BaseException | None, *kinds: type[BaseException]) -> bool:
    """Return whether ``error``, or an error that it was raised from, is of one of ``kinds``."""
    return error is not None and (isinstance(error, kinds) or _caused_by(error.__cause__, *kinds))
