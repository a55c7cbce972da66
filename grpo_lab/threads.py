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
    """Run ``work`` in a daemon thread of its own, and return a future of its result or exception. A thread that hangs
    delays neither another ``work`` nor the end of the interpreter."""
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
    """An executor that gives each call a daemon thread (``in_thread``); ``asyncio.to_thread`` uses it on an
    ``OwnLoop``. The interpreter would wait, at its end, for the threads of a ``ThreadPoolExecutor``."""

    def submit(self, work: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        return in_thread(partial(work, *args, **kwargs), "asyncio.to_thread")


class OwnLoop:
    """An asyncio event loop that runs in a daemon thread of its own until ``end``, whatever its tasks raise."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._loop = asyncio.new_event_loop()
        self._loop.set_default_executor(DaemonThreads())
        self._ended = False
        threading.Thread(target=self._run, daemon=True, name=name).start()

    def run(self, work: Coroutine[Any, Any, Any]) -> Future[Any]:
        """Start the coroutine ``work`` on the loop and return a future of its result. Any thread may call this."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def is_blocked(self) -> bool:
        """Return whether one of its tasks keeps the loop from other work for ``ALIVE_SECONDS``."""
        turned: Future[None] = Future()
        self._loop.call_soon_threadsafe(turned.set_result, None)
        return not wait([turned], ALIVE_SECONDS).done

    def end(self) -> None:
        """Cancel all tasks and, ``ALIVE_SECONDS`` later, stop the loop. It is not closed, since a thread that hangs may
        still hand in its result."""
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
