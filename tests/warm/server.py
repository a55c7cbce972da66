"""``server.py FOLDER``: imports everything once, then forks for every client that asks at ``FOLDER/socket``.

It must have one thread when it forks (another's locks would stay shut in the forks), so it does nothing but imports.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import json
import os
import runpy
import selectors
import shutil
import signal
import socket
import sys
import traceback
from pathlib import Path
from typing import Any

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")

MODULES = (
    "torch", "torch.distributed.run", "torch.distributed.fsdp", "torch.distributed.tensor", "accelerate.commands.launch", "datasets",
    "peft", "transformers.models.qwen2.modeling_qwen2", "transformers.models.auto.modeling_auto", "trl.trainer.grpo_trainer",
    "trl.trainer.sft_trainer", "trl.trainer.dpo_trainer", "grpo_lab", "grpo_lab.cli", "grpo_lab.rewards", "grpo_lab.testing",
    "grpo_lab.testing.rollouts", "grpo_lab.trainer.lab_trainer", "torch.distributed.elastic.agent.server.local_elastic_agent",
    "torch.optim.adamw", "torch._dynamo", "numpy", "yaml", "pydantic", "psutil", "hypothesis", "pytest",
)  # fmt: skip


def warm_up() -> None:
    import importlib

    for name in MODULES:
        importlib.import_module(name)
    names = sorted(task.joinpath("comm").read_text().strip() for task in Path("/proc/self/task").iterdir())
    names.remove(Path(f"/proc/self/task/{os.getpid()}/comm").read_text().strip())
    if set(names) - {"jemalloc_bg_thd"}:  # pyarrow's; jemalloc prepares for a fork and starts it anew
        raise SystemExit(f"an import started threads {names}: forks would not be safe")
    if sys.modules["torch"].cuda.is_initialized():
        raise SystemExit("an import initialised CUDA: forks could not use it")
    gc.collect()
    gc.freeze()  # shared memory stays shared, and no fork walks a million old objects


def received(client: socket.socket, length: int) -> bytes:
    parts = b""
    while len(parts) < length:
        part = client.recv(length - len(parts))
        if not part:
            raise ConnectionError("the client has gone")
        parts += part
    return parts


def become(asked: dict[str, Any], wrapper: str) -> None:
    """This fork as ``python ARGV…`` in the client's place; never returns."""
    code = 1
    try:
        os.chdir(asked["folder"])
        os.environ.clear()
        os.environ.update(asked["environment"])
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a background process, as the server, ignores it
        words = list(asked["argv"])
        while words[0] in ("-u", "-I", "-s", "-E"):
            words.pop(0)
        sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
        paths = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
        first = str(Path(words[0]).resolve().parent) if words[0] not in ("-m", "-c") else os.getcwd()
        sys.path[:] = [first, *(path for path in paths if path not in sys.path), *sys.path[1:]]
        run(words, wrapper)
        code = 0
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else 0 if stop.code is None else 1
        if isinstance(stop.code, str):
            print(stop.code, file=sys.stderr)
    except KeyboardInterrupt:
        traceback.print_exc()
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    except BaseException:
        traceback.print_exc()
    with contextlib.suppress(BaseException):
        atexit._run_exitfuncs()
    with contextlib.suppress(BaseException):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code & 255)


def run(words: list[str], wrapper: str) -> None:
    if words[0] == "-c":
        sys.argv = ["-c", *words[2:]]
        exec(compile(words[1], "<string>", "exec"), {"__name__": "__main__", "__builtins__": __builtins__})
    elif words[0] == "-m":
        if words[1] == "accelerate.commands.launch":
            sys.executable = wrapper  # the ranks it starts are forks too
        sys.argv = words[1:]
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        if os.environ.get("WARM_CHILDREN"):
            sys.executable = wrapper
        sys.argv = words
        runpy.run_path(words[0], run_name="__main__")


class Server:
    def __init__(self, folder: Path) -> None:
        self.folder, self.forks = folder, {}
        self.clients: dict[socket.socket, int | None] = {}  # None: a lease
        self.listening = socket.socket(socket.AF_UNIX)
        self.listening.bind(str(folder / "socket"))
        self.listening.listen(64)
        self.told, tell = os.pipe()
        for end in (self.told, tell):
            os.set_blocking(end, False)
        signal.set_wakeup_fd(tell)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        self.waiting = selectors.DefaultSelector()
        self.waiting.register(self.listening, selectors.EVENT_READ)
        self.waiting.register(self.told, selectors.EVENT_READ)

    def serve(self) -> None:
        served = False
        while self.clients or not served:
            for key, _ in self.waiting.select(timeout=600):
                if key.fileobj is self.listening:
                    self.accept()
                    served = True
                elif key.fileobj == self.told:
                    with contextlib.suppress(BlockingIOError):
                        os.read(self.told, 4096)
                else:
                    self.gone(key.fileobj)  # type: ignore[arg-type]
            self.reap()

    def accept(self) -> None:
        client, _ = self.listening.accept()
        client.settimeout(20)
        try:
            kind = b""
            while not kind.endswith(b"\n"):
                kind += received(client, 1)
            if kind == b"lease\n":
                client.sendall(b"held\n")
                pid = None
            else:
                pid = self.fork(client)
        except (OSError, ConnectionError, ValueError):
            client.close()
            return
        self.clients[client] = pid
        self.waiting.register(client, selectors.EVENT_READ)
        if pid is not None:
            self.forks[pid] = client

    def fork(self, client: socket.socket) -> int:
        head, streams, _, _ = socket.recv_fds(client, 12, 3)
        head += received(client, 12 - len(head))
        asked = json.loads(received(client, int(head)))
        pid = os.fork()
        if pid == 0:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for number, stream in enumerate(streams):
                os.dup2(stream, number)
            for open_socket in (self.listening, client, *self.clients):
                open_socket.close()
            for stream in (*streams, self.told):
                os.close(stream)
            self.waiting.close()
            os.setsid()
            become(asked, str(self.folder / "children"))
        for stream in streams:
            os.close(stream)
        client.sendall(f"{pid}\n".encode())
        return pid

    def gone(self, client: socket.socket) -> None:
        """A lease ended, or a client died before its fork: then the fork dies too."""
        pid = self.clients.pop(client, None)
        self.waiting.unregister(client)
        client.close()
        if pid is not None and pid in self.forks:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def reap(self) -> None:
        while self.forks:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            client = self.forks.pop(pid, None)
            if client in self.clients:
                with contextlib.suppress(OSError):
                    client.sendall(f"{os.waitstatus_to_exitcode(status)}\n".encode())
                self.clients.pop(client)
                self.waiting.unregister(client)
                client.close()


def main(folder: Path) -> None:
    warm_up()
    try:
        Server(folder).serve()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
