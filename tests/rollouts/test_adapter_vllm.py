"""``rollout: {sync: adapter}`` with a real vLLM in this process: LoRA's adapter alone, proven at every step by samples
on a prompt that was served before; planted faults are caught."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed; `make setup-vllm` installs the CPU build")

import torch
from peft import LoraConfig

from grpo_lab import LabTrainer
from grpo_lab.engines.weights.adapter import AdapterVersion
from grpo_lab.engines.weights.sync import WeightSyncError
from grpo_lab.trainer.generation import trl_engine as engine
from rollouts.server_runs import logged
from rollouts.test_lab_trainer_vllm import build

pytestmark = [pytest.mark.vllm, pytest.mark.slow]
#: three pages of 32 tokens and more, so that the probe's two pages are kept in the cache
ENGINE = {"kv_cache_gib": 0.25, "max_model_len": 128}
ADAPTER = {"sync": "adapter", "verify_every": 1, "engine": ENGINE}


def lora(**changes: Any) -> LoraConfig:
    given = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj", "down_proj"], "init_lora_weights": False}
    return LoraConfig(**{**given, **changes})


def training(folder: Path, **changes: Any) -> LabTrainer:
    return build(folder, "qwen2", tie=True, peft_config=lora(), **{"rollout": ADAPTER, **changes})


def test_eight_steps_with_the_adapter_alone(tmp_path: Path) -> None:
    trainer = training(tmp_path)
    trainer.train()
    history, inside = trainer.state.log_history, trainer.vllm_generation.llm.llm_engine
    gaps = logged(history, "rollout/sync_gap")
    assert len(gaps) == 8
    assert max(gaps) < 1e-4
    assert max(logged(history, "sampling/sampling_logp_difference/mean")) < 1e-4
    assert all(map(math.isfinite, logged(history, "loss")))
    trained = [p for name, p in trainer.model.named_parameters() if "lora_" in name]
    assert logged(history, "rollout/sync_bytes") == [4.0 * sum(p.numel() for p in trained)] * 8
    assert inside.list_loras() == {7, 8}  # the one before is unloaded one sync later
    folder = trainer.vllm_generation.adapters.folder
    assert sorted(path.name for path in folder.iterdir()) == ["v7", "v8"]


def in_place(engine: Any, version: AdapterVersion) -> None:
    """One name and folder for all versions, loaded over itself: what vLLM offers as `load_inplace`."""
    from vllm.lora.request import LoRARequest

    one = version.folder.with_name("v1")
    if version.number > 1:
        for file in version.folder.iterdir():
            (one / file.name).write_bytes(file.read_bytes())
    request = LoRARequest("one", 1, str(one), load_inplace=True)
    assert engine.llm_engine.add_lora(request)
    engine.adapters = [LoRARequest("one", 1, str(one))]


def same_name(engine: Any, version: AdapterVersion) -> None:
    """One name and id, another folder: the engine keeps what it has under it, and says nothing."""
    from vllm.lora.request import LoRARequest

    engine.adapters = [LoRARequest("one", 1, str(version.folder))]


@pytest.mark.parametrize("fault", [in_place, same_name])
def test_a_planted_fault_is_caught(fault: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first version is right; the second is not the trainer's, and the proof after it ends the run."""
    monkeypatch.setattr(engine, "load_adapter", fault)
    monkeypatch.setattr("grpo_lab.engines.weights.adapter.LORA_VERSIONS", 100)  # keeps v1 on the disk
    trainer = training(tmp_path, learning_rate=5e-2)
    with pytest.raises(WeightSyncError, match=r"does not sample from the trainer's policy: gap"):
        trainer.train()
    assert trainer.state.global_step == 1


@pytest.mark.thorough
def test_a_fault_in_place_is_seen_by_the_prompt_of_every_probe_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts of a batch were not served before, or are shorter than a page of the cache: their samples are right."""
    monkeypatch.setattr(engine, "load_adapter", in_place)
    monkeypatch.setattr(engine, "cached_prompt", lambda ids, page, context: list(ids))
    monkeypatch.setattr("grpo_lab.engines.weights.adapter.LORA_VERSIONS", 100)
    trainer = training(tmp_path, learning_rate=5e-2, max_steps=3)
    trainer.train()
    assert max(logged(trainer.state.log_history, "rollout/sync_gap")) < 1e-4


@pytest.mark.thorough(but="head")
@pytest.mark.parametrize("critic", ["head", "copy"])
def test_a_critic_is_no_part_of_the_adapter(critic: str, tmp_path: Path) -> None:
    trainer = training(tmp_path, objective="ppo", value={"model": critic}, max_steps=3)
    trainer.train()
    assert max(logged(trainer.state.log_history, "rollout/sync_gap")) < 1e-4
    assert logged(trainer.state.log_history, "rollout/sync_bytes")[0] == sum(
        4 * p.numel()
        for name, p in trainer.model.named_parameters()
        if "lora_" in name and "grpo_lab_critic" not in name
    )


def test_another_base_than_the_engines_is_caught_and_named(tmp_path: Path) -> None:
    """Base weights are not sent, and are compared to the bit: under an adapter or not, fused by the engine or not."""
    trainer = training(tmp_path)
    for layer in ("self_attn.q_proj.base_layer", "self_attn.o_proj", "mlp.down_proj.base_layer"):
        weight = trainer.model.get_submodule(f"base_model.model.model.layers.0.{layer}").weight.data
        right = weight[0, 0].clone()
        weight[0, 0] = torch.nextafter(right, torch.tensor(1.0))
        named = layer.removesuffix(".base_layer").replace(".", r"\.")
        said = rf"holds other weights(.|\n)*layers\.0\.{named}(\.base_layer)?\.weight"
        with pytest.raises(WeightSyncError, match=said):
            trainer.train()
        weight[0, 0] = right


def test_a_model_without_an_adapter_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"`rollout.sync` is 'adapter'.*no adapter.*peft_config.*merged"):
        build(tmp_path, "qwen2", tie=True, rollout=ADAPTER)
