"""Bad input to ``LabTrainer``: each error names what was seen, what is allowed and the setting (issue A, "Bad input").

``tests/unit/recipe/test_config.py`` holds the table of what ``LabConfig`` refuses before there is a trainer.
"""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, SFTConfig

from grpo_lab import DrGRPOTrainer, LabConfig, LabTrainer, R1ZeroTrainer
from grpo_lab.rewards import group_reward, step_reward
from grpo_lab.trainer.scoring.reward_table import environments_for_groups
from parity.harness import LENGTHS, arguments, mixed_reward, problems


def build(tiny: Path, folder: Path, trainer_class: Any = LabTrainer, config: Any = None, **call: Any) -> LabTrainer:
    call.setdefault("model", None)
    if call["model"] is None:
        call["model"] = AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32)
    changes = call.pop("changes", {})
    settings = arguments(folder, max_completion_length=4, max_steps=1, gradient_accumulation_steps=1, **changes)
    defaults = {
        "reward_funcs": mixed_reward(),
        "args": config or LabConfig(**settings),
        "train_dataset": problems(4),
        "processing_class": AutoTokenizer.from_pretrained(tiny),
    }
    built: LabTrainer = trainer_class(**{**defaults, **call})
    return built


def said(caught: pytest.ExceptionInfo[BaseException], *parts: str) -> None:
    assert [part for part in parts if part not in str(caught.value)] == [], str(caught.value)


# -- at construction ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("turns", ["tools", "environment_factory"])
def test_texts_beside_what_answers_in_turns_are_refused(turns: str, tiny_folder: Path, tmp_path: Path) -> None:
    """TRL generates, and then fails: 'str' object has no attribute 'get', 'string indices must be integers'."""
    with pytest.raises(ValueError) as caught:
        build(tiny_folder, tmp_path, **{turns: [abs] if turns == "tools" else Measured})
    said(caught, f"`{turns}` needs prompts that are conversations", "`train_dataset` are texts (the first begins '0")


class Measured:
    columns = ("solution",)
    __name__ = "measured"

    def __call__(self, completions: list[str], solution: list[str], **_: Any) -> list[float]:
        return [0.0] * len(completions)


class OwnSurrogate(LabTrainer):
    @staticmethod
    def surrogate(batch: Any) -> Any:
        return -batch.advantages * batch.ratio


class Environment:
    def reset(self, **_: Any) -> str:
        return "Begin."

    def get_reward(self) -> float:
        return 1.0


@group_reward(requires=("acuracy_reward",))
def needs_another(group: Any) -> list[float]:
    return [0.0] * len(group)


