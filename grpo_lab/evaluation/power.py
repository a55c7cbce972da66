"""Power of a comparison of two arms (Student's t test, two-sided): the seeds needed, the difference detected.

`power_over_seeds` is the formula; `seeds_needed` and `difference_seen` solve it for the other two unknowns;
`power_said` puts the answers into words for a lab.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean, stdev

from scipy.special import nctdtr, stdtrit

POWER = 0.8
LEVEL = 0.05
"""Probability that a comparison shows a difference that is there, and that it shows one that is not."""


def power_over_seeds(difference: float, sd: float, seeds: int, level: float = LEVEL, *, paired: bool = False) -> float:
    """Return the probability that Student's two-sided t test detects a true ``difference`` between two arms.

        two arms:  df = 2n − 2, λ = d / (s √(2/n))        seed by seed:  df = n − 1, λ = d / (s / √n)
        power = P(|T| > t₍df, 1 − level/2₎), T noncentral t with df and λ

    Exact for normal results (J. Cohen, Statistical Power Analysis, 2nd ed. 1988, ch. 2). 0 if there are too few seeds
    for a test.

    Args:
        difference: d, between the arms' true means; its sign does not matter.
        sd: s, standard deviation over seeds of an arm's result, the same in both arms, in the unit of ``difference``.
            With ``paired``, the standard deviation of the differences seed by seed.
        seeds: n, runs of each arm.
        level: probability that the test shows a difference where there is none.
        paired: the test is of the differences seed by seed.

    Raises:
        ValueError: the difference is 0, ``sd`` is not above 0, one of them is not finite, or ``level`` is not between 0
            and 1.
    """
    if not (math.isfinite(difference) and difference != 0 and math.isfinite(sd) and sd > 0):
        raise ValueError(f"a difference that is not 0 and a spread above 0 are needed, got {difference!r} and {sd!r}")
    if not 0 < level < 1:
        raise ValueError(f"level must lie between 0 and 1, got {level!r}")
    df = seeds - 1 if paired else 2 * seeds - 2
    if df < 1:
        return 0.0  # one seed has no spread to test by
    shift = abs(difference) / sd * math.sqrt(seeds if paired else seeds / 2)
    critical = float(stdtrit(df, 1 - level / 2))
    if shift > 30 + critical:  # beyond scipy's series; the chance of less is below 1e-100
        return 1.0
    return float(1 - nctdtr(df, shift, critical) + nctdtr(df, shift, -critical))


def seeds_needed(
    difference: float, sd: float, power: float = POWER, level: float = LEVEL, *, paired: bool = False
) -> int:
    """Find the fewest seeds per arm that detect a true ``difference`` with probability ``power``. The other arguments
    are those of `power_over_seeds`.

    Raises:
        ValueError: an argument is not allowed there, ``power`` is not between 0 and 1, or a million seeds are not
            enough.
    """
    if not 0 < power < 1:
        raise ValueError(f"power must lie between 0 and 1, got {power!r}")
    low = 1
    high = 2
    while power_over_seeds(difference, sd, high, level, paired=paired) < power:
        low = high
        high = 2 * high
        if high > 1_000_000:
            raise ValueError(f"a difference of {difference!r} with a spread of {sd!r} needs more than a million seeds")
    while high - low > 1:
        middle = (low + high) // 2
        if power_over_seeds(difference, sd, middle, level, paired=paired) >= power:
            high = middle
        else:
            low = middle
    return high


def difference_seen(
    seeds: int, sd: float, power: float = POWER, level: float = LEVEL, *, paired: bool = False
) -> float | None:
    """Find the smallest true difference between two arms that a test detects with probability ``power``, in the unit of
    ``sd``.

    The other arguments are those of `power_over_seeds`. None for fewer than two seeds, which have no spread to test by.
    """
    if seeds < 2:
        return None
    low = 0.0
    high = sd
    while power_over_seeds(high, sd, seeds, level, paired=paired) < power:
        low = high
        high = 2 * high
    for _ in range(60):
        middle = (low + high) / 2
        if power_over_seeds(middle, sd, seeds, level, paired=paired) >= power:
            high = middle
        else:
            low = middle
    return high


def pooled_sd(arms: Sequence[Sequence[float]]) -> float | None:
    """Compute the standard deviation over seeds within the arms, √(Σ (nᵢ − 1) sᵢ² / Σ (nᵢ − 1)). None if no arm has two
    seeds."""
    several = [arm for arm in arms if len(arm) > 1]
    free = sum(len(arm) - 1 for arm in several)
    if free:
        return math.sqrt(sum((len(arm) - 1) * stdev(arm) ** 2 for arm in several) / free)
    return None


def power_said(
    arms: Sequence[Sequence[float]],
    seeds: int,
    difference: float | None = None,
    spread: float | None = None,
    problems: int | None = None,
) -> str:
    """Say in words what two arms of ``seeds`` can detect, by Student's t test, two-sided at 5%.

    Args:
        arms: the results of each arm so far, one a seed, as shares.
        seeds: planned runs of each arm.
        difference: in points, to be detected with 80% probability; None: none is asked for.
        spread: standard deviation over seeds, in points; None: that of ``arms``, pooled.
        problems: held-out problems behind a result. With them the text also says how much of the spread the evaluation
            alone causes.

    Raises:
        ValueError: ``difference`` or ``spread`` is not above 0.
    """
    for option, value in (("--difference", difference), ("--spread", spread)):
        if value is not None and not value > 0:
            raise ValueError(f"{option} is {value!r} points; a number above 0 is needed")
    measured = pooled_sd(arms)
    whole = [result for arm in arms for result in arm]
    sd = spread
    source = "--spread"
    if sd is None and measured is not None:
        sd = 100 * measured
        source = f"over {len(whole)} results of {len(arms)} arms"
    if not sd:
        if measured is None:
            why = "no arm has two seeds"
        else:
            why = "all seeds of an arm came out alike"
        return f"power: not known, since {why} and there is no --spread; three seeds make a pilot"
    lines = [f"power: spread {sd:.1f} points over seeds ({source}){_of_evaluation(whole, problems)}"]
    if difference is not None:
        needed = seeds_needed(difference, sd, POWER, LEVEL)
        enough = "enough" if seeds >= needed else "too few"
        lines.append(f"a difference of {difference:g} points needs {needed} seeds an arm; here {seeds}: {enough}")
    seen = difference_seen(seeds, sd, POWER, LEVEL)
    if seen is None:
        which = "no difference"
    else:
        which = f"differences from {seen:.1f} points on"
    lines.append(
        f"{seeds} seed{'s an arm see' if seeds != 1 else ' an arm sees'} {which} (80% chance, two-sided t test at 5%)"
    )
    return "\n  ".join(lines)


def _of_evaluation(results: Sequence[float], problems: int | None) -> str:
    """Say how much spread the evaluation alone causes: √(p(1 − p)/n) for the mean result p, with n problems answered
    independently."""
    if problems is None or not results:
        return ""
    share = fmean(results)
    noise = 100 * math.sqrt(share * (1 - share) / problems)
    return f", of which the evaluation's {problems} problems make up to {noise:.1f}: more problems lower it, too"
