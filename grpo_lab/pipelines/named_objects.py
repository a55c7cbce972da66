"""``"module:attribute"`` of a recipe → the object, with modules of the working folder among those that can be loaded."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path
from typing import Any


def working_folder_on_path() -> None:
    """Put the working folder first on ``sys.path``, as TRL's scripts do: a console script's own folder stands there."""
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)


def load_named(reference: str, where: str) -> Any:
    """The object at ``"package.module:attribute"``.

    Raises:
        ValueError: another form, no such module or attribute; says where it was looked for.
    """
    module, _, attribute = reference.partition(":")
    if not module or not attribute:
        raise ValueError(f"`{where}` is {reference!r}; it must be 'module:attribute'")
    working_folder_on_path()
    try:
        loaded = import_module(module)
    except ImportError as error:
        raise ValueError(f"`{where}` is {reference!r}, which cannot be loaded: {error} ({_looked()})") from error
    try:
        return getattr(loaded, attribute)
    except AttributeError as error:
        place = getattr(loaded, "__file__", None) or "a folder without __init__.py"
        raise ValueError(f"`{where}` is {reference!r}, and {place} has no {attribute!r}") from error


def _looked() -> str:
    return (
        f"looked in the working folder {Path.cwd()} and among the installed packages; PYTHONPATH adds further folders"
    )
