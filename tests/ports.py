"""Ports for the servers that tests start."""

from __future__ import annotations

import contextlib
import random
import socket


def free_port() -> int:
    """Nobody listens at it, and it is below those that the kernel gives to whoever asks for any: nobody gets it by
    chance before it is used."""
    while True:
        port = random.SystemRandom().randrange(10_000, 32_000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
