"""Settings with types that pydantic checks, read from what a person wrote, and one sentence for each mistake in it.

``@settings()`` makes a class a frozen dataclass that checks its fields when it is built. ``read`` builds it from a
mapping (a section of a recipe, a configuration, a command line). Field types that say more than a plain ``int`` are
defined here (``Positive``, ``Share``, …), each with the words of its error. ``typed`` converts numbers and switches for
classes and functions that are not ours. Errors are ValueErrors that name the setting, what was found, what is allowed.
"""

from __future__ import annotations

import argparse
import difflib
import functools
import inspect
import json
import math
import types
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import field
from enum import Enum
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin, get_type_hints

import pydantic.dataclasses
from pydantic import (
    AfterValidator,
    BeforeValidator,
    ConfigDict,
    Field,
    TypeAdapter,
    ValidationError,
    WrapValidator,
    model_validator,
)
from pydantic_core import ArgsKwargs, PydanticCustomError, PydanticUseDefault
from typing_extensions import dataclass_transform


class UnknownSettingError(ValueError, TypeError):
    """Error for an unknown setting. It is also a ``TypeError``, which is Python's own error for an unknown keyword."""


def did_you_mean(name: object, known: Iterable[str]) -> str:
    """Return ``"; did you mean 'x'?"`` with the known name nearest to ``name``; "" if none is near."""
    near = difflib.get_close_matches(str(name), list(known), n=1)
    if near:
        return f"; did you mean {near[0]!r}?"
    return ""


def one_of(name: object, known: Iterable[str]) -> str:
    """Return the end of a message on an unknown name: the nearest of the ``known`` ones, and all that are allowed."""
    return f"{did_you_mean(name, known) or '.'} Allowed: {list(known)}"


def at_least(least: int) -> Callable[[str], int]:
    """Return a function for ``argparse``'s ``type=`` that reads a whole number of at least ``least``."""

    def whole_number(text: str) -> int:
        if not (text.isascii() and text.isdigit() and int(text) >= least):
            raise argparse.ArgumentTypeError(f"{text!r}; it must be a whole number of at least {least}")
        return int(text)

    return whole_number


def no_such_setting(key: object, allowed: Iterable[str]) -> str:
    """Return the end of a message on an unknown key: the key, the nearest allowed one and, if there are at most 20, all
    that are allowed."""
    known = sorted(allowed)
    return f"has no setting {key!r}{one_of(key, known) if len(known) <= 20 else did_you_mean(key, known)}"


def refuse_unknown(given: Iterable[str], allowed: Iterable[str], where: str, hint: str = "") -> None:
    """Raise one UnknownSettingError for all keys of ``given`` that are not ``allowed``.

    ``where``: what has the keys, for the message; ``hint``: where else to look.
    """
    known = set(allowed)
    more = f" ({hint})" if hint else ""
    unknown = [key for key in given if key not in known]
    if unknown:
        raise all_of([UnknownSettingError(f"{where} {no_such_setting(key, known)}{more}") for key in unknown])


def all_of(mistakes: Sequence[Exception]) -> Exception:
    """Return one error for several mistakes: an UnknownSettingError if all are, else a ValueError. A message that
    occurs twice is listed once; if there is a single one, the first mistake itself is returned."""
    said = dict.fromkeys(map(str, mistakes))
    if len(said) == 1:
        return mistakes[0]
    kind = ValueError
    if all(isinstance(one, UnknownSettingError) for one in mistakes):
        kind = UnknownSettingError
    return kind(f"{len(said)} mistakes. " + ". ".join(f"({at}) {one}" for at, one in enumerate(said, start=1)))


def refuse_unknown_arguments(
    called: Callable[..., Any], given: Collection[str], where: str, beside: Collection[str] = ()
) -> list[inspect.Parameter]:
    """Raise UnknownSettingError for names in ``given`` that the function or class ``called`` does not take as
    arguments; those in ``beside`` are allowed, too. ``where``: what has the names, for the message.

    Nothing is refused if ``called`` takes any keyword, or has no signature. Returns its parameters that can be given by
    name (none without a signature).
    """
    try:
        found = list(inspect.signature(called).parameters.values())
    except (TypeError, ValueError):  # some built-ins have none
        return []
    named = [one for one in found if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)]
    if not any(one.kind is one.VAR_KEYWORD for one in found):
        refuse_unknown(given, [*(one.name for one in named), *beside], where)
    return named


