"""The server's reader around a bare application: who connects and sends no request is let go, and shuts nobody out."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("uvicorn", reason="uvicorn comes with vLLM, which is not installed")

import uvicorn

from grpo_lab.engines.vllm import access as server_access
from grpo_lab.engines.vllm.access import Guard
from ports import free_port
from rollouts.test_server_access import TOKEN, Application

HEAD = b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n"
ASKED = HEAD + f"Authorization: Bearer {TOKEN}\r\n\r\n".encode()


class Running:
    def __init__(self, port: int) -> None:
        self.port = port

    def connection(self, sent: bytes = b"") -> socket.socket:
        made = socket.create_connection(("127.0.0.1", self.port), timeout=300)
        made.sendall(sent)
        return made

    def answers(self) -> bool:
        with self.connection(ASKED) as one:
            return one.recv(100).startswith(b"HTTP/1.1 200")


@pytest.fixture
def running(monkeypatch: pytest.MonkeyPatch) -> Iterator[Running]:
    monkeypatch.setattr(server_access, "HEAD_WITHIN", 0.5)
    monkeypatch.setattr(server_access, "BODY_PAUSE", 0.5)
    port = free_port()
    app = Guard(Application(), TOKEN)
    options: Any = {"http": server_access.Reader, "log_level": "critical", "lifespan": "off", "timeout_keep_alive": 60}
    server = uvicorn.Server(uvicorn.Config(app, port=port, **options))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    yield Running(port)
    server.should_exit = server.force_exit = True
    thread.join(10)


def is_closed(one: socket.socket) -> bool:
    """Within its own five minutes."""
    with contextlib.suppress(ConnectionError):
        return one.recv(100) == b""
    return True


@pytest.mark.not_fast
def test_a_head_that_does_not_come_is_not_waited_for(running: Running) -> None:
    begin = time.monotonic()
    held = [running.connection(sent) for sent in (b"", b"G", HEAD)]
    later = running.connection(ASKED)
    assert later.recv(1000).startswith(b"HTTP/1.1 200")
    later.sendall(HEAD)  # of a second request on the same connection
    assert all(is_closed(one) for one in (*held, later))
    assert 0.4 < time.monotonic() - begin < 300
    assert not server_access.Reader.waiting
    quiet = running.connection(ASKED)
    assert quiet.recv(1000).startswith(b"HTTP/1.1 200")
    time.sleep(1)
    quiet.sendall(ASKED)  # between two requests a connection waits as long as uvicorn lets it
    assert quiet.recv(1000).startswith(b"HTTP/1.1 200")


def test_many_that_send_nothing_shut_nobody_out(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_access, "HEAD_WITHIN", 60.0)
    monkeypatch.setattr(server_access, "MOST_WAITING", 5)
    held = []
    for _ in range(8):
        held.append(running.connection(b"G"))
        assert running.answers()
    assert all(is_closed(one) for one in held[:3])  # the oldest
    assert len(server_access.Reader.waiting) <= 5


@pytest.mark.not_fast
def test_a_body_that_stops_coming_is_not_waited_for(running: Running) -> None:
    head = ASKED.replace(b"GET /health", b"POST /tokenize").removesuffix(b"\r\n")
    with running.connection(head + b"Content-Type: application/json\r\nContent-Length: 100\r\n\r\n{") as one:
        assert one.recv(1000).startswith(b"HTTP/1.1 408")
