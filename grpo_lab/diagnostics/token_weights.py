"""The weight that each token really has in the gradient, and what the formulas say it is. Pure: torch, no trainer.

    ∇loss = −Σ_{i,t} w_{i,t} ∇log π(y_{i,t}),        w_{i,t} = −∂loss/∂log π(y_{i,t})

The loss in force is differentiated, so this holds for every surrogate, ratio, aggregation and ``token_loss`` of a team.
On-policy, with one advantage Â_i for the |o_i| loss tokens of completion i, the presets come to

    w_{i,t} = Â_i · |o_i|^(α−1) / D

======================================  ===  =================  ==========================
preset                                  α    Â                  D
======================================  ===  =================  ==========================
grpo, gspo                              0    (r − r̄)/(σ + ε)    rows
dapo, bnpo, cispo, …_token_mean         1    (r − r̄)/(σ + ε)    tokens (bnpo: local ones)
dr_grpo, reinforce                      1    r − r̄              rows · budget
mirror_descent                          1    r − r̄              rows
======================================  ===  =================  ==========================

Two questions have different answers. *Which estimator is unbiased?* The one with α = 1 and without σ: its expectation
is ∇E[r] up to a constant. A factor 1/|o_i| changes the direction of the expected gradient wherever length and reward
are correlated, and a factor 1/σ gives questions different weights. *Which answers weigh more?* A whole answer has the
weight Σ_t |w_{i,t}| = |Â_i| · |o_i|^α / D: with α = 0 answers of all lengths weigh the same, and with α = 1 an answer
weighs in proportion to its length. "No length bias" is a property of the estimator, and says nothing of an answer's
influence.

With rewards of 0 and 1 and pass rate p a group's mean |Â| is 2p(1 − p), and 2√(p(1 − p)) where it is divided by σ, the
standard deviation with the divisor G (with G − 1, times √((G − 1)/G)). Sources: GRPO (arXiv 2402.03300, eq. 3), Dr.GRPO
(arXiv 2503.20783, §3.1, §3.2), DAPO (arXiv 2503.14476, eq. 8), GSPO (arXiv 2507.18071, eq. 7), Kimi k1.5 (arXiv
2501.12599, §2.3.2). That |o|^(α−1) is a family comes from an unreviewed note.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from grpo_lab.batch import masked_sum

#: Name of the file in a run's folder that has a line for each optimizer step that was analysed.
FILE = "token_weights.jsonl"
QUARTERS = 4
#: Upper ends of the buckets of pass rates. The first bucket holds pass rate 0 alone and the last, which has no end
#: here, pass rate 1 alone: such groups are dead.
PASS_RATES = (0.0, 0.25, 0.5, 0.75, 1.0 - 1e-6)
BUCKETS = QUARTERS + len(PASS_RATES) + 1
COLUMNS = ("rows", "tokens", "pass_rate", "answer_advantage", "token_advantage", "weight")
"""What is summed over the completions of a bucket: 1; the number of loss tokens; the pass rate of the group; the mean
|Â| of the tokens; the sum of |Â| over the tokens; the sum of |w| over the tokens. The ``weight`` of a bucket is
proportional to its ``answer_advantage`` if α = 0, and to its ``token_advantage`` if α = 1."""


@dataclass(frozen=True)
class WeightFamily:
    """Family of a preset's token weights on-policy: ``alpha`` is α in |o|^(α−1), and ``scaled`` says whether Â is
    divided by the standard deviation of the group's rewards."""

    alpha: int
    scaled: bool

    @property
    def unbiased(self) -> bool:
        """Return whether the expected gradient is ∇E[r] up to a constant, for a given denominator."""
        return self.alpha == 1 and not self.scaled

    def of_length(self, tokens: float) -> float:
        """Return the weight of a token in an answer of so many tokens, per unit of |Â|, up to a constant."""
        return float(tokens) ** (self.alpha - 1)

    def of_pass_rate(self, rate: float) -> float:
        """Return the mean |Â| of a group with pass rate p: 2p(1 − p), or 2√(p(1 − p)) if it is scaled."""
        variance = rate * (1 - rate)
        return 2 * (math.sqrt(variance) if self.scaled else variance)


FAMILIES: dict[str, WeightFamily] = {
    "grpo": WeightFamily(0, scaled=True),
    "gspo": WeightFamily(0, scaled=True),
    "dapo": WeightFamily(1, scaled=True),
    "bnpo": WeightFamily(1, scaled=True),
    "cispo": WeightFamily(1, scaled=True),
    "reinforce_token_mean": WeightFamily(1, scaled=True),
    "dr_grpo": WeightFamily(1, scaled=False),
    "reinforce": WeightFamily(1, scaled=False),
    "mirror_descent": WeightFamily(1, scaled=False),
    "gspo_token": WeightFamily(0, scaled=True),
    "gmpo": WeightFamily(0, scaled=True),
    "sapo": WeightFamily(0, scaled=True),
    "luspo": WeightFamily(1, scaled=True),
    "dppo_tv": WeightFamily(1, scaled=False),
    "dppo_kl": WeightFamily(1, scaled=False),
    "prime_rl": WeightFamily(1, scaled=False),
    "clip_cov": WeightFamily(1, scaled=True),
    "kl_cov": WeightFamily(1, scaled=True),
}
"""Preset → family of its token weights. Where a preset chooses some tokens and treats them otherwise (such as
``kl_cov``), it is the family of the others. ``ppo`` is missing, since its advantages differ from token to token."""


