"""Calls of tools with limits: trajectories side by side, the calls of one turn in TRL's order.

    sync tools      one after the other, in the order written; each in a thread of its own, or in a process
    async tools     then side by side, on one event loop; their answers stand behind those of the sync ones

The content of an answer is TRL's: ``str(answer)``, a list as it is, ``{"error": …}`` for an error. Unlike in TRL, a
tool may raise anything, ``SystemExit`` too, or hang: a call that takes longer than ``tool_seconds`` is given up. A
process is killed then, an async tool cancelled, a thread left alone. No thread of tools keeps the interpreter from
ending. But a thread that calls ``os._exit``, or crashes in C, ends the run: tools that may do so belong into processes.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import wait
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any

from grpo_lab.threads import OwnLoop, in_thread
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

#: Name of the threads in which calls run.
THREAD = "turns: tool"


@dataclass(frozen=True)
class Wanted:
    """A call as the policy wrote it.

    Args:
        name: name of the tool.
        arguments: its arguments, parsed.
        tool: the function to call; ``None`` if the call cannot be made.
        outcome: what the policy is told if the call cannot be made.
    """

    name: str
    arguments: Any = None
    tool: Tool | None = None
    outcome: ToolOutcome | None = None

    @classmethod
    def read(cls, call: Any, tools: Named) -> Wanted:
        """Read an entry of ``tool_calls``, in TRL's form ``{"type": "function", "function": {"name", "arguments"}}`` or
        as the inner mapping alone."""
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
        """Return whether the call comes after those of the sync tools: its tool is async, and its arguments fit."""
        if not inspect.iscoroutinefunction(self.tool):
            return False
        try:
            inspect.signature(self.tool).bind(**self.arguments)
        except TypeError:
            return False
        return True


class ToolCalls:
    """Calls of tools, each with its limits.

    Args:
        settings: the limits.
        cut: ``ChatDialogue.cut``, which shortens a text to a number of tokens. Only one thread at a time calls it.
    """

    def __init__(self, settings: TurnSettings, cut: Callable[[str, int], tuple[str, bool]]) -> None:
        self._settings = settings
        self._cut = cut
        self._cutting = threading.Lock()
        self._slots = threading.Semaphore(settings.threads)
        self._processes: dict[str, ToolProcesses] = {}
        self._asyncs = [OwnLoop("turns: async tools")]  # the last one is in use; a tool has blocked each before it
        self._end = weakref.finalize(self, _end_all, self._asyncs, self._processes, os.getpid())

    def check(self, tools: Iterable[Tool]) -> None:
        """Begin to start the processes of tools, before the first step. ``tools`` are all tools of the run, with the
        methods of environments. Raises ``ValueError`` if a tool is marked for a process and cannot run in one."""
        for tool in tools:
            if runs_in_process(tool):
                self._processes_of(tool).warm_up()

    def make(self, calls: Sequence[Mapping[str, Any]], tools: Named) -> list[Call]:
        """Make the calls of one turn, and wait for them. Any thread may call this. A fault of a tool or of the policy
        becomes an answer.

        Args:
            calls: ``tool_calls`` of the policy's message.
            tools: name → function; methods of the trajectory's environment are among them.

        Returns:
            A ``Call`` for each, in the order of their answers: those of sync tools first.

        Raises:
            ValueError: a tool that is marked for a process cannot run in one.
            VerifierError: no process of a tool can be started.
        """
        wanted = [Wanted.read(call, tools) for call in calls]
        made = [self._made(one) for one in wanted if not one.waits]
        later = [in_thread(partial(self._made, one), THREAD) for one in wanted if one.waits]
        return made + [call.result() for call in later]

    def close(self) -> None:
        """End processes and event loops, and with them the calls that are on their way. Garbage collection and the end
        of the interpreter do the same."""
        self._end()

    def _made(self, wanted: Wanted) -> Call:
        """Make one call, after a failure again as often as settings and tool allow. Return it with its answer."""
        if not self._end.alive:
            raise RuntimeError("the tools are closed; a call came after `close()`")
        if wanted.tool is None:
            assert wanted.outcome is not None
            return self._told(wanted, wanted.outcome, seconds=0.0, tries=0)
        most = 1
        if may_repeat(wanted.tool):
            most += self._settings.retries
        with self._slot(wanted.tool):
            began = time.monotonic()
            tries = 1
            outcome = self._tried(wanted.tool, wanted.arguments)
            while outcome.failure is not None and tries < most:
                tries += 1
                outcome = self._tried(wanted.tool, wanted.arguments)
            seconds = time.monotonic() - began
        return self._told(wanted, outcome, seconds, tries)

    def _told(self, wanted: Wanted, outcome: ToolOutcome, seconds: float, tries: int) -> Call:
        """Return the finished call, with the texts of its answer cut to ``tool_tokens``."""
        content = outcome.content
        cut = False
        if self._settings.tool_tokens is not None:
            with self._cutting:
                content, cut = self._shortened(content, self._settings.tool_tokens)
        return Call(wanted.name, wanted.arguments, content, outcome.failure, seconds, tries, cut)

    def _shortened(self, content: Any, tokens: int) -> tuple[Any, bool]:
        """Cut a text, or each text in a list of content blocks; return the content and whether anything was cut."""
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

    def _slot(self, tool: Tool) -> AbstractContextManager[Any]:
        """Return what a call must hold while it runs: one of ``threads`` places for a thread or a process, nothing for
        an async tool. A call that is given up frees its place."""
        if inspect.iscoroutinefunction(tool) and not runs_in_process(tool):
            return contextlib.nullcontext()
        return self._slots

    def _tried(self, tool: Tool, arguments: Any) -> ToolOutcome:
        """Call a tool once, with a copy of the arguments, so that those in the transcript stay as they were written."""
        try:
            arguments = copy.deepcopy(arguments)
        except RecursionError as error:
            return raised(error)
        if runs_in_process(tool):
            return self._processes_of(tool).call(arguments)
        if inspect.iscoroutinefunction(tool):
            return self._awaited(tool, arguments)
        outcome = in_thread(partial(called, tool, arguments), THREAD)
        if wait([outcome], self._settings.tool_seconds).done:
            return outcome.result()  # type: ignore[no-any-return]
        return timed_out(self._settings.tool_seconds)

    def _awaited(self, tool: Tool, arguments: Any) -> ToolOutcome:
        """Call an async tool once, on the event loop. A loop that a tool has blocked is replaced by a new one."""
        loop = self._asyncs[-1]
        outcome = loop.run(awaited(tool, arguments))
        if wait([outcome], self._settings.tool_seconds).done:
            return outcome.result()  # type: ignore[no-any-return]
        outcome.cancel()
        if loop.is_blocked() and self._asyncs[-1] is loop:
            self._asyncs.append(OwnLoop(loop.name))  # the old one is left alone
        return timed_out(self._settings.tool_seconds)

    def _processes_of(self, tool: Tool) -> ToolProcesses:
        """Return the processes of a tool that is marked for one. Raises ``ValueError`` if it cannot run there."""
        address = address_of(tool)
        return self._processes.setdefault(address, ToolProcesses(address, self._settings.tool_seconds))


def _end_all(asyncs: Sequence[OwnLoop], processes: Mapping[str, ToolProcesses], owner_pid: int) -> None:
    """End all that a ``ToolCalls`` has begun; do nothing in a fork of its process."""
    if os.getpid() != owner_pid:
        return
    for loop in asyncs:
        loop.end()
    for one in processes.values():
        one.close()
