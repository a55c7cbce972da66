"""The nearest known name for a misspelt one, and the refusal of names that nobody knows: one wording for every room."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Iterable
from typing import Any

SHORT = 20
"""Names up to which all that are allowed are listed."""


class UnknownSettingError(ValueError, TypeError):
    """A key that no setting has. Both kinds of error, since Python calls a wrong keyword a ``TypeError``."""


def did_you_mean(name: object, known: Iterable[str]) -> str:
    """``"; did you mean 'x'?"``, or nothing where no known name is near."""
    near = difflib.get_close_matches(str(name), list(known), n=1)
    return f"; did you mean {near[0]!r}?" if near else ""


def no_such_setting(key: object, allowed: Iterable[str]) -> str:
    """What is said of an unknown key, without the place: the key, the nearest known one, what is allowed."""
    known = sorted(allowed)
    listing = f" Allowed: {known}" if len(known) <= SHORT else ""
    return f"has no setting {key!r}{did_you_mean(key, known)}{listing}"


def refuse_unknown(given: Iterable[str], allowed: Iterable[str], where: str) -> None:
    """Raise ``UnknownSettingError`` for the first of ``given`` that is not ``allowed``; ``where`` names the place."""
    known = set(allowed)
    for key in given:
        if key not in known:
            raise UnknownSettingError(f"{where} {no_such_setting(key, known)}")


def refuse_unknown_arguments(
    called: Callable[..., Any], given: Iterable[str], where: str, all_of_them: bool = False
) -> None:
    """``refuse_unknown`` by the signature of what will be called; nothing where it takes any keyword, or has no signature.

    Raises:
        ValueError: ``all_of_them`` are given, and one without a default is not.
    """
    try:
        parameters = inspect.signature(called).parameters.values()
    except (TypeError, ValueError):  # some built-ins have none
        return
    kinds, there = inspect.Parameter, set(given)
    named = [p for p in parameters if p.kind in (kinds.POSITIONAL_OR_KEYWORD, kinds.KEYWORD_ONLY)]
    if not any(p.kind is kinds.VAR_KEYWORD for p in parameters):
        refuse_unknown(given, [p.name for p in named], where)
    needed = [p.name for p in named if p.default is p.empty and p.name not in there]
    if needed and all_of_them:
        raise ValueError(f"{where} needs {', '.join(f'`{name}`' for name in needed)}: there is no default")
