"""A real `grpo-lab serve`: no route of it without the token; then killed in the middle of a training, which goes on
with the next.

One server for the file; the last test kills it, and starts the second as a scheduler would.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import socket
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("vllm", reason="vLLM is not installed; `make setup-vllm` installs the CPU build")

from grpo_lab.engines.vllm.access import ROUTES
from grpo_lab.engines.vllm.talk import got
from grpo_lab.engines.vllm.token import default_file, of_trainer, read
from grpo_lab.trainer.generation.server_client import LabVLLMClient
from rollouts.served import Again, Served, children, served_from
from rollouts.server_runs import build, kill_during

pytestmark = [pytest.mark.vllm, pytest.mark.slow]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with served_from(tmp_path_factory.mktemp("served"), cold=True) as running:
        yield running


def routes_of(log: str) -> list[tuple[str, str]]:
    """(path, method) of every route that vLLM says it has."""
    found = re.findall(r"Route: (\S+), Methods: ([A-Z, ]+)", log)
    return [(path, method) for path, methods in found for method in methods.split(", ")]


def filled(path: str) -> str:
    return re.sub(r"\{[^}]*\}", "x", path)


def test_no_route_of_the_running_server_is_open(served: Served) -> None:
    """Every route that it has, without the token, with another, with the token's beginning; and what is not a route."""
    routes = routes_of((served.folder / "log").read_text())
    assert len(routes) > 25, "the log no longer lists the routes"
    assert {path for path, _ in routes} > {
        "/health",
        "/collective_rpc",
        "/update_weights",
        "/v1/completions",
        "/v1/models",
    }
    more = [
        (path, "GET")
        for path in ("/docs", "/openapi.json", "/redoc", "/static/x", "/metrics", "/metrics/", "/never", "/")
    ]
    for path, method in sorted({*routes, *more}):
        for token in (None, "Bearer wrong", f"Bearer {served.token[:-1]}", f"Bearer {served.token}x"):
            answer = served.ask(method, filled(path), {"Authorization": token})
            assert answer.status_code == 401, (method, path, token)
            assert served.model not in answer.text
            assert "access-control-allow-origin" not in answer.headers
    for path, method in sorted({*routes, *more}):  # with the token: what a trainer uses, and nothing else
        if ROUTES.get(path) != method:
            answer = served.ask(method, filled(path), json={} if method != "HEAD" else None)
            assert answer.status_code in (404, 405), (method, path)


def test_it_is_asked_by_its_own_name_and_by_no_web_page(served: Served) -> None:
    for path in ("/health", "/v1/models", "/metrics", "/server_info", "/collective_rpc"):
        for headers in ({"Origin": "https://evil.example"}, {"Host": "evil.example"}, {"Sec-Fetch-Site": "cross-site"}):
            for method in ("GET", "POST", "OPTIONS"):
                answer = served.ask(method, path, headers)
                assert answer.status_code == 403, (method, path, headers)
                assert not any(name.lower().startswith("access-control") for name in answer.headers)
    assert served.ask("GET", "/health", {"Host": f"localhost:{served.port}"}).status_code == 200


def test_a_web_socket_is_not_opened(served: Served) -> None:
    shake = (
        f"GET /v1/realtime HTTP/1.1\r\nHost: 127.0.0.1:{served.port}\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
        "Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nAuthorization: Bearer "
        f"{served.token}\r\n\r\n"
    )
    with socket.create_connection(("127.0.0.1", served.port), timeout=300) as raw:
        raw.sendall(shake.encode())
        assert raw.recv(100).split(b"\r\n")[0] == b"HTTP/1.1 403 Forbidden"


def test_headers_without_end_are_cut_off(served: Served) -> None:
    """Nobody has been asked for a token yet."""
    with socket.create_connection(("127.0.0.1", served.port), timeout=300) as raw:
        raw.sendall(b"GET /health HTTP/1.1\r\nX-Endless: ")
        with contextlib.suppress(ConnectionError):
            for _ in range(16):
                raw.sendall(b"a" * 2**20)
        with contextlib.suppress(ConnectionError):
            assert raw.recv(100)[:10] in (b"HTTP/1.1 4", b"")  # else it waits for more: TimeoutError
    assert served.ask("GET", "/health").status_code == 200


def test_who_connects_and_says_nothing_is_let_go(served: Served) -> None:
    """`access.Reader` reads; how it does is in `test_server_reader.py`."""
    assert served.silent is not None
    assert served.silent.recv(100) == b""


def test_sockets_between_its_processes_are_for_its_owner(served: Served) -> None:
    """Whoever reaches them speaks to the engine past the token; with a umask of 002 a group would."""
    (server,) = children(served.process.pid)[:1]
    listed = [line.split() for line in Path(f"/proc/{server}/net/unix").read_text().splitlines()]
    held = {os.readlink(entry) for entry in Path(f"/proc/{server}/fd").iterdir() if entry.is_symlink()}
    paths = [Path(words[7]) for words in listed if len(words) > 7 and f"socket:[{words[6]}]" in held]
    paths = [path for path in paths if not str(path).startswith("@")]  # a name without a file: nobody listens there
    assert paths
    for path in paths:
        assert path.parent.stat().st_mode & 0o777 == 0o700, path


