"""The critic's pure parts: value loss, whitening, explained variance, the rule; and the door of ``value``."""

from __future__ import annotations

import math
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from grpo_lab import LabConfig
from grpo_lab.advantages import GAE, Moments, gae, masked_moments, whiten
from grpo_lab.batch import LocalRows, RewardTable
from grpo_lab.objectives.value_loss import explained_variance, value_clip_acts, value_loss
from grpo_lab.trainer.critic import Critic, save_beside
from grpo_lab.trainer.trl_bridge import CRITIC

D = torch.float64


def values(*numbers: float, grad: bool = False) -> torch.Tensor:
    return torch.tensor([numbers], dtype=D, requires_grad=grad)


def test_value_loss_by_hand() -> None:
    """V_old = 1, R = 2, ±0.2. V = 1.1: inside, ½·0.9² = 0.405. V = 1.5: clipped to 1.2, ½·0.8² = 0.32 > ½·0.5² = 0.125.
    V = 0.5: clipped to 0.8, ½·1.2² = 0.72 < ½·1.5² = 1.125. Gradient V − R, and 0 where the clip acts: −0.9, 0, −1.5.
    """
    now = values(1.1, 1.5, 0.5, grad=True)
    old, returns = values(1.0, 1.0, 1.0), values(2.0, 2.0, 2.0)
    loss = value_loss(now, old, returns, 0.2)
    assert loss.tolist() == [[pytest.approx(x, abs=1e-15) for x in (0.405, 0.32, 1.125)]]
    loss.sum().backward()
    assert now.grad is not None
    assert now.grad.tolist() == [[pytest.approx(x, abs=1e-15) for x in (-0.9, 0.0, -1.5)]]
    assert value_clip_acts(now, old, returns, 0.2).tolist() == [[False, True, False]]
    plain = value_loss(now, old, returns, None)
    assert plain.tolist() == [[pytest.approx(x, abs=1e-15) for x in (0.405, 0.125, 1.125)]]


@pytest.mark.parametrize("seed", range(4))
def test_whitening_is_a_loops_however_the_rows_lie_on_ranks(seed: int) -> None:
    rng = random.Random(seed)
    rows = [[rng.gauss(1e3 if seed % 2 else 0.3, 0.5) for _ in range(7)] for _ in range(6)]
    own = [[rng.random() < 0.6 for _ in row] for row in rows]
    own[3] = [False] * 7  # a rank with nothing
    numbers = [x for row, mine in zip(rows, own) for x, m in zip(row, mine) if m]
    mean = math.fsum(numbers) / len(numbers)
    variance = math.fsum((x - mean) ** 2 for x in numbers) / len(numbers)
    table, mask = torch.tensor(rows, dtype=D).masked_fill(~torch.tensor(own), math.nan), torch.tensor(own)
    parts = [(0, 3), (3, 4), (4, 6)]
    moments = Moments.joined(torch.stack([masked_moments(table[a:b], mask[a:b]) for a, b in parts]))
    # 42 additions of numbers up to 1e3 in float64; their squares' sum loses (1e3/0.5)² of that
    assert moments.mean == pytest.approx(mean, rel=1e-13)
    assert moments.variance == pytest.approx(variance, rel=1e-9)
    for shift in (True, False):
        found = whiten(table, mask, moments, shift)
        expected = (table - mean) / (variance + 1e-8) ** 0.5 + (0 if shift else mean)
        assert (found[~mask] == 0).all()
        torch.testing.assert_close(found[mask], expected[mask], rtol=1e-9, atol=1e-9)


def test_whitening_nothing_or_one_token_is_finite() -> None:
    none = Moments.joined(masked_moments(values(math.nan), torch.tensor([[False]])).unsqueeze(0))
    assert none == Moments(0.0, 0.0, 0.0)
    assert whiten(values(math.nan), torch.tensor([[False]]), none).tolist() == [[0.0]]
    one = Moments.joined(masked_moments(values(3.0), torch.tensor([[True]])).unsqueeze(0))
    assert whiten(values(3.0), torch.tensor([[True]]), one).tolist() == [[0.0]]
    assert whiten(values(3.0), torch.tensor([[True]]), one, shift_mean=False).tolist() == [[3.0]]


