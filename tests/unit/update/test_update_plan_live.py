"""Which rows are live, and every condition under which nothing may be left out."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_lab.update import LiveConditions, live_rows, why_all_rows, why_stock_batches

EXACT = LiveConditions(
    kl_in_loss=0.0,
    value_loss=0.0,
    entropy_bonus="",
    pull="",
    moe_aux_loss=0.0,
    dropout=0.0,
    same_draws=True,
    shared_dropout=0.0,
    layer_drop=0.0,
    router_noise=0.0,
    random_forward=False,
    embedding_noise=0.0,
    mixed_rows="",
    moved_positions="",
    state_reads_padding=False,
    local_average="",
    multimodal=False,
)

# field, value that breaks the condition, word the sentence must name, whether the grouping is broken as well
BREAKS = [
    ("kl_in_loss", 0.04, "beta=0.04", False),
    ("value_loss", 0.5, "value loss", False),
    ("entropy_bonus", "entropy_coef=0.01", "the entropy bonus (entropy_coef=0.01)", False),
    ("pull", "the surrogate `Mine`", "the surrogate `Mine`: the loss of a row does not vanish", False),
    ("moe_aux_loss", 0.001, "router_aux_loss_coef=0.001", True),
    ("dropout", 0.05, "update.randomness: same_distribution", True),
    ("shared_dropout", 0.05, "rank_dropout", True),
    ("layer_drop", 0.1, "layerdrop=0.1", True),
    ("router_noise", 0.01, "router_jitter_noise=0.01", True),
    ("random_forward", True, "drew random numbers", True),
    ("embedding_noise", 5.0, "neftune_noise_alpha=5.0", True),
    ("mixed_rows", "batch norm", "other rows of its batch: batch norm", True),
    ("moved_positions", "virtual tokens", "re-aligned without changing its log-probs: virtual tokens", True),
    ("state_reads_padding", True, "recurrent state", True),
    ("local_average", "mine", "the average `mine` divides by the tokens of its own micro-batch", True),
    ("multimodal", True, "images", True),
]


def test_nothing_stands_in_the_way() -> None:
    assert why_all_rows(EXACT) is None
    assert why_stock_batches(EXACT) is None


@pytest.mark.parametrize("same_draws", [True, False])
@pytest.mark.parametrize(("name", "value", "word", "grouping"), BREAKS)
def test_each_condition_alone_keeps_all_rows_and_is_named(
    name: str, value: float | bool | str, word: str, grouping: bool, same_draws: bool
) -> None:
    """Where the distribution is enough, dropout is no condition and all others are."""
    conditions = dataclasses.replace(EXACT, **{name: value}, same_draws=same_draws)
    reason = why_all_rows(conditions)
    assert reason is None if name == "dropout" and not same_draws else word in str(reason)
    assert why_stock_batches(conditions) == (reason if grouping else None)


def test_every_condition_has_a_row_here_and_none_has_a_default() -> None:
    names = {field.name for field in dataclasses.fields(LiveConditions)}
    assert names == {name for name, *_ in BREAKS} | {"same_draws"}  # which stands in nobody's way by itself
    with pytest.raises(TypeError):
        LiveConditions()  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("kl_in_loss", math.nan),
        ("kl_in_loss", None),
        ("dropout", True),
        ("multimodal", 1),
        ("multimodal", None),
        ("pull", False),
    ],
)
def test_conditions_of_the_wrong_kind_are_refused(name: str, value: object) -> None:
    with pytest.raises(ValueError, match=f"LiveConditions.{name}"):
        dataclasses.replace(EXACT, **{name: value})


def test_live_rows_by_hand() -> None:
    mask = torch.tensor([[1, 1, 0], [1, 1, 1], [0, 0, 0], [1, 0, 0], [1, 1, 0], [1, 0, 0]])
    # advantage 0 | ≠ 0 | ≠ 0 but fully masked | negative | NaN | -0.0
    advantages = torch.tensor([0.0, 0.5, 0.5, -1e-30, math.nan, -0.0])
    assert live_rows(advantages, mask).tolist() == [False, True, False, True, True, False]
    assert live_rows(advantages.unsqueeze(1), mask.bool()).tolist() == [False, True, False, True, True, False]
    # advantages per token count only where the mask looks
    mask = torch.tensor([[1.0, 1.0, 0.0]] * 4)
    advantages = torch.tensor([[0.0, 0.0, 2.0], [0.0, 1.0, 0.0], [0.0, 0.0, 0.0], [0.0, 0.0, math.nan]])
    assert live_rows(advantages, mask).tolist() == [False, True, False, False]
    assert live_rows(torch.zeros(0), torch.zeros(0, 3)).shape == (0,)
    assert live_rows(torch.ones(2), torch.zeros(2, 0)).tolist() == [False, False]


@pytest.mark.parametrize(
    ("advantages", "mask"), [((3,), (2, 4)), ((2, 3), (2, 4)), ((2, 4, 1), (2, 4)), ((2,), (2,)), ((), (2, 4))]
)
def test_shapes_that_do_not_fit_are_refused(advantages: tuple[int, ...], mask: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"shape|rows"):
        live_rows(torch.zeros(advantages), torch.zeros(mask))


@pytest.mark.not_fast
@settings(max_examples=100, deadline=None)
@given(st.data())
def test_live_is_exactly_where_a_token_weighs_something(data: st.DataObject) -> None:
    n, t = data.draw(st.integers(1, 6)), data.draw(st.integers(1, 5))
    value = st.sampled_from([0.0, -0.0, 1.0, -2.0, 1e-38])
    advantages = data.draw(st.lists(st.lists(value, min_size=t, max_size=t), min_size=n, max_size=n))
    mask = data.draw(st.lists(st.lists(st.integers(0, 1), min_size=t, max_size=t), min_size=n, max_size=n))
    expected = [any(a * m != 0 for a, m in zip(*row, strict=True)) for row in zip(advantages, mask, strict=True)]
    # float64 sums in Python against the tensor: products of these values with 0 or 1 are exact
    assert live_rows(torch.tensor(advantages), torch.tensor(mask)).tolist() == expected
