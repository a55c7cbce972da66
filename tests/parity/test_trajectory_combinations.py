"""What ``rollout.turns`` combines with: each refusal is one sentence before the first step, the rest trains."""

from __future__ import annotations

import functools
import os
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer

from grpo_lab import LabConfig, LabTrainer
from grpo_lab.trainer.generation.trajectories import gave_up, refuse_unfit
from grpo_lab.turns.trajectory import Call, Trajectory, Turn
from parity.drop_in_cases import CallsATool, Counter, chats, multiply
from parity.harness import arguments
from parity.test_tool_loop import BUDGET, Script, Scripted
from rollouts.stand_in import stand_in

SERVER = {"use_vllm": True, "vllm_mode": "server"}


def config(folder: Path, rollout: dict[str, Any], **changes: Any) -> LabConfig:
    settings = arguments(folder, max_steps=1, gradient_accumulation_steps=2, max_completion_length=BUDGET)
    return LabConfig(**{**settings, "objective": "dr_grpo", "rollout": {"turns": {}, **rollout}, **changes})


@pytest.mark.parametrize(
    ("rollout", "changes", "sentence"),
    [
        ({}, {"max_completion_length": None, "objective": "grpo"}, "`rollout.turns` needs `max_completion_length`"),
        ({}, {"use_vllm": True, "vllm_mode": "colocate", "vllm_tensor_parallel_size": 2},
         "does not combine with `vllm_tensor_parallel_size` 2"),
        ({"turns": {"max_turns": 3}}, {"max_tool_calling_iterations": 4}, "two names for one number"),
        ({"overlap": 1, "thinking_budget": 8}, SERVER, "`rollout.thinking_budget`"),
        ({"turns": {"max_turns": 0}}, {}, "`rollout.turns.max_turns`"),
    ],
)  # fmt: skip
def test_settings_that_do_not_combine(
    rollout: dict[str, Any], changes: dict[str, Any], sentence: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=sentence):
        config(tmp_path, rollout, **changes)


def accuracy_reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """Named so that a sampler takes it for correctness."""
    return [float(len(ids) % 5) for ids in completion_ids]


def trainer(models: dict[str, Path], folder: Path, kind: type[LabTrainer] = LabTrainer, **more: Any) -> LabTrainer:
    asked = {
        "model": AutoModelForCausalLM.from_pretrained(models["tools"], dtype=torch.float32),
        "reward_funcs": accuracy_reward,
        "args": config(folder, {}),
        "train_dataset": chats(),
        "processing_class": AutoTokenizer.from_pretrained(models["tools"]),
        "tools": [multiply],
        **more,
    }
    return kind(**asked)


def test_a_run_without_anything_to_call(models: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="neither `tools` nor an `environment_factory`"):
        trainer(models, tmp_path, tools=None)


def test_a_column_that_rewards_get(models: dict[str, Path], tmp_path: Path) -> None:
    rows = chats().map(lambda row: {"turns": 3})
    with pytest.raises(ValueError, match="`train_dataset` has a column 'turns'"):
        trainer(models, tmp_path, train_dataset=rows)


@pytest.mark.parametrize("ahead", [{"overlap": 1}, {"cut_after": 100}], ids=str)
def test_generation_ahead_of_its_turn(ahead: dict[str, int], models: dict[str, Path], tmp_path: Path) -> None:
    """Prompts are read early, and what an environment says belongs to its prompt."""
    (name,) = ahead
    model = AutoModelForCausalLM.from_pretrained(models["tools"], dtype=torch.float32)
    with stand_in(model) as engine:
        engine.context = 2048
        with pytest.raises(ValueError, match=f"`rollout.{name}` does not combine with `tools`"):
            trainer(models, tmp_path, args=config(tmp_path, ahead, **SERVER))


def test_images() -> None:
    model = SimpleNamespace(config=SimpleNamespace(model_type="llava"))
    with pytest.raises(ValueError, match=r"`rollout.turns` is for text, and the model \(llava\) takes images"):
        refuse_unfit(SimpleNamespace(tools=[multiply], _is_vlm=True, model=model))  # type: ignore[arg-type]


