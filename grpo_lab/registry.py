"""Tables of parts by name: adding a part to one, finding it, listing its knobs (settings), and building it with them.

A part is a piece of an algorithm: an advantage rule, a surrogate, an aggregation or a correction. It is one of three
things: a dataclass whose instances are callable, with its fields as knobs; a function, without knobs; or a callable
object, whose knobs are set already. A table is a plain dict, name → part. Here are also the functions that import a
team's own object by ``"module:attribute"``.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterable, Mapping, MutableMapping
from importlib import import_module
from pathlib import Path
from typing import Any

from grpo_lab.settings import did_you_mean


def knobs_of(part: Any) -> dict[str, Any]:
    """Return the knobs of a part with their defaults (``dataclasses.MISSING`` for one without), in order: the fields of
    a dataclass or of an instance of one. Another part has none."""
    if not dataclasses.is_dataclass(part):
        return {}
    fields = [field for field in dataclasses.fields(part) if field.init]
    return {f.name: f.default if f.default_factory is dataclasses.MISSING else f.default_factory() for f in fields}


def check_name(table: Mapping[str, Any], name: str, part: Any, what: str) -> None:
    """Raise ValueError if ``part`` cannot be registered in ``table`` as ``name``: that is no valid name, or it belongs
    to another part, of which ``part`` is no newer definition (``redefined``). ``what``: the kind of part, for
    messages."""
    if not isinstance(name, str) or not name or ":" in name or name != name.strip():
        raise ValueError(f"{what} is registered as {name!r}; it must be a name without ':' ('module:attribute')")
    if name in table and table[name] is not part and not redefined(table[name], part):
        raise ValueError(
            f"{what} {name!r} is registered already ({address(table[name])}), and {address(part)} is another object: "
            "choose another name"
        )


def redefined(before: Any, part: Any) -> bool:
    """Return whether ``part`` comes from running the definition of ``before`` again (a notebook's cell, a reloaded
    module): both have the same module and name. Then it replaces ``before``."""
    named = all(hasattr(one, "__qualname__") and "<" not in one.__qualname__ for one in (before, part))
    return named and address(before) == address(part)


def add(table: MutableMapping[str, Any], name: str, part: Any, reserved: Iterable[str], what: str) -> Any:
    """Put ``part`` into ``table`` as ``name`` and return it, so that a decorator can end with this call. The same
    object may be added twice.

    Args:
        reserved: names that no knob may have.
        what: the kind of part, for messages.

    Raises:
        ValueError: the part cannot be called, it has a reserved knob, or ``name`` is not allowed (``check_name``).
    """
    if not callable(part) or (isinstance(part, type) and "__call__" not in dir(part)):
        raise ValueError(f"{what} is {part!r}; it must be a class with `__call__`, a function or a callable object")
    taken = sorted(set(knobs_of(part)) & set(reserved))
    if taken:
        said = "which cannot be a knob: choose another name"
        raise ValueError(f"{what} {address(part)} has a field {taken[0]!r}, {said}")
    check_name(table, name, part, what)
    table[name] = part
    return part


def found(table: Mapping[str, Any], name: str, what: str) -> Any:
    """Return the part called ``name``. Raises ValueError, with the nearest match and all names, if there is none."""
    if name not in table:
        near = did_you_mean(name, table)
        raise ValueError(f"`{what}` is {name!r}; it must be one of {sorted(table)}, or a callable{near}")
    return table[name]


def built(part: Any, knobs: Mapping[str, Any], what: str) -> Any:
    """Return a part ready to be called: a class is instantiated with ``knobs``, a function or object is returned as it
    is. Raises ValueError for unknown or missing knobs, and for any knob of a function or object."""
    if not isinstance(part, type):
        if knobs:
            raise ValueError(f"`{what}` {address(part)} takes no settings, got {sorted(knobs)}")
        return part
    known = knobs_of(part)
    unknown = [name for name in knobs if name not in known]
    if unknown:
        raise ValueError(f"`{what}` {address(part)} does not take {unknown}; it takes {list(known) or 'no settings'}")
    try:
        return part(**knobs)
    except TypeError as error:
        raise ValueError(f"`{what}` {address(part)} cannot be built with {dict(knobs)}: {error}") from error


def address(part: Any, before_name: str = ".") -> str:
    """Return ``module.name`` of a class or function, or of an object's class. With ``before_name=":"`` it is the form
    that ``load_named`` reads."""
    kind = part if hasattr(part, "__qualname__") else type(part)
    return f"{kind.__module__}{before_name}{kind.__qualname__}"


def working_folder_on_path() -> str:
    """Put the working folder first on ``sys.path`` and return it, so that a team's modules can be imported as in TRL's
    scripts. Python itself puts only the folder of a console script there."""
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    return here


def modules_beside(file: Path) -> None:
    """Let modules in the recipe's folder be imported: put that folder last on ``sys.path``. Of two modules of one name
    another folder's is taken."""
    folder = str(file.parent.resolve())
    if folder not in sys.path:
        sys.path.append(folder)


def load_named(reference: str, where: str) -> Any:
    """Import the object that ``"package.module:attribute"`` names. Raises ValueError if the text has another form, or
    if there is no such module or attribute; ``where`` is the setting, for the message."""
    module, _, attribute = reference.partition(":")
    if not module or not attribute:
        raise ValueError(f"`{where}` is {reference!r}; it must be 'module:attribute'")
    here = working_folder_on_path()
    try:
        loaded = import_module(module)
    except ImportError as error:
        raise ValueError(
            f"`{where}` is {reference!r}, which cannot be loaded: {error} (looked in the working folder {here}, "
            "beside the recipe and among the installed packages; PYTHONPATH adds further folders)"
        ) from error
    try:
        return getattr(loaded, attribute)
    except AttributeError as error:
        place = getattr(loaded, "__file__", None) or "a folder without __init__.py"
        raise ValueError(f"`{where}` is {reference!r}, and {place} has no {attribute!r}") from error
