"""``rollout.turns`` with a real vLLM engine in the trainer's process: greedy trajectories are those of TRL's loop."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig

pytest.importorskip("vllm", reason="vLLM is not installed; `make setup-vllm` installs the CPU build")

from transformers import AutoModelForCausalLM
from trl.trainer import grpo_trainer

from grpo_lab.trainer.generation import trl_engine
from rollouts.server_runs import Moves, logged, poison
from rollouts.trajectory_runs import STOP_THINKING, THINKING, Kept, build, cut_turns, parsed, same_rows, saved_model

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


@pytest.fixture(scope="module")
def stock(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Kept:
    """A training with TRL's loop."""
    folder = tmp_path_factory.mktemp("stock")
    trainer = build(model, folder, None, ENGINE, vllm_mode="colocate", max_tool_calling_iterations=3)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(grpo_trainer, "parse_response", parsed)
        trainer.train()
    return trainer


@pytest.mark.parametrize("limits", [{}, {"max_concurrent": 3}], ids=["all", "three at a time"])
def test_greedy_trajectories_are_those_of_trls_loop(
    limits: dict[str, Any], stock: Kept, model: Path, tmp_path: Path
) -> None:
    ours = build(model, tmp_path / "ours", limits, ENGINE, vllm_mode="colocate", max_tool_calling_iterations=3)
    ours.train()
    same_rows(ours.rows, stock.rows)
    turns = [sum(message["role"] == "tool" for message in row["messages"]) for row in ours.rows]
    assert {0, 3} <= set(turns)
    weights = weights_of(stock)
    start = AutoModelForCausalLM.from_pretrained(model).state_dict()
    assert not torch.equal(weights["model.norm.weight"], start["model.norm.weight"])
    assert all(torch.equal(value, weights[name]) for name, value in weights_of(ours).items())
    logs = [row for row in ours.state.log_history if "loss" in row]
    assert max(row["rollout/sync_gap"] for row in logs) < 1e-4
    names = ("tools/call_frequency", "tools/failure_frequency", "completions/mean_length", "num_tokens")
    others = [row for row in stock.state.log_history if "loss" in row]
    assert [[row[name] for name in names] for row in logs] == [[row[name] for name in names] for row in others]


def test_an_adapter_of_the_engine(model: Path, tmp_path: Path) -> None:
    """``sync: adapter``: every turn is written with the adapter of its step."""
    lora = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    rollout = {**ENGINE, "sync": "adapter"}
    settings: dict[str, Any] = {"vllm_mode": "colocate", "max_tool_calling_iterations": 3, "peft_config": lora}
    torch.manual_seed(0)
    stock = build(model, tmp_path / "stock", None, rollout, **settings)
    stock.train()
    torch.manual_seed(0)
    ours = build(model, tmp_path / "ours", {}, rollout, **settings)
    ours.train()
    same_rows(ours.rows, stock.rows)
    assert max(logged(ours.state.log_history, "rollout/sync_gap")) < 1e-4
    assert ours.vllm_generation.llm.llm_engine.list_loras() == {1, 2}


def test_thinking_has_a_budget_in_each_turn(model: Path, tmp_path: Path) -> None:
    rollout = {**ENGINE, "thinking_budget": THINKING, "budget_text": STOP_THINKING}
    ours = build(model, tmp_path, {}, rollout, vllm_mode="colocate", max_tool_calling_iterations=3, max_steps=1)
    ours.train()
    assert {0, 1} <= set(cut_turns(ours))


def test_a_step_with_nan_from_the_engine_is_left_out(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trl_engine, "push_weights", trl_engine.push_weights)
    ours = build(model, tmp_path, {}, ENGINE, vllm_mode="colocate", max_tool_calling_iterations=1, max_steps=3)
    moves = Moves(ours)
    poison(trl_engine, "push_weights", 2)
    ours.train()
    assert moves.moved == [True, False, True]
    assert logged(ours.state.log_history, "guard/log_prob") == [None, 1, 0]
    gaps = logged(ours.state.log_history, "rollout/sync_gap")
    assert max(gaps[0], gaps[2]) < 1e-4
