"""A vLLM server and the command that runs it, `grpo-lab serve`: in the foreground, until it is interrupted or ends.

It is vLLM's own server (`vllm serve`), which TRL's `vllm_mode: server` talks to. Its development endpoints are on,
since weight sync needs them; whoever has access to them can replace the model. So the address is 127.0.0.1 unless
another one is given (`--host`: between the machines of a cluster), and every request needs a token (`token.py`,
`access.py`).
"""

from __future__ import annotations

import argparse
import hashlib
import ipaddress
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, fields
from functools import partial
from pathlib import Path

from grpo_lab.engines.vllm import token as tokens
from grpo_lab.engines.vllm.engine import (
    LORA_RANKS,
    EngineOptions,
    add_engine_options,
    add_option,
    config_of,
    engine_options_of,
    lora_arguments,
    refuse_beyond_positions,
    runs_on_cpu,
)
from grpo_lab.engines.vllm.presence import why_not
from grpo_lab.engines.vllm.talk import ServerGone, wait_until_ready
from grpo_lab.io import looks_local
from grpo_lab.sandbox.kernel import die_with_parent
from grpo_lab.signals import handle, put_back

HOST = "127.0.0.1"
#: Time within which a server must be up, in seconds.
START_TIMEOUT = 600.0
WORKER_EXTENSION = "grpo_lab.engines.vllm.worker.WeightLoading"
GUARD = "grpo_lab.engines.vllm.access.Guard"
SOCKETS_VARIABLE = "VLLM_RPC_BASE_PATH"
#: Environment variables that the server does not inherit: a second token, unpickling, another cache size, the trainer's
#: own ranks.
HIDDEN = (
    "VLLM_API_KEY",
    "VLLM_ALLOW_INSECURE_SERIALIZATION",
    "VLLM_CPU_KVCACHE_SPACE",
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
)
#: Seconds between two checks that the server listens. It is killed once it has not listened for `DEAF_FOR` seconds.
LISTENS_EVERY = 1.0
DEAF_FOR = 5.0
#: What a folder must hold to be served → file names, of which it needs one.
NEEDED = {
    "config": ("config.json",),
    "weights": ("*.safetensors", "*.bin", "*.gguf"),
    "tokenizer": ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "tekken.json", "vocab.json"),
}


@dataclass(frozen=True)
class ServerOptions:
    """Options of the server; the command line's help says what each is (`add_arguments`). Raises ValueError for a value
    that is not allowed.

    `allow_hosts`: names that clients call it by, beside its address and this machine's names. `max_lora_rank`: largest
    rank of LoRA adapters that it takes; None: no adapters.
    """

    model: str
    port: int = 8000
    engine: EngineOptions = field(default_factory=EngineOptions)
    tensor_parallel_size: int = 1
    gpu_memory_utilization: float | None = None
    max_lora_rank: int | None = None
    host: str = HOST
    token_file: Path | None = None
    allow_hosts: tuple[str, ...] = ()
    max_request_mib: int = 256

    def __post_init__(self) -> None:
        share = self.gpu_memory_utilization
        for name, right, allowed in (
            ("port", 1024 <= self.port <= 65535, "lie in 1024..65535"),
            ("tensor_parallel_size", self.tensor_parallel_size >= 1, "be >= 1"),
            ("gpu_memory_utilization", share is None or 0 < share <= 1, "lie in (0, 1]"),
            ("max_lora_rank", self.max_lora_rank in (None, *LORA_RANKS), f"be one of {LORA_RANKS}"),
            ("max_request_mib", self.max_request_mib >= 1, "be >= 1"),
        ):
            if not right:
                raise ValueError(f"server {name} must {allowed}, got {getattr(self, name)}")
        for host in self.allow_hosts:
            if not host or not host.isascii() or any(character in host for character in ",/: "):
                raise ValueError(f"a host that is allowed must be a name such as node7, without a port, got {host!r}")
        try:
            unspecified = self._address().is_unspecified
        except ValueError:
            raise ValueError(f"server host must be an address of this machine, as {HOST}; got {self.host!r}") from None
        if unspecified:
            raise ValueError(
                f"server host {self.host} means every network of this machine, and the token travels in clear: name one"
                f" address in a private network that you trust, or leave the host out ({HOST})"
            )

    def _address(self) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
        """Return the host as an IP address; a mapped one (::ffff:0.0.0.0) as IPv4. Raises ValueError for a name."""
        address = ipaddress.ip_address(self.host)
        return getattr(address, "ipv4_mapped", None) or address

    @property
    def is_local(self) -> bool:
        return self._address().is_loopback

    @property
    def base_url(self) -> str:
        if ":" in self.host:
            return f"http://[{self.host}]:{self.port}"
        return f"http://{self.host}:{self.port}"


