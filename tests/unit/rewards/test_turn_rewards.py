"""Scores of turns: where they lie, who gives them, and what is said where a run has no turns; what limits are worth."""

from __future__ import annotations

import asyncio
import pickle
import threading
from collections.abc import Sequence
from typing import Any

import pytest

from grpo_lab.recipe.build import build_reward
from grpo_lab.recipe.sections import RewardSection
from grpo_lab.rewards import TurnLimits, TurnRewards
from grpo_lab.rewards.turn_scores import by_call, of_environments
from grpo_lab.turns.trajectory import Call, Turn

TURNS = (Turn(0, 3, 0, (Call("go", {}, "ok"),)), Turn(5, 7, 0), Turn(9, 10, 0))
IDS = [list(range(12)), list(range(4))]
COLUMNS: dict[str, Any] = {"turns": [TURNS, TURNS[:1]], "number": [7, 8]}


class Scores:
    """As many as it is told to give."""

    def __init__(self, *scores: Any) -> None:
        self.scores = scores

    def turn_rewards(self) -> list[Any]:
        return list(self.scores)


class Told:
    def turn_rewards(self, turns: Sequence[Turn]) -> list[float]:
        return [float(len(turn.calls)) for turn in turns]


class Waits(Scores):
    async def turn_rewards(self) -> list[Any]:  # type: ignore[override]
        await asyncio.sleep(0)
        return list(self.scores)


def call(reward: Any, **columns: Any) -> Any:
    completions = [[{"role": "assistant", "content": "x"}]] * 2
    return reward(prompts=["p"] * 2, completions=completions, completion_ids=IDS, **columns)


def test_scores_lie_at_the_ends_of_turns() -> None:
    found = call(TurnRewards(), **COLUMNS, environments=[Scores(1, None, 0.5), Told()])
    assert found == [[(2, 1.0), (6, None), (9, 0.5)], [(2, 1.0)]]
    assert call(TurnRewards(), **COLUMNS, environments=[Told(), object()]) == [
        [(2, 1.0), (6, 0.0), (9, 0.0)],
        [(2, None)],
    ]


def test_a_function_is_told_messages_turns_and_columns() -> None:
    def scored(messages: Any, turns: Any, number: int, **_: Any) -> list[float]:
        assert messages[0]["content"] == "x"
        return [number + turn.first for turn in turns]

    reward = TurnRewards(scored)
    assert reward.name == "scored"
    assert call(reward, **COLUMNS, trainer_state=None) == [[(2, 7.0), (6, 12.0), (9, 16.0)], [(2, 8.0)]]


def test_a_turn_without_a_token_has_no_place() -> None:
    turns = [(Turn(0, 3, 0), Turn(3, 3, 0)), ()]
    assert call(TurnRewards(), turns=turns, environments=[Scores(1.0, 2.0), Scores()]) == [[(2, 1.0)], []]


@pytest.mark.parametrize(
    ("environments", "words"),
    [
        ([Scores(1.0), Told()], r"gave \[1.0\] for completion 0, which has 3 turns; .*turn_rewards\(turns\)"),
        ([Scores(1.0, "good", None), Told()], r"'turn_rewards' gave \(6, 'good'\)"),
        ([Scores(1.0, float("inf"), None), Told()], r"gave inf"),
        ([Waits(1.0), Told()], r"gave \[1.0\] for completion 0, which has 3 turns"),
        (None, r"environment_factory"),
    ],
)
def test_other_answers_are_refused(environments: Any, words: str) -> None:
    told = {} if environments is None else {"environments": environments}
    with pytest.raises(ValueError, match=words):
        call(TurnRewards(), **COLUMNS, **told)


@pytest.mark.parametrize("turns", [{}, {"turns": ["of a data set", "too"]}])
@pytest.mark.parametrize("reward", [TurnRewards(), TurnLimits(raised=-1.0), TurnRewards(lambda turns, **_: [])])
def test_a_run_without_turns_is_told_the_setting(reward: Any, turns: Any) -> None:
    with pytest.raises(ValueError, match=r"rollout: \{turns: \{\}\}"):
        call(reward, **turns, environments=[Scores(), Scores()])


def test_asynchronous_environments() -> None:
    expected = [[(2, 1.0), (6, 2.0), (9, 3.0)], [(2, 1.0)]]
    reward = of_environments([Told, Waits])
    assert call(reward, **COLUMNS, environments=[Waits(1, 2, 3), Told()]) == expected
    assert of_environments([int]) is None

    async def as_in_a_notebook() -> Any:
        return call(reward, **COLUMNS, environments=[Waits(1, 2, 3), Told()])

    assert asyncio.run(as_in_a_notebook()) == expected


def test_asynchronous_functions_answer_side_by_side() -> None:
    both = threading.Barrier(2)

    async def late(turns: Any, **_: Any) -> list[float]:
        await asyncio.to_thread(both.wait, 30)  # passes only once both completions are asked for
        return [1.0] * len(turns)

    assert call(TurnRewards(late), **COLUMNS) == [[(2, 1.0), (6, 1.0), (9, 1.0)], [(2, 1.0)]]


def test_scores_of_calls_are_added_up_within_their_turn() -> None:
    failed, answered = Call("go", {}, "", "raised"), Call("go", {}, "")
    turns = [Turn(0, 1, 0, (answered, failed, answered)), Turn(2, 3, 0, (failed,)), Turn(4, 5, 0, (answered,))]
    assert by_call(turns, [1.0, 0.25, None]) == [1.25, None, None]
    with pytest.raises(ValueError, match="2 scores were given for 3 answered calls"):
        by_call(turns, [1.0, 0.25])


def test_what_limits_are_worth() -> None:
    unread = Call("?", None, "", "unparsable")
    bad = Turn(0, 2, 0, (Call("go", {}, "", "raised"), Call("go", {}, "", "timed_out"), Call("no", {}, "", "unknown")))
    cut = Turn(3, 4, 0, (Call("go", {}, "", cut=True),), limit="turn_tokens")
    rows = [
        (bad, cut),
        (Turn(0, 2, 0, (unread, unread), ended="unparsable"),),
        (cut, Turn(5, 6, 0, ended="turns")),
        (TURNS[1],),
    ]
    worth = {"unparsable": -1.0, "unknown": 2.0, "raised": 4.0, "timed_out": 8.0}
    worth |= {"turn_tokens": 16.0, "tool_tokens": 32.0, "turns": 64.0, "completion": 128.0}
    reward = TurnLimits(**worth)
    assert reward([""] * 4, turns=rows) == [62.0, -1.0, 112.0, 0.0]
    assert reward([""], turns=[(Turn(0, 2, 0, ended="completion"),)]) == [128.0]
    assert reward([""], turns=[(Turn(0, 2, 0, ended="answered"),)]) == [0.0]
    assert pickle.loads(pickle.dumps(reward)) == reward
    assert reward.__name__ == "turn_limits"


@pytest.mark.parametrize("worth", [{}, {"raised": 0.0}, {"raised": float("nan")}])
def test_limits_that_say_nothing(worth: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="finite numbers"):
        TurnLimits(**worth)


def test_in_a_recipe() -> None:
    assert build_reward(RewardSection("turn_limits", arguments={"unparsable": -0.5})) == TurnLimits(unparsable=-0.5)
    assert type(build_reward(RewardSection("turn_rewards", 0.5))) is TurnRewards
    with pytest.raises(ValueError, match="raises"):
        build_reward(RewardSection("turn_limits", arguments={"raises": -0.5}))
