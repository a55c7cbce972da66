"""Plain data over a socket, between a tester and a program that it does not trust: JSON with tags, never pickle.

The source of this file also runs inside the program's process (``program``), so it imports nothing of ours. The forms
of values:

    None, True, "text", 3, 0.5, [1, 2]       as in JSON (floats exactly, NaN and infinities included)
    {"tuple": [...]}, {"set" | "frozenset" | "deque": ...}, {"dict" | "counter" | "ordered": [[key, value], ...]}
    {"defaultdict": ["list", [[key, value], ...]]}, {"keys" | "values" | "items": a dict}
    {"named": [class, fields, values, reference]}, {"slice": [a, b, c]}, {"type": "int"}, {"int": "hex"} (large)
    {"bytes" | "Decimal" | "date" | ...: text}, {"complex" | "Fraction" | ...: [its parts, whole numbers in hex]}
    {"name": ["module", "name"]}             the tester's: a function or `class.method` of the standard library
    {"object": ...}                          a reference to any other object of the program
    {"function": [n, name]}, {"iterator": n} a reference to a function, or an iterator, of the tester
"""

from __future__ import annotations

import builtins
import collections
import importlib
import json
import os
import struct
import sys
from typing import Any

MOST_BYTES = 32 << 20
"""Largest message that is read, in bytes."""
MOST_DEPTH = 900
"""Deepest nesting of containers that is sent as data; what lies deeper is sent as a reference."""
RECURSION = 10_000
"""Recursion limit on both sides. A dictionary takes three levels of JSON."""
HEADER = struct.Struct(">I")
"""Form of the length in bytes that precedes each message."""
_SAFE_INT = 1 << 53
_LISTS = {"tuple": tuple, "set": set, "frozenset": frozenset, "deque": collections.deque}
_OPAQUE = ("object", "function", "iterator", "name")
_VIEWS: dict[str, Any] = {"keys": dict.fromkeys, "values": lambda view: dict(enumerate(view)), "items": dict}
_DICTS = {"dict": dict, "counter": collections.Counter, "ordered": collections.OrderedDict}
_TYPES: dict[str, Any] = {
    kind.__name__: kind
    for kind in (int, float, complex, bool, str, bytes, list, tuple, set, frozenset, dict, type(None))
}
_WRITTEN = dict.fromkeys(("bytes", "bytearray"), ("builtins", "hex", "fromhex"))
_WRITTEN |= dict.fromkeys(("datetime", "date", "time"), ("datetime", "isoformat", "fromisoformat"))
"""Class → its module, and its methods that write a text and read it. ``datetime`` must stand before ``date``, from
which it derives."""
_PARTS = {"complex": ("builtins", "real imag"), "range": ("builtins", "start stop step")}
_PARTS |= {"Fraction": ("fractions", "numerator denominator"), "timedelta": ("datetime", "days seconds microseconds")}
"""Class → its module, and what it is made of, in the order of its arguments."""
_NAMED_MODULES = ("builtins", "math", "operator", "string", "statistics", "itertools", "functools", "collections")


class Broken(Exception):
    """Raised if the other side ended, or sent something that is no message."""


def frame(message: Any, most: int | None = MOST_BYTES) -> bytes:
    """Return the bytes of a message. Raises ``OverflowError`` if it is longer than ``most``."""
    body = json.dumps(message).encode()
    if most is not None and len(body) > most:
        raise OverflowError(f"a value of {len(body)} bytes; at most {most} are sent")
    return HEADER.pack(len(body)) + body


class Channel:
    """End of a stream, given by its descriptor ``fd``, that sends and receives whole messages."""

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def send(self, message: Any) -> None:
        """Send a message. Raises ``Broken`` if the other side is gone, ``OverflowError`` if it is too long."""
        left = memoryview(frame(message))
        try:
            while left:
                left = left[os.write(self.fd, left) :]
        except OSError as error:
            raise Broken(str(error)) from None

    def receive(self) -> Any:
        """Wait for a message and return it. Raises ``Broken`` if none comes, or it is no JSON or too long."""
        (length,) = HEADER.unpack(self._exactly(HEADER.size))
        if length > MOST_BYTES:
            raise Broken("a message that is too long")
        try:
            return json.loads(self._exactly(length))
        except (ValueError, RecursionError):
            raise Broken("no message") from None

    def _exactly(self, size: int) -> bytes:
        parts = bytearray()
        while len(parts) < size:
            try:
                chunk = os.read(self.fd, min(size - len(parts), 1 << 16))
            except OSError as error:
                raise Broken(str(error)) from None
            if not chunk:
                raise Broken("the other side ended")
            parts += chunk
        return bytes(parts)