@step_reward
def halves(prompts: Any, completions: Any, completion_ids: Any, **_: Any) -> list[Any]:
    return [[(len(ids) // 2, 1.0)] for ids in completion_ids]


AT_CONSTRUCTION: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "no prompt column": (
        {"train_dataset": Dataset.from_dict({"question": ["a"], "solution": ["1"]})},
        ("`train_dataset`", "'prompt'", "['question', 'solution']"),
    ),
    "empty dataset": ({"train_dataset": Dataset.from_dict({"prompt": []})}, ("`train_dataset` is empty",)),
    "dataset of another kind": ({"train_dataset": [{"prompt": "a"}]}, ("`train_dataset` is a list", "Dataset")),
    "column that the reward reads": ({"reward_funcs": Measured()}, ("'measured'", "'solution'", "`train_dataset`")),
    "column that a declared reward reads": (
        {"trainer_class": R1ZeroTrainer, "reward_funcs": None},
        ("'accuracy_reward'", "'solution'", "`train_dataset`"),
    ),
    "model folder that is not there": (
        {"model": "./no/such/folder"},
        ("`model`", "'./no/such/folder'", "no such folder"),
    ),
    "hub model that cannot be reached": (
        {"model": "nobody/no-such-model"},
        ("`model`", "'nobody/no-such-model'", "HF_HUB_OFFLINE", "local folder"),
    ),
    "class attribute and configuration": (
        {"trainer_class": DrGRPOTrainer, "changes": {"objective": "grpo"}},
        ("`DrGRPOTrainer` declares objective='dr_grpo'", "objective='grpo'", "LabTrainer"),
    ),
    "class attribute and TRL's setting": (
        {"trainer_class": DrGRPOTrainer, "changes": {"loss_type": "bnpo"}},
        ("`loss_type`='bnpo'", "`objective`='dr_grpo'"),
    ),
    "class part and configuration": (
        {"trainer_class": OwnSurrogate, "changes": {"objective": {"name": "grpo", "surrogate": "reinforce"}}},
        ("`OwnSurrogate.surrogate`", "`objective.surrogate`"),
    ),
    "what a group reward requires": (
        {"reward_funcs": [mixed_reward(), needs_another]},
        ("'needs_another'", "'acuracy_reward'", "['parity_reward']", "`requires`"),
    ),
    "sampler without a data set": (
        {
            "reward_funcs": Measured(),
            "train_dataset": None,
            "environment_factory": Environment,
            "changes": {"sampler": "prioritized"},
        },
        ("`sampler`='prioritized'", "`train_dataset`", "environment"),
    ),
    "a KL per completion that only steps are beside": (
        {
            "reward_funcs": halves,
            "changes": {
                "objective": {"name": "grpo", "advantage": "process"},
                "kl": {"placement": "reward", "coefficient": 0.1},
            },
        },
        ("`kl.per`='sequence'", "'process'", "step rewards only", "`kl.per: token`", "coefficient"),
    ),
    "reward weights": ({"changes": {"reward_weights": [1.0, 2.0]}}, ("`reward_weights` has 2 entries", "1 rewards")),
}


@pytest.mark.parametrize("name", list(AT_CONSTRUCTION))
def test_refused_at_construction(name: str, tiny_folder: Path, tmp_path: Path) -> None:
    call, parts = AT_CONSTRUCTION[name]
    with pytest.raises(ValueError) as caught:
        build(tiny_folder, tmp_path, **call)
    said(caught, *parts)


def test_a_model_folder_without_a_model(tiny_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError) as caught:
        build(tiny_folder, tmp_path, model=str(tmp_path))
    said(caught, "`model`", str(tmp_path), "config.json")


def test_a_configuration_of_another_trainer(tiny_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(TypeError) as caught:
        build(tiny_folder, tmp_path, config=SFTConfig(str(tmp_path), use_cpu=True, bf16=False, report_to="none"))
    said(caught, "`args` is a SFTConfig", "LabConfig", "GRPOConfig")


def test_the_callers_configuration_is_not_changed(tiny_folder: Path, tmp_path: Path) -> None:
    config = GRPOConfig(**arguments(tmp_path, max_completion_length=4))
    before = dict(vars(config))
    build(tiny_folder, tmp_path, DrGRPOTrainer, config=config)
    assert {k: v for k, v in vars(config).items() if k in before and v is not before[k] and v != before[k]} == {}


# -- rewards, at the first generation ----------------------------------------------------------------------------------


def short(completions: list[str], **_: Any) -> list[float]:
    return [0.0] * (len(completions) - 1)


def number(completions: list[str], **_: Any) -> float:
    return 1.0


def infinite(completions: list[str], **_: Any) -> list[float]:
    return [0.0, float("inf")] + [0.0] * (len(completions) - 2)


async def infinite_later(completions: list[str], **_: Any) -> list[float]:
    return [float("-inf")] * len(completions)


async def short_later(completions: list[str], **_: Any) -> list[float]:
    return [0.0]


REWARDS: dict[str, tuple[Any, tuple[str, ...]]] = {
    "one too few": (
        short,
        ("'short'", "3 rewards for 4 completions", "one number or None per completion", "reward_funcs"),
    ),
    "no list": (number, ("'number'", "float", "list", "4", "reward_funcs")),
    "infinite": (infinite, ("'infinite'", "inf", "completion 1", "finite", "None", "reward_funcs")),
    "infinite, async": (infinite_later, ("'infinite_later'", "-inf for completion 0", "None", "reward_funcs")),
    "one too few, async": (short_later, ("'short_later'", "1 rewards", "4")),
}


@pytest.mark.not_fast
@pytest.mark.parametrize("name", list(REWARDS))
def test_refused_reward(name: str, tiny_folder: Path, tmp_path: Path) -> None:
    reward, parts = REWARDS[name]
    trainer = build(tiny_folder, tmp_path, reward_funcs=reward)
    with pytest.raises(ValueError) as caught:
        trainer.train()
    said(caught, *parts)


@pytest.mark.not_fast
@pytest.mark.parametrize("value", [torch.zeros(3), torch.full((4,), torch.nan)], ids=["shape", "nan"])
def test_refused_advantages(value: torch.Tensor, tiny_folder: Path, tmp_path: Path) -> None:
    class Wrong(LabTrainer):
        def compute_advantages(self, table: Any) -> torch.Tensor:
            return value

    with pytest.raises(ValueError) as caught:
        build(tiny_folder, tmp_path, Wrong).train()
    said(caught, "advantage", f"{tuple(value.shape)}", "4 rewards", "one finite number per row")


def test_environments_that_cannot_travel_to_another_rank() -> None:
    @group_reward(reads_environments=True)
    def looks(group: Any) -> list[float]:
        return [0.0] * len(group)

    class Local(Environment):
        pass

    ranks = SimpleNamespace(num_processes=2)
    trainer = SimpleNamespace(reward_funcs=[looks], environments=[Local()], accelerator=ranks)
    with pytest.raises(ValueError) as caught:
        environments_for_groups(trainer, 1)
    said(caught, "'looks'", "Local", "pickled", "__getstate__")
    trainer.environments = [Environment()]
    assert environments_for_groups(trainer, 1) == trainer.environments


# -- prompts and the context -------------------------------------------------------------------------------------------


def long_prompts(words: int) -> Dataset:
    return Dataset.from_dict({"prompt": ["and " * words, "short"], "number": [0, 1]})


@pytest.mark.not_fast
def test_a_prompt_that_fills_the_context(tiny_folder: Path, tmp_path: Path) -> None:
    trainer = build(tiny_folder, tmp_path, train_dataset=long_prompts(600), changes={"shuffle_dataset": False})
    length = len(trainer.processing_class("and " * 600)["input_ids"])
    with pytest.raises(ValueError) as caught:
        trainer.train()
    said(
        caught, f"a prompt of {length} tokens", "a context of 512 tokens", "`max_position_embeddings`",
        "at most 511", "`max_completion_length`=4", "at most 508", "`train_dataset`",
    )  # fmt: skip


@pytest.mark.not_fast
def test_the_same_where_a_rollout_makes_the_completions(tiny_folder: Path, tmp_path: Path) -> None:
    from grpo_lab.testing import ScriptedRollout

    trainer = build(
        tiny_folder,
        tmp_path,
        train_dataset=long_prompts(600),
        rollout_func=ScriptedRollout(range(20, 90), LENGTHS),
        changes={"shuffle_dataset": False},
    )
    with pytest.raises(ValueError, match="leaves no room in a context of 512 tokens"):
        trainer.train()


@pytest.mark.not_fast
def test_a_prompt_that_leaves_too_little_room_is_warned_about(
    tiny_folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_folder)
    words = next(n for n in range(200, 600) if len(tokenizer("and " * n)["input_ids"]) > 509)
    assert len(tokenizer("and " * words)["input_ids"]) < 512
    trainer = build(tiny_folder, tmp_path, train_dataset=long_prompts(words), changes={"shuffle_dataset": False})
    with caplog.at_level(logging.WARNING, logger="grpo_lab"):
        trainer.train()
    assert sum("may run beyond the context of 512 tokens" in message for message in caplog.messages) == 1


def test_a_prompt_without_a_token_is_refused(tiny_folder: Path, tmp_path: Path) -> None:
    """No BOS stands in front of it, so its completions' first tokens would be scored at place −1."""
    rows = problems(4).map(lambda row: {"prompt": ""})
    trainer = build(tiny_folder, tmp_path, train_dataset=rows)
    with pytest.raises(ValueError, match="a prompt has no token: it is an empty text"):
        trainer.train()
