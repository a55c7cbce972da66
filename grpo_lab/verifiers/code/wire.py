"""Plain data over a socket, between a tester and a program that it does not trust: JSON with tags, never pickle.

Its source is also run inside the program's process (``program``), so it stands alone: standard library, no import of ours.

    None, True, "text", 3, 0.5, [1, 2]       as in JSON (floats exactly, NaN and infinities included)
    {"tuple": [...]}, {"set": ...}, {"frozenset": ...}, {"deque": ...}, {"dict": [[key, value], ...]}
    {"int": "hex"} (large), {"bytes": "hex"}, {"bytearray": "hex"}, {"complex": [re, im]}, {"range": [a, b, c]}
    {"decimal": "1.5"}, {"fraction": ["hex", "hex"]}, {"date" | "time" | "datetime": iso}, {"timedelta": [days, s, us]}
    {"name": ["module", "name"]}             a function or class of the standard library, from the tester to the program only
    {"object": ...}, {"function": n}         what stands for anything else of the program's; for a function of the tester's
"""

from __future__ import annotations

import collections
import importlib
import json
import os
import struct
import sys
from typing import Any

MOST_BYTES = 32 << 20
"""A longer message is not read."""
MOST_DEPTH = 300
_HEADER = struct.Struct(">I")
_SAFE_INT = 1 << 53
_LISTS = {"tuple": tuple, "set": set, "frozenset": frozenset, "deque": collections.deque}
_DATES = ("datetime", "date", "time")  # in this order: a datetime is a date
_OPAQUE = ("object", "function", "name")
_NAMED_MODULES = ("builtins", "math", "operator", "string", "statistics", "itertools", "functools", "collections")


class Broken(Exception):
    """The other side ended, or sent what is no message."""


def frame(message: Any) -> bytes:
    """A message as it is sent. ``OverflowError``: longer than is read."""
    body = json.dumps(message).encode()
    if len(body) > MOST_BYTES:
        raise OverflowError(f"a value of {len(body)} bytes; at most {MOST_BYTES} are sent")
    return _HEADER.pack(len(body)) + body


class Channel:
    """One end of a stream, a descriptor: whole messages in, whole messages out."""

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def send(self, message: Any) -> None:
        left = memoryview(frame(message))
        try:
            while left:
                left = left[os.write(self.fd, left) :]
        except OSError as error:
            raise Broken(str(error)) from None

    def receive(self) -> Any:
        (length,) = _HEADER.unpack(self._exactly(_HEADER.size))
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
    """``value`` as JSON data; ``opaque(value)`` is what stands for anything that is no plain data."""
    if value is None or isinstance(value, bool | str):
        return value if type(value) in (bool, type(None)) else str.__str__(value)
    if isinstance(value, int):
        return int(value) if -_SAFE_INT < value < _SAFE_INT else {"int": hex(value)}
    if isinstance(value, float):
        return float(value)
    if depth >= MOST_DEPTH:
        return opaque(value)
    if isinstance(value, list):
        return [pack(one, opaque, depth + 1) for one in value]
    if isinstance(value, dict):
        return {"dict": [[pack(k, opaque, depth + 1), pack(v, opaque, depth + 1)] for k, v in value.items()]}
    for tag, kind in _LISTS.items():
        if isinstance(value, kind):
            return {tag: [pack(one, opaque, depth + 1) for one in value]}
    return _pack_scalar(value) or opaque(value)


def _pack_scalar(value: Any) -> Any:
    if isinstance(value, bytes | bytearray):
        return {"bytes" if isinstance(value, bytes) else "bytearray": value.hex()}
    if isinstance(value, complex):
        return {"complex": [value.real, value.imag]}
    if isinstance(value, range):
        return {"range": [hex(value.start), hex(value.stop), hex(value.step)]}
    if _is_a(value, "decimal", "Decimal"):
        return {"decimal": str(value)}
    if _is_a(value, "fractions", "Fraction"):
        return {"fraction": [hex(value.numerator), hex(value.denominator)]}
    if _is_a(value, "datetime", "timedelta"):
        return {"timedelta": [value.days, value.seconds, value.microseconds]}
    for kind in _DATES:
        if _is_a(value, "datetime", kind):
            return {kind: value.isoformat()}
    return None


def _is_a(value: Any, module: str, name: str) -> bool:
    """Whether ``value`` is of a class whose module, not loaded here for its start's sake, somebody else has loaded."""
    loaded = sys.modules.get(module)
    return loaded is not None and isinstance(value, getattr(loaded, name))


def pack_name(value: Any) -> Any:
    """A function or class of the standard library by its name; None for another. For the tester alone: see ``unpack``."""
    module, name = getattr(value, "__module__", None), getattr(value, "__name__", None)
    if module == "_operator":
        module = "operator"
    if module in _NAMED_MODULES and isinstance(name, str) and getattr(sys.modules.get(module), name, None) is value:
        return {"name": [module, name]}
    return None


def unpack(data: Any, opaque: Any) -> Any:
    """The value again; ``opaque(tag, reference)`` gives what the tags of no plain data stand for. ``Broken``: malformed."""
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
    if tag == "dict":
        return {_unpack(key, opaque): _unpack(value, opaque) for key, value in inside}
    if tag in _LISTS:
        return _LISTS[tag]([_unpack(one, opaque) for one in inside])
    return opaque(tag, inside) if tag in _OPAQUE else _unpack_scalar(tag, inside)


def _unpack_scalar(tag: str, inside: Any) -> Any:
    if tag == "int":
        return int(inside, 16)
    if tag in ("bytes", "bytearray"):
        return (bytes if tag == "bytes" else bytearray).fromhex(inside)
    if tag == "complex":
        return complex(*inside)
    if tag == "range":
        return range(*(int(one, 16) for one in inside))
    if tag == "decimal":
        return importlib.import_module("decimal").Decimal(inside)
    if tag == "fraction":
        return importlib.import_module("fractions").Fraction(int(inside[0], 16), int(inside[1], 16))
    if tag == "timedelta":
        return importlib.import_module("datetime").timedelta(*inside)
    if tag in _DATES:
        return getattr(importlib.import_module("datetime"), tag).fromisoformat(inside)
    raise Broken(f"an unknown kind of value {tag!r:.40}")
