"""Outcome of a tool's call, and tools that run in processes of their own.

Such a process is a worker of ``sandbox.fork_server``. It imports the tool by its name, once; arguments and answers are
sent as JSON, never as pickles. Of the run's environment variables it gets a few such as the path and the language
(``sandbox.workers``), and what it prints is dropped. It is no jail: the tool is the team's own code, which may hang,
crash or fork (a child that leaves the process group outlives it). A program of the model belongs into a jail
(``rewards/code.py``), which a tool may ask for.
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
import json
import os
import selectors
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from grpo_lab.sandbox.fork_server import Handler
from grpo_lab.sandbox.wire import MOST_BYTES
from grpo_lab.sandbox.workers import ForkServerProcess, Limits, VerifierError, WorkerProcess
from grpo_lab.visible import encodable

_ADDRESS_SPACE = 1 << 34
"""Bytes that a process may map: enough for tools that import torch, too little to take the machine with it."""
_STARTS = 3
"""How often a process is started that ends before it is ready."""


@dataclass(frozen=True)
class ToolOutcome:
    """Result of a call: the content of the tool's message to the policy, and why that is no proper answer
    (``Call.failure``; ``None``: it is one)."""

    content: Any
    failure: str | None = None


def failed(why: object, failure: str = "raised") -> ToolOutcome:
    """Return the outcome with the error message ``why``, in TRL's form, and the failure ``failure``."""
    return ToolOutcome(tidy(str({"error": str(why)})), failure)


def raised(error: BaseException) -> ToolOutcome:
    """Return the outcome of a call that raised."""
    try:
        return failed(str(error))
    except BaseException:  # its `__str__` raises, too
        return failed(type(error).__name__)


def timed_out(seconds: float) -> ToolOutcome:
    """Return the outcome of a call that was given up after ``seconds``."""
    return failed(f"no answer within {seconds:g} s", "timed_out")


def content_of(answer: Any) -> Any:
    """Return the content of a tool's message as TRL makes it: a list (blocks of text and images) as it is, the text of
    anything else. Characters that tokenizers fail on are replaced (``tidy``)."""
    if isinstance(answer, list):
        return tidy(answer)
    return tidy(str.__str__(str(answer)))


def tidy(value: Any) -> Any:
    """Return ``value``, its lists and mappings too, with U+FFFD for NUL and half surrogate pairs in texts."""
    if isinstance(value, str):
        return encodable(value.replace("\0", "\ufffd"))
    if isinstance(value, list):
        return [tidy(item) for item in value]
    if isinstance(value, dict):
        return {name: tidy(item) for name, item in value.items()}
    return value


def called(tool: Callable[..., Any], arguments: Any) -> ToolOutcome:
    """Call a tool in this thread. Any exception, ``SystemExit`` too, becomes an outcome."""
    own = os.getpid()
    try:
        return ToolOutcome(content_of(tool(**arguments)))
    except BaseException as error:
        return raised(error)
    finally:
        _end_a_fork_of(own)


async def awaited(tool: Callable[..., Any], arguments: Any) -> ToolOutcome:
    """Await an async tool. Any exception, ``SystemExit`` too, becomes an outcome."""
    own = os.getpid()
    try:
        return ToolOutcome(content_of(await tool(**arguments)))
    except BaseException as error:
        return raised(error)
    finally:
        _end_a_fork_of(own)


def _end_a_fork_of(own: int) -> None:
    """End this process unless its pid is ``own``: a process that the tool has forked must not answer the call, too."""

    if os.getpid() != own:
        os._exit(0)


def address_of(tool: Callable[..., Any]) -> str:
    """Return ``module:name``, by which another process imports the tool. Raises ``ValueError`` if it cannot."""
    module = getattr(tool, "__module__", None)
    name = getattr(tool, "__qualname__", type(tool).__name__)
    found: Any = sys.modules.get(str(module))
    for part in name.split("."):
        found = getattr(found, part, None)
    if found is tool and module != "__main__":
        return f"{module}:{name}"
    why = "cannot be imported there by its name"
    if inspect.ismethod(tool):
        why = "is a method of an object that lives in this one"
    elif module == "__main__":
        why = "is defined in the script, which would run once more there"
    raise ValueError(
        f"The tool {name} is to run in a process (@in_process), but {why}. A tool in a "
        "process is a function of a module."
    )


