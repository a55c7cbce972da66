"""What every preset must do, from rewards to gradient. A new paper is one row in ``PRESETS``, and comes here by
itself."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from grpo_lab.advantages import GAE, advantage_rule
from grpo_lab.batch import LocalRows, RewardTable, TokenBatch
from grpo_lab.objectives import PRESETS, KLTerm, Objective, Preset, aggregation, preset, surrogate
from grpo_lab.objectives.ratios import RATIO_LEVELS
from grpo_lab.trainer.scoring.advantages import last_own
from reference import oracle
from reference.cases import COUNTS, DENOMINATORS, applied, oracle_rows, padded, random_batch, rebuilt, rows_of, unchosen

DOCS = Path(__file__).resolve().parents[2] / "docs" / "algorithms"
HIGH = {"dapo": 0.28, "cispo": 5.0}
"""Authors' ``epsilon_high`` where the family's default would not do."""
RULE = {"pass_at_k": {"k": 1}}
"""Knobs of the rule for groups of two."""
SHIFTED = {"reinforce_pp_baseline"}
"""Presets whose rule gives a group of equal rewards an advantage."""
PULLS = {"mirror_descent", "prime_rl", "kl_cov"}
"""Presets that act where the advantage is 0, too."""
KLS = [None, KLTerm(0.3, "k2"), KLTerm(0.3, "k3", ratio_weighted=True)]


@pytest.fixture(params=sorted(PRESETS))
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def row(name: str) -> Preset:
    return preset(name)


def objective(name: str, kl: KLTerm | None = None) -> Objective:
    row = preset(name)
    push = surrogate(row.surrogate, **({"epsilon_high": HIGH[name]} if name in HIGH else {}))
    return Objective(name, push, aggregation(row.aggregation), row.ratio, kl)


def batch_from_rewards(name: str, rewards: Tensor, seed: int = 0) -> TokenBatch:
    """Three groups of two completions with the advantages of the preset's rule."""
    row = preset(name)
    batch = random_batch(seed, rows=6, ratio=row.ratio, empty_row=False)
    if row.advantage == "gae":
        return replace(batch, advantages=with_a_critic(rewards, batch.mask))
    rule = advantage_rule(row.advantage, **row.knobs, **RULE.get(name, {}))
    return replace(batch, advantages=applied(rule, rewards, 2, torch.tensor(LENGTHS)).unsqueeze(1))


def on_policy(batch: TokenBatch, ratio: str) -> TokenBatch:
    """The policy sampled the batch itself; no token is chosen."""
    return rebuilt(unchosen(batch), ratio, proximal_logps=batch.logps.detach(), extras={})


def with_a_critic(rewards: Tensor, mask: Tensor) -> Tensor:
    """``[6, T]``: GAE under a critic that knows the mean reward of each group at every token. With λ = γ = 1 that is
    ``group_mean``."""
    mean = rewards.view(-1, 2).nanmean(1, keepdim=True).expand(-1, 2).reshape(-1, 1)
    outcome = torch.where(rewards.isnan().unsqueeze(1), mean, rewards.unsqueeze(1))
    lengths = mask.sum(1)
    local = LocalRows(slice(0, 6), mask, lengths, outcome * last_own(mask), mean.expand(mask.shape))
    return GAE(1.0, 1.0)(RewardTable(rewards.unsqueeze(1), ("r",), torch.ones(1), 2, local=local))  # type: ignore[no-any-return]


def rule_of_the_oracle(row: Preset) -> str:
    return "group_mean" if row.advantage == "gae" else row.advantage


REWARDS = torch.tensor([1.0, 0.0, 0.1, 0.1, 0.25, 2.0], dtype=torch.float64)
"""The second group is dead."""
LENGTHS = [2, 5, 3, 3, 4, 6]


def gradient_of(objective: Objective, batch: TokenBatch) -> tuple[float, Tensor]:
    loss = objective.loss(batch, DENOMINATORS)
    return loss.item(), torch.autograd.grad(loss, batch.logps)[0]


def test_its_parts_exist(row: Preset) -> None:
    advantage_rule(row.advantage, **row.knobs)
    surrogate(row.surrogate)
    aggregation(row.aggregation)
    assert row.ratio in RATIO_LEVELS


def test_it_says_where_it_comes_from(row: Preset) -> None:
    assert re.search(r"arXiv \d{4}\.\d{5}|TRL|Williams", row.source)


def test_it_is_another_point_than_the_other_presets(name: str, row: Preset) -> None:
    point = (row.advantage, row.ratio, row.surrogate, row.aggregation)
    assert [other for other, r in PRESETS.items() if (r.advantage, r.ratio, r.surrogate, r.aggregation) == point] == [
        name
    ]


def test_it_has_a_page_that_names_its_parts_and_source(name: str, row: Preset) -> None:
    """Its own, or its line in the table of all presets and those of its parts."""
    parts = (row.advantage, row.surrogate, row.aggregation)
    own = DOCS / f"{name}.md"
    page = own.read_text(encoding="utf-8") if own.exists() else line_of("README.md", name)
    for part in parts:
        assert part in page, f"{name} does not name {part}"
    text = (
        page
        if own.exists()
        else page + line_of("surrogates.md", row.surrogate) + line_of("advantages.md", row.advantage)
    )
    for source in re.findall(r"\d{4}\.\d{5}", row.source):
        assert source in text
    if own.exists():
        assert f'objective="{name}"' in page
        assert len(page.splitlines()) <= 60
        for heading in ("Idea", "Formula", "Source", "Ours", "Authors", "In TRL", "Code"):
            assert f"**{heading}.**" in page, f"docs/algorithms/{name}.md lacks {heading}"


