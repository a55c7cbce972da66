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


def logged_rows(trainer: Any, count: int) -> dict[str, list[Any]]:
    """The last ``count`` rows of TRL's completions table, column by column; a column that not every row has is left out."""
    logged = trainer._logs
    columns = {name: logged[name] for name in ("prompt", "completion", "advantages")}
    columns |= {f"{part}/{name}": rows for part in ("rewards", "extra") for name, rows in logged[part].items()}
    return {name: list(rows)[-count:] for name, rows in columns.items() if len(rows) >= count}


def replace_logged_rows(trainer: Any, columns: dict[str, list[Any]]) -> None:
    """Put ``columns`` (as ``logged_rows`` gives them) in the place of as many of the last rows."""
    for name, rows in columns.items():
        part, _, column = name.partition("/")
        logged = trainer._logs[part][column] if column else trainer._logs[part]
        for _ in range(min(len(logged), len(rows))):
            logged.pop()
        logged.extend(rows)