def refuse_misfit(called: Callable[..., Any], given: Collection[str], where: str, beside: Collection[str] = ()) -> None:
    """Raise UnknownSettingError as ``refuse_unknown_arguments`` does, and ValueError for a required argument that is
    missing."""
    for one in refuse_unknown_arguments(called, given, where, beside):
        if one.default is one.empty and one.name not in (*given, *beside):
            raise ValueError(f"{where} needs `{one.name}`, and has none")


T = TypeVar("T")


def must_be(words: str) -> WrapValidator:
    """Return a pydantic validator that gives a field one message: whatever is wrong with a value, it must be
    ``words``."""

    def check(value: Any, handler: Callable[[Any], Any]) -> Any:
        with suppress(ValidationError):
            return handler(value)
        raise PydanticCustomError("must_be", "it must be {words}", {"words": words})

    return WrapValidator(check)


def _as_number(value: Any) -> Any:
    """Convert text such as ``"1e3"``, which pydantic does not read as a whole number, to a float; leave digits and
    other values to pydantic. Raises ValueError for a switch and for NaN."""
    if isinstance(value, str) and not value.strip().lstrip("+-").isdecimal():
        value = float(value)
    if isinstance(value, bool) or value != value:
        raise ValueError
    return value


def _or_default(value: Any) -> Any:
    """Have pydantic take the field's default in place of None."""
    if value is None:
        raise PydanticUseDefault
    return value


def _finite(value: float) -> float:
    if not math.isfinite(value):
        raise PydanticCustomError("not_finite", "it must be a finite number")
    return value


_READ = BeforeValidator(_as_number)
# ``Switch`` also reads "true", "on" or 1; ``OnlySwitch`` does not. ``Number`` keeps whole numbers whole, ``Float`` not.
Switch = Annotated[bool, must_be("true or false")]
OnlySwitch = Annotated[bool, Field(strict=True), must_be("true or false")]
Whole = Annotated[int, _READ, must_be("a whole number")]
Count = Annotated[int, Field(ge=0), _READ, must_be("a whole number of at least 0")]
Positive = Annotated[int, Field(ge=1), _READ, must_be("a whole number of at least 1")]
Share = Annotated[float, Field(ge=0, le=1), _READ, must_be("a share between 0 and 1")]
Number = Annotated[int | float, _READ, must_be("a number"), AfterValidator(_finite)]
Float = Annotated[float, _READ, must_be("a number"), AfterValidator(_finite)]
Temperature = Annotated[int | float, Field(gt=0, allow_inf_nan=False), _READ, must_be("a finite number above 0")]
Hours = Annotated[int | float, Field(gt=0, allow_inf_nan=False), _READ, must_be("a number of hours above 0")]
Seconds = Annotated[int | float, Field(gt=0, allow_inf_nan=False), _READ, must_be("a number of seconds > 0")]
Named = Annotated[str, Field(pattern=":"), must_be("'module:attribute', or a mapping with that as `name`")]
NULL_IS_DEFAULT = BeforeValidator(_or_default)
"""Annotation of a field in which null means its default."""

