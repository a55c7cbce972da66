"""The optimal token baseline: by hand, against loops, over ranks, and where it is exactly 0."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from grpo_lab.advantages import OptimalTokenBaseline, level_of, reads_token_energy
from grpo_lab.batch import LocalRows, RewardTable
from reference import oracle

RULE = OptimalTokenBaseline()
ROWS, SIZE, WIDTH = 12, 4, 7


def case(seed: int) -> RewardTable:
    """Ragged rows with holes (tool output), one unscorable, the second group dead; padding holds NaN."""
    random = torch.Generator().manual_seed(seed)
    rewards = torch.randint(0, 5, (ROWS, 1), generator=random).double() / 4
    rewards[4:8] = 0.1
    rewards[9] = math.nan
    ends = torch.randint(1, WIDTH + 1, (ROWS, 1), generator=random)
    mask = (torch.arange(WIDTH) < ends) & (torch.rand(ROWS, WIDTH, generator=random) < 0.8)
    energy = torch.rand(ROWS, WIDTH, generator=random, dtype=torch.float64).masked_fill(~mask, math.nan)
    local = LocalRows(slice(0, ROWS), mask, ends.squeeze(1), token_energy=energy)
    return RewardTable(rewards, ("r",), torch.ones(1), SIZE, local=local, lengths=mask.sum(1))


def part(table: RewardTable, rows: slice, **changes: Any) -> RewardTable:
    """What a rank with these rows gets, no wider than they are."""
    local = table.local
    assert local is not None
    assert local.token_energy is not None
    width = max(int(local.lengths[rows].max()), 1)
    there = (local.mask[rows, :width], local.lengths[rows])
    return replace(table, local=LocalRows(rows, *there, token_energy=local.token_energy[rows, :width], **changes))


def test_by_hand() -> None:
    """Rewards 1 and 0. W of token 0: ½ and 1½, so B = ¼; token 1 is there once."""
    mask = torch.tensor([[True, True], [True, False]])
    energy = torch.tensor([[0.5, 0.5], [1.5, 9.0]])
    local = LocalRows(slice(0, 2), mask, mask.sum(1), token_energy=energy)
    table = RewardTable(torch.tensor([[1.0], [0.0]]), ("r",), torch.ones(1), 2, local=local, lengths=mask.sum(1))
    assert RULE(table).tolist() == [[0.75, 0.0], [-0.25, 0.0]]
    certain = replace(table, local=replace(local, token_energy=torch.zeros(2, 2)))  # no variance at all: the mean
    assert RULE(certain).tolist() == [[0.5, 0.5], [-0.5, 0.0]]


@pytest.mark.parametrize("seed", range(5))
def test_against_loops(seed: int) -> None:
    table = case(seed)
    assert table.local is not None
    assert table.local.token_energy is not None
    own = [row[kept].tolist() for row, kept in zip(table.local.token_energy, table.local.mask, strict=True)]
    rewards = [None if math.isnan(r) else r for r in table.total.tolist()]
    expected = [value for row in oracle.token_baseline(rewards, own, SIZE) for value in row]
    found = RULE(table)
    assert found[table.local.mask].tolist() == pytest.approx(expected, rel=1e-12, abs=1e-12)
    assert (found[~table.local.mask] == 0).all()
    assert (found[4:8] == 0).all()
    assert (found[9] == 0).all()


@pytest.mark.parametrize("cuts", [(0, 6, 12), (0, 3, 5, 12)])
def test_ranks_get_their_slices_of_one_answer(cuts: tuple[int, ...]) -> None:
    """Also where a group lies on two ranks, and whatever the widths of their batches."""
    table = case(7)
    everything = RULE(table)
    places = [slice(first, last) for first, last in itertools.pairwise(cuts)]
    said: list[Tensor] = []
    for rows in places:
        RULE(part(table, rows, over_ranks=lambda sums: said.append(sums) or sums))
    whole = torch.stack(said).sum(0)
    for rows in places:
        found = RULE(part(table, rows, over_ranks=lambda _: whole))
        torch.testing.assert_close(found, everything[rows, : found.size(1)], rtol=1e-12, atol=1e-12)


def test_permuting_a_group_permutes_its_advantages() -> None:
    table = case(3)
    order = torch.tensor([2, 0, 3, 1, *range(4, 12)])
    local = table.local
    assert local is not None
    assert local.token_energy is not None
    mixed = LocalRows(local.rows, local.mask[order], local.lengths[order], token_energy=local.token_energy[order])
    moved = replace(table, values=table.values[order], lengths=local.mask.sum(1)[order], local=mixed)
    torch.testing.assert_close(RULE(moved), RULE(table)[order], rtol=1e-12, atol=1e-12)


def test_what_it_needs() -> None:
    table = case(0)
    assert level_of(RULE) == "token"
    assert reads_token_energy(RULE)
    for without in (replace(table, local=None), replace(table, lengths=None)):
        with pytest.raises(ValueError, match=r"`table\.local\.token_energy`"):
            RULE(without)
