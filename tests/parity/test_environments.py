"""Environments beside our rewards: who owns the reward, and what a group reward sees of a tool rollout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from grpo_lab import KimiTrainer, LabConfig, LabTrainer, R1ZeroTrainer
from grpo_lab.rewards import TurnRewards, group_reward
from grpo_lab.trainer.trl_bridge import OFFERED
from parity.drop_in_cases import CallsATool, Counter, Silent, chats
from parity.harness import arguments

MADE: list[Counter] = []


def made() -> Counter:
    MADE.append(Counter())
    return MADE[-1]


def offering() -> type[Counter]:
    """Return an environment that offers more than TRL knows of."""

    class Scored(Counter):
        def turn_rewards(self, turns: Any) -> list[float]:
            return [float(len(turn.calls)) for turn in turns]

        def state_dict(self) -> dict[str, int]:
            return {"total": self.total}

        def load_state_dict(self, state: dict[str, int]) -> None:
            self.total = state["total"]

    return Scored


Scored: Any = offering()


class Waiting(Scored):
    async def turn_rewards(self, turns: Any) -> list[float]:  # type: ignore[override]
        return [0.0] * len(turns)


def build(
    kind: Any,
    models: dict[str, Path],
    folder: Path,
    factory: Any = Counter,
    rewards: Any = None,
    scripted: bool = True,
    **changes: Any,
) -> Any:
    settings = arguments(
        folder, max_steps=1, gradient_accumulation_steps=1, max_completion_length=200, learning_rate=1e-3, **changes
    )
    return kind(
        AutoModelForCausalLM.from_pretrained(models["tools"], dtype=torch.float32),
        rewards,
        LabConfig(**settings),
        chats(),
        processing_class=AutoTokenizer.from_pretrained(models["tools"]),
        rollout_func=CallsATool("multiply", models["tools"]) if scripted else None,
        environment_factory=factory,
    )


@pytest.mark.not_fast
@pytest.mark.parametrize(
    ("kind", "names"), [(R1ZeroTrainer, ["Counter"]), (KimiTrainer, ["kimi_length_reward", "Counter"])]
)
def test_an_environment_that_owns_its_reward_is_the_reward(
    kind: Any, names: list[str], models: dict[str, Path], tmp_path: Path
) -> None:
    trainer = build(kind, models, tmp_path)
    assert trainer.reward_func_names == names
    assert len(trainer.reward_weights) == len(names)
    if kind is KimiTrainer:
        assert trainer.reward_funcs[0].requires == ("Counter",)
    trainer.train()
    assert trainer.state.global_step == 1


def test_a_factory_is_asked_once_for_what_it_makes(models: dict[str, Path], tmp_path: Path) -> None:
    MADE.clear()
    trainer = build(R1ZeroTrainer, models, tmp_path, factory=made)
    assert trainer.reward_func_names == ["Counter"]
    assert trainer._environment_pool[None] == MADE
    assert len(MADE) == 1


def test_beside_an_environment_without_a_reward_the_declared_ones_stay(models: dict[str, Path], tmp_path: Path) -> None:
    trainer = build(R1ZeroTrainer, models, tmp_path, factory=Silent)
    assert trainer.reward_func_names == ["accuracy_reward", "think_format_reward"]


IN_TURNS: dict[str, Any] = {
    "scripted": False, "rollout": {"turns": {}}, "objective": "grpo", "advantage": "turn_returns",
}  # fmt: skip


@pytest.mark.parametrize(
    "factory", [Scored, Waiting, {"one": Counter, "two": Scored}], ids=["one", "asynchronous", "one of two"]
)
def test_scores_of_turns_are_found_and_are_no_tools(factory: Any, models: dict[str, Path], tmp_path: Path) -> None:
    trainer = build(LabTrainer, models, tmp_path, factory, reward_weights=[], **IN_TURNS)
    assert [type(reward) for reward in trainer.reward_funcs[:1]] == [TurnRewards]
    assert trainer.reward_func_names[0] == "turn_rewards"
    assert trainer.reward_weights.tolist() == [1.0] * len(trainer.reward_funcs)
    assert {tool.__name__ for tools in trainer._env_tools.values() for tool in tools} == {"multiply"}


def test_scores_of_turns_that_are_asked_for_already(models: dict[str, Path], tmp_path: Path) -> None:
    given = [TurnRewards()]
    trainer = build(LabTrainer, models, tmp_path, Scored, given, reward_weights=[0.5], **IN_TURNS)
    assert trainer.reward_func_names == ["turn_rewards", "Scored"]
    assert trainer.reward_weights.tolist() == [0.5, 1.0]


def test_without_turns_an_environment_is_as_trl_has_it(models: dict[str, Path], tmp_path: Path) -> None:
    trainer = build(LabTrainer, models, tmp_path, offering())
    assert trainer.reward_func_names == ["Scored"]
    assert {tool.__name__ for tool in trainer.tools} == {"multiply", *OFFERED}


def test_a_rule_that_reads_no_turns_leaves_their_scores_alone(models: dict[str, Path], tmp_path: Path) -> None:
    trainer = build(LabTrainer, models, tmp_path, Scored, **{**IN_TURNS, "advantage": None})
    assert trainer.reward_func_names == ["Scored"]


@pytest.mark.not_fast
def test_a_group_reward_sees_every_turn_and_the_environments(models: dict[str, Path], tmp_path: Path) -> None:
    seen: list[Any] = []

    @group_reward(requires=("Counter",), reads_environments=True)
    def calls(group: Any) -> list[float]:
        seen.append(group)
        return [float(sum("tool_calls" in turn for turn in turns)) for turns in group.messages]

    trainer = build(LabTrainer, models, tmp_path, rewards=[calls])
    trainer.train()
    group = seen[0]
    roles = [[turn["role"] for turn in turns] for turns in group.messages]
    assert roles[0][:2] == ["assistant", "tool"]
    assert [type(environment) for environment in group.environments] == [Counter] * 4
    assert [env.get_reward() for env in group.environments] == pytest.approx(group.rewards["Counter"])
    assert "environments" not in group.columns


@pytest.mark.not_fast
def test_environments_only_where_asked(models: dict[str, Path], tmp_path: Path) -> None:
    seen: list[Any] = []

    @group_reward
    def looks(group: Any) -> list[float]:
        seen.append(group)
        return [0.0] * len(group)

    build(LabTrainer, models, tmp_path, rewards=[looks]).train()
    assert seen[0].environments is None
