"""`grpo-lab serve` for tests: a server of a tiny model, and the next one at its address.

The command is a fork of a process that has imported vLLM (:mod:`rollouts.forked_server`); ``cold``: started from
nothing, as a user does it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import requests

from grpo_lab.engines.vllm.talk import got, wait_until_ready
from grpo_lab.engines.vllm.token import of_trainer
from grpo_lab.testing import tiny_model
from ports import free_port
from rollouts.forked_server import Fork, serve


@dataclass
class Served:
    """A running server. ``silent``: a connection that has said nothing. ``more``: words of its command."""

    model: str
    port: int
    folder: Path
    process: subprocess.Popen[bytes] | Fork
    token: str = field(default="", repr=False)
    silent: socket.socket | None = None
    more: tuple[str, ...] = ()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def ask(self, method: str, path: str, headers: Any = None, **more: Any) -> requests.Response:
        sent = {"Authorization": f"Bearer {self.token}", **(headers or {})}
        sent = {name: value for name, value in sent.items() if value is not None}
        with requests.Session() as session:
            session.trust_env = False
            return session.request(method, self.url + path, headers=sent, timeout=300, **more)


def command(model: str, port: int, *more: str) -> list[str]:
    words = [sys.executable, "-m", "grpo_lab.cli", "serve", "--model", model, "--port", str(port)]
    return [*words, "--kv-cache-gib", "0.125", "--max-model-len", "256", "--max-request-mib", "1", *more]


@contextlib.contextmanager
def served_from(
    folder: Path, *more: str, architecture: str = "qwen2", ends: Iterable[int] = (), cold: bool = False, **sizes: Any
) -> Iterator[Served]:
    """A server of a tiny model until the block ends, or it is killed in it. ``more``: words of its command; ``ends``:
    further tokens that end a completion; ``sizes``: of `tiny_model`."""
    port = free_port()
    given = {"hidden_size": 64, "num_heads": 2, "num_layers": 2, "tie_embeddings": True, **sizes}
    model, tokenizer = tiny_model(architecture, **given)
    model.generation_config.eos_token_id = [tokenizer.eos_token_id, *ends]
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    words = [*command(str(folder / "model"), port, *more), "--log", str(folder / "log")]
    told = {**os.environ, "VLLM_LOGGING_LEVEL": "INFO"}  # it lists its routes, and says what else it says
    process: subprocess.Popen[bytes] | Fork
    with (folder / "out").open("wb") as output:
        if cold:
            told.pop("TORCHDYNAMO_DISABLE", None)
            process = subprocess.Popen(words, stdout=output, stderr=subprocess.STDOUT, env=told)
        else:
            process = serve(words, stdout=output, env=told)
    running = Served(str(folder / "model"), port, folder, process, more=more)
    try:
        token = lambda: of_trainer(running.url, None)  # noqa: E731
        wait_until_ready(running.url, 300, token=token, process=process, log=folder / "log")
        running.token = token() or ""
        while "the server is up" not in (folder / "out").read_text():
            assert process.poll() is None
            time.sleep(0.1)
        running.silent = socket.create_connection(("127.0.0.1", port), timeout=300)
        yield running
    finally:
        asked_to_end = process.poll() is None
        if asked_to_end:
            process.send_signal(signal.SIGTERM)
        code = process.wait(timeout=600)
    if asked_to_end:
        assert code == 0
        assert of_trainer(running.url, None) is None
    assert got(f"{running.url}/health", running.token)[0] != 200


def children(pid: int) -> list[int]:
    listed = [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return [*listed, *(grandchild for child in listed for grandchild in children(child))]


def kill_all(served: Served) -> None:
    """As a machine does it that runs out of memory: nobody can say goodbye. Then its address is free."""
    for pid in [*children(served.process.pid), served.process.pid]:
        os.kill(pid, signal.SIGKILL)
    served.process.wait()
    while not is_free(served.port):  # until the last thread of the server has ended
        time.sleep(0.01)


def is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True


class Again:
    """Kills the server and starts the next one at its address, as a scheduler does."""

    def __init__(self, served: Served, folder: Path) -> None:
        self.served, self.log = served, folder.parent / f"{folder.name}-second.log"
        self.process: Fork | None = None

    def start(self) -> None:
        kill_all(self.served)
        with self.log.open("wb") as output:
            words = command(self.served.model, self.served.port, *self.served.more)
            self.process = serve(words, stdout=output, env=os.environ)

    def stop(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            self.process.wait(timeout=300)
