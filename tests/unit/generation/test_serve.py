"""``grpo-lab serve``: what is refused before an engine starts, and the command line that it starts."""

from __future__ import annotations

import argparse
import itertools
import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import Qwen2Config

from grpo_lab.cli import main
from grpo_lab.engines.vllm import server
from grpo_lab.engines.vllm import token as server_token
from grpo_lab.engines.vllm.server import Server, ServerOptions, server_command
from ports import free_port


def chosen(*words: str) -> ServerOptions:
    parser = argparse.ArgumentParser()
    server.add_arguments(parser)
    return server.options_from(parser.parse_args(["--model", "some/model", *words]))


def test_options_reach_the_server_s_command_line() -> None:
    options = chosen(
        "--port", "8123", "--max-model-len", "512", "--kv-cache-gib", "0.5", "--seed", "7", "--dtype", "bfloat16"
    )
    command = server_command(options, on_cpu=True)
    said = dict(itertools.pairwise(command))
    assert said["--model"] == "some/model"
    assert said["--host"] == "127.0.0.1"
    assert (said["--port"], said["--max-model-len"], said["--seed"], said["--dtype"]) == (
        "8123",
        "512",
        "7",
        "bfloat16",
    )
    assert said["--kv-cache-memory-bytes"] == str(2**29)
    assert said["--logprobs-mode"] == "processed_logprobs"
    assert "--trust-remote-code" not in command


def test_a_gpu_server_has_nccl_and_our_worker() -> None:
    command = server_command(chosen("--tensor-parallel-size", "2", "--gpu-memory-utilization", "0.8"), on_cpu=False)
    said = dict(itertools.pairwise(command))
    assert json.loads(said["--weight-transfer-config"]) == {"backend": "nccl"}
    assert said["--worker-extension-cls"] == "grpo_lab.engines.vllm.worker.WeightLoading"
    assert (said["--tensor-parallel-size"], said["--gpu-memory-utilization"]) == ("2", "0.8")


