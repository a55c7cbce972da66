"""The process on the other side of `pool.WorkerPool`, a fork of `nursery`: one job in, one reply out, under limits it cannot lift.

Frames on the socket are a 4-byte big-endian length and JSON, never pickle: a worker that has been talked into
something by model text can say anything it likes and still only hands over plain data.

Replies: `{"ready": pid, "memory_limited": bool}` once; then per job one of `{"ok": value}`, `{"crash": reason}` (the
text exhausted memory or the stack), `{"bug": traceback}` (our handler raised), each with `"rss"`, the memory held, in bytes.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import socket
import struct
import traceback
from collections.abc import Callable
from typing import Any

Handler = Callable[[Any], Any]
_HEADER = struct.Struct(">I")


def encode_frame(message: Any) -> bytes:
    """A message as bytes: its length, then JSON."""
    body = json.dumps(message).encode()
    return _HEADER.pack(len(body)) + body


def take_frame(buffer: bytearray) -> Any | None:
    """Removes the first whole frame from `buffer` and returns its message; None while it is incomplete."""
    if len(buffer) < _HEADER.size:
        return None
    (length,) = _HEADER.unpack_from(buffer)
    if len(buffer) < _HEADER.size + length:
        return None
    body = bytes(buffer[_HEADER.size : _HEADER.size + length])
    del buffer[: _HEADER.size + length]
    return json.loads(body)


def _limit_memory(memory_bytes: int) -> bool:
    """Caps the address space. False where the system refuses (macOS), which the pool reports."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    try:
        resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    except (ValueError, OSError):
        return False
    return True


def _resident_bytes() -> int:
    """Memory held now. Not ``ru_maxrss``: that survives exec on Linux, so a child of a large trainer starts at its peak."""
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * resource.getpagesize()
    except OSError:  # no /proc (macOS, which reports bytes)
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def _answer(handler: Handler, payload: Any) -> tuple[dict[str, Any], bool]:
    """The reply to one job, and whether the process may go on (after exhausted memory it may not)."""
    try:
        return {"ok": handler(payload)}, True
    except MemoryError:
        return {"crash": "memory limit reached"}, False
    except RecursionError:
        return {"crash": "recursion limit reached"}, True
    except Exception:
        return {"bug": traceback.format_exc()}, True


def _serve(channel: socket.socket, handler: Handler, cpu_s: float, self_destruct_s: float) -> None:
    buffer = bytearray()
    while True:
        message = take_frame(buffer)
        if message is None:
            chunk = channel.recv(1 << 16)
            if not chunk:
                return  # the trainer is gone
            buffer += chunk
            continue
        # The kernel ends this process when the job has used up its processor time, wherever in C code it may be; and
        # by the second timer should the trainer be killed meanwhile, when nobody is left to do it.
        signal.setitimer(signal.ITIMER_PROF, cpu_s)
        signal.setitimer(signal.ITIMER_REAL, self_destruct_s)
        reply, healthy = _answer(handler, message["job"])
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)
        reply["rss"] = _resident_bytes()
        channel.sendall(encode_frame(reply))
        if not healthy:
            return


def be_worker(
    channel: socket.socket, handler: Handler, memory_bytes: int, cpu_s: float, self_destruct_s: float
) -> None:
    """What a fork does: lower its limits, say so, serve until the socket closes."""
    limited = _limit_memory(memory_bytes)
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # the trainer went away
        channel.sendall(encode_frame({"ready": os.getpid(), "memory_limited": limited}))
        _serve(channel, handler, cpu_s, self_destruct_s)
