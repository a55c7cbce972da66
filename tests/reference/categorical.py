"""A policy small enough to enumerate: autoregressive over 4 tokens and 3 positions, 64 sequences, float64.

Every prefix has logits of its own (1 + 4 + 16 rows of 4), so the policy can be any distribution over sequences. With
all sequences in one batch, an expectation is a sum weighted by the sequences' probabilities: no sampling noise.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from grpo_lab.batch import TokenBatch

VOCABULARY, LENGTH = 4, 3
SEQUENCES = torch.tensor(list(itertools.product(range(VOCABULARY), repeat=LENGTH)))
PREFIXES = [prefix for length in range(LENGTH) for prefix in itertools.product(range(VOCABULARY), repeat=length)]
PREFIX_OF = torch.tensor([[PREFIXES.index(tuple(row[:t])) for t in range(LENGTH)] for row in SEQUENCES.tolist()])
"""``[64, 3]``: the row of logits that token t of each sequence is drawn from."""


def random_logits(seed: int, spread: float = 1.0, blind: bool = False) -> Tensor:
    """``[21, 4]``. ``blind``: the same logits for every prefix of one length (tokens are independent)."""
    rng = random.Random(seed)  # Python's own: the same numbers on every machine, which the page's table shows
    rows = [[rng.gauss(0.0, spread) for _ in range(VOCABULARY)] for _ in PREFIXES]
    logits = torch.tensor(rows, dtype=torch.float64)
    if blind:
        first = [PREFIXES.index((0,) * len(prefix)) for prefix in PREFIXES]
        logits = logits[first]
    return logits


def token_logps(logits: Tensor) -> Tensor:
    """Log-prob of every token of every sequence, ``[64, 3]``."""
    return logits.log_softmax(-1)[PREFIX_OF, SEQUENCES]


@dataclass(frozen=True)
class World:
    """A policy and a reference."""

    policy: Tensor
    reference: Tensor

    @property
    def probabilities(self) -> Tensor:
        """Of the 64 sequences under the policy, no gradient."""
        return token_logps(self.policy.detach()).sum(1).exp()

    def gradient(self, scalar: Callable[[Tensor], Tensor]) -> Tensor:
        """d scalar(logits)/d logits at the policy, flat."""
        logits = self.policy.detach().clone().requires_grad_()
        (gradient,) = torch.autograd.grad(scalar(logits), logits)
        return gradient.flatten()

    def on_policy_batch(self, logits: Tensor, advantages: Tensor | None = None) -> TokenBatch:
        """All sequences as one batch whose old log-probs are the policy's own."""
        logps = token_logps(logits)
        return TokenBatch(
            logps=logps,
            proximal_logps=logps.detach(),
            log_ratio=logps - logps.detach(),
            advantages=torch.zeros(len(SEQUENCES), 1, dtype=torch.float64) if advantages is None else advantages,
            mask=torch.ones(len(SEQUENCES), LENGTH, dtype=torch.bool),
            ref_logps=token_logps(self.reference),
        )

    # -- what gradients are compared with ------------------------------------------------------------------------------

    def divergence(self, logits: Tensor) -> Tensor:
        """KL(π‖π_ref) of the distribution over whole sequences."""
        logps = token_logps(logits).sum(1)
        return (logps.exp() * (logps - token_logps(self.reference).sum(1))).sum()

    def divergence_per_prefix(self, logits: Tensor, forward: bool = False) -> Tensor:
        """Σ over prefixes of P(prefix)·KL(next token), the P held fixed: no gradient for where a token leads to.

        ``forward``: KL(π_ref‖π) of the next token instead of KL(π‖π_ref).
        """
        policy, reference = logits.log_softmax(-1), self.reference.log_softmax(-1)
        first, second = (reference, policy) if forward else (policy, reference)
        each = (first.exp() * (first - second)).sum(-1)
        reach = torch.zeros(len(PREFIXES), dtype=torch.float64)
        for t in range(LENGTH):
            reach.index_add_(0, PREFIX_OF[:, t], self.probabilities)
        return (reach * each).sum()


def cosine(found: Tensor, true: Tensor) -> float:
    return float(found @ true / (found.norm() * true.norm())) if found.norm() > 1e-12 else float("nan")


def relative_error(found: Tensor, true: Tensor) -> float:
    return float((found - true).norm() / true.norm())
