"""Tools that do what tools should not, for ``test_tools.py``: a module, so that a process can import them."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
import time
from typing import Any

from grpo_lab.turns.turn_settings import in_process, repeatable

FOREVER = 1000.0


class Mute:
    """Has no text."""

    def __str__(self) -> str:
        raise ValueError("no text")


class MuteError(Exception):
    """An error without a text."""

    def __str__(self) -> str:
        raise ValueError("no text")


class Loud(str):
    """A text that is none."""

    def __str__(self) -> str:
        return self

    def encode(self, *_: Any) -> bytes:
        raise ValueError("no bytes")


def nested(depth: int) -> dict[str, Any]:
    value: dict[str, Any] = {}
    for _ in range(depth):
        value = {"a": value}
    return value


def answer_of(kind: str) -> Any:
    """What a tool of this kind does, the same in a thread, a process and a coroutine."""
    if kind == "raise":
        raise ValueError("it's wrong")
    if kind == "raise_mute":
        raise MuteError
    if kind == "exit":
        raise SystemExit(3)
    if kind == "interrupt":
        raise KeyboardInterrupt
    if kind == "print":
        print("noise" * 1000)
        print("noise", file=sys.stderr)
        os.write(1, b"noise")
    if kind == "fork" and os.fork() == 0:
        return "the child"
    if kind == "children":
        subprocess.Popen(["sleep", "5"])
    answers = {
        "megabytes": lambda: "0123456789" * 1_000_000,
        "nul": lambda: "a\0b\ud800c",
        "none": lambda: None,
        "mute": Mute,
        "bytes": lambda: b"\xff",
        "loud": lambda: Loud("loud"),
        "nested": lambda: nested(100_000),
        "wide": lambda: {str(n): [n] * 10 for n in range(5_000)},
        "blocks": lambda: [{"type": "text", "text": "an image"}, {"type": "image", "image": "x.png"}],
    }
    return answers.get(kind, lambda: f"done: {kind}")()


def in_thread(kind: str) -> Any:
    if kind == "hang":
        time.sleep(FOREVER)
    return answer_of(kind)


@in_process
def in_own_process(kind: str) -> Any:
    return in_thread(kind)


async def as_async(kind: str) -> Any:
    await asyncio.sleep(0)
    if kind == "hang":
        await asyncio.sleep(FOREVER)
    return answer_of(kind)


@in_process
async def as_async_in_process(kind: str) -> Any:
    return await as_async(kind)


@in_process
def crash(how: str, note: str) -> Any:
    """End the process in some way, or hang with children. ``note``: a file for the numbers of processes."""
    child = subprocess.Popen(["sleep", "1000"])
    with open(note, "w", encoding="utf-8") as file:
        file.write(f"{os.getpid()} {child.pid}")
    if how == "_exit":
        os._exit(3)
    if how == "abort":
        os.abort()
    if how == "spin":
        while True:
            pass
    time.sleep(FOREVER)


@in_process
def own_pid() -> int:
    return os.getpid()


@in_process
async def own_pid_later() -> int:
    await asyncio.sleep(0.05)
    return os.getpid()


@in_process
def environment(name: str) -> str | None:
    return os.environ.get(name)


async def block() -> None:
    time.sleep(FOREVER)


async def stubborn() -> str:
    """Do not end when cancelled."""
    while True:
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(FOREVER)


async def to_thread() -> None:
    await asyncio.to_thread(time.sleep, FOREVER)


@repeatable
def third_time(counts: dict[str, int]) -> str:
    """``counts`` is the caller's copy: the calls are counted in the function itself."""
    third_time.calls += 1  # type: ignore[attr-defined]
    if third_time.calls < 3:  # type: ignore[attr-defined]
        raise ValueError("not yet")
    counts["changed"] = 1
    return "at last"


third_time.calls = 0  # type: ignore[attr-defined]
