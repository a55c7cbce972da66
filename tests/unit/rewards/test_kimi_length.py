"""Kimi k1.5's length reward: every case by hand, then as a reward of a run."""

from __future__ import annotations

import functools
import pickle
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import TrainerState

from grpo_lab.rewards.length import KimiLengthReward, kimi_length_reward
from grpo_lab.rewards.protocol import Group


def group_of(lengths: list[int], accuracy: list[float | None], **more: Any) -> Group:
    ids = [[7] * length for length in lengths]
    texts = ["x" * length for length in lengths]
    return Group("q", texts, ids, lengths, rewards={"accuracy_reward": accuracy}, **more)


@pytest.mark.parametrize(
    ("lengths", "correct", "expected"),
    [
        # λ = 0.5 − (len − 100)/(300 − 100): 0.5, 0.25, 0, −0.5; the third is right with λ = 0, the last wrong
        ([100, 150, 200, 300], [True, True, True, False], [0.5, 0.25, 0.0, -0.5]),
        # wrong ones never gain: min(0, 0.5) = 0, min(0, 0.25) = 0, and keep their penalty
        ([100, 150, 200, 300], [False, False, False, False], [0.0, 0.0, 0.0, -0.5]),
        ([100, 150, 200, 300], [True, True, True, True], [0.5, 0.25, 0.0, -0.5]),
        ([10, 20], [False, True], [0.0, -0.5]),
        ([120, 120, 120], [True, False, True], [0.0, 0.0, 0.0]),  # max = min
        ([64], [True], [0.0]),
        ([64], [False], [0.0]),
        ([], [], []),
        # ties share their value: λ(1) = 0.5, λ(5) = −0.5
        ([5, 1, 5, 1], [True, True, False, False], [-0.5, 0.5, -0.5, 0.0]),
        # 0 tokens is a length: λ = 0.5 − 3/4 = −0.25
        ([0, 3, 4], [True, True, True], [0.5, -0.25, -0.5]),
        # unscorable: the 1,000 tokens of the last are not the maximum, 30 is
        ([10, 20, 30, 1000], [True, True, True, None], [0.5, 0.0, -0.5, 0.0]),
        ([10, 1000], [True, None], [0.0, 0.0]),
        ([10, 1000], [None, None], [0.0, 0.0]),
    ],
)
def test_by_hand(lengths: list[int], correct: list[bool | None], expected: list[float]) -> None:
    assert kimi_length_reward(lengths, correct) == expected


@given(st.lists(st.tuples(st.integers(0, 5000), st.booleans()), min_size=2, max_size=16))
def test_properties_of_the_formula(samples: list[tuple[int, bool]]) -> None:
    lengths, correct = [n for n, _ in samples], [ok for _, ok in samples]
    rewards = kimi_length_reward(lengths, correct)
    assert all(-0.5 <= reward <= 0.5 for reward in rewards)
    assert all(reward <= 0 for reward, ok in zip(rewards, correct) if not ok)
    for (n_a, ok_a), a in zip(samples, rewards):
        for (n_b, ok_b), b in zip(samples, rewards):
            if ok_a == ok_b and n_a <= n_b:
                assert a >= b  # shorter is never worse among equals
            if n_a == n_b and ok_a and not ok_b:
                assert a >= b  # nor right worse than wrong


def test_over_a_whole_batch_it_is_another_reward() -> None:
    """The trap of public code: min and max over all prompts of the local list."""
    easy, hard, correct = [10, 20], [100, 200], [True, True]
    assert kimi_length_reward(easy, correct) + kimi_length_reward(hard, correct) == [0.5, -0.5, 0.5, -0.5]
    # 0.5 − 10/190 and 0.5 − 90/190: the hard problem's *shortest* answer is nearly at zero there
    local_list = kimi_length_reward(easy + hard, correct + correct)
    assert local_list == pytest.approx([0.5, 0.5 - 10 / 190, 0.5 - 90 / 190, -0.5])


