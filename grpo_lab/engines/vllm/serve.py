"""`grpo-lab serve`: a vLLM server in the foreground, until it is interrupted or ends by itself.

Everything a trainer needs of it is on: weight transfer, log-probs of the distribution sampled from. Whoever may ask it
can replace the model: so every request needs a token, and the address is one that only this machine reaches; `--host`
names another one.
"""

from __future__ import annotations

import argparse
import signal
import socket
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

from grpo_lab.engines.vllm.engine import ENGINE_DTYPES, EngineOptions
from grpo_lab.engines.vllm.server import HOST, Server, ServerOptions
from grpo_lab.engines.vllm.talk import ServerGone
from grpo_lab.engines.vllm.token import VARIABLE, Token, default_file
from grpo_lab.io import looks_local
from grpo_lab.signals import handle

#: what a folder must hold to be served → files of which it needs one
NEEDED = {
    "config": ("config.json",),
    "weights": ("*.safetensors", "*.bin", "*.gguf"),
    "tokenizer": ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "tekken.json", "vocab.json"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", required=True, help="folder or hub name; the trainer's weights replace its own")
    parser.add_argument("--port", type=int, default=8000, help="port of the server")
    parser.add_argument(
        "--host",
        default=HOST,
        help=f"address to listen at, default {HOST}; at another one prompts and token cross the network unencrypted",
    )
    parser.add_argument(
        "--token-file", type=Path, help=f"the token's file, made if need be (default: ${VARIABLE}, else made)"
    )
    parser.add_argument(
        "--allow-host",
        dest="allow_hosts",
        metavar="NAME",
        action="append",
        default=[],
        help="a further name that it is asked by, without port",
    )
    parser.add_argument("--max-request-mib", type=int, default=256, help="longest request, in MiB")
    parser.add_argument(
        "--dtype", default="auto", choices=ENGINE_DTYPES, help="auto: float32 on a CPU, else vLLM's rule"
    )
    parser.add_argument("--max-model-len", type=int, help="prompt + completion, in tokens")
    parser.add_argument("--kv-cache-gib", type=float, help="KV cache in GiB (default on a CPU: 1)")
    parser.add_argument("--block-size", type=int, help="tokens of a KV page (default on a CPU: 32)")
    parser.add_argument(
        "--no-prefix-caching",
        dest="prefix_caching",
        action="store_false",
        help="compute a prompt anew for each completion",
    )
    parser.add_argument("--enforce-eager", action="store_true", default=None, help="no compilation (default on a CPU)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the sampler")
    parser.add_argument("--tensor-parallel-size", type=int, default=1, help="GPUs of one copy of the model")
    parser.add_argument("--gpu-memory-utilization", type=float, help="share of a GPU's memory (vLLM's default: 0.9)")
    parser.add_argument("--start-timeout", type=float, default=600.0, help="seconds until it must be up")
    parser.add_argument("--log", type=Path, help="file for vLLM's output instead of the terminal")


def options_from(chosen: argparse.Namespace) -> ServerOptions:
    """Parsed command line -> what to serve. ValueError for a value that is not allowed."""
    given = {**vars(chosen), "allow_hosts": tuple(chosen.allow_hosts)}
    engine = EngineOptions(**{one.name: given[one.name] for one in fields(EngineOptions)})
    asked = {one.name: given[one.name] for one in fields(ServerOptions) if one.name in given}
    return ServerOptions(**asked, engine=engine)


def refuse_taken_port(port: int, host: str = HOST) -> None:
    """ValueError where something listens already: vLLM would find out only after loading the model."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise ValueError(
                f"port {port} at {host} cannot be used ({error.strerror}): choose another --port, or an address of "
                "this machine"
            ) from error


def refuse_no_model(model: str) -> None:
    """ValueError where there is no model to serve; vLLM would say so at the end of a long traceback.

    A folder must hold a config, weights and a tokenizer; a hub name is asked for its config.
    """
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
        why = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ValueError(f"--model {model}: no such folder, and no config.json of it on the hub ({why})") from error


def serve(options: ServerOptions, *, start_timeout: float = 600.0, log: Path | None = None) -> int:
    """Serve until interrupted (0) or until the server ends by itself (1). ServerGone where it does not come up in
    time."""
    refuse_no_model(options.model)
    refuse_taken_port(options.port, options.host)
    handle(interrupt, signal.SIGTERM)
    if not options.is_local:
        print(f"grpo-lab: warning: {exposed(options)}", file=sys.stderr, flush=True)
    print(f"grpo-lab: starting vLLM for {options.model} at {options.base_url} …", flush=True)
    try:
        with Server(options, log=log, start_timeout=start_timeout) as server:
            assert server.process is not None
            assert server.token is not None
            print(ready(options, server.token), flush=True)
            status = server.process.wait()
    except KeyboardInterrupt:
        print("grpo-lab: the server was stopped", flush=True)
        return 0
    raise ServerGone(f"the vLLM server ended by itself with status {status}" + (f"; see {log}" if log else ""))


def interrupt(number: int, frame: Any) -> None:
    """SIGTERM as Ctrl-C, so that the server ends with this process."""
    raise KeyboardInterrupt


def exposed(options: ServerOptions) -> str:
    return (
        f"the server will listen at {options.host}:{options.port} and asks for a token, but nothing is encrypted: "
        "whoever reads "
        "along in that network has prompts and token, and with it the model. Only in a private network that you "
        "trust; else "
        "leave --host out and forward the port (ssh -L)"
    )


def ready(options: ServerOptions, token: Token) -> str:
    """What to tell the user once the server is up; where the token is, never the token."""
    where = f"the environment ({VARIABLE})" if token.file is None else str(token.file)
    found = token.file in (None, default_file(options.base_url))
    return (
        f"grpo-lab: the server is up at {options.base_url}; its token is in {where}. Train with\n"
        f"  --use_vllm true --vllm_mode server --vllm_server_base_url {options.base_url}"
        + ("" if found else f" --rollout.server.token_file {where}")
    )
