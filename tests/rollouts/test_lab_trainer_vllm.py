"""``LabTrainer`` with a real vLLM engine in its process: the sync is proven at every step, and a planted fault is
caught."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed; `make setup-vllm` installs the CPU build")

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM

from grpo_lab import LabConfig, LabTrainer
from grpo_lab.engines.grouping import EngineFault
from grpo_lab.engines.weights.sync import WeightSyncError
from grpo_lab.trainer.generation import trl_engine as engine
from grpo_lab.trainer.step.bad_step import read_bad_step
from rollouts.checkpoints import servable
from rollouts.server_runs import Moves, assert_proven, logged, odd_share, poison

pytestmark = [pytest.mark.vllm, pytest.mark.slow]


def build(
    folder: Path,
    architecture: str,
    tie: bool,
    peft_config: Any = None,
    folder_of_model: Path | None = None,
    **changes: Any,
) -> LabTrainer:
    model = folder_of_model or servable(folder / "model", architecture, tie_embeddings=tie)
    settings: dict[str, Any] = {
        "output_dir": str(folder / "out"), "objective": "dr_grpo", "use_vllm": True, "vllm_mode": "colocate",
        "rollout": {"verify_every": 1, "engine": {"kv_cache_gib": 0.25, "max_model_len": 128}},
        "per_device_train_batch_size": 8, "num_generations": 4, "max_completion_length": 16, "max_steps": 8,
        "learning_rate": 5e-3, "logging_steps": 1, "save_strategy": "no", "report_to": "none", "use_cpu": True,
        "bf16": False, "disable_tqdm": True,
    }  # fmt: skip
    rows = Dataset.from_dict({"prompt": [f"Tom has {n} apples. How many?" for n in range(32)]})
    return LabTrainer(
        model=str(model),
        reward_funcs=odd_share,
        args=LabConfig(**{**settings, **changes}),
        train_dataset=rows,
        peft_config=peft_config,
    )


@pytest.mark.parametrize(("architecture", "tie"), [("qwen2", True), ("qwen3", False)])
def test_eight_steps_with_a_proven_sync(architecture: str, tie: bool, tmp_path: Path) -> None:
    trainer = build(tmp_path, architecture, tie)
    trainer.train()
    assert_proven(trainer, 8)


def test_log_probs_among_the_tokens_that_the_engine_kept(tmp_path: Path) -> None:
    """Engine and trainer agree to float32's rounding, at each step's new weights; two updates a batch."""
    cut = {"temperature": 0.7, "top_k": 8, "top_p": 0.8, "min_p": 0.02, "max_steps": 4}
    trainer = build(tmp_path, "qwen2", tie=True, num_iterations=2, **cut)
    trainer.train()
    steps = [row for row in trainer.state.log_history if "sampling/sampling_logp_difference/mean" in row]
    assert len(steps) == 4
    assert max(row["sampling/sampling_logp_difference/max"] for row in steps) < 1e-4
    for name in ("min", "mean", "max"):
        ratios = [row[f"sampling/importance_sampling_ratio/{name}"] for row in steps]
        assert ratios == pytest.approx([1.0] * 4, abs=2e-3)
    assert max(row["entropy"] for row in trainer.state.log_history if "entropy" in row) < math.log(8)
    assert all(row["grad_norm"] > 0 for row in trainer.state.log_history if "loss" in row)


def test_eight_steps_of_lora_with_a_proven_sync(tmp_path: Path) -> None:
    """Adapters are merged for the engine and unmerged for the trainer."""
    from peft import LoraConfig

    lora = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj", "down_proj"], init_lora_weights=False)
    trainer = build(tmp_path, "qwen2", tie=True, peft_config=lora)
    trainer.train()
    assert_proven(trainer, 8)
    assert trainer.vllm_generation.llm.adapter is None
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    size = 4.0 * sum(p.numel() for p in model.parameters())  # every tensor at every sync, the base's too
    assert logged(trainer.state.log_history, "rollout/sync_bytes") == [size] * 8


@pytest.mark.thorough(but="copy")
@pytest.mark.parametrize("critic", ["head", "copy"])
def test_eight_steps_with_a_critic_that_the_engine_does_not_see(critic: str, tmp_path: Path) -> None:
    trainer = build(tmp_path, "qwen2", tie=True, objective="ppo", value={"model": critic})
    trainer.train()
    assert_proven(trainer, 8)
    losses = [row["value/loss"] for row in trainer.state.log_history if "value/loss" in row]
    assert len(losses) == 8
    assert all(map(math.isfinite, losses))


@pytest.mark.thorough  # in every run: test_engine.py
def test_eight_steps_of_a_real_pretrained_model(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    """stories260K (skipped without the data), with its trained weights: heads widened to what the CPU kernels have."""
    trainer = build(tmp_path, "stories", tie=True, folder_of_model=checkpoint("stories"))
    trainer.train()
    assert_proven(trainer, 8)


def test_a_stale_layer_is_caught_and_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the second sync on one layer is pushed as it was at the first: every other tensor is right."""
    trainer = build(tmp_path, "qwen2", tie=True)
    push, old = engine.push_weights, {}

    def stale(llm: Any, named_params: Any) -> Any:
        kept = ((n, old.setdefault(n, t.clone()) if "layers.0.self_attn.o_proj" in n else t) for n, t in named_params)
        return push(llm, kept)

    monkeypatch.setattr(engine, "push_weights", stale)
    with pytest.raises(WeightSyncError, match=r"gap .* nats per token(.|\n)*layers\.0\.self_attn\.o_proj\.weight"):
        trainer.train()
    assert trainer.state.global_step == 1


