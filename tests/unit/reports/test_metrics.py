"""The metric book: pairs, ranks, mean of means. Whole runs by hand: ``tests/training/test_metrics_by_hand.py``."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from grpo_lab.batch import TokenBatch
from grpo_lab.objectives import AGGREGATIONS, Clipped, Objective, log_ratio
from grpo_lab.objectives.corrections import TokenTruncate
from grpo_lab.trainer.metrics.book import LeftOut, MetricBook, Origin, TrlBook, reward_metrics
from grpo_lab.trainer.row_table import Carried
from grpo_lab.trainer.step.update_record import record_skipped, record_tokens

ONE = SimpleNamespace(gather=lambda value: value)
TWO_ALIKE = SimpleNamespace(gather=lambda value: torch.cat([value, value]))


def test_a_mean_is_over_tokens_not_over_batches() -> None:
    book = MetricBook()
    # micro-batch 1: three tokens of 1.0; micro-batch 2: one token of 5.0 -> (3 + 5) / 4 = 2.0, not (1 + 5) / 2 = 3.0
    book.add_tokens("entropy", torch.ones(1, 3), torch.ones(1, 3, dtype=torch.bool))
    book.add_tokens("entropy", torch.full((1, 3), 5.0), torch.tensor([[True, False, False]]))
    book.reduce(ONE)
    assert book.read() == {"entropy": 2.0}
    assert book.read() == {}


def test_mean_of_means_is_trls_definition() -> None:
    book = TrlBook()
    values = torch.tensor([[1.0, 1.0, 1.0], [5.0, 0.0, 0.0]])
    mask = torch.tensor([[True, True, True], [True, False, False]])
    book.add_tokens("entropy", values, mask, Origin(torch.tensor([0, 1]), count=2, every=2))  # (1 + 5) / 2 = 3
    book.reduce(ONE)
    assert book.read() == {"entropy": 3.0}


def test_rows_without_tokens_count_as_trl_counts_them() -> None:
    """Two micro-batches of two rows, one value a row; the second has no loss token and is left out.

    First: rows of 2 and 4, the second without a token. Ours: 2 / 1. TRL's, of the first as it cut it: (2 + 4) / 2 = 3;
    in bins its row counts only where it has tokens, 2 / 1, and a micro-batch that was left out whole has the mean 0: (2
    + 0) / 2 = 1.
    """
    values, mask = torch.tensor([[2.0], [4.0]]), torch.tensor([[True, True], [False, False]])
    first, both = Origin(torch.tensor([0, 0]), 2, 2), Origin(torch.tensor([0, 0, 1, 1]), 2, 2)
    left_out = LeftOut(torch.tensor([2, 0, 0, 0]), torch.tensor([False, False, True, True]), both, width=2)
    ours, as_cut, in_bins, seen = MetricBook(), TrlBook(), TrlBook(), TrlBook()
    for book, origin in ((ours, first), (as_cut, None), (in_bins, first)):
        book.add_tokens("ratio", values, mask, origin)
    for book in (ours, in_bins):
        book.add_zeros("ratio", left_out, of_rows=True)
    seen.add_tokens("entropy", torch.full((2, 2), 6.0), mask, first)
    seen.add_unseen("entropy", left_out)
    for book in (ours, as_cut, in_bins, seen):
        book.reduce(ONE, step_ends=book is not as_cut)
    assert ours.read() == {"ratio": 2.0}
    assert as_cut.read() == {"ratio": 3.0}
    assert in_bins.read() == {"ratio": 1.0}
    assert seen.read() == {"entropy": pytest.approx(3.0)}  # (6 + 0) / 2


def test_pairs_of_ours_wait_for_the_end_of_the_step() -> None:
    book = MetricBook()
    book.add("x", torch.tensor(1.0), 1.0)
    book.reduce(ONE, step_ends=False)
    assert book.read() == {}
    book.reduce(ONE)
    assert book.read() == {"x": 1.0}


@pytest.mark.parametrize("kind", [MetricBook, TrlBook])
def test_ranks_add_up(kind: type[MetricBook]) -> None:
    book = kind()
    book.add("x", torch.tensor(6.0), 3.0)
    book.reduce(TWO_ALIKE)  # (6 + 6) / (3 + 3)
    assert book.read() == {"x": 2.0}


def test_masked_nan_does_not_reach_the_mean() -> None:
    book = MetricBook()
    book.add_tokens("kl", torch.tensor([[1.0, float("nan")]]), torch.tensor([[True, False]]))
    book.reduce(ONE)
    assert book.read() == {"kl": 1.0}


def test_extremes_follow_the_rows() -> None:
    book = MetricBook()
    clipped = torch.tensor([[1.0, 1.0, 0.0, 0.0], [0.0, 0.0, 0.0, 1.0]])  # row shares 0.5 and 0.25
    book.add_tokens("clip_ratio/low_mean", clipped, torch.ones(2, 4, dtype=torch.bool))
    book.add_tokens("clip_ratio/high_mean", clipped, torch.ones(2, 4, dtype=torch.bool))
    book.reduce(ONE)
    assert book.read() == {
        "clip_ratio/low_mean": 0.375,
        "clip_ratio/low_min": 0.25,
        "clip_ratio/high_mean": 0.375,
        "clip_ratio/high_max": 0.5,
    }


def test_reward_metrics_by_hand() -> None:
    book = MetricBook()
    reward_metrics(
        book,
        dead=torch.tensor([True, False]),
        lengths=torch.tensor([4, 8, 10, 20]),
        truncated=torch.tensor([False, False, False, True]),
        correct=torch.tensor([1.0, 1.0, 0.0, float("nan")]),
    )
    assert book.read() == {
        "groups/dead_share": 0.5,
        "completions/truncated_share": 0.25,
        "completions/mean_length_correct": 6.0,  # (4 + 8) / 2
        "completions/mean_length_incorrect": 10.0,
        "rewards/unscorable_share": 0.25,
        "groups/solved_share": 0.5,  # 1, 1 | 0, nan
        "groups/learnable_share": 0.0,
    }


def test_reward_metrics_hold_correct_from_one_on() -> None:
    """0.75 is no solved problem: the definition of evaluation, samplers and pass rates."""
    book = MetricBook()
    lengths = torch.tensor([2, 4, 6])
    nothing = torch.zeros(3, dtype=torch.bool)
    reward_metrics(book, nothing[:1], lengths, nothing, torch.tensor([1.0, 0.75, 0.0]))
    found = book.read()
    assert (found["completions/mean_length_correct"], found["completions/mean_length_incorrect"]) == (2.0, 5.0)
    assert (found["groups/solved_share"], found["groups/learnable_share"]) == (1.0, 1.0)


def test_a_last_bin_one_token_wide_does_not_turn_tokens_into_rows() -> None:
    """A token ratio; 3 + 5 tokens computed of which 2 are clipped, then a dummy bin; two rows of 4 and 6 tokens left
    out.

    2 / (8 + 10), and not 2 / (8 + 2) as if the dummy's width of one made rows of them. A sequence ratio counts rows: 1
    / (2 + 2).
    """
    found = {}
    for ratio in ("token", "sequence"):
        objective = Objective("x", Clipped(0.2), AGGREGATIONS["token_mean"], ratio)
        trainer: Any = SimpleNamespace(
            algorithm=SimpleNamespace(objective=objective, value=None),
            _metrics={},
            recorder=SimpleNamespace(books={}),
            lab_settings=SimpleNamespace(tasks={}),
        )
        moved = torch.tensor([[1.0, 0.0, 0.0, 0.0, 0.0], [0.0, 0.0, 0.5, 0.0, 0.0]])
        mask = torch.arange(5) < torch.tensor([[3], [5]])
        book = MetricBook()
        dummy = torch.zeros(1, 1)
        for steps, where in ((moved, mask), (dummy, dummy.bool())):
            old = -torch.ones_like(steps)
            batch = TokenBatch(old + steps, old, log_ratio(ratio, old + steps, old, where), dummy + 1, where)
            batch = replace(batch, entropies=torch.zeros_like(steps))
            record_tokens(trainer, book, batch)
        tokens, skipped = torch.tensor([3, 5, 4, 6]), torch.tensor([False, False, True, True])
        left_out = LeftOut(tokens, skipped, Origin(torch.zeros(4, dtype=torch.long), count=1, every=1), width=6)
        record_skipped(trainer, book, batch, left_out)
        book.reduce(ONE)
        found[ratio] = book.read()
    assert found["token"]["clip_ratio/high_mean"] == pytest.approx(2 / 18)
    assert found["token"]["clip_ratio/high_max"] == pytest.approx(1 / 3)
    assert found["sequence"]["clip_ratio/high_mean"] == pytest.approx(1 / 4)  # e^(1/3) > 1.2, e^(1/10) is not


def test_a_pair_that_is_alike_everywhere_leaves_this_ranks_pairs_waiting() -> None:
    """Two ranks: token means are added up over ranks at the reduction (here (1 + 3) / (1 + 1) = 2), also when a table
    that both ranks hold (a share of 0.25) was recorded in between, which counts once."""
    book = MetricBook()
    book.add("entropy", torch.tensor(1.0), 1.0)
    book.add_alike("groups/dead_share", torch.tensor(1.0), 4.0)

    class TwoRanks:
        def gather(self, mine: torch.Tensor) -> torch.Tensor:
            return torch.cat([mine, torch.tensor([[3.0, 1.0]])])

    book.reduce(TwoRanks())
    assert book.read() == {"entropy": 2.0, "groups/dead_share": 0.25}


def test_sampler_metrics_by_hand() -> None:
    """Where the correction is made in the loss: two rows of three and two tokens, one of them unscored by the
    engine."""
    mask = torch.tensor([[True, True, True], [True, True, False]])
    ours = torch.tensor([[-1.0, -2.0, -3.0], [-1.5, -0.5, 9.0]])
    engines = torch.tensor([[-1.5, -2.0, float("nan")], [-1.5, -0.75, 0.0]])
    weights = torch.tensor([[1.5, 1.0, 1.0], [1.0, 3.0, 7.0]])
    objective = Objective("x", Clipped(0.2), AGGREGATIONS["token_mean"])
    trainer: Any = SimpleNamespace(
        algorithm=SimpleNamespace(objective=objective, value=None),
        correction=TokenTruncate(None, 3.0),
        lab_settings=SimpleNamespace(tasks={}),
    )
    carried = Carried({})
    carried.behaviour_logps, carried.length_quartile = engines, torch.tensor([3, 0])
    step = torch.zeros_like(ours)
    batch = TokenBatch(ours, ours, step, step[:, :1], mask, None, step, weights, dict(carried.fields))
    book = MetricBook()
    record_tokens(trainer, book, batch)
    book.reduce(ONE)
    found = {name: value for name, value in book.read().items() if name.startswith("sampling/")}
    assert found == pytest.approx(
        {
            "sampling/sampling_logp_difference/mean": (0.5 + 0 + 0 + 0.25) / 4,  # the unscored token is not counted
            "sampling/sampling_logp_difference/max": 0.5,
            "sampling/importance_sampling_ratio/mean": (1.5 + 1 + 1 + 1 + 3) / 5,
            "sampling/importance_sampling_ratio/min": 1.0,
            "sampling/importance_sampling_ratio/max": 3.0,
            "sampling/ratio_mean/len_q1": (1 + 3) / 2,
            "sampling/ratio_mean/len_q4": (1.5 + 1 + 1) / 3,
            "sampling/kept_share/len_q1": 1 / 2,  # 3 is the bound: clamped
            "sampling/kept_share/len_q4": 1.0,
        }
    )
