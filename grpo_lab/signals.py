"""Handlers of signals, put in place and put back: the one way of this package outside the sandbox's own processes."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Mapping
from typing import Any

Handlers = dict[int, Any]


def handle(handler: Callable[[int, Any], None], *numbers: int) -> Handlers:
    """``handler`` for ``numbers``; gives those that were there before. Beside the main thread nothing is touched."""
    if threading.current_thread() is not threading.main_thread():
        return {}
    return {number: signal.signal(number, handler) for number in numbers}


def put_back(before: Mapping[int, Any]) -> None:
    """The handlers that ``handle`` gave; None, which was not put there by Python, becomes the system's own."""
    for number, handler in before.items():
        signal.signal(number, signal.SIG_DFL if handler is None else handler)
