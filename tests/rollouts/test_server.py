"""Weights through shared memory and requests that end: against small local servers here, and a real vLLM one below."""

from __future__ import annotations

import contextlib
import functools
import http.server
import json
import math
import os
import re
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from torch import nn

from grpo_lab.engines.forward import forward_logprobs
from grpo_lab.engines.vllm.server import WORKER_EXTENSION, Server, ServerOptions
from grpo_lab.engines.vllm.talk import ServerGone, bound_session, post_json, wait_until_ready
from grpo_lab.engines.vllm.token import Bearer, of_trainer, own_folder
from grpo_lab.engines.vllm.worker import (
    SHARED_MEMORY,
    WeightCourier,
    WeightLoading,
    read_shards,
    trusted_folder,
    write_shards,
)
from grpo_lab.engines.weights.proof import sync_gap, tolerance_for
from grpo_lab.engines.weights.sync import WeightSyncError, fit
from grpo_lab.finite import NumbersError
from grpo_lab.trainer.generation.trl_engine import send
from grpo_lab.trainer.settings.parse import ServerSettings
from ports import free_port

REQUESTS_REASON = "requests comes with vLLM: run `make setup-vllm`"


def session(url: str) -> Any:
    """`requests` with the token of a server of the tests."""
    import requests

    made = requests.Session()
    token = of_trainer(url, None)
    assert token is not None
    made.auth = Bearer(token)
    return bound_session(made, timeout=60)


@pytest.mark.parametrize("shard_bytes", [1, 40, 10**9])
def test_weights_come_back_bit_for_bit(tmp_path: Path, shard_bytes: int) -> None:
    torch.manual_seed(0)
    tensors = {"a": torch.randn(3, 4), "b": torch.randn(4, 3).T, "c": torch.randn(5).bfloat16(), "d": torch.tensor(1.5)}
    tensors["e"] = tensors["a"]  # shared storage, which safetensors alone would refuse
    assert write_shards(tensors.items(), tmp_path, shard_bytes) == 5
    back = dict(read_shards(tmp_path))
    assert list(back) == sorted(tensors) or set(back) == set(tensors)
    for name, tensor in tensors.items():
        assert back[name].dtype == tensor.dtype
        assert torch.equal(back[name], tensor)


@pytest.mark.parametrize(
    "name", ["/tmp/grpo-lab-weights-x", "/dev/shm/other", "/dev/shm/grpo-lab-weights-x/../../etc", "/dev/shm"]
)
def test_weights_are_taken_from_our_own_folders_only(name: str) -> None:
    with pytest.raises(ValueError, match="are taken from"):
        trusted_folder(name)


NOT_FIT = {
    "is of torch.int64": torch.ones(2, dtype=torch.int64),
    "holds NaN or infinity": torch.tensor([1.0, math.nan]),
    "holds 1e\\+20, and the engine's torch.float16 ends at 6.55e\\+04": torch.tensor([1.0, -1e20]),
}


@pytest.mark.parametrize("told", NOT_FIT)
def test_a_server_refuses_what_no_engine_should_hold_before_it_loads_anything(told: str) -> None:
    """Whole numbers were cut to, NaN was taken; of the shards before it nothing is loaded either."""

    class Worker(WeightLoading):
        model_runner = SimpleNamespace(get_model=lambda: nn.Linear(1, 1).half())  # cannot load
        grpo_lab_version = "before"

    worker = Worker()
    tensors = [("a", torch.ones(2)), ("b", NOT_FIT[told]), ("c", torch.ones(2))]
    with own_folder("grpo-lab-weights-", SHARED_MEMORY) as folder:
        write_shards(tensors, folder, shard_bytes=1)
        answer = worker.grpo_lab_load_weights(str(folder), "after")
    assert re.match(f"b {told}; weights must be floating-point numbers", answer["refused"])
    assert worker.grpo_lab_version == "before"
    workers = Workers(lambda method, arguments: answer)
    with pytest.raises(WeightSyncError, match=f"refused the weights, and loaded none of them: b {told}"):
        WeightCourier(workers).push(tensors)


