"""The metric book: pairs, ranks, mean of means; and docs/metrics.md against what is logged."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from grpo_lab.trainer.metrics import MetricBook, add_token_metric, reward_metrics

ONE = SimpleNamespace(gather=lambda value: value)
TWO_ALIKE = SimpleNamespace(gather=lambda value: torch.cat([value, value]))


def test_a_mean_is_over_tokens_not_over_batches() -> None:
    book = MetricBook()
    # micro-batch 1: three tokens of 1.0; micro-batch 2: one token of 5.0 -> (3 + 5) / 4 = 2.0, not (1 + 5) / 2 = 3.0
    add_token_metric(book, "entropy", torch.ones(1, 3), torch.ones(1, 3, dtype=torch.bool))
    add_token_metric(book, "entropy", torch.full((1, 3), 5.0), torch.tensor([[True, False, False]]))
    book.reduce(ONE)
    assert book.read() == {"entropy": 2.0}
    assert book.read() == {}


def test_mean_of_means_is_trls_definition() -> None:
    book = MetricBook(mean_of_means=True)
    values = torch.tensor([[1.0, 1.0, 1.0], [5.0, 0.0, 0.0]])
    mask = torch.tensor([[True, True, True], [True, False, False]])
    add_token_metric(book, "entropy", values, mask, slots=torch.tensor([0, 1]), num_slots=2)  # (1 + 5) / 2 = 3
    book.reduce(ONE)
    assert book.read() == {"entropy": 3.0}


@pytest.mark.parametrize("mean_of_means", [False, True])
def test_ranks_add_up(mean_of_means: bool) -> None:
    book = MetricBook(mean_of_means)
    book.add("x", torch.tensor(6.0), 3.0)
    book.reduce(TWO_ALIKE)  # (6 + 6) / (3 + 3)
    assert book.read() == {"x": 2.0}


def test_masked_nan_does_not_reach_the_mean() -> None:
    book = MetricBook()
    add_token_metric(book, "kl", torch.tensor([[1.0, float("nan")]]), torch.tensor([[True, False]]))
    book.reduce(ONE)
    assert book.read() == {"kl": 1.0}


def test_extremes_follow_the_rows() -> None:
    book = MetricBook()
    clipped = torch.tensor([[1.0, 1.0, 0.0, 0.0], [0.0, 0.0, 0.0, 1.0]])  # row shares 0.5 and 0.25
    add_token_metric(book, "clip_ratio/low_mean", clipped, torch.ones(2, 4, dtype=torch.bool))
    add_token_metric(book, "clip_ratio/high_mean", clipped, torch.ones(2, 4, dtype=torch.bool))
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
    }


def test_every_name_in_the_code_stands_in_the_docs() -> None:
    root = Path(__file__).resolve().parents[2]
    documented = set(re.findall(r"`([a-z_]+(?:/[a-z_]+)*)`", (root / "docs" / "metrics.md").read_text()))
    code = "\n".join(
        path.read_text() for path in (root / "grpo_lab").rglob("*.py") if path.parent.name in ("trainer", "objectives")
    )
    named = set(re.findall(r'"((?:clip_ratio|groups|completions|update|sampling|kl|rewards|rollout)/[a-z_/]+)"', code))
    assert named - documented == set()
    assert {"entropy", "kl", "cispo_clip_ratio"} <= documented


def test_a_pair_that_is_alike_everywhere_leaves_this_ranks_pairs_waiting() -> None:
    """Two ranks: token means are added up over ranks at the reduction (here (1 + 3) / (1 + 1) = 2), also when a table that
    both ranks hold (a share of 0.25) was recorded in between, which counts once."""
    book = MetricBook()
    book.add("entropy", torch.tensor(1.0), 1.0)
    book.add_alike("groups/dead_share", torch.tensor(1.0), 4.0)

    class TwoRanks:
        def gather(self, mine: torch.Tensor) -> torch.Tensor:
            return torch.cat([mine, torch.tensor([[3.0, 1.0]])])

    book.reduce(TwoRanks())
    assert book.read() == {"entropy": 2.0, "groups/dead_share": 0.25}
