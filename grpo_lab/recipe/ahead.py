"""Assumptions of a plan that looks at a pipeline's stages before the first of them begins.

A pipeline is checked as a whole before its first stage begins. A later stage may then name a model or file that an
earlier stage has still to write, so that a check must not complain that it is missing. ``looking_ahead`` sets the
assumptions about one stage (``Ahead``): the paths that earlier stages will leave, the number of processes, and whether
this is a dry run. The checks below read them by ``outlook``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from grpo_lab.engines.vllm.presence import refuse_without_engine
from grpo_lab.io import check_place
from grpo_lab.recipe.models import TokenizerAndConfig, refuse_adapter, tokenizer_and_config
from grpo_lab.recipe.sections import ModelSection


@dataclass(frozen=True)
class Ahead:
    """Assumptions about one stage that has not begun.

    Args:
        left: paths that earlier stages will leave. For a model the value is the section of the model that it will be
            trained from, which shows its tokenizer and context length; ``None`` for a path that holds no model, or a
            model of unknown origin.
        processes: number of processes on which the stage will run.
        here_only: whether this is a dry run. What only a network or another machine can give is then left unknown;
            before a run it is an error if it is missing.
    """

    left: Mapping[str, ModelSection | None] = field(default_factory=dict)
    processes: int = 1
    here_only: bool = True


_NOTHING = Ahead()
"""Assumptions outside of a pipeline."""
_OUTLOOK: ContextVar[Ahead] = ContextVar("_OUTLOOK", default=_NOTHING)


@contextmanager
def looking_ahead(outlook: Ahead) -> Iterator[None]:
    """Context in which the checks below assume what ``outlook`` says."""
    before = _OUTLOOK.set(outlook)
    try:
        yield
    finally:
        _OUTLOOK.reset(before)


def outlook() -> Ahead:
    """Return the assumptions in force. Outside of a pipeline no path is still to come."""
    return _OUTLOOK.get()


def to_come(value: Any) -> bool:
    """Return whether ``value`` is a path that an earlier stage has still to write, or a mapping or list with one."""
    if isinstance(value, Mapping):
        return any(map(to_come, value.values()))
    if isinstance(value, list | tuple):
        return any(map(to_come, value))
    return isinstance(value, str | Path) and str(value) in outlook().left


def made_from(section: ModelSection) -> ModelSection | None:
    """Return a section of a model that exists now, with the same tokenizer and context length as that of ``section``.

    That is ``section`` itself, unless an earlier stage has still to make its model. Then it is the model from which
    that stage trains, with the ``lora`` of ``section``, and its ``tokenizer`` if that is set. None if that model is not
    known.
    """
    if not to_come(section.path):
        return section
    origin = outlook().left[str(section.path)]
    if origin is None:
        return None
    return replace(origin, lora=section.lora, tokenizer=section.tokenizer or origin.tokenizer)


def check_file(place: str, where: str) -> Path | None:
    """Return the path of the file at ``place``; None if an earlier stage has still to write it. Raises ValueError,
    which names the setting ``where``, if there is no such file."""
    if to_come(place):
        return None
    if not Path(place).is_file():
        raise ValueError(f"`{where}` is {place!r}: no such file")
    return Path(place)


def check_whole_model(section: ModelSection, where: str = "model.path") -> None:
    """Raise ValueError, which names the setting ``where``, if the section's ``path`` is no folder, holds no model, or
    only an adapter, which cannot be trained further nor merged. If it is still to come, it must not become an adapter.
    """
    if section.path is None:
        return
    if not to_come(section.path):
        refuse_adapter(check_place(section.path, where), where)
        return
    origin = outlook().left[section.path]
    if origin is not None and origin.lora is not None:
        raise ValueError(
            f"`{where}` is {section.path!r}, which will be an adapter (`model.lora`): what trains, merges or teaches "
            "takes a whole model. Leave `lora` out there, or merge the adapter into its base in between"
        )


def check_engine(asked: bool, setting: str, here_only: bool = True, kernels: bool = True) -> None:
    """Raise ValueError if an engine is ``asked`` for by ``setting`` and not available.

    A dry run (``here_only``) may plan for another machine, and only notes that beside its plan (``cli``). ``kernels``:
    whether the engine will run in this process.
    """
    if asked and not (here_only and outlook().here_only):
        refuse_without_engine(f"`{setting}`", kernels)


def model_here(section: ModelSection, here_only: bool = True) -> TokenizerAndConfig | None:
    """Return a model's tokenizer and configuration; None if they are not known yet.

    They are not known if an earlier stage makes the model from an unknown one, nor, in a dry run (``here_only``), for a
    hub name.
    """
    origin = made_from(section)
    if origin is None:
        return None
    return tokenizer_and_config(origin, here_only and outlook().here_only)


def known_model(
    section: ModelSection, where: str = "model.path", here_only: bool = True, whole: bool = False
) -> TokenizerAndConfig | None:
    """Return what `model_here` returns, once the model is checked. Raises ValueError, which names the setting
    ``where``, if there is no such model or, with ``whole``, if it is an adapter."""
    if whole:
        check_whole_model(section, where)
    elif section.path is not None and not to_come(section.path):
        check_place(section.path, where)
    return model_here(section, here_only)