def test_explained_variance() -> None:
    assert explained_variance(4.0, 1.0) == 0.75  # 1 − 1/4
    assert explained_variance(4.0, 8.0) == -1.0
    assert explained_variance(0.0, 1.0) is None


def test_the_rule_is_gae_on_this_ranks_rows() -> None:
    mask = torch.tensor([[True, False, True]])
    local = LocalRows(slice(0, 1), mask, torch.tensor([3]), values(0.1, 9.0, 1.0), values(0.5, 9.0, 0.2))
    table = RewardTable(torch.zeros(2, 1), ("r",), torch.ones(1), 2, local=local)
    assert torch.equal(GAE(0.9, 0.8)(table), gae(local.rewards, local.values, mask, 0.9, 0.8)[0])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"critic's values.*has none"):
        GAE()(RewardTable(torch.zeros(2, 1), ("r",), torch.ones(1), 2))
    with pytest.raises(ValueError, match=r"`advantage\.lam` is 1\.5"):
        GAE(lam=1.5)


def config(**written: Any) -> LabConfig:
    return LabConfig("run", bf16=False, use_cpu=True, **written)


def test_a_critic_with_all_defaults_however_it_is_asked_for() -> None:
    found = [
        args.algorithm
        for args in (config(value={}), config(objective="ppo"), config(objective="ppo", value={}), config(value="head"))
    ]
    assert len({algorithm.describe() for algorithm in found}) == 1
    assert found[0].value is not None
    assert (found[0].value.model, found[0].value.vf_coef, found[0].value.cliprange_value) == ("head", 0.1, 0.2)
    assert found[0].advantage == GAE(1.0, 0.95)
    args = config(
        objective="ppo", value={"gamma": 0.9, "model": "copy"}, kl={"placement": "reward", "coefficient": 0.1}
    )
    algorithm = args.algorithm
    assert algorithm.advantage == GAE(0.9, 0.95)
    assert algorithm.objective is not None
    assert algorithm.objective.kl is not None
    assert algorithm.objective.kl.per == "token"
    assert algorithm.names["value"] == "copy"


@pytest.mark.parametrize(
    ("written", "words"),
    [
        ({"value": {"vf_coeff": 0.1}}, r"vf_coeff.*vf_coef"),
        ({"value": {"vf_coef": 0}}, r"`value\.vf_coef` is 0; it must be a finite number above 0"),
        ({"value": {"lam": 1.5}}, r"lam.* is 1\.5"),
        ({"value": {"warmup_steps": -1}}, r"value\.warmup_steps"),
        ({"value": {"model": ""}}, r"value\.model"),
        ({"objective": "dr_grpo", "value": {}}, r"`value` is set.*'group_mean'.*objective: ppo"),
        ({"advantage": "gae"}, r"'gae'.*needs a critic.*`objective`"),
        ({"value": {}, "update": {"dead_groups": "resample"}}, r"dead_groups.*no group is dead"),
        ({"value": {"missing_eos_penalty": 1}, "mask_truncated_completions": True}, r"missing_eos_penalty.*no effect"),
        (
            {"value": {}, "kl": {"placement": "reward", "coefficient": 0.1, "per": "token", "gamma": 0.9}},
            r"kl\.gamma.*value\.gamma",
        ),
        ({"objective": "ppo", "advantage": {"name": "gae", "lam": 0.5}, "value": {"lam": 0.9}}, r"two names for one"),
    ],
)
def test_what_cannot_be_is_refused(written: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        config(**written)


@pytest.mark.parametrize("saves", [True, False])
def test_the_rank_that_saves_writes_the_critic_and_no_other(saves: bool, tmp_path: Path) -> None:
    """From transformers 5.20 on all ranks come through `_save`: each wrote the same files, and moved the others' half
    ones."""
    critic = Critic(4)
    state = {f"{CRITIC}.{name}": value for name, value in critic.state_dict().items()}
    save_beside(SimpleNamespace(args=SimpleNamespace(should_save=saves)), critic, str(tmp_path), state)
    assert [place.name for place in tmp_path.iterdir()] == (["critic"] if saves else [])
