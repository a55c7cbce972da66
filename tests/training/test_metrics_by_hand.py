"""Every metric of a run recomputed by hand: each row forwarded alone in float64, means written as loops.

The runs have left-out rows, completions of one token (whose bin is one token wide), tool tokens, scores between wrong
and right, and two passes over a batch so that ratios leave 1. ``tests/distributed/test_metrics_on_ranks.py`` does the
same on two.
"""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest

from grpo_lab import LabConfig
from grpo_lab.trainer.metrics.metric_names import OF_TASKS, OF_TURNS, logged_names
from metrics_oracle import Recorded, ToolRollout, accuracy_reward, check_steps
from parity.harness import arguments, train

KINDS: dict[str, dict[str, Any]] = {
    "token ratio": {"objective": "dr_grpo", "epsilon": 0.03, "epsilon_high": 0.05},
    "sequence ratio": {"objective": "gspo", "epsilon": 0.01, "epsilon_high": 0.012},
    "two-sided": {"objective": "dr_grpo", "epsilon": 0.002, "delta": 1.003},
    "weight": {"objective": "cispo", "epsilon_high": 1.02},
    "kl in the loss": {"objective": "grpo", "epsilon": 0.03, "kl": {"coefficient": 0.1, "ratio_weighted": True}},
    "all rows": {"objective": "dapo", "epsilon": 0.03, "update": {"dead_groups": "keep", "max_tokens": 24}},
    "as TRL cuts": {"objective": "dapo", "epsilon": 0.03, "update": "off"},
}


@pytest.mark.not_fast
@pytest.mark.parametrize("kind", KINDS)
def test_every_metric(kind: str, tiny_folder: Path, tmp_path: Path) -> None:
    settings = {"num_iterations": 2, "learning_rate": 1.0, "update": {"max_tokens": 24}, **KINDS[kind]}
    config = LabConfig(**arguments(tmp_path, **settings))
    config.script = ToolRollout(range(20, 90), (1, 1, 5, 9, 14), end_id=0, truncated_share=0.3)
    run = train(Recorded, config, tiny_folder, rollout=config.script, reward=[accuracy_reward])
    seen = check_steps(run.trainer.steps, [row for row in run.history if "loss" in row], config)
    expected = {"cispo_clip_ratio"} if kind == "weight" else {"clip_ratio/low_mean", "clip_ratio/high_max"}
    assert expected | {"entropy", "groups/dead_share", "completions/mean_length_correct"} <= seen
    assert ("kl" in seen) is (kind == "kl in the loss")
    cut = sum(row.get("clip_ratio/delta_mean", 0.0) for row in run.history)
    assert (cut > 0) is (kind == "two-sided")
    assert {"update/live_share", "update/computed_share"} <= seen
    assert not math.isnan(sum(run.losses))
    totals = {"train_loss", "train_samples_per_second", "train_steps_per_second", "total_flos"}
    assert {name for row in run.history for name in row} - totals <= {*logged_names(["accuracy_reward"])}


