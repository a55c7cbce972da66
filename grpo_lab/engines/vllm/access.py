"""Who may ask a server what: one ASGI middleware before everything that vLLM serves, also what a later release adds.

Named on the server's command line as `--middleware grpo_lab.engines.vllm.entry.Guard`, so vLLM puts it around all its
own. A request passes that

    names this server (`Host`: no other name may be made to point here, "DNS rebinding") and comes from no web page
    carries the token (compared in constant time; no route is open without it, and all are refused alike)
    asks for a route in `ROUTES`, by its method; all others are closed
    has a body of JSON, of at most `max_bytes`; remote calls are further checked (`server_calls`)

vLLM's own `--api-key` leaves every route open that does not begin with /v1, /v2, /inference or /cohere, also
`/collective_rpc` and `/update_weights`. Nothing here knows vLLM, torch or the trainer.
"""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import json
import os
import platform
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from typing import Any

from grpo_lab.engines.vllm.calls import CHECKED, CallRefused
from grpo_lab.engines.vllm.token import VARIABLE, plain

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

HOSTS_VARIABLE = "GRPO_LAB_SERVER_HOSTS"
LIMIT_VARIABLE = "GRPO_LAB_SERVER_MAX_BYTES"
MAX_BYTES = 256 * 1024**2
#: seconds between two parts of a body
BODY_PAUSE = 60.0
#: 0.0.0.0: how TRL calls this machine where no address is set
LOCAL_NAMES = ("localhost", "127.0.0.1", "::1", "0.0.0.0")

#: what a trainer, TRL's client and the person who runs the server use; everything else is closed
ROUTES: dict[str, str] = {
    "/health": "GET",
    "/metrics": "GET",
    "/server_info": "GET",
    "/get_world_size": "GET",
    "/is_sleeping": "GET",
    "/is_paused": "GET",
    "/v1/models": "GET",
    "/v1/completions": "POST",
    "/v1/chat/completions": "POST",
    "/v1/chat/completions/render": "POST",
    "/inference/v1/generate": "POST",
    "/tokenize": "POST",
    "/collective_rpc": "POST",
    "/init_weight_transfer_engine": "POST",
    "/start_weight_update": "POST",
    "/update_weights": "POST",
    "/finish_weight_update": "POST",
    "/reset_prefix_cache": "POST",
    "/sleep": "POST",
    "/wake_up": "POST",
}


class Refused(Exception):
    """A request that does not pass: status and one sentence."""

    def __init__(self, status: int, why: str) -> None:
        super().__init__(why)
        self.status = status