def server_command(options: ServerOptions, *, on_cpu: bool) -> list[str]:
    """Return the server's command line as an argument list, for this interpreter's vLLM.

    Log-probs are those of the distribution that was sampled from (TRL's correction needs them so). On a CPU `vllm
    serve` ends at once (it asks for the metadata of a package "vllm", not vllm-cpu), so the module behind it is run.
    """
    import torch

    if on_cpu:
        module = ["vllm.entrypoints.openai.api_server", "--model"]
    else:
        module = ["vllm.entrypoints.cli.main", "serve"]
    command = [sys.executable, "-m", *module, options.model]
    command += ["--host", options.host, "--port", str(options.port), "--seed", str(options.engine.seed or 0)]
    command += ["--logprobs-mode", "processed_logprobs", "--max-logprobs", "-1", "--generation-config", "vllm"]
    arguments = options.engine.llm_arguments(on_cpu=on_cpu, trainer_dtype=torch.float32)
    arguments["tensor_parallel_size"] = options.tensor_parallel_size
    arguments["gpu_memory_utilization"] = options.gpu_memory_utilization
    for name, value in {**arguments, **lora_arguments(options.max_lora_rank)}.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            command.append(f"--{flag}" if value else f"--no-{flag}")
        elif value is not None:
            command += [f"--{flag}", str(value)]
    command += ["--worker-extension-cls", WORKER_EXTENSION]
    command += ["--middleware", GUARD, "--allowed-origins", "[]", "--disable-fastapi-docs"]
    if not on_cpu:
        command += ["--weight-transfer-config", json.dumps({"backend": "nccl"})]
    return command