def test_lora_whose_sync_stops_arriving_is_warned_of_and_proven_before_its_turn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """From the third sync on nothing is pushed; the next proof of its own would come at step 201."""
    from peft import LoraConfig

    lora = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj", "down_proj"])
    rollout = {"verify_every": 200, "engine": {"kv_cache_gib": 0.25, "max_model_len": 128}}
    trainer = build(tmp_path, "qwen2", tie=True, peft_config=lora, rollout=rollout, seed=7, learning_rate=0.05)
    assert trainer.vllm_generation.llm.llm_engine.vllm_config.model_config.seed == 7
    push, pushes = engine.push_weights, [0]

    def stubbed(llm: Any, named_params: Any) -> Any:
        pushes[0] += 1
        return push(llm, named_params) if pushes[0] <= 2 else [None for _ in named_params]

    monkeypatch.setattr(engine, "push_weights", stubbed)
    with caplog.at_level(logging.WARNING, logger="grpo_lab"), pytest.raises(WeightSyncError, match="tensors differ"):
        trainer.train()
    assert trainer.state.global_step < 8
    assert "only every 200 steps (`rollout.verify_every: 200`)" in caplog.text
    assert "may not hold the trainer's weights (proven last: at step 1)" in caplog.text


@pytest.fixture
def send(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is put in the place of ``engine.push_weights`` goes with the test."""
    monkeypatch.setattr(engine, "push_weights", engine.push_weights)


def test_a_step_with_nan_from_the_engine_is_left_out(tmp_path: Path, send: None) -> None:
    """NaN in the second weights alone: the step is left out to the bit, and the next one is right, its pages of the
    cache, too."""
    trainer = build(tmp_path, "qwen2", tie=True, max_steps=4)
    moves = Moves(trainer)
    poison(engine, "push_weights", 2)
    trainer.train()
    assert moves.moved == [True, False, True, True]
    history = trainer.state.log_history
    for name in ("left_out", "log_prob"):
        assert logged(history, f"guard/{name}") == [None, 1, 0, 0]
    gaps = logged(history, "rollout/sync_gap")
    assert gaps[1] is None  # NaN proves nothing: the next sync is proven
    assert max(gaps[0], gaps[2], gaps[3]) < 1e-4
    facts, (tensors,) = read_bad_step(tmp_path / "out" / "bad_steps" / "step-000002")
    assert (facts["not_finite"], facts["in_a_row"]) == (["log_prob"], 1)
    said = facts["of_rank"][0]["said"]
    assert "log-prob nan" in said[0]
    assert "layers.0.mlp.up_proj" in said[-1]  # the proof names the tensor
    assert tensors["completion_ids"].shape[0] == 8


def test_a_nan_log_prob_is_an_error(tmp_path: Path, send: None) -> None:
    """TRL makes None of it and then an importance ratio of one: the run would go on."""
    trainer = build(tmp_path, "qwen2", tie=True, guard="off")
    poison(engine, "push_weights", 1)
    with pytest.raises(EngineFault, match="log-prob nan"):
        trainer.train()


def test_engine_settings_without_an_engine_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"rollout\.verify_every.*use_vllm"):
        LabConfig(str(tmp_path), use_cpu=True, rollout={"verify_every": 5})