#: documented metrics that the runs above do not have → the test that computes them
ELSEWHERE = {
    **dict.fromkeys(("policy_loss", "entropy_coef"), "parity/test_trl_settings.py"),
    "vespo/phi_seq_mean": "parity/drop_in_cases.py",
    "product_ratio/held_mean": "unit/losses/test_ratios.py",
    "rewards/worked_out/mean": "unit/verifiers/test_working.py",
    "kl/reward_penalty": "parity/test_kl_in_reward.py",
    "accuracy_reward/unscorable_gold": "unit/verifiers/test_accuracy.py",
    "accuracy_reward/timeout": "unit/verifiers/test_accuracy.py",
    "accuracy_reward/no_answer": "unit/verifiers/test_accuracy.py",
    "accuracy_reward/unjudged": "unit/verifiers/test_accuracy.py",
    "code_reward/unjudged": "unit/sandbox/test_code_killed.py",
    "code_reward/limit": "unit/sandbox/test_code_reward.py",
    "code_reward/unusable": "unit/sandbox/test_code_reward.py",
    "code_reward/walls": "unit/sandbox/test_code_reward.py",
    "<name>/flipped": "unit/rewards/test_noise_rewards.py",
    "<name>/beyond_share": "unit/rewards/test_token_classification.py",
    "rewards/nan_share": "training/test_reward_kinds.py",
    **{f"guard/{name}": "training/test_guard.py" for name in ("left_out", "loss", "gradient", "reward", "log_prob")},
    "guard/advantage": "training/test_guard.py",
    "reward_weights/<name>": "training/test_kimi_trainer.py",
    "rollout/cut_share": "rollouts/test_thinking_trainer.py",
    "rollout/staleness": "rollouts/test_overlap.py",
    "rollout/segments": "rollouts/test_partial.py",
    "rollout/waiting": "rollouts/test_partial.py",
    "rollout/waited_s": "rollouts/test_overlap.py",
    "rollout/sync_bytes": "rollouts/test_adapter_vllm.py",
    "rollout/sync_gap": "rollouts/test_lab_trainer_vllm.py",
    "rollout/generated": "training/test_comparing_scripts.py",
    "sampling/ratio_mean/len_q1": "unit/reports/test_metrics.py",
    "sampling/kept_share/len_q1": "unit/reports/test_metrics.py",
    "sampling/sampling_logp_difference/mean": "unit/reports/test_metrics.py",
    "sampling/sampling_logp_difference/max": "unit/reports/test_metrics.py",
    "sampling/importance_sampling_ratio/mean": "unit/reports/test_metrics.py",
    "sampling/importance_sampling_ratio/min": "unit/reports/test_metrics.py",
    "sampling/importance_sampling_ratio/max": "unit/reports/test_metrics.py",
    "sampler/seen_share": "training/test_sampler_in_trainer.py",
    "sampler/at_floor_share": "training/test_sampler_in_trainer.py",
    "aux_loss": "parity/test_drop_in.py",
    "update/resample_rounds": "training/test_resample.py",
    "update/resampled_share": "training/test_resample.py",
    "update/completions_generated": "training/test_resample.py",
    "update/bytes_moved": "distributed/metrics_worker.py",
    "rollout/server_returns": "rollouts/test_server_live.py",
    "kl/measured": "training/test_kl_target.py",
    "kl/beta": "training/test_moving_reference.py",
    "ppo/shaped_reward": "training/test_ppo.py",
    "ppo/task_reward": "training/test_ppo.py",
    "ppo/kl_reward": "training/test_ppo.py",
    "value/loss": "training/test_ppo.py",
    "value/clip_fraction": "training/test_ppo.py",
    "value/explained_variance": "training/test_ppo.py",
    "value/return_mean": "training/test_ppo.py",
    "policy/approx_kl": "training/test_ppo.py",
    "preference/pair_accuracy": "training/test_preference_reward.py",
    "preference/comparisons": "training/test_preference_reward.py",
    **dict.fromkeys(OF_TASKS, "training/test_mixture.py"),
    **dict.fromkeys(OF_TURNS, "parity/test_turn_metrics.py"),
}
HERE = {
    *("entropy", "kl", "clip_ratio/low_mean", "clip_ratio/high_mean", "clip_ratio/region_mean", "clip_ratio/low_min"),
    *(
        "clip_ratio/delta_mean",
        "clip_ratio/high_max",
        "cispo_clip_ratio",
        "groups/dead_share",
        "groups/solved_share",
        "groups/learnable_share",
        "completions/truncated_share",
    ),
    *("completions/mean_length_correct", "completions/mean_length_incorrect", "rewards/unscorable_share"),
    *("update/live_share", "update/padding_share", "update/tokens_computed", "update/tokens_stock"),
    *("update/computed_share", "update/no_gradient_share", "update/silent_share", "update/tokens_looked"),
}


def test_every_documented_metric_has_a_test_that_computes_it() -> None:
    """The table of docs/metrics.md against the lists above; ``check_steps`` fails on a logged name that it does not
    compute."""
    tests = Path(__file__).resolve().parents[1]
    table = (tests.parent / "docs" / "metrics.md").read_text(encoding="utf-8")
    first_cells = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    documented = {name for cell in first_cells for name in re.findall(r"`([^`]+)`", cell)} - {"len_q4"}
    assert documented == HERE | ELSEWHERE.keys()
    for name, place in ELSEWHERE.items():
        assert re.sub("<name>|tasks/<task>|turns/<k>", "", name) in (tests / place).read_text(encoding="utf-8"), name