def test_a_server_takes_adapters_where_it_is_told_to() -> None:
    command = server_command(chosen("--max-lora-rank", "16"), on_cpu=True)
    said = dict(itertools.pairwise(command))
    assert "--enable-lora" in command
    assert (said["--max-lora-rank"], said["--max-loras"]) == ("16", "2")
    assert "lora" not in " ".join(server_command(chosen(), on_cpu=True))
    for options, allowed in ((chosen("--max-lora-rank", "16"), "1"), (chosen(), "0")):
        environment = server.server_environment(options, "token", "/tmp")
        assert environment["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] == allowed
    with pytest.raises(ValueError, match=r"server max_lora_rank must be one of \(1, 8, 16.*got 12"):
        chosen("--max-lora-rank", "12")


@pytest.fixture
def a_model(tmp_path: Path) -> str:
    """A folder that looks like a saved model."""
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        (tmp_path / name).write_text("{}")
    return str(tmp_path)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--port", "80"], "1024"),
        (["--max-model-len", "-1"], "positive"),
        (["--tensor-parallel-size", "0"], "tensor_parallel_size"),
        (["--gpu-memory-utilization", "1.5"], "gpu_memory_utilization"),
        (["--host", "0.0.0.0"], "every network of this machine"),
        (["--host", "::ffff:0.0.0.0"], "every network of this machine"),
        (["--host", "::"], "every network of this machine"),
        (["--host", "node7"], "must be an address"),
    ],
)
def test_a_wrong_value_is_one_line(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--model", "x", *words]) == 2
    assert message in capsys.readouterr().err


def test_a_taken_port_is_found_before_the_model_is_loaded(a_model: str, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert main(["serve", "--model", a_model, "--port", str(port)]) == 2
        assert f"port {port}" in capsys.readouterr().err


def test_no_model_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """vLLM's own answer is a traceback of 60 lines, after ten seconds of imports."""
    for model, told in (("/nope", "no such folder"), ("a/b/c", "no such folder"), (str(tmp_path), "no config")):
        assert main(["serve", "--model", model]) == 2
        (line,) = capsys.readouterr().err.strip().splitlines()
        assert line.startswith(f"grpo-lab: error: --model {model}: ")
        assert told in line
    for name, told in (("config.json", "no weights"), ("model.safetensors", "no tokenizer")):
        (tmp_path / name).write_text("{}")
        assert main(["serve", "--model", str(tmp_path)]) == 2
        assert told in capsys.readouterr().err


def test_a_context_beyond_the_model_s_positions_is_one_line(a_model: str, capsys: pytest.CaptureFixture[str]) -> None:
    """vLLM's own answer is pydantic's, after a traceback."""
    from grpo_lab.engines.vllm.engine import refuse_beyond_positions

    config = {"model_type": "qwen2", "max_position_embeddings": 512}
    (Path(a_model) / "config.json").write_text(json.dumps(config))
    assert main(["serve", "--model", a_model, "--max-model-len", "513"]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert line.startswith("grpo-lab: error: --max-model-len is 513, and the model has 512 positions ")
    long = Qwen2Config(max_position_embeddings=512)
    refuse_beyond_positions(512, long, "x")
    refuse_beyond_positions(None, long, "x")
    with pytest.raises(ValueError, match=r"^x is 513, "):
        refuse_beyond_positions(513, long, "x")
    stretched = {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}
    refuse_beyond_positions(2048, Qwen2Config(max_position_embeddings=512, rope_parameters=stretched), "x")


def test_a_hub_name_that_cannot_be_reached_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert main(["serve", "--model", "nobody-here/no-such-model"]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert line.startswith("grpo-lab: error: --model nobody-here/no-such-model: ")


def test_an_address_beyond_this_machine_is_named_and_warned_of() -> None:
    """Between the machines of a cluster; the default stays 127.0.0.1."""
    assert chosen().host == "127.0.0.1"
    assert chosen().is_local
    options = chosen("--host", "10.0.0.3", "--port", "8001")
    assert not options.is_local
    assert options.base_url == "http://10.0.0.3:8001"
    assert chosen("--host", "fd00::7").base_url == "http://[fd00::7]:8000"
    said = dict(itertools.pairwise(server_command(options, on_cpu=False)))
    assert said["--host"] == "10.0.0.3"
    assert "10.0.0.3:8001 and asks for a token, but nothing is encrypted" in server.exposed(options)


def test_an_address_of_another_machine_is_refused_before_the_model_is_loaded(
    a_model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", "--model", a_model, "--host", "192.0.2.1"]) == 2
    assert "an address of this machine" in capsys.readouterr().err


@pytest.fixture
def loading(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> pytest.MonkeyPatch:
    """Servers that load for ever: a process that waits stands in for vLLM, and none of them listens."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.delenv(server_token.VARIABLE, raising=False)
    monkeypatch.setattr(server, "runs_on_cpu", lambda: True)
    monkeypatch.setattr(
        server, "server_command", lambda *_, **__: [sys.executable, "-c", "import signal; signal.pause()"]
    )
    monkeypatch.setattr(server, "wait_until_ready", lambda *_, **__: None)
    return monkeypatch


@pytest.mark.parametrize(("first", "second"), [("127.0.0.1", "127.0.0.1"), ("127.0.0.1", "::1"), ("::1", "127.0.0.1")])
def test_a_second_server_of_an_address_leaves_the_token_of_the_first(
    loading: pytest.MonkeyPatch, first: str, second: str
) -> None:
    """While the first loads nothing listens at its port. Addresses that share a token file count as one."""
    port = free_port()
    with Server(ServerOptions("a-model", port, host=first), log=None) as one:
        assert one.token is not None
        with pytest.raises(ValueError, match=f"port {port} at {second} .*another `grpo-lab serve`"):
            Server(ServerOptions("a-model", port, host=second), log=None).start()
        assert server_token.of_trainer(one.options.base_url, None) == one.token.value
    with Server(ServerOptions("a-model", port, host=second), log=None) as two:
        assert two.token is not None
        assert two.token.value != one.token.value


def test_the_port_is_held_while_the_model_is_loaded(loading: pytest.MonkeyPatch) -> None:
    """Against every process of this machine, and free again after the server."""
    port = free_port()
    with (
        Server(ServerOptions("a-model", port), log=None),
        socket.socket() as other,
        pytest.raises(OSError, match="use"),
    ):
        other.bind(("127.0.0.1", port))
    with socket.socket() as other:
        other.bind(("127.0.0.1", port))


def test_a_token_file_that_two_servers_name_is_of_both(loading: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The first to end leaves it for the other; of two that make it at once both get the one that stands there."""
    file = tmp_path / "token"
    one = Server(ServerOptions("a-model", free_port(), token_file=file), log=None)
    two = Server(ServerOptions("a-model", free_port(), token_file=file), log=None)
    with two, one:
        assert one.token is not None
        assert two.token is not None
        assert one.token.value == two.token.value
        two.stop()
        assert server_token.of_trainer(one.options.base_url, str(file)) == one.token.value
    made = server_token.of_server("http://127.0.0.1:8123", file)
    with pytest.raises(FileExistsError):  # another one wrote it since it was looked for
        server_token.write(file, "x" * 43, anew=True)
    assert server_token.read(file) == made.value


#: listens, takes one connection, and then listens no more: a request is under way that nobody will answer
DEAF = """
import signal, socket, sys
with socket.create_server(("127.0.0.1", int(sys.argv[1]))) as listening:
    taken, _ = listening.accept()
signal.pause()
"""


def test_a_server_that_listens_no_more_is_ended(loading: pytest.MonkeyPatch) -> None:
    """vLLM's, whose engine was killed in a generation: it would wait for the answer, and the trainer with it."""
    port = free_port()
    loading.setattr(server, "server_command", lambda *_, **__: [sys.executable, "-c", DEAF, str(port)])
    loading.setattr(server, "LISTENS_EVERY", 0.05)
    loading.setattr(server, "DEAF_FOR", 0.3)
    with Server(ServerOptions("a-model", port), log=None) as running, socket.socket() as request:
        while request.connect_ex(("127.0.0.1", port)):
            pass
        assert running.wait() == "was ended: its engine had died, and it took no connection for 0 s"
        assert request.recv(1) == b""


KILLED = """
import sys
from pathlib import Path
from grpo_lab.engines.vllm.token import of_server, own_folder
made = of_server("http://127.0.0.1:8124", None)
with own_folder("a-test-", sys.argv[1]) as folder:
    (folder / "socket").touch()
    print(made.file, folder, flush=True)
    sys.stdin.read()
"""


def test_what_a_killed_server_left_is_gone_at_the_next_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its token, its folder of sockets; a trainer's weights in shared memory are kept in the same way."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.delenv(server_token.VARIABLE, raising=False)
    monkeypatch.setattr(server_token, "LOCKED_WITHIN_S", -1.0)
    mine = tmp_path / "a-test-mine"  # the user's own
    mine.mkdir()
    command = [sys.executable, "-c", KILLED, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        token, folder = map(Path, other.stdout.readline().split())
        for alive in (True, False):
            made = server_token.of_server("http://127.0.0.1:8125", None)  # another port: its own token lies beside
            with server_token.own_folder("a-test-", tmp_path) as ours:
                assert ours.is_dir()
                assert (token.is_file(), (folder / "socket").is_file()) == (alive, alive)
            made.forget()
            assert not ours.exists()
            other.kill()
            other.wait()
    assert mine.is_dir()
