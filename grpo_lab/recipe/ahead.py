"""Assumptions of a plan that looks at a pipeline's stages before the first of them begins.

They are the places that earlier stages will leave, the processes of a stage, and whether the hub is asked.
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
from grpo_lab.recipe.models import refuse_adapter, tokenizer_and_config
from grpo_lab.recipe.sections import ModelSection


@dataclass(frozen=True)
class Ahead:
    """Assumptions about one stage that has not begun.

    Args:
        left: places that earlier stages will leave → the model that theirs is made from; None: no model, or not known.
        processes: on how many the stage will run.
        here_only: a dry run, which need not reach the hub; a run refuses what it cannot have.
    """

    left: Mapping[str, ModelSection | None] = field(default_factory=dict)
    processes: int = 1
    here_only: bool = True


_NOTHING = Ahead()
_OUTLOOK: ContextVar[Ahead] = ContextVar("_OUTLOOK", default=_NOTHING)


@contextmanager
def looking_ahead(outlook: Ahead) -> Iterator[None]:
    """Context in which checks assume what ``outlook`` says."""
    before = _OUTLOOK.set(outlook)
    try:
        yield
    finally:
        _OUTLOOK.reset(before)


def outlook() -> Ahead:
    """Return the assumptions in force. Outside of a pipeline nothing is assumed."""
    return _OUTLOOK.get()


def to_come(value: Any) -> bool:
    """Return whether ``value`` is, or holds, a place that an earlier stage has still to make."""
    if isinstance(value, Mapping):
        return any(map(to_come, value.values()))
    if isinstance(value, list | tuple):
        return any(map(to_come, value))
    return isinstance(value, str | Path) and str(value) in outlook().left


def made_from(section: ModelSection) -> ModelSection | None:
    """Return a section whose tokenizer and context length are those of the model in ``section``.

    It is ``section`` itself, unless an earlier stage has still to make that model: then it is the model that the stage
    begins with, with the adapter of ``section`` and with its tokenizer, if it names one. None: that is not known.
    """
    if not to_come(section.path):
        return section
    origin = outlook().left[str(section.path)]
    if origin is None:
        return None
    return replace(origin, lora=section.lora, tokenizer=section.tokenizer or origin.tokenizer)


def check_file(place: str, where: str) -> Path | None:
    """Return the file at ``place``; None if an earlier stage has still to make it. Raises
    ValueError if there is none."""
    if to_come(place):
        return None
    if not Path(place).is_file():
        raise ValueError(f"`{where}` is {place!r}: no such file")
    return Path(place)


def check_whole_model(section: ModelSection, where: str = "model.path") -> None:
    """Raise ValueError if the section's folder is not there, holds no model, or only an adapter. An adapter cannot be
    trained further, nor be merged."""
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
    """Raise ValueError if ``setting`` asks for an engine that is not available.

    A dry run may plan for another machine, and notes that beside its plan (``cli``). ``kernels``: the engine is to run
    in this process.
    """
    if asked and not (here_only and outlook().here_only):
        refuse_without_engine(f"`{setting}`", kernels)


def model_here(section: ModelSection, here_only: bool = True) -> tuple[Any, Any] | None:
    """Return tokenizer and configuration of a model; None if they are not known here.

    They are not if an earlier stage makes it from an unknown model, nor, in a dry run (``here_only``), for a hub name.
    """
    origin = made_from(section)
    if origin is None:
        return None
    return tokenizer_and_config(origin, here_only and outlook().here_only)


def known_model(
    section: ModelSection, where: str = "model.path", here_only: bool = True, whole: bool = False
) -> tuple[Any, Any] | None:
    """Return `model_here`. Raises ValueError if there is no such model, or it is an adapter where a ``whole`` one is
    needed."""
    if whole:
        check_whole_model(section, where)
    elif section.path is not None and not to_come(section.path):
        check_place(section.path, where)
    return model_here(section, here_only)
