"""Intervals, pass@k and maj@k against hand values, enumeration, simulation and an exact root-finder."""

import itertools
import math
import random
from statistics import NormalDist, fmean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_lab.evaluation.power import difference_seen, pooled_sd, power_over_seeds, seeds_needed
from grpo_lab.evaluation.statistics import (
    accuracy_interval,
    clustered_interval,
    half_width_over_seeds,
    ks_up_to,
    majority_at_k,
    majority_vote,
    paired_difference,
    pass_at_k,
    wilson_interval,
)
from grpo_lab.evaluation.votes import vote_key

Z = NormalDist().inv_cdf(0.975)


# --- Wilson ------------------------------------------------------------------------------------------------------


def test_wilson_of_81_in_263():
    # Newcombe, Statistics in Medicine 17 (1998), table I, method 3: 81/263 -> 0.2553 to 0.3662.
    low, high = wilson_interval(81, 263)
    assert (round(low, 4), round(high, 4)) == (0.2553, 0.3662)


def test_wilson_at_the_ends_is_no_point():
    # 0 of 10: the upper limit is z²/(n+z²) = 3.8415/13.8415 = 0.27753; the lower one is exactly 0.
    assert wilson_interval(0, 10) == (0.0, pytest.approx(Z * Z / (10 + Z * Z), abs=1e-12))
    assert wilson_interval(10, 10) == (pytest.approx(10 / (10 + Z * Z), abs=1e-12), 1.0)


@given(st.integers(1, 3000).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))))
def test_wilson_limits_are_where_the_score_test_just_rejects(counts):
    """Independent definition: the limits p solve |p̂ − p| = z √(p(1−p)/n)."""
    successes, n = counts
    low, high = wilson_interval(successes, n)
    assert 0.0 <= low <= successes / n <= high <= 1.0
    for limit in (low, high):
        if 0.0 < limit < 1.0:
            distance = abs(successes / n - limit)
            assert distance == pytest.approx(Z * math.sqrt(limit * (1 - limit) / n), abs=1e-9)


def test_nothing_to_count_has_no_interval():
    assert accuracy_interval([]) is None
    assert clustered_interval([], 1) is None
    assert paired_difference([], []) is None


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (lambda: wilson_interval(1, 0), "got"),
        (lambda: wilson_interval(-1, 5), "got"),
        (lambda: wilson_interval(6, 5), "got"),
        (lambda: paired_difference([True], [True, False]), "1 before and 2 after"),
        (lambda: pass_at_k(4, 2, 5), r"must|needs"),
        (lambda: pass_at_k(4, 2, 0), r"must|needs"),
        (lambda: pass_at_k(4, 5, 1), r"must|needs"),
        (lambda: pass_at_k(4, -1, 1), r"must|needs"),
        (lambda: majority_at_k([("1", True)] * 2, 3), "k=3, n=2"),
    ],
)
def test_impossible_counts_are_refused(asked, said):
    with pytest.raises(ValueError, match=said):
        asked()


# --- clustered ---------------------------------------------------------------------------------------------------


def test_one_sample_a_problem_is_wilson():
    """With 0/1 per problem, s²/N = p(1−p)/(N−1), so n* = N−1: Wilson's interval at N−1 problems."""
    values = [1.0] * 30 + [0.0] * 70
    interval = clustered_interval(values, 1)
    assert (interval.low, interval.high) == pytest.approx(wilson_interval(0.3 * 99, 99))


def test_samples_that_agree_do_not_count_twice():
    """Eight identical samples a problem tell nothing more than one."""
    alone = clustered_interval([1.0] * 30 + [0.0] * 70, 1)
    copied = clustered_interval([1.0] * 30 + [0.0] * 70, 8)
    assert (copied.low, copied.high) == pytest.approx((alone.low, alone.high))


def test_unanimous_problems_get_the_width_of_n_problems():
    interval = clustered_interval([1.0] * 50, 8)
    assert interval.low == pytest.approx(50 / (50 + Z * Z))
    assert interval.high == 1.0


@pytest.mark.not_fast(but="0.9")
@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_clustered_interval_covers_the_truth(p):
    """Beta-binomial samples, strongly clustered: 95% limits hold the true mean in about 95% of 1,500 repetitions.

    The standard error of the coverage itself is √(.95·.05/1500) = 0.6 points; the band allows 3 of those, and one point
    for the small N. Treating the samples as independent covers far less, which the second assertion shows.
    """
    rng = random.Random(0)
    problems, samples, covered, naive = 60, 8, 0, 0
    for _ in range(1500):
        rates = [rng.betavariate(p, 1 - p) for _ in range(problems)]
        means = [sum(rng.random() < rate for _ in range(samples)) / samples for rate in rates]
        interval = clustered_interval(means, samples)
        covered += interval.low <= p <= interval.high
        low, high = wilson_interval(sum(means) * samples, problems * samples)
        naive += low <= p <= high
    assert 0.922 <= covered / 1500 <= 0.978
    assert naive / 1500 < 0.75


# --- paired difference --------------------------------------------------------------------------------------------


