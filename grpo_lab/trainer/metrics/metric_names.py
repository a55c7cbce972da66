"""All metric names that a run may log; docs/metrics.md explains each.

``<name>`` stands for a reward's name, ``<task>`` for a task's, ``<k>`` for a turn's number. In evaluation every name
has the prefix ``eval_``. Many metrics belong to a setting, so no run logs all. The code of this package, of TRL and of
transformers logs no others (tests/unit/reports/test_metric_names.py); a team's code may log any.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from grpo_lab.trainer.trl_bridge import SAMPLING_METRICS, is_librarys

QUARTERS = ("len_q1", "len_q2", "len_q3", "len_q4")
#: Number of turns, from the first on, for which ``turns/<k>/…`` is logged.
COUNTED_TURNS = 8
#: Reasons for which a trajectory ends (``Turn.ended``).
ENDS_OF_TRAJECTORIES = ("answered", "turns", "completion", "turn_tokens", "unparsable")

OF_THE_LOSS = (
    "entropy",
    "kl",
    *(f"clip_ratio/{what}" for what in ("low_mean", "high_mean", "region_mean", "delta_mean", "low_min", "high_max")),
    "product_ratio/held_mean",
    "cispo_clip_ratio",
    "vespo/phi_seq_mean",
    *("policy_loss", "entropy_coef"),
    "aux_loss",
    *(f"value/{what}" for what in ("loss", "clip_fraction", "explained_variance", "return_mean")),
    "policy/approx_kl",
)
OF_REWARDS = (
    *(f"kl/{what}" for what in ("reward_penalty", "measured", "beta")),
    *(f"ppo/{what}" for what in ("shaped_reward", "task_reward", "kl_reward")),
    *(f"groups/{what}" for what in ("dead_share", "solved_share", "learnable_share")),
    *(f"completions/{what}" for what in ("truncated_share", "mean_length_correct", "mean_length_incorrect")),
    *(f"rewards/{what}" for what in ("unscorable_share", "nan_share", "worked_out/mean")),
    *(f"accuracy_reward/{what}" for what in ("unscorable_gold", "timeout", "no_answer", "unjudged")),
    *(f"code_reward/{what}" for what in ("limit", "unusable", "unjudged", "walls")),
    "<name>/flipped",
    "<name>/beyond_share",
    "reward_weights/<name>",
    *(f"preference/{what}" for what in ("pair_accuracy", "comparisons")),
)
OF_GENERATION = (
    *(f"sampling/{what}/{quarter}" for what in ("ratio_mean", "kept_share") for quarter in QUARTERS),
    *SAMPLING_METRICS,
    *(f"sampler/{what}" for what in ("seen_share", "at_floor_share")),
    *(f"rollout/{what}" for what in ("cut_share", "sync_gap", "sync_bytes", "server_returns")),
    *(f"rollout/{what}" for what in ("staleness", "segments", "waiting", "waited_s", "generated")),
)
OF_THE_UPDATE = (
    *(f"update/{what}" for what in ("live_share", "padding_share", "computed_share", "bytes_moved")),
    *(f"update/{what}" for what in ("tokens_computed", "tokens_stock", "tokens_looked")),
    *(f"update/{what}" for what in ("no_gradient_share", "silent_share")),
    *(f"update/{what}" for what in ("resample_rounds", "resampled_share", "completions_generated")),
    *(f"guard/{what}" for what in ("left_out", "loss", "gradient", "reward", "log_prob", "advantage")),
)
OF_TASKS = (
    *(f"tasks/<task>/{what}" for what in ("prompt_share", "reward", "dead_share", "mean_length", "truncated_share")),
    *(f"tasks/<task>/{what}" for what in ("live_share", "loss", "entropy")),
)
OF_TURNS = (
    *(f"turns/{what}" for what in ("per_trajectory", "tokens", "calls", "tool_seconds")),
    *(f"turns/{what}" for what in ("failed_share", "timed_out_share", "cut_share")),
    *(f"turns/ended_{reason}" for reason in ENDS_OF_TRAJECTORIES),
    *(f"turns/<k>/{what}" for what in ("tokens", "failed_share", "reward")),
)
OURS = (*OF_THE_LOSS, *OF_REWARDS, *OF_GENERATION, *OF_THE_UPDATE, *OF_TASKS, *OF_TURNS)

OF_TRL = (
    *("reward", "reward_std", "frac_reward_zero_std", "rewards/<name>/mean", "rewards/<name>/std"),
    *(f"completions/{what}_length" for what in ("mean", "min", "max")),
    *(f"completions/{what}_terminated_length" for what in ("mean", "min", "max")),
    *("completions/clipped_ratio", "num_tokens", "step_time"),
    *("tools/call_frequency", "tools/failure_frequency"),
)
OF_TRANSFORMERS = (
    *("loss", "grad_norm", "learning_rate", "epoch", "num_input_tokens_seen"),
    *("train_runtime", "train_tokens_per_second"),
    *("eval_loss", "eval_runtime", "eval_samples_per_second", "eval_steps_per_second"),
)


def logged_names(rewards: Iterable[str], tasks: Iterable[str] = ()) -> list[str]:
    """Return every name that a run may log whose rewards have the names ``rewards`` and whose tasks have the names
    ``tasks``. A team's code may log more (``team_may_log``)."""
    found = dict[str, None]()
    numbers = [str(number) for number in range(1, COUNTED_TURNS + 1)]
    several = {"<name>": [*rewards], "<task>": [*tasks], "<k>": numbers}
    for name in (*OURS, *OF_TRL, *OF_TRANSFORMERS):
        mark = next((mark for mark in several if mark in name), None)
        found |= dict.fromkeys([name] if mark is None else [name.replace(mark, one) for one in several[mark]])
    return ["step", *found, *(f"eval_{name}" for name in found if not name.startswith(("eval_", "train_")))]


def team_may_log(trainer: type, parts: Iterable[Any]) -> bool:
    """Return whether a run has code from outside this package, TRL and transformers, which may log names of its own:
    its ``trainer`` class, one of its ``parts`` (rewards, callbacks, a surrogate), or what a part of ours wraps."""
    return not is_librarys(trainer) or any(not is_librarys(one) or team_may_log(trainer, _inside(one)) for one in parts)


def _inside(part: Any) -> list[Any]:
    """Return the callables among the attributes of a part of ours, such as the reward that another reward wraps."""
    if isinstance(part, type) or not hasattr(part, "__dict__"):
        return []
    return [one for one in vars(part).values() if callable(one) and not isinstance(one, type)]
