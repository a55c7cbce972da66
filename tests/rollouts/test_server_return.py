"""A lost server is waited for, and what follows in order: with stand-ins.

With a real server: ``test_server_live.py``.
"""

from __future__ import annotations

import contextlib
import functools
import http.server
import threading
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import pytest

from grpo_lab.engines.vllm.talk import ServerGone, TokenRefused, wait_until_ready
from grpo_lab.engines.weights.sync import WeightSyncError
from grpo_lab.settings import read
from grpo_lab.trainer.generation import all_ranks
from grpo_lab.trainer.generation import server_across_ranks as server
from grpo_lab.trainer.generation.all_ranks import raise_together
from grpo_lab.trainer.generation.prompt_fit import PromptTooLong
from grpo_lab.trainer.generation.server_across_ranks import LOSSES, ServerReturn, checkpoint_if_server_gone
from grpo_lab.trainer.generation.trl_engine import EngineHooks
from grpo_lab.trainer.settings.parse import ServerSettings
from ports import free_port


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


@pytest.mark.not_fast
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


@pytest.mark.not_fast
@pytest.mark.skipif(find_spec("vllm") is None, reason="TRL's client of a server asks for vLLM")
@pytest.mark.parametrize(
    "said", ["", "<html>", "{}", "[1]", '{"vllm_config": {}}', '{"data": [{"id": "m"}], "vllm_config": {}}']
)
def test_another_program_at_the_port_is_named(said: str) -> None:
    """It answers everything with 200; before, the run ended with `KeyError: 'data'`, and after a loss without its
    checkpoint."""
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


def test_a_command_that_starts_the_server_is_refused_with_what_takes_its_place() -> None:
    with pytest.raises(
        ValueError, match=r"`rollout.server.restart` is 'grpo-lab serve'.*`return_timeout` waits for it"
    ):
        read(ServerSettings, {"restart": "grpo-lab serve"}, "rollout.server")


class Story:
    """A run whose server does what `faults` say, one entry a call, and what was done, in order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, faults: dict[str, list[Any]], **settings: Any):
        self.done: list[str] = []
        self.faults = faults
        self.counted: list[float] = []
        client = SimpleNamespace(wait=lambda limit: self.step("wait"))
        accelerator = SimpleNamespace(is_main_process=True, num_processes=1)
        hooks = EngineHooks(prove=lambda prompts: self.step(f"prove {prompts}"))
        generation = SimpleNamespace(accelerator=accelerator, vllm_client=client, hooks=hooks)
        monkeypatch.setattr(server, "connect", lambda *_, wait: self.step("connect"))
        monkeypatch.setattr(server, "sync", lambda _, stock: stock())
        monkeypatch.setattr(server, "generate", lambda _, stock: stock())
        self.run = ServerReturn(generation, ServerSettings(**settings))
        self.book: Any = SimpleNamespace(add_alike=lambda name, total, count: self.counted.append(float(total)))

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
        """A generation batch of one generation."""
        answer = self.run.generate(lambda: self.step("generate"), lambda: self.step("sync"), [[5, 6]])
        self.run.record(self.book)
        return answer


LOST = ServerGone("it went")
Tell = Callable[..., Story]


@pytest.fixture
def tell(monkeypatch: pytest.MonkeyPatch) -> Tell:
    return functools.partial(Story, monkeypatch)


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


@pytest.mark.parametrize(
    ("faults", "done"),
    [
        ({"connect": [ServerGone("refused")]}, ["wait", "connect", "wait", "connect", "sync"]),
        ({"sync": [ServerGone("reset")]}, ["wait", "connect", "sync", "wait", "connect", "sync"]),
        ({"wait": [TokenRefused("401")]}, ["wait", "wait", "connect", "sync"]),
    ],
)
def test_one_that_answers_while_it_ends_is_waited_out(
    tell: Tell, faults: dict[str, list[Any]], done: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Asked to end it may say that it is healthy, without its token's file, and then be gone."""
    monkeypatch.setattr(server, "LOOK_AGAIN", 0.0)
    story = tell({"generate": [LOST, "completions"], **faults}, return_timeout=5)
    assert story.generate() == "completions"
    assert story.done == ["generate", *done, "prove [[5, 6]]", "generate"]
    assert story.counted == [1]


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