def handler_of(address: str) -> Handler:
    """Import the tool at ``address`` and return the handler of its process: a function that calls the tool with the
    arguments it is given, and returns the outcome as ``{"content": …, "failure": …}``."""
    module, name = address.split(":")
    tool: Any = importlib.import_module(module)
    for part in name.split("."):
        tool = getattr(tool, part)

    def answered(arguments: Any) -> dict[str, Any]:
        if inspect.iscoroutinefunction(tool):
            outcome = asyncio.run(awaited(tool, arguments))
        else:
            outcome = called(tool, arguments)
        try:
            size = len(json.dumps(outcome.content))
        except (TypeError, ValueError, RecursionError) as error:
            outcome = raised(error)
        else:
            if size > MOST_BYTES:
                outcome = failed(f"an answer of {size} bytes; at most {MOST_BYTES} leave a process")
        return {"content": outcome.content, "failure": outcome.failure}

    return answered


class ToolProcesses:
    """Processes that run one tool. Each call on its way has one to itself, which is then kept for later calls.

    Args:
        address: the tool (``address_of``).
        seconds: wall-clock seconds after which a call's process is killed, with its process group.
    """

    def __init__(self, address: str, seconds: float) -> None:
        self.address = address
        self._handler = f"{__name__}:{handler_of.__name__}:{address}"
        # The clock ends a call. Threads of one process may use more processor time than that.
        self._limits = Limits(
            cpu_seconds=seconds * (os.cpu_count() or 1) * 2, wall_seconds=seconds, memory_bytes=_ADDRESS_SPACE
        )
        self._lock = threading.Lock()
        self._idle: list[WorkerProcess] = []
        self._server: ForkServerProcess | None = None
        self._imported = False
        self._closed = False

    def warm_up(self) -> None:
        """Begin to import the tool in the fork server, and return at once."""
        with self._lock:
            self._running()

    def call(self, arguments: Any) -> ToolOutcome:
        """Make one call and wait for it, from any thread. Raises ``VerifierError`` if no process can be started."""
        try:
            json.dumps(arguments)
        except (TypeError, ValueError, RecursionError) as error:
            return raised(error)
        worker = self._ready()
        while not worker.send(arguments, 1.0):  # it had died while idle
            self._end(worker)
            worker = self._ready()
        message = _reply(worker)
        if "ok" not in message or message["peak"] > _ADDRESS_SPACE // 2:
            self._end(worker)
        else:
            with self._lock:
                self._idle.append(worker)
        if "ok" in message:
            return ToolOutcome(**message["ok"])
        if "bug" in message:
            raise VerifierError(f"the process of the tool {self.address} raised:\n{message['bug']}")
        if "timeout" in message:
            return timed_out(self._limits.wall_seconds)
        return failed(next(iter(message.values())))

    def close(self) -> None:
        """End all processes. A call on its way then returns a failure that says that its process has ended."""
        with self._lock:
            self._closed = True
            self._idle.clear()
            if self._server is not None:
                self._server.end(at_once=not self._imported)  # else it ends the children of its workers first

    def _ready(self) -> WorkerProcess:
        """Return a process that is ready for a call: an idle one, or a new one. Raises ``VerifierError`` if none can be
        started."""
        why: Any = ""
        for _ in range(_STARTS):
            with self._lock:
                server = self._running()
                if self._idle:
                    return self._idle.pop()
                worker = server.fork()
            message = _reply(worker)
            if "ready" in message:
                worker.pid = message["ready"]
                self._imported = True
                return worker
            why = next(iter(message.values()))
            self._end(worker)
            if "bug" in message or "timeout" in message:
                break
        raise VerifierError(f"no process of the tool {self.address} could be started: {why}")

    def _running(self) -> ForkServerProcess:
        """Return the running fork server; start one if there is none. The caller must hold the lock."""
        if self._closed:
            raise VerifierError(f"the processes of the tool {self.address} are closed")
        if self._server is None or self._server.process.poll() is not None:
            self._server = ForkServerProcess(self._handler, self._limits)
            self._idle.clear()  # these ended with the earlier server
        return self._server

    def _end(self, worker: WorkerProcess) -> None:
        with self._lock:
            worker.kill()


def _reply(worker: WorkerProcess) -> dict[str, Any]:
    """Wait for the next message of a process (``WorkerProcess.receive``); at its deadline return ``{"timeout": …}``."""
    with selectors.DefaultSelector() as selector:
        selector.register(worker, selectors.EVENT_READ)
        while selector.select(max(0.0, worker.deadline - time.monotonic())):
            message = worker.receive()
            if message is not None:
                return message
    return {"timeout": "no message until its deadline"}
