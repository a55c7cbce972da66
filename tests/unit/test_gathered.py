"""Tokens taken into rectangles and back: the gradients against those that autograd finds by itself, in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from grpo_lab.trainer.trl_bridge.forwards import of_any_shape
from grpo_lab.trainer.trl_bridge.gathered import PADDING, Uses, added_up, collected, repeated, spread

CPU = torch.device("cpu")
#: token of each place: tokens 1 and 4 are in several, 5 in none, two places are padding
PLACES = np.array([1, 4, PADDING, 0, 4, 2, 1, 3, PADDING, 1])
TOKENS = 6


def gradient(of: torch.Tensor, made: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    return torch.autograd.grad((made * weights).sum(), of)[0]


def tokens(count: int = TOKENS) -> torch.Tensor:
    return torch.randn(count, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64).requires_grad_()


def weights(count: int) -> torch.Tensor:
    return torch.randn(count, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def test_a_token_that_stands_in_many_places() -> None:
    held = tokens()
    uses = Uses.of(PLACES, TOKENS, CPU)
    counted = weights(PLACES.size)
    counted[PLACES == PADDING] = 0.0  # nobody sees it
    plain = held[torch.from_numpy(PLACES.clip(0))]
    assert torch.equal(repeated(held, uses), plain)
    assert torch.allclose(gradient(held, repeated(held, uses), counted), gradient(held, plain, counted), rtol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_gpu_adds_up_the_same(dtype: torch.dtype) -> None:
    """Token by token, without padding, in float32; a CPU computes it as well."""
    ours = Uses.in_order(PLACES, TOKENS, CPU)
    assert ours.order is not None
    assert PADDING not in PLACES[ours.order]
    given = weights(PLACES.size).to(dtype)
    given[PLACES == PADDING] = torch.nan  # not even looked at
    real = PLACES != PADDING
    expected = torch.zeros(TOKENS, 3, dtype=torch.float64)
    expected.index_add_(0, torch.from_numpy(PLACES[real]), given[real].double())
    found = added_up(given, ours, TOKENS)
    assert found.dtype == dtype
    assert torch.allclose(found.double(), expected, rtol=torch.finfo(dtype).eps, atol=1e-6)


def test_there_and_back() -> None:
    """Four tokens among seven places; of padding's gradient nothing arrives."""
    held = tokens(4)
    places = torch.tensor([2, 0, 0, 3, 1, 0, 0])  # the second place is token 0's, the other zeros are padding
    back = torch.tensor([1, 4, 0, 3])
    placed = spread(held, places, back)
    assert torch.equal(placed, held[places])
    assert torch.equal(collected(placed, back), held)
    asked = weights(4)
    assert torch.equal(gradient(held, collected(placed * 2.0, back), asked), 2.0 * asked)


def test_attention_of_any_shape_is_none_that_plans_for_each() -> None:
    asked = torch.backends.cuda.cudnn_sdp_enabled
    assert asked()
    with of_any_shape(CPU):
        assert asked()
    with of_any_shape(torch.device("cuda")):
        assert not asked()
    assert asked()
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        with of_any_shape(torch.device("cuda")):
            assert not asked()
        assert not asked()
    finally:
        torch.backends.cuda.enable_cudnn_sdp(True)
