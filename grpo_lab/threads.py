"""Work in threads that do not keep the process alive, and event loops in such threads."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from typing import Any

#: Seconds that an event loop may be busy with one task before it counts as blocked.
ALIVE_SECONDS = 1.0


def in_thread(work: Callable[[], Any], name: str) -> Future[Any]:
    """Do ``work`` in a daemon thread of its own; return the future of its result or exception. A thread that hangs
    keeps no other, nor the interpreter from ending."""
    future: Future[Any] = Future()
    future.set_running_or_notify_cancel()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as failure:
            future.set_exception(failure)

    threading.Thread(target=run, name=name, daemon=True).start()
    return future


class DaemonThreads(ThreadPoolExecutor):
    """What ``asyncio.to_thread`` uses on an ``OwnLoop``. A pool's own threads are waited for when the interpreter
    ends."""

    def submit(self, work: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        return in_thread(partial(work, *args, **kwargs), "asyncio.to_thread")


class OwnLoop:
    """An event loop in a daemon thread of its own. It goes on whatever its tasks raise."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._loop = asyncio.new_event_loop()
        self._loop.set_default_executor(DaemonThreads())
        self._ended = False
        threading.Thread(target=self._run, daemon=True, name=name).start()

    def run(self, work: Coroutine[Any, Any, Any]) -> Future[Any]:
        """Begin ``work`` on the loop, from any thread."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def is_blocked(self) -> bool:
        """Return whether a task keeps the loop from other work. It gets ``ALIVE_SECONDS`` to return."""
        turned: Future[None] = Future()
        self._loop.call_soon_threadsafe(turned.set_result, None)
        return not wait([turned], ALIVE_SECONDS).done

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
        self._loop.call_later(ALIVE_SECONDS, self._loop.stop)
