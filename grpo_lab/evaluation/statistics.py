"""Shares, intervals, pass@k and maj@k, from counts. No tensors, no model, no text.

Every estimate is over *problems*: samples of one problem depend on each other, and no interval counts them as
independent.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist, fmean, stdev
from typing import TypeGuard

from scipy.special import stdtrit

Z = NormalDist().inv_cdf(0.975)
"""Quantile of the normal distribution for 95% intervals."""
Vote = tuple[str | None, bool]
"""One sample's answer (None: it gave none) and whether it was judged correct."""


def is_number(value: object) -> TypeGuard[float]:
    """Return whether a value from a file can be averaged and drawn: an int or float, but no bool, no NaN, and not
    beyond 1e100."""
    return isinstance(value, int | float) and not isinstance(value, bool) and -1e100 < value < 1e100


@dataclass(frozen=True)
class Interval:
    """An estimate with its 95% confidence limits: a share, a difference of shares, or another number such as an ECE.

    Attributes:
        value: the estimate.
        low: the lower limit.
        high: the upper limit.
        n: number of problems behind it.
    """

    value: float
    low: float
    high: float
    n: int

    def to_dict(self) -> dict[str, float | int]:
        return {"value": self.value, "low": self.low, "high": self.high, "n": self.n}


def wilson_interval(successes: float, n: float) -> tuple[float, float]:
    """Compute the 95% confidence limits (low, high) of a binomial share p̂ = successes / n.

    (p̂ + z²/2n ± z √(p̂(1−p̂)/n + z²/4n²)) / (1 + z²/n)      E. B. Wilson, JASA 22 (1927)

    Unlike p̂ ± z·SE the interval stays inside [0, 1], and does not collapse to a point at 0 of n or n of n. ``n`` may
    be fractional, as the effective number of problems of `clustered_interval` is.

    Raises:
        ValueError: n is not above 0, or successes are not in [0, n].
    """
    if n <= 0:
        raise ValueError(f"an interval needs at least one problem, got n={n!r}")
    if not 0 <= successes <= n:
        raise ValueError(f"successes must lie in [0, n={n!r}], got {successes!r}")
    share = successes / n
    slack = Z * Z / n
    centre = share + slack / 2
    half = Z * math.sqrt(share * (1 - share) / n + slack / (4 * n))
    # The limits are exactly 0 and 1 at the ends; rounding would leave ±1e-17.
    low = 0.0
    if successes != 0:
        low = (centre - half) / (1 + slack)
    high = 1.0 if successes == n else (centre + half) / (1 + slack)
    return low, high


def accuracy_interval(correct: Sequence[bool]) -> Interval | None:
    """Compute the share of correct problems, from one greedy answer each, with its Wilson interval. None if there are
    no problems."""
    if not correct:
        return None
    low, high = wilson_interval(sum(correct), len(correct))
    return Interval(sum(correct) / len(correct), low, high, len(correct))


def clustered_interval(per_problem: Sequence[float], samples_per_problem: int) -> Interval | None:
    """Compute the mean over problems of a per-problem mean in [0, 1], with limits that respect the clustering. None if
    there are no problems.

    The variance is that of the N problem means, SE² = s²/N (Miller, arXiv 2411.00640, eq. 1 for these means; eq. 4 for
    clusters is about (N − 1)/N of it), and not p(1−p)/(N·n). It is turned into an effective number of independent
    answers, n* = p(1−p)/SE² (Korn & Graubard, Survey Methodology 24, 1998), for Wilson's formula, so that the limits
    behave at 0 and 1. n* is kept within [1, N·n], and is N if all problems have the same mean.
    """
    n = len(per_problem)
    if n == 0:
        return None
    mean = fmean(per_problem)
    squared_error = sum((x - mean) ** 2 for x in per_problem) / max(n - 1, 1) / n
    if squared_error > 1e-18:
        effective = mean * (1 - mean) / squared_error
    else:
        effective = float(n)
    effective = min(max(effective, 1.0), float(n * samples_per_problem))
    low, high = wilson_interval(min(mean * effective, effective), effective)
    return Interval(mean, min(low, mean), max(high, mean), n)