def test_paired_difference_by_hand():
    # 100 problems: 30 gained, 10 lost. Value .20. With ½ in each cell: up 30.5, down 10.5, total 102.
    # centre 20/102 = .19608; half = z/102 · √(41 − 400/102) = 1.95996 · 6.08985/102 = .11702
    before = [False] * 30 + [True] * 10 + [True] * 40 + [False] * 20
    after = [True] * 30 + [False] * 10 + [True] * 40 + [False] * 20
    interval = paired_difference(before, after)
    assert interval.value == pytest.approx(0.20)
    assert (interval.low, interval.high) == pytest.approx((0.07906, 0.31310), abs=2e-5)


def test_paired_difference_covers_the_truth():
    rng = random.Random(1)
    covered = 0
    for _ in range(1500):
        cells = rng.choices([(0, 1), (1, 0), (1, 1), (0, 0)], weights=[0.3, 0.1, 0.4, 0.2], k=120)
        interval = paired_difference([bool(b) for b, _ in cells], [bool(a) for _, a in cells])
        covered += interval.low <= 0.2 <= interval.high
    assert 0.932 <= covered / 1500 <= 0.968  # 0.95 ± 3 standard errors


# --- pass@k -------------------------------------------------------------------------------------------------------


def test_pass_at_k_by_hand():
    # n=5, c=2, k=2: 1 − C(3,2)/C(5,2) = 1 − 3/10
    assert pass_at_k(5, 2, 2) == pytest.approx(0.7)
    assert pass_at_k(5, 2, 1) == pytest.approx(2 / 5)
    assert pass_at_k(5, 2, 4) == 1.0  # only 3 wrong ones: any four hold a correct one


@given(st.integers(1, 8).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n), st.integers(1, n))))
def test_pass_at_k_is_the_share_of_subsets_with_a_correct_one(case):
    n, correct, k = case
    subsets = list(itertools.combinations([True] * correct + [False] * (n - correct), k))
    assert pass_at_k(n, correct, k) == pytest.approx(fmean(any(subset) for subset in subsets), abs=1e-12)


@pytest.mark.not_fast
@given(st.integers(1, 300).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n), st.integers(1, n))))
def test_pass_at_k_agrees_with_the_papers_stable_product(case):
    n, correct, k = case
    product = 1.0
    for i in range(n - correct + 1, n + 1):
        product *= 1 - k / i
    expected = 1.0 if n - correct < k else 1 - product
    assert pass_at_k(n, correct, k) == pytest.approx(expected, abs=1e-9)


# --- maj@k --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("votes", "expected"),
    [
        ([("7", False), ("7", False), ("18", True)], 0.0),  # a correct minority
        ([("18", True), ("7", False), ("18", True)], 1.0),
        ([("7", False), ("18", True)], 0.5),  # a tie is split
        ([("7", False), ("18", True), ("9", False)], pytest.approx(1 / 3)),
        ([(None, False), (None, False), ("18", True)], 1.0),  # samples without an answer do not vote
        ([(None, False)], 0.0),
    ],
)
def test_majority_by_hand(votes, expected):
    assert majority_vote(votes) == expected


def test_majority_over_blocks_by_hand():
    # blocks of two: (18,18) -> 1, (18,7) -> ½, (7,7) -> 0; the seventh sample fills no block
    votes = [("18", True)] * 3 + [("7", False)] * 3 + [("18", True)]
    assert majority_at_k(votes, 2) == pytest.approx(0.5)
    assert majority_at_k(votes, 7) == 1.0  # four against three
    assert majority_at_k(votes, 1) == pytest.approx(4 / 7)


@pytest.mark.parametrize(("n", "ks"), [(0, []), (1, [1]), (8, [1, 2, 4, 8]), (10, [1, 2, 4, 8, 10])])
def test_ks(n, ks):
    assert ks_up_to(n) == ks


@pytest.mark.parametrize(
    "same",
    [
        ["1,234.50", "$1234.5", " 1234.50 ", r"\$1,234.5"],
        ["1/2", "0.5", r"\frac{1}{2}", r"\frac12", r"\dfrac{2}{4}", ".5"],
        ["18", "18.0", "018", "18 cents", "+18"],
        ["-3", "-3.00"],
        ["(1, 2)", "(1,2)"],
    ],
)
def test_spellings_of_one_answer_vote_together(same):
    assert len({vote_key(text) for text in same}) == 1


@pytest.mark.parametrize(
    ("one", "other"), [("1, 2", "12"), ("18", "-18"), ("1/0", "0"), ("x+1", "x+2"), ("50%", "50"), ("", "0")]
)
def test_other_answers_vote_apart(one, other):
    assert vote_key(one) != vote_key(other)


