"""What a server's `--middleware` names: `Guard`, behind a reader of HTTP that has limits. Imported in the server's process alone.

uvicorn reads with httptools where that is installed, which takes a header of any length, from whoever connects and before any
token is asked for: one without end fills the memory, and nobody else is answered meanwhile (150 MiB: a minute). vLLM's limit
(4 MiB) is in force with h11 only, so that is what reads here; uvicorn chooses its reader after vLLM has imported this module.

And uvicorn waits for ever for the head of a request; enough such connections take every descriptor. Here a head has `HEAD_WITHIN`
seconds, and when more than `most_waiting()` are waited for, the oldest goes.
"""

from __future__ import annotations

import resource
from asyncio import TimerHandle, Transport
from typing import ClassVar

import h11
from uvicorn.protocols.http import auto
from uvicorn.protocols.http.h11_impl import H11Protocol

from grpo_lab.engines.vllm.access import Guard as Guard

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


auto.AutoHTTPProtocol = Reader  # type: ignore[misc]
