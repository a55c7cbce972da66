"""Policies small enough to enumerate: every completion of a few tokens, in float64, so that an expectation is a sum.

A policy is a table of logits with a row for each prefix that can go on, so it can be any distribution over completions.
All completions are in one batch ``[C, T]``; short ones are padded behind their end token.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from grpo_lab.batch import safe


@contextmanager
def one_thread() -> Iterator[None]:
    """Let torch compute with one thread during the block: on some hundred numbers, threads wait for each other longer
    than they compute."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@dataclass(frozen=True)
class Tree:
    """All C completions of up to T tokens from a vocabulary of V.

    A prefix is what a completion begins with before one of its tokens; the empty one counts.

    Args:
        tokens: long ``[C, T]``, 0 on padding.
        mask: bool ``[C, T]``, True on the completion's own tokens, its end among them.
        prefix: long ``[C, T]``, index of the row of logits that each token is drawn from; 0 on padding.
        rows: how many prefixes there are.
        vocabulary: V.
    """

    tokens: Tensor
    mask: Tensor
    prefix: Tensor
    rows: int
    vocabulary: int

    @staticmethod
    def of(vocabulary: int = 4, length: int = 3, end: int | None = 0) -> Tree:
        """Enumerate the completions of up to ``length`` tokens from 0 to ``vocabulary`` - 1.

        ``end``: the token that ends a completion; None: there is none, and every completion has ``length`` tokens.
        """
        going_on = [token for token in range(vocabulary) if token != end]
        prefixes = [one for n in range(length) for one in itertools.product(going_on, repeat=n)]
        ended = [(*one, token) for one in prefixes for token in range(vocabulary) if token == end]
        truncated = list(itertools.product(going_on, repeat=length))
        completions = ended + truncated
        row_of = {one: row for row, one in enumerate(prefixes)}
        padded = [[*one, *[0] * (length - len(one))] for one in completions]
        drawn_from = [[row_of[one[:t]] if t < len(one) else 0 for t in range(length)] for one in completions]
        mask = torch.arange(length) < torch.tensor([[len(one)] for one in completions])
        return Tree(torch.tensor(padded), mask, torch.tensor(drawn_from), len(prefixes), vocabulary)

    def logits(self, seed: int, spread: float = 1.0) -> Tensor:
        """Draw logits ``[rows, V]``, normal with mean 0, by Python's generator: the same numbers on every machine."""
        draw = random.Random(seed)
        rows = [[draw.gauss(0.0, spread) for _ in range(self.vocabulary)] for _ in range(self.rows)]
        return torch.tensor(rows, dtype=torch.float64)

    def logps(self, logits: Tensor) -> Tensor:
        """Compute the log-prob of every token, nats ``[C, T]``; 0 on padding."""
        return safe(logits.log_softmax(-1)[self.prefix, self.tokens], self.mask)

    def chances(self, logits: Tensor) -> Tensor:
        """Compute the probability of every completion, ``[C]``; they sum to 1."""
        return self.logps(logits).sum(1).exp()

    def scores(self, logits: Tensor) -> Tensor:
        """Compute the gradient of every token's log-prob with respect to the logits, ``[C, T, rows · V]``: one-hot −
        softmax in the row of the token's prefix, 0 elsewhere and on padding."""
        completions, length = self.mask.shape
        found = torch.zeros(completions, length, self.rows, self.vocabulary, dtype=torch.float64)
        row = torch.arange(completions).unsqueeze(1)
        place = torch.arange(length).unsqueeze(0)
        found[row, place, self.prefix] = -logits.detach().softmax(-1)[self.prefix]
        found[row, place, self.prefix, self.tokens] += 1
        return found.flatten(2).masked_fill(~self.mask.unsqueeze(-1), 0.0)

    def divergence(self, logits: Tensor, reference: Tensor) -> Tensor:
        """Compute KL(π‖π_ref) over whole completions, in nats, a scalar with its exact gradient."""
        logps = self.logps(logits).sum(1)
        return (logps.exp() * (logps - self.logps(reference).sum(1))).sum()

    def divergence_of_next_tokens(self, logits: Tensor, reference: Tensor) -> Tensor:
        """Compute the value of ``divergence`` by the chain rule, Σ P(prefix) · KL(next token), with P held fixed.

        The gradient differs from that of ``divergence``: it does not charge a token for the divergence of the tokens
        after it.
        """
        policy = logits.log_softmax(-1)
        other = reference.log_softmax(-1)
        each = (policy.exp() * (policy - other)).sum(-1)
        before = self.logps(logits.detach()).cumsum(1).roll(1, 1)
        before[:, 0] = 0.0
        reach = torch.zeros(self.rows, dtype=torch.float64)
        reach[self.prefix[self.mask]] = before[self.mask].exp()
        return (reach * each).sum()
