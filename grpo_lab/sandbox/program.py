"""The jailed process that runs the model's program, behind the walls; it holds nothing that the program could forge.

The jailed interpreter is started with the source of ``wire`` and of this file as text, and imports nothing from us.
This process has no test, no expected value and no access to the tester's report; its answers are compared elsewhere. So
the program may take it over entirely.

Messages, in which values have the form of ``wire.pack`` and ``n`` is the number of an object or function:

    requests    {"load": source}                       run the source; the value is a list of its names
                {"get": name}                          the value of a name
                {"call": n, "args", "named"}           call an object
                {"ask": n, "what", "args"}             ask an object one of ``_QUESTIONS``
                {"leave": n, "error"}                  ``__exit__`` of a context manager
    replies     {"value", "args"}                      ``args``: for each argument that a call changed in place its new
                                                       value, else null
                {"raised": …}                          an exception (``wire.pack_error``)
    before a reply
                {"back": n, "args", "named"}           call a function of the tester, which answers as above
"""

from __future__ import annotations

import builtins
import collections
import importlib
import operator
import os
import sys
import types
from typing import Any

if __name__ == "grpo_lab.sandbox.program":  # in the jail the two are one text
    from grpo_lab.sandbox.wire import RECURSION, Broken, Channel, pack, pack_error, unpack

_CHANGING = (list, dict, set, bytearray, collections.deque)
_BUILTINS = "len iter next str repr bool hash int float abs round aiter"
_QUESTIONS: dict[str, Any] = {
    **{name: getattr(builtins, name) for name in _BUILTINS.split()},
    "neg": operator.neg,
    "pos": operator.pos,
    "invert": operator.invert,
    "attr": getattr,
    "item": operator.getitem,
    "put": operator.setitem,
    "del": operator.delitem,
    "set": setattr,
    "same": lambda thing, other: bool(thing == other),
    "instance": lambda thing, other: isinstance(other, thing),
    "subclass": lambda thing, other: issubclass(other, thing),
    "enter": lambda thing: type(thing).__enter__(thing),
    "math": lambda thing, name, other: getattr(operator, name)(thing, other),
    "rmath": lambda thing, name, other: getattr(operator, name)(other, thing),
}


