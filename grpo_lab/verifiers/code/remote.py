"""The program as its tester sees it: functions that are called in another process and give back plain data.

What a test compares is data of the tester's own: a list that came over is a list, with Python's own ``==``. An object that is no
plain data stays where it is, and a ``RemoteObject`` stands for it. Beside data it is never equal and has neither order nor
arithmetic, so that an object that claims to equal everything, or to be less than everything, passes nothing.
"""

from __future__ import annotations

import builtins
import collections
import functools
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from grpo_lab.verifiers.code.wire import Broken, Channel, pack, pack_name, unpack

_YES_OR_NO = frozenset(
    [
        "startswith",
        "endswith",
        "isalnum",
        "isalpha",
        "isascii",
        "isdecimal",
        "isdigit",
        "isidentifier",
        "islower",
        "isnumeric",
        "isprintable",
        "isspace",
        "istitle",
        "isupper",
        "issubset",
        "issuperset",
        "isdisjoint",
        "is_integer",
        "match",
        "fullmatch",
        "difference",
        "symmetric_difference",
    ]
)
"""Questions of plain data's own types: an object that answers yes (or: no difference) to each must not pass for a text or a set."""


_FROM_PROGRAMS = (BaseException, list, tuple, dict, set, frozenset, collections.deque)


class ProgramGone(BaseException):
    """The program ended, left by ``sys.exit``, or broke the channel: nothing that a test can catch as an ``Exception``."""


class Unsendable(BaseException):
    """The test hands the program what cannot be sent to it: the test is unusable, whatever the program."""


@dataclass(frozen=True)
class _Raised:
    error: BaseException


