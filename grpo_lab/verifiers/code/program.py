"""What runs in the program's own process, after the walls are up: the model's program, and nothing that it could forge.

The source of ``wire`` and of this file is the text that the jailed interpreter is started with; nothing is imported from us.
This process holds no test, no expected value and no way to the tester's report. It is asked for values and calls, and
answers with data; whatever it answers is compared elsewhere. So it may be taken over entirely by the program in it.

Requests: ``{"load": source}``, ``{"get": name}``, ``{"call": id, "args", "named"}``, ``{"ask": id, "what", "args"}``. Replies:
``{"value": data, "args": per argument its new value where the call changed it in place, or null}`` or ``{"raised": [class names, message]}``; ``{"back": id, "args"}`` calls a
function of the tester's.
"""

from __future__ import annotations

import builtins
import collections
import importlib
import os
import sys
import types
from typing import Any

if __name__ == "grpo_lab.verifiers.code.program":  # in the jail the two stand in one text
    from grpo_lab.verifiers.code.wire import Broken, Channel, pack, unpack

_CHANGING = (list, dict, set, bytearray, collections.deque)
_QUESTIONS: dict[str, Any] = {
    "len": len,
    "iter": iter,
    "next": next,
    "str": str,
    "repr": repr,
    "bool": bool,
    "attr": getattr,
    "item": lambda thing, key: thing[key],
    "put": lambda thing, key, value: thing.__setitem__(key, value),
    "set": setattr,
    "same": lambda thing, other: bool(thing == other),
    "instance": lambda thing, other: isinstance(other, thing),
}


class Server:
    """Answers the tester's requests about one program."""

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self.objects: list[Any] = []
        self.module = types.ModuleType("solution")

    def serve(self) -> None:
        while True:
            self.channel.send(self.answer(self.channel.receive()))

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        try:
            return self._do(request)
        except Broken:
            raise
        except BaseException as error:  # the program's own, SystemExit and KeyboardInterrupt among them
            return {"raised": [[kind.__name__ for kind in type(error).__mro__], _message(error)]}

    def _do(self, request: dict[str, Any]) -> dict[str, Any]:
        if "load" in request:
            return self._load(request["load"])
        if "get" in request:
            return {"value": self._pack(self._find(request["get"])), "args": None}
        given = [self._unpack(one) for one in request["args"]]
        if "ask" in request:
            question = _QUESTIONS[request["what"]]
            return {"value": self._pack(question(self.objects[request["ask"]], *given)), "args": None}
        named = {name: self._unpack(one) for name, one in request["named"].items()}
        called = self.objects[request["call"]]
        value = called(*given, **named)
        made = isinstance(called, type) and called.__module__ == "solution"  # an object even where it is a kind of list
        after = [self._pack(one) if isinstance(one, _CHANGING) else None for one in given]
        changed = [new if new != old else None for new, old in zip(after, request["args"])]
        return {"value": self._keep(value) if made else self._pack(value), "args": changed if any(changed) else None}

    def _load(self, source: str) -> dict[str, Any]:
        sys.modules["solution"] = self.module
        exec(compile(source, "<program>", "exec"), self.module.__dict__)
        names = [name for name in vars(self.module) if isinstance(name, str) and not name.startswith("__")]
        return {"value": names, "args": None}

    def _find(self, name: str) -> Any:
        """A name of the program; else a method of its class ``Solution``, as judges of contests ask for them."""
        if name in vars(self.module):
            return vars(self.module)[name]
        return getattr(vars(self.module)["Solution"](), name)

    def _pack(self, value: Any) -> Any:
        return pack(value, self._keep)

    def _keep(self, value: Any) -> Any:
        self.objects.append(value)
        about = [kind.__name__ for kind in value.__mro__] if _is_exception(value) else None
        return {"object": [len(self.objects) - 1, about]}

    def _unpack(self, data: Any) -> Any:
        return unpack(data, self._refer)

    def _refer(self, tag: str, reference: Any) -> Any:
        if tag == "object":
            return self.objects[reference]
        if tag == "name":
            return getattr(importlib.import_module(reference[0]), reference[1])

        def theirs(*args: Any) -> Any:
            self.channel.send({"back": reference, "args": [self._pack(one) for one in args]})
            reply = self.channel.receive()
            while "raised" not in reply and "value" not in reply:  # their function asks this program in turn
                self.channel.send(self.answer(reply))
                reply = self.channel.receive()
            if "raised" in reply:
                raise _as_error(*reply["raised"])
            return self._unpack(reply["value"])

        return theirs


def _is_exception(value: Any) -> bool:
    return isinstance(value, type) and issubclass(value, BaseException)


def _as_error(kinds: list[str], message: str) -> Exception:
    """What a function of the tester's raised: the nearest of Python's own classes that takes a message."""
    for kind in (getattr(builtins, name, None) for name in kinds):
        if isinstance(kind, type) and issubclass(kind, Exception):
            try:
                return kind(message)
            except TypeError:
                continue
    return ValueError(message)


def _message(error: BaseException) -> str:
    try:
        return str(error)[:1000]
    except BaseException:
        return ""


def run(kind: str, fd: int, recursion: int) -> None:
    """Entry point in the jail: ``kind`` is ``calls`` (answer a tester) or ``script`` (run as a script, once)."""
    from _sitebuiltins import Quitter

    sys.path[:] = [place for place in sys.path if place]
    sys.setrecursionlimit(recursion)
    for name in ("exit", "quit"):  # `site`, which brings them, is not loaded
        setattr(builtins, name, Quitter(name, ""))
    channel = Channel(fd)
    if kind == "calls":
        try:
            Server(channel).serve()
        except Broken:
            return
    source = channel.receive()["load"]
    os.close(fd)
    main = types.ModuleType("__main__")
    sys.modules["__main__"] = main
    sys.argv[:] = ["program.py"]
    exec(compile(source, "<program>", "exec"), main.__dict__)
