"""A request that takes long is waited for while the server works, and ended where nothing moves: small local
servers."""

from __future__ import annotations

import contextlib
import http.server
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from grpo_lab.engines.vllm.talk import ServerGone, look, watched


class Counting(http.server.BaseHTTPRequestHandler):
    """`/metrics` counts a token at every look while `works`; `/is_sleeping` says `asleep`."""

    works, asleep, tokens = True, False, 0

    def do_GET(self) -> None:
        kind = type(self)
        kind.tokens += kind.works
        pages = {
            "/metrics": f'# HELP x\nvllm:generation_tokens_total{{engine="0"}} {kind.tokens}.0\nvllm:other 3.0\n',
            "/is_sleeping": f'{{"is_sleeping":{str(kind.asleep).lower()}}}',
        }
        page = pages.get(self.path, "").encode()
        self.send_response(200 if page else 404)
        self.send_header("Content-Length", str(len(page)))
        self.end_headers()
        self.wfile.write(page)

    def log_message(self, *args: Any) -> None:
        pass


@pytest.fixture
def counting() -> Iterator[tuple[type[Counting], str]]:
    handler = type("Handler", (Counting,), {"works": True, "asleep": False, "tokens": 0})
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield handler, f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def slow(seconds: float) -> str:
    time.sleep(seconds)
    return "answer"


@pytest.mark.not_fast
def test_a_server_that_counts_tokens_is_waited_for(counting: tuple[type[Counting], str]) -> None:
    assert watched(lambda: slow(1.5), counting[1], silence=0.5, what="x") == "answer"


@pytest.mark.not_fast
def test_a_failure_comes_through(counting: tuple[type[Counting], str]) -> None:
    with pytest.raises(ZeroDivisionError):
        watched(lambda: 1 // 0, counting[1], silence=5, what="x")


@pytest.mark.not_fast
@pytest.mark.parametrize(
    ("works", "asleep", "told"),
    [
        (False, False, "it answers, and counts no token"),
        (True, True, r"it was put to sleep \(/sleep\); wake it with POST /wake_up"),
    ],
)
def test_a_server_that_stands_still_ends_the_wait(
    counting: tuple[type[Counting], str], works: bool, asleep: bool, told: str
) -> None:
    handler, url = counting
    handler.works, handler.asleep = works, asleep
    begin = time.monotonic()
    with pytest.raises(
        ServerGone, match=rf"no sign of work for 0 s; waited \d+ s for 8 completions: {told}(.|\n)*silence_timeout"
    ):
        watched(lambda: slow(3600), url, silence=0.4, what="8 completions")
    assert time.monotonic() - begin < 300


def test_a_server_that_does_not_even_answer_ends_the_wait() -> None:
    with pytest.raises(ServerGone, match="does not answer /metrics either"):
        watched(lambda: slow(3600), "http://127.0.0.1:9", silence=0.4, what="x")
    assert look("http://127.0.0.1:9")[0] is None


@pytest.mark.not_fast
def test_a_page_that_comes_byte_by_byte_is_no_answer(
    counting: tuple[type[Counting], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`/metrics` at a byte a second: before, the look at it held up the answer that had come meanwhile, for hours."""
    handler, url = counting

    def dribbles(self: Any) -> None:
        self.send_response(200)
        self.send_header("Content-Length", "200")
        self.end_headers()
        with contextlib.suppress(OSError):
            for _ in range(200):
                self.wfile.write(b"x")
                time.sleep(0.05)

    monkeypatch.setattr(handler, "do_GET", dribbles)
    monkeypatch.setattr("grpo_lab.engines.vllm.talk.LOOK_TIMEOUT", 0.3)
    begin = time.monotonic()
    assert watched(lambda: slow(0.5), url, silence=1, what="x") == "answer"
    assert time.monotonic() - begin < 5
