"""Loss of a critic, and how well it explains the returns. Pure: no trainer, no averaging."""

from __future__ import annotations

import torch
from torch import Tensor

#: How far a value may move from the one at generation, in units of the reward.
CLIPRANGE = 0.2


def clipped_values(values: Tensor, old_values: Tensor, cliprange: float | None) -> Tensor:
    """Return V_clip = V_old + clamp(V − V_old, ±cliprange), in units of the reward; V itself if there is no
    ``cliprange``."""
    if cliprange is None:
        return values
    return old_values + (values - old_values).clamp(-cliprange, cliprange)


def value_loss(values: Tensor, old_values: Tensor, returns: Tensor, cliprange: float | None = CLIPRANGE) -> Tensor:
    """Return the critic's loss per token, ``[B, T]`` in units of the reward squared.

        ½ · max( (V − R)², (V_clip − R)² )        V_clip = V_old + clamp(V − V_old, ±cliprange)

    The larger of the two squares counts. So a value that has moved further than ``cliprange`` *towards* its return has
    no gradient; one that moved away has all of it. Source: PPO's public implementations (OpenAI baselines, AlpacaFarm,
    TRL's deleted PPOTrainer); the paper (arXiv 1707.06347, eq. 9) has the plain square, ``cliprange=None``.

    Args:
        values: V, ``[B, T]``, of the critic that is being trained; carries the gradient.
        old_values: V_old, ``[B, T]``, the critic's values at generation.
        returns: R, ``[B, T]``: Â + V_old before any whitening.
        cliprange: > 0, or ``None`` for the plain square.
    """
    clipped = clipped_values(values, old_values, cliprange)
    return 0.5 * torch.maximum((values - returns).square(), (clipped - returns).square())


def value_clip_acts(values: Tensor, old_values: Tensor, returns: Tensor, cliprange: float | None = CLIPRANGE) -> Tensor:
    """Return bool ``[B, T]``: True where the clipped square is the larger one, so that the loss has no gradient."""
    clipped = clipped_values(values, old_values, cliprange)
    return (clipped - returns).square() > (values - returns).square()


def explained_variance(returns: float, errors: float) -> float | None:
    """Return ``1 − Var(R − V)/Var(R)``, from the variances Var(R) = ``returns`` and Var(R − V) = ``errors``.

    It is 1 for a perfect critic, 0 for a constant one, negative for a worse one; ``None`` if the returns do not vary.
    """
    if returns <= 0:
        return None
    return 1.0 - errors / returns
