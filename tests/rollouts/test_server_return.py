"""A lost server is started again, or waited for: the command with real processes, the order of what follows with stand-ins.

With a real server: ``test_server_live.py``.
"""

from __future__ import annotations

import contextlib
import functools
import http.server
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from grpo_lab.engines.vllm.restart import Restart, words_of
from grpo_lab.engines.vllm.talk import ServerGone, TokenRefused, wait_until_ready
from grpo_lab.engines.weights.sync import WeightSyncError
from grpo_lab.trainer.generation import server
from grpo_lab.trainer.generation.server_return import LOSSES, ServerReturn
from grpo_lab.trainer.settings.rollout import ServerSettings
from ports import free_port


def python(code: str) -> str:
    return f"{sys.executable} -c '{code}'"


def gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def until_gone(pids: list[int]) -> None:
    """What they are at would take an hour."""
    deadline = time.monotonic() + 120
    while not all(map(gone, pids)):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_what_the_command_started_ends_with_it(tmp_path: Path) -> None:
    """Its children, too; without the variables that make a process a rank; its output kept, also of an earlier start."""
    code = 'import os, subprocess, time; p = subprocess.Popen(["sleep", "3600"]); print(p.pid, os.environ.get("RANK"), flush=True); time.sleep(3600)'
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RANK", "0")
        restart = Restart(f"{sys.executable} -c '{code}'", tmp_path / "run" / "log")
        pids = []
        for count in (1, 2):  # the second start ends the first
            process = restart.start()
            while len(lines := restart.log.read_text().splitlines()) < 2 * count:
                time.sleep(0.05)
            assert lines[-2].startswith("--- ")
            child, rank = lines[-1].split()
            assert rank == "None"
            pids += [process.pid, int(child)]
            assert os.getpgid(int(child)) == process.pid
    until_gone(pids[:2])
    restart.stop()
    until_gone(pids)


@contextlib.contextmanager
def answering(port: int, status: int = 200, said: str = "") -> Iterator[None]:
    class Healthy(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(said)))
            self.end_headers()
            self.wfile.write(said.encode())

        def log_message(self, *args: Any) -> None:
            pass

    running = http.server.ThreadingHTTPServer(("127.0.0.1", port), Healthy)
    threading.Thread(target=running.serve_forever, daemon=True).start()
    try:
        yield
    finally:
        running.shutdown()
        running.server_close()


def test_a_start_that_fails_is_tried_again_and_one_that_hands_over_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("grpo_lab.engines.vllm.restart.PAUSE", 0.05)
    port, counted = free_port(), tmp_path / "counted"
    wait = functools.partial(wait_until_ready, f"http://127.0.0.1:{port}")
    broken = Restart(python(f'open("{counted}", "a").write("x"); print("port in use"); exit(3)'), tmp_path / "log")
    with pytest.raises(ServerGone, match=r"status 3(.|\n)*port in use"):
        broken.until_ready(wait, 600)
    assert counted.read_text() == "x" * 5
    with pytest.raises(ServerGone, match="within 1 s"):
        Restart("true", tmp_path / "log").until_ready(wait, 1)
    started: list[int] = []

    def noting(limit: float, process: Any, **more: Any) -> None:
        started.append(process.pid)
        wait(limit, process=process, **more)

    with pytest.raises(ServerGone, match="within 1 s"):
        Restart("sleep 3600", tmp_path / "log").until_ready(noting, 1)
    until_gone(started[:1])  # it is not left to come up later
    with contextlib.ExitStack() as stack:
        threading.Timer(0.6, lambda: stack.enter_context(answering(port))).start()
        Restart("true", tmp_path / "log").until_ready(wait, 600)


def test_a_server_that_refuses_the_token_is_named_at_once() -> None:
    port = free_port()
    url, asked = f"http://127.0.0.1:{port}", [0]

    def token() -> str:
        asked[0] += 1
        return "wrong"

    begin = time.monotonic()
    with (
        answering(port, 401),
        pytest.raises(TokenRefused, match=r"another token(.|\n)*GRPO_LAB_SERVER_TOKEN.*token_file"),
    ):
        wait_until_ready(url, 600, token=token)
    assert time.monotonic() - begin < 300
    assert asked[0] >= 2  # read anew each time
    with answering(port, 401), pytest.raises(TokenRefused, match="this process has none"):
        wait_until_ready(url, 600)