class Guard:
    """ASGI middleware around `app`. Without arguments (as vLLM makes it) they are taken from the environment.

    Args:
        token: what a request must carry as `Authorization: Bearer …`.
        hosts: names and addresses of this server beside those of the machine itself, without a port.
        max_bytes: longest body.

    Raises ValueError without a token: nothing is served then.
    """

    def __init__(
        self, app: Any, token: str | None = None, hosts: Iterable[str] | None = None, max_bytes: int | None = None
    ) -> None:
        self.app = app
        self._token = plain(os.environ.get(VARIABLE, "") if token is None else token, VARIABLE).encode("ascii")
        named = os.environ.get(HOSTS_VARIABLE, "").split(",") if hosts is None else hosts
        self.hosts = {host.lower() for host in (*LOCAL_NAMES, platform.node(), *named) if host}
        self.max_bytes = int(os.environ.get(LIMIT_VARIABLE, MAX_BYTES)) if max_bytes is None else max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a connection, or refuse it."""
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        if scope["type"] != "http":  # a web socket; vLLM has them for speech
            await send({"type": "websocket.close", "code": 1008, "reason": ""})
            return
        try:
            self._check_sender(scope)
            self._check_route(scope)
            body = await self._body(scope, receive)
        except Refused as refused:
            await answer(send, refused.status, str(refused))
            return
        await self.app(scope, _handed_on(body, receive), _without_cross_origin(send))

    def _check_sender(self, scope: Scope) -> None:
        """Host, no web page, token: in this order, and alike on every path."""
        if _host(_only(scope, b"host")) not in self.hosts:
            raise Refused(403, "this server is not asked by that name (Host); see `grpo-lab serve --allow-host`")
        for header in (b"origin", b"sec-fetch-site"):
            if _all(scope, header):
                raise Refused(403, "this server does not answer web pages")
        scheme, _, token = _only(scope, b"authorization").partition(b" ")
        if scheme.lower() != b"bearer" or not hmac.compare_digest(token, self._token):
            raise Refused(401, f"a token is needed: {VARIABLE}, or the token file that `grpo-lab serve` named")

    def _check_route(self, scope: Scope) -> None:
        method = ROUTES.get(scope["path"]) if not scope.get("root_path") else None
        if method is None:
            raise Refused(404, "this route is closed")
        if scope["method"] != method:
            raise Refused(405, f"this route takes {method}")

    async def _body(self, scope: Scope, receive: Receive) -> bytes:
        """The whole body, checked; what goes on to vLLM is what was checked."""
        said = _only(scope, b"content-length")
        if said and _all(scope, b"transfer-encoding"):
            raise Refused(
                400, "a body has a length or comes in chunks, not both: two readers may take another end of it"
            )
        if said and not (said.isdigit() and int(said) <= self.max_bytes):
            raise Refused(413, f"the body is longer than {self.max_bytes} bytes (--max-request-mib)")
        kind = _only(scope, b"content-type").split(b";")[0].strip().lower()
        body = await _read(receive, self.max_bytes)
        if body and kind != b"application/json":
            raise Refused(415, "a body must be application/json")
        check = CHECKED.get(scope["path"])
        if check is None:
            return body
        try:
            body = json.dumps(check(json.loads(body))).encode()
        except (CallRefused, ValueError, RecursionError) as error:
            raise Refused(403, f"this call is not allowed: {error}") from None
        kept = [(name, value) for name, value in scope["headers"] if name.lower() != b"content-length"]
        scope["headers"] = [*kept, (b"content-length", str(len(body)).encode())]
        return body


async def answer(send: Send, status: int, why: str) -> None:
    """A short answer in JSON; the connection is closed, so a body that was not read is not taken for a request."""
    body = json.dumps({"error": why}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    headers += [(b"connection", b"close"), (b"cache-control", b"no-store")]
    if status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def _all(scope: Scope, name: bytes) -> list[bytes]:
    return [value for key, value in scope["headers"] if key.lower() == name]


def _only(scope: Scope, name: bytes) -> bytes:
    """The header, b"" where it is not there; two of them are refused, since two readers may choose another one."""
    found = _all(scope, name)
    if len(found) > 1:
        raise Refused(400, f"two headers {name.decode()}")
    return bytes(found[0]).strip() if found else b""


def _host(header: bytes) -> str:
    """`Host` without its port, "" for one that is none. An IPv6 address is written as Python writes it."""
    text = header.decode("latin-1").lower()
    name, colon, port = text.rpartition(":")
    if not colon or text.endswith("]"):
        name, port = text, ""
    if port and not port.isdigit():
        return ""
    if name.startswith("[") and name.endswith("]"):
        try:
            return str(ipaddress.IPv6Address(name[1:-1]))
        except ValueError:
            return ""
    return name


async def _read(receive: Receive, limit: int) -> bytes:
    parts, size, more = [], 0, True
    while more:
        try:
            message = await asyncio.wait_for(receive(), BODY_PAUSE)
        except TimeoutError:
            raise Refused(408, f"nothing more of the body came for {BODY_PAUSE:.0f} s") from None
        if message["type"] == "http.disconnect":
            raise Refused(400, "the connection ended before its body did")
        parts.append(message.get("body", b""))
        size, more = size + len(parts[-1]), message.get("more_body", False)
        if size > limit:
            raise Refused(413, f"the body is longer than {limit} bytes (--max-request-mib)")
    return b"".join(parts)


def _handed_on(body: bytes, receive: Receive) -> Receive:
    """The body in one piece, then what comes after it (the end of the connection)."""
    waiting = [body]

    async def handed_on() -> Message:
        if waiting:
            return {"type": "http.request", "body": waiting.pop(), "more_body": False}
        return await receive()

    return handed_on


def _without_cross_origin(send: Send) -> Send:
    """Answers never invite another origin, whatever the application says."""

    async def sent(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = message.get("headers", ())
            kept = [(name, value) for name, value in headers if not name.lower().startswith(b"access-control-")]
            message = {**message, "headers": kept}
        await send(message)

    return sent
