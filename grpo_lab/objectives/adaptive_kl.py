"""A KL coefficient that follows a target."""

from __future__ import annotations

import math
from dataclasses import dataclass

#: The error is clipped to ± this share of the target (Ziegler et al.; TRL's old PPO).
LARGEST_ERROR = 0.2
#: K where a run sets neither ``rate`` nor ``horizon`` (Ziegler et al.).
RATE = 0.1


@dataclass(frozen=True)
class AdaptiveKL:
    """A controller that moves β after each generation batch so that the KL follows a target:

        β_{t+1} = β_t · (1 + K·e_t),    e_t = clip((KL_t − target)/target, −0.2, 0.2)

    β grows if the KL is above the target. Source: Ziegler et al. (arXiv 1909.08593, section 2.2) with K = 0.1, so that
    β changes by at most 2% a generation batch. TRL's old PPO (up to 0.11) and verl have K = n/horizon with n
    completions a generation batch. Then the same number of completions has the same effect, however they are cut into
    batches.

    Args:
        target: the KL to hold, in nats per completion: the mean over completions of Σ_t (log π − log π_ref) over the
            tokens that the policy wrote.
        rate: K. ``None`` means n/``horizon`` if ``horizon`` is given, else 0.1.
        horizon: number of completions over which β follows an error of 1. ``None``: ``rate`` says how fast.
    """

    target: float
    rate: float | None = None
    horizon: float | None = None

    def __post_init__(self) -> None:
        for name in ("target", "rate", "horizon"):
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and value > 0):
                raise ValueError(f"`kl.{name}` is {value}; it must be a number > 0")
        if self.rate is not None and self.horizon is not None:
            raise ValueError("`kl.rate` and `kl.horizon` are two names for how fast β follows; set one")
        if self.rate is not None and self.rate * LARGEST_ERROR >= 1:
            most = f"{1 / LARGEST_ERROR:g}"
            raise ValueError(f"`kl.rate` is {self.rate}; it must be < {most}, or β could become 0 or less")

    def rate_of(self, completions: int) -> float:
        """Return K for a generation batch of ``completions`` completions. Raises ValueError if one such batch could
        take β to 0 or below."""
        if self.horizon is None:
            if self.rate is None:
                return RATE
            return self.rate
        rate = completions / self.horizon
        if rate * LARGEST_ERROR >= 1:
            raise ValueError(
                f"`kl.horizon` is {self.horizon:g} and a generation batch has {completions} completions: β could "
                f"become 0 or less; set a horizon > {completions * LARGEST_ERROR:g}"
            )
        return rate

    def following(self, coefficient: float, measured: float, completions: int) -> float:
        """Return β for the next generation batch.

        Args:
            coefficient: β that this batch was charged with.
            measured: the batch's KL in nats per completion; it may be negative, being an estimate.
            completions: number of completions in the batch, over all ranks.

        Raises:
            ValueError: the measured KL is not finite.
        """
        if not math.isfinite(measured):
            raise ValueError(f"the measured KL is {measured}; `kl.target` cannot follow it")
        error = min(max(measured / self.target - 1, -LARGEST_ERROR), LARGEST_ERROR)
        return coefficient * (1 + self.rate_of(completions) * error)
