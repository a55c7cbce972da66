"""Settings of a recipe in the type that their field or parameter declares: a number is a number before anything is loaded."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import Any, Union, get_args, get_origin, get_type_hints

from pydantic import TypeAdapter, ValidationError

from grpo_lab.reading import Number, Switch, Whole

READERS: dict[type, TypeAdapter[Any]] = {int: TypeAdapter(Whole), float: TypeAdapter(Number), bool: TypeAdapter(Switch)}


def typed(values: Mapping[str, Any], kind: Callable[..., Any], where: str = "") -> dict[str, Any]:
    """``values`` with numbers and switches as ``kind`` (a dataclass, a class or a function) declares them.

    Text that is a number becomes one (``"1e-3"``), a float without a fraction becomes whole where a whole number is asked for
    (``1e3``). Names that ``kind`` does not declare, and types that are no numbers, are left as they are.

    Args:
        where: section, for messages (``"objective"``; empty for a flat setting).

    Raises:
        ValueError: text, a switch, a list where a number is asked for; a fraction where a whole number is asked for.
    """
    declared = hints_of(kind)
    prefix = f"{where}." if where else ""
    return {name: _converted(value, declared.get(name), f"{prefix}{name}") for name, value in values.items()}


def hints_of(kind: Callable[..., Any]) -> dict[str, Any]:
    """Name → declared type of a dataclass's fields or a callable's parameters; empty where Python cannot resolve them."""
    plain_class = isinstance(kind, type) and not hasattr(kind, "__dataclass_fields__")
    told: Any = kind.__init__ if plain_class else kind  # type: ignore[misc]
    try:
        return get_type_hints(told)
    except (NameError, TypeError, AttributeError):  # one of them is a name that only the type checker knows
        names = getattr(told, "__globals__", {})
        return dict(_resolved(getattr(told, "__annotations__", {}), names))


def _resolved(annotations: Mapping[str, Any], names: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, annotation in annotations.items():
        with suppress(NameError, TypeError, AttributeError):
            one = types.SimpleNamespace(__annotations__={name: annotation})
            yield name, get_type_hints(one, globalns=names)[name]


def _converted(value: Any, declared: Any, name: str) -> Any:
    kinds = _members(declared)
    if value is False and name.endswith("_strategy"):  # YAML 1.1 reads a bare `no` as false
        return "no"
    if isinstance(value, list | tuple):
        inner = next((get_args(kind)[0] for kind in kinds if get_origin(kind) is list and get_args(kind)), None)
        if inner is not None:
            return [_converted(item, inner, f"{name}.{at}") for at, item in enumerate(value)]
    numbers = [kind for kind in READERS if kind in kinds]
    if not numbers or value is None or type(value) in kinds or (numbers == [bool] and str in kinds):
        return value
    other = [kind for kind in kinds if kind not in (*READERS, types.NoneType)]
    found = _number(value, numbers)
    if found is None and not other:
        raise ValueError(f"`{name}` is {value!r}; it must be {_in_words(numbers)}{_hint(value)}")
    return value if found is None else found


def _members(declared: Any) -> list[Any]:
    """The members of a union; a single type alone."""
    if get_origin(declared) in (Union, types.UnionType):
        return [inner for member in get_args(declared) for inner in _members(member)]
    return [] if declared is None else [declared]


def _number(value: Any, kinds: list[type]) -> Any:
    """``value`` as one of ``kinds``; None if it is none of them."""
    for kind in kinds:
        with suppress(ValidationError):
            return READERS[kind].validate_python(value)
    return None


def _in_words(kinds: list[type]) -> str:
    if kinds == [bool]:
        return "true or false"
    number = "a number" if float in kinds else "a whole number"
    return f"{number}, true or false" if bool in kinds else number


def _hint(value: Any) -> str:
    return " (a setting without its value on the command line is read as true)" if value is True else ""