def server_environment(options: ServerOptions, token: str, sockets: str) -> dict[str, str]:
    """Return the server's environment: this process's, vLLM's development endpoints on, and what `Guard` reads.

    `sockets`: folder of the sockets between the server's processes. In vLLM's own, /tmp, the umask would decide who may
    connect. Unless VLLM_ENABLE_V1_MULTIPROCESSING is 0, the CPU build starts a third process, which pins itself to one
    core.
    """
    environment = {name: value for name, value in os.environ.items() if name not in HIDDEN}
    environment |= {"VLLM_SERVER_DEV_MODE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    hosts = ",".join((str(ipaddress.ip_address(options.host)), *options.allow_hosts))
    environment |= {
        tokens.VARIABLE: token,
        tokens.HOSTS_VARIABLE: hosts,
        tokens.LIMIT_VARIABLE: str(options.max_request_mib * 1024**2),
    }
    environment[SOCKETS_VARIABLE] = sockets
    environment["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = str(int(options.max_lora_rank is not None))
    return environment


@contextmanager
def held_address(options: ServerOptions) -> Iterator[int | None]:
    """Reserve the address for this process inside the block; yield a descriptor that reserves it for a child, too.

    The port is bound without listening. vLLM binds it in the same way, so the server can still do so. So could another
    server that is loading; on Linux it is kept out by an abstract socket with a name made from that of the token file.
    Raises ValueError if the address is in use, or is none of this machine.
    """
    said = f"port {options.port} at {options.host} cannot be used"
    other = "choose another --port, or an address of this machine"
    with ExitStack() as held:
        bound = held.enter_context(socket.socket(socket.AF_INET6 if ":" in options.host else socket.AF_INET))
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            bound.bind((options.host, options.port))
        except OSError as error:
            raise ValueError(f"{said} ({error.strerror}): {other}") from error
        if not sys.platform.startswith("linux"):
            yield None
            return
        named = held.enter_context(socket.socket(socket.AF_UNIX))
        digest = hashlib.sha256(tokens.default_file(options.base_url).name.encode()).hexdigest()
        try:
            named.bind(f"\0grpo-lab-serve-{digest[:32]}")
        except OSError as error:
            raise ValueError(f"{said} (another `grpo-lab serve` has it, and may be loading still): {other}") from error
        yield named.fileno()


class Server:
    """A server process that runs as long as the `with` block. Its output goes to the file `log` (None: this process's
    own output); `start_timeout`: seconds within which it must be up."""

    def __init__(self, options: ServerOptions, *, log: Path | None, start_timeout: float = 300.0) -> None:
        self.options = options
        self.log = log
        self.start_timeout = start_timeout
        self.process: subprocess.Popen[bytes] | None = None
        self.token: tokens.AccessToken | None = None
        self._until_stopped = ExitStack()

    def start(self) -> Server:
        """Write the token's file, start the process, and wait until it answers. Raises ValueError if its address is in
        use, ServerGone if it is not up in time."""
        options = self.options
        log = self.log
        parent = os.environ.get(SOCKETS_VARIABLE)
        try:
            holding = self._until_stopped.enter_context(held_address(options))
            self.token = tokens.of_server(options.base_url, options.token_file)
            token = self.token.value
            sockets = str(self._until_stopped.enter_context(tokens.own_folder("grpo-lab-sockets-", parent)))
            with nullcontext() if log is None else log.open("wb") as output:
                self.process = subprocess.Popen(
                    server_command(options, on_cpu=runs_on_cpu()),
                    env=server_environment(options, token, sockets),
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                    pass_fds=() if holding is None else (holding,),  # until this process and the server end
                    preexec_fn=partial(die_with_parent, signal.SIGTERM),  # no server is left behind
                )
            wait_until_ready(options.base_url, self.start_timeout, token=lambda: token, process=self.process, log=log)
        except BaseException:
            self.stop()
            raise
        return self

    def wait(self) -> str:
        """Wait for the process to end, and return how it ended, in words. When its engine has died, vLLM stops
        listening, and would wait forever for the requests under way. Such a process is killed, so that its clients get
        an error."""
        assert self.process is not None
        heard = time.monotonic()
        while True:
            try:
                return f"ended by itself with status {self.process.wait(timeout=LISTENS_EVERY)}"
            except subprocess.TimeoutExpired:
                pass
            if self._listens():
                heard = time.monotonic()
            elif time.monotonic() - heard > DEAF_FOR:
                os.killpg(self.process.pid, signal.SIGKILL)
                self.process.wait()
                return f"was ended: its engine had died, and it took no connection for {DEAF_FOR:.0f} s"

    def _listens(self) -> bool:
        """Return whether the server takes connections. A timeout counts as yes: the server may be busy."""
        try:
            socket.create_connection((self.options.host, self.options.port), timeout=5.0).close()
        except ConnectionRefusedError:
            return False
        except OSError:
            return True
        return True

    def stop(self) -> None:
        """End the server and its workers, with SIGTERM, then SIGKILL. Remove the token's file if it was made for the
        server."""
        if self.token is not None:
            self.token.forget()
        if self.process is not None:
            for sign in (signal.SIGTERM, signal.SIGKILL):
                try:
                    os.killpg(self.process.pid, sign)  # its own session, so its own group
                    self.process.wait(timeout=10)
                except ProcessLookupError:
                    break
                except subprocess.TimeoutExpired:
                    continue
            self.process.wait()
        self._until_stopped.close()

    def __enter__(self) -> Server:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `grpo-lab serve`."""
    add = partial(add_option, parser)
    warned = "at another one prompts and token cross the network unencrypted"
    add("--model", "folder or hub name; the trainer's weights replace its own", required=True)
    add("--port", "port of the server", int, default=ServerOptions.port)
    add("--host", f"address to listen at, default {HOST}; {warned}", default=HOST)
    add("--token-file", f"file of the token, made if missing (default: ${tokens.VARIABLE}, else a new file)", Path)
    names = {"dest": "allow_hosts", "metavar": "NAME", "action": "append", "default": []}
    add("--allow-host", "a further host name that clients may use, without port", **names)
    add("--max-request-mib", "longest request, in MiB", int, default=ServerOptions.max_request_mib)
    add_engine_options(parser)
    add("--tensor-parallel-size", "GPUs of one copy of the model", int, default=1)
    add("--gpu-memory-utilization", "share of a GPU's memory (vLLM's default: 0.9)", float)
    add("--max-lora-rank", f"accept LoRA adapters (`rollout.sync: adapter`) up to this rank, one of {LORA_RANKS}", int)
    add("--start-timeout", "seconds until it must be up", float, default=START_TIMEOUT)
    add("--log", "file for vLLM's output instead of the terminal", Path)


def options_from(chosen: argparse.Namespace) -> ServerOptions:
    """Make `ServerOptions` from the parsed command line. Raises ValueError for a value that is not allowed."""
    given = {**vars(chosen), "allow_hosts": tuple(chosen.allow_hosts)}
    engine = engine_options_of(chosen)
    asked = {one.name: given[one.name] for one in fields(ServerOptions) if one.name in given}
    return ServerOptions(**asked, engine=engine)


def refuse_no_model(model: str) -> None:
    """Raise ValueError if there is no model to serve; vLLM would say so at the end of a long traceback. A folder must
    hold a config, weights and a tokenizer. A hub name must have a config."""
    folder = Path(model).expanduser()
    if folder.is_dir():
        for what, patterns in NEEDED.items():
            if not any(next(folder.glob(pattern), None) for pattern in patterns):
                raise ValueError(f"--model {model}: the folder holds no {what} ({' or '.join(patterns)})")
        return
    if looks_local(model):
        raise ValueError(f"--model {model}: no such folder; give a folder of a saved model, or a hub name 'owner/name'")
    from transformers.utils import cached_file

    try:
        cached_file(model, "config.json")
    except OSError as error:
        if str(error):
            why = str(error).splitlines()[0]
        else:
            why = type(error).__name__
        raise ValueError(f"--model {model}: no such folder, and no config.json of it on the hub ({why})") from error


def serve(options: ServerOptions, *, start_timeout: float = START_TIMEOUT, log: Path | None = None) -> int:
    """Serve until interrupted, and return 0. Raises ServerGone if the server is not up in time or ends by itself,
    ValueError if there is no model, no engine, or no free address."""
    refuse_no_model(options.model)
    if (why := why_not()) is not None:
        raise ValueError(f"`grpo-lab serve` starts an engine, and {why}")
    refuse_beyond_positions(options.engine.max_model_len, config_of(options.model), "--max-model-len")
    before = handle(signal.default_int_handler, signal.SIGTERM)  # as Ctrl-C: the server ends with this process
    if not options.is_local:
        print(f"grpo-lab: warning: {exposed(options)}", file=sys.stderr, flush=True)
    print(f"grpo-lab: starting vLLM for {options.model} at {options.base_url} …", flush=True)
    try:
        with Server(options, log=log, start_timeout=start_timeout) as server:
            assert server.token is not None
            token = server.token.file  # its file, never its value
            if token is None:
                where = f"the environment ({tokens.VARIABLE})"
            else:
                where = str(token)
            found = token in (None, tokens.default_file(options.base_url))  # by a trainer, without a setting
            print(
                f"grpo-lab: the server is up at {options.base_url}; its token is in {where}. Train with\n"
                f"  --use_vllm true --vllm_mode server --vllm_server_base_url {options.base_url}"
                + ("" if found else f" --rollout.server.token_file {where}"),
                flush=True,
            )
            how = server.wait()
    except KeyboardInterrupt:
        print("grpo-lab: the server was stopped", flush=True)
        return 0
    finally:
        put_back(before)
    raise ServerGone(f"the vLLM server {how}" + (f"; see {log}" if log else ""))


def exposed(options: ServerOptions) -> str:
    """Return the warning for a server that does not listen on this machine alone."""
    return (
        f"the server will listen at {options.host}:{options.port} and asks for a token, but nothing is encrypted: "
        "whoever reads along in that network has prompts and token, and with it the model. Only in a private network "
        "that you trust; else leave --host out and forward the port (ssh -L)"
    )
