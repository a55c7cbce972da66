"""Credit for turns through the real trainer: rows that earned nothing are left out, a critic over turns, asynchronous
environments, and what is refused."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

import ppo_oracle
import turn_oracle as oracle
from distributed.turn_credit_worker import build
from grpo_lab import LabConfig, LabTrainer
from grpo_lab.rewards import TurnLimits, TurnRewards
from parity.harness import LENGTHS, Run, arguments, assert_same_movement, movement_difference, train


def run(folder: Path, model: Path, rewards: Any, **settings: Any) -> Run:
    eos = AutoTokenizer.from_pretrained(model).eos_token_id
    rollout = oracle.InTurns(range(20, 90), LENGTHS, end_id=eos, truncated_share=0.3)
    config = LabConfig(**arguments(folder, **{"learning_rate": oracle.LR, "max_steps": 2, **settings}))
    return train(LabTrainer, config, model, rollout=rollout, reward=rewards)


@pytest.mark.not_fast
def test_the_exact_update_leaves_out_rows_without_credit(tiny_folder: Path, tmp_path: Path) -> None:
    """A row of which every turn has the advantage 0; the others' updates are those of TRL's micro-batches."""
    runs = {}
    for update in ("exact", "off"):
        trainer = build(str(tiny_folder), tmp_path / update, "spread", "grpo", 1, max_steps=1, update=update)
        start = {name: value.detach().clone() for name, value in trainer.model.state_dict().items()}
        trainer.train()
        runs[update] = Run([], [], dict(trainer.model.state_dict()), start, trainer.state.log_history, trainer)
    ((prompts, completions),) = runs["exact"].trainer.rollout_func.batches
    advantages = oracle.advantages_of(oracle.RULES["spread"], prompts, completions)
    live = [any(of_row) for of_row in advantages]
    (log,) = (row for row in runs["exact"].history if "loss" in row)
    assert 0 < sum(live) < 12
    assert log["update/live_share"] == pytest.approx(sum(live) / 12)
    assert_same_movement(runs["exact"], runs["off"])
    expected = oracle.replayed(tiny_folder, [(prompts, completions)], oracle.RULES["spread"], "grpo")
    theirs = Run([], [], expected, runs["exact"].start, [{"step": 1}], None)
    assert movement_difference(runs["exact"], theirs) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("kind", ppo_oracle.KINDS)
def test_a_critic_over_turns(kind: str, tiny_folder: Path, tmp_path: Path) -> None:
    """Scores in between, the outcome at the end, a KL per token, rewards and advantages whitened: a float64 oracle's
    weights, of policy and critic."""
    critic = ppo_oracle.critic_folder(tmp_path / "critic", kind)
    settings = ppo_oracle.settings(critic) | {"max_steps": 4, "advantage": {"name": "turn_gae", "turn_gamma": 0.7}}
    ours = run(tmp_path / "out", tiny_folder, [TurnRewards(), ppo_oracle.scripted_reward], **settings)
    eos = ours.trainer.processing_class.eos_token_id
    batches = ours.trainer.rollout_func.batches
    made = ppo_oracle.replayed(tiny_folder, critic, kind, eos, batches, 4, oracle.BiLevel)
    first = ppo_oracle.Oracle(tiny_folder, critic, kind, eos).state()
    start = {name: value.float() for name, value in first.items()}
    found = Run([], [], ours.weights, start, [], None)
    critics = {name: value for name, value in made.state().items() if "critic" in name}
    for weights in (made.state(), critics):
        assert_same_movement(found, Run([], [], weights, start, [{"step": 4}], None))
    logged = [row for row in ours.history if "value/return_mean" in row]
    for row, wanted in zip(logged, made.generations, strict=True):
        assert {name: row[name] for name in wanted} == pytest.approx(wanted, rel=1e-3, abs=1e-4)


class Late(oracle.Walk):
    async def turn_rewards(self, turns: Any) -> Any:  # type: ignore[override]
        await asyncio.sleep(0)
        return super().turn_rewards(turns)


@pytest.mark.not_fast
def test_asynchronous_environments_give_the_same(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {"objective": "grpo", "advantage": "turn_returns", "max_steps": 1}
    monkeypatch.setattr(oracle, "KINDS", (oracle.Walk,) * 3)
    now = run(tmp_path / "now", tiny_folder, [TurnRewards()], **settings)
    monkeypatch.setattr(oracle, "KINDS", (Late,) * 3)
    late = run(tmp_path / "late", tiny_folder, [TurnRewards()], **settings)
    assert now.losses == late.losses
    assert now.history[0]["rewards/turn_rewards/mean"] == late.history[0]["rewards/turn_rewards/mean"]
    assert movement_difference(late, now) == 0.0


@pytest.mark.not_fast
def test_what_limits_are_worth_is_an_outcome(tiny_folder: Path, tmp_path: Path) -> None:
    settings = {"objective": "grpo", "advantage": "turn_spread", "max_steps": 1}
    done = run(tmp_path, tiny_folder, [TurnRewards(), TurnLimits(raised=-0.5)], **settings)
    ((_, completions),) = done.trainer.rollout_func.batches
    raised = sum(
        call.failure == "raised" for ids in completions for turn in oracle.turns_of(ids) for call in turn.calls
    )
    assert done.history[0]["rewards/turn_limits/mean"] == pytest.approx(-raised / 2 / len(completions))


@pytest.mark.parametrize(
    ("rewards", "settings", "words"),
    [
        ([TurnRewards()], {"objective": "grpo"}, "turn_returns"),
        ([oracle.outcome], {"objective": "grpo", "advantage": "turn_spread"}, r"'turn_spread', but no reward.*rollout"),
        ([TurnRewards()], {"advantage": "turn_gae"}, "'turn_gae', which needs a critic"),
        ([TurnRewards()], {"objective": "ppo"}, "scores steps"),
    ],
)
def test_refused(rewards: Any, settings: Any, words: str, tiny_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=words):
        run(tmp_path, tiny_folder, rewards, **settings)
