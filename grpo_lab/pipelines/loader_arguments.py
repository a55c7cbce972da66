"""What a loader of rows takes, and with which values where a recipe says nothing."""

from __future__ import annotations

import inspect
from importlib import import_module
from typing import Any

from grpo_lab.pipelines.parts import LOADERS
from grpo_lab.pipelines.recipe import DataSection


def loader_signature(name: str, where: str = "data.loader") -> inspect.Signature:
    """What the loader ``name`` takes, with its defaults. ValueError, naming ``where``, for an unknown loader."""
    if name not in LOADERS:
        raise ValueError(f"`{where}` is {name!r}; it must be one of {', '.join(sorted(LOADERS))}")
    return inspect.signature(getattr(import_module("grpo_lab.data"), LOADERS[name]))


def loader_arguments() -> dict[str, list[str]]:
    """Argument → the loaders that take it."""
    found: dict[str, list[str]] = {}
    for loader in LOADERS:
        for name in loader_signature(loader).parameters:
            found.setdefault(name, []).append(loader)
    return found


def every_argument(section: DataSection) -> dict[str, Any]:
    """The section's arguments and, where it says nothing, the loader's defaults; `template` stands apart."""
    parameters = loader_signature(section.loader).parameters.values()
    defaults = {p.name: p.default for p in parameters if p.name != "template" and p.default is not p.empty}
    return {**defaults, **section.arguments}
