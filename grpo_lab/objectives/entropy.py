"""The entropy bonus: loss = policy loss − c · mean entropy, with c fixed or steered."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from grpo_lab.batch import Denominators, TokenBatch, masked_sum
from grpo_lab.objectives.gates import kept_tokens


@dataclass(frozen=True)
class AdaptiveEntropy:
    """A controller of the coefficient c of the entropy bonus, which moves by δ after each optimizer step.

    After a step of mean entropy H: c ← min(c + δ, highest) if H ≤ target, else max(c − δ, lowest). The next step
    applies this c if H ≤ target, and 0 otherwise. The first step applies none.

    Source: Skywork-OR1 (arXiv 2505.22312 v2, §3.2.5, eq. 3.2), as TRL 1.16 has it: H is measured over the step's tokens
    of all ranks, and the bounds are TRL's addition. In the paper H is measured on the rollouts, and the same step
    applies the new c.

    Args:
        target: entropy to hold, nats per token.
        delta: δ, by which c changes in a step.
        lowest: lower bound of c.
        highest: upper bound of c.
    """

    target: float = 0.2
    delta: float = 0.005
    lowest: float = 0.0
    highest: float = 1.0

    def following(self, coefficient: float, measured: float) -> float:
        """Return the new c after a step in which c was ``coefficient`` and the mean entropy ``measured``, nats per
        token."""
        if measured <= self.target:
            return min(coefficient + self.delta, self.highest)
        return max(coefficient - self.delta, self.lowest)

    def in_force(self, coefficient: float, measured: float) -> float:
        """Return the c that a step applies: ``coefficient``, or 0 if the entropy of the step before, ``measured``, was
        above the target. Before the first step ``measured`` is infinite."""
        if measured <= self.target:
            return coefficient
        return 0.0


@dataclass(frozen=True)
class EntropyBonus:
    """The entropy bonus, as a term of the loss:

        −c · 1/micro-batches Σ_b 1/n_b Σ_{i ∈ b} Σ_t H(π(·|y_<t)),    n_b: the loss tokens of micro-batch b on its rank

    It is a mean per micro-batch whatever the aggregation, as in TRL 1.16 (``entropy_coef``). n_b is known before rows
    are re-cut, so this is a sum over rows, and bins give it exactly. It also acts on rows of advantage 0, so none is
    left out. With ``TopEntropy`` only the chosen tokens count, in the sum over t and in n_b.

    Source: Mnih et al. 2016 (arXiv 1602.01783, §4); the form is TRL's.

    Args:
        coefficient: c, per nat; with ``control`` its first value.
        control: moves c after each step; ``None`` keeps it.
    """

    coefficient: float
    control: AdaptiveEntropy | None = None

    def loss(self, batch: TokenBatch, denominators: Denominators, coefficient: float | None = None) -> Tensor:
        """Return the bonus as a loss, a scalar, for some rows of a step.

        Args:
            batch: the rows, with the entropy of each token.
            denominators: ``micro_batch_tokens`` (n_b) and ``micro_batches`` are read.
            coefficient: c in force; ``None`` for the first one.
        """
        assert batch.entropies is not None  # the policy's head makes them
        if coefficient is None:
            coefficient = self.coefficient
        shares = batch.entropies / denominators.micro_batch_tokens
        return -coefficient * masked_sum(shares, kept_tokens(batch)) / denominators.micro_batches

    def in_words(self) -> str:
        """Return the settings of the bonus, for messages."""
        if self.control is None:
            return f"entropy_coef={self.coefficient:g}"
        return f"use_adaptive_entropy, entropy_target={self.control.target:g}"
