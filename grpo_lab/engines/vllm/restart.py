"""The command that starts a server again after it was lost, given in the recipe (`rollout.server.restart`).

It runs without a shell, in a process group of its own, its output in a file of the run folder. It may stay (`grpo-lab serve …`):
then it ends with this process, however that ends. Or it hands the server over to somebody (`systemctl --user restart …`) and
ends with status 0.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import shlex
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from grpo_lab.engines.vllm.server import OF_ANOTHER_RUN, end_with_parent
from grpo_lab.engines.vllm.talk import ServerGone, TokenRefused
from grpo_lab.engines.vllm.token import VARIABLE
from grpo_lab.io import no_link

GRACE = 20.0
STARTS = 5
PAUSE = 2.0


def words_of(command: str) -> list[str]:
    """A command line as its words. ValueError where it has none, an open quotation mark, a program that is not there, or a token."""
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise ValueError(f"`rollout.server.restart` cannot be read ({error}): {command!r}") from None
    if not words:
        raise ValueError("`rollout.server.restart` is empty: give the command that starts the server, or leave it out")
    if f"{VARIABLE}=" in command:
        raise ValueError(
            f"`rollout.server.restart` sets {VARIABLE}, and a recipe is no secret (it is kept with the run): leave it out, the "
            "command has the trainer's environment; or name a file by `grpo-lab serve --token-file` and `rollout.server.token_file`"
        )
    if shutil.which(words[0]) is None:
        raise ValueError(
            f"`rollout.server.restart`: there is no program {words[0]!r} (it is not run by a shell; for one: bash -c '…')"
        )
    return words


class Restart:
    """Starts a server by a command; at most one at a time, and none is left behind."""

    def __init__(self, command: str, log: Path) -> None:
        self.words = words_of(command)
        self.log = log
        self.process: subprocess.Popen[bytes] | None = None
        atexit.register(self.stop)

    def start(self) -> subprocess.Popen[bytes]:
        """Run the command, after the end of what it started before (a server that hangs keeps its port)."""
        self.stop()
        self.log.parent.mkdir(parents=True, exist_ok=True)
        environment = {name: value for name, value in os.environ.items() if name not in OF_ANOTHER_RUN}
        with open(self.log, "ab", opener=no_link) as output:
            output.write(f"--- {time.strftime('%Y-%m-%d %H:%M:%S')}: {shlex.join(self.words)}\n".encode())
            output.flush()
            self.process = subprocess.Popen(
                self.words,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=end_with_parent,
            )
        return self.process

    def until_ready(self, wait: Callable[..., Any], limit: float) -> None:
        """Start it, and again where it ends at once: a port or a GPU's memory may be held for a while by the one that died.

        `wait(seconds, process=, log=, may_end=)` returns where the server answers (`server_talk.wait_until_ready`). Raises
        ServerGone after `limit` seconds, or `STARTS` starts that failed, TokenRefused; nothing that it started is left then.
        """
        end = time.monotonic() + limit
        for start in range(1, STARTS + 1):
            process = self.start()
            try:
                wait(max(end - time.monotonic(), 1.0), process=process, log=self.log, may_end=True)
                return
            except (ServerGone, TokenRefused) as failure:
                ends_at_once = isinstance(failure, ServerGone) and process.poll() not in (None, 0)
                if start == STARTS or not ends_at_once or time.monotonic() + PAUSE * start > end:
                    self.stop()
                    raise
            time.sleep(PAUSE * start)

    def stop(self) -> None:
        """End what the command started and still runs in its process group."""
        process, self.process = self.process, None
        if process is None:
            return
        for sign in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                if process.poll() is None:
                    os.killpg(process.pid, sign)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=GRACE)
                return
