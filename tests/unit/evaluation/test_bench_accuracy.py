"""``scripts/accuracy_tables.py``: time to a target, the choice of a rate and the tables, by hand."""

from __future__ import annotations

from typing import Any

from accuracy_tables import chosen, final, in_all, main_table, overlap_table, seconds_to


def record(seed: int, seconds: float, *accuracies: float) -> dict[str, Any]:
    """An evaluation every ten steps, ``seconds`` apart."""
    points = [{"step": 10 * i, "seconds": seconds * i, "accuracy": one} for i, one in enumerate(accuracies)]
    return {"seed": seed, "points": points, "wall_seconds": seconds * len(points)}


def test_the_first_evaluation_at_or_above_the_target() -> None:
    one = record(0, 2.0, 0.2, 0.5, 0.8, 0.7, 0.9)
    assert final(one) == (0.8 + 0.7 + 0.9) / 3
    assert [seconds_to(one, target) for target in (0.1, 0.5, 0.75, 0.9, 0.91)] == [0.0, 2.0, 4.0, 8.0, float("inf")]


def test_both_sides_choose_by_one_target() -> None:
    """Stock's best end is 0.8, so the target is 0.72: stock is there after 20 s with 3e-4 and never with 1e-3; ours
    after 2 s and 1 s, and 1e-3 is taken where it ends at most two points lower."""
    tests = {
        ("stock", "0.0003"): record(9, 10.0, 0.2, 0.5, 0.8, 0.8, 0.8),
        ("stock", "0.001"): record(9, 10.0, 0.2, 0.7, 0.7, 0.7, 0.7),
        ("ours", "0.0003"): record(9, 1.0, 0.2, 0.5, 0.9, 0.9, 0.9),
        ("ours", "0.001"): record(9, 1.0, 0.2, 0.75, 0.89, 0.89, 0.89),
    }
    rates, target = chosen(tests)
    assert rates == {"stock": "0.0003", "ours": "0.001"}
    assert abs(target - 0.72) < 1e-12
    tests["ours", "0.001"] = record(9, 1.0, 0.2, 0.75, 0.87, 0.87, 0.87)
    assert chosen(tests)[0]["ours"] == "0.0003"
    for key in [("ours", "0.0003"), ("ours", "0.001")]:  # as fast: the higher end
        tests[key] = record(9, 1.0, 0.2, 0.75, *[0.9 if key[1] == "0.0003" else 0.89] * 3)
    assert chosen(tests)[0]["ours"] == "0.0003"


def test_ratios_are_of_the_seeds_that_both_have() -> None:
    """Target 0.7. Stock 20 and 30 s, ours 4 and 10 s: (25 / 7) = 3.57 of the means, at least 30 / 10."""
    found = {
        "stock": [record(0, 10.0, 0.2, 0.5, 0.8), record(1, 15.0, 0.2, 0.5, 0.8), record(2, 1.0, 0.2, 0.9, 0.9)],
        "ours": [record(0, 4.0, 0.2, 0.8, 0.8), record(1, 5.0, 0.2, 0.5, 0.8)],
        "update off": [record(0, 6.0, 0.2, 0.8, 0.8)],
    }
    assert in_all(found, 0.7) == "stock / ours: 3.57× of the means, least 3.00× (seeds [0, 1])"
    lines = [line.split(" | ") for line in main_table(found, 0.7).splitlines()]
    assert lines[-1][0] == "| update off"
    assert lines[-1][2:4] + lines[-1][-2:] == ["10", "6.0", "3.33×", "1.50× |"]
    assert [line[2:4] + line[-2:] for line in lines if line[0] == "| **ours**"] == [["15.0", "7.0", "3.57×", "1.00× |"]]
    found["ours"][1] = record(1, 5.0, 0.2, 0.5, 0.6)
    assert "no ratio in all, a run never reaches the target" in in_all(found, 0.7)
    lines = [line.split(" | ") for line in main_table(found, 0.7).splitlines()]
    assert [line[2:4] + line[-2:] for line in lines if line[0] == "| **ours**"] == [["never", "never", "–", "– |"]]


def test_overlap_in_points() -> None:
    """Ends 0.9 and 0.88: −2.0 points; 6 s against 4 s: 1.5."""
    found = {"synchronous": [record(0, 2.0, *[0.9] * 4)], "overlapped": [record(0, 4 / 3, *[0.88] * 4)]}
    assert overlap_table(found).splitlines()[-1] == "| 0 | 0.900 | 0.880 | -2.0 | 6.0 | 4.0 | 1.50× |"
    assert overlap_table({"overlapped": found["overlapped"]}) == ""
