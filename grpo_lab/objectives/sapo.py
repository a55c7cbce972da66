"""SAPO: a smooth gate in the place of PPO's clip."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from grpo_lab.batch import TokenBatch
from grpo_lab.objectives.literal import LiteralRow


@dataclass(frozen=True)
class SoftGate:
    """SAPO's loss, a smooth gate in place of a clip: loss_t = −4/τ · σ(τ (ρ_t − 1)) · Â, with τ = τ_pos where Â > 0,
    else τ_neg.

    σ is the logistic function. The derivative of 4/τ · σ(τ (ρ − 1)) by ρ is 1 at ρ = 1 and falls smoothly on either
    side, so a token far off the policy is damped, not cut.

    Source: SAPO (arXiv 2511.20347), as TRL 1.16 (``sapo``) and verl have it. With a sequence-level ratio the gate is of
    the whole completion, which the paper does not do.

    Args:
        temperature_neg: τ_neg, > 0; TRL's ``sapo_temperature_neg``. The authors' 1.05 damps bad completions sooner.
        temperature_pos: τ_pos, > 0; TRL's ``sapo_temperature_pos``.
    """

    temperature_neg: float = 1.05
    temperature_pos: float = 1.0

    def __post_init__(self) -> None:
        for name in ("temperature_neg", "temperature_pos"):
            value = getattr(self, name)
            if not 0 < value < math.inf:
                raise ValueError(f"`{name}` (sapo's τ) is {value}; it must be a finite number above 0")

    def __call__(self, batch: TokenBatch) -> Tensor:
        negative = torch.full_like(batch.advantages, self.temperature_neg)
        temperature = negative.masked_fill(batch.advantages > 0, self.temperature_pos)
        gate = torch.sigmoid(temperature * (batch.ratio - 1)) * 4 / temperature
        return -gate * batch.advantages

    def literal(self, row: LiteralRow, t: int) -> float:
        """Compute the loss of token ``t`` in plain floats, for the start-up proof."""
        temperature = self.temperature_pos if row.advantage > 0 else self.temperature_neg
        ratio = math.exp(row.log_ratios[t])
        return -4 / temperature / (1 + math.exp(-temperature * (ratio - 1))) * row.advantage
