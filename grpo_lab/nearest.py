"""The nearest known name for a misspelt one, and the refusal of names that nobody knows: one wording for every room."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any

SHORT = 20
"""Names up to which all that are allowed are listed."""


class UnknownSettingError(ValueError, TypeError):
    """A key that no setting has. Both kinds of error, since Python calls a wrong keyword a ``TypeError``."""


def did_you_mean(name: object, known: Iterable[str]) -> str:
    """``"; did you mean 'x'?"``, or nothing where no known name is near."""
    near = difflib.get_close_matches(str(name), list(known), n=1)
    return f"; did you mean {near[0]!r}?" if near else ""


def one_of(name: object, known: Iterable[str]) -> str:
    """What follows a name that is none of ``known``: the nearest one, and all that are allowed."""
    return f"{did_you_mean(name, known) or '.'} Allowed: {list(known)}"


def no_such_setting(key: object, allowed: Iterable[str]) -> str:
    """What is said of an unknown key, without the place: the key, the nearest known one, what is allowed."""
    known = sorted(allowed)
    return f"has no setting {key!r}{one_of(key, known) if len(known) <= SHORT else did_you_mean(key, known)}"


def refuse_unknown(
    given: Iterable[str], allowed: Iterable[str], where: str, instead: Mapping[str, str] = MappingProxyType({})
) -> None:
    """Raise ``UnknownSettingError`` for the first of ``given`` that is not ``allowed``.

    Args:
        where: names the place.
        instead: of names that once were allowed: what to do.
    """
    known = set(allowed)
    for key in given:
        if key not in known:
            said = f"has no setting {key!r} any more: {instead[key]}" if key in instead else no_such_setting(key, known)
            raise UnknownSettingError(f"{where} {said}")


def refuse_unknown_arguments(
    called: Callable[..., Any], given: Iterable[str], where: str, beside: Iterable[str] = ()
) -> None:
    """``refuse_unknown`` by the signature of what will be called; nothing where it takes any keyword, or has none.

    Args:
        beside: what may stand in the same place, besides.
    """
    found = _parameters(called)
    if not any(p.kind is p.VAR_KEYWORD for p in found):
        named = [p.name for p in found if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
        refuse_unknown(given, [*named, *beside], where)


def refuse_misfit(called: Callable[..., Any], given: Iterable[str], where: str, beside: Iterable[str] = ()) -> None:
    """The same, for what is called with nothing else: ``ValueError`` for an argument that is missing, too."""
    given, beside = list(given), list(beside)
    refuse_unknown_arguments(called, given, where, beside)
    for one in _parameters(called):
        needed = one.default is one.empty and one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)
        if needed and one.name not in (*given, *beside):
            raise ValueError(f"{where} needs `{one.name}`, and has none")


def _parameters(called: Callable[..., Any]) -> list[inspect.Parameter]:
    try:
        return list(inspect.signature(called).parameters.values())
    except (TypeError, ValueError):  # some built-ins have none
        return []
