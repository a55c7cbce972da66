"""Gates: weights of the surrogate's loss that leave completions or tokens out of the policy gradient, and only there.
The KL term still acts on all tokens, as in TRL."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from grpo_lab.batch import SAMPLER_LOGPS, TokenBatch, masked_row_mean
from grpo_lab.objectives.literal import LiteralRow


@dataclass(frozen=True)
class OffPolicyMask:
    """Leave out a completion that went badly and that the policy would hardly write any more:

        gate = 1 if Â ≥ 0 or 1/|y| Σ_t (log μ(y_t) − log π(y_t)) ≤ δ, else 0

    μ is the policy that sampled the completion: its log-probs are the engine's, or the proximal ones without an engine.
    A token for which the engine reported none counts as 0. The gate is ``[B, 1]``, or ``[B, T]`` where advantages are
    per token.

    Source: DeepSeek-V3.2 (arXiv 2512.02556, §3.1, "off-policy sequence masking"), by TRL 1.16's
    ``get_off_policy_mask``. The authors' δ is undisclosed. As in TRL, a completion of exactly δ stays.

    Args:
        threshold: δ, nats per token.
    """

    threshold: float

    @torch.no_grad()
    def __call__(self, batch: TokenBatch) -> Tensor:
        sampled = batch.extras.get(SAMPLER_LOGPS, batch.proximal_logps)
        moved = (sampled - batch.logps).nan_to_num(nan=0.0)
        near = masked_row_mean(moved, batch.mask).unsqueeze(1) <= self.threshold
        return ((batch.advantages >= 0) | near).to(batch.logps.dtype)

    def literal(self, row: LiteralRow, t: int) -> float:
        """Compute the weight of token ``t`` in plain floats, for the start-up proof."""
        moved = [was - now for was, now in zip(row.sampler_logps, row.logps, strict=True)]
        return float(row.advantage >= 0 or sum(moved) / len(moved) <= self.threshold)


@dataclass(frozen=True)
class TopEntropy:
    """Train only on the tokens at which the policy is least certain: gate ``[B, T]`` = 1 where its entropy is at or
    above the (1 − ρ)-quantile, else 0.

    The quantile is of the loss tokens of one micro-batch over all ranks, as in TRL 1.16 (``get_high_entropy_mask``), so
    this part selects (``Selecting``). An entropy bonus acts on the chosen tokens alone. Aggregations divide by all
    tokens.

    Source: "Beyond the 80/20 rule" (arXiv 2506.01939 v2, eq. 6). The authors take ρ = 0.2, write of a "(micro-)batch",
    and divide their sum by the number of chosen tokens.

    Args:
        quantile: ρ, the share of tokens that train, 0 to 1; TRL's ``top_entropy_quantile``.
    """

    quantile: float = 0.2

    selection: ClassVar[str] = "top_entropy"

    def __post_init__(self) -> None:
        if not 0 <= self.quantile <= 1:
            raise ValueError(f"`top_entropy_quantile` is {self.quantile}; it must be a number from 0 to 1")

    def select(self, batch: TokenBatch, gather: Callable[[Tensor], Tensor]) -> Tensor:
        """Return bool ``[B, T]``: the loss tokens of this rank whose entropy reaches the quantile over all ranks."""
        assert batch.entropies is not None  # the policy's head makes them
        entropies = batch.entropies.detach()
        of_all = gather(entropies[batch.mask].float())
        if of_all.numel() == 0:
            return torch.zeros_like(batch.mask)
        least = torch.quantile(of_all, 1 - self.quantile)
        return batch.mask & (entropies.float() >= least)

    def __call__(self, batch: TokenBatch) -> Tensor:
        return batch.chosen[self.selection].to(batch.logps.dtype)

    def literal(self, row: LiteralRow, t: int) -> float:
        """Compute the weight of token ``t`` in plain floats, for the start-up proof."""
        return float(row.chosen[self.selection][t])


def kept_tokens(batch: TokenBatch) -> Tensor:
    """Return bool ``[B, T]``: the loss tokens that ``TopEntropy`` has chosen; in a run without it all loss tokens."""
    chosen = batch.chosen.get(TopEntropy.selection)
    if chosen is None:
        return batch.mask
    return batch.mask & chosen