#: Names of the fields that collect all other keys (``rest``). A person never writes them, so messages leave them out.
_COLLECTED: set[str] = set()


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
def settings(bare: str | None = None, rest: str | None = None) -> Callable[[type[T]], type[T]]:
    """Return a class decorator that makes a frozen dataclass with checked fields. It refuses unknown keys, and its
    message names the nearest field.

    Args:
        bare: name of a field. A value that is no mapping is read as the mapping ``{bare: value}``.
        rest: name of a field that collects all unknown keys, as a mapping, instead of refusing them.
    """
    if rest:
        _COLLECTED.add(rest)

    def before(cls: Any, value: Any) -> Any:
        if isinstance(value, ArgsKwargs | cls):  # made in Python
            return value
        if bare and not isinstance(value, Mapping):
            value = {bare: value}
        if not isinstance(value, Mapping):
            return value
        known = set(cls.__dataclass_fields__) - {rest}
        others = {key: one for key, one in value.items() if key not in known}
        given = {key: one for key, one in value.items() if key in known}
        if others and not rest:
            said = "; it ".join(no_such_setting(one, known) for one in others)
            raise PydanticCustomError("unknown", "{said}", {"said": said})
        if rest:
            return {**given, rest: others}
        return given

    def decorate(kind: type[T]) -> type[T]:
        kind._as_written = model_validator(mode="before")(before)  # type: ignore[attr-defined]
        config = ConfigDict(arbitrary_types_allowed=True, coerce_numbers_to_str=True, extra="forbid")
        checked: Any = pydantic.dataclasses.dataclass(frozen=True, config=config)(kind)
        construct = checked.__init__

        @functools.wraps(construct)
        def init(self: Any, *args: Any, **kwargs: Any) -> None:
            with _in_our_words("", f"`{kind.__name__}`"):
                construct(self, *args, **kwargs)

        checked.__init__ = init
        return checked

    return decorate


def read(kind: type[T], written: Any, where: str = "") -> T:
    """Build an instance of ``kind``, a class of ``@settings()``, from a mapping that a person wrote.

    ``where``: its place, for messages (``"evaluation.data"``; empty at the top of a recipe). Raises a ValueError that
    says what was found, what is allowed, and which setting it is.
    """
    with _in_our_words(where, "the recipe"):
        return TypeAdapter(kind).validate_python(written)


def from_json(value: Any, where: str) -> Any:
    """Return the mapping in JSON text, the form in which command lines have it; any other value as it is. Raises
    ValueError for broken JSON, and for a key that stands twice; ``where``: the setting, for the message."""

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        names = [name for name, _ in pairs]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"`{where}` has the key {name!r} twice; leave one out")
        return dict(pairs)

    if not (isinstance(value, str) and value.lstrip().startswith("{")):
        return value
    try:
        return json.loads(value, object_pairs_hook=once)
    except (json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"`{where}` is {value[:200]!r}, which is no JSON: {error}") from error


@contextmanager
def _in_our_words(where: str, root: str) -> Iterator[None]:
    """Context that turns pydantic's ValidationError into our error with a sentence for each mistake.

    ``where``: place of what is read (may be empty); ``root``: what messages call it if that is empty.
    """
    try:
        yield
    except ValidationError as error:
        mistakes = []
        places = [found["loc"] for found in error.errors()]
        for found in error.errors():
            if found["type"] == "too_short" and any(one[: len(found["loc"])] == found["loc"] != one for one in places):
                continue  # its entries are wrong, and each has an error of its own
            path = [where] if where else []
            path += [str(step) for step in found["loc"] if step not in _COLLECTED]
            mistakes.append(_sentence(found, path, root))
        raise all_of(mistakes) from None


_FORMS = dict.fromkeys(("mapping_type", "dict_type"), "a mapping")
_FORMS |= {"dataclass_type": "a mapping of settings", "tuple_type": "a list"}


def _sentence(found: Any, path: list[str], root: str) -> Exception:
    """Return our error for one mistake that pydantic ``found`` at ``path``."""
    kind = found["type"]
    place = f"`{'.'.join(path)}`" if path else root
    if kind == "value_error":
        return found["ctx"]["error"]  # raised by the class's own check: a whole sentence
    if kind == "unknown":
        return UnknownSettingError(f"{place} {found['msg']}")
    if kind == "unexpected_keyword_argument":  # in Python
        return UnknownSettingError(f"{root} has no setting {path[-1]!r}")
    if kind.startswith("missing"):
        above = f"`{'.'.join(path[:-1])}`" if path[1:] else root
        return ValueError(f"{above} needs `{path[-1]}`, and has none")
    if kind in _FORMS:
        allowed = f"it must be {_FORMS[kind]}"
    else:
        allowed = found["msg"].replace("Input should", "it must")
    return ValueError(f"{place} is {found['input']!r}; {allowed}")