@pytest.mark.parametrize(
    ("lengths", "correct", "says"),
    [([1, 2], [True], "2 lengths, 1 verdicts"), ([1, -2], [True, True], "token counts ≥ 0, got -2")],
)
def test_bad_input(lengths: list[int], correct: list[bool], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        kimi_length_reward(lengths, correct)


def test_scores_a_group_with_the_runs_own_accuracy() -> None:
    reward = KimiLengthReward(weight=0.2)
    assert reward.__name__ == reward.name == "kimi_length_reward"
    assert reward.scope == "group"
    assert reward.requires == ("accuracy_reward",)
    # 0.2 · [0.5, 0, −0.5]; the middle one is wrong with λ = 0
    assert reward.score_group(group_of([10, 20, 30], [1.0, 0.0, 1.0])) == pytest.approx([0.1, 0.0, -0.1])


def test_unscorable_samples_stay_unscorable_and_out_of_the_range() -> None:
    scored = KimiLengthReward().score_group(group_of([10, 20, 30, 999], [1.0, 1.0, 1.0, None]))
    assert scored == [0.5, 0.0, -0.5, None]
    assert KimiLengthReward().score_group(group_of([10, 20], [None, None])) == [None, None]


@pytest.mark.parametrize(
    ("truncated", "last_cut", "first_cut"),
    [
        ("as_is", [0.5, 0.0, -0.5], [0.5, 0.0, -0.5]),
        # the cut-off "correct" sample at λ = −0.5 keeps its penalty; the one at 0.5 gains nothing
        ("wrong", [0.5, 0.0, -0.5], [0.0, 0.0, -0.5]),
        # range 10 … 20 without the last: 0.5, −0.5, and 0 for the excluded one; 20 … 30 without the first
        ("exclude", [0.5, -0.5, 0.0], [0.0, 0.5, -0.5]),
    ],
)
def test_truncated_samples_are_a_stated_choice(truncated: Any, last_cut: list[float], first_cut: list[float]) -> None:
    reward = KimiLengthReward(truncated=truncated)
    for cut, expected in (([False, False, True], last_cut), ([True, False, False], first_cut)):
        assert reward.score_group(group_of([10, 20, 30], [1.0, 1.0, 1.0], truncated=cut)) == expected


def test_warm_up_is_off_then_constant_and_exact_over_a_resume() -> None:
    reward = KimiLengthReward(weight=0.4, warmup_steps=3)
    run = [reward.score_group(group_of([1, 2], [1.0, 1.0], step=step)) for step in range(6)]
    assert [scores[0] for scores in run] == [0.0, 0.0, 0.0, 0.2, 0.2, 0.2]
    resumed = pickle.loads(pickle.dumps(KimiLengthReward(weight=0.4, warmup_steps=3)))
    assert [resumed.score_group(group_of([1, 2], [1.0, 1.0], step=step)) for step in range(2, 6)] == run[2:]


def test_ramps_come_from_the_schedules() -> None:
    reward = KimiLengthReward(weight={"kind": "linear", "start": 0, "end": 10, "value": 1.0})
    assert reward.score_group(group_of([1, 2], [1.0, 1.0], step=5)) == [0.25, -0.25]
    assert reward.weight_at(5) == 0.5


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"weight": {"kind": "warmup", "start": 1, "value": 1.0}, "warmup_steps": 2}, "leave `warmup_steps` at 0"),
        ({"truncated": "drop"}, "`truncated` must be one of"),
        ({"correctness": 3}, "`correctness` is a reward's name or a reward callable"),
        ({"weight": float("inf")}, "finite"),
        ({"warmup_steps": -1}, "`start` is -1; it must be a whole number of at least 0"),
        ({"num_generations": 0}, "`num_generations` must be at least 1"),
    ],
)
def test_bad_settings(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        KimiLengthReward(**settings)


def answers_two(prompts: list[str], completions: list[str], **columns: Any) -> list[float]:
    return [float("2" in completion) for completion in completions]


def test_in_stock_trl_it_brings_its_own_correctness_and_counts_tokens() -> None:
    reward = KimiLengthReward(weight=0.5, warmup_steps=2, correctness=answers_two)
    call = {
        "prompts": ["a", "a", "a", "b", "b", "b"],
        "completions": ["2", "22", "no", "2", "2", "2"],
        "completion_ids": [[1], [1, 1, 1], [1, 1], [1] * 4, [1] * 8, [1] * 6],
        "solution": ["2"] * 6,
    }
    before = TrainerState(global_step=1, max_steps=10)
    after = TrainerState(global_step=2, max_steps=10)
    assert reward(**call, trainer_state=before) == [0.0] * 6
    # a: tokens 1, 3, 2 → λ 0.5, −0.5, 0 (wrong: 0); b: tokens 4, 8, 6 → 0.5, −0.5, 0; all times 0.5
    assert reward(**call, trainer_state=after) == [0.25, -0.25, 0.0, 0.25, -0.25, 0.0]
    with pytest.raises(ValueError, match="call it with `trainer_state`"):
        reward(**call)


def test_what_stock_trl_does_not_tell_is_named() -> None:
    call = {"prompts": ["a", "a"], "completions": ["2", "2"]}
    with pytest.raises(ValueError, match=r"needs the values of reward 'accuracy_reward'.*hand the callable"):
        KimiLengthReward()(**call, completion_ids=[[1], [2, 3]])
    with pytest.raises(ValueError, match="counts tokens"):
        KimiLengthReward(correctness=answers_two)(**call)
    with pytest.raises(ValueError, match=r"stock TRL tells no reward.*LabTrainer"):
        KimiLengthReward(truncated="wrong").score_group(group_of([1, 2], [1.0, 1.0]))


def test_a_partial_has_the_name_of_its_function() -> None:
    """As in TRL, so that the run's own values are found under it."""

    def judged(completions: list[str], strict: bool, **_: Any) -> list[float]:
        return [1.0] * len(completions)

    assert KimiLengthReward(correctness=functools.partial(judged, strict=True)).requires == ("judged",)