def token_weights(loss: Tensor, logps: Tensor) -> Tensor:
    """Compute w = −∂loss/∂log π of each token, ``[B, T]`` like ``logps``, detached; 0 where the loss does not depend on
    the token's log-prob.

    Args:
        loss: the scalar whose gradient is taken; its graph is kept, so that it can still be trained on.
        logps: the log-probs in its graph, a leaf or not; nothing behind them is differentiated.
    """
    found = torch.autograd.grad(loss, logps, retain_graph=True, allow_unused=True)[0]
    if found is None:
        return torch.zeros_like(logps)
    return -found.detach()


def sums_of_rows(mask: Tensor, advantages: Tensor, quarter: Tensor, pass_rate: Tensor) -> Tensor:
    """Sum the completions of a batch by buckets, float64 ``[BUCKETS, 5]``: all ``COLUMNS`` but the last.

    Args:
        mask: bool ``[B, T]``, loss tokens; a row without any is not counted.
        advantages: ``[B]``, ``[B, 1]`` or ``[B, T]``.
        quarter: long ``[B]``, the quarter of lengths that the row is in, 0 to 3.
        pass_rate: ``[B]`` of the row's group, in [0, 1]; NaN if nothing says what is right.
    """
    size = (advantages.unsqueeze(1) if advantages.dim() == 1 else advantages).abs().double()
    of_tokens = masked_sum(size, mask, dim=1)
    tokens = mask.sum(1).double()
    own = tokens > 0
    of_answer = of_tokens / tokens.clamp(min=1)
    rate = pass_rate.double().nan_to_num(nan=0.0) * own
    return _in_buckets(torch.stack([own.double(), tokens, rate, of_answer, of_tokens], dim=1), quarter, pass_rate)


def sums_of_weights(weights: Tensor, mask: Tensor, quarter: Tensor, pass_rate: Tensor) -> Tensor:
    """Sum |w| by buckets, float64 ``[BUCKETS]``: the last of ``COLUMNS``. ``weights``: ``[B, T]``, of the function
    ``token_weights``; the other arguments are those of ``sums_of_rows``."""
    return _in_buckets(masked_sum(weights.abs().double(), mask, dim=1).unsqueeze(1), quarter, pass_rate).squeeze(1)


def _in_buckets(values: Tensor, quarter: Tensor, pass_rate: Tensor) -> Tensor:
    """Sum ``values``, ``[B, C]``, into ``[BUCKETS, C]``. Each row counts in the bucket of its quarter of lengths and,
    if its pass rate is known, also in the bucket of that."""
    ends = torch.tensor(PASS_RATES, device=values.device)
    known = ~pass_rate.isnan()
    places = QUARTERS + torch.bucketize(pass_rate.float().nan_to_num(nan=0.0), ends)
    found = values.new_zeros(BUCKETS, values.size(1)).index_add(0, quarter, values)
    return found.index_add(0, places[known], values[known])


def as_line(step: int, sums: Tensor) -> dict[str, Any]:
    """Make the line of ``FILE`` for an optimizer step from ``sums`` ``[BUCKETS, COLUMNS]`` over all ranks."""
    buckets = [dict(zip(COLUMNS, row, strict=True)) for row in sums.tolist()]
    return {"step": step, "by_length": buckets[:QUARTERS], "by_pass_rate": buckets[QUARTERS:]}


class Bucket(NamedTuple):
    """The weights of some of a run's completions, each in units of the mean over all of the run.

    Attributes:
        at: mean length of the completions in tokens, or mean pass rate of their groups; in these units, not the run's.
        token: mean |w| of a token, as measured.
        answer: mean of Σ_t |w| of a completion, as measured.
        token_at_0, token_at_1: what ``token`` would be if α were 0, or 1.
        answer_at_0, answer_at_1: the same of ``answer``.
    """

    at: float
    token: float
    answer: float
    token_at_0: float
    token_at_1: float
    answer_at_0: float
    answer_at_1: float


def over_steps(lines: Iterable[Mapping[str, Any]], by: str) -> list[Bucket]:
    """Add up the ``lines`` of many steps, and return the buckets that are not empty.

    ``by``: ``by_length`` or ``by_pass_rate``. An empty list is returned if nothing has a weight. Raises KeyError or
    TypeError for a line that ``as_line`` did not write.
    """
    sums: list[dict[str, float]] = []
    for line in lines:
        for place, bucket in enumerate(line[by]):
            if place == len(sums):
                sums.append(dict.fromkeys(COLUMNS, 0.0))
            for name in COLUMNS:
                sums[place][name] += float(bucket[name])
    whole = {name: sum(one[name] for one in sums) for name in COLUMNS}
    if not all(whole[name] > 0 for name in ("rows", "tokens", "answer_advantage", "token_advantage", "weight")):
        return []
    return [_bucket(one, whole, by) for one in sums if one["rows"] > 0]


def _bucket(one: Mapping[str, float], whole: Mapping[str, float], by: str) -> Bucket:
    """Return the bucket with the sums ``one``, in units of the run's means. ``whole``: the sums of all of the run."""
    at = one["tokens" if by == "by_length" else "pass_rate"] / one["rows"]
    measured = one["weight"] / whole["weight"]
    share_at_0 = one["answer_advantage"] / whole["answer_advantage"]
    share_at_1 = one["token_advantage"] / whole["token_advantage"]
    token = whole["tokens"] / one["tokens"]
    answer = whole["rows"] / one["rows"]
    return Bucket(
        at,
        measured * token,
        measured * answer,
        token_at_0=share_at_0 * token,
        token_at_1=share_at_1 * token,
        answer_at_0=share_at_0 * answer,
        answer_at_1=share_at_1 * answer,
    )
