"""The entropy bonus: loss = policy loss − c · mean entropy, with c fixed or steered."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from grpo_lab.batch import Denominators, TokenBatch, masked_sum
from grpo_lab.objectives.gates import kept_tokens


@dataclass(frozen=True)
class AdaptiveEntropy:
    """Steers c: after an optimizer step of mean entropy H, c ← min(c + δ, highest) if H ≤ target, else
    max(c − δ, lowest). The next step applies c if H ≤ target, else 0; the first step applies none.

    Source: Skywork-OR1 (arXiv 2505.22312 v2, §3.2.5, eq. 3.2), as TRL 1.16 has it: H is measured over the step's tokens
    of all ranks, and the bounds are TRL's addition. The paper measures H on the rollouts, and that step applies c.

    Args:
        target: nats per token.
        delta: δ, the change of c in a step.
        lowest: lower bound of c.
        highest: upper bound of c.
    """

    target: float = 0.2
    delta: float = 0.005
    lowest: float = 0.0
    highest: float = 1.0

    def following(self, coefficient: float, measured: float) -> float:
        """Return c after a step whose mean entropy was ``measured``, nats per token."""
        if measured <= self.target:
            return min(coefficient + self.delta, self.highest)
        return max(coefficient - self.delta, self.lowest)

    def in_force(self, coefficient: float, measured: float) -> float:
        """Return what a step applies after one whose mean entropy was ``measured`` (infinite: there was none)."""
        if measured <= self.target:
            return coefficient
        return 0.0


@dataclass(frozen=True)
class EntropyBonus:
    """−c · 1/micro-batches Σ_b 1/n_b Σ_{i ∈ b} Σ_t H(π(·|y_<t)),  n_b: the tokens of micro-batch b on its rank.

    A mean per micro-batch whatever the aggregation, as in TRL 1.16 (``entropy_coef``). n_b is known before rows are
    re-cut, so this is a sum over rows, and bins give it exactly. It acts on rows of advantage 0, too: none is left out.
    With ``TopEntropy`` it acts on the tokens that this chose.

    Source: Mnih et al. 2016 (arXiv 1602.01783, §4); the form is TRL's.

    Args:
        coefficient: c, per nat; with ``control`` where it starts.
        control: what steers c.
    """

    coefficient: float
    control: AdaptiveEntropy | None = None

    def loss(self, batch: TokenBatch, denominators: Denominators, coefficient: float | None = None) -> Tensor:
        """Return the bonus as a loss, a scalar. ``coefficient``: c in force, if another than at the start."""
        assert batch.entropies is not None  # the policy's head makes them
        if coefficient is None:
            coefficient = self.coefficient
        shares = batch.entropies / denominators.micro_batch_tokens
        return -coefficient * masked_sum(shares, kept_tokens(batch)) / denominators.micro_batches

    def in_words(self) -> str:
        """Return the settings that are in force."""
        if self.control is None:
            return f"entropy_coef={self.coefficient:g}"
        return f"use_adaptive_entropy, entropy_target={self.control.target:g}"
