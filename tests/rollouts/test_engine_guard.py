"""An engine in the trainer's process: its seed, a load that breaks off, and weights that stop arriving between two
proofs."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("vllm", reason="vLLM is not installed; `make setup-vllm` installs the CPU build")

from vllm import SamplingParams

from grpo_lab.engines.weights.proof import differing_tensors
from grpo_lab.engines.weights.sync import WeightSyncError, engine_model, push_weights
from grpo_lab.trainer.generation import trl_engine as engine
from rollouts.test_lab_trainer_vllm import build

pytestmark = [pytest.mark.vllm, pytest.mark.slow]


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


def test_a_load_that_breaks_off_leaves_an_engine_that_answers(start_engine: Callable[..., Any]) -> None:
    """Without it vLLM's layers are left without storage, and the next token ends the process."""
    engine, model = start_engine("qwen2-tied")
    sampling = SamplingParams(temperature=0, max_tokens=8, logprobs=0)

    def answer() -> Any:
        (output,) = engine.generate([{"prompt_token_ids": [5, 6, 7]}], sampling)
        return list(output.outputs[0].token_ids), output.outputs[0].cumulative_logprob

    before = answer()

    def breaks_off(after: int) -> Iterator[tuple[str, torch.Tensor]]:
        for count, (name, tensor) in enumerate(model.named_parameters()):
            if count == after:
                raise OSError("No space left on device")
            yield name, tensor

    with pytest.raises(OSError, match="No space left"):
        push_weights(engine, breaks_off(5))
    assert answer() == before  # the five that came are the old ones, too
    assert math.isfinite(before[1])
    with pytest.raises(WeightSyncError, match=r"could not load .*k_proj\.weight of shape \[4, 128\]"):
        push_weights(engine, ((n, t[:4] if n.endswith("k_proj.weight") else t) for n, t in model.named_parameters()))
    push_weights(engine, model.named_parameters())
    assert differing_tensors(engine_model(engine), model.named_parameters()) == []
    assert answer() == before
