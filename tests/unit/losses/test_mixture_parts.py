"""The parts of a mixture of tasks by themselves: its objective, its advantages, its order of prompts, its rewards."""

from __future__ import annotations

import asyncio
import math
import pickle
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from grpo_lab.advantages import BatchZScore, GroupMean, GroupZScore, MixedAdvantage, PassAtK
from grpo_lab.batch import TASK, Denominators, RewardTable, TokenBatch
from grpo_lab.curation import MixtureSampler
from grpo_lab.curation.mixture_order import Shares
from grpo_lab.objectives import (
    Clipped,
    DetachedWeight,
    KLTerm,
    MixedObjective,
    Objective,
    TaskObjective,
    fixed_budget,
    log_ratio,
    sequence_mean,
    token_mean,
)
from grpo_lab.objectives.mixed import TASK_ROWS, TASK_TOKENS
from grpo_lab.rewards import AccuracyReward, KimiLengthReward, for_task, step_reward
from grpo_lab.trainer.exactness.loss_proof import wide_toy_batch
from grpo_lab.trainer.trl_bridge.rewards import measures_correctness

TASKS = torch.tensor([0, 1, 1, 0, 1, 0])
GRPO = Objective("grpo", Clipped(0.2, 0.3), sequence_mean, kl=KLTerm(0.1, "k3", "loss"))
CISPO = Objective("cispo", DetachedWeight(epsilon_high=0.5), token_mean, kl=GRPO.kl)
GSPO = Objective("gspo", Clipped(0.01, 0.02), fixed_budget, ratio="sequence", kl=GRPO.kl)
COUNTS = Denominators(rows=6.0, tokens=25.0, budget=7.0)


def batch_of(own: bool = False) -> TokenBatch:
    whole = wide_toy_batch(GRPO)
    tokens = torch.stack([whole.mask[task == TASKS].sum() for task in (0, 1)]) / whole.mask.sum()
    shares = {TASK_ROWS: torch.full((6,), 0.5), TASK_TOKENS: tokens[TASKS]} if own else {}
    return replace(whole, extras={**whole.extras, TASK: TASKS, **shares})


def gradient(objective: Objective, batch: TokenBatch, counts: Denominators = COUNTS) -> tuple[Tensor, Tensor]:
    loss = objective.loss(batch, counts)
    return loss.detach(), torch.autograd.grad(loss, batch.logps, retain_graph=True)[0]


def rows_of(batch: TokenBatch, task: int, level: str) -> TokenBatch:
    """The rows of one task alone, as a run on that task would have them."""
    mine = task == TASKS
    parts = {name: getattr(batch, name)[mine] for name in ("logps", "proximal_logps", "advantages", "mask")}
    ratio = log_ratio(level, parts["logps"], parts["proximal_logps"], parts["mask"])
    ref = {"ref_logps": batch.ref_logps[mine], "entropies": batch.entropies[mine]}  # type: ignore[index]
    return replace(batch, **parts, **ref, log_ratio=ratio, extras={})


@pytest.mark.parametrize("one", [GRPO, CISPO, GSPO], ids=lambda one: one.name)
def test_one_objective_twice_is_that_objective(one: Objective) -> None:
    batch = batch_of()
    mixed = MixedObjective.of(TaskObjective.of(one, name, task=at) for at, name in enumerate("ab"))
    loss, moved = gradient(
        one,
        replace(
            batch, log_ratio=TaskObjective.of(one, "a").its_own(replace(batch, extras={TASK: 0 * TASKS})).log_ratio
        ),
    )
    found, movement = gradient(mixed, batch)
    assert torch.equal(movement, moved)  # bit by bit
    assert found.item() == pytest.approx(loss.item(), rel=1e-14)


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("pair", [(GRPO, CISPO), (GSPO, CISPO), (CISPO, GSPO)], ids=lambda pair: pair[0].name)
def test_each_task_is_a_run_of_its_own_rows(pair: tuple[Objective, Objective], own: bool) -> None:
    """Loss and gradient are those of two runs on the tasks' rows, put together by hand; λ = 2 for the second."""
    batch = batch_of(own)
    how: Any = {"own_denominators": own}
    tasks = [TaskObjective.of(one, f"t{at}", task=at, loss_weight=at + 1.0, **how) for at, one in enumerate(pair)]
    loss, moved = gradient(MixedObjective.of(tasks), batch)
    expected, movement = torch.zeros(()).double(), torch.zeros_like(moved)
    for at, one in enumerate(pair):
        alone = rows_of(batch, at, one.ratio)
        counts = Denominators(3.0, float(alone.mask.sum()), 7.0) if own else COUNTS
        loss_alone, moved_alone = gradient_of_rows(one, alone, batch, counts)
        expected = expected + (at + 1) * loss_alone
        movement = movement + (at + 1) * moved_alone
    assert loss.item() == pytest.approx(expected.item(), rel=1e-7)  # the shares of tokens are float32
    assert (moved - movement).norm() <= 1e-7 * movement.norm()


