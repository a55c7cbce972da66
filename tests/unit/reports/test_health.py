"""Each rule of ``grpo_lab.diagnostics`` on a history that trips it and on one that nearly does; the line; the report's
list."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

import pytest

from grpo_lab.diagnostics import RULES, Facts, changes, diagnose
from grpo_lab.diagnostics.rules import rise_in_errors
from grpo_lab.evaluation.panels import panel_figures
from grpo_lab.evaluation.run_health import facts_of, last_verdict, left_out, windows
from grpo_lab.evaluation.run_record import RunRecord, read_run

HEALTHY = {
    "loss": -0.03, "grad_norm": 0.04, "learning_rate": 1e-6, "reward": 0.5, "groups/dead_share": 0.3, "entropy": 0.4,
    "completions/mean_length": 100.0, "completions/truncated_share": 0.01, "kl": 0.01, "clip_ratio/region_mean": 0.01,
    "rewards/unscorable_share": 0.0, "rollout/sync_gap": 0.004, "sampling/sampling_logp_difference/mean": 0.01,
}  # fmt: skip
ONCE = Facts(updates=1, last_step=1000)
NOISY = (0.50, 0.54, 0.46, 0.52)
"""Mean 0.505; halves 0.52, 0.49."""


def run(*changed: dict[str, Any], windows: int = 3, every: int = 1) -> list[dict[str, Any]]:
    """``windows`` healthy windows, then one for each of ``changed``."""
    rows = [*({} for _ in range(windows)), *changed]
    return [{**HEALTHY, "step": (i + 1) * every, **row} for i, row in enumerate(rows)]


def grown(name: str, start: float, end: float, count: int = 6) -> list[dict[str, Any]]:
    """The metric at ``start`` in the first half of the windows and at ``end`` in the second."""
    half = count // 2
    return run(*[{name: start}] * half, *[{name: end}] * half, windows=0)


def noisy(count: int, last: float = 0.0, every: int = 10) -> list[dict[str, Any]]:
    """A reward of NOISY over and over, ``last`` more in the second half."""
    rows = [{"reward": NOISY[i % 4] + (last if i >= count // 2 else 0.0)} for i in range(count)]
    return run(*rows, windows=0, every=every)


def longer(end: float, count: int) -> list[dict[str, Any]]:
    """Three windows of 100 tokens, then ``end``."""
    rows = [{"completions/mean_length": 100.0 if i < 3 else end} for i in range(count)]
    return run(*rows, windows=0)


def at(level: float) -> list[dict[str, Any]]:
    """A reward that stays at ``level``, a thousandth up and down."""
    return run(*[{"reward": level + 0.001 * (-1) ** i} for i in range(12)], windows=0, every=10)


DEAD = {"groups/dead_share": 1.0, "grad_norm": 0.0, "loss": 0.0, "reward": 0.0}
ZERO = {"loss": -3e-9}
CASES: dict[str, tuple[list[Any], list[Any]]] = {
    "non-finite": (
        [run({"grad_norm": math.nan}), run({"reward": math.inf}), run({"guard/left_out": 0.5, "guard/loss": 0.5})],
        [run({"grad_norm": 1e6}), run({"grad_norm": math.nan}, {})],  # the last window counts
    ),
    "learning rate 0": (
        [run(*[{"learning_rate": 0.0}] * 2)],
        [run({"learning_rate": 0.0}), run(*[{"learning_rate": 0.0}] * 2, every=200)],  # once; at step 1000, the last
    ),
    "nothing scored": (
        [run(*[{**DEAD, "reward": math.nan, "rewards/a/mean": math.nan}] * 3)],
        [
            run(*[{**DEAD, "rewards/a/mean": math.nan}] * 2),
            run(*[{**DEAD, "rewards/a/mean": math.nan, "rewards/b/mean": 0.0}] * 3),  # another reward scored
            run(*[{"rewards/a/mean": math.nan}] * 3),  # groups are alive
        ],
    ),
    "all groups dead": (
        [run(*[DEAD] * 3), run(DEAD, windows=0), run(*[{"frac_reward_zero_std": 1.0, **DEAD}] * 3)],
        [
            run(*[DEAD] * 2),  # the third last is alive
            run(*[{"groups/dead_share": 0.99}] * 3),
            run(*[{**DEAD, "reward": 0.5}] * 2, windows=0),  # too few, and something is rewarded
            [{"step": 1, "groups/dead_share": 1.0}],
        ],
    ),
    "no gradient": (
        [run(*[{"grad_norm": 0.0}] * 3)],
        [
            run(*[{"grad_norm": 0.0}] * 2),
            run(*[{"grad_norm": 0.0}] * 2, windows=0),
            run(*[DEAD] * 3),
            run(*[{"grad_norm": 1e-9}] * 3),
        ],
    ),
    "sampler drifts": (
        [run({"rollout/sync_gap": 0.4}), run(*[{"sampling/sampling_logp_difference/mean": 0.11}] * 3)],
        [
            run(*[{"sampling/sampling_logp_difference/mean": 0.09}] * 3),
            run({"rollout/sync_gap": 0.2}),  # mean 0.069
            run(*[{"sampling/sampling_logp_difference/mean": 0.3, "rollout/staleness": 1.0}] * 3),  # `rollout.overlap`
            run({"rollout/staleness": 2.0}, *[{"sampling/sampling_logp_difference/mean": 0.3}] * 3),  # once a batch
        ],
    ),
    "truncation": (
        [run(*[{"completions/truncated_share": 0.21}] * 3)],
        [run({"completions/truncated_share": 0.5}), run({"completions/truncated_share": 0.9}, windows=0)],  # mean 0.173
    ),
    "unscorable": (
        [run(*[{"rewards/unscorable_share": 0.3}] * 3)],
        [run(*[{"rewards/unscorable_share": 0.19}] * 3)],
    ),
    "KL runs away": ([run(*[{"kl": 1.1}] * 3)], [run(*[{"kl": 0.9}] * 3), run({"kl": 2.9})]),  # mean 0.973
    "clip share": (
        [
            run(*[{"clip_ratio/region_mean": 0.3}] * 3),
            run(*[{"clip_ratio/region_mean": 0.1, "clip_ratio/delta_mean": 0.15}] * 3),
        ],
        [run(*[{"clip_ratio/region_mean": 0.19}] * 3)],
    ),
    "entropy collapses": (
        [grown("entropy", 0.4, 0.009)],
        [grown("entropy", 0.17, 0.045), grown("entropy", 0.05, 0.009), run(*[{"entropy": 0.0}] * 5, windows=0)],
    ),
    "entropy explodes": (
        [grown("entropy", 0.4, 1.0)],
        [grown("entropy", 0.1, 0.55), grown("entropy", 7.0, 9.0)],  # 0.45 more; 1.3 times
    ),
    "length runs away": (
        [longer(151, 40)],
        [
            longer(149, 40),
            longer(151, 32),  # 30 windows ago: three of 100 tokens
            [{**row, "reward": 0.3 + 0.01 * i} for i, row in enumerate(longer(200, 40))],
        ],
    ),
    "reward falls": (
        [noisy(12, last=-0.2), noisy(10, last=-0.2, every=50)],
        [noisy(12, last=-0.02), noisy(8, last=-0.2, every=20)],
    ),
    "reward flat": (
        [noisy(12), noisy(12, every=50)],
        [
            noisy(10), noisy(12, last=0.1), noisy(4, every=40), noisy(8, every=20),
            [{**row, **DEAD} for row in noisy(12)],
        ],
    ),
    "reward full": (
        [at(0.99), [{**row, "rewards/a/mean": 0.97, "rewards/b/mean": 1.0} for row in at(1.97)]],
        [at(0.93), at(1.5), [{**row, "rewards/a/mean": 0.97, "rewards/b/mean": 0.0} for row in at(0.97)]],
    ),
    "loss 0": ([run(ZERO)], [run(), run(*[DEAD] * 3), run({"loss": math.nan})]),
}  # fmt: skip


def tripped(history: list[Any], facts: Facts = ONCE) -> set[str]:
    verdict = diagnose(history, facts)
    return {*verdict.names, *(name for name, _ in verdict.notes)}


def test_every_rule_has_its_cases() -> None:
    assert [rule.name for rule in RULES] == list(CASES)


@pytest.mark.parametrize("name", CASES)
def test_a_history_that_trips_it(name: str) -> None:
    for history in CASES[name][0]:
        assert name in tripped(history)


@pytest.mark.parametrize("name", CASES)
def test_a_history_that_does_not(name: str) -> None:
    for history in CASES[name][1]:
        assert name not in tripped(history)


def test_a_healthy_run_trips_nothing_and_a_metric_that_is_missing_trips_nothing() -> None:
    assert tripped(run(windows=9)) == set()
    assert tripped([{"step": 1, "loss": 0.5}] * 30) == set()


def test_a_step_that_was_left_out_lost_no_weights() -> None:
    seen = {"guard/left_out": 0.5, "guard/loss": 0.0, "guard/log_prob": 0.5, "grad_norm": math.nan}
    line = diagnose(run(seen, windows=0)).line
    assert "log_prob not finite: such steps were left out" in line
    assert "lost" not in line
    assert tripped(run(dict.fromkeys(seen, 0.0))) == set()


def test_nothing_scored_is_neither_dead_groups_nor_lost_weights() -> None:
    unscored = {**DEAD, "reward": math.nan, "rewards/a/mean": math.nan}
    assert tripped(run(*[unscored] * 3)) == {"nothing scored"}


PPO = {"ppo/task_reward": 0.0}


def test_with_a_critic_no_group_is_dead() -> None:
    """Equal rewards have returns to learn from; that nothing was scored, or that there is no gradient, is said all the
    same."""
    alike = {**DEAD, **PPO, "reward": 0.0, "grad_norm": 0.3, "loss": 0.05}
    assert tripped(run(*[alike] * 3)) == set()
    assert (
        tripped(run(*[alike] * 2, {**DEAD, "grad_norm": 0.3, "loss": 0.05})) == set()
    )  # a second update of a batch logs no reward
    assert tripped(run(*[{**alike, "grad_norm": 0.0}] * 3)) == {"no gradient"}
    assert "though completions were scored" in diagnose(run(*[{**alike, "grad_norm": 0.0}] * 3)).line
    unscored = {**alike, "grad_norm": 0.0, "reward": math.nan, "rewards/a/mean": math.nan}
    assert tripped(run(*[unscored] * 3)) == {"nothing scored"}


def test_the_report_of_a_critic_has_no_plot_of_dead_groups(tmp_path: Path) -> None:
    metrics = {"groups/dead_share": [(1, 0.5)], "loss": [(1, 0.1)]}
    assert "Dead groups" in [view.title for view in panel_figures(RunRecord(tmp_path, metrics=metrics))[0]]
    titles = [
        view.title for view in panel_figures(RunRecord(tmp_path, metrics={**metrics, "ppo/task_reward": [(1, 0.5)]}))[0]
    ]
    assert "Dead groups" not in titles
    assert "Rewards of PPO" in titles


def test_loss_zero_is_healthy_only_at_one_update_a_batch() -> None:
    verdict = diagnose(run(ZERO), ONCE)
    assert verdict.healthy
    assert "loss 0 is right" in verdict.line
    for updates in (2, None):
        assert tripped(run(ZERO), Facts(updates)) == set()
    assert tripped(run(ZERO), Facts(1, own_loss=True)) == set()  # of a loss that nobody here knows


def test_a_reward_at_its_ceiling_is_fine() -> None:
    verdict = diagnose(at(0.98))
    assert verdict.healthy
    assert "reward has been 0.98 for 100 steps: where 1 is the most" in verdict.line  # the last 11 of 12 windows


@pytest.mark.not_fast
def test_r1_zeros_curve_is_healthy_throughout() -> None:
    """Length is 1.5 times its start by step 11, reward follows: 0.3 to 0.6 in 100 steps, noise 0.05 a window."""
    for seed in range(20):
        noise, rows = random.Random(seed), []
        for i in range(1, 101):
            reward = 0.3 + 0.4 * (1 - math.exp(-i / 60)) + noise.gauss(0, 0.05)
            length = 100 + 400 * (1 - math.exp(-i / 80)) + noise.gauss(0, 20)
            rows.append({"step": i, "reward": reward, "completions/mean_length": length})
        assert [v.names for v in changes(rows)] == [(), ()]


def test_a_start_where_nothing_is_rewarded_is_said_at_once() -> None:
    line = diagnose(run(DEAD, windows=0)).line
    assert line.startswith("step 1: all groups are dead")
    assert "(mean reward 0: too hard, or the reward cannot read the answers)" in line


def test_where_no_reward_is_a_success_the_cause_is_named() -> None:
    line = diagnose(run(*[{**DEAD, "reward": 0.4}] * 3), Facts(success=1.0)).line
    assert "no group teaches (mean reward" in line
    assert "reach `advantage.success` = 1 of the weighted reward" in line


def test_the_line_names_what_was_seen_and_the_settings() -> None:
    line = diagnose(run(*[{**DEAD, "completions/truncated_share": 0.5, "kl": 3.0}] * 3)).line
    assert line.startswith("step 6: all groups are dead")
    assert "mean reward 0:" in line
    assert "Look at rewards and their weights, data" in line
    assert "50% of the completions are cut off" in line
    assert line.endswith("(1 more: KL runs away)")
    healthy = diagnose(run({"reward": 0.8})).line
    assert healthy == "step 4: healthy (reward 0.6, first 0.5; length 100; entropy 0.4)"  # (0.5 + 0.5 + 0.8) / 3
    assert "\n" not in line + healthy
    assert diagnose(run({"reward": None}, windows=0)).line == "step 1: healthy (length 100; entropy 0.4)"


def test_where_windows_are_long_ten_of_them_are_looked_at() -> None:
    # windows 3 to 12, steps 150 to 600; 2.5 cycles of NOISY have mean (2 * 2.02 + 0.98) / 10
    assert "flat at 0.502 for 450 steps" in diagnose(noisy(12, every=50)).line
    # first half (NOISY, 0.50): mean 0.504; second (0.54, 0.46, 0.52, 0.50, 0.54) - 0.2: 0.312
    assert "reward fell from 0.504 to 0.312 within 450 steps" in diagnose(noisy(10, last=-0.2, every=50)).line


def test_no_window_is_an_error() -> None:
    with pytest.raises(ValueError, match="no logging window"):
        diagnose([])


def test_changes_are_the_first_each_change_and_the_last() -> None:
    history = run(*[DEAD] * 3, {}, {})
    assert [(v.step, v.names) for v in changes(history)] == [
        (1, ()),
        (6, ("all groups dead",)),  # windows 4 to 6
        (7, ()),
        (8, ()),
    ]


def test_rise_in_standard_errors_by_hand() -> None:
    # halves (1, 3), (4, 8): means 2 and 6, variances 2 and 8, error sqrt(2/2 + 8/2) = sqrt(5)
    assert rise_in_errors([1, 3, 4, 8]) == pytest.approx(4 / math.sqrt(5), rel=1e-15)
    assert rise_in_errors([1, 1, 1, 1]) == 0
    assert rise_in_errors([1, 1, 2, 2]) == math.inf
    assert rise_in_errors([2, 2, 1, 1]) == -math.inf


def test_from_a_run_on_disk(tmp_path: Path) -> None:
    record = RunRecord(tmp_path, summary={"settings": {"gradient_accumulation_steps": 2, "max_steps": 9}})
    for row in run(*[DEAD] * 3):
        for name, value in row.items():
            record.metrics.setdefault(name, []).append((row["step"], value))
    record.metrics["eval_loss"] = [(2, 0.1), (100, 0.1)]
    assert facts_of(record) == Facts(updates=1, last_step=9)
    assert [row["step"] for row in windows(record)] == [1, 2, 3, 4, 5, 6]
    assert [v.names for v in changes(windows(record), facts_of(record))] == [(), ("all groups dead",)]
    assert windows(RunRecord(tmp_path)) == []
    assert last_verdict(read_run(tmp_path)) is None


def test_steps_that_the_guard_left_out_are_counted_over_the_run(tmp_path: Path) -> None:
    """Shares of windows of 2, 2 and 1 steps: 2 * 0.5 + 2 * 1 + 0 = 3; a loss that is NaN hides no window."""
    rows = [
        {"step": 2, "loss": 0.1, "guard/left_out": 0.5, "guard/reward": 0.5, "guard/loss": 0.0},
        {"step": 4, "loss": float("nan"), "guard/left_out": 1.0, "guard/reward": 0.5, "guard/loss": 1.0},
        {"step": 5, "loss": 0.1, "guard/left_out": 0.0, "guard/reward": 0.0, "guard/loss": 0.0},
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    said = left_out(read_run(tmp_path))
    assert said == "3 of 5 optimizer steps were left out, not finite: reward 2, loss 2 (bad_steps/)"
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": 2, "loss": 0.1}) + "\n")
    assert left_out(read_run(tmp_path)) is None


@pytest.mark.parametrize(
    ("settings", "updates"),
    [
        ({}, 1),
        ({"num_iterations": 3}, 3),
        ({"gradient_accumulation_steps": 2, "steps_per_generation": 8, "num_iterations": 2}, 8),  # 8 * 2 / 2
        ({"generation_batch_size": 64}, None),
        ({"num_iterations": "x"}, None),
    ],
)
def test_updates_a_batch_from_the_settings(settings: dict[str, Any], updates: float | None, tmp_path: Path) -> None:
    assert facts_of(RunRecord(tmp_path, summary={"settings": settings})).updates == updates
