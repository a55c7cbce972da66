"""Flips that are independent and of the shares asked for; labels that are wrong for a prompt, and stay so."""

from __future__ import annotations

import math
import pickle
import random
import re
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest

from grpo_lab.recipe.build import build_reward
from grpo_lab.recipe.sections import RewardSection
from grpo_lab.rewards import AccuracyReward, FlippedReward, HashesReward, KimiLengthReward, WrongLabelReward
from grpo_lab.rewards.noise import draw
from grpo_lab.trainer.trl_bridge.rewards import correctness_columns

N = 4000


def says_right(prompts: list[Any], completions: list[Any], **_: Any) -> list[float | None]:
    return [{"right": 1.0, "wrong": 0.0, "half": 0.5, "none": None}[one.split()[0]] for one in completions]


def flipped(texts: list[str], step: int = 0, prompt: str = "q", **rates: Any) -> list[float | None]:
    reward = FlippedReward(says_right, **rates)
    return reward([prompt] * len(texts), texts, trainer_state=SimpleNamespace(global_step=step))


def within(count: int, n: int, share: float) -> bool:
    """Five standard deviations of a binomial."""
    return abs(count - n * share) <= 5 * math.sqrt(n * share * (1 - share))


def test_the_two_rates_apart() -> None:
    right, wrong = [f"right {i}" for i in range(N)], [f"wrong {i}" for i in range(N)]
    assert flipped(right, false_positives=0.3) == [1.0] * N  # of wrong ones only
    assert flipped(wrong, false_negatives=0.3) == [0.0] * N
    assert within(flipped(right, false_negatives=0.15).count(0.0), N, 0.15)
    assert within(flipped(wrong, false_positives=0.3).count(1.0), N, 0.3)
    assert flipped(right, false_negatives=1.0) == [0.0] * N
    assert flipped(["half", "none"], false_positives=1.0, false_negatives=1.0) == [1.0, None]


def test_flips_are_independent_of_each_other_and_of_the_step() -> None:
    """Equal completions of one call, and one completion in every step: shares as asked, and no run of equals."""
    alike = flipped(["right"] * N, false_negatives=0.5)
    over_steps = [flipped(["right"], step, false_negatives=0.5)[0] for step in range(N)]
    for draws in (alike, over_steps):
        assert within(draws.count(0.0), N, 0.5)
        assert within(sum(a == b for a, b in pairwise(draws)), N - 1, 0.5)


def test_the_same_call_has_the_same_flips_and_no_random_state_moves() -> None:
    state = random.getstate()
    texts = [f"right {i % 7}" for i in range(200)]
    first = flipped(texts, 3, false_negatives=0.4)
    assert first == flipped(texts, 3, false_negatives=0.4) != flipped(texts, 4, false_negatives=0.4)
    assert first != flipped(texts, 3, false_negatives=0.4, seed=1)
    again = pickle.loads(pickle.dumps(FlippedReward(says_right, false_negatives=0.4)))
    assert first == again(["q"] * 200, texts, trainer_state=SimpleNamespace(global_step=3))
    assert random.getstate() == state
    assert draw(0, "a") == draw(0, "a") != draw(0, "b")


def test_what_was_flipped_is_logged() -> None:
    said: dict[str, float] = {}
    reward = FlippedReward(says_right, false_negatives=1.0)
    reward(["q"] * 4, ["right", "wrong", "none", "right"], log_metric=said.__setitem__)
    assert said == {"flipped_says_right/flipped": 0.5}


def test_a_wrong_label_is_the_prompt_s_and_stays() -> None:
    reward = WrongLabelReward(HashesReward(), share=0.3)
    prompts = [f"question {i}" for i in range(N)]
    wrong = [one for one in prompts if reward.is_wrong(one)]
    assert within(len(wrong), N, 0.3)
    for prompt in wrong[:200]:
        label = reward.label(prompt, "18")
        assert 1 <= abs(int(label) - 18) <= 9
        assert label == pickle.loads(pickle.dumps(reward)).label(prompt, "18")
        # whenever it comes, whoever asks: the right answer earns nothing, the wrong one does
        assert reward([prompt] * 2, ["#### 18", f"#### {label}"], solution=["18"] * 2) == [0.0, 1.0]
    right = next(one for one in prompts if not reward.is_wrong(one))
    assert reward([right] * 2, ["#### 18", "#### 19"], solution=["18"] * 2) == [1.0, 0.0]
    offs = {int(reward.label(prompt, "18")) - 18 for prompt in wrong}
    assert offs == {*range(-9, 10)} - {0}
    assert [one for one in prompts if WrongLabelReward(HashesReward(), share=0.3, seed=1).is_wrong(one)] != wrong


@pytest.mark.parametrize(
    ("solution", "shape"),
    [
        ("so 3 and 1,234.5", r"so 3 and 12\d\d\.5"),
        (-5, r"-?\d+"),
        (r"\boxed{7}", r"\\boxed\{-?\d+\}"),
        (2.5, r"-?\d+\.5"),
    ],
)
def test_a_wrong_label_keeps_all_but_the_last_number(solution: Any, shape: str) -> None:
    found = WrongLabelReward(HashesReward(), share=1.0).label([{"role": "user", "content": "q"}], solution)
    assert type(found) is type(solution)
    assert found != solution
    assert re.fullmatch(shape, str(found))


def test_the_true_reward_beside_is_the_one_that_measures() -> None:
    noisy = FlippedReward(AccuracyReward(), false_positives=0.1)
    assert correctness_columns([noisy, AccuracyReward()]) == [1]
    assert noisy.columns == ("solution",)
    assert noisy.__name__ == "flipped_accuracy_reward"
    noisy.close()


def test_mistakes_are_named() -> None:
    with pytest.raises(ValueError, match=r"`false_positives` is 1\.5; it is a share"):
        FlippedReward(says_right, false_positives=1.5)
    with pytest.raises(ValueError, match="a reward of completions"):
        FlippedReward(KimiLengthReward(correctness=says_right))
    with pytest.raises(ValueError, match="one is 'north'"):
        WrongLabelReward(HashesReward(), share=1.0).label("q", "north")


def test_in_a_recipe_the_reward_inside_is_written_as_one() -> None:
    inside = {"name": "accuracy", "mode": "strict"}
    found = build_reward(RewardSection("flipped", arguments={"reward": inside, "false_positives": 0.25}))
    assert (found.false_positives, found.reward.mode) == (0.25, "strict")
    assert build_reward(RewardSection("wrong_label", arguments={"reward": "hashes", "share": 0.5})).share == 0.5
    for arguments, said in (
        ({"share": 0.5}, "`rewards`: 'wrong_label' needs `reward`"),
        ({"reward": "acuracy", "share": 0.5}, "`rewards.reward`: unknown reward 'acuracy'; did you mean 'accuracy'"),
        ({"reward": {**inside, "weight": 2}, "share": 0.5}, "`rewards.reward.weight` is 2 and has no effect"),
        ({"reward": 3, "share": 0.5}, "`rewards.reward.name` is 3; it must be a name, or a mapping"),
    ):
        with pytest.raises(ValueError, match=re.escape(said)):
            build_reward(RewardSection("wrong_label", arguments=arguments))