def test_bodies_and_remote_calls_are_checked(served: Served, tmp_path: Path) -> None:
    call = {"method": "grpo_lab_weights_version", "kwargs": {}}
    assert served.ask("POST", "/collective_rpc", json=call).json()["results"] == [{"version": "", "moved": False}]
    text = json.dumps(call)
    assert served.ask("POST", "/collective_rpc", {"Content-Type": "text/plain"}, data=text).status_code == 415
    assert served.ask("POST", "/collective_rpc", data=text).status_code == 415
    form = {"Content-Type": "application/x-www-form-urlencoded"}
    assert served.ask("POST", "/collective_rpc", form, data=text).status_code == 415
    body = {"model": served.model, "prompt": "x", "max_tokens": 2}
    assert served.ask("POST", "/v1/completions", json=body).status_code == 200
    long = {**body, "prompt": "x" * 2**20}
    assert served.ask("POST", "/v1/completions", json=long).status_code == 413
    parts = (b" " * 2**18 for _ in range(5))  # chunked: no length is said
    assert served.ask("POST", "/v1/completions", {"Content-Type": "application/json"}, data=parts).status_code == 413
    writes = {"method": "save_sharded_state", "kwargs": {"path": str(tmp_path / "theirs")}}
    assert served.ask("POST", "/collective_rpc", json=writes).status_code == 403
    assert list(tmp_path.iterdir()) == []
    assert served.ask("GET", "/health").status_code == 200


def test_the_token_is_for_its_owner_alone_and_in_no_process_list_or_log(served: Served) -> None:
    file = default_file(served.url)
    assert read(file) == served.token
    assert file.stat().st_mode & 0o777 == 0o600
    assert file.parent.stat().st_mode & 0o777 == 0o700
    said = (served.folder / "out").read_text()
    assert f"its token is in {file}" in said
    assert f"--vllm_server_base_url {served.url}" in said
    started = [served.process.pid, *children(served.process.pid)]
    assert len(started) > 1
    for pid in started:
        assert served.token.encode() not in Path(f"/proc/{pid}/cmdline").read_bytes()
    for path in served.folder.rglob("*"):
        assert not path.is_file() or served.token.encode() not in path.read_bytes(), path


def drawn_alike(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Every generation draws with a seed of its prompts, so that no server remembers how many there were before."""
    generate, asked = LabVLLMClient.generate, []

    def with_seed(client: Any, prompts: Any, **arguments: Any) -> Any:
        seed = zlib.crc32(repr(prompts).encode())
        if arguments["n"] > 1:
            asked.append(seed)
        more = {**(arguments.pop("generation_kwargs", None) or {}), "seed": seed}
        return generate(client, prompts, generation_kwargs=more, **arguments)

    monkeypatch.setattr(LabVLLMClient, "generate", with_seed)
    return asked


LONG = {"max_completion_length": 100, "max_steps": 4, "save_strategy": "steps", "save_steps": 4}


@pytest.mark.thorough
def test_the_run_goes_on_with_the_server_that_comes_after_a_killed_one(
    served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, request: Any
) -> None:
    """Last of the file. The third of four generations is killed; weights and rows are those of a run that lost
    nothing."""
    asked = drawn_alike(monkeypatch)
    whole = build(tmp_path / "whole", served.model, served.url, **LONG)
    whole.train()
    talk = {"retries": 1, "backoff": 0.1, "request_timeout": 600, "return_timeout": 600}
    lost = build(tmp_path / "lost", served.model, served.url, rollout={"verify_every": 0, "server": talk}, **LONG)
    second = Again(served, tmp_path)
    request.addfinalizer(second.stop)
    times = kill_during(lost.vllm_generation.vllm_client, 3, second.start)
    with caplog.at_level(logging.INFO, logger="grpo_lab"):
        lost.train()
    assert times["failed"] > times["killed"]
    assert [*asked[:3], *asked[2:4]] == asked[4:]  # the third was asked for again

    rows, others = ([row for row in run.state.log_history if "loss" in row] for run in (lost, whole))
    assert [row["rollout/server_returns"] for row in rows] == [0, 0, 1, 0]
    assert [("rollout/sync_gap" in row) for row in rows] == [
        False,
        False,
        True,
        False,
    ]  # proven, though nothing else is
    assert rows[2]["rollout/sync_gap"] < 1e-4
    for row, other in zip(rows, others, strict=True):
        assert (row["reward"], row["completions/mean_length"]) == (other["reward"], other["completions/mean_length"])
    assert any(row["grad_norm"] > 0 for row in rows)
    ours, theirs = lost.model.state_dict(), whole.model.state_dict()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)

    assert "the vLLM server is lost (" in caplog.text
    assert "the vLLM server is back after" in caplog.text
    token = of_trainer(served.url, None)
    assert token not in (None, served.token)
    assert (tmp_path / "lost" / "out" / "checkpoint-4" / "training_args.bin").is_file()
    for path in tmp_path.rglob("*"):  # neither token is anywhere in a run folder
        content = path.read_bytes() if path.is_file() else b""
        assert not any(str(given).encode() in content for given in (token, served.token)), path
    second.stop()
    assert got(f"{served.url}/health", token)[0] != 200
    assert not default_file(served.url).exists()