def line_of(page: str, name: str) -> str:
    lines = (DOCS / page).read_text(encoding="utf-8").splitlines()
    return next(line for line in lines if line.startswith(f"| `{name}` |"))


@pytest.mark.parametrize("kl", KLS, ids=lambda kl: "none" if kl is None else kl.estimator)
def test_from_rewards_to_gradient_it_is_the_oracle(name: str, row: Preset, kl: KLTerm | None) -> None:
    batch = batch_from_rewards(name, REWARDS)
    loss, gradient = gradient_of(objective(name, kl), batch)
    knobs = {**row.knobs, **RULE.get(name, {})}
    expected = oracle.advantages(rule_of_the_oracle(row), REWARDS.tolist(), 2, lengths=LENGTHS, **knobs)
    rows = [replace(r, advantages=[a] * len(r.logps)) for r, a in zip(oracle_rows(batch), expected)]
    ends = {"low": 0.2, "high": HIGH.get(name, 0.2)}
    clip = {"clipped": ends, "clip_cov": ends, "cispo": {"bound": 5.0}, **oracle.AUTHORS}.get(row.surrogate, {})
    value, slopes = oracle.loss_and_gradient(
        rows,
        surrogate_name=row.surrogate,
        ratio=row.ratio,
        aggregation=row.aggregation,
        denominators=COUNTS,
        beta=0.0 if kl is None else kl.coefficient,
        estimator="k3" if kl is None else kl.estimator,
        ratio_weighted=kl is not None and kl.ratio_weighted,
        **clip,
    )
    assert loss == pytest.approx(value, rel=1e-12)
    expected_gradient = torch.tensor([slope for row in slopes for slope in row], dtype=torch.float64)
    torch.testing.assert_close(gradient[batch.mask], expected_gradient, rtol=1e-11, atol=1e-12)


def test_a_dead_group_has_exactly_no_gradient_unless_a_kl_acts_on_it(name: str) -> None:
    if name in PULLS:
        pytest.skip("pulls on every row")
    batch = batch_from_rewards(name, REWARDS)
    assert bool((gradient_of(objective(name), batch)[1][2:4] == 0).all()) is (name not in SHIFTED)
    batch = batch_from_rewards(name, REWARDS)
    assert (gradient_of(objective(name, KLTerm(0.3, "k2")), batch)[1][2:4] != 0).any()


def test_an_unscorable_completion_has_exactly_no_gradient(name: str) -> None:
    rewards = REWARDS.clone()
    rewards[5] = math.nan
    gradient = gradient_of(objective(name), batch_from_rewards(name, rewards))[1]
    assert gradient.isfinite().all()
    if name in PULLS:
        return
    assert (gradient[5] == 0).all()


@pytest.mark.parametrize("kl", KLS, ids=lambda kl: "none" if kl is None else kl.estimator)
def test_padding_permuting_and_splitting(name: str, row: Preset, kl: KLTerm | None) -> None:
    point, batch = objective(name, kl), batch_from_rewards(name, REWARDS)
    loss, gradient = gradient_of(point, rebuilt(batch, row.ratio))
    wide, wide_gradient = gradient_of(point, padded(batch, row.ratio, 2, math.nan))
    assert wide == pytest.approx(loss, rel=1e-13)
    torch.testing.assert_close(wide_gradient[:, :-2], gradient, rtol=1e-13, atol=1e-15)
    order = torch.tensor([5, 2, 0, 4, 1, 3])
    torch.testing.assert_close(
        gradient_of(point, rows_of(batch, row.ratio, order))[1], gradient[order], rtol=1e-13, atol=1e-15
    )
    if row.aggregation != "local_token_mean":
        parts = [order[:1], order[1:4], order[4:]]
        found = [gradient_of(point, rows_of(batch, row.ratio, part)) for part in parts]
        assert sum(value for value, _ in found) == pytest.approx(loss, rel=1e-13)
        torch.testing.assert_close(torch.cat([g for _, g in found]), gradient[order], rtol=1e-13, atol=1e-15)


def test_a_flipped_advantage_flips_the_on_policy_gradient(name: str, row: Preset) -> None:
    batch = batch_from_rewards(name, REWARDS)
    still = on_policy(batch, row.ratio)
    _, gradient = gradient_of(objective(name), still)
    _, flipped = gradient_of(objective(name), rebuilt(still, row.ratio, advantages=-still.advantages))
    assert torch.equal(flipped, -gradient)
    assert (gradient != 0).any()


def test_a_step_along_the_gradient_makes_the_better_completion_likelier(name: str, row: Preset) -> None:
    batch = batch_from_rewards(name, REWARDS)
    still = on_policy(batch, row.ratio)
    _, gradient = gradient_of(objective(name), still)
    assert (gradient[0][still.mask[0]] < 0).all()  # reward 1 against 0: up
    assert (gradient[5][still.mask[5]] < 0).all()  # reward 2 against 0.25
    assert (gradient[1][still.mask[1]] > 0).all()
