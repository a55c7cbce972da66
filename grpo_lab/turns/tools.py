"""Calls of tools with limits: trajectories side by side, the calls of one turn in TRL's order.

    sync tools      one after the other, in the order written; each in a thread of its own, or in a process
    async tools     then side by side, on one event loop; their answers stand behind those of the sync ones

What a call is told is TRL's text: ``str(answer)``, a list as it is, ``{"error": …}`` for an error. Here a tool may
raise anything, ``SystemExit`` too, or hang: a call that takes longer than ``tool_seconds`` is given up. A process is
killed then, an async tool cancelled, a thread left alone. No thread of tools keeps the interpreter from ending. But a
thread that calls ``os._exit``, or crashes in C, ends the run: tools that may do so belong into processes.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import inspect
import os
import threading
import time
import weakref
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any

from grpo_lab.turns.tool_process import (
    ToolOutcome,
    ToolProcesses,
    address_of,
    awaited,
    called,
    failed,
    raised,
    timed_out,
)
from grpo_lab.turns.trajectory import Call
from grpo_lab.turns.turn_settings import TurnSettings, may_repeat, runs_in_process

Tool = Callable[..., Any]
Named = Mapping[str, Tool]

_ALIVE_SECONDS = 1.0
"""How long an event loop may be busy after a call on it was given up, before later calls get another loop."""


@dataclass(frozen=True)
class Wanted:
    """A call as the policy wrote it. ``tool`` is ``None`` where it cannot be made, and ``outcome`` says why."""

    name: str
    arguments: Any = None
    tool: Tool | None = None
    outcome: ToolOutcome | None = None

    @classmethod
    def read(cls, call: Any, tools: Named) -> Wanted:
        """Read TRL's form, ``{"type": "function", "function": {"name", "arguments"}}``, or the flat one."""
        try:
            kind = call.get("type", "function")
            if kind != "function":
                why = f"Unsupported tool call type: {kind}"
                return cls(str(call.get("name", "unknown")), outcome=failed(why, "unknown"))
            function = call.get("function", call)
            name = str(function["name"])
            if name not in tools:
                return cls(name, function.get("arguments"), outcome=failed(f"Tool {name} not found.", "unknown"))
            if "arguments" not in function:
                return cls(name, outcome=failed(KeyError("arguments"), "unparsable"))
            return cls(name, function["arguments"], tools[name])
        except (AttributeError, KeyError, TypeError) as error:
            return cls("unknown", outcome=failed(error, "unknown"))

    @property
    def waits(self) -> bool:
        """Whether its answer comes behind those of the sync tools: an async tool, and arguments that fit."""
        if not inspect.iscoroutinefunction(self.tool):
            return False
        try:
            inspect.signature(self.tool).bind(**self.arguments)
        except TypeError:
            return False
        return True