_READERS: dict[type, tuple[TypeAdapter[Any], str]] = {
    int: (TypeAdapter(Whole), "a whole number"),
    float: (TypeAdapter(Annotated[int | float, _READ, must_be("a number")]), "a number"),
    bool: (TypeAdapter(Switch), "true or false"),
}


def typed(values: Mapping[str, Any], kind: Callable[..., Any], where: str = "") -> dict[str, Any]:
    """Return ``values`` with numbers and switches converted to the types that ``kind`` declares for them.

    Text that is a number becomes one (``"1e-3"``); a float becomes whole if a whole number is declared (``1e3``). Names
    that ``kind`` does not declare, and values of other types than numbers and switches, are left as they are.

    Args:
        values: arguments by name.
        kind: a dataclass, a class or a function with type hints.
        where: the section, for messages.

    Raises:
        ValueError: there is text, a switch or a list where a number is declared, or a fraction where a whole number is.
    """
    declared = hints_of(kind)
    prefix = f"{where}." if where else ""
    found = {}
    mistakes = []
    for name, value in values.items():
        try:
            found[name] = _converted(value, declared.get(name), f"{prefix}{name}")
        except ValueError as error:
            mistakes.append(error)
    if mistakes:
        raise all_of(mistakes)
    return found


def hints_of(kind: Callable[..., Any]) -> dict[str, Any]:
    """Return the declared types, by name, of a dataclass's fields or a callable's parameters, as far as Python can
    resolve them."""
    plain_class = isinstance(kind, type) and not hasattr(kind, "__dataclass_fields__")
    annotated: Any = kind.__init__ if plain_class else kind  # type: ignore[misc]
    unresolved = (NameError, TypeError, AttributeError)
    with suppress(*unresolved):
        return get_type_hints(annotated)
    found: dict[str, Any] = {}
    for name, annotation in getattr(annotated, "__annotations__", {}).items():
        with suppress(*unresolved):  # a name that only the type checker knows
            one = types.SimpleNamespace(__annotations__={name: annotation})
            found |= get_type_hints(one, globalns=getattr(annotated, "__globals__", {}))
    return found


def _converted(value: Any, declared: Any, name: str) -> Any:
    """Return a value (of a list: each entry) in the ``declared`` type, if that is a number or a switch (``typed``)."""
    kinds = _members(declared)
    if value is False and name.endswith("_strategy"):  # YAML 1.1 reads a bare `no` as false
        return "no"
    if isinstance(value, list | tuple):
        inner = next((get_args(kind)[0] for kind in kinds if get_origin(kind) is list and get_args(kind)), None)
        if inner is not None:
            return [_converted(item, inner, f"{name}.{at}") for at, item in enumerate(value)]
    number_kinds = [kind for kind in _READERS if kind in kinds]
    hint = ""
    if value is True:
        hint = " (a setting without its value on the command line is read as true)"
    text_kinds = [kind for kind in kinds if kind in (str, types.NoneType) or get_origin(kind) is list or _is_enum(kind)]
    if isinstance(value, bool) and str in kinds and text_kinds == kinds:
        bare = " (a bare on, off, yes or no is a switch in YAML: put it in quotes)"
        raise ValueError(f"`{name}` is {value!r}; it must be text{hint}{bare}")
    takes_no_number = not number_kinds or (number_kinds == [bool] and str in kinds)
    fits_already = type(value) in kinds and value == value  # NaN does not
    if value is None or takes_no_number or fits_already:
        return value
    for kind in number_kinds:
        with suppress(ValidationError):
            return _READERS[kind][0].validate_python(value)
    takes_other_types = any(kind not in (*_READERS, types.NoneType) for kind in kinds)
    if takes_other_types:
        return value
    words = ", ".join(_READERS[kind][1] for kind in number_kinds if not (kind is int and float in number_kinds))
    raise ValueError(f"`{name}` is {value!r}; it must be {words}{hint}")


def _is_enum(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, Enum)


def _members(declared: Any) -> list[Any]:
    """Return the types of a union as a list, another type as a list of it alone, and None as an empty list."""
    if get_origin(declared) in (Union, types.UnionType):
        return [inner for member in get_args(declared) for inner in _members(member)]
    if declared is None:
        return []
    return [declared]
