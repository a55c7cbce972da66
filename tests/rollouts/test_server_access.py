"""The guard before a server, around a bare ASGI application that answers everything; the token and its file."""

from __future__ import annotations

import asyncio
import hmac
import inspect
import json
import math
import os
import stat
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

pytest.importorskip("uvicorn", reason="uvicorn and starlette come with vLLM, which is not installed")

from grpo_lab.engines.vllm import access as server_access
from grpo_lab.engines.vllm import token as server_token
from grpo_lab.engines.vllm.access import BODIES, METHODS, ROUTES, Guard
from grpo_lab.engines.vllm.token import VARIABLE, default_file, of_server, of_trainer, own_folder, read, write

TOKEN = "t" * 43
GOOD = {"host": "127.0.0.1:8000", "authorization": f"Bearer {TOKEN}"}
JSON = {"content-type": "application/json"}


class Application:
    """Answers everything, invites every origin, and keeps what reached it."""

    def __init__(self) -> None:
        self.bodies: list[bytes] = []
        self.scopes: list[Any] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.scopes.append(scope)
        if scope["type"] != "http":
            return
        self.bodies.append((await receive())["body"])
        headers = [(b"Access-Control-Allow-Origin", b"*"), (b"x-kept", b"1")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": b"secret"})


def asked(
    method: str = "GET",
    path: str = "/health",
    headers: Any = None,
    parts: tuple[bytes, ...] = (b"",),
    kind: str = "http",
    application: Application | None = None,
    limit: int = 1000,
    **more: Any,
) -> tuple[int, str, dict[str, str]]:
    """Status, text and headers of one request. `headers`: over the good ones; None leaves one out; pairs stand as
    given."""
    if not isinstance(headers, list):
        headers = [(key, value) for key, value in {**GOOD, **(headers or {})}.items() if value is not None]
    scope = {"type": kind, "method": method, "path": path, "root_path": "", **more}
    scope["headers"] = [(key.encode(), value.encode("latin-1")) for key, value in headers]
    coming = [{"type": "http.request", "body": p, "more_body": i + 1 < len(parts)} for i, p in enumerate(parts)]
    sent: list[Any] = []

    async def receive() -> Any:
        return coming.pop(0) if coming else {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        sent.append(message)

    guard = Guard(application or Application(), TOKEN, hosts=("10.0.0.3", "node7"), max_bytes=limit)
    asyncio.run(guard(scope, receive, send))
    if kind != "http":
        return 0, json.dumps(sent), {}
    answered = {key.decode().lower(): value.decode() for key, value in sent[0]["headers"]}
    return sent[0]["status"], b"".join(m.get("body", b"") for m in sent[1:]).decode(), answered


@pytest.mark.parametrize(
    "path", [*ROUTES, "/docs", "/openapi.json", "/", "/health/", "//health", "/v1/files", "/metrics/x"]
)
@pytest.mark.parametrize("method", ["GET", "POST", "OPTIONS", "HEAD", "PUT"])
def test_no_route_is_open_without_the_token(path: str, method: str) -> None:
    """And all are refused alike, so that nobody learns which there are."""
    status, said, headers = asked(method, path, {"authorization": None})
    assert (status, headers["www-authenticate"]) == (401, "Bearer")
    assert said == asked("GET", "/never/heard/of", {"authorization": "Bearer x"})[1]
    assert asked(method, path)[0] in ((200, 403) if ROUTES.get(path) == method else (404, 405))


@pytest.mark.parametrize(
    "sent",
    ["", "Bearer", "Bearer ", "Basic " + TOKEN, TOKEN, f"Bearer {TOKEN[:-1]}", f"Bearer {TOKEN}x", f"Bearer  {TOKEN}",
     f"Bearer {TOKEN} {TOKEN}", f"Bearer {TOKEN.upper()}", f"Bearer {TOKEN[:-1]}\xff", f"Bearer {TOKEN},"],
)  # fmt: skip
def test_another_token_is_none(sent: str) -> None:
    assert asked(headers={"authorization": sent})[0] == 401


def test_the_token_is_compared_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole and as bytes, by the function that is made for it."""
    compared: list[Any] = []

    class Watched:
        @staticmethod
        def compare_digest(one: Any, other: Any) -> bool:
            compared.append((one, other))
            return hmac.compare_digest(one, other)

    monkeypatch.setattr(server_access, "hmac", Watched)
    assert asked()[0] == 200
    assert asked(headers={"authorization": "Bearer tt"})[0] == 401
    assert compared == [(TOKEN.encode(), TOKEN.encode()), (b"tt", TOKEN.encode())]


@pytest.mark.parametrize("scheme", ["Bearer", "bearer", "BEARER"])
@pytest.mark.parametrize(
    "host",
    ["127.0.0.1:8000", "127.0.0.1", "localhost:9", "LOCALHOST", "[::1]:8000", "[::1]", "10.0.0.3:8000", "Node7:1",
     "0.0.0.0:8000"],
)  # fmt: skip
def test_its_own_names_pass(host: str, scheme: str) -> None:
    status, said, headers = asked(headers={"host": host, "authorization": f"{scheme} {TOKEN}"})
    assert (status, said) == (200, "secret")
    assert "x-kept" in headers
    assert not any(name.startswith("access-control") for name in headers)


@pytest.mark.parametrize(
    "host",
    [None, "", "evil.example", "evil.example:8000", "127.0.0.1.evil.example", "localhost.", "127.0.0.1:8000x",
     "127.0.0.1:80:80", "[::1", "[::2]:8000", "user@127.0.0.1", "2130706433", ":8000", "10.0.0.4"],
)  # fmt: skip
def test_another_name_is_refused_before_the_token_is_looked_at(host: str | None) -> None:
    """A page of evil.example, whose name points here for the moment, would be of one origin with the server."""
    for token in (GOOD["authorization"], None):
        assert asked(headers={"host": host, "authorization": token})[0] == 403


@pytest.mark.parametrize(
    ("header", "value"),
    [("origin", "https://evil.example"), ("origin", "null"), ("origin", "http://127.0.0.1:8000"), ("origin", ""),
     ("sec-fetch-site", "cross-site"), ("sec-fetch-site", "same-origin")],
)  # fmt: skip
def test_a_web_page_is_refused_with_the_token_too(header: str, value: str) -> None:
    for method, path in (("GET", "/health"), ("OPTIONS", "/collective_rpc"), ("POST", "/v1/completions")):
        status, _, headers = asked(method, path, {header: value})
        assert status == 403
        assert not any(name.startswith("access-control") for name in headers)


@pytest.mark.parametrize(
    "again", [("host", "localhost"), ("Authorization", "Bearer x"), ("Content-Type", "text/plain")]
)
def test_a_header_that_stands_there_twice_is_refused(again: tuple[str, str]) -> None:
    headers = [*GOOD.items(), *JSON.items()]
    assert asked("POST", "/v1/completions", headers, (b"{}",))[0] == 200
    for both in ([*headers, again], [again, *headers]):
        assert asked("POST", "/v1/completions", both, (b"{}",))[0] == 400


def test_a_body_is_json_or_not_there() -> None:
    for kind in (
        {},
        {"content-type": "text/plain"},
        {"content-type": "application/x-www-form-urlencoded"},
        {"content-type": "text/json"},
    ):
        for length in ({}, {"content-length": "2"}, {"transfer-encoding": "chunked"}):
            assert asked("POST", "/v1/completions", {**kind, **length}, (b"{}",))[0] == 415
    for kind in ("application/json", "Application/JSON; charset=utf-8"):
        assert asked("POST", "/v1/completions", {"content-type": kind, "content-length": "2"}, (b"{}",))[0] == 200
    assert asked("POST", "/reset_prefix_cache", {"content-length": "0"})[0] == 200


def test_a_body_is_not_longer_than_the_limit() -> None:
    application = Application()
    whole = (b"x" * 400, b"y" * 600)
    assert asked("POST", "/v1/completions", JSON, whole, application=application)[0] == 200
    assert application.bodies == [b"x" * 400 + b"y" * 600]
    assert asked("POST", "/v1/completions", {**JSON, "content-length": "1001"}, application=application)[0] == 413
    assert asked("POST", "/v1/completions", {**JSON, "content-length": "-1"}, application=application)[0] == 413
    lied = {**JSON, "content-length": "10"}
    assert asked("POST", "/v1/completions", lied, (*whole, b"z"), application=application)[0] == 413
    both = {**JSON, "content-length": "10", "transfer-encoding": "chunked"}
    assert asked("POST", "/v1/completions", both, (b"{}",), application=application)[0] == 400
    assert len(application.bodies) == 1  # the others did not reach it


def test_web_sockets_are_closed_and_the_start_passes() -> None:
    application = Application()
    assert "websocket.close" in asked(kind="websocket", path="/v1/realtime", application=application)[1]
    assert application.scopes == []
    asked(kind="lifespan", application=application)
    assert [scope["type"] for scope in application.scopes] == ["lifespan"]


SHARDS = "/dev/shm/grpo-lab-weights-ab_12"
INIT = {"master_address": "10.0.0.1", "master_port": 51216, "rank_offset": 1, "world_size": 2, "packed": True}
ANNOUNCED = {"names": ["a"], "dtype_names": ["float32"], "shapes": [[2, 3]]}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/collective_rpc", {"method": "grpo_lab_describe", "kwargs": {}}),
        ("/collective_rpc", {"method": "grpo_lab_weights_version"}),
        ("/collective_rpc", {"method": "grpo_lab_load_weights", "kwargs": {"folder": SHARDS, "version": "v"}}),
        ("/init_weight_transfer_engine", {"init_info": INIT}),
        ("/update_weights", {"update_info": ANNOUNCED}),
        ("/start_weight_update", {}),
    ],
)
def test_what_a_trainer_calls_passes(path: str, body: Any) -> None:
    application = Application()
    assert asked("POST", path, JSON, (json.dumps(body, indent=3).encode(),), application=application)[0] == 200
    assert json.loads(application.bodies[0]) == ({"kwargs": {}, **body} if "method" in body else body)
    (length,) = (value for name, value in application.scopes[0]["headers"] if name == b"content-length")
    assert int(length) == len(application.bodies[0])


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/collective_rpc", {"method": "save_sharded_state", "kwargs": {"path": "/home/x"}}),
        ("/collective_rpc", {"method": "grpo_lab_describe.__class__"}),
        ("/collective_rpc", {"method": ["grpo_lab_describe"]}),
        ("/collective_rpc", {"method": "grpo_lab_describe", "args": ["x"]}),
        ("/collective_rpc", {"method": "grpo_lab_describe", "kwargs": {"folder": SHARDS}}),
        ("/collective_rpc", {"method": "grpo_lab_describe", "timeout": 1e9}),
        ("/collective_rpc", {"method": "grpo_lab_note_version", "kwargs": {"version": "v" * 5000}}),
        ("/collective_rpc", {"method": "grpo_lab_sees", "kwargs": {"folder": "/etc"}}),
        ("/collective_rpc", {"method": "grpo_lab_sees", "kwargs": {"folder": f"{SHARDS}/../x"}}),
        ("/collective_rpc", {"method": "grpo_lab_sees", "kwargs": {"folder": f"{SHARDS}\n"}}),
        ("/collective_rpc", {"method": "grpo_lab_load_weights", "kwargs": {"folder": SHARDS, "version": 3}}),
        ("/collective_rpc", {"method": "grpo_lab_load_weights", "kwargs": {"folder": SHARDS}}),
        ("/collective_rpc", [1]),
        ("/collective_rpc", "grpo_lab_describe"),
        ("/init_weight_transfer_engine", {"init_info": {**INIT, "nccl_unique_id_b64": "x"}}),
        ("/init_weight_transfer_engine", {"init_info": {**INIT, "master_port": "51216"}}),
        ("/init_weight_transfer_engine", {"init_info": {**INIT, "world_size": True}}),
        ("/init_weight_transfer_engine", {}),
        ("/update_weights", {"update_info": {"ipc_handles_pickled": "gASV"}}),
        ("/update_weights", {"update_info": {**ANNOUNCED, "shapes": [["2"]]}}),
        ("/update_weights", {"update_info": {**ANNOUNCED, "dtype_names": ["int64"]}}),
        ("/update_weights", {"update_info": {**ANNOUNCED, "dtype_names": ["complex64"]}}),
        ("/collective_rpc", {"method": "grpo_lab_note_version", "kwargs": {"version": "v", "moved": "no"}}),
        ("/finish_weight_update", {"weight_version": "x"}),
    ],
)
def test_any_other_call_is_refused(path: str, body: Any) -> None:
    application = Application()
    assert asked("POST", path, JSON, (json.dumps(body).encode(),), application=application, limit=10_000)[0] == 403
    assert application.bodies == []


@pytest.mark.parametrize(("value", "status"), [(1.0, 200), (math.nan, 403), (math.inf, 403), (1, 403)])
def test_an_adapter_that_no_engine_should_hold_is_refused(value: float, status: int) -> None:
    """vLLM loads it as it is."""
    with own_folder("grpo-lab-weights-", "/dev/shm") as folder:
        version = folder / "v1"
        version.mkdir()
        save_file({"base.lora_A.weight": torch.full((2, 2), value)}, version / "adapter_model.safetensors")
        body = {"lora_name": f"grpo-lab-{'0' * 32}-v1", "lora_path": str(version)}
        answered, said, _ = asked("POST", "/v1/load_lora_adapter", JSON, (json.dumps(body).encode(),))
    assert answered == status
    assert ("base.lora_A.weight" in said) == (status == 403)


def test_what_is_checked_is_what_is_called() -> None:
    """Two readers may take another one of two equal keys: the body goes on as it was read here."""
    application = Application()
    twice = b'{"method":"save_sharded_state","kwargs":{},"method":"grpo_lab_describe"}'
    assert asked("POST", "/collective_rpc", JSON, (twice,), application=application)[0] == 200
    assert json.loads(application.bodies[0]) == {"method": "grpo_lab_describe", "kwargs": {}}
    assert b"save" not in application.bodies[0]
    for broken in (b"", b"{", b"\xff", b"[" * 900, b"1" * 999):
        assert asked("POST", "/collective_rpc", JSON, (broken,))[0] == 403


def test_every_method_of_the_worker_is_in_the_list_and_no_other() -> None:
    from grpo_lab.engines.vllm.worker import WeightLoading

    ours = {name: method for name, method in vars(WeightLoading).items() if callable(method)}
    assert ours.keys() == METHODS.keys()
    for name, method in ours.items():
        assert set(inspect.signature(method).parameters) - {"self"} == METHODS[name].model_fields.keys(), name
    assert BODIES.keys() <= ROUTES.keys()


def test_without_a_token_nothing_is_served(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    for given in (None, "", "two words", "schlüssel"):
        with pytest.raises(ValueError, match=VARIABLE):
            Guard(Application(), given)
    monkeypatch.setenv(VARIABLE, TOKEN)
    monkeypatch.setenv(server_token.HOSTS_VARIABLE, "10.0.0.9,node8")
    monkeypatch.setenv(server_token.LIMIT_VARIABLE, "7")
    guard = Guard(Application())
    assert {"10.0.0.9", "node8", "localhost"} <= guard.hosts
    assert guard.max_bytes == 7


# -- the token ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.delenv(VARIABLE, raising=False)
    return tmp_path / "state"


URL = "http://127.0.0.1:8123"


def test_a_token_is_made_for_its_owner_alone_and_found_again(state: Path) -> None:
    old = os.umask(0)  # whatever the user's says
    try:
        one = of_server(URL, None)
    finally:
        os.umask(old)
    assert one.file is not None
    assert one.file.parent == state / "grpo_lab" / "tokens"
    assert stat.S_IMODE(one.file.stat().st_mode) == 0o600
    assert stat.S_IMODE(one.file.parent.stat().st_mode) == 0o700
    assert len(one.value) >= 43
    assert one.value not in repr(one)
    for same in (URL, "http://localhost:8123", "http://0.0.0.0:8123", "http://[::1]:8123"):
        assert of_trainer(same, None) == one.value
    assert of_trainer("http://127.0.0.1:8124", None) is None
    assert of_trainer("http://10.0.0.3:8123", None) is None
    two = of_server(URL, None)  # a server started after it at the same address
    assert two.value != one.value
    one.forget()
    assert of_trainer(URL, None) == two.value
    two.forget()
    assert of_trainer(URL, None) is None
    assert list(one.file.parent.iterdir()) == []


def test_the_environment_comes_before_the_made_one_and_a_named_file_before_both(
    state: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, TOKEN)
    assert of_server(URL, None).file is None
    assert of_trainer(URL, None) == TOKEN
    assert not state.exists()
    named = tmp_path / "mine" / "token"
    made = of_server(URL, named)
    assert made.value != TOKEN
    assert of_trainer(URL, str(named)) == made.value
    again = of_server(URL, named)  # it is there: it is taken, and kept at the end
    assert again.value == made.value
    again.forget()
    assert named.is_file()
    assert of_trainer(URL, str(tmp_path / "none")) is None


def test_a_token_that_others_see_is_refused(state: Path, tmp_path: Path) -> None:
    file = tmp_path / "token"
    write(file, TOKEN)
    for mode in (0o644, 0o640, 0o604, 0o660):
        file.chmod(mode)
        with pytest.raises(ValueError, match="chmod 600") as caught:
            read(file)
        assert TOKEN not in str(caught.value)
    os.mkfifo(tmp_path / "pipe", 0o600)
    with pytest.raises(ValueError, match="is no file"):  # and it is not waited for
        of_server(URL, tmp_path / "pipe")
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    with pytest.raises(ValueError, match="written by others"):
        write(shared / "token", TOKEN)
    assert list(shared.iterdir()) == []


def test_a_short_or_broken_token_is_refused_without_being_said(state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for wrong, told in (
        ("hunter2", "20 or more"),
        ("x" * 30 + "\n" + "y", "printable"),
        ("x" * 30 + " y", "printable"),
    ):
        monkeypatch.setenv(VARIABLE, wrong)
        with pytest.raises(ValueError, match=told) as caught:
            of_server(URL, None)
        assert wrong not in str(caught.value)


def test_addresses_have_files_of_their_own(state: Path) -> None:
    urls = (
        "http://10.0.0.3:8000",
        "http://10.0.0.3:8001",
        "http://[fd00::7]:8000",
        "http://node7:8000",
        "http://127.0.0.1:8000",
    )
    assert len({default_file(url) for url in urls}) == 5
    assert all(default_file(url).parent == server_token.tokens_folder() for url in urls)
