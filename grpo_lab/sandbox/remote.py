"""The program as its tester sees it. Its functions are called in another process and return plain data, which a test
compares by Python's own ``==``. Other objects stay there, and a ``RemoteObject`` represents them here.

One question is a request over the channel (``Program._ask``), at whose other end ``program.ProgramServer`` answers. The
answer is a value, an exception, or first a call back of a function of the tests that was an argument.
"""

from __future__ import annotations

import collections
import collections.abc
import functools
import operator
import sys
import threading
import types
from collections.abc import Callable
from typing import Any

from grpo_lab.sandbox.stand_in import DOC, YES_OR_NO, RemoteObject
from grpo_lab.sandbox.wire import Broken, Channel, pack, pack_error, pack_name, refuse_tag, unpack

_FUNCTIONS = types.FunctionType | types.MethodType | types.BuiltinFunctionType | types.MethodDescriptorType
_FUNCTIONS |= types.WrapperDescriptorType | types.MethodWrapperType | functools.partial
_FUNCTIONS |= operator.itemgetter | operator.attrgetter | operator.methodcaller
_VIEWS = collections.abc.KeysView | collections.abc.ValuesView | collections.abc.ItemsView
_CONTAINERS = list | tuple | dict | set | frozenset | collections.deque | _VIEWS
_FROM_PROGRAMS = BaseException | _CONTAINERS | slice | bytes | bytearray | complex | range
_MODULES_OF_DATA = ("decimal", "fractions", "datetime")
#: Questions that run code of the program which may change an object.
_MAY_CHANGE = ("attr", "item", "put", "del", "set", "iter", "next", "anext", "await", "enter")


def lacks_a_module(error: BaseException | None) -> bool:
    """Return whether an error says that an import of the tests themselves failed. The same error from the program has a
    message, but no module name."""
    return type(error) is ModuleNotFoundError and error.name is not None


class ProgramGone(BaseException):
    """Raised if the program ended, or broke the channel. It is no ``Exception``, so that no test catches it."""


class Unsendable(BaseException):
    """Raised if a test gives the program a value that cannot be sent: the test is unusable, whatever the program."""


