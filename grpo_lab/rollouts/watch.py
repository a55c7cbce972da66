"""A long request and whether anything happens meanwhile: a generation may take long, silence may not.

A server that was put to sleep (`/sleep`, `/pause`) or whose engine hangs keeps the connection open and answers `/health`. So while
a generation is under way the server is looked at from beside: it must count tokens (`/metrics`), and must not be asleep.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from grpo_lab.rollouts.server_talk import ServerGone, got

LOOK_TIMEOUT = 5.0
#: lines of /metrics that move while an engine works
_COUNTED = re.compile(r"^vllm:(?:prompt_tokens|generation_tokens)_total(?:\{[^}]*\})? (\S+)$", re.MULTILINE)
_ASLEEP = {"/is_sleeping": "was put to sleep (/sleep); wake it with POST /wake_up", "/is_paused": "is paused (/pause)"}


@dataclass(frozen=True)
class Look:
    """One look at a server: its token counters ("" where it tells none, None where it did not answer); why it stands still."""

    counters: str | None
    asleep: str = ""


def look(base_url: str, token: str | None = None) -> Look:
    """Look at a server from beside, within `LOOK_TIMEOUT` a question."""
    text = _got(f"{base_url}/metrics", token)
    if text is None:
        return Look(None)
    for path, why in _ASLEEP.items():
        if "true" in (_got(base_url + path, token) or ""):
            return Look(" ".join(_COUNTED.findall(text)), why)
    return Look(" ".join(_COUNTED.findall(text)))


def _got(url: str, token: str | None) -> str | None:
    status, page = got(url, token, LOOK_TIMEOUT)
    return None if status is None else page.decode(errors="replace")  # "": it answers, without this page


def watched(call: Callable[[], Any], base_url: str, *, silence: float, what: str, token: str | None = None) -> Any:
    """The result of `call`, a request to a server; its own exception likewise.

    Raises ServerGone where the server showed no sign of work for `silence` seconds: no token counted, asleep, or no answer to the
    question. `call` then goes on in a thread of its own until its own limit, and its result is dropped.
    """
    answer: dict[str, Any] = {}
    done = threading.Event()

    def run() -> None:
        try:
            answer["value"] = call()
        except BaseException as failure:
            answer["failure"] = failure
        done.set()

    threading.Thread(target=run, daemon=True).start()
    start = moved = time.monotonic()
    seen = Look("")
    while not done.wait(min(max(silence / 6, 0.05), 5.0)):
        now = look(base_url, token)
        if now.counters is not None and not now.asleep and now.counters != seen.counters:
            moved = time.monotonic()
        seen = now
        if time.monotonic() - moved > silence and not done.is_set():
            raise ServerGone(stands_still(base_url, what, time.monotonic() - start, silence, seen))
    if "failure" in answer:
        raise answer["failure"]
    return answer["value"]


def stands_still(base_url: str, what: str, waited: float, silence: float, seen: Look) -> str:
    """What was waited for, how long, and what the server looks like."""
    if seen.asleep:
        state = f"it {seen.asleep}"
    elif seen.counters is None:
        state = "it does not answer /metrics either"
    else:
        state = "it answers, and counts no token"
    return (
        f"the vLLM server at {base_url} showed no sign of work for {silence:.0f} s; waited {waited:.0f} s for {what}: {state} "
        "(limit: `rollout.server.silence_timeout`)"
    )
