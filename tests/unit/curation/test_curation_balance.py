"""Balance by domain."""

from __future__ import annotations

from collections import Counter

import pytest

from grpo_lab.curation import balance

ROWS = [{"domain": "algebra", "k": k} for k in range(50)] + [{"domain": "geometry", "k": k} for k in range(8)]
ROWS += [{"domain": "logic", "k": k} for k in range(20)]


def counts(mask: list[bool]) -> Counter[str]:
    return Counter(row["domain"] for row, keep in zip(ROWS, mask) if keep)


def test_caps() -> None:
    assert counts(balance(ROWS, "domain")) == {"algebra": 8, "geometry": 8, "logic": 8}
    assert counts(balance(ROWS, "domain", 10)) == {"algebra": 10, "geometry": 8, "logic": 10}
    assert counts(balance(ROWS, "domain", {"algebra": 1, "geometry": 0, "logic": 99})) == {"algebra": 1, "logic": 20}
    assert counts(balance(ROWS, lambda row: row["k"] % 2, 3)).total() == 6
    assert balance([], "domain") == []


def test_the_choice_depends_on_the_seed_and_on_the_own_domain_only() -> None:
    whole = balance(ROWS, "domain", 5, seed=3)
    assert whole == balance(ROWS, "domain", 5, seed=3)
    assert whole != balance(ROWS, "domain", 5, seed=4)
    assert whole[:50] == balance(ROWS[:50], "domain", 5, seed=3)


def test_every_row_has_the_same_chance() -> None:
    hits = Counter(
        row["k"] for seed in range(2000) for row, keep in zip(ROWS[:50], balance(ROWS[:50], "domain", 10, seed)) if keep
    )
    chi_square = sum((hits[k] - 400) ** 2 / 400 for k in range(50))
    assert chi_square < 85.4  # 99.9% point with 49 degrees of freedom; without replacement the spread is smaller still


def test_bad_input_is_named() -> None:
    with pytest.raises(ValueError, match="no column 'subject'"):
        balance(ROWS, "subject")
    with pytest.raises(ValueError, match="logic"):
        balance(ROWS, "domain", {"algebra": 1, "geometry": 1})
    with pytest.raises(ValueError, match="negative"):
        balance(ROWS, "domain", -1)


@pytest.mark.parametrize("missing", [None, float("nan"), "", " "])
def test_a_row_without_a_domain_is_not_the_smallest_domain(missing: object) -> None:
    rows = [{"domain": "abc"[k % 3]} for k in range(99)] + [{"domain": missing}]
    assert balance(rows, "domain") == [True] * 99 + [False]
    with pytest.raises(ValueError, match="none of the 2 rows"):
        balance([{"domain": missing}] * 2, "domain")
