"""``rollout: {overlap: 1}`` with a real vLLM in a second process: proofs, versions, and a server that is killed while
it generates in the background."""

from __future__ import annotations

import os
import signal
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("vllm", reason="vLLM is not installed; `make setup-vllm` installs the CPU build")

from grpo_lab.engines.vllm.engine import EngineOptions
from grpo_lab.engines.vllm.server import Server, ServerOptions
from grpo_lab.engines.vllm.talk import ServerGone
from ports import free_port
from rollouts.checkpoints import servable
from rollouts.overlap_runs import Rows, Weights, log_probs
from rollouts.server_runs import build

pytestmark = [pytest.mark.vllm, pytest.mark.slow]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return servable(tmp_path_factory.mktemp("model"), tie_embeddings=True)


@pytest.fixture(scope="module")
def server(model: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    options = ServerOptions(model, free_port(), EngineOptions(kv_cache_gib=0.125, max_model_len=256))
    running = Server(options, log=tmp_path_factory.mktemp("server") / "log", start_timeout=300).start()
    yield running
    running.stop()


def overlapped(folder: Path, model: str, server: Server, **changes: Any) -> Any:
    rollout = {"overlap": 1, "verify_every": 1, "server": {"retries": 1, "backoff": 0.1, "request_timeout": 600}}
    return build(folder, model, server.options.base_url, rollout=rollout, optim="sgd", learning_rate=1.0, **changes)


def test_the_server_s_log_probs_are_of_the_policy_that_the_rows_name(
    server: Server, model: str, tmp_path: Path
) -> None:
    """Staleness read from the numbers: of all policies of the run the one of `policy_version` has the log-probs that
    the server reported, and no other."""
    trainer = overlapped(tmp_path, model, server)
    rows = Weights(trainer)
    trainer.train()
    assert rows.versions == [0, 0, 1, 2, 3]
    for version, step in zip(rows.versions, rows.steps, strict=True):
        fields = step["fields"]
        told = fields["sampling_per_token_logps"] * fields["completion_mask"]
        with torch.no_grad():
            gaps = [float((log_probs(policy, fields) - told).abs().mean()) for policy in rows.policies]
        assert gaps[version] < 1e-5
        assert min(gap for place, gap in enumerate(gaps) if place != version) > 10 * gaps[version]
    logged = [row for row in trainer.state.log_history if "loss" in row]
    assert max(row["rollout/sync_gap"] for row in logged) < 1e-4
    assert [row["rollout/staleness"] for row in logged] == [0, 1, 1, 1, 1]


def test_killed_in_the_background_and_gone_on_with(server: Server, model: str, tmp_path: Path) -> None:
    """The last test of this server: 0.1 s into the third batch, while the second trains. The run ends in its third
    step, with a checkpoint of the second; with the next server at that address it goes on from there, asks for the lost
    batch again, and every prompt of the five steps is trained on once."""
    settings = {"max_completion_length": 200, "save_strategy": "steps", "save_steps": 5}
    trainer = overlapped(tmp_path, model, server, **settings)
    client, rows = trainer.vllm_generation.vllm_client, Rows(trainer)
    begin, begun = client.begin, [0]

    def begin_and_kill(*args: Any, **arguments: Any) -> None:
        begin(*args, **arguments)
        begun[0] += 1
        if begun[0] == 2:
            assert server.process is not None
            threading.Timer(0.1, lambda: os.killpg(server.process.pid, signal.SIGKILL)).start()

    client.begin = begin_and_kill
    with pytest.raises(ServerGone, match=r"A checkpoint of step 2 was written"):
        trainer.train()
    checkpoint = tmp_path / "out" / "checkpoint-2"
    assert (checkpoint / "model.safetensors").is_file()

    server.stop()  # as `grpo-lab serve` ends with its server: the address is free again
    following = Server(server.options, log=tmp_path / "log", start_timeout=300).start()
    try:
        resumed = overlapped(tmp_path, model, following, **settings)
        others = Rows(resumed)
        resumed.train(resume_from_checkpoint=str(checkpoint))
    finally:
        following.stop()
    assert [step["step"] for step in (*rows.steps, *others.steps)] == [1, 2, 3, 4, 5]
    assert rows.versions + others.versions == [0, 0, 2, 2, 3]
    counted = Counter(prompt for step in (*rows.steps, *others.steps) for prompt in step["prompts"])
    assert len(counted) == 10
    assert set(counted.values()) == {4}
    gaps = [row["rollout/sync_gap"] for row in resumed.state.log_history if "rollout/sync_gap" in row]
    assert max(gaps) < 1e-4
