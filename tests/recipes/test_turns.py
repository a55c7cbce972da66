"""recipes/turns: the tools and environments by themselves, what the tiny tokenizer does with calls, and two optimizer
steps of each recipe."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from grpo_lab.recipe.sections import read_recipe

RECIPES = Path(__file__).resolve().parents[2] / "recipes" / "turns"
sys.path.append(str(RECIPES))

import calculator  # noqa: E402
import program  # noqa: E402
import text_world  # noqa: E402


def test_the_calculator_is_exact_and_takes_nothing_else() -> None:
    assert calculator.calculate("48*16-(7+1)/4") == "766"
    assert calculator.calculate("1/3+1/3") == "2/3"
    for wrong in ("2**99", "__import__('os')", "1/0", "4*", "9" * 200):
        with pytest.raises(ValueError, match=r"calculated|whole numbers|characters"):
            calculator.calculate(wrong)


def test_solutions_call_the_calculator_or_guess() -> None:
    rows = calculator.problems(40, split="cold_start", guessed=0.5)
    for row in rows:
        *calls, answer = row["worked_solution"]
        assert answer["content"] == f"#### {row['solution']}"
        for call, said in zip(calls[::2], calls[1::2], strict=True):
            (asked,) = call["tool_calls"]
            assert calculator.calculate(**asked["function"]["arguments"]) == said["content"]
    assert 0 < sum(len(row["worked_solution"]) == 1 for row in rows) < 40


def test_the_worlds_oracle_walks_to_the_goal_and_no_walk_is_shorter() -> None:
    rows = text_world.worlds(20, split="cold_start", noise=0.3)
    for row in rows:
        world = text_world.World.of_text(row["question"])
        left = text_world.fewest_moves(world)
        assert 5 <= left[world] == row["fewest_moves"] <= 9
        for state, moves in left.items():  # Bellman's equation, at every state
            after = [left[state.after(move)] for move in text_world.MOVES]
            assert moves == (0 if state.reached else 1 + min(after))
        played = text_world.TextWorld()
        played.reset(**row)
        for message in row["worked_solution"]:
            if message.get("tool_calls"):
                said = getattr(played, message["tool_calls"][0]["function"]["name"])()
            elif message["role"] == "tool":
                assert said == message["content"]


def test_slips_are_mended_as_the_sandbox_says() -> None:
    rows = program.tasks(6, split="cold_start", slips=1.0)
    for row in rows[:2]:
        played = program.Program()
        played.reset(**row)
        calls = [one["tool_calls"][0]["function"] for one in row["worked_solution"] if one.get("tool_calls")]
        said = [one["content"] for one in row["worked_solution"] if one["role"] == "tool"]
        assert [played.run(**call["arguments"]) for call in calls] == said
        assert said[-1] == "3 of 3"
        resumed = program.Program()
        resumed.load_state_dict(json.loads(json.dumps(played.state_dict())))
        assert resumed.get_reward() == played.get_reward() == 1.0
    (given_up,) = program.tasks(1, split="cold_start", slips=1.0, given_up=1.0)
    roles = [message["role"] for message in given_up["worked_solution"]]
    assert roles == ["assistant", "tool", "assistant"]
    assert given_up["worked_solution"][1]["content"] != "3 of 3"


def test_calls_are_read_as_they_were_written_and_answers_carry_no_loss() -> None:
    from trl.chat_template_utils import is_chat_template_prefix_preserving, parse_response, supports_tool_calling

    from grpo_lab.testing import tiny_tokenizer

    words = tiny_tokenizer(tools=True, words=["calculate", "expression"])
    assert supports_tool_calling(words)
    assert is_chat_template_prefix_preserving(words)
    (row,) = calculator.problems(1, split="cold_start")
    asked = words.apply_chat_template(row["prompt"], add_generation_prompt=True, return_dict=False)
    whole = words.apply_chat_template(
        [*row["prompt"], *row["worked_solution"]], return_dict=True, return_assistant_tokens_mask=True
    )
    own, turns = whole["assistant_masks"], []
    for place, ids in enumerate(whole["input_ids"]):
        if own[place] and not own[place - 1]:
            turns.append([])
        if own[place]:
            turns[-1].append(ids)
    said = [message for message in row["worked_solution"] if message["role"] == "assistant"]
    assert [parse_response(words, ids, prefix=asked) for ids in turns] == said
    with pytest.raises(ValueError, match="two chat templates"):
        tiny_tokenizer(thinking=True, tools=True)
    with pytest.raises(ValueError, match="cannot be one token"):
        tiny_tokenizer(words=["two words"])


@pytest.mark.not_fast
def test_credit_for_turns_and_a_thinking_budget_pass_a_dry_run(tmp_path: Path) -> None:
    """Both are refused where a completion has one turn."""
    from grpo_lab.pipelines.dry_run import plan_of_training

    changes: dict[str, Any] = {"advantage": "turn_returns", "rollout.thinking_budget": 4, "output_dir": str(tmp_path)}
    changes |= {"rollout.budget_text": "</think>", "data.n": 8, "cold_start.data.n": 8, "evaluation.data.n": 4}
    plan = plan_of_training(read_recipe(RECIPES / "text_world.yaml", changes))
    assert "the trainer built" in plan["checked"]


@pytest.mark.not_fast
@pytest.mark.parametrize("name", ["calculator", "text_world", "program"])
def test_two_steps(name: str, tmp_path: Path) -> None:
    from grpo_lab.pipelines.train import train

    changes: dict[str, Any] = {
        "output_dir": str(tmp_path / "run"),
        "model.tiny.hidden_size": 24,
        "model.tiny.num_heads": 2,
        "model.tiny.num_layers": 1,
        "cold_start.logging_steps": 8,
        "data.n": 8,
        "cold_start.data.n": 32,
        "cold_start.max_steps": 8,
        "cold_start.per_device_train_batch_size": 8,
        "evaluation.data.n": 4,
        "num_generations": 2,
        "max_completion_length": 64,
        "per_device_train_batch_size": 4,
        "max_tool_calling_iterations": 2,
        "max_steps": 2,
    }
    outcome = train(read_recipe(RECIPES / f"{name}.yaml", changes))
    logged = [json.loads(line) for line in (outcome.folder / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in logged if "tools/call_frequency" in line and "reward" in line]
    assert len(steps) == 2
    assert outcome.report is not None
    assert outcome.after is not None
    assert outcome.after.n_problems == 4
    assert all(one.transcript for one in outcome.after.outcomes)
