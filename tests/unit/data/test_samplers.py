"""Samplers: TRL's shape, the distribution of the formula, the floor, resume to the index, and agreement of ranks.

A small run is played through a real DataLoader as accelerate prepares it (one batch prefetched, sharded over ranks,
`skip_first_batches` on resume), with success rates that depend on what was sampled: if a draw sees one update too many
or too few, the order changes.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from accelerate.data_loader import prepare_data_loader, skip_first_batches
from torch.utils.data import DataLoader
from trl.trainer.utils import RepeatSampler

from grpo_lab.curation import CurriculumSampler, PrioritizedSampler, RoundSampler, UniformThenHardSampler
from grpo_lab.curation.samplers import inclusion_probabilities, seeded, systematic_sample

SHAPE = {"mini_repeat_count": 2, "batch_size": 3, "repeat_count": 4}
RATES = [k / 10 for k in range(10)] + [0.95]


def all_samplers(rows: int = 11, **shape: int) -> list[RoundSampler]:
    data, rates, shape = range(rows), (RATES * 10)[:rows], shape or SHAPE
    hard_below = 0.5 if shape.get("batch_size", 1) < 5 else 1.1  # five problems are below one half
    return [
        PrioritizedSampler(data, **shape, seed=5),
        CurriculumSampler(data, rates, **shape, seed=5),
        UniformThenHardSampler(data, rates, **shape, seed=5, uniform_rounds=2, hard_below=hard_below),
    ]


def rounds(sampler: RoundSampler) -> list[list[int]]:
    """The rounds of one epoch, after a check that every one has the shape."""
    indices = list(sampler)
    assert len(indices) == len(sampler)
    size = sampler.batch_size * sampler.mini_repeat_count
    found = []
    for start in range(0, len(indices), size * sampler.repeat_count):
        served = indices[start : start + size * sampler.repeat_count]
        first = served[:size]
        assert served == first * sampler.repeat_count
        prompts = first[:: sampler.mini_repeat_count]
        assert first == [p for p in prompts for _ in range(sampler.mini_repeat_count)]
        assert len(set(prompts)) == sampler.batch_size
        found.append(prompts)
    return found


@pytest.mark.parametrize("which", range(3))
@pytest.mark.parametrize("shape", [SHAPE, {"mini_repeat_count": 1}, {"mini_repeat_count": 8, "batch_size": 11}])
def test_the_shape_is_that_of_trl(which: int, shape: dict[str, int]) -> None:
    ours = all_samplers(**shape)[which]
    trl = RepeatSampler(range(11), **shape, seed=5)
    assert len(ours) == len(trl) == len(list(trl))
    assert len(rounds(ours)) == 11 // shape.get("batch_size", 1)
    # the same indices in TRL's sampler give the same stream
    if which == 1 and 11 % shape.get("batch_size", 1) == 0:
        order = [p for prompts in rounds(all_samplers(**shape)[1]) for p in prompts]
        plain = RepeatSampler(range(11), **shape, shuffle=False)
        assert [order[i] for i in plain] == list(all_samplers(**shape)[1])


# --- distribution ----------------------------------------------------------------------------------------------------


def chi_square(counts: Counter[int], expected: list[float]) -> float:
    return sum((counts[i] - e) ** 2 / e for i, e in enumerate(expected))


@pytest.mark.not_fast
def test_draws_follow_one_minus_s() -> None:
    # s = 0, 1/4, 2/4, 3/4, 1 with floor 0.05 -> weights 1, .75, .5, .25, .05; their sum is 2.55
    sampler = PrioritizedSampler(range(5), 1, floor=0.05, seed=1)
    for index in range(5):
        sampler.update(index, index, 4)
    assert sampler.weights.tolist() == [1, 0.75, 0.5, 0.25, 0.05]
    draws = 2_000
    counts = Counter(sampler.draw(0, number, seeded(1, number))[0] for number in range(draws))
    expected = [draws * w / 2.55 for w in (1, 0.75, 0.5, 0.25, 0.05)]
    assert chi_square(counts, expected) < 18.5  # 99.9% point with 4 degrees of freedom
    uniform = [draws / 5] * 5
    assert chi_square(counts, uniform) > 300  # the test can tell


@pytest.mark.not_fast
def test_rounds_of_many_problems_follow_the_formula_too() -> None:
    weights = torch.tensor([1.0, 0.9, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1], dtype=torch.float64)
    chance = inclusion_probabilities(weights, 3)  # 3·1.0/4.0 = 0.75 is the largest: nothing is capped
    torch.testing.assert_close(chance, 3 * weights / 4.0)
    draws = 2_000
    counts = Counter(i for number in range(draws) for i in systematic_sample(chance, seeded(7, number)))
    assert sum(counts.values()) == 3 * draws
    for i in range(8):
        p = float(chance[i])
        assert abs(counts[i] - draws * p) < 4.5 * math.sqrt(draws * p * (1 - p))


def test_a_capped_problem_is_in_every_round_and_the_rest_share() -> None:
    weights = torch.tensor([1.0, 0.2, 0.1, 0.1], dtype=torch.float64)
    # k·1.0 would be 2/1.4 > 1: capped; one place is left for 0.2 : 0.1 : 0.1
    chance = inclusion_probabilities(weights, 2)
    assert chance.tolist() == pytest.approx([1, 0.5, 0.25, 0.25])
    assert inclusion_probabilities(weights, 4).tolist() == [1, 1, 1, 1]
    for number in range(200):
        assert 0 in systematic_sample(chance, seeded(number))


def test_the_sum_of_inclusion_probabilities_is_the_round() -> None:
    for seed in range(50):
        weights = torch.rand(30, dtype=torch.float64, generator=seeded(seed)).clamp(min=0.01) ** 3
        for count in (1, 7, 29, 30):
            chance = inclusion_probabilities(weights, count)
            assert float(chance.sum()) == pytest.approx(count, abs=1e-9)
            assert float(chance.max()) <= 1
            assert len(set(systematic_sample(chance, seeded(seed, count)))) == count


@pytest.mark.not_fast
def test_nothing_starves() -> None:
    # one problem is solved for ever among 49 that never are: it must still get floor/N of the draws
    sampler = PrioritizedSampler(range(50), 1, 10, floor=0.2, seed=3)
    sampler.update(0, 8, 8)
    shares = sampler.weights / sampler.weights.sum()
    assert float(shares[0]) == pytest.approx(0.2 / 49.2)
    assert float(shares.min()) >= 0.2 / 50
    served = [number for number in range(1000) if 0 in sampler.draw(0, number, seeded(3, number))]
    expected = 1000 * 10 * 0.2 / 49.2  # 41
    assert abs(len(served) - expected) < 4.5 * math.sqrt(expected)
    with pytest.raises(ValueError, match="floor=0"):
        PrioritizedSampler(range(5), 1, floor=0)


# --- the estimate ----------------------------------------------------------------------------------------------------


def test_the_running_estimate_by_hand() -> None:
    sampler = PrioritizedSampler(range(3), 1, initial=[0.25, 0.5, 1.0], decay=0.5, floor=0.1)
    assert sampler.success_rates.tolist() == [0.25, 0.5, 1.0]
    sampler.update(1, 6, 8)
    assert sampler.success_rates.tolist() == [0.25, 0.75, 1.0]
    sampler.update(1, 0, 8)  # S = 0.5·6 + 0, T = 0.5·8 + 8 = 12
    assert sampler.success_rates.tolist() == [0.25, 0.25, 1.0]
    sampler.update(2, 0, 0)  # nothing was scored: nothing is known
    assert sampler.success_rates.tolist() == [0.25, 0.25, 1.0]
    assert sampler.weights.tolist() == [0.75, 0.75, 0.1]


def test_bad_updates_and_settings_are_named() -> None:
    sampler = PrioritizedSampler(range(3), 1)
    for arguments, says in [((3, 1, 1), "index=3"), ((0, 2, 1), "successes=2"), ((0, -1, 1), "successes=-1")]:
        with pytest.raises(ValueError, match=says):
            sampler.update(*arguments)
    for settings, says in [
        ({"decay": 2}, "decay=2"),
        ({"initial": [0.5]}, "initial needs 3"),
        ({"initial": 1.5}, r"1.5 \(initial\)"),
        ({"batch_size": 4}, "batch_size=4"),
        ({"repeat_count": 0}, "repeat_count=0"),
        ({"seed": None}, "seed=None"),
    ]:
        with pytest.raises(ValueError, match=says):
            PrioritizedSampler(range(3), 1, **settings)
    with pytest.raises(ValueError, match="mini_repeat_count"):
        PrioritizedSampler(range(3), 0)


# --- curricula -------------------------------------------------------------------------------------------------------


def test_easy_to_hard() -> None:
    rates = [0.5, 0.9, 0.1, 0.7, 0.5, 0.3, 1.0]
    sampler = CurriculumSampler(range(7), rates, 1, 2, seed=2)
    left_out: Counter[int] = Counter()
    for _ in range(300):
        order = [i for prompts in rounds(sampler) for i in prompts]
        assert [rates[i] for i in order] == sorted((rates[i] for i in order), reverse=True)
        left_out.update(set(range(7)) - set(order))
    assert chi_square(left_out, [300 / 7] * 7) < 22.5  # 99.9% with 6 degrees of freedom: not always the hardest
    ties = {tuple(i for i in [j for r in rounds(sampler) for j in r] if i in (0, 4)) for _ in range(40)}
    assert {(0, 4), (4, 0)} <= ties


def test_uniform_then_hard() -> None:
    rates = [0.9] * 6 + [0.2] * 5
    sampler = UniformThenHardSampler(range(11), rates, 1, 2, seed=2, uniform_rounds=7, hard_below=0.5)
    served = [prompts for _ in range(4) for prompts in rounds(sampler)]  # 5 rounds an epoch
    assert len({i for prompts in served[:5] for i in prompts}) == 10  # a shuffle, no repeats
    assert any(i < 6 for prompts in served[5:7] for i in prompts)
    assert all(i >= 6 for prompts in served[7:] for i in prompts)
    hard = Counter(i for prompts in served[7:] for i in prompts)
    assert set(hard) == {6, 7, 8, 9, 10}
    assert sum(hard.values()) == 2 * 13
    with pytest.raises(ValueError, match=r"hard_below=0\.1"):
        UniformThenHardSampler(range(11), rates, 1, 2, uniform_rounds=1, hard_below=0.1)


@pytest.mark.parametrize("rates", [[0.5], [0.5, None, 0.1], [0.5, 1.1, 0.2]])
def test_bad_pass_rates_are_named(rates: list[Any]) -> None:
    with pytest.raises(ValueError, match="pass rate"):
        CurriculumSampler(range(3), rates, 1)


# --- order, state, resume --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("which", range(3))
def test_the_order_depends_on_seed_and_epoch_only(which: int) -> None:
    one, two = all_samplers()[which], all_samplers()[which]
    torch.manual_seed(0)
    first = rounds(one)
    torch.manual_seed(99)
    assert rounds(two) == first
    second = rounds(one)
    assert second != first
    two.set_epoch(0)
    assert rounds(two) == first
    two.set_epoch(1)
    assert rounds(two) == second
    assert one.fingerprint() == two.fingerprint()


class Run:
    """A toy training: after every step, each rank reports for every prompt of the round how often it was 'right';
    the number of successes depends on everything served so far, so that the order is chaotic in the updates."""

    def __init__(self, sampler: RoundSampler, rank: int = 0, world: int = 1) -> None:
        self.sampler, self.rank, self.world = sampler, rank, world
        batch = 3  # prompts x copies of a round are 6: a round is 2 batches of one rank, or one of two ranks
        loader = DataLoader(list(range(sampler.num_samples)), batch_size=batch, sampler=sampler, drop_last=False)
        self.loader = prepare_data_loader(
            loader, num_processes=world, process_index=rank, put_on_device=False, dispatch_batches=False
        )
        self.memory = 17

    def steps(self, epochs: range, skip: int = 0) -> Iterator[list[int]]:
        for epoch in epochs:
            loader = skip_first_batches(self.loader, skip) if skip else self.loader
            skip = 0
            loader.set_epoch(epoch)
            for batch in loader:
                yield batch.tolist()

    def learn(self, everybody: list[int]) -> None:
        for index in dict.fromkeys(everybody):
            self.memory = (self.memory * 31 + index * 7 + 3) % 1009
            if isinstance(self.sampler, PrioritizedSampler):
                self.sampler.update(index, self.memory % 9, 8)


def play(run: Run, epochs: range, skip: int = 0, stop_after: int | None = None) -> list[list[int]]:
    served = []
    for batch in run.steps(epochs, skip):
        served.append(batch)
        run.learn(batch)
        if stop_after is not None and len(served) == stop_after:
            break
    return served


@pytest.mark.parametrize("which", range(3))
@pytest.mark.parametrize("stop", [1, 7, 23, 24, 25, 30, 47, 48, 49])
def test_resume_is_exact(which: int, stop: int) -> None:
    make = lambda: all_samplers(11)[which]  # noqa: E731
    per_epoch = len(make()) // 3  # 24 batches: 3 rounds x 4 repeats x 2 batches
    assert per_epoch == 24
    whole = play(Run(make()), range(3))
    assert len(whole) == 3 * per_epoch

    first = Run(make())
    before = play(first, range(3), stop_after=stop)
    state = json.loads(json.dumps(first.sampler.state_dict()))  # plain data
    second = Run(make())
    second.sampler.load_state_dict(state)
    second.memory = first.memory
    epoch, skip = divmod(stop, per_epoch)
    after = play(second, range(epoch, 3), skip)
    assert before + after == whole


def test_resume_without_the_state_would_not_be_exact() -> None:
    """The toy run can tell: the weights alone, without the rounds that were drawn, give another order."""
    whole = play(Run(all_samplers()[0]), range(2))
    first = Run(all_samplers()[0])
    before = play(first, range(2), stop_after=13)
    state = first.sampler.state_dict()
    second = Run(all_samplers()[0])
    second.sampler.load_state_dict({**state, "drawn": []})
    second.memory = first.memory
    assert before + play(second, range(2), 13) != whole


def test_a_plain_data_loader_counts_epochs_by_itself() -> None:
    sampler = all_samplers()[0]
    loader = DataLoader(range(11), batch_size=6, sampler=sampler)
    first = [batch.tolist() for batch in loader]
    second = [batch.tolist() for batch in loader]
    assert first != second
    assert sampler.epoch == 1
    fresh = all_samplers()[0]
    fresh.load_state_dict(sampler.state_dict())  # saved at the end of epoch 1
    assert [b.tolist() for b in DataLoader(range(11), batch_size=6, sampler=fresh)] not in (first, second)
    assert fresh.epoch == 2


@pytest.mark.parametrize("which", range(3))
def test_two_ranks_agree_and_share_every_round(which: int) -> None:
    runs = [Run(all_samplers()[which], rank, 2) for rank in range(2)]
    streams = [run.steps(range(3)) for run in runs]
    served = 0
    for batches in zip(*streams, strict=True):
        everybody = [index for batch in batches for index in batch]  # the gathered step
        assert sorted(Counter(everybody).values()) == [2, 2, 2]  # three whole groups of two
        for run in runs:
            run.learn(everybody)
        assert runs[0].sampler.fingerprint() == runs[1].sampler.fingerprint()
        served += 1
    assert served == 3 * 12
    if which == 0:
        runs[0].sampler.update(4, 1, 8)  # type: ignore[attr-defined]
        assert runs[0].sampler.fingerprint() != runs[1].sampler.fingerprint()


def test_a_state_of_something_else_is_refused() -> None:
    prioritized, curriculum, _ = all_samplers()
    with pytest.raises(ValueError, match="CurriculumSampler"):
        prioritized.load_state_dict(curriculum.state_dict())
    with pytest.raises(ValueError, match="num_samples"):
        prioritized.load_state_dict(PrioritizedSampler(range(12), **SHAPE, seed=5).state_dict())
    with pytest.raises(ValueError, match="seed"):
        prioritized.load_state_dict(PrioritizedSampler(range(11), **SHAPE, seed=6).state_dict())
