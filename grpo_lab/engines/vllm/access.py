"""Access control of a server: one ASGI middleware in front of everything that vLLM serves, in later releases too.

The server's command line names it, `--middleware grpo_lab.engines.vllm.access.Guard`, and vLLM puts it around all its
routes. A request passes if it meets all of these conditions, checked in this order:

    1. It names this server in `Host`, so that no other name can be made to point here ("DNS rebinding"), and comes from
       no web page.
    2. It carries the token, which is compared in constant time. No route is open without it, and all are refused alike.
    3. It asks for a route in `ROUTES` by the method there. All other routes are closed.
    4. Its body, if it has one, is JSON of at most `max_bytes`; for a route in `BODIES` with the fields declared there
       and no others.

vLLM's own `--api-key` leaves `/collective_rpc`, `/update_weights` and most other routes open; its `/collective_rpc`
calls any method of a worker by name, and other backends of its weight transfer take pickles.

Before all that, `Reader` parses the head of a request. uvicorn's default parser, httptools, takes a header of any
length; vLLM's limit (4 MiB) holds with h11 only. And uvicorn waits forever for a head, so that enough such connections
use up all descriptors. Here a head must arrive within `HEAD_WITHIN` seconds, and beyond `most_waiting()` connections
the oldest is closed.

Import this module in the server's process alone: it replaces the parser, which uvicorn chooses after vLLM has imported
this module. Nothing here imports vLLM or the trainer; torch only reads an adapter's file.
"""

from __future__ import annotations

import asyncio
import hmac
import os
import platform
import resource
from asyncio import TimerHandle, Transport
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, ClassVar
from urllib.parse import urlsplit

import h11
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from starlette.websockets import WebSocketClose
from uvicorn.protocols.http import auto
from uvicorn.protocols.http.h11_impl import H11Protocol

from grpo_lab.engines.vllm.token import HOSTS_VARIABLE, LIMIT_VARIABLE, LOCAL_NAMES, VARIABLE, plain

MAX_BYTES = 256 * 1024**2
#: Longest time between two parts of a request's body, in seconds.
BODY_PAUSE = 60.0
#: Time within which the head of a request must arrive, in seconds.
HEAD_WITHIN = 10.0
#: Largest number of connections whose head has not arrived. It is more than can connect in one turn of the event loop
#: (uvicorn's backlog), so that a burst of connections closes none of its own.
MOST_WAITING = 4096

#: Routes that a trainer, TRL's client and the person who runs the server use. All others are closed.
ROUTES: dict[str, str] = {
    **dict.fromkeys(("/health", "/metrics", "/server_info", "/get_world_size", "/is_sleeping", "/is_paused"), "GET"),
    "/v1/models": "GET",
    **dict.fromkeys(("/v1/completions", "/v1/chat/completions", "/v1/chat/completions/render"), "POST"),
    **dict.fromkeys(("/inference/v1/generate", "/tokenize", "/collective_rpc"), "POST"),
    **dict.fromkeys(("/init_weight_transfer_engine", "/start_weight_update", "/update_weights"), "POST"),
    **dict.fromkeys(("/v1/load_lora_adapter", "/v1/unload_lora_adapter"), "POST"),
    **dict.fromkeys(("/finish_weight_update", "/reset_prefix_cache", "/sleep", "/wake_up"), "POST"),
}

Text = Annotated[str, Field(max_length=4096)]
#: Name of a floating-point dtype. Integers are not allowed, since they would round the weights.
FloatingPoint = Annotated[str, Field(pattern=r"^b?float[0-9a-z_]{1,20}$")]
Whole = Annotated[int, Field(ge=0, lt=2**32)]
#: A folder that a trainer made. `trusted_folder` checks it again in the worker.
Folder = Annotated[str, Field(pattern=r"^/dev/shm/grpo-lab-weights-[A-Za-z0-9_]{1,64}$")]
#: Folder of one version of an adapter below such a folder, as `weights.adapter.AdapterFiles` names it.
VersionFolder = Annotated[str, Field(pattern=r"^/dev/shm/grpo-lab-weights-[A-Za-z0-9_]{1,64}/v[0-9]{1,9}$")]
VersionName = Annotated[str, Field(pattern=r"^grpo-lab-[0-9a-f]{32}-v[0-9]{1,9}$")]


class EmptyBody(BaseModel):
    """Base class of request bodies and of arguments of calls, itself without fields. A field that a class does not
    declare is refused."""

    model_config = ConfigDict(extra="forbid", strict=True)


class FolderBody(EmptyBody):
    folder: Folder


class Version(EmptyBody):
    version: Text


class NoteVersion(Version):
    moved: bool


