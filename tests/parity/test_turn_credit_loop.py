"""Credit for turns in a run with ``rollout.turns``: three environments with tools of their own, one training step, a
float64 step by hand. Only the sampler's words are scripted; which tokens a turn has, the oracle takes from these."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import turn_oracle
from grpo_lab import LabConfig
from grpo_lab.rewards.turn_scores import by_call
from parity.drop_in_cases import Counter, Silent, chats
from parity.harness import Run, arguments, assert_same_movement, movement_difference
from parity.test_tool_loop import BUDGET, RATE, Script, Scripted, log_probs, stepped

Scores = turn_oracle.Scores


class Every(Counter):
    """Scores every turn by what the tool answered, and the outcome."""

    def turn_rewards(self, turns: Any) -> Scores:
        return [int(turn.calls[0].answer) % 5 / 4 if turn.calls else 0.5 for turn in turns]

    def get_reward(self) -> float:
        return self.total % 7 / 6


class Now(Silent):
    """Scores its calls as they come, some of them; the last turn calls nothing."""

    def reset(self, number: int = 0, **row: Any) -> str:
        self.scores: Scores = []
        return super().reset(number, **row)

    @functools.wraps(Counter.multiply)
    def multiply(self, a: int, b: int) -> str:
        self.scores.append(1.0 if (a + b) % 2 else None)
        return super().multiply(a, b)

    def turn_rewards(self, turns: Any) -> Scores:
        return by_call(turns, self.scores)


class Fails(Silent):
    """Raises at every second call."""

    @functools.wraps(Counter.multiply)
    def multiply(self, a: int, b: int) -> str:
        if b % 2:
            raise ValueError("no odd numbers")
        return super().multiply(a, b)

    def turn_rewards(self, turns: Any) -> Scores:
        return [-1.0 * sum(call.failure is not None for call in turn.calls) for turn in turns]


KINDS = {"every": Every, "now": Now, "fails": Fails}


def scores_by_hand(kind: str, messages: list[Any]) -> Scores:
    """From the conversation alone."""
    found: Scores = []
    for said in (one for one in messages if one["role"] == "assistant"):
        call = said.get("tool_calls")
        answer = messages[messages.index(said) + 1]["content"] if call else None
        if kind == "every":
            found.append(int(answer) % 5 / 4 if call else 0.5)
        elif kind == "now":
            odd = call and sum(call[0]["function"]["arguments"].values()) % 2
            found.append(1.0 if odd else None)
        else:
            found.append(-1.0 if call and call[0]["function"]["arguments"]["b"] % 2 else 0.0)
    return found


def turns_by_hand(row: tuple[list[int], list[int]], turns: list[tuple[list[int], list[int]]]) -> list[range]:
    """The tokens of the completion that each turn of the sampler made."""
    prompt, completion = row
    found = {}
    for before, said in turns:
        start = len(before) - len(prompt)
        if start >= 0 and (prompt + completion)[: len(before) + len(said)] == before + said:
            found[start] = range(start, start + len(said))
    return [found[start] for start in sorted(found)]


def step_by_hand(script: Script, rule: dict[str, Any], folder: Path, start: dict[str, torch.Tensor]) -> tuple[Run, int]:
    """One SGD step of Dr.GRPO, row by row, and how many rows had any credit."""
    kinds = [kind for kind in KINDS for _ in range(4)]
    scores = [scores_by_hand(*one) for one in zip(kinds, script.messages, strict=True)]
    credited = turn_oracle.credited(rule, scores, script.rewards)  # type: ignore[arg-type]
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    for row, of_turns in zip(script.rows, credited, strict=True):
        logps = log_probs(model, row)
        for value, tokens in zip(of_turns, turns_by_hand(row, script.turns), strict=True):
            (-value * logps[list(tokens)].sum() / BUDGET / len(script.rows)).backward(retain_graph=True)
    return stepped(model, start), sum(any(of_turns) for of_turns in credited)


@pytest.mark.not_fast
@pytest.mark.parametrize("name", turn_oracle.RULES)
def test_a_step_by_hand(name: str, models: dict[str, Path], tmp_path: Path) -> None:
    rule = turn_oracle.RULES[name]
    settings = arguments(tmp_path, max_steps=1, max_completion_length=BUDGET, learning_rate=RATE, shuffle_dataset=False)
    model = AutoModelForCausalLM.from_pretrained(models["tools"], dtype=torch.float32)
    start = {name: value.detach().clone() for name, value in model.state_dict().items()}
    trainer = Scripted(
        model,
        None,
        LabConfig(**settings, objective="dr_grpo", advantage=rule, rollout={"turns": {}}),
        chats().map(lambda row: {"environment": [*KINDS][row["number"] % 3]}),
        processing_class=AutoTokenizer.from_pretrained(models["tools"]),
        environment_factory=KINDS,
    )
    assert trainer.reward_func_names == ["turn_rewards", "Every"]
    trainer.script = Script()
    trainer.train()
    assert [len(turns_by_hand(row, trainer.script.turns)) for row in trainer.script.rows] == [2, 3, 4, 1] * 3
    owns = [env.get_reward() if isinstance(env, Every) else None for env in trainer.environments]
    assert [reward is None for reward in owns] == [False] * 4 + [True] * 8
    trainer.script.rewards = [None if reward is None else turn_oracle.single(reward) for reward in owns]  # type: ignore[misc]
    (log,) = (row for row in trainer.state.log_history if "loss" in row)
    assert log["tools/failure_frequency"] > 0
    expected, live = step_by_hand(trainer.script, rule, models["tools"], start)
    ours = Run([], [], dict(model.state_dict()), start, [], None)
    assert_same_movement(ours, expected)
    assert movement_difference(ours, expected) < 1e-5
    assert log["update/live_share"] == pytest.approx(live / 12)