class Program:
    """The connection to one program. ``gone`` once it can no longer answer: from then on no test passes."""

    def __init__(self, fd: int) -> None:
        self._channel = Channel(fd)
        self._functions: list[Callable[..., Any]] = []
        self._raised: dict[str, type[Exception]] = {}
        self.gone = ""
        self.names: frozenset[str] = frozenset()

    def load(self, source: str) -> None:
        """Runs the program's own text. Raises what it raises."""
        names = self._ask({"load": source})
        self.names = (
            frozenset(name for name in names if isinstance(name, str)) if isinstance(names, list) else frozenset()
        )

    def get(self, name: str) -> Any:
        """A value of the program: plain data, or what stands for it."""
        return self._ask({"get": name})

    def call(self, number: int, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        packed = {name: self._pack(value) for name, value in named.items()}
        return self._ask({"call": number, "args": [self._pack(one) for one in args], "named": packed}, args)

    def ask(self, number: int, what: str, *args: Any) -> Any:
        return self._ask({"ask": number, "what": what, "args": [self._pack(one) for one in args]})

    def _ask(self, request: dict[str, Any], args: tuple[Any, ...] = ()) -> Any:
        if self.gone:
            raise ProgramGone(self.gone)
        try:
            self._channel.send(request)
            answer = self._take(self._channel.receive(), args)
        except (
            Exception
        ) as error:  # hostile bytes can be wrong in any way; what is too long to be sent may be the program's, too
            self.gone = f"no answer in the form of one: {error!r:.200}"
            raise ProgramGone(self.gone) from None
        if isinstance(answer, _Raised):
            ends = isinstance(answer.error, StopIteration | StopAsyncIteration)
            if ends and request.get("what") != "next":  # `all(map(f, cases))` would end there, and be true
                raise RuntimeError(f"the program raised {type(answer.error).__name__}")
            raise answer.error
        return answer

    def _take(self, reply: dict[str, Any], args: tuple[Any, ...]) -> Any:
        while "back" in reply:
            self._channel.send(self._called_back(reply))
            reply = self._channel.receive()
        if "raised" in reply:
            return _Raised(self._as_raised(*reply["raised"]))
        value = unpack(reply["value"], self._stand_in)
        for mine, changed in zip(args, reply.get("args") or ()):
            if changed is not None:
                _write_into(mine, unpack(changed, self._stand_in))
        return value

    def _called_back(self, reply: dict[str, Any]) -> dict[str, Any]:
        function = self._functions[reply["back"]]
        args = [unpack(one, self._stand_in) for one in reply["args"]]
        try:
            return {"value": self._pack(function(*args))}
        except Exception as error:
            return {"raised": [[kind.__name__ for kind in type(error).__mro__], str(error)[:1000]]}

    def _as_raised(self, kinds: list[str], message: str) -> BaseException:
        names = [str(kind) for kind in kinds]
        if "Exception" not in names:
            self.gone = f"the program left by {names[:1]}"
            return ProgramGone(self.gone)
        kind = self.exception(names)
        try:
            return kind(str(message))
        except TypeError:  # UnicodeDecodeError and its like take more than a message
            return ValueError(str(message))

    def exception(self, names: list[str]) -> type[Exception]:
        """The class of that name: Python's own, or one made here for one of the program's, under its nearest of Python's."""
        own = getattr(builtins, names[0], None)
        if isinstance(own, type) and issubclass(own, Exception):
            return own
        if names[0] not in self._raised:
            self._raised[names[0]] = type(names[0], (self.exception(names[1:]),), {})
        return self._raised[names[0]]

    def _pack(self, value: Any) -> Any:
        return pack(value, self._send_opaque)

    def _send_opaque(self, value: Any) -> Any:
        if isinstance(value, RemoteObject):
            return {"object": value._number}
        named = pack_name(value)
        if named is not None:
            return named
        if isinstance(value, _FROM_PROGRAMS) or (isinstance(value, type) and issubclass(value, BaseException)):
            raise TypeError(
                "too deep, or an exception: a program may have made it so, and must not make a test unusable"
            )
        if not isinstance(value, types.FunctionType | types.MethodType | functools.partial):
            raise Unsendable(f"a {type(value).__name__} of the tests cannot be handed to the program")
        self._functions.append(value)
        return {"function": len(self._functions) - 1}

    def _stand_in(self, tag: str, reference: Any) -> Any:
        if tag != "object" or not isinstance(reference[0], int):
            raise Broken("no reference of the program's")
        if reference[1] and "Exception" in reference[1]:
            return self.exception([str(name) for name in reference[1]])
        return RemoteObject(self, reference[0])


def _write_into(mine: Any, changed: Any) -> None:
    """The argument as the call left it. Its inner containers are new ones."""
    if isinstance(mine, list | bytearray) and isinstance(changed, list | bytearray):
        mine[:] = changed
    elif isinstance(mine, dict | set) and isinstance(changed, type(mine)):
        mine.clear()
        mine.update(changed)
    elif isinstance(mine, collections.deque) and isinstance(changed, collections.deque):
        mine.clear()
        mine.extend(changed)


class RemoteObject:
    """Stands for an object in the program's process: can be called, asked for attributes and items, gone through."""

    def __init__(self, program: Program, number: int) -> None:
        object.__setattr__(self, "_program", program)
        object.__setattr__(self, "_number", number)

    def _ask(self, what: str, *args: Any) -> Any:
        return self._program.ask(self._number, what, *args)

    def __call__(self, *args: Any, **named: Any) -> Any:
        return self._program.call(self._number, args, named)

    def __getattr__(self, name: str) -> Any:
        if name in _YES_OR_NO or (name.startswith("__") and name not in ("__name__", "__doc__", "__dict__")):
            raise AttributeError(name)
        return self._ask("attr", name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._ask("set", name, value)

    def __getitem__(self, key: Any) -> Any:
        return self._ask("item", key)

    def __setitem__(self, key: Any, value: Any) -> None:
        self._ask("put", key, value)

    def __len__(self) -> int:
        return int(self._ask("len"))

    def __bool__(self) -> bool:
        return self._ask("bool") is True

    def __iter__(self) -> Any:
        return self._ask("iter")

    def __next__(self) -> Any:
        return self._ask("next")

    def __contains__(self, value: Any) -> bool:
        return any(value == one for one in self)  # gone through here: the program does not get to say yes

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RemoteObject) and (self._number == other._number or self._ask("same", other) is True)

    def __hash__(self) -> int:
        return hash(self._number)

    def __str__(self) -> str:
        return str(self._ask("str"))

    def __repr__(self) -> str:
        return str(self._ask("repr"))

    def __instancecheck__(self, value: Any) -> bool:
        return isinstance(value, RemoteObject) and self._ask("instance", value) is True
