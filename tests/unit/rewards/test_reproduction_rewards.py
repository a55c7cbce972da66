"""The sources' graders on completions of theirs and by hand, and the coin of the control."""

from __future__ import annotations

import math
import pickle
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from grpo_lab.rewards import AccuracyReward, BoxedReward, CoinReward, HashesReward

#: Ends of completions in verl's logs (eric-haibin-lin/verl-data, gsm8k/*.log): text, ground truth, score as logged.
LOGGED = [
    ("Therefore, Janet makes **$18** every day at the farmers' market.", "18", 0.0),
    ("Therefore, Janet makes \\(\\boxed{18}\\) dollars every day at the farmers' market.", "18", 0.0),
    ("Therefore, the final answer is: #### 250", "250", 1.0),
    ("So, it took Anna 7 hours to finish the puzzle. \n\n#### Final Answer: 7 hours", "7", 0.0),
    ("\\[\n5 + 2 = 7 \\text{ hours}\n\\]\n\n#### 7\n\nSo, the final answer is 7.", "7", 1.0),
]


@pytest.mark.parametrize(("text", "gold", "score"), LOGGED)
def test_hashes_scores_as_verl_logged(text: str, gold: str, score: float) -> None:
    assert HashesReward()(completions=[text], solution=[gold]) == [score]
    assert HashesReward(take="first")(completions=[text], solution=[gold]) == [score]


@pytest.mark.parametrize(
    ("text", "last", "first"),
    [
        ("#### 18", 1.0, 1.0),
        ("#### 1,800 #### 18", 1.0, 0.0),  # 1800, then 18
        ("#### 18, then #### 7", 0.0, 1.0),  # "18," without its comma is 18
        ("#### 18.", 0.0, 0.0),  # the full stop is read as part of the number: "18." is not "18"
        ("#### 18.0", 0.0, 0.0),
        ("#### $18", 0.0, 0.0),
        ("####18", 0.0, 0.0),
        ("#### -18", 0.0, 0.0),
        ("", 0.0, 0.0),
    ],
)
def test_hashes_by_hand(text: str, last: float, first: float) -> None:
    assert HashesReward()(completions=[text], solution=["18"]) == [last]
    assert HashesReward(take="first")(completions=[text], solution=["18"]) == [first]


def test_hashes_refuses_what_it_cannot_score() -> None:
    assert HashesReward()(completions=["#### 18", "#### 18"], solution=["", 10**5000]) == [None, None]
    assert HashesReward()(completions=["#### 18", "#### 18"], solution=[None, 18]) == [None, 1.0]
    with pytest.raises(ValueError, match="one to one"):
        HashesReward()(completions=["a"], solution=[])
    with pytest.raises(ValueError, match="take must be 'last' or 'first'"):
        HashesReward(take="best")  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def boxed() -> Iterator[BoxedReward]:
    reward = BoxedReward(unreadable=-1.0, workers=1)
    yield reward
    reward.close()


@pytest.mark.parametrize(
    ("text", "paid"),
    [
        (r"so \boxed{18}", 1.0),
        (r"so \boxed{18.0}", 1.0),  # math-verify's equality
        (r"so \boxed{17}", 0.0),
        ("The answer is 18.", -1.0),  # a marker, but no box
        (r"\boxed{18} but the answer is 17", 1.0),  # AccuracyReward takes the last marker
        (r"\boxed{18} Question: 1+1? Answer: \boxed{2}", 0.0),  # no cut where it runs on, as the sources
        (r"\boxed{18", -1.0),
        (r"<think>\boxed{18}", 1.0),
        ("", -1.0),
    ],
)
def test_boxed_by_hand(boxed: BoxedReward, text: str, paid: float) -> None:
    assert boxed(completions=[text], solution=["18"]) == [paid]


def test_boxed_keeps_the_rest_of_accuracy(boxed: BoxedReward) -> None:
    """A gold that nobody can earn is None whatever the completion; maj@k reads answers by the same eyes."""
    from grpo_lab.evaluation.votes import answer_reader

    assert boxed(completions=["nothing", r"\boxed{1}"], solution=[None, ""]) == [None, None]
    read = answer_reader(boxed)
    assert read is not None
    assert (read(r"\boxed{18} and the answer is 17"), read("the answer is 17")) == ("18", None)
    assert AccuracyReward.unreadable == 0.0
    with pytest.raises(ValueError, match="unreadable must be a number at most 0"):
        BoxedReward(unreadable=1.0)


def at(step: int) -> Any:
    return SimpleNamespace(global_step=step)


def thrown(reward: CoinReward, steps: list[int], n: int = 64) -> list[list[float | None]]:
    return [reward(completions=["x"] * n, trainer_state=at(step)) for step in steps]


def test_a_coin_is_fair_and_blind() -> None:
    """20,000 throws: the mean lies within 4.5 standard errors of p (a false alarm in 150,000 seeds)."""
    for p in (0.5, 0.2):
        throws = CoinReward(p, seed=3)(completions=["the same text"] * 20_000)
        assert set(throws) == {0.0, 1.0}
        assert abs(sum(t or 0 for t in throws) / 20_000 - p) < 4.5 * math.sqrt(p * (1 - p) / 20_000)
    assert set(CoinReward(0.0)(completions=["x"] * 99)) == {0.0}
    assert set(CoinReward(1.0)(completions=["x"] * 99)) == {1.0}


def test_a_coin_follows_from_its_seed_the_step_and_the_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    first = thrown(CoinReward(seed=0), [0, 0, 4, 8])
    assert first == thrown(CoinReward(seed=0), [0, 0, 4, 8])
    assert first[3] == thrown(CoinReward(seed=0), [8])[0], "a resumed run has a new object"
    assert len({tuple(row) for row in first}) == 4, "every call throws anew"
    assert first != thrown(CoinReward(seed=1), [0, 0, 4, 8])
    half = CoinReward(seed=0)
    assert thrown(half, [0, 0]) == first[:2]
    assert thrown(pickle.loads(pickle.dumps(half)), [4, 8]) == first[2:]
    monkeypatch.setenv("RANK", "1")
    assert not {tuple(row) for row in thrown(CoinReward(seed=0), [0, 0, 4, 8])} & {tuple(row) for row in first}


def test_a_coin_that_cannot_be() -> None:
    with pytest.raises(ValueError, match="p must be a probability"):
        CoinReward(1.5)
    with pytest.raises(ValueError, match="seed must be a whole number"):
        CoinReward(seed=-1)
    with pytest.raises(ValueError, match="needs completions"):
        CoinReward()()
