"""Assumptions of a plan where the stages of a pipeline are looked at before the first of them begins: the places that
earlier stages will leave, the processes of a stage, and whether the hub is to be asked."""

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
    """The outlook of one stage.

    Args:
        left: places that earlier stages will leave → the model that theirs is made from; None: no model, or not known.
        processes: how many the stage will run on.
        here_only: a dry run, which need not reach the hub; a run refuses what it cannot have.
    """

    left: Mapping[str, ModelSection | None] = field(default_factory=dict)
    processes: int = 1
    here_only: bool = True


_NOTHING = Ahead()
_OUTLOOK: ContextVar[Ahead] = ContextVar("_OUTLOOK", default=_NOTHING)


@contextmanager
def looking_ahead(outlook: Ahead) -> Iterator[None]:
    """Inside, what is checked takes ``outlook`` as given."""
    before = _OUTLOOK.set(outlook)
    try:
        yield
    finally:
        _OUTLOOK.reset(before)


def outlook() -> Ahead:
    """The assumptions in force now; none outside of a pipeline."""
    return _OUTLOOK.get()


def to_come(value: Any) -> bool:
    """Return whether ``value`` is, or holds, a place that an earlier stage will leave."""
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
    """The file at ``place``; None for one that an earlier stage will leave. ValueError: there is none."""
    if to_come(place):
        return None
    if not Path(place).is_file():
        raise ValueError(f"`{where}` is {place!r}: no such file")
    return Path(place)


def check_whole_model(section: ModelSection, where: str = "model.path") -> None:
    """ValueError for a folder that is not there, or holds no whole model: an adapter cannot be trained further, nor be
    merged."""
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
    """ValueError where ``setting`` asks for an engine that cannot be had. A dry run may plan for another machine, and
    says it beside its plan (``cli``). ``kernels``: the engine is to run in this process."""
    if asked and not (here_only and outlook().here_only):
        refuse_without_engine(f"`{setting}`", kernels)


def model_here(section: ModelSection, here_only: bool = True) -> tuple[Any, Any] | None:
    """Tokenizer and configuration of a model; None where they are not known here: of an adapter, of one that no known
    model is made into, and in a dry run (``here_only``) of a hub name."""
    origin = made_from(section)
    if origin is None:
        return None
    return tokenizer_and_config(origin, here_only and outlook().here_only)


def known_model(
    section: ModelSection, where: str = "model.path", here_only: bool = True, whole: bool = False
) -> tuple[Any, Any] | None:
    """`model_here`. ValueError: there is no such model, or it is an adapter where a ``whole`` one is needed."""
    if whole:
        check_whole_model(section, where)
    elif section.path is not None and not to_come(section.path):
        check_place(section.path, where)
    return model_here(section, here_only)
