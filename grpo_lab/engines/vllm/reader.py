"""uvicorn's reader of HTTP with an end to its patience. Imported in the server's process alone.

uvicorn waits for ever for the head of a request, from whoever connects and before any token is asked for; enough such connections
take every descriptor, and nobody else is answered. Here a head has `HEAD_WITHIN` seconds, and when more than `most_waiting()` are
waited for, the oldest goes.
"""

from __future__ import annotations

import resource
from asyncio import TimerHandle, Transport
from typing import ClassVar

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

HEAD_WITHIN = 10.0
#: more than connect in one turn of the event loop (uvicorn's backlog), so that a burst drops none of its own
MOST_WAITING = 4096


def most_waiting() -> int:
    """Half of the descriptors that this process may have, `MOST_WAITING` at most."""
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return MOST_WAITING if soft == resource.RLIM_INFINITY else min(MOST_WAITING, max(1, soft // 2))


class Reader(H11Protocol):
    """A connection; closed where the head of its request does not come."""

    #: connections whose head is not here yet, oldest first -> when they are closed
    waiting: ClassVar[dict[Reader, TimerHandle]] = {}

    def connection_made(self, transport: Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._wait_for_head()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.conn.their_state is h11.IDLE:  # the head of a first or a later request has begun
            self._wait_for_head()
        else:
            self._no_longer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._no_longer()
        super().connection_lost(exc)

    def _wait_for_head(self) -> None:
        if self in self.waiting or self.transport.is_closing():
            return
        if len(self.waiting) >= most_waiting():
            next(iter(self.waiting))._give_up()
        self.waiting[self] = self.loop.call_later(HEAD_WITHIN, self._give_up)

    def _give_up(self) -> None:
        self._no_longer()
        self.transport.close()

    def _no_longer(self) -> None:
        timer = self.waiting.pop(self, None)
        if timer is not None:
            timer.cancel()