class ProgramServer:
    """Answers the tester's requests about one program, whose module is ``solution``.

    Attributes:
        objects: number → object that the tester has a reference to.
        numbers: id of such an object → its number, so that an object that is sent twice is one for the tester.
        errors: exceptions that functions of the tester raised here, each with the tester's number of it.
        loop: event loop of the program's coroutines, once there is one.
    """

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self.objects: list[Any] = []
        self.numbers: dict[int, int] = {}
        self.errors: list[tuple[BaseException, int]] = []
        self.loop: Any = None
        self.module = types.ModuleType("solution")

    def serve(self) -> None:
        """Answer requests until the channel ends (``Broken``)."""
        while True:
            self.channel.send(self.answer(self.channel.receive()))

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Return the reply to a request. An exception of the program is a reply; ``Broken`` is raised."""
        try:
            return self._do(request)
        except BaseException as error:  # the program's own, SystemExit and KeyboardInterrupt among them
            if isinstance(error, Broken):
                raise
            return dict(pack_error(error, next((number for mine, number in self.errors if mine is error), None)))

    def _do(self, request: dict[str, Any]) -> dict[str, Any]:
        """Carry out a request and return its reply; raise what the program raises."""
        if "call" in request:
            return self._call(request)
        if "load" in request:
            value: Any = self._load(request["load"])
        elif "leave" in request:
            value = self._leave(self.objects[request["leave"]], request["error"])
        elif "get" in request:
            value = self._pack(self._found(request["get"]))
        else:
            given = [self._unpack(one) for one in request["args"]]
            value = self._answered(request["what"], self.objects[request["ask"]], given)
        return {"value": value, "args": None}

    def _leave(self, thing: Any, error: dict[str, Any] | None) -> bool:
        """Call ``__exit__`` of a context manager; return whether it suppresses the error."""
        if error is None:
            return bool(type(thing).__exit__(thing, None, None, None))
        theirs = _as_error(error)
        return bool(type(thing).__exit__(thing, type(theirs), theirs, None))

    def _found(self, name: str) -> Any:
        """Return the program's value of a name, or a method of its class ``Solution``, as judges of contests ask."""
        names = vars(self.module)
        if name in names:
            return names[name]
        return getattr(names["Solution"](), name)

    def _call(self, request: dict[str, Any]) -> dict[str, Any]:
        """Call an object; return the reply with its value and the arguments that it changed in place."""
        given = [self._unpack(one) for one in request["args"]]
        named = {name: self._unpack(one) for name, one in request["named"].items()}
        called = self.objects[request["call"]]
        value = called(*given, **named)
        # An object of the program's own class stays an object, even if the class derives from list.
        made = isinstance(called, type) and called.__module__ == "solution"
        after = [self._pack(one) if isinstance(one, _CHANGING) else None for one in given]
        changed = [new if new != old else None for new, old in zip(after, request["args"])]
        any_changed = any(new is not None for new in changed)
        return {"value": self._keep(value) if made else self._pack(value), "args": changed if any_changed else None}

    def _answered(self, what: str, thing: Any, given: list[Any]) -> Any:
        """Return the packed answer of the object ``thing`` to the question ``what`` with the arguments ``given``."""
        if what in ("await", "anext"):
            asyncio = importlib.import_module("asyncio")
            self.loop = self.loop or asyncio.new_event_loop()

            async def wait() -> Any:
                return await (thing if what == "await" else thing.__anext__())

            return self._pack(self.loop.run_until_complete(wait()))
        if what == "plain":  # the content of an object whose class derives from list, str, int, …
            if _is_exception(thing):
                return None
            return self._pack(thing)
        value = _QUESTIONS[what](thing, *given)
        if what in ("math", "rmath") and given and type(value).__module__ == "solution":
            return self._keep(value)
        return self._pack(value)

    def _load(self, source: str) -> list[str]:
        """Run the program's source and return the names that it defines."""
        sys.modules["solution"] = self.module
        if "class Solution" in source:
            # as on contest sites: the signatures that they give use `List` without an import
            typing = importlib.import_module("typing")
            missing = [name for name in typing.__all__ if not hasattr(builtins, name)]
            vars(builtins).update({name: getattr(typing, name) for name in missing})
        exec(compile(source, "<program>", "exec"), self.module.__dict__)
        return [name for name in vars(self.module) if isinstance(name, str) and not name.startswith("__")]

    def _pack(self, value: Any) -> Any:
        return pack(value, self._keep)

    def _keep(self, value: Any) -> Any:
        """Return a reference to an object of the program, which is kept (``opaque`` of ``pack``)."""
        number = self.numbers.setdefault(id(value), len(self.objects))
        if number == len(self.objects):
            self.objects.append(value)
        about = None
        if _is_exception(value):
            about = [[str(kind.__module__), kind.__name__] for kind in value.__mro__]
        return {"object": [number, about, type(value).__name__]}

    def _unpack(self, data: Any) -> Any:
        return unpack(data, self._refer)

    def _refer(self, tag: str, reference: Any) -> Any:
        """Return what a reference of the tester means here (``opaque`` of ``unpack``)."""
        if tag == "object":
            return self.objects[reference]
        if tag == "name":
            return operator.attrgetter(reference[1])(importlib.import_module(reference[0]))  # `str.upper`, too
        if tag == "named":
            return collections.namedtuple(reference[0], reference[1])(*reference[2])
        if tag == "iterator":
            return self._theirs_one_by_one(reference)

        def theirs(*args: Any, **named: Any) -> Any:
            return self._ask_back(reference[0], args, named)

        theirs.__name__ = theirs.__qualname__ = reference[1]
        return theirs

    def _theirs_one_by_one(self, reference: int) -> Any:
        """Yield the items of an iterator of the tester."""
        while True:
            try:
                one = self._ask_back(reference, (), {})
            except StopIteration:
                return
            yield one

    def _ask_back(self, number: int, args: Any, named: Any) -> Any:
        """Call function ``number`` of the tester; return its value or raise its exception."""
        packed = {name: self._pack(one) for name, one in named.items()}
        self.channel.send({"back": number, "args": [self._pack(one) for one in args], "named": packed})
        reply = self.channel.receive()
        while "raised" not in reply and "value" not in reply:  # the tester's function calls this program in turn
            self.channel.send(self.answer(reply))
            reply = self.channel.receive()
        if "raised" not in reply:
            return self._unpack(reply["value"])
        error = _as_error(reply["raised"])
        self.errors.append((error, reply["raised"]["again"]))
        raise error


def _is_exception(value: Any) -> bool:
    return isinstance(value, type) and issubclass(value, BaseException)


def _as_error(said: dict[str, Any]) -> Exception:
    """Make the exception that a function of the tester raised, from its data (``pack_error``), of the nearest of
    Python's own classes."""
    for kind in (getattr(builtins, name, None) for _, name in said["kinds"]):
        if isinstance(kind, type) and issubclass(kind, Exception):
            try:
                return kind(*unpack([*said["args"]], None))
            except Exception:
                return kind(said["text"])
    return ValueError(said["text"])


def run(kind: str, fd: int) -> None:
    """Entry point in the jail. ``kind`` is ``calls``, to answer a tester's requests, or ``script``, to receive a source
    and run it as the main program. ``fd``: descriptor of the channel."""
    from _sitebuiltins import Quitter, _Helper

    sys.path[:] = [place for place in sys.path if place]
    sys.setrecursionlimit(RECURSION)
    for name in ("exit", "quit"):  # `site`, which brings them, is not loaded
        setattr(builtins, name, Quitter(name, ""))
    builtins.help = _Helper()
    channel = Channel(fd)
    if kind == "calls":
        try:
            ProgramServer(channel).serve()
        except Broken:
            return
    source = channel.receive()["load"]
    os.close(fd)
    main = types.ModuleType("__main__")
    main.__dict__.update(__builtins__=builtins, __file__=os.path.abspath("program.py"))
    sys.modules["__main__"] = main
    sys.argv[:] = ["program.py"]
    exec(compile(source, "<program>", "exec"), main.__dict__)
