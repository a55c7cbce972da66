"""Which of a model's own samples are imitated or preferred: hand values, and properties on random samples."""

from __future__ import annotations

import random
from typing import Any

import pytest

from grpo_lab.curation.rejection import Sampled, contrast_pairs, normalised, right_answers
from grpo_lab.rewards.arithmetic import calculates_right, equation_list


def problem(*answers: tuple[str, float | None], prompt: Any = "q", **columns: Any) -> Sampled:
    texts = [text if isinstance(prompt, str) else [{"role": "assistant", "content": text}] for text, _ in answers]
    return Sampled(prompt, texts, [score for _, score in answers], [len(text) for text, _ in answers], columns)


def completions(rows: list[dict[str, Any]]) -> list[Any]:
    return [row["completion"] for row in rows]


def test_the_equation_list() -> None:
    assert equation_list("Ann has 4 * 6 = 24 stamps. She keeps 24-5=19.\n#### 19") == ("4*6=24", "24-5=19")
    assert equation_list("#### 19") == ()
    assert equation_list("3 * 4 = <<3*4=12>>12") == equation_list("3*4 = <<3*4=12>>12")
    assert equation_list("4+6=10") != equation_list("6+4=10")  # another order is another way, as in the paper
    assert calculates_right("4*6=24. 24-5=19.")
    assert not calculates_right("4*6=24. 24-5=18.")
    assert calculates_right("nineteen")


def test_one_answer_for_each_way_and_at_most_k_a_problem() -> None:
    rows = [
        problem(
            ("4*6=24. #### 24", 1), ("4 * 6 = 24. #### 24", 1), ("6*4=24. #### 24", 1), ("#### 24", 1), ("#### 25", 0)
        ),
        problem(("2+2=4. #### 4", 1), ("2+2=5. 5-1=4. #### 4", 1), ("what?", None)),
        problem(("#### 1", 0)),
    ]
    built, counts = right_answers(rows, per_problem=2, same=equation_list, sound=calculates_right)
    # ways of the first: 4*6, 6*4, none → 3, two of them kept; the second: 2+2=5 does not hold → 1
    assert [row["source"] for row in built] == ["own"] * 3
    assert completions(built)[1:] == ["6*4=24. #### 24", "2+2=4. #### 4"]
    assert counts == {
        "problems": 3, "solved": 2, "samples": 9, "scored": 8, "right": 6, "unsound": 1, "ways": 4, "kept": 3, "gold": 0
    }  # fmt: skip


def test_of_the_same_way_the_text_farther_from_the_others_stays() -> None:
    """Edit distances to the other way "bb": "ab" 1, "xx" 2; "xx" takes the place of "ab". Before there was another, the
    first stayed."""
    same = {"ab": 1, "aa": 1, "bb": 2, "xx": 1}.__getitem__
    built, counts = right_answers([problem(("ab", 1), ("aa", 1), ("bb", 1), ("xx", 1))], same=same)
    assert completions(built) == ["xx", "bb"]
    assert counts["ways"] == 2


def test_gold_goes_first_is_not_counted_and_takes_its_way() -> None:
    rows = [
        problem(("2+2=4", 1), ("4=4", 0), ("1+3=4", 1), prompt=[{"role": "user", "content": "q"}], worked="2 + 2 = 4")
    ]
    built, counts = right_answers(rows, per_problem=1, same=equation_list, gold="worked")
    assert [(row["source"], row["completion"][0]["content"]) for row in built] == [
        ("gold", "2 + 2 = 4"),
        ("own", "1+3=4"),
    ]
    assert [row["worked"] for row in built] == ["2 + 2 = 4"] * 2, "what judges the problem stays with its answers"
    assert (counts["ways"], counts["gold"], counts["kept"]) == (1, 1, 2)
    with pytest.raises(ValueError, match=r"no 'absent'.*'worked'"):
        right_answers(rows, gold="absent")


def test_every_way_is_used_before_one_is_used_again() -> None:
    row = problem(("r1", 1), ("w1", 0), ("w2", 0), ("R1!", 1), ("r2", 1), ("w3", 0), ("w1", 0), ("?", None))
    pairs, counts = contrast_pairs([row, problem(("only right", 1)), problem(("only wrong", 0))])
    assert [(pair["chosen"], pair["rejected"]) for pair in pairs] == [("r1", "w1"), ("r2", "w2"), ("r1", "w3")]
    assert (counts["solved"], counts["right"], counts["ways"], counts["kept"]) == (2, 4, 3, 3)
    assert len(contrast_pairs([row], per_problem=2)[0]) == 2


def test_on_random_samples() -> None:
    """No unscorable, no wrong one imitated, none twice, at most k; a pair is right against wrong of one problem, no
    pair twice."""
    rng = random.Random(0)
    for _ in range(300):
        k = rng.choice([None, 1, 2, 3])
        rows = []
        for number in range(rng.randint(1, 4)):
            drawn = [(rng.choice("abcdef"), number) for _ in range(rng.randint(1, 8))]
            rows.append(
                problem(
                    *((text, {"a": None, "b": 1, "c": 1, "d": 1}.get(text, 0)) for text, _ in drawn), prompt=str(number)
                )
            )
        built, counts = right_answers(rows, per_problem=k)
        pairs, seen = contrast_pairs(rows, per_problem=k)
        assert len({(row["prompt"], row["completion"]) for row in built}) == len(built) == counts["kept"]
        assert {row["completion"] for row in built} <= set("bcd")
        assert k is None or max((sum(r["prompt"] == p for r in built) for p in "0123"), default=0) <= k
        assert len({(p["prompt"], p["chosen"], p["rejected"]) for p in pairs}) == len(pairs) == seen["kept"]
        assert all(p["chosen"] in "bcd" and p["rejected"] in "ef" for p in pairs)
        assert counts["right"] == sum(score == 1 for row in rows for score in row.scores)
        assert counts["solved"] == seen["solved"]
        if k is None:
            assert (
                counts["kept"]
                == counts["ways"]
                == sum(len({c for c, s in zip(r.completions, r.scores, strict=True) if s}) for r in rows)
            )


def test_a_limit_below_one_is_refused() -> None:
    for build in (right_answers, contrast_pairs):
        with pytest.raises(ValueError, match="per_problem=0"):
            build([], per_problem=0)
    assert normalised("Ann HAS 3.") == normalised("ann has 3")
    assert normalised("!?") == "!?"