def pack(value: Any, opaque: Any, depth: int = 0) -> Any:
    """Return ``value`` in the JSON form of this module. In the place of anything in it that is no plain data stands
    ``opaque(value)``."""
    if value is None or isinstance(value, bool | str):
        if type(value) in (bool, type(None)):
            return value
        return str.__str__(value)
    if isinstance(value, int):
        if -_SAFE_INT < value < _SAFE_INT:
            return int(value)
        return {"int": hex(value)}
    if isinstance(value, float):
        return float(value)
    if depth >= MOST_DEPTH:
        return opaque(value)
    if isinstance(value, list):
        return [pack(one, opaque, depth + 1) for one in value]
    if isinstance(value, dict):
        return _pack_dict(value, opaque, depth + 1)
    if isinstance(value, tuple) and isinstance(getattr(value, "_fields", None), tuple):
        return _pack_named(value, opaque, depth + 1)
    for tag, kind in _LISTS.items():
        if isinstance(value, kind):
            return {tag: [pack(one, opaque, depth + 1) for one in value]}
    for tag, beneath in _VIEWS.items():
        if type(value) is type(getattr({}, tag)()):
            return {tag: _pack_dict(beneath(value), opaque, depth + 1)}
    if isinstance(value, type):
        name = _name_of(value)
        if name is None:
            return opaque(value)
        return {"type": name}
    if isinstance(value, slice):
        parts = (value.start, value.stop, value.step)
        if all(one is None or type(one) is int for one in parts):
            return {"slice": list(parts)}
        return opaque(value)
    for tag, (module, write, _) in _WRITTEN.items():
        if _is_a(value, module, tag):
            return {tag: getattr(value, write)()}
    for tag, (module, names) in _PARTS.items():
        if _is_a(value, module, tag):
            held = [getattr(value, name) for name in names.split()]
            return {tag: [hex(one) if isinstance(one, int) else one for one in held]}
    if _is_a(value, "decimal", "Decimal"):
        return {"Decimal": str(value)}
    return opaque(value)


def _pack_dict(value: dict[Any, Any], opaque: Any, depth: int) -> Any:
    items = [[pack(k, opaque, depth), pack(v, opaque, depth)] for k, v in value.items()]
    if isinstance(value, collections.defaultdict):
        return {"defaultdict": [_name_of(value.default_factory), items]}
    kind = next((tag for tag in ("counter", "ordered") if isinstance(value, _DICTS[tag])), "dict")
    return {kind: items}


def _pack_named(value: Any, opaque: Any, depth: int) -> Any:
    """Return a named tuple as its values and a reference to it (None if ``opaque`` gives none). One that came from the
    other side is sent back as its reference alone."""
    try:
        reference = opaque(value)
    except (TypeError, ValueError):  # it was made by the tests
        reference = None
    if reference is not None and isinstance(reference["object"], int):
        return reference  # the tester sends the program's own back
    fields = [str(one) for one in value._fields]
    return {"named": [type(value).__name__, fields, [pack(one, opaque, depth) for one in tuple(value)], reference]}


def _is_a(value: Any, module: str, name: str) -> bool:
    """Return whether ``value`` is of the class ``name`` of ``module``. The module is not imported for it, so that a
    jail starts fast: nobody has such a value unless it is loaded."""
    loaded = sys.modules.get(module)
    return loaded is not None and isinstance(value, getattr(loaded, name))


def _name_of(kind: Any) -> str | None:
    return next((name for name, one in _TYPES.items() if one is kind), None)


