"""``rollout.turns`` against a real `grpo-lab serve`: greedy trajectories are those of TRL's loop; then the server is
killed in the middle of trajectories, and the training ends with a checkpoint. One server for the file."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("vllm", reason="vLLM is not installed; `make setup-vllm` installs the CPU build")

from transformers import AutoTokenizer
from trl.trainer import grpo_trainer

from distributed.launch import run_worker
from grpo_lab.engines.vllm.talk import ServerGone
from grpo_lab.trainer.generation.turn_engines import TurnClient
from parity.conftest import TOOL_TEMPLATE
from rollouts.served import Served, children, served_from
from rollouts.trajectory_runs import build, parsed, same_rows

pytestmark = [pytest.mark.vllm, pytest.mark.slow]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("trajectories")
    sizes: dict[str, Any] = {"max_positions": 1024, "initializer_range": 0.2}
    with served_from(folder, "--max-model-len", "900", ends=range(100, 200), **sizes) as running:
        tokenizer = AutoTokenizer.from_pretrained(running.model)
        tokenizer.chat_template = TOOL_TEMPLATE
        tokenizer.save_pretrained(running.model)
        yield running


@pytest.fixture(autouse=True)
def calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grpo_trainer, "parse_response", parsed)


def settings(served: Served, **changes: Any) -> dict[str, Any]:
    url = {"vllm_mode": "server", "vllm_server_base_url": served.url}
    return {**url, "max_tool_calling_iterations": 3, **changes}


def test_greedy_trajectories_are_those_of_trls_loop(served: Served, tmp_path: Path) -> None:
    stock = build(Path(served.model), tmp_path / "stock", None, {}, **settings(served))
    stock.train()
    ours = build(Path(served.model), tmp_path / "ours", {}, {}, **settings(served))
    ours.train()
    same_rows(ours.rows, stock.rows)
    weights = stock.model.state_dict()
    assert all(torch.equal(value, weights[name]) for name, value in ours.model.state_dict().items())
    turns = {sum(message["role"] == "tool" for message in row["messages"]) for row in ours.rows}
    assert {0, 3} <= turns
    assert ours.generated_tokens == sum(sum(row["mask"]) for row in ours.rows)


def test_ranks_ask_for_their_own_trajectories_and_a_reward_sees_groups_of_both(served: Served, tmp_path: Path) -> None:
    """A group's first two rows are on rank 0, which calls the tool in each turn; of rank 1's some do."""
    run_worker("turns_worker", "ddp", 2, served.model, tmp_path, "turns", served.url)
    ranks = [torch.load(tmp_path / f"rank-{rank}.pt", weights_only=False) for rank in (0, 1)]
    logs = [row for row in ranks[0]["history"] if "loss" in row]
    assert len(logs) == 2
    assert max(row["rollout/sync_gap"] for row in logs) < 1e-4
    for step, log in enumerate(logs):
        rows = [row for rank in ranks for row in rank["rows"][2 * step : 2 * step + 2]]
        counts = [pieces(row["own"]) for row in rows]
        assert counts[:2] == [3, 3]
        assert min(counts[2:]) < 3
        fewest = [count == min(counts) for count in counts]
        assert log["rewards/fewest_turns/mean"] == pytest.approx(sum(fewest) / 4)


def pieces(own: list[int]) -> int:
    """Pieces of a completion that the policy wrote."""
    return sum(now and not before for before, now in zip([0, *own], own, strict=False))


def test_a_server_that_is_killed_in_a_turn_ends_the_training_with_a_checkpoint(
    served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = {"server": {"retries": 0, "backoff": 0.1}}
    run = settings(served, save_strategy="steps", save_steps=100, max_steps=5)
    trainer = build(Path(served.model), tmp_path, {}, server, **run)
    processes = [served.process.pid, *children(served.process.pid)]
    turn = TurnClient.turn
    asked: list[int] = []

    def then_killed(client: Any, ids: list[int], room: int, scored: bool = True) -> Any:
        asked.append(trainer.state.global_step)
        if asked.count(1) == 12:  # in the second step, some trajectories are in their second turn
            for process in reversed(processes):
                os.kill(process, signal.SIGKILL)
        return turn(client, ids, room, scored)

    monkeypatch.setattr(TurnClient, "turn", then_killed)
    start = time.monotonic()
    with pytest.raises(ServerGone, match="A checkpoint of step 1 was written"):
        trainer.train()
    assert time.monotonic() - start < 60
    assert (tmp_path / "checkpoint-1" / "optimizer.pt").is_file()
    for thread in threading.enumerate():
        if thread.name in ("turns: tool", "grpo_lab request"):
            thread.join(10)
            assert not thread.is_alive()