def gradient_of_rows(
    one: Objective, alone: TokenBatch, whole: TokenBatch, counts: Denominators
) -> tuple[Tensor, Tensor]:
    loss = one.loss(alone, counts)
    return loss.detach(), torch.autograd.grad(loss, whole.logps, retain_graph=True)[0]


def test_what_the_tasks_report_stays_on_their_rows() -> None:
    batch = batch_of()
    mixed = MixedObjective.of([TaskObjective.of(GRPO, "a", task=0), TaskObjective.of(CISPO, "b", task=1)])
    reported = mixed.diagnostics(batch)
    assert {"clip_ratio/region_mean", "cispo_clip_ratio"} <= set(reported)
    assert (reported["clip_ratio/region_mean"][TASKS == 1] == 0).all()
    assert (reported["cispo_clip_ratio"][TASKS == 0] == 0).all()
    assert reported["cispo_clip_ratio"].any()
    with pytest.raises(ValueError, match="carry no task"):
        mixed.token_loss(wide_toy_batch(GRPO))


def test_each_task_has_its_own_rule() -> None:
    values = torch.randn(24, 2, generator=torch.Generator().manual_seed(0)).double()
    tasks = torch.tensor([0, 1, 2, 1, 0, 2]).repeat_interleave(4)
    table = RewardTable(values, ("a", "b"), torch.tensor([1.0, 0.5]), 4, tasks=tasks)

    def of(rule: Any, *numbers: int) -> Tensor:
        mine = torch.isin(tasks, torch.tensor(numbers))
        return rule(table.total[mine], 4)

    found = MixedAdvantage(((GroupMean(), (0,)), (BatchZScore(), (1, 2)), (GroupZScore(), (3,))))(table)
    assert torch.equal(found[tasks == 0], of(GroupMean(), 0))
    assert torch.equal(found[tasks > 0], of(BatchZScore(), 1, 2))
    with pytest.raises(ValueError, match="column `task`"):
        MixedAdvantage(())(replace(table, tasks=None))
    strict = MixedAdvantage(((GroupMean(), (0,)), (PassAtK(k=3), (1,))))
    assert (strict.takes_penalty, strict.least_group) == (False, 4)
    assert MixedAdvantage(((GroupMean(), (0,)),)).takes_penalty


@pytest.mark.parametrize("weights", [(1.0,), (3, 1), (0.7, 0.2, 0.1), (5, 1, 1, 1, 0.01), (1 / 3, 2 / 3)])
def test_every_stretch_of_prompts_has_the_shares(weights: tuple[float, ...]) -> None:
    shares = Shares(weights)
    dealt = [shares.next() for _ in range(1000)]
    assert dealt == [other.next() for other in [Shares(weights)] for _ in range(1000)]
    bound = 1 - float(shares.slack)
    for task, weight in enumerate(weights):
        share = weight / sum(weights)
        before = [0]
        for one in dealt:
            before.append(before[-1] + (one == task))
        off = [count - share * n for n, count in enumerate(before)]
        assert max(map(abs, off)) <= bound + 1e-9
        assert max(off) - min(off) <= 2 * bound + 1e-9  # any window, wherever it begins