def test_what_an_engine_may_hold_is_not_refused() -> None:
    largest = torch.finfo(torch.bfloat16).max
    tensors = [
        ("empty", torch.zeros(0)),
        ("eight bits", torch.ones(2).to(torch.float8_e4m3fn)),
        ("largest", torch.tensor([-largest, largest], dtype=torch.float64)),
    ]
    assert [name for name, _ in fit(tensors, torch.bfloat16)] == ["empty", "eight bits", "largest"]


@pytest.mark.parametrize("mode", ["server", "colocate"])
def test_a_trainer_says_what_of_its_weights_is_not_finite_and_sends_nothing(mode: str) -> None:
    """Whichever way they would go, adapters and NCCL too."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    with torch.no_grad():
        model[1].bias[0] = math.inf
    generation = SimpleNamespace(model=model, accelerator=Accelerator(cpu=True), mode=mode, adapters=None)
    with pytest.raises(NumbersError, match=r"is to sample with hold NaN or infinities, in 1 of 4 tensors \(1.bias"):
        send(generation, lambda: pytest.fail("they were sent"))


class Workers:
    """Stands for a server of two workers; each answers an RPC with `answer(method, arguments)`."""

    def __init__(self, answer: Callable[[str, Mapping[str, str]], Any], *, cache_dropped: bool = True) -> None:
        self.answer, self.cache_dropped = answer, cache_dropped
        self.folders: list[Path] = []

    def __call__(self, path: str, body: Mapping[str, Any]) -> Any:
        if path == "/reset_prefix_cache":
            return {"success": self.cache_dropped}
        if "folder" in body["kwargs"]:
            self.folders.append(Path(body["kwargs"]["folder"]))
        return {"results": [self.answer(body["method"], body["kwargs"])] * 2}


latest: dict[str, str] = {}


def loaded(method: str, arguments: Mapping[str, str]) -> dict[str, Any]:
    if method == "grpo_lab_weights_version":
        return {"version": latest["version"]}
    latest.update(version=arguments["version"])
    return {"tensors": len(dict(read_shards(Path(arguments["folder"])))), "version": arguments["version"]}


def test_an_adapter_is_not_sent_to_a_server_whose_base_a_run_has_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was found by the proof of the first sync, after the server had completed a batch."""
    pytest.importorskip("requests", reason=REQUESTS_REASON)
    from grpo_lab.trainer.generation.server_client import LabVLLMClient

    class Worker(WeightLoading):
        model_runner = SimpleNamespace(get_model=lambda: nn.Linear(1, 1))
        vllm_config = None

    inside = SimpleNamespace(set_current_vllm_config=contextlib.nullcontext)  # of vLLM, which only a server has
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(config=inside))
    monkeypatch.setitem(sys.modules, "vllm.config", inside)
    monkeypatch.setattr("grpo_lab.engines.vllm.worker.load_into_runner", lambda runner, tensors: len([*tensors]))
    worker = Worker()
    workers = Workers(lambda method, arguments: getattr(worker, method)(**arguments))
    adapters = object.__new__(LabVLLMClient)  # what its constructor asks of a server
    adapters.base_url, adapters.settings, adapters.courier = (
        "http://127.0.0.1:1",
        ServerSettings(),
        WeightCourier(workers),
    )
    taken = {"max_lora_rank": 8, "max_loras": 2}
    adapters.info = {
        "lora_config": taken,
        "parallel_config": {"worker_extension_cls": WORKER_EXTENSION},
        "device_config": {"device": "cpu"},
    }
    adapters.open_way(torch.device("cpu"), lora_rank=8)
    WeightCourier(workers).push([("a", torch.ones(2))])  # another run's
    with pytest.raises(ValueError, match=r"http://127.0.0.1:1 holds weights that another run sent.*start it again"):
        adapters.open_way(torch.device("cpu"), lora_rank=8)