class Program:
    """The connection to one program.

    Args:
        fd: descriptor of the socket to it.

    Attributes:
        gone: why the program can no longer answer, after which no test passes; empty while it can.
        refused: whether the running test met a refusal that a program may have caused: a value that cannot be sent, or
            an answer that could contain the test's own data. The test then fails, even if it catches the error.
        names: names that the program defines.
    """

    def __init__(self, fd: int) -> None:
        self._channel = Channel(fd)
        self._functions: list[Callable[..., Any]] = []
        self._coroutines: dict[int, tuple[Any, int]] = {}
        self._objects: dict[int, RemoteObject] = {}
        self._classes: dict[str, type[RemoteObject]] = {}
        self._raised: dict[tuple[str, str], type[Exception]] = {}
        self._own_errors: list[Exception] = []
        self._held: dict[int, Any] = {}
        self._one_at_a_time = threading.RLock()  # tests may ask from threads: each gets the answer to its own question
        self._loaded = False
        self.gone = ""
        self.refused = False
        self.names: frozenset[str] = frozenset()

    def load(self, source: str) -> None:
        """Run the program's source in its process and learn its names. Raises what the source raises."""
        names = self._ask({"load": source})
        self._loaded = True
        named = names if isinstance(names, list) else []
        # no `__path__`, from which `from solution import f` would load files into this process
        self.names = frozenset(name for name in named if isinstance(name, str) and not name.startswith("__"))

    def get(self, name: str) -> Any:
        """Return a value of the program: plain data, or a ``RemoteObject``."""
        with self._one_at_a_time:
            return self._ask({"get": name})

    def call(self, number: int, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """Call object ``number`` of the program. Positional arguments that the call changes in place are changed here,
        too (``_write_into``); those in ``named`` are not."""
        with self._one_at_a_time:
            self._held.clear()
            packed = {name: self._pack(value) for name, value in named.items()}
            return self._ask({"call": number, "args": [self._pack(one) for one in args], "named": packed}, args)

    def holds(self, number: int) -> Any:
        """Return the content of object ``number`` as plain data, if its class derives from a list, a number or another
        kind of plain data; else None or a ``RemoteObject``.

        The content is kept until a question may change it. An object that was asked at every ``==`` could answer two
        comparisons differently.
        """
        if number not in self._held:
            self._held[number] = self.ask(number, "plain")
        return self._held[number]

    def ask(self, number: int, what: str, *args: Any) -> Any:
        """Ask object ``number`` a question such as ``len`` (``program._QUESTIONS``) and return the answer."""
        with self._one_at_a_time:
            if what in _MAY_CHANGE:
                self._held.clear()
            return self._ask({"ask": number, "what": what, "args": [self._pack(one) for one in args]})

    def leave(self, number: int, error: Any) -> None:
        """Call ``__exit__`` of object ``number``, a context manager. ``error``: the exception of the block as data
        (``wire.pack_error``), or None."""
        self._held.clear()
        self._ask({"leave": number, "error": error})

    def _ask(self, request: dict[str, Any], args: tuple[Any, ...] = ()) -> Any:
        """Send a request and return the value that answers it, or raise the exception that does. ``args``: arguments of
        a call, which the answer may change in place. Raises ``ProgramGone`` if there is no answer."""
        if self.gone:
            raise ProgramGone(self.gone)
        try:
            self._channel.send(request)
            raised, value = self._take(self._channel.receive(), args)
        except Exception as error:  # hostile bytes can be wrong in any way, and make a request too long
            self.gone = f"no answer in the form of one: {error!r:.200}"
            raise ProgramGone(self.gone) from None
        if raised is not None:
            ends = isinstance(raised, StopIteration | StopAsyncIteration)
            if ends and request.get("what") not in ("next", "anext"):  # `all(map(f, cases))` would end there, true
                raise RuntimeError(f"the program raised {type(raised).__name__}")
            raise raised
        return value

    def _take(self, reply: dict[str, Any], args: tuple[Any, ...]) -> tuple[BaseException | None, Any]:
        """Read a reply, after serving the calls back that come before it. Return the exception of the program, or None,
        and its value. Without an exception, first write into ``args``, the arguments of a call, what it changed in
        them."""
        while "back" in reply:
            self._channel.send(self._called_back(reply))
            reply = self._channel.receive()
        if "raised" in reply:
            return self._as_raised(reply["raised"]), None
        value = unpack(reply["value"], self._stand_in)
        for mine, changed in zip(args, reply.get("args") or ()):
            if changed is not None:
                _write_into(mine, unpack(changed, self._stand_in))
        return None, value

    def _called_back(self, reply: dict[str, Any]) -> dict[str, Any]:
        """Call a function of the tests for the program, and return the message with its value or exception."""
        function = self._functions[reply["back"]]
        args = [unpack(one, self._stand_in) for one in reply["args"]]
        named = {str(name): unpack(one, self._stand_in) for name, one in reply["named"].items()}
        try:
            return {"value": self._pack(function(*args, **named))}
        except (Exception, Unsendable) as error:
            if isinstance(error, Unsendable) or lacks_a_module(error):
                # The test fails here and is not unusable: the program could choose that to hide a failure.
                self.refused = True
                error = TypeError(str(error))
            self._own_errors.append(error)
            return dict(pack_error(error, len(self._own_errors) - 1))

    def _as_raised(self, said: dict[str, Any]) -> BaseException:
        """Make the exception that the program raised from its data (``wire.pack_error``)."""
        kinds = [(str(module), str(name)) for module, name in said["kinds"]]
        args = [unpack(one, refuse_tag) for one in said["args"]]
        if ("builtins", "SystemExit") in kinds and self._loaded:
            return SystemExit(*args)  # as in one interpreter: a test may expect it, else it fails
        if ("builtins", "Exception") not in kinds:
            self.gone = f"the program left by {kinds[:1]}"
            return ProgramGone(self.gone)
        if said["again"] is not None:
            return self._own_errors[int(said["again"])]
        kind = self.exception(kinds)
        text = str(said["text"])
        built_in = kind.__module__ == "builtins"
        try:
            error = kind(*args) if built_in else kind.__new__(kind, *args)
        except TypeError:
            error = ValueError(text)
        error.__dict__["_text"] = text
        if not built_in:
            for name, value in said["held"].items():
                if name.isidentifier() and not name.startswith("_"):
                    error.__dict__[name] = unpack(value, refuse_tag)
        return error

    def exception(self, kinds: list[tuple[str, str]]) -> type[Exception]:
        """Return the class of an exception of the program: Python's own, or a new one that derives from the nearest of
        Python's. ``kinds``: module and name of the class and its bases, nearest first."""
        module, name = kinds[0]
        # The tests can name a class of the standard library only if its module is loaded.
        if module.partition(".")[0] in sys.stdlib_module_names:
            own = getattr(sys.modules.get(module), name, None)
            if isinstance(own, type) and issubclass(own, Exception):
                return own
        if kinds[0] not in self._raised:
            base = self.exception(kinds[1:])
            self._raised[kinds[0]] = type(name, (base,), {"__str__": lambda mine: mine.__dict__.get("_text", "")})
        return self._raised[kinds[0]]

    def _pack(self, value: Any) -> Any:
        """Return a value of the tests in the form in which it is sent (``wire.pack``)."""
        try:
            return pack(value, self._send_opaque)
        except TypeError:
            self.refused = True  # else any program would pass a test that expects a TypeError
            raise

    def _send_opaque(self, value: Any) -> Any:
        """Return what stands for a value that is no plain data (``opaque`` of ``wire.pack``).

        Raises ``TypeError`` for a value that a program may have caused, so that the test fails, and ``Unsendable`` for
        one that the tests alone made.
        """
        if isinstance(value, RemoteObject):
            return {"object": value._number}
        if isinstance(getattr(value, "_remote", None), int):  # a named tuple of the program
            return {"object": value._remote}
        if id(value) in self._coroutines:
            return {"object": self._coroutines[id(value)][1]}
        if named := pack_name(value):
            return named
        theirs = isinstance(value, type) and issubclass(value, BaseException | RemoteObject)
        if theirs or isinstance(value, _FROM_PROGRAMS) or type(value).__module__ in _MODULES_OF_DATA:
            raise TypeError("too deep, or an exception: what a program may make so must not make a test unusable")
        if hasattr(type(value), "__next__") and not hasattr(value, "read"):
            self._functions.append(functools.partial(next, value))
            return {"iterator": len(self._functions) - 1}
        if not isinstance(value, _FUNCTIONS):
            raise Unsendable(f"a {type(value).__name__} of the tests cannot be handed to the program")
        self._functions.append(value)
        return {"function": [len(self._functions) - 1, getattr(value, "__name__", "function")]}

    def _stand_in(self, tag: str, reference: Any) -> Any:
        """Return what represents an object of the program here (``opaque`` of ``wire.unpack``): a ``RemoteObject``, an
        exception class, a coroutine, or a named tuple."""
        if tag == "named":
            return _named(*reference)
        if tag != "object" or not isinstance(reference[0], int):
            raise Broken("no reference of the program's")
        number, about, kind = reference
        if about and ["builtins", "Exception"] in about:
            return self.exception([(str(module), str(name)) for module, name in about])
        if kind == "coroutine":  # the program's runs when this one is awaited

            async def wait() -> Any:
                return self.ask(number, "await")

            coroutine = wait()
            self._coroutines[id(coroutine)] = coroutine, number
            return coroutine
        if number not in self._objects:
            made = self._classes.setdefault(str(kind), type(str(kind), (RemoteObject,), {"__doc__": DOC}))
            self._objects[number] = made(self, number)
        return self._objects[number]


@functools.lru_cache(maxsize=256)
def _named_class(name: str, fields: tuple[str, ...]) -> type[tuple[Any, ...]]:
    """Return a named tuple class whose objects can have attributes."""
    if YES_OR_NO & set(fields):
        raise Broken("fields that are named as questions of plain data")
    return type(name, (collections.namedtuple(name, fields),), {})


def _named(name: str, fields: list[str], values: list[Any], reference: dict[str, Any]) -> Any:
    """Return a copy of a named tuple of the program, which is sent back as the ``reference`` to the original."""
    value: Any = _named_class(name, tuple(fields))(*values)
    if not isinstance(reference["object"][0], int):
        raise Broken("no reference of the program's")
    value._remote = reference["object"][0]
    return value


def _write_into(mine: Any, changed: Any) -> None:
    """Give the argument ``mine`` of a call the content ``changed`` that the call gave it, in place. Containers within
    it are replaced. Left unchanged is an object of the tests' own class that derives from ``dict`` or ``set``, since
    ``changed`` is then a plain one."""
    if isinstance(mine, list | bytearray) and isinstance(changed, list | bytearray):
        mine[:] = changed
    elif isinstance(mine, dict | set) and isinstance(changed, type(mine)):
        mine.clear()
        mine.update(changed)
    elif isinstance(mine, collections.deque) and isinstance(changed, collections.deque):
        mine.clear()
        mine.extend(changed)
