"""VESPO: REINFORCE times a smooth function of the completion's importance weight."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from grpo_lab.batch import TokenBatch, masked_sum, safe
from grpo_lab.objectives.literal import LiteralRow

#: Bounds in nats: the log-ratio of a token is clamped to ±HIGHEST, the log of the whole weight to LOWEST … HIGHEST.
HIGHEST = 20.0
LOWEST = math.log(1e-8)
#: Smallest λ: a smaller one is taken as this, as in TRL.
LEAST_DECAY = 1e-4


@dataclass(frozen=True)
class GammaWeight:
    """VESPO's loss: REINFORCE, times a smooth weight of the whole completion.

        loss_t = −sg(φ(w)) · Â · log π(y_t),    φ(w) = w^k · e^{λ (1 − w)},    w = Π_s π(y_s)/μ(y_s), μ the sampler

    sg stops the gradient. φ(1) = 1, and a weight far from 1 fades on either side, without being normalised by length. k
    and λ depend on the sign of Â. The sampler's correction π_old/μ is a factor of w (``applies_correction``), with the
    tokens that the run's correction has truncated or masked counted as it says.

    Source: VESPO (arXiv 2602.10693 v3, §3.3 and eq. 20; c₁ = k, c₂ = λ), by TRL 1.16's ``get_gamma_weights`` and the
    authors' code (github.com/FloyedShen/VESPO), which clamps log-ratios at ±20 and w at 1e-8. The ratio's level has no
    effect.

    Args:
        k_pos, lambda_pos: k ≥ 0 and λ ≥ 0 where Â ≥ 0 (λ counts as 1e-4 at least, as in TRL); TRL's ``vespo_k_pos``,
            ``vespo_lambda_pos``.
        k_neg, lambda_neg: the same where Â < 0.
    """

    k_pos: float = 2.0
    lambda_pos: float = 3.0
    k_neg: float = 3.0
    lambda_neg: float = 2.0

    reads_ratio: ClassVar[bool] = False
    applies_correction: ClassVar[bool] = True
    #: φ is not 0 where the advantage is 0, so its mean is over the computed rows
    of_computed_rows: ClassVar[tuple[str, ...]] = ("vespo/phi_seq_mean",)

    def __post_init__(self) -> None:
        for name in ("k_pos", "lambda_pos", "k_neg", "lambda_neg"):
            value = getattr(self, name)
            if not 0 <= value < math.inf:
                raise ValueError(f"`{name}` (`vespo_{name}`) is {value}; it must be a finite number ≥ 0")

    def __call__(self, batch: TokenBatch) -> Tensor:
        return -self.weight(batch) * batch.advantages * batch.logps

    @torch.no_grad()
    def weight(self, batch: TokenBatch) -> Tensor:
        """Return φ(w), ``[B, 1]``; ``[B, T]`` where tokens have advantages of their own."""
        positive = batch.advantages >= 0
        k = torch.full_like(batch.advantages, self.k_neg).masked_fill(positive, self.k_pos)
        decay = torch.full_like(batch.advantages, self.lambda_neg).masked_fill(positive, self.lambda_pos)
        decay = decay.clamp(min=LEAST_DECAY)
        log_weight = _log_weight(batch)
        return torch.exp(decay + k * log_weight - decay * log_weight.exp()).nan_to_num(nan=0.0, posinf=0.0)

    def diagnostics(self, batch: TokenBatch) -> dict[str, Tensor]:
        """Return φ(w) of each completion, as TRL logs it."""
        return {"vespo/phi_seq_mean": self.weight(batch)}

    def literal(self, row: LiteralRow, t: int) -> float:
        """Compute the loss of token ``t`` in plain floats, for the start-up proof."""
        moved = [new - old for new, old in zip(row.logps, row.proximal_logps, strict=True)]
        total = min(max(sum(min(max(step, -HIGHEST), HIGHEST) for step in moved), LOWEST), HIGHEST)
        positive = row.advantage >= 0
        k = self.k_pos if positive else self.k_neg
        decay = max(self.lambda_pos if positive else self.lambda_neg, LEAST_DECAY)
        return -math.exp(decay + k * total - decay * math.exp(total)) * row.advantage * row.logps[t]


def _log_weight(batch: TokenBatch) -> Tensor:
    """Return log w of each completion, ``[B, 1]``, clamped to the bounds above."""
    moved = safe(batch.logps - batch.proximal_logps, batch.mask).clamp(-HIGHEST, HIGHEST)
    total = masked_sum(moved, batch.mask, dim=-1).unsqueeze(-1)
    if batch.sampler_weights is not None:
        correction = batch.sampler_weights.log().clamp(LOWEST, HIGHEST)
        if correction.shape == batch.mask.shape:
            correction = safe(correction, batch.mask)
        total = total + correction.sum(-1, keepdim=True)
    return total.clamp(LOWEST, HIGHEST)