@pytest.mark.timeout(300)
@given(st.text(max_size=400))
def test_any_text_has_a_vote_key(text):
    assert isinstance(vote_key(text), str)


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "bomb", ["1e999999999", "9" * 100_000, "\\frac{" * 20_000, "1" * 39 + "/" + "3" * 39, "{" * 150]
)
def test_hostile_answers_cost_nothing(bomb):
    vote_key(bomb)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([0.7], None),
        ([1.0, 3.0], math.tan(math.pi * 0.475)),  # one degree of freedom is Cauchy's; s = √2, √n = √2
        (
            [1.0, 2.0, 3.0],
            0.95 * math.sqrt(2 / (1 - 0.95**2)) / math.sqrt(3),
        ),  # two: t = a√(2/(1 − a²)), a = 0.95; s = 1
        ([0.5] * 12, 0.0),
    ],
)
def test_half_width_over_seeds(values, expected):
    found = half_width_over_seeds(values)
    assert found == (None if expected is None else pytest.approx(expected, rel=1e-9))


@pytest.mark.parametrize(
    ("trainings", "quantile"),
    [(2, 12.706), (3, 4.303), (4, 3.182), (5, 2.776), (10, 2.262), (11, 2.228), (20, 2.093), (31, 2.042), (121, 1.980)],
)
def test_half_width_has_the_quantile_of_the_printed_table(trainings, quantile):
    """97.5% of Student's t for n − 1 degrees of freedom, printed to three places."""
    values = [0.0] * (trainings - 1) + [1.0]
    error = 1 / trainings  # s² = (1 − 1/n) · n/(n − 1) / n = 1/n, so s/√n = 1/n
    assert half_width_over_seeds(values) / error == pytest.approx(quantile, abs=5.1e-4)


# --- power over seeds ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("effect", "paired", "seeds", "power"),
    [  # Faul et al., G*Power 3 (Behavior Research Methods 39, 2007): two-sided, 5%, power 0.8; effect = d / s
        (0.2, False, 394, 0.8006),
        (0.5, False, 64, 0.8015),  # Cohen 1988, table 2.4.1: 64
        (0.8, False, 26, 0.8075),  # the same table: 26
        (0.2, True, 199, 0.8017),
        (0.5, True, 34, 0.8078),
        (0.8, True, 15, 0.8213),
    ],
)
def test_seeds_needed_as_in_the_textbook(effect, paired, seeds, power):
    assert seeds_needed(3.0 * effect, 3.0, paired=paired) == seeds
    assert power_over_seeds(3.0 * effect, 3.0, seeds, paired=paired) == pytest.approx(power, abs=5e-5)
    assert power_over_seeds(-3.0 * effect, 3.0, seeds - 1, paired=paired) < 0.8


def test_seeds_for_other_powers_and_levels():
    # 2 ((1.960 + 1.2816) / 0.5)² = 84.1 a normal test needs for 90%; t: about z²/4 = 1 more, 86 by G*Power.
    assert seeds_needed(0.5, 1.0, power=0.9) == 86
    # 2 ((2.5758 + 0.8416) / 0.5)² = 93.4; t: about 2.5758²/4 = 1.7 more.
    assert seeds_needed(0.5, 1.0, level=0.01) == 96


@pytest.mark.parametrize(("seeds", "paired"), [(2, False), (3, False), (3, True), (5, True)])
def test_few_seeds_see_what_they_say_by_simulation(seeds, paired):
    """20,000 pairs of arms: the share of t tests that reject lies within 4 standard errors (1.1%) of 80%."""
    numpy, stats = pytest.importorskip("numpy"), pytest.importorskip("scipy.stats")
    rng = numpy.random.default_rng(0)
    difference = difference_seen(seeds, 2.0, paired=paired)
    one, other = rng.normal(difference, 2.0, (20_000, seeds)), rng.normal(0.0, 2.0, (20_000, seeds))
    test = stats.ttest_1samp(one, 0.0, axis=1) if paired else stats.ttest_ind(one, other, axis=1)
    assert abs((test.pvalue < 0.05).mean() - 0.8) < 4 * math.sqrt(0.8 * 0.2 / 20_000)
    if seeds > 2:
        assert seeds_needed(difference * (1 + 1e-9), 2.0, paired=paired) == seeds


def test_the_ends_of_power():
    assert difference_seen(1, 1.0) is None
    assert power_over_seeds(5.0, 1.0, 1) == 0.0
    assert power_over_seeds(1e6, 1.0, 2) == 1.0
    assert power_over_seeds(1e-9, 1.0, 5) == pytest.approx(0.05, abs=1e-6)  # no difference: the level itself
    for wrong in ({"difference": 0.0}, {"sd": 0.0}, {"power": 1.0}, {"level": 0.0}, {"difference": math.nan}):
        with pytest.raises(ValueError, match=r"needed|must lie"):
            seeds_needed(**{"difference": 1.0, "sd": 1.0, **wrong})
    with pytest.raises(ValueError, match="more than a million seeds"):
        seeds_needed(1e-6, 1.0)


def test_pooled_sd_by_hand():
    # variances 2 (1 and 3, one degree of freedom) and 4 (2, 4, 6, two): (1·2 + 2·4) / 3
    assert pooled_sd([[1.0, 3.0], [2.0, 4.0, 6.0], [9.0]]) == pytest.approx(math.sqrt(10 / 3))
    assert pooled_sd([[1.0], []]) is None