def test_push_leaves_nothing_behind_and_knows_its_version() -> None:
    workers = Workers(loaded)
    courier = WeightCourier(workers)
    assert not courier.is_current()
    reports = courier.push([("a", torch.ones(2)), ("b", torch.ones(3))])
    assert [report["tensors"] for report in reports] == [2, 2]
    assert courier.is_current()
    other = WeightCourier(workers)  # another run at the same server
    other.push([("a", torch.ones(2))])
    assert other.is_current()
    assert not courier.is_current()
    assert workers.folders
    assert not any(folder.exists() for folder in workers.folders)


@pytest.mark.parametrize(
    ("workers", "message"),
    [
        (
            Workers(lambda method, arguments: {"error": "ValueError: no"}),
            "failed at grpo_lab_load_weights: ValueError: no",
        ),
        (Workers(lambda method, arguments: {"tensors": 1}), "did not load the 2 tensors"),
        (Workers(lambda method, arguments: "None"), "worker-extension-cls"),
        (Workers(loaded, cache_dropped=False), "cached prompts"),
    ],
)
def test_push_that_did_not_arrive_is_an_error(workers: Workers, message: str) -> None:
    with pytest.raises(WeightSyncError, match=message):
        WeightCourier(workers).push([("a", torch.ones(2)), ("b", torch.ones(3))])
    assert not any(folder.exists() for folder in workers.folders)


def test_what_a_killed_run_left_in_shared_memory_goes_and_a_living_runs_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """A trainer killed −9 in a sync: before, a copy of its model stayed in the machine's memory for ever."""
    prefix = f"grpo-lab-weights-{uuid.uuid4().hex}-"  # other runs of this machine are left alone
    monkeypatch.setattr("grpo_lab.engines.vllm.worker.FOLDER_PREFIX", prefix)
    killed = os.fork()
    if killed == 0:
        try:
            WeightCourier(lambda *_: os.kill(os.getpid(), signal.SIGKILL)).push([("a", torch.ones(2))])
        finally:
            os._exit(1)
    os.waitpid(killed, 0)
    (left,) = SHARED_MEMORY.glob(f"{prefix}*")
    with own_folder(prefix, SHARED_MEMORY) as living:
        assert (left / "shard-00000.safetensors").is_file()  # it may be about to get its lock
        monkeypatch.setattr("grpo_lab.engines.vllm.token.LOCKED_WITHIN_S", -1)
        WeightCourier(Workers(loaded)).push([("a", torch.ones(2))])
        assert list(SHARED_MEMORY.glob(f"{prefix}*")) == [living]
    assert not living.exists()


class Flaky(http.server.BaseHTTPRequestHandler):
    """Answers the first `failures` POSTs with 503, then with JSON; a path "/slow" hangs."""

    failures = 0
    seen = 0

    def do_POST(self) -> None:
        type(self).seen += 1
        if self.path == "/slow":
            time.sleep(600)
        body = json.dumps({"ok": True}).encode()
        self.send_response(503 if self.seen <= self.failures else 200)
        self.send_header("Content-Length", str(len(body)))
        with contextlib.suppress(BrokenPipeError):  # nobody waits any more
            self.end_headers()
            self.wfile.write(body)

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()

    def log_message(self, *args: Any) -> None:
        pass


@pytest.fixture
def flaky() -> Iterator[tuple[type[Flaky], str]]:
    handler = type("Handler", (Flaky,), {"failures": 0, "seen": 0})
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield handler, f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


@pytest.mark.not_fast
def test_failed_request_is_repeated(flaky: tuple[type[Flaky], str]) -> None:
    requests = pytest.importorskip("requests", reason=REQUESTS_REASON)

    handler, url = flaky
    handler.failures = 2
    session = bound_session(requests.Session(), timeout=60, retries=2, backoff=0.01)
    assert post_json(session, url, "/x", {}) == {"ok": True}
    assert handler.seen == 3


