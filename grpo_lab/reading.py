"""What a person wrote → settings with checked types (by pydantic); what is wrong with it in one sentence that names the setting.

``@settings()`` makes a frozen dataclass that checks its fields wherever it is made: by ``read`` from a mapping of a recipe, a
configuration or a command line, or in Python. Field types that a plain ``int`` cannot say stand here, each with its words.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import field
from typing import Annotated, Any, TypeVar

import pydantic.dataclasses
from pydantic import BeforeValidator, ConfigDict, Field, TypeAdapter, ValidationError, WrapValidator, model_validator
from pydantic_core import ArgsKwargs, PydanticCustomError, PydanticUseDefault
from typing_extensions import dataclass_transform

from grpo_lab.nearest import UnknownSettingError, no_such_setting

T = TypeVar("T")


def must_be(words: str) -> WrapValidator:
    """Whatever is wrong with a value, the sentence says what it must be."""

    def check(value: Any, handler: Callable[[Any], Any]) -> Any:
        with suppress(ValidationError):
            return handler(value)
        raise PydanticCustomError("must_be", "it must be {words}", {"words": words})

    return WrapValidator(check)


def _as_number(value: Any) -> Any:
    """A switch is no number, though Python counts it as one; ``"1e3"`` is one, though ``int`` does not read it."""
    if isinstance(value, bool):
        raise ValueError
    if isinstance(value, str) and not value.strip().lstrip("+-").isdecimal():
        return float(value)
    return value


def _or_default(value: Any) -> Any:
    if value is None:
        raise PydanticUseDefault
    return value


_READ = BeforeValidator(_as_number)
Switch = Annotated[bool, must_be("true or false")]
OnlySwitch = Annotated[bool, Field(strict=True), must_be("true or false")]
Whole = Annotated[int, _READ, must_be("a whole number")]
Count = Annotated[int, Field(ge=0), _READ, must_be("a whole number of at least 0")]
Positive = Annotated[int, Field(ge=1), _READ, must_be("a whole number of at least 1")]
Number = Annotated[int | float, _READ, must_be("a number")]
Float = Annotated[float, _READ, must_be("a number")]
Temperature = Annotated[int | float, Field(gt=0, allow_inf_nan=False), _READ, must_be("a finite number above 0")]
Seconds = Annotated[int | float, Field(gt=0), _READ, must_be("a number of seconds > 0")]
Named = Annotated[str, Field(pattern=":"), must_be("'module:attribute', or a mapping with that as `name`")]
NULL_IS_DEFAULT = BeforeValidator(_or_default)

_COLLECTED: set[str] = set()
"""Fields that collect keys: nobody writes their names, and no message says them."""


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
def settings(bare: str | None = None, rest: str | None = None) -> Callable[[type[T]], type[T]]:
    """Class decorator: a frozen dataclass with checked fields that refuses unknown keys with the nearest match.

    Args:
        bare: a value that is no mapping stands for ``{bare: value}``.
        rest: field that collects the keys which are no fields, in place of refusing them.
    """
    if rest:
        _COLLECTED.add(rest)

    def before(cls: Any, value: Any) -> Any:
        if isinstance(value, ArgsKwargs | cls):  # made in Python
            return value
        if bare and not isinstance(value, Mapping):
            value = {bare: value}
        return _sorted_keys(value, set(cls.__dataclass_fields__), rest) if isinstance(value, Mapping) else value

    def decorate(kind: type[T]) -> type[T]:
        kind._as_written = model_validator(mode="before")(before)  # type: ignore[attr-defined]
        config = ConfigDict(arbitrary_types_allowed=True, coerce_numbers_to_str=True, extra="forbid")
        made: Any = pydantic.dataclasses.dataclass(frozen=True, config=config)(kind)
        plain = made.__init__

        @functools.wraps(plain)
        def init(self: Any, *args: Any, **kwargs: Any) -> None:
            with _in_our_words("", f"`{kind.__name__}`"):
                plain(self, *args, **kwargs)

        made.__init__ = init
        return made  # type: ignore[no-any-return]

    return decorate


def read(kind: type[T], written: Any, where: str = "") -> T:
    """``written`` as ``kind``, a class of ``@settings()``.

    Args:
        where: where it stands (``"evaluation.data"``; empty at the top of a recipe), for messages.

    Raises:
        ValueError: what was seen, what is allowed, which setting.
    """
    with _in_our_words(where, "the recipe"):
        found: T = TypeAdapter(kind).validate_python(written)
    return found


def from_json(value: Any, where: str) -> Any:
    """A mapping written as JSON, as command lines have it; anything else as it was. ValueError for half a mapping."""
    if not (isinstance(value, str) and value.lstrip().startswith("{")):
        return value
    try:
        return json.loads(value)
    except json.JSONDecodeError as error:
        raise ValueError(f"`{where}` is {value!r}, which is no JSON: {error}") from error


def _sorted_keys(written: Mapping[str, Any], fields: set[str], rest: str | None) -> dict[str, Any]:
    known = fields - {rest}
    given = {key: value for key, value in written.items() if key in known}
    others = {key: value for key, value in written.items() if key not in known}
    if rest:
        return {**given, rest: others}
    if others:
        raise PydanticCustomError("unknown", "{said}", {"said": no_such_setting(next(iter(others)), known)})
    return given


@contextmanager
def _in_our_words(where: str, root: str) -> Iterator[None]:
    """pydantic's first finding as a ``ValueError`` of one sentence."""
    try:
        yield
    except ValidationError as error:
        found = error.errors()[0]
        path = [where] if where else []
        path += [str(step) for step in found["loc"] if step not in _COLLECTED]
        raise _sentence(found, path, root) from None


_FORMS = {
    "dataclass_type": "a mapping of settings",
    "mapping_type": "a mapping",
    "dict_type": "a mapping",
    "tuple_type": "a list",
}


def _sentence(found: Any, path: list[str], root: str) -> Exception:
    kind, place = found["type"], f"`{'.'.join(path)}`" if path else root
    if kind == "value_error":
        said: Exception = found["ctx"]["error"]  # a check of the class itself, which says all
        return said
    if kind == "unknown":
        return UnknownSettingError(f"{place} {found['msg']}")
    if kind == "unexpected_keyword_argument":  # in Python
        return UnknownSettingError(f"{root} has no setting {path[-1]!r}")
    if kind.startswith("missing"):
        above = f"`{'.'.join(path[:-1])}`" if path[1:] else root
        return ValueError(f"{above} needs `{path[-1]}`, and has none")
    allowed = f"it must be {_FORMS[kind]}" if kind in _FORMS else found["msg"].replace("Input should", "it must")
    return ValueError(f"{place} is {found['input']!r}; {allowed}")
