"""Rewards that see the whole group: the declaration, the call on groups, and the call in stock TRL."""

from __future__ import annotations

import functools
import inspect
import pickle
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import TrainerState

from grpo_lab.rewards.protocol import Group, GroupReward, group_reward, scope_of, score_groups


@group_reward
def distinct_answers(group: Group) -> list[float]:
    return [1.0 / group.completions.count(text) for text in group.completions]


@group_reward(requires=("accuracy_reward",))
def shortest_correct_bonus(group: Group) -> list[float]:
    right = [value == 1.0 for value in group.rewards["accuracy_reward"]]
    best = min((n for n, ok in zip(group.lengths, right) if ok), default=None)
    return [0.1 if ok and n == best else 0.0 for n, ok in zip(group.lengths, right)]


class MeanLength(GroupReward):
    """A subclass instead of the decorator: it may have settings and depend on progress."""

    def __init__(self, scale: float, **settings: Any) -> None:
        super().__init__(**settings)
        self.__name__ = "mean_length"
        self.scale = scale

    def score_group(self, group: Group) -> list[float]:
        mean = sum(group.lengths) / len(group)
        return [self.scale * (length - mean) * (group.step + 1) for length in group.lengths]


def plain(group: Group) -> list[float]:
    return [float(length) for length in group.lengths]


renamed = group_reward(plain)


def make_group(texts: list[str], **more: Any) -> Group:
    ids = [[ord(letter) for letter in text] for text in texts]
    return Group("q", texts, ids, [len(row) for row in ids], **more)


def test_a_team_writes_one_in_five_lines() -> None:
    assert len(inspect.getsource(shortest_correct_bonus._score).splitlines()) == 5  # type: ignore[attr-defined]
    group = make_group(["aa", "a", "aaa", "a"], rewards={"accuracy_reward": [1.0, 0.0, 1.0, None]})
    assert shortest_correct_bonus.score_group(group) == [0.1, 0.0, 0.0, 0.0]


def test_declares_scope_and_name() -> None:
    assert scope_of(distinct_answers) == scope_of(MeanLength(1.0)) == "group"
    assert distinct_answers.name == "distinct_answers"
    assert shortest_correct_bonus.requires == ("accuracy_reward",)
    assert scope_of(plain) == scope_of("a-model-name") == "completion"  # whatever TRL takes as a reward

    class Wrong:
        scope = "groups"

    class Unfinished:
        scope = "group"

    with pytest.raises(ValueError, match="allowed: 'completion', 'group'"):
        scope_of(Wrong())
    with pytest.raises(ValueError, match="derive it from GroupReward"):
        scope_of(Unfinished())


def test_a_group_is_checked_at_the_door() -> None:
    with pytest.raises(ValueError, match=r"2 completions but \{'lengths': 1\}"):
        Group("q", ["a", "b"], [[1], [2]], [1])
    with pytest.raises(ValueError, match="columns"):
        make_group(["a", "b"], columns={"solution": ["1"]})
    with pytest.raises(ValueError, match="0 completions"):
        make_group([])


def test_scores_are_checked() -> None:
    @group_reward
    def too_few(group: Group) -> list[float]:
        return [1.0]

    @group_reward
    def infinite(group: Group) -> list[float]:
        return [float("inf")] * len(group)

    @group_reward
    def unscorable(group: Group) -> list[float | None]:
        return [None, float("nan")]  # one meaning, as in TRL

    with pytest.raises(ValueError, match=r"group reward 'too_few' .* returned 1 rewards for 2 completions"):
        score_groups(too_few, [make_group(["a", "b"])])
    with pytest.raises(
        ValueError, match=r"group reward 'infinite' .* returned inf for completion 0; allowed are finite numbers"
    ):
        score_groups(infinite, [make_group(["a", "b"])])
    first, second = score_groups(unscorable, [make_group(["a", "b"])])
    assert first is None
    assert second != second


def test_stock_trl_call_equals_whole_groups() -> None:
    texts = ["a", "a", "b", "c", "c", "c"]
    called = distinct_answers(
        prompts=["p"] * 3 + ["q"] * 3,
        completions=texts,
        completion_ids=[[1]] * 6,
        trainer_state=TrainerState(global_step=0, max_steps=5),
        log_metric=print,  # TRL hands callables along with the columns
        solution=list("123456"),
    )
    whole = score_groups(distinct_answers, [make_group(texts[:3]), make_group(texts[3:])])
    assert called == whole == [0.5, 0.5, 1.0, 1 / 3, 1 / 3, 1 / 3]


def test_columns_progress_and_message_lists_reach_the_group() -> None:
    seen: list[Group] = []

    @group_reward
    def spy(group: Group) -> list[None]:
        seen.append(group)
        return [None] * len(group)

    message = [{"role": "user", "content": "q"}]
    values = spy(
        prompts=[message, message],
        completions=[[{"role": "assistant", "content": text}] for text in ("one", "two")],
        completion_ids=[[5, 6], [7]],
        trainer_state=TrainerState(global_step=7, max_steps=9),
        solution=["1", "2"],
    )
    assert values == [None, None]
    (group,) = seen
    assert group.prompt == message
    assert group.completions == ["one", "two"]
    assert (group.completion_ids, group.lengths) == ([[5, 6], [7]], [2, 1])
    assert (group.step, group.max_steps, group.truncated) == (7, 9, None)
    assert group.columns == {"solution": ["1", "2"]}