class Overridden(Scripted):
    """A team's loop that does not ask ours."""

    def _tool_call_loop(self, *rows: Any) -> Any:
        _, _, ids, completions, logprobs, *_ = rows
        return [[1] * len(row) for row in ids], completions, ids, logprobs, 0, 0, [[] for _ in ids]


def test_a_method_that_silences_it(models: dict[str, Path], tmp_path: Path) -> None:
    silent = trainer(models, tmp_path, Overridden)
    silent.script = Script()
    with pytest.raises(ValueError, match=r"`rollout\.turns` would have no effect in this run"):
        silent.train()


# -- what combines -----------------------------------------------------------------------------------------------------


def scripted(models: dict[str, Path], folder: Path, args: LabConfig, **more: Any) -> tuple[Scripted, Script]:
    found = trainer(models, folder, Scripted, args=args, **more)
    found.script = Script()
    found.train()
    return found, found.script


@pytest.mark.not_fast
def test_rewards_get_the_turns_of_their_completions_also_in_an_evaluation(
    models: dict[str, Path], tmp_path: Path
) -> None:
    seen: list[tuple[bool, Any]] = []

    def reward(completions: list[Any], turns: list[Any], **_: Any) -> list[float]:
        seen.append((made[0].model.training, [(row, of_row) for row, of_row in zip(completions, turns, strict=True)]))
        return [float(len(of_row)) for of_row in turns]

    made: list[Any] = []
    args = config(tmp_path, {}, per_device_eval_batch_size=4)
    built = trainer(models, tmp_path, Scripted, args=args, reward_funcs=reward, eval_dataset=chats(2))
    built.script = Script()
    made.append(built)
    built.train()
    logged = built.evaluate()
    assert [training for training, _ in seen] == [True, False, False]
    for _, rows in seen:
        for completion, turns in rows:
            assert len(turns) == sum(message["role"] == "assistant" for message in completion)
            answers = [call.answer for turn in turns for call in turn.calls]
            assert answers == [message["content"] for message in completion if message["role"] == "tool"]
            assert turns[-1].ended == "answered"
    assert logged["eval_tools/call_frequency"] == 12 / 8


@pytest.mark.not_fast
@pytest.mark.parametrize(
    "changes",
    [
        {"update": {"dead_groups": "resample", "max_rounds": 2}},
        {"num_iterations": 2, "max_steps": 2},
        {"sampler": "prioritized", "max_steps": 2},
        {"update": {"share_prompts": "on"}},
        {"objective": None, "loss_type": "dr_grpo", "scale_rewards": "none"},
    ],
    ids=str,
)
def test_it_trains_as_with_trls_loop(changes: dict[str, Any], models: dict[str, Path], tmp_path: Path) -> None:
    ours, script = scripted(models, tmp_path, config(tmp_path, {}, **changes))
    stock, same = scripted(models, tmp_path, config(tmp_path, {"turns": None}, **changes))
    assert script == same
    weights = stock.model.state_dict()
    assert all(torch.equal(value, weights[name]) for name, value in ours.model.state_dict().items())


@pytest.mark.parametrize(
    ("call", "given_up"),
    [
        (Call("multiply", {}, "6"), False),
        (Call("multiply", {}, "error", failure="raised"), False),
        (Call("multiply", {}, "error", failure="timed_out"), True),
        (Call("multiply", {}, "6", tries=2), True),  # the first try may still be at work
    ],
)
def test_what_counts_as_given_up(call: Call, given_up: bool) -> None:
    turns = (Turn(0, 3, 0), Turn(3, 5, 0, calls=(call,)))
    assert gave_up(Trajectory([1], [2] * 5, [1] * 5, None, [], turns)) is given_up


class Waits(Counter):
    """Its tool waits where a row's number is 0."""

    waiting = threading.Event()

    def reset(self, number: int = 0, **row: Any) -> str:
        self.number = number
        return super().reset(number, **row)

    @functools.wraps(Counter.multiply)
    def multiply(self, a: int, b: int) -> str:
        if a == 0:
            Waits.waiting.wait(60)
        return super().multiply(a, b)