class ToolCalls:
    """Calls of tools, each with its limits (``protocols.Tools``).

    Args:
        settings: limits, and which tools run in processes.
        cut: ``Dialogue.cut``, which shortens a text to a number of tokens. One thread at a time calls it.
    """

    def __init__(self, settings: TurnSettings, cut: Callable[[str, int], tuple[str, bool]]) -> None:
        self._settings = settings
        self._cut = cut
        self._cutting = asyncio.Lock()
        self._slots = asyncio.Semaphore(settings.threads)
        self._processes: dict[str, ToolProcesses] = {}
        self._own = OwnLoop("turns: calls")
        self._asyncs = [OwnLoop("turns: async tools")]  # the last one is in use; others were blocked
        self._end = weakref.finalize(self, _end_all, self._own, self._asyncs, self._processes, os.getpid())

    def check(self, tools: Named) -> None:
        """Begin to start the processes of tools. ``tools`` are all of the run, bound methods of environments among
        them. Raises ``ValueError`` if a tool cannot run in a process, or if ``processes`` names no tool."""
        self._start_processes(tools.values())
        missing = set(self._settings.processes) - set(tools)
        if missing:
            raise ValueError(f"`rollout.turns.processes` names {sorted(missing)}; the tools are {sorted(tools)}")

    def begin(self, calls: Sequence[Mapping[str, Any]], tools: Named) -> Future[list[Call]]:
        """Begin the calls of one turn; the future has a ``Call`` for each, in the order of their answers.

        Args:
            calls: ``tool_calls`` of the policy's message.
            tools: name → function, a method of the trajectory's environment among them.

        Raises ``ValueError`` if a tool cannot run in a process. A fault of a tool or of the policy is an answer; the
        future raises only ``VerifierError``, if no process of a tool can be started.
        """
        if not self._end.alive:
            raise RuntimeError("the tools are closed; a call came after `close()`")
        wanted = [Wanted.read(call, tools) for call in calls]
        self._start_processes(one.tool for one in wanted if one.tool is not None)
        return self._own.run(self._turn(wanted))

    def close(self) -> None:
        """End processes and event loops; turns that are on their way are cancelled. Garbage collection and the end of
        the interpreter do it, too."""
        self._end()

    async def _turn(self, wanted: Sequence[Wanted]) -> list[Call]:
        made = [await self._made(one) for one in wanted if not one.waits]
        made += await asyncio.gather(*[self._made(one) for one in wanted if one.waits])
        return made

    async def _made(self, wanted: Wanted) -> Call:
        if wanted.tool is None:
            assert wanted.outcome is not None
            return await self._told(wanted, wanted.outcome, seconds=0.0, tries=0)
        most = 1
        if may_repeat(wanted.tool):
            most += self._settings.retries
        async with self._slot(wanted.tool):
            began = time.monotonic()
            tries = 1
            outcome = await self._tried(wanted.tool, wanted.arguments)
            while outcome.failure is not None and tries < most:
                tries += 1
                outcome = await self._tried(wanted.tool, wanted.arguments)
            seconds = time.monotonic() - began
        return await self._told(wanted, outcome, seconds, tries)

    async def _told(self, wanted: Wanted, outcome: ToolOutcome, seconds: float, tries: int) -> Call:
        """Return the finished call, its texts cut to ``tool_tokens``."""
        content = outcome.content
        cut = False
        if self._settings.tool_tokens is not None:
            async with self._cutting:
                content, cut = await _in_thread(partial(self._shortened, content, self._settings.tool_tokens))
        return Call(wanted.name, wanted.arguments, content, outcome.failure, seconds, tries, cut)

    def _shortened(self, content: Any, tokens: int) -> tuple[Any, bool]:
        """Cut a text, or each text among blocks."""
        if isinstance(content, str):
            return self._cut(content, tokens)
        blocks = []
        any_cut = False
        for block in content:
            if isinstance(block, dict) and isinstance(block.get("text"), str):
                text, cut = self._cut(block["text"], tokens)
                block = {**block, "text": text}
                any_cut = any_cut or cut
            blocks.append(block)
        return blocks, any_cut

    def _slot(self, tool: Tool) -> AbstractAsyncContextManager[Any]:
        """Return one of the ``threads`` places of threads and processes. A call that is given up leaves its place."""
        if inspect.iscoroutinefunction(tool) and not self._in_process(tool):
            return contextlib.nullcontext()
        return self._slots

    async def _tried(self, tool: Tool, arguments: Any) -> ToolOutcome:
        """Call a tool once. It gets its own copy of the arguments: what it does to them is not in the transcript."""
        try:
            arguments = copy.deepcopy(arguments)
        except RecursionError as error:
            return raised(error)
        if self._in_process(tool):
            return await _in_thread(partial(self._processes_of(tool).call, arguments))
        if inspect.iscoroutinefunction(tool):
            return await self._awaited(tool, arguments)
        outcome = _in_thread(partial(called, tool, arguments))
        if await _within(outcome, self._settings.tool_seconds):
            return outcome.result()
        return timed_out(self._settings.tool_seconds)

    async def _awaited(self, tool: Tool, arguments: Any) -> ToolOutcome:
        loop = self._asyncs[-1]
        outcome = asyncio.wrap_future(loop.run(awaited(tool, arguments)))
        if await _within(outcome, self._settings.tool_seconds):
            return outcome.result()
        outcome.cancel()
        if not await _within(loop.turned(), _ALIVE_SECONDS) and self._asyncs[-1] is loop:
            self._asyncs.append(OwnLoop(loop.name))  # a tool blocks the old one, which is left alone
        return timed_out(self._settings.tool_seconds)

    def _in_process(self, tool: Tool) -> bool:
        return runs_in_process(tool, self._settings.processes)

    def _start_processes(self, tools: Iterable[Tool]) -> None:
        for tool in tools:
            if self._in_process(tool):
                self._processes_of(tool).warm_up()

    def _processes_of(self, tool: Tool) -> ToolProcesses:
        address = address_of(tool)
        return self._processes.setdefault(address, ToolProcesses(address, self._settings.tool_seconds))


def _end_all(own: OwnLoop, asyncs: Sequence[OwnLoop], processes: Mapping[str, ToolProcesses], owner_pid: int) -> None:
    """End all that a ``ToolCalls`` has begun; do nothing in a fork of its process."""
    if os.getpid() != owner_pid:
        return
    for loop in (own, *asyncs):
        loop.end()
    for one in processes.values():
        one.close()


async def _within(future: asyncio.Future[Any], seconds: float) -> bool:
    """Return whether the future is done within ``seconds``."""
    done, _ = await asyncio.wait({future}, timeout=seconds)
    return bool(done)


def _in_thread(work: Callable[[], Any]) -> asyncio.Future[Any]:
    """Do ``work`` in a daemon thread of its own: one that hangs keeps no other, nor the interpreter from ending."""
    return asyncio.wrap_future(_begun(work))


def _begun(work: Callable[[], Any]) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_running_or_notify_cancel()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True, name="turns: tool").start()
    return future


class _DaemonThreads(ThreadPoolExecutor):
    """What ``asyncio.to_thread`` of async tools uses. A pool's own threads are waited for when the interpreter ends."""

    def submit(self, work: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        return _begun(partial(work, *args, **kwargs))


class OwnLoop:
    """An event loop in a daemon thread of its own. It goes on whatever its tasks raise."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._loop = asyncio.new_event_loop()
        self._loop.set_default_executor(_DaemonThreads())
        self._ended = False
        threading.Thread(target=self._run, daemon=True, name=name).start()

    def run(self, work: Coroutine[Any, Any, Any]) -> Future[Any]:
        """Begin ``work`` on the loop, from any thread."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def turned(self) -> asyncio.Future[None]:
        """Return a future that is done once the loop has done what it was asked for before."""
        future: Future[None] = Future()
        self._loop.call_soon_threadsafe(future.set_result, None)
        return asyncio.wrap_future(future)

    def end(self) -> None:
        """Cancel all tasks and stop. The loop stays open: a thread that was given up may still answer to it."""
        self._loop.call_soon_threadsafe(self._cancel_all)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        while not self._ended:
            with contextlib.suppress(BaseException):  # a task's ``SystemExit``
                self._loop.run_forever()

    def _cancel_all(self) -> None:
        self._ended = True
        for task in asyncio.all_tasks(self._loop):
            task.cancel()
        self._loop.call_later(_ALIVE_SECONDS, self._loop.stop)