def test_a_hundred_rounds_hold_the_shares_and_every_row() -> None:
    tasks = [0] * 30 + [1] * 11 + [2] * 9
    sampler = MixtureSampler(tasks, tasks, [6, 3, 1], mini_repeat_count=2, batch_size=10, repeat_count=1, seed=3)
    rounds = [sampler.round(number) for number in range(100)]
    assert all(len(set(one)) == 10 for one in rounds)
    assert Counter(tasks[row] for one in rounds for row in one) == {0: 600, 1: 300, 2: 100}
    assert all(Counter(tasks[row] for row in one) == {0: 6, 1: 3, 2: 1} for one in rounds)
    seen = [row for one in rounds for row in one if row < 30]
    assert all(sorted(seen[start : start + 30]) == list(range(30)) for start in range(0, 600, 30))  # a pass each
    assert seen[:30] != seen[30:60]
    assert set(range(50)) == {row for one in rounds for row in one}


def test_an_interrupted_order_goes_on() -> None:
    tasks = [0, 1, 0, 0, 1, 1, 0, 1, 0, 0, 0, 1]
    made: Any = lambda: MixtureSampler(tasks, tasks, [2, 1], 1, 3, 1, 5)  # noqa: E731
    whole = [list(sampler) for sampler in [made()] for _ in range(3)]
    assert whole[0] != whole[1]  # rounds are counted over epochs
    sampler = made()
    list(sampler)
    state = sampler.state_dict()
    resumed = made()
    resumed.load_state_dict(state)
    assert [list(resumed), list(resumed)] == whole[1:]
    with pytest.raises(ValueError, match="weights"):
        MixtureSampler(tasks, tasks, [1, 1], 1, 3, 1, 5).load_state_dict(state)
    with pytest.raises(ValueError, match="task 1 has 1 rows"):
        MixtureSampler([0] * 9 + [1], [0] * 9 + [1], [1, 1], 1, 4, 1, 5)


def parity(completion_ids: list[list[int]], number: list[int], **_: Any) -> list[float]:
    return [float((sum(ids) + n) % 2) for ids, n in zip(completion_ids, number, strict=True)]


async def awaited(completion_ids: list[list[int]], number: list[int], **_: Any) -> list[float]:
    return parity(completion_ids, number)


ROWS: dict[str, Any] = {
    "prompts": ["p", "p", "q", "q"],
    "completions": ["w", "x", "y", "z"],
    "completion_ids": [[1], [2], [3], [4]],
    "number": [0, 0, 1, 1],
    "task": ["a", "a", "b", "b"],
}


def test_a_reward_of_one_task_passes_over_the_others() -> None:
    assert for_task(parity, "a")(**ROWS) == [1.0, 0.0, None, None]
    assert asyncio.run(for_task(awaited, "b")(**ROWS)) == [None, None, 0.0, 1.0]
    assert for_task(parity, "c")(**ROWS) == [None] * 4
    assert for_task(parity, "a").__name__ == "a/parity"
    judge = pickle.loads(pickle.dumps(for_task(AccuracyReward(), "a")))
    assert (judge.task, type(judge.reward)) == ("a", AccuracyReward)
    assert measures_correctness(judge)
    logged: dict[str, list[Any]] = {}

    def logs(completions: list[str], log_extra: Any, **_: Any) -> list[float]:
        log_extra("seen", completions)
        return [1.0] * len(completions)

    for_task(logs, "b")(**ROWS, log_extra=logged.__setitem__)
    assert logged == {"seen": [None, None, "y", "z"]}


def test_a_group_reward_of_one_task() -> None:
    length = for_task(KimiLengthReward(correctness=lambda completions, **_: [1.0] * len(completions)), "b")
    assert length.scope == "group"
    found = length(**{**ROWS, "completion_ids": [[1], [2], [3], [4, 5, 6]]})
    assert found[:2] == [None, None]
    assert found[2:] == [0.5, -0.5]
    assert for_task(KimiLengthReward(), "b").requires == ("b/accuracy_reward",)


@pytest.mark.parametrize(
    ("reward", "said"),
    [
        ("some/model", "is a model"),
        (torch.nn.Linear(1, 1), "is a model"),
        (step_reward(lambda **_: []), "steps_as_outcome"),
    ],
)
def test_what_cannot_be_of_one_task(reward: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        for_task(reward, "a")
    with pytest.raises(ValueError, match="no column 'task'"):
        for_task(parity, "a")(**{name: values for name, values in ROWS.items() if name != "task"})


def test_shares_are_exact() -> None:
    assert math.isclose(sum(Shares([0.1] * 10).shares), 1.0)
    assert sum(Shares([0.1, 0.2, 0.7]).shares) == 1