@pytest.mark.not_fast
def test_an_environment_whose_call_was_given_up_is_not_used_again(models: dict[str, Path], tmp_path: Path) -> None:
    """The call goes on in its thread, and would change what the next batch has reset."""
    batches: list[list[Any]] = []

    def reward(environments: list[Any], turns: list[Any], **_: Any) -> list[float]:
        failures = [{call.failure for turn in own for call in turn.calls} for own in turns]
        batches.append(list(zip(environments, failures, strict=True)))
        return [float(len(own)) for own in turns]

    args = config(tmp_path, {"turns": {"tool_seconds": 0.5}}, max_steps=2)
    Waits.waiting.clear()
    scripted(models, tmp_path, args, tools=None, environment_factory=Waits, reward_funcs=reward)
    Waits.waiting.set()
    first, second = batches
    given_up = [environment for environment, failures in first if "timed_out" in failures]
    assert 0 < len(given_up) < len(first)
    for environment, failures in first:
        used_again = any(environment is other for other, _ in second)
        assert used_again == ("timed_out" not in failures)


@pytest.mark.not_fast
def test_an_adapter_trains_as_with_trls_loop(models: dict[str, Path], tmp_path: Path) -> None:
    adapters = []
    for turns in ({}, None):
        lora = LoraConfig(r=2, lora_alpha=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
        torch.manual_seed(0)
        found, _ = scripted(models, tmp_path, config(tmp_path, {"turns": turns}), peft_config=lora)
        adapters.append({name: value for name, value in found.model.state_dict().items() if "lora" in name})
    assert adapters[0]
    assert all(torch.equal(value, adapters[1][name]) for name, value in adapters[0].items())


@pytest.mark.not_fast
def test_first_turns_of_a_rollout_function(models: dict[str, Path], tmp_path: Path) -> None:
    """A team's ``rollout_func`` makes the first turns, and TRL's own call the others."""
    weights = []
    for turns in ({}, None):
        rollout = CallsATool("multiply", models["tools"])
        torch.manual_seed(0)
        args = config(tmp_path, {"turns": turns}, max_completion_length=200)
        found = trainer(models, tmp_path, rollout_func=rollout, args=args)
        found.train()
        weights.append(found.model.state_dict())
    assert all(torch.equal(value, weights[1][name]) for name, value in weights[0].items())


@pytest.mark.not_fast
@pytest.mark.parametrize("budget", [4, 0])
def test_turns_of_a_teams_own_method_keep_a_thinking_budget(
    budget: int, models: dict[str, Path], tmp_path: Path
) -> None:
    """What stands behind the inserted text was drawn behind it, in first turns too."""
    args = config(tmp_path, {"thinking_budget": budget, "budget_text": "So:</think>"})
    found, script = scripted(models, tmp_path, args)
    stop = found.processing_class("So:</think>", add_special_tokens=False)["input_ids"]
    for one in found.parts.trajectories.made:
        for turn in one.turns:
            cut = turn.first + budget
            behind = cut + len(stop)
            assert one.ids[cut:behind] == stop
            assert one.mask[turn.first : turn.end] == [1] * budget + [0] * len(stop) + [1] * (turn.end - behind)
            assert (one.prompt + one.ids[:behind], one.ids[behind : turn.end]) in script.turns


def children(pid: int) -> set[int]:
    return set(map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()))


@pytest.mark.thorough
def test_no_process_of_a_tool_outlives_the_training(
    models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An evaluation after it has tools again."""
    monkeypatch.setattr(multiply, "in_process", True, raising=False)
    before = children(os.getpid())
    during: set[int] = set()

    def reward(completions: list[Any], **_: Any) -> list[float]:
        during.update(children(os.getpid()) - before)
        return [float(len(messages)) for messages in completions]

    args = config(tmp_path, {"turns": {"threads": 1}}, per_device_eval_batch_size=4)
    found, _ = scripted(models, tmp_path, args, reward_funcs=reward, eval_dataset=chats(2))
    assert during
    deadline = time.monotonic() + 10
    while during & children(os.getpid()):
        assert time.monotonic() < deadline, "a tool's process is left"
        time.sleep(0.05)
    assert found.evaluate()["eval_tools/failure_frequency"] == 0
    found.parts.trajectories.tools.close()
