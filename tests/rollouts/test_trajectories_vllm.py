"""``rollout.turns`` with a real vLLM engine in the trainer's process: greedy trajectories are those of TRL's loop."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("vllm", reason="vLLM is not installed; `make setup-vllm` installs the CPU build")

from trl.trainer import grpo_trainer

from rollouts.trajectory_runs import build, parsed, same_rows, saved_model

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

ENGINE = {"engine": {"kv_cache_gib": 0.25, "max_model_len": 900}}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(autouse=True)
def calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grpo_trainer, "parse_response", parsed)


def weights_of(trainer: Any) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in trainer.model.state_dict().items()}


@pytest.mark.parametrize("limits", [{}, {"max_concurrent": 3}], ids=["all", "three at a time"])
def test_greedy_trajectories_are_those_of_trls_loop(limits: dict[str, Any], model: Path, tmp_path: Path) -> None:
    stock = build(model, tmp_path / "stock", None, ENGINE, vllm_mode="colocate", max_tool_calling_iterations=3)
    stock.train()
    ours = build(model, tmp_path / "ours", limits, ENGINE, vllm_mode="colocate", max_tool_calling_iterations=3)
    ours.train()
    same_rows(ours.rows, stock.rows)
    turns = [sum(message["role"] == "tool" for message in row["messages"]) for row in ours.rows]
    assert {0, 3} <= set(turns)
    weights = weights_of(stock)
    assert all(torch.equal(value, weights[name]) for name, value in weights_of(ours).items())
    logs = [row for row in ours.state.log_history if "loss" in row]
    assert max(row["rollout/sync_gap"] for row in logs) < 1e-4
    names = ("tools/call_frequency", "tools/failure_frequency", "completions/mean_length", "num_tokens")
    others = [row for row in stock.state.log_history if "loss" in row]
    assert [[row[name] for name in names] for row in logs] == [[row[name] for name in names] for row in others]