@pytest.mark.parametrize(
    "said", ["", "<html>", "{}", "[1]", '{"vllm_config": {}}', '{"data": [{"id": "m"}], "vllm_config": {}}']
)
def test_another_program_at_the_port_is_named(said: str) -> None:
    """It answers everything with 200; before, the run ended with `KeyError: 'data'`, and after a loss without its checkpoint."""
    port = free_port()
    generation = SimpleNamespace(
        accelerator=SimpleNamespace(is_main_process=True, num_processes=1, device="cpu"),
        server_base_url=f"http://127.0.0.1:{port}", group_port=free_port(), server_timeout=60, max_completion_length=8,
    )  # fmt: skip
    with (
        answering(port, said=said),
        pytest.raises(ServerGone, match=rf"answers at http://127.0.0.1:{port} is no vLLM server"),
    ):
        server.connect(generation, ServerSettings(retries=1, backoff=0.1))


@pytest.mark.parametrize(
    ("command", "told"), [("", "is empty"), ("grpo-lab 'serve", "No closing quotation"), ("no-such-program serve", "there is no program"),
     ("env GRPO_LAB_SERVER_TOKEN=abc grpo-lab serve", "a recipe is no secret")]
)  # fmt: skip
def test_a_command_that_cannot_run_is_refused_with_the_settings(command: str, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        words_of(command)
    with pytest.raises(ValueError, match=told):
        ServerSettings(restart=command)
    assert ServerSettings().waits == 0
    assert ServerSettings(restart="true").waits == 600
    assert ServerSettings(return_timeout=7).waits == 7


class Story:
    """A run whose server does what `faults` say, one entry a call, and what was done, in order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, faults: dict[str, list[Any]], **settings: Any):
        self.done: list[str] = []
        self.faults = faults
        self.counted: list[float] = []
        client = SimpleNamespace(
            close_communicator=lambda: None,
            answers=lambda: self.step("answers"),
            wait=lambda limit, **_: self.step("wait"),
        )
        accelerator = SimpleNamespace(is_main_process=True, num_processes=1)
        generation = SimpleNamespace(accelerator=accelerator, vllm_client=client, waiting=contextlib.nullcontext)
        monkeypatch.setattr(server, "connect", lambda *_: self.step("connect"))
        monkeypatch.setattr(server, "sync", lambda _, stock: stock())
        monkeypatch.setattr(server, "generate", lambda _, stock: stock())
        self.run = ServerReturn(generation, ServerSettings(**settings), str(tmp_path))
        book = SimpleNamespace(add_alike=lambda name, total, count: self.counted.append(float(total)))
        proof = SimpleNamespace(prove=lambda prompts, strict: self.step(f"prove {prompts}"))
        self.run.of(
            SimpleNamespace(parts=SimpleNamespace(sync_proof=proof), recorder=SimpleNamespace(book=lambda: book))
        )

    def step(self, name: str) -> Any:
        self.done.append(name)
        waiting = self.faults.get(name.split()[0], [])
        outcome = waiting.pop(0) if waiting else None
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    def sync(self) -> None:
        self.run.sync(lambda: self.step("sync"))

    def generate(self) -> Any:
        return self.run.generate(lambda: self.step("generate"), lambda: self.step("sync"), [[5, 6]])


LOST = ServerGone("it went")
Tell = Callable[..., Story]


@pytest.fixture
def tell(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Tell:
    return functools.partial(Story, monkeypatch, tmp_path)


def test_without_the_settings_a_lost_server_ends_the_run(tell: Tell) -> None:
    for faults in ({"generate": [LOST]}, {"sync": [LOST]}):
        story = tell(faults)
        with pytest.raises(ServerGone, match=r"^it went$"):
            story.generate() if "generate" in faults else story.sync()
        assert len(story.done) == 1
    story = tell({})
    story.generate()
    assert story.counted == []  # and no metric


def test_nothing_is_taken_before_the_proof(tell: Tell) -> None:
    story = tell({"generate": [LOST, "completions"]}, return_timeout=5)
    assert story.generate() == "completions"
    assert story.done == ["generate", "wait", "connect", "sync", "prove [[5, 6]]", "generate"]
    story.generate()
    assert story.done[6:] == ["generate"]  # once
    assert story.counted == [1, 0]


def test_a_server_lost_in_a_sync_is_proven_before_the_next_generation(tell: Tell) -> None:
    story = tell({"sync": [LOST]}, return_timeout=5)
    story.sync()
    story.generate()
    assert story.done == ["sync", "wait", "connect", "sync", "prove [[5, 6]]", "generate"]


def test_a_proof_that_fails_is_no_return(tell: Tell) -> None:
    stale = [WeightSyncError("stale layer") for _ in range(LOSSES)]
    story = tell({"generate": [LOST], "prove": stale}, return_timeout=5)
    with pytest.raises(ServerGone, match="proof of its weights failed: stale layer"):
        story.generate()
    assert story.done.count("generate") == 1


def raised(failure: Exception) -> Any:
    raise failure


def test_a_server_lost_in_a_proof_is_had_back_and_proven(tell: Tell) -> None:
    """Between two generations (`rollout.verify_every`)."""
    story = tell({"prove": [LOST, "proven"]}, return_timeout=5)
    assert story.run.proof(lambda: story.step("prove"), lambda: story.step("sync")) == "proven"
    assert story.done == ["prove", "wait", "connect", "sync", "prove"]
    story.generate()
    assert story.done[5:] == ["generate"]
    assert story.counted == [1]
    with pytest.raises(ServerGone, match=r"^it went$"):
        tell({}).run.proof(lambda: raised(LOST), lambda: None)


def test_ranks_that_would_give_up_before_the_server_is_back_are_named(tmp_path: Path) -> None:
    several = SimpleNamespace(accelerator=SimpleNamespace(is_main_process=False, num_processes=2))
    with pytest.raises(ValueError, match=r"600 s \(`rollout.server.return_timeout`\).*300 s \(`ddp_timeout`\)"):
        ServerReturn(several, ServerSettings(restart="true"), str(tmp_path), patience=300)
    ServerReturn(several, ServerSettings(restart="true", return_timeout=200), str(tmp_path), patience=300)
    ServerReturn(several, ServerSettings(), str(tmp_path), patience=300)  # nobody waits
    alone = SimpleNamespace(accelerator=SimpleNamespace(is_main_process=False, num_processes=1))
    ServerReturn(alone, ServerSettings(restart="true"), str(tmp_path), patience=300)


@pytest.mark.parametrize(
    "failure",
    [
        ServerGone("not within 5 s"),
        ValueError("serves another model"),
        WeightSyncError("did not load"),
        PermissionError("log"),
    ],
)
def test_what_cannot_be_had_ends_the_run_as_a_lost_server(tell: Tell, failure: Exception) -> None:
    """`ServerGone` is what a checkpoint is kept for."""
    for place in ("wait", "connect"):
        story = tell({"generate": [LOST], place: [failure]}, return_timeout=5)
        with pytest.raises(ServerGone, match=f"it went. It did not come back: {failure}"):
            story.generate()


def test_a_batch_that_the_server_dies_of_is_not_tried_for_ever(tell: Tell) -> None:
    story = tell({"generate": [LOST] * 9}, return_timeout=5)
    with pytest.raises(ServerGone, match="That was loss 3"):
        story.generate()
    assert story.done.count("generate") == LOSSES


def test_a_server_that_answers_is_started_again_only_where_it_does_not_work(tell: Tell, tmp_path: Path) -> None:
    story = tell({"generate": [LOST], "answers": [True]}, restart="true")
    story.generate()
    assert story.done[1:4] == ["answers", "connect", "sync"]
    assert not (tmp_path / "server-restart.log").exists()
    story = tell({"generate": [LOST], "answers": [True], "connect": [ServerGone("it hangs")]}, restart="true")
    story.generate()
    assert story.done[1:6] == ["answers", "connect", "wait", "connect", "sync"]
    assert (tmp_path / "server-restart.log").read_text().count("--- ") == 1
    story = tell({"generate": [LOST], "answers": [False], "connect": [ServerGone("it hangs")]}, restart="true")
    with pytest.raises(ServerGone, match="it hangs"):
        story.generate()
    assert (tmp_path / "server-restart.log").read_text().count("--- ") == 2  # not a third time