class LoadWeightsBody(FolderBody, Version): ...


#: Method of `worker.WeightLoading` → class of its arguments.
METHODS: dict[str, type[EmptyBody]] = {
    "grpo_lab_load_weights": LoadWeightsBody,
    "grpo_lab_sees": FolderBody,
    "grpo_lab_describe": EmptyBody,
    "grpo_lab_note_version": NoteVersion,
    "grpo_lab_weights_version": EmptyBody,
    "grpo_lab_differing_tensors": FolderBody,
    "grpo_lab_clear_cache": EmptyBody,
}


class RemoteCall(EmptyBody):
    """A call of a method in `METHODS`, with arguments of the class there."""

    method: str
    kwargs: dict[str, Any] = {}

    @model_validator(mode="after")
    def _is_ours(self) -> RemoteCall:
        if self.method not in METHODS:
            raise ValueError("no method of grpo_lab's worker")
        METHODS[self.method].model_validate(self.kwargs)
        return self


class Rendezvous(EmptyBody):
    """Address at which the trainer waits for the server to join its NCCL group, and the ranks in that group."""

    master_address: Text
    master_port: Whole
    rank_offset: Whole
    world_size: Whole
    packed: bool | None = None


class NcclTensors(EmptyBody):
    """Names, dtypes and shapes of the tensors that are sent over NCCL."""

    names: list[Text]
    dtype_names: list[FloatingPoint]
    shapes: list[list[Whole]]
    packed: bool | None = None


class InitInfo(EmptyBody):
    """Body of ``/init_weight_transfer_engine``."""

    init_info: Rendezvous


class UpdateInfo(EmptyBody):
    """Body of ``/update_weights``."""

    update_info: NcclTensors


class Unload(EmptyBody):
    """A version of an adapter to unload."""

    lora_name: VersionName


class LoadAdapter(Unload):
    """A version of an adapter to load: its name, which is new, and its folder. vLLM's field `load_inplace` is not
    allowed, since cached prompts of the old adapter would stay."""

    lora_path: VersionFolder

    @model_validator(mode="after")
    def _is_fit(self) -> LoadAdapter:
        file = Path(self.lora_path) / "adapter_model.safetensors"
        if file.is_file():  # else vLLM reports it
            refuse_unfit(file)
        return self


def refuse_unfit(file: Path) -> None:
    """Raise ValueError if a file holds a tensor that no engine should load (`sync.fit`); vLLM does not check that."""
    from grpo_lab.engines.vllm.worker import tensors_of  # imports torch, loaded by then
    from grpo_lab.engines.weights.sync import WeightSyncError, fit

    try:
        for _ in fit(tensors_of(file)):
            pass
    except WeightSyncError as unfit:
        raise ValueError(str(unfit)) from unfit


#: Route → class of its body. On other routes a body may have any fields.
BODIES: dict[str, type[EmptyBody]] = {
    "/v1/load_lora_adapter": LoadAdapter,
    "/v1/unload_lora_adapter": Unload,
    "/collective_rpc": RemoteCall,
    "/init_weight_transfer_engine": InitInfo,
    "/update_weights": UpdateInfo,
    "/start_weight_update": EmptyBody,
    "/finish_weight_update": EmptyBody,
}


