"""Every metric of a run recomputed by hand: each row forwarded alone in float64, means written as loops.

The runs have left-out rows, completions of one token (whose bin is one token wide), tool tokens, scores between wrong and
right, and two passes over a batch so that ratios leave 1. ``tests/distributed/test_metrics_on_ranks.py`` does the same on two.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from grpo_lab import LabConfig
from metrics_oracle import Recorded, ToolRollout, accuracy_reward, check_steps
from parity.harness import arguments, train

KINDS: dict[str, dict[str, Any]] = {
    "token ratio": {"objective": "dr_grpo", "epsilon": 0.03, "epsilon_high": 0.05},
    "sequence ratio": {"objective": "gspo", "epsilon": 0.01, "epsilon_high": 0.012},
    "weight": {"objective": "cispo", "epsilon_high": 1.02},
    "kl in the loss": {"objective": "grpo", "epsilon": 0.03, "kl": {"coefficient": 0.1, "ratio_weighted": True}},
    "all rows": {"objective": "dapo", "epsilon": 0.03, "update": {"dead_groups": "keep", "max_tokens": 24}},
    "as TRL cuts": {"objective": "dapo", "epsilon": 0.03, "update": "off"},
}


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
    assert ("update/live_share" in seen) is (kind != "as TRL cuts")
    assert not math.isnan(sum(run.losses))
