"""Reading a short history of logging windows: means of the last ones, of the first ones, and whether a change is more
than noise."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import fmean, variance

Window = Mapping[str, object]
"""One logged row: metric → number (other values are not looked at), with ``step``, the optimizer step."""

History = Sequence[Window]
"""Windows of training, oldest first."""

PERSISTENCE = 3
"""Windows of which a rule takes the mean: one window alone is a few groups, and one bad batch is no illness. Ours."""


def number(window: Window, *names: str) -> float | None:
    """The first of these metrics that the window has, finite or not; None where it has none. TRL logs NaN as None."""
    for name in names:
        value = window.get(name, False)
        if value is None:
            return math.nan
        if isinstance(value, int | float) and not isinstance(value, bool):
            return float(value)
    return None


def not_zero(window: Window, prefix: str) -> list[str]:
    """What follows ``prefix`` in the names of its metrics that are not 0."""
    return [name.removeprefix(prefix) for name in window if name.startswith(prefix) and number(window, name)]


def values(history: History, *names: str) -> list[float]:
    """The finite values, window by window; a window without the metric is passed over."""
    found = (number(window, *names) for window in history)
    return [value for value in found if value is not None and math.isfinite(value)]


def recent(history: History, *names: str) -> float | None:
    """Mean over the last ``PERSISTENCE`` windows that there are (fewer at the start); None where the metric is not
    logged."""
    found = values(history[-PERSISTENCE:], *names)
    return fmean(found) if found else None


def lasting(history: History, *names: str) -> float | None:
    """As ``recent``, and None before there are ``PERSISTENCE`` windows."""
    return recent(history, *names) if len(history) >= PERSISTENCE else None


def at_start(history: History, *names: str) -> float | None:
    """Mean over the first ``PERSISTENCE`` windows; None before there are as many after them."""
    if len(history) < 2 * PERSISTENCE:
        return None
    found = values(history[:PERSISTENCE], *names)
    return fmean(found) if found else None


def all_alike(history: History) -> bool:
    """Whether every group of the last windows had equal rewards."""
    shares = values(history[-PERSISTENCE:], "groups/dead_share", "frac_reward_zero_std")
    return bool(shares) and min(shares) >= 1


def no_completion_scored(history: History) -> bool:
    """The mean of a reward that scored no completion is NaN."""
    last = history[-PERSISTENCE:]
    means = [number(w, name) for w in last for name in w if name.startswith("rewards/") and name.endswith("/mean")]
    return all_alike(history) and bool(means) and all(mean is not None and math.isnan(mean) for mean in means)


def has_critic(history: History) -> bool:
    """Whether the last windows are of PPO with a critic; a window of a batch that is used again logs no reward."""
    return any("ppo/task_reward" in window for window in history[-PERSISTENCE:])


def step_of(window: Window) -> int:
    """The optimizer step at the end of the window."""
    return int(number(window, "step") or 0)


def last_steps(history: History, steps: int, windows: int) -> History:
    """The windows of the last ``steps`` optimizer steps, and at least ``windows`` of them; empty where the history does
    not reach back as far."""
    if len(history) < windows or step_of(history[-1]) - step_of(history[0]) < steps:
        return []
    first = step_of(history[-1]) - steps
    back = len(history) - windows
    while back and step_of(history[back - 1]) >= first:
        back -= 1
    return history[back:]


def rise_in_errors(series: Sequence[float]) -> float:
    """Mean of the later half minus mean of the earlier half, in standard errors of that difference.

    (m₂ − m₁) / √(s₁²/n₁ + s₂²/n₂), Welch's statistic (Biometrika 34, 1947): below about 2 in size a change is within
    the noise. 0 where nothing varies and nothing changed, ±inf where a change has no noise at all.

    Raises:
        ValueError: fewer than 4 values, of which two halves have no variance.
    """
    if len(series) < 4:
        raise ValueError(f"{len(series)} values; two halves of 2 or more are needed")
    half = len(series) // 2
    early, late = series[:half], series[half:]
    change = fmean(late) - fmean(early)
    error = math.sqrt(variance(early) / len(early) + variance(late) / len(late))
    if error == 0:
        return math.copysign(math.inf, change) if change else 0.0
    return change / error