def paired_difference(before: Sequence[bool], after: Sequence[bool]) -> Interval | None:
    """Compute the change in accuracy on the *same* problems, (became correct − became wrong) / N. None if there are no
    problems.

    The limits are Wald's for matched pairs after ½ is added to each of the four cells (Agresti & Min, Statistics in
    Medicine 24, 2005), which keeps them honest when few problems changed sides.

    Raises:
        ValueError: the two lists differ in length.
    """
    if len(before) != len(after):
        raise ValueError(f"the pairs must be on the same problems, got {len(before)} before and {len(after)} after")
    n = len(before)
    if n == 0:
        return None
    gained = sum(not b and a for b, a in zip(before, after, strict=True))
    lost = sum(b and not a for b, a in zip(before, after, strict=True))
    up = gained + 0.5
    down = lost + 0.5
    total = n + 2.0
    centre = (up - down) / total
    half = Z * math.sqrt((up + down) - (up - down) ** 2 / total) / total
    return Interval((gained - lost) / n, max(-1.0, centre - half), min(1.0, centre + half), n)


def mcnemar_exact(gained: int, lost: int) -> float:
    """Compute the two-sided p of McNemar's exact test: how probable it is that a fair coin falls at least as unevenly
    as ``gained`` and ``lost`` problems.

    2 · Σ_{i ≤ min} C(m, i) / 2^m with m = gained + lost, at most 1

    Problems on which both runs agree do not count.
    """
    flips = gained + lost
    tail = sum(math.comb(flips, i) for i in range(min(gained, lost) + 1))
    return min(1.0, 2 * tail / 2**flips)


def half_width_over_seeds(values: Sequence[float]) -> float | None:
    """Compute half of the 95% interval of a mean over seeds, t · s / √n with Student's t and the sample's s (n − 1).
    None for fewer than two values."""
    n = len(values)
    if n < 2:
        return None
    return float(stdtrit(n - 1, 0.975)) * stdev(values) / n**0.5


def pass_at_k(n: int, correct: int, k: int) -> float:
    """Compute pass@k of one problem: the probability that at least one of k samples is correct, drawn from its n
    without replacement.

    1 − C(n−c, k) / C(n, k)

    Unbiased for k ≤ n, unlike 1 − (1 − c/n)^k. Chen et al., arXiv 2107.03374, eq. 1; computed in whole numbers.

    Raises:
        ValueError: k is not in [1, n], or ``correct`` not in [0, n].
    """
    if not 1 <= k <= n:
        raise ValueError(f"pass@k needs 1 <= k <= n samples, got k={k}, n={n}")
    if not 0 <= correct <= n:
        raise ValueError(f"correct must lie in [0, n={n}], got {correct}")
    return 1 - math.comb(n - correct, k) / math.comb(n, k)


def majority_vote(votes: Sequence[Vote]) -> float:
    """Return the probability that the most frequent answer is correct: 1 or 0, or a fraction where a tie is broken at
    random.

    Samples without an answer do not vote; without any vote the problem is not solved. An answer that was judged both
    ways (by a strict format, say) counts with the share of its samples judged correct.
    """
    judged: dict[str, list[bool]] = {}
    for answer, correct in votes:
        if answer is not None:
            judged.setdefault(answer, []).append(correct)
    if not judged:
        return 0.0
    most = max(len(verdicts) for verdicts in judged.values())
    return fmean(fmean(verdicts) for verdicts in judged.values() if len(verdicts) == most)


def majority_at_k(votes: Sequence[Vote], k: int) -> float:
    """Compute maj@k of one problem: the vote of k samples, averaged over the ⌊n/k⌋ disjoint blocks of k in the order
    drawn.

    Samples are exchangeable, so each block is an unbiased look at "k samples and a vote"; with k = n there is one vote.

    Raises:
        ValueError: k is not in [1, n].
    """
    if not 1 <= k <= len(votes):
        raise ValueError(f"maj@k needs 1 <= k <= n samples, got k={k}, n={len(votes)}")
    return fmean(majority_vote(votes[start : start + k]) for start in range(0, len(votes) - k + 1, k))


def ks_up_to(n: int) -> list[int]:
    """Return the k that are reported for n samples: the powers of two, and n itself."""
    powers = [2**e for e in range(n.bit_length()) if 2**e <= n]
    if n in powers or n < 1:
        return powers
    return [*powers, n]