def pack_name(value: Any) -> Any:
    """Return a function or class of the standard library as its name; None for any other. Only the tester uses it."""
    module = getattr(value, "__module__", None)
    name = getattr(value, "__name__", None)
    owner = getattr(value, "__objclass__", None)
    kind = ""
    if isinstance(owner, type):
        kind = owner.__name__
    if kind and vars(builtins).get(kind) is owner and isinstance(name, str):
        return {"name": ["builtins", f"{kind}.{name}"]}  # called here, `str.format` would read this process
    if module == "_operator":
        module = "operator"
    if module in _NAMED_MODULES and isinstance(name, str) and getattr(sys.modules.get(module), name, None) is value:
        return {"name": [module, name]}
    return None


def unpack(data: Any, opaque: Any) -> Any:
    """Return the packed value; ``opaque(tag, reference)`` resolves references. Raises ``Broken`` if it is malformed."""
    try:
        return _unpack(data, opaque)
    except Broken:
        raise
    except Exception as error:
        raise Broken(f"no plain data: {type(error).__name__}") from None


def _unpack(data: Any, opaque: Any) -> Any:
    if data is None or isinstance(data, bool | str | int | float):
        return data
    if isinstance(data, list):
        return [_unpack(one, opaque) for one in data]
    ((tag, inside),) = data.items()
    if tag in _DICTS:
        return _DICTS[tag]({_unpack(key, opaque): _unpack(value, opaque) for key, value in inside})
    if tag == "defaultdict":
        made = {_unpack(key, opaque): _unpack(value, opaque) for key, value in inside[1]}
        return collections.defaultdict(_TYPES.get(inside[0]), made)
    if tag in _VIEWS:
        return getattr(_unpack(inside, opaque), tag)()
    if tag == "named":
        return opaque(tag, [inside[0], inside[1], [_unpack(one, opaque) for one in inside[2]], inside[3]])
    if tag in _LISTS:
        return _LISTS[tag]([_unpack(one, opaque) for one in inside])
    if tag in _OPAQUE:
        return opaque(tag, inside)
    if tag == "int":
        return int(inside, 16)
    if tag == "type":
        return _TYPES[inside]
    if tag == "slice":
        return slice(*inside)
    if tag == "Decimal":
        return importlib.import_module("decimal").Decimal(inside)
    if tag in _WRITTEN:
        module, _, read = _WRITTEN[tag]
        return getattr(getattr(importlib.import_module(module), tag), read)(inside)
    if tag in _PARTS:
        kind = getattr(importlib.import_module(_PARTS[tag][0]), tag)
        return kind(*(int(one, 16) if isinstance(one, str) else one for one in inside))
    raise Broken(f"an unknown kind of value {tag!r:.40}")


def pack_error(error: BaseException, again: int | None = None) -> Any:
    """Return an exception as data: its classes, text, plain arguments and attributes. ``again``: its number among the
    tests' own errors, if it is one of those (``remote.Program``)."""
    kinds = [[str(kind.__module__), kind.__name__] for kind in type(error).__mro__]
    try:
        text = str(error)[:1000]
    except BaseException:
        text = ""
    given = {}
    if type(vars(error)) is dict:
        given = vars(error)
    names = [one for one in list(given)[:50] if isinstance(one, str) and not one.startswith("_")]
    held = {name: plain for name in names if (plain := _plain(given[name])) is not None}
    args = _plain(error.args)
    said = [text] if args is None else args["tuple"]
    return {"raised": {"kinds": kinds, "text": text, "args": said, "held": held, "again": again}}


def _plain(value: Any) -> Any:
    """Return the packed value, or None if it is no plain data, or long."""
    try:
        packed = pack(value, refuse)
        if len(json.dumps(packed)) < 10_000:
            return packed
        return None
    except Exception:
        return None


def refuse(value: Any) -> Any:
    """Raise ValueError. Passed to ``pack`` as ``opaque`` where only plain data is allowed."""
    raise ValueError(f"a {type(value).__name__} is no plain data")


def refuse_tag(tag: str, inside: Any) -> Any:
    """Raise ``Broken`` for a reference; return a named tuple as a plain one. Passed to ``unpack`` as ``opaque`` where
    only plain data is allowed."""
    if tag == "named":
        return tuple(inside[2])
    raise Broken(f"{tag} where only plain data is taken")