@pytest.mark.not_fast
def test_server_that_keeps_failing_or_hangs_ends_the_call_in_time(flaky: tuple[type[Flaky], str]) -> None:
    requests = pytest.importorskip("requests", reason=REQUESTS_REASON)

    handler, url = flaky
    hurried, patient = (bound_session(requests.Session(), timeout=t, retries=3, backoff=0.01) for t in (0.3, 600))
    start = time.monotonic()
    with pytest.raises(ServerGone, match=r"answers /health .limit: `rollout\.server\.request_timeout`"):
        post_json(hurried, url, "/slow", {})
    assert handler.seen == 1  # the same work would run into the limit again
    handler.failures = 100
    with pytest.raises(ServerGone, match="answered 503"):
        post_json(patient, url, "/x", {})
    assert time.monotonic() - start < 300


@pytest.mark.not_fast
def test_server_that_is_gone_or_never_up_says_so_in_time() -> None:
    requests = pytest.importorskip("requests", reason=REQUESTS_REASON)

    url = f"http://127.0.0.1:{free_port()}"
    start = time.monotonic()
    with pytest.raises(ServerGone, match="does not answer /health"):
        post_json(bound_session(requests.Session(), timeout=60, retries=1, backoff=0.01), url, "/x", {})
    with pytest.raises(ServerGone, match=r"within 1 s .setting vllm_server_timeout"):
        wait_until_ready(url, 1.0)
    assert time.monotonic() - start < 300


@pytest.mark.not_fast
def test_process_that_ends_before_it_is_up_is_not_waited_for(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("out of memory\n")
    process = subprocess.Popen([sys.executable, "-c", "raise SystemExit(3)"])
    with pytest.raises(ServerGone, match=r"status 3(.|\n)*out of memory"):
        wait_until_ready(f"http://127.0.0.1:{free_port()}", 600.0, process=process, log=log)


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.vllm
def test_real_server_takes_weights_and_answers_with_the_trainer_s_policy(
    vllm_or_skip: None, checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM

    from grpo_lab.engines.vllm.engine import EngineOptions

    folder = checkpoint("qwen2-tied")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    options = ServerOptions(str(folder), free_port(), EngineOptions(kv_cache_gib=0.125, max_model_len=128))
    with Server(options, log=tmp_path / "server.log", start_timeout=500) as server:
        post = functools.partial(post_json, session(options.base_url), options.base_url)
        courier = WeightCourier(post)

        def gap() -> float:
            body = {"model": str(folder), "prompt": [[5, 6, 7], [9, 10]], "n": 4, "max_tokens": 16, "logprobs": 0}
            answer = post("/v1/completions", {**body, "return_token_ids": True, "return_tokens_as_token_ids": True})
            choices = answer["choices"]
            prompts = [choice["prompt_token_ids"] for choice in choices]
            ids = [choice["token_ids"] for choice in choices]
            theirs = [choice["logprobs"]["token_logprobs"] for choice in choices]
            return sync_gap(theirs, forward_logprobs(model, prompts, ids)).mean

        tolerance = tolerance_for(torch.float32)
        assert gap() < tolerance
        for step in range(4):
            torch.manual_seed(step)
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(0.01 * torch.randn_like(parameter))
            assert gap() > tolerance
            assert courier.differing(model.named_parameters())
            assert not courier.is_current() or step > 0
            courier.push(model.named_parameters())
            assert courier.is_current()
            assert gap() < tolerance
            assert courier.differing(model.named_parameters()) == []

        rest = [(name, p) for name, p in model.named_parameters() if "layers.1" not in name]
        with pytest.raises(WeightSyncError, match="kept their old values"):
            courier.push(rest)
        assert not courier.is_current()
        courier.push(model.named_parameters())
        assert gap() < tolerance

        assert server.process is not None
        server.process.kill()
        with pytest.raises(ServerGone, match="does not answer /health"):
            gap()
