"""Installing signal handlers and restoring earlier ones, for all of this package but the sandbox's own processes."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Mapping
from typing import Any

Handlers = dict[int, Any]
"""Number of a signal → its earlier handler, as ``signal.signal`` returns it."""


def handle(handler: Callable[[int, Any], None], *numbers: int) -> Handlers:
    """Install ``handler`` for the signals ``numbers``, and return the earlier handlers. Outside the main thread, where
    Python allows no handlers, do nothing and return an empty dict."""
    if threading.current_thread() is not threading.main_thread():
        return {}
    return {number: signal.signal(number, handler) for number in numbers}


def put_back(before: Mapping[int, Any]) -> None:
    """Restore the handlers that ``handle`` returned. In place of None (a handler that was not installed from Python)
    the system's default is installed."""
    for number, handler in before.items():
        signal.signal(number, signal.SIG_DFL if handler is None else handler)
