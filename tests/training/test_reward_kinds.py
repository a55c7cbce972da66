"""Every kind of reward by TRL's name, NaN as None for all of them, and runs without `max_completion_length`."""

from __future__ import annotations

import functools
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen2Config, Qwen2ForSequenceClassification
from trl import GRPOConfig, GRPOTrainer

from grpo_lab import KimiTrainer, LabConfig, LabTrainer
from grpo_lab.rewards import group_reward
from grpo_lab.testing import ScriptedRollout
from grpo_lab.trainer.trl_bridge.rewards import reward_name
from parity.harness import LENGTHS, arguments, problems


@pytest.fixture(scope="module")
def judge(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A saved reward model."""
    folder = tmp_path_factory.mktemp("judges") / "tiny-judge"
    tokenizer = AutoTokenizer.from_pretrained(tiny_folder)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = Qwen2Config(vocab_size=len(tokenizer), num_key_value_heads=2, num_labels=1, **sizes)
    Qwen2ForSequenceClassification(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def build(model: Path, folder: Path, rewards: Any, kind: Any = LabTrainer, script: bool = True, **changes: Any) -> Any:
    tokenizer = AutoTokenizer.from_pretrained(model)
    config = GRPOConfig if kind is GRPOTrainer else LabConfig
    rollout = ScriptedRollout(range(20, 90), LENGTHS, end_id=tokenizer.eos_token_id)
    return kind(
        AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32),
        rewards,
        config(**arguments(folder, **{"max_steps": 1, **changes})),
        problems(),
        processing_class=tokenizer,
        rollout_func=rollout if script else None,
    )


def parts(completion_ids: list[list[int]], modulus: int = 5, **_: Any) -> list[float]:
    return [(sum(ids) % modulus) / modulus for ids in completion_ids]


class Instance:
    def __call__(self, completion_ids: list[list[int]], **_: Any) -> list[float]:
        return parts(completion_ids)


def test_names_are_trls(judge: Path, tiny_folder: Path, tmp_path: Path) -> None:
    model = Qwen2ForSequenceClassification.from_pretrained(judge)
    rewards = [parts, functools.partial(parts, modulus=3), functools.partial(Instance()), Instance(), str(judge), model]
    names = [reward_name(reward) for reward in rewards]
    trainer = build(tiny_folder, tmp_path, list(rewards))
    assert names == trainer.reward_func_names
    assert names == ["parts", "parts", "Instance", "Instance", "tiny-judge", "tiny-judge"]


@pytest.mark.not_fast(but="model")
@pytest.mark.parametrize("kind", ["path", "model", "partial"])
def test_kimi_finds_the_only_reward_by_trls_name(kind: str, judge: Path, tiny_folder: Path, tmp_path: Path) -> None:
    given = {
        "path": str(judge),
        "model": Qwen2ForSequenceClassification.from_pretrained(judge),
        "partial": functools.partial(parts, modulus=2),
    }[kind]
    trainer = build(tiny_folder, tmp_path, given, KimiTrainer, num_iterations=2)
    assert trainer.reward_funcs[1].requires == (trainer.reward_func_names[0],)
    trainer.train()
    assert trainer.state.global_step == 1


@pytest.mark.not_fast
def test_a_reward_of_weight_zero_is_watched_and_changes_no_number(tiny_folder: Path, tmp_path: Path) -> None:
    """`worked_out` beside an accuracy: its mean is logged, loss, gradient and weights are bitwise those without it."""
    left = {}
    for name, rewards, weights in (
        ("alone", [parts], None),
        ("watched", [parts, functools.partial(parts, modulus=3)], [1.0, 0.0]),
    ):
        trainer = build(tiny_folder, tmp_path / name, rewards, max_steps=2, reward_weights=weights, objective="dr_grpo")
        trainer.train()
        logged = [
            {key: row[key] for key in ("loss", "grad_norm", "reward")}
            for row in trainer.state.log_history
            if "loss" in row
        ]
        left[name] = (logged, [p.detach().clone() for p in trainer.model.parameters()])
    assert left["alone"][0] == left["watched"][0]
    assert any(row["grad_norm"] > 0 for row in left["alone"][0])
    assert all(torch.equal(a, b) for a, b in zip(left["alone"][1], left["watched"][1], strict=True))


# -- NaN ---------------------------------------------------------------------------------------------------------------


def holes(values: list[float], hole: Any) -> list[Any]:
    return [hole if row % 3 == 1 else value for row, value in enumerate(values)]


def with_none(completion_ids: list[list[int]], **_: Any) -> list[Any]:
    return holes(parts(completion_ids), None)


def with_nan(completion_ids: list[list[int]], **_: Any) -> list[Any]:
    return holes(parts(completion_ids), float("nan"))


async def with_nan_later(completion_ids: list[list[int]], **_: Any) -> list[Any]:
    return holes(parts(completion_ids), float("nan"))


@group_reward
def with_nan_of_a_group(group: Any) -> list[Any]:
    return holes(parts(group.completion_ids), float("nan"))


@pytest.mark.not_fast
@pytest.mark.parametrize("reward", [with_nan, with_nan_later], ids=["now", "later"])
def test_nan_is_none_as_in_stock(
    reward: Any, tiny_folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def weights(trainer: Any) -> torch.Tensor:
        trainer.train()
        return torch.cat([parameter.detach().flatten() for parameter in trainer.model.parameters()])

    stock = weights(build(tiny_folder, tmp_path, reward, GRPOTrainer))
    with caplog.at_level(logging.WARNING, logger="grpo_lab"):
        trainer = build(tiny_folder, tmp_path, reward, update="off")
        found = weights(trainer)
    row = trainer.state.log_history[0]
    assert row["rewards/nan_share"] == pytest.approx(4 / 12)
    said = [message for message in caplog.messages if "returned NaN" in message]
    assert len(said) == 1
    assert f"'{reward.__name__}' returned NaN for 4 of 12 completions" in said[0]
    silent = build(tiny_folder, tmp_path, with_none, update="off")
    assert torch.equal(weights(silent), found)
    start = torch.cat([p.flatten() for p in AutoModelForCausalLM.from_pretrained(tiny_folder).parameters()])
    assert (found - stock).norm() <= 1e-4 * (stock - start).norm()  # the drop-in bound: relative to what training did
    assert silent.state.log_history[0]["rewards/nan_share"] == 0.0


def test_a_group_rewards_nan_likewise(tiny_folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trainer = build(tiny_folder, tmp_path, [parts, with_nan_of_a_group], objective="dr_grpo")
    with caplog.at_level(logging.WARNING, logger="grpo_lab"):
        trainer.train()
    assert "'with_nan_of_a_group' returned NaN for 3 of 12 completions" in caplog.text  # one of each four
    assert trainer.state.log_history[0]["rewards/nan_share"] == pytest.approx(3 / 24)


# -- what is no number -------------------------------------------------------------------------------------------------


@pytest.mark.thorough(but=["plain-*", "*-str", "*-tensor"])
@pytest.mark.parametrize(
    ("bad", "seen"),
    [
        ("good", "'good'"),
        ("0.5", "'0.5'"),
        (0.5 + 1j, r"\(0\.5\+1j\)"),
        (10**400, "1000000.*0000"),
        (10**5000, "<int>"),
        (1e39, "inf"),
        (torch.ones(2), r"tensor\(\[1., 1.\]\)"),
    ],
    ids=["str", "str of a number", "complex", "large", "too large to be written", "too large in float32", "tensor"],
)
@pytest.mark.parametrize("kind", ["plain", "async", "group"])
def test_what_is_no_number_is_one_line_with_its_place(
    kind: str, bad: Any, seen: str, tiny_folder: Path, tmp_path: Path
) -> None:
    def mine(completions: list[Any], **_: Any) -> list[Any]:
        return [0.5, bad, *[0.0] * (len(completions) - 2)]

    async def later(completions: list[Any], **_: Any) -> list[Any]:
        return mine(completions)

    @group_reward
    def whole(group: Any) -> list[Any]:
        return mine(group.completions)

    reward, name = {"plain": (mine, "mine"), "async": (later, "later"), "group": (whole, "whole")}[kind]
    trainer = build(tiny_folder, tmp_path, [parts, reward])
    with pytest.raises(
        ValueError,
        match=rf"reward .*'{name}'.* returned {seen} for completion 1( and 2 more)?( of 12)?; allowed are finite "
        r"numbers",
    ) as said:
        trainer.train()
    assert "\n" not in str(said.value)
    assert len(str(said.value)) < 250


@pytest.mark.parametrize(
    ("answer", "seen"),
    [
        ({"a": 1.0}, "a dict"),
        ("x" * 12, "a str"),
        (torch.tensor(1.0), "a Tensor"),
        (None, "a NoneType"),
        ([1.0], "1 rewards for 12"),
    ],
    ids=["dict", "str", "number", "None", "too few"],
)
def test_what_is_no_list_of_numbers_is_named(answer: Any, seen: str, tiny_folder: Path, tmp_path: Path) -> None:
    def mine(**_: Any) -> Any:
        return answer

    with pytest.raises(ValueError, match=rf"reward function 'mine' .*returned {seen}.*one number or None"):
        build(tiny_folder, tmp_path, mine).train()


# -- no max_completion_length ------------------------------------------------------------------------------------------


@pytest.mark.not_fast
def test_a_limit_of_the_engine_alone(tiny_folder: Path, tmp_path: Path) -> None:
    settings = {"max_completion_length": None, "generation_kwargs": {"max_new_tokens": 6}}
    stock = build(tiny_folder, tmp_path, parts, GRPOTrainer, script=False, **settings)
    stock.train()
    for objective in (None, "dapo"):
        trainer = build(tiny_folder, tmp_path, parts, script=False, objective=objective, **settings)
        trainer.train()
        row, theirs = trainer.state.log_history[0], stock.state.log_history[0]
        assert row["completions/max_length"] == theirs["completions/max_length"] <= 6
        # the same completions; the loss of a first step is a mean of |Â| ≤ 2 over tokens in float32
        assert row["loss"] == pytest.approx(theirs["loss"], abs=1e-6)


def test_an_average_over_the_budget_needs_one(tiny_folder: Path, tmp_path: Path) -> None:
    settings = {"max_completion_length": None, "generation_kwargs": {"max_new_tokens": 6}}
    for chosen in ({"objective": "dr_grpo"}, {"loss_type": "dr_grpo"}):
        with pytest.raises(ValueError, match=r"`max_completion_length` is None.*'dr_grpo' divides by it"):
            build(tiny_folder, tmp_path, parts, **settings, **chosen)
