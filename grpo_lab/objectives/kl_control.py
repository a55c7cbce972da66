"""β as a controller: how strongly the KL is charged next, from how large it was."""

from __future__ import annotations

import math
from dataclasses import dataclass

#: the error that acts is held at ± this much of the target (Ziegler et al.; TRL's old PPO)
LARGEST_ERROR = 0.2
RATE = 0.1


@dataclass(frozen=True)
class AdaptiveKL:
    """β_{t+1} = β_t · (1 + K·e_t),  e_t = clip((KL_t − target)/target, −0.2, 0.2): the KL too large, β grows.

    Source: Ziegler et al. (arXiv 1909.08593, section 2.2), K = 0.1: by 2% a generation batch at the most. TRL's old PPO
    (up to 0.11) and verl have K = n/horizon with n completions a generation batch, so that as many completions do as
    much, however they are cut into batches.

    Args:
        target: the KL to hold, nats a completion: Σ_t (log π − log π_ref) of a completion's own tokens, mean over the
            completions.
        rate: K; ``None``: 0.1, or by ``horizon``.
        horizon: completions over which β follows an error of 1; ``None``: by ``rate``.
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
            raise ValueError(
                f"`kl.rate` is {self.rate}; it must be < {1 / LARGEST_ERROR:g}, or β could become 0 or less"
            )

    def rate_of(self, completions: int) -> float:
        """K for a generation batch of so many completions.

        Raises:
            ValueError: the horizon is so short that one batch could take β to 0 or below.
        """
        if self.horizon is None:
            return RATE if self.rate is None else self.rate
        rate = completions / self.horizon
        if rate * LARGEST_ERROR >= 1:
            raise ValueError(
                f"`kl.horizon` is {self.horizon:g} and a generation batch has {completions} completions: β could "
                "become 0 or less; set "
                f"a horizon > {completions * LARGEST_ERROR:g}"
            )
        return rate

    def following(self, coefficient: float, measured: float, completions: int) -> float:
        """β of the next generation batch.

        Args:
            coefficient: β that the batch was charged with.
            measured: its KL, nats a completion; may be negative, being an estimate.
            completions: how many it had, over all ranks.

        Raises:
            ValueError: the KL is no number.
        """
        if not math.isfinite(measured):
            raise ValueError(f"the measured KL is {measured}; `kl.target` cannot follow it")
        error = min(max(measured / self.target - 1, -LARGEST_ERROR), LARGEST_ERROR)
        return coefficient * (1 + self.rate_of(completions) * error)


__all__ = ["AdaptiveKL"]