@given(size=st.integers(2, 5), groups=st.integers(1, 4))
def test_grouping_is_read_off_the_prompts(size: int, groups: int) -> None:
    prompts = [f"p{g}" for g in range(groups) for _ in range(size)]
    ids = [[0] * (row + 1) for row in range(len(prompts))]
    scored = MeanLength(1.0)(prompts, ["x"] * len(prompts), ids)
    for g in range(groups):
        assert sum(value or 0.0 for value in scored[g * size : (g + 1) * size]) == pytest.approx(0.0)


def split_call(reward: GroupReward, prompts: list[str]) -> list[float | None]:
    return reward(prompts=prompts, completions=["x"] * len(prompts), completion_ids=[[1]] * len(prompts))


@pytest.mark.parametrize("prompts", [["a", "a", "a", "b"], ["a", "b", "b", "b"], ["a", "b", "c"], ["a"]])
def test_a_split_group_is_refused_with_the_reason(prompts: list[str]) -> None:
    with pytest.raises(ValueError, match=r"cannot find whole groups.*split over processes.*LabTrainer"):
        split_call(distinct_answers, prompts)


def test_with_num_generations_halves_are_noticed_even_when_equal() -> None:
    """Two ranks with half of each group: runs of 2, all alike. Only G = 4 tells that something is missing."""
    reward = MeanLength(1.0, num_generations=4)
    with pytest.raises(ValueError, match=r"num_generations=4.*lengths \[2\].*LabTrainer"):
        split_call(reward, ["a", "a", "b", "b"])
    assert split_call(reward, ["a"] * 8) == [0.0] * 8  # the same question drawn twice in a row: two groups


def test_with_several_processes_guessing_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match=r"1 of 2.*num_generations.*LabTrainer"):
        split_call(distinct_answers, ["a", "a", "b", "b"])
    assert split_call(MeanLength(1.0, num_generations=2), ["a", "a", "b", "b"]) == [0.0] * 4


def test_required_values_come_from_the_run_else_from_the_source() -> None:
    def accuracy_reward(prompts: list[str], completions: list[str], solution: list[str], **_: Any) -> list[float]:
        return [float(text == gold) for text, gold in zip(completions, solution)]

    reward = group_reward(requires=("accuracy_reward",), sources={"accuracy_reward": accuracy_reward})(
        shortest_correct_bonus._score  # type: ignore[attr-defined]
    )
    call = {"prompts": ["q"] * 3, "completions": ["4", "5", "4"], "completion_ids": [[1, 1], [1], [1, 1, 1]]}
    assert reward(**call, solution=["4"] * 3) == [0.1, 0.0, 0.0]
    with pytest.raises(ValueError, match=r"needs the values of reward 'accuracy_reward', and this run has only \[\]"):
        shortest_correct_bonus(**call, solution=["4"] * 3)
    given_by_run = make_group(["4", "5"], rewards={"accuracy_reward": [0.0, 1.0]}, columns={"solution": ["4", "4"]})
    assert reward.score_group(given_by_run) == [0.0, 0.1]  # the run's own values win


def test_picklable() -> None:
    assert pickle.loads(pickle.dumps(distinct_answers)) is distinct_answers
    copy = pickle.loads(pickle.dumps(renamed))
    assert copy.score_group(make_group(["a", "bb"])) == [1.0, 2.0]
    subclass = pickle.loads(pickle.dumps(MeanLength(2.0, num_generations=2)))
    assert subclass.score_group(make_group(["a", "aaa"])) == [-2.0, 2.0]

    @group_reward
    def local(group: Group) -> list[float]:
        return [0.0] * len(group)

    with pytest.raises((pickle.PicklingError, AttributeError), match="local"):
        pickle.dumps(local)


async def waits(group: Group) -> list[float]:
    return [0.0] * len(group)


class Waiting:
    async def __call__(self, group: Group) -> list[float]:
        return [0.0] * len(group)


@pytest.mark.parametrize(
    "decorate",
    [
        group_reward,
        group_reward(requires=("accuracy_reward",)),
        lambda score: group_reward(functools.partial(score)),
        lambda score: group_reward(Waiting()),
    ],
    ids=["bare", "with arguments", "a partial", "an object that waits"],
)
def test_async_def_is_refused_where_it_is_declared(decorate: Any) -> None:
    with pytest.raises(ValueError, match=r"`async def`.*`score_group`.*asyncio\.run"):
        decorate(waits)


def test_an_async_method_or_source_is_refused_with_its_name() -> None:
    with pytest.raises(ValueError, match=r"LateReward\.score_group is an `async def`"):
        type("LateReward", (GroupReward,), {"score_group": Waiting.__call__})
    with pytest.raises(ValueError, match=r"`sources\['accuracy_reward'\]`.*`async def`"):
        MeanLength(1.0, sources={"accuracy_reward": waits})


def test_what_is_decorated_and_required() -> None:
    for what in ("accuracy_reward", ("accuracy_reward", 3)):
        with pytest.raises(ValueError, match=r"`requires` is .*'accuracy_reward'.*a tuple of reward names"):
            group_reward(requires=what)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"`requires` is 'accuracy_reward'"):
        type("Letters", (MeanLength,), {"requires": "accuracy_reward"})
    with pytest.raises(ValueError, match=r"@group_reward decorates a function of one group, got 'accuracy_reward'"):
        group_reward("accuracy_reward")  # type: ignore[call-overload]