class Guard:
    """ASGI middleware around `app`, the server. vLLM leaves all other arguments out; they are then read from the
    environment.

    Args:
        token: the token that a request must carry. Raises ValueError if there is none.
        hosts: names of this server beside the machine's own, without a port.
        max_bytes: longest body.
    """

    def __init__(
        self, app: ASGIApp, token: str | None = None, hosts: Iterable[str] | None = None, max_bytes: int | None = None
    ) -> None:
        self.app = app
        self._token = plain(os.environ.get(VARIABLE, "") if token is None else token, VARIABLE).encode("ascii")
        if hosts is None:
            hosts = os.environ.get(HOSTS_VARIABLE, "").split(",")
        self.hosts = {host.lower() for host in (*LOCAL_NAMES, platform.node(), *hosts) if host}
        if max_bytes is None:
            self.max_bytes = int(os.environ.get(LIMIT_VARIABLE, MAX_BYTES))
        else:
            self.max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
        elif scope["type"] == "http":
            await self._request(scope, receive, send)
        else:  # a web socket, which vLLM has for speech
            await WebSocketClose(1008)(scope, receive, send)

    async def _request(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Check a request; hand it on with its checked body, or answer with an error."""
        scope["headers"] = [(name.lower(), value) for name, value in scope["headers"]]
        headers = Headers(scope=scope)
        try:
            self._check(headers, scope)
            body = await self._body(scope, headers, receive)
        except HTTPException as refused:
            # close: the unread rest of a body must not be taken for a request
            closed = {"connection": "close", "cache-control": "no-store", **(refused.headers or {})}
            await JSONResponse({"error": refused.detail}, refused.status_code, closed)(scope, receive, send)
            return
        checked: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive_checked() -> Message:
            if checked:
                return checked.pop()
            return await receive()

        async def send_to_no_other_origin(message: Message) -> None:
            kept = [pair for pair in message.get("headers", ()) if not pair[0].lower().startswith(b"access-control-")]
            await send({**message, "headers": kept} if "headers" in message else message)

        await self.app(scope, receive_checked, send_to_no_other_origin)

    def _check(self, headers: Headers, scope: Scope) -> None:
        """Check host, origin and token, alike on every path, then the route. Raises HTTPException."""
        if host_of(only(headers, "host")) not in self.hosts:
            raise HTTPException(403, "this server is not asked by that name (Host); see `grpo-lab serve --allow-host`")
        for header in ("origin", "sec-fetch-site"):
            if header in headers:
                raise HTTPException(403, "this server does not answer web pages")
        scheme, _, token = only(headers, "authorization").partition(" ")
        if scheme.lower() != "bearer" or not hmac.compare_digest(token.encode("latin-1"), self._token):
            needed = f"a token is needed: {VARIABLE}, or the token file that `grpo-lab serve` named"
            raise HTTPException(401, needed, {"www-authenticate": "Bearer"})
        method = None
        if not scope.get("root_path"):
            method = ROUTES.get(scope["path"])
        if method is None:
            raise HTTPException(404, "this route is closed")
        if scope["method"] != method:
            raise HTTPException(405, f"this route takes {method}")

    async def _body(self, scope: Scope, headers: Headers, receive: Receive) -> bytes:
        """Read the whole body, check it, and return what vLLM gets of it. Raises HTTPException."""
        long = HTTPException(413, f"the body is longer than {self.max_bytes} bytes (--max-request-mib)")
        length = only(headers, "content-length")
        kind = only(headers, "content-type").split(";")[0].strip().lower()
        if length and "transfer-encoding" in headers:
            raise HTTPException(400, "a body has a length or comes in chunks, not both: readers may see different ends")
        if length and not (length.isdigit() and int(length) <= self.max_bytes):
            raise long

        async def next_part() -> Message:
            return await asyncio.wait_for(receive(), BODY_PAUSE)

        parts = bytearray()
        try:
            async for part in Request(scope, next_part).stream():
                parts += part
                if len(parts) > self.max_bytes:
                    raise long
        except TimeoutError:
            raise HTTPException(408, f"nothing more of the body came for {BODY_PAUSE:.0f} s") from None
        except ClientDisconnect:
            raise HTTPException(400, "the connection ended before its body did") from None
        body = bytes(parts)
        if body and kind != "application/json":
            raise HTTPException(415, "a body must be application/json")
        declared = BODIES.get(scope["path"])
        if declared is None:
            return body
        try:
            body = declared.model_validate_json(body).model_dump_json(exclude_none=True).encode()
        except ValidationError as error:
            raise HTTPException(403, f"this call is not allowed: {error.errors()[0]['msg']}") from None
        MutableHeaders(scope=scope)["content-length"] = str(len(body))
        return body


def only(headers: Headers, name: str) -> str:
    """Return a header's value, "" if it is missing. Raises HTTPException for two headers of one name, of which two
    readers may choose different ones."""
    found = headers.getlist(name)
    if len(found) > 1:
        raise HTTPException(400, f"two headers {name}")
    return found[0].strip() if found else ""


def host_of(header: str) -> str:
    """Return the host name of a `Host` header without its port, in lower case; "" if the header is malformed."""
    try:
        url = urlsplit(f"//{header}")
        _ = url.port
    except ValueError:
        return ""
    if url.netloc == header and "@" not in header:
        return url.hostname or ""
    return ""


def most_waiting() -> int:
    """Return how many connections may be without a head: half of this process's descriptors, `MOST_WAITING` at most."""
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if soft == resource.RLIM_INFINITY:
        return MOST_WAITING
    return min(MOST_WAITING, max(1, soft // 2))


class Reader(H11Protocol):
    """A connection that is closed if the head of its request does not arrive in time."""

    #: Connection whose head has not arrived, oldest first → timer that closes it.
    waiting: ClassVar[dict[Reader, TimerHandle]] = {}

    def connection_made(self, transport: Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._wait_for_head()

    def data_received(self, data: bytes) -> None:
        """Hand data on to the parser, then start or stop the timer of the head."""
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
