"""``rollout: {cut_after: c}`` with a real vLLM in the trainer's process: completions of several policies, each token
with the log-prob of the policy that the rows name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("vllm", reason="vLLM is not installed; `make setup-vllm` installs the CPU build")

from rollouts.overlap_runs import Weights, log_probs
from rollouts.test_lab_trainer_vllm import build

pytestmark = [pytest.mark.vllm, pytest.mark.slow]


def test_segments_of_several_policies_have_their_own_log_probs(tmp_path: Path) -> None:
    """The random model hardly writes an end token: completions of 24 tokens in segments of 10, 10 and 4, in every
    batch after those that fill the pool by several policies. Of each token one of the run's policies has the log-prob
    that the engine told, the first tokens' is the one that the row names, and they follow each other."""
    rollout = {"cut_after": 10, "verify_every": 1, "engine": {"kv_cache_gib": 0.25, "max_model_len": 128}}
    trainer = build(
        tmp_path, "qwen2", True, rollout=rollout, max_completion_length=24, max_steps=6, optim="sgd", learning_rate=1.0
    )
    calls: list[tuple[int, int]] = []
    generate = trainer.vllm_generation.generate

    def counted(*args: Any, **kwargs: Any) -> Any:
        answer = generate(*args, **kwargs)
        calls.append((len(answer[1]), sum(len(ids) for ids in answer[1])))
        return answer

    trainer.vllm_generation.generate = counted
    rows = Weights(trainer)
    trainer.train()
    logged = [row for row in trainer.state.log_history if "loss" in row]
    assert logged[-1]["rollout/waiting"] == 0
    trained = sum(int(step["fields"]["completion_mask"].sum()) for step in rows.steps)
    assert trained == sum(tokens for _, tokens in calls)
    several = 0
    for number, step in enumerate(rows.steps):
        fields = step["fields"]
        mask, told = fields["completion_mask"].bool(), fields["sampling_per_token_logps"].double()
        with torch.no_grad():
            gaps = torch.stack([(log_probs(policy, fields) - told).abs() for policy in rows.policies[: number + 1]])
        nearest = gaps.amin(0)
        assert float(nearest[mask].max()) < 1e-4  # the engine's float32 against float64
        for row, version in enumerate(step["versions"]):
            length = int(mask[row].sum())
            assert length == 24 or fields["completion_ids"][row, length - 1] in trainer.eos_token_ids
            first = min(10, length)
            assert float(gaps[version, row, :first].max()) < 1e-4
            means = [gaps[:, row, start : min(start + 10, length)].mean(1) for start in range(0, length, 10)]
            by = [int(mean.argmin()) for mean in means]
            assert by == sorted(by)
            assert by[0] == version
            several += len(set(by)) > 1
    assert several > 0
    assert max(row["rollout/segments"] for row in logged) > 1
    assert max(row["rollout/sync_gap"] for row in logged if "rollout/sync_gap" in row) < 1e-4
