"""Importance ratios: of the policy against its older self, and of the trainer against the sampler."""

from __future__ import annotations

import math

import pytest
import torch

from grpo_lab.objectives import log_ratio, sampler_correction, sequence_log_ratio, token_log_ratio

NEW = torch.tensor([[-1.0, -2.0, -3.0], [-0.5, -0.5, math.nan]], dtype=torch.float64)
OLD = torch.tensor([[-1.5, -2.0, -9.0], [-0.25, -1.0, math.nan]], dtype=torch.float64)
MASK = torch.tensor([[True, True, False], [True, True, False]])


def test_token_level_hand_values() -> None:
    # −1 + 1.5, −2 + 2, masked; −0.5 + 0.25, −0.5 + 1, masked
    assert token_log_ratio(NEW, OLD, MASK).tolist() == [[0.5, 0.0, 0.0], [-0.25, 0.5, 0.0]]


def test_sequence_level_hand_values() -> None:
    # (0.5 + 0)/2 and (−0.25 + 0.5)/2: the mean over the tokens that carry loss
    assert sequence_log_ratio(NEW, OLD, MASK).tolist() == [[0.25], [0.125]]


def test_sequence_ratio_is_the_geometric_mean_of_token_ratios() -> None:
    """GSPO eq. 7: (π(y)/π_old(y))^(1/|y|)."""
    product = (NEW - OLD)[0, :2].exp().prod()
    assert sequence_log_ratio(NEW, OLD, MASK).exp()[0, 0].item() == pytest.approx(product.item() ** 0.5, rel=1e-15)


def test_level_by_name() -> None:
    assert log_ratio("token", NEW, OLD, MASK).shape == (2, 3)
    assert log_ratio("sequence", NEW, OLD, MASK).shape == (2, 1)
    with pytest.raises(ValueError, match=r"`ratio` is 'row'; it must be one of \('token', 'sequence', "):
        log_ratio("row", NEW, OLD, MASK)


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_gradcheck_and_no_gradient_where_masked(level: str) -> None:
    logps = NEW.nan_to_num(nan=-7.0).requires_grad_()
    assert torch.autograd.gradcheck(lambda new: log_ratio(level, new, OLD, MASK).exp(), logps)
    (gradient,) = torch.autograd.grad(log_ratio(level, logps, OLD, MASK).exp().sum(), logps)
    assert gradient[~MASK].tolist() == [0.0, 0.0]


def test_on_policy_is_exactly_zero() -> None:
    """Same numbers, same arithmetic: tolerance 0."""
    logps = torch.randn(3, 4)
    mask = torch.ones(3, 4, dtype=torch.bool)
    for level in ("token", "sequence"):
        assert (log_ratio(level, logps, logps, mask) == 0).all()


# trainer − sampler = log 2, log ½, (masked: log 100); row 2: log 4, log 2
TRAINER = torch.tensor([[2.0, 0.5, 100.0], [4.0, 2.0, 1.0]], dtype=torch.float64).log()
SAMPLER = torch.zeros(2, 3, dtype=torch.float64)
CHOSEN = torch.tensor([[True, True, False], [True, True, False]])


@pytest.mark.parametrize(
    ("mode", "low", "high", "expected"),
    [
        ("token_truncate", None, 3.0, [[2.0, 0.5, 1.0], [3.0, 2.0, 1.0]]),
        ("token_truncate", 0.8, 3.0, [[2.0, 0.8, 1.0], [3.0, 2.0, 1.0]]),
        ("token_mask", None, 3.0, [[2.0, 0.5, 1.0], [0.0, 2.0, 1.0]]),
        ("token_mask", 0.8, 3.0, [[2.0, 0.0, 1.0], [0.0, 2.0, 1.0]]),
        ("sequence_truncate", None, 3.0, [[1.0], [3.0]]),  # 2 · ½ = 1; 4 · 2 = 8, cut at 3
        ("sequence_mask", None, 3.0, [[1.0], [0.0]]),  # 8 > 3: the completion drops out
        ("sequence_mask", 1.5, None, [[0.0], [8.0]]),
        ("token_mask", None, None, [[2.0, 0.5, 1.0], [4.0, 2.0, 1.0]]),
    ],
)
def test_sampler_correction_hand_values(
    mode: str, low: float | None, high: float | None, expected: list[list[float]]
) -> None:
    found = sampler_correction(TRAINER, SAMPLER, CHOSEN, mode, low, high)
    assert found.flatten().tolist() == pytest.approx([value for row in expected for value in row], rel=1e-15)


@pytest.mark.parametrize("mode", ["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"])
def test_an_unscored_token_counts_as_ratio_one(mode: str) -> None:
    sampler = SAMPLER.clone()
    sampler[1, 0] = math.nan
    without = CHOSEN.clone()
    without[1, 0] = False
    found = sampler_correction(TRAINER, sampler, CHOSEN, mode, None, 3.0)
    assert torch.equal(found, sampler_correction(TRAINER, SAMPLER, without, mode, None, 3.0))
    assert found[1, 0].item() == (2.0 if mode.startswith("sequence") else 1.0)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("mode", ["token_truncate", "sequence_mask"])
def test_masked_tokens_of_the_correction_may_hold_anything(mode: str, bad: float) -> None:
    poisoned = TRAINER.masked_fill(~CHOSEN, bad)
    assert torch.equal(
        sampler_correction(poisoned, SAMPLER, CHOSEN, mode), sampler_correction(TRAINER, SAMPLER, CHOSEN, mode)
    )


def test_no_gradient_flows_through_the_correction() -> None:
    assert not sampler_correction(TRAINER.clone().requires_grad_(), SAMPLER, CHOSEN).requires_grad


def test_correction_mode_at_the_door() -> None:
    with pytest.raises(ValueError, match=r"`vllm_importance_sampling_mode` is 'clip'; it must be one of"):
        sampler_correction(TRAINER, SAMPLER, CHOSEN, "clip")
