"""What TRL has written into its logs, taken back or put right."""

from __future__ import annotations

from typing import Any

from torch import Tensor

#: TRL's own metrics of the sampler correction; a team's may stand under the same prefix.
SAMPLING_METRICS: tuple[str, ...] = (
    "sampling/sampling_logp_difference/mean",
    "sampling/sampling_logp_difference/max",
    "sampling/importance_sampling_ratio/min",
    "sampling/importance_sampling_ratio/mean",
    "sampling/importance_sampling_ratio/max",
)


def forget_sampling_metrics(trainer: Any, mode: str) -> None:
    """Drop what TRL has just appended to its own ``sampling/*`` metrics (values computed from deferred zeros)."""
    seen = trainer._metrics[mode]
    for name in SAMPLING_METRICS:
        if name in seen:
            seen[name].pop()
            if not seen[name]:
                del seen[name]


def replace_logged_advantages(trainer: Any, advantages: Tensor) -> None:
    """Put the advantages in force where TRL keeps those of its own for the completions table."""
    logged = trainer._logs["advantages"]
    for _ in range(min(len(logged), advantages.size(0))):
        logged.pop()
    logged.extend(advantages.tolist())