def test_a_server_lost_again_in_its_proof_is_had_back_again(tell: Tell) -> None:
    story = tell({"prove": [LOST, LOST, "proven"]}, return_timeout=5)
    assert story.run.proof(lambda: story.step("prove"), lambda: story.step("sync")) == "proven"
    assert story.done == ["prove", *("wait", "connect", "sync", "prove") * 2]
    story = tell({"prove": [LOST] * 9}, return_timeout=5)
    with pytest.raises(ServerGone, match="That was loss 3 of the server in one proof"):
        story.run.proof(lambda: story.step("prove"), lambda: story.step("sync"))
    assert story.done.count("prove") == LOSSES


def test_ranks_that_would_give_up_before_the_server_is_back_are_named() -> None:
    several = SimpleNamespace(accelerator=SimpleNamespace(is_main_process=False, num_processes=2))
    with pytest.raises(ValueError, match=r"600 s \(`rollout.server.return_timeout`\).*300 s \(`ddp_timeout`\)"):
        ServerReturn(several, ServerSettings(return_timeout=600), patience=300)
    ServerReturn(several, ServerSettings(return_timeout=200), patience=300)
    ServerReturn(several, ServerSettings(), patience=300)  # nobody waits
    alone = SimpleNamespace(accelerator=SimpleNamespace(is_main_process=False, num_processes=1))
    ServerReturn(alone, ServerSettings(return_timeout=600), patience=300)


@pytest.mark.parametrize(
    "failure",
    [
        ServerGone("not within 5 s"),
        ValueError("serves another model"),
        WeightSyncError("did not load"),
        PermissionError("token"),
    ],
)
def test_what_cannot_be_had_ends_the_run_as_a_lost_server(
    tell: Tell, failure: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`ServerGone` is what a checkpoint is kept for."""
    monkeypatch.setattr(server, "LOOK_AGAIN", 0.0)
    for place in ("wait", "connect"):
        story = tell({"generate": [LOST], place: [failure] * 10**5}, return_timeout=0.01)
        with pytest.raises(ServerGone, match=f"it went. It did not come back: {failure}"):
            story.generate()


def test_a_batch_that_the_server_dies_of_is_not_tried_for_ever(tell: Tell) -> None:
    story = tell({"generate": [LOST] * 9}, return_timeout=5)
    with pytest.raises(ServerGone, match="That was loss 3"):
        story.generate()
    assert story.done.count("generate") == LOSSES


def main_has(monkeypatch: pytest.MonkeyPatch, news: Any) -> None:
    """Two ranks, of which the main one broadcasts ``news``."""
    monkeypatch.setattr(all_ranks, "from_main", lambda accelerator, value: news)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_fault_of_one_rank_alone_starts_no_checkpoint_which_takes_all(
    ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prompt of streamed data that is too long on one rank: the others never come to the checkpoint. One of all
    ranks is kept a checkpoint for, also where it came of another, and so is any of a run of one process."""
    monkeypatch.setattr(server, "save_for_resume", lambda *_: "A checkpoint was written")
    trainer: Any = SimpleNamespace(accelerator=SimpleNamespace(num_processes=ranks), vllm_mode="server")
    stop: Any = SimpleNamespace(broke_off_a_wait=None)

    def ends_with(call: Callable[[], Any]) -> str:
        with pytest.raises((ServerGone, PromptTooLong)) as caught, checkpoint_if_server_gone(trainer, stop):
            call()
        return str(caught.value)

    def of_another() -> None:
        try:
            raise_together(trainer.accelerator, None)
        except ServerGone as lost:
            raise ServerGone("loss 3") from lost

    kept = ". A checkpoint was written"
    assert ends_with(lambda: raised(PromptTooLong("it is long"))) == "it is long" + (kept if ranks == 1 else "")
    main_has(monkeypatch, ("ServerGone", "it went"))
    for failure in (None, ServerGone("it went")):  # what the others learn, and the main process's own
        assert ends_with(functools.partial(raise_together, trainer.accelerator, failure)) == "it went" + kept
    assert ends_with(of_another) == "loss 3" + kept
    main_has(monkeypatch, None)
    mine = ServerGone("this rank's sync")
    assert ends_with(lambda: raise_together(trainer.accelerator, mine)) == str(mine) + (kept if ranks == 1 else "")
