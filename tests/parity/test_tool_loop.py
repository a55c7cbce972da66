"""TRL's own tool loop over several turns under our objective: what a tool said carries no loss, and the exact update
sees the same.

Only the sampler is scripted (``_generate_single_turn``); the calls, the tools' answers, the tokens of both and the mask
are TRL's. The oracle knows which tokens the sampler made, and nothing of the mask.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from grpo_lab import LabConfig, LabTrainer
from parity.drop_in_cases import Counter, Silent, chats, multiply
from parity.harness import Run, arguments, assert_same_movement

BUDGET, RATE = 600, 50.0


@dataclass
class Script:
    """What each turn said and heard, of one run."""

    turns: list[tuple[list[int], list[int]]] = field(default_factory=list)
    rows: list[tuple[list[int], list[int]]] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    messages: list[Any] = field(default_factory=list)


class Scripted(LabTrainer):
    """The sampler's words depend on the row and on what the tool has answered so far."""

    script: Script

    def _generate_single_turn(self, prompt_ids: Any, *_: Any, **__: Any) -> Any:
        said = [self._tokenizer(self._turn(list(ids), row))["input_ids"] for row, ids in enumerate(prompt_ids)]
        said = [[*ids, self._tokenizer.eos_token_id] for ids in said]
        self.script.turns += zip(map(list, prompt_ids), map(list, said), strict=True)
        return said, None

    def _turn(self, ids: list[int], row: int) -> str:
        text = self._tokenizer.decode(ids)
        called = re.findall(r'"a": (\d+), "b": (\d+)', text)
        heard = text.count("<tool_response>")
        first = int(called[-1][0]) if called else row
        if first % 4 == 3 or heard > first % 4:  # no call in the fourth row; one, two, three calls in the others
            return f"It is {first} after {heard} answers{'!' * (first % 5)}"
        call = f'{{"name": "multiply", "arguments": {{"a": {first}, "b": {heard + 2}}}}}'
        return f"<tool_call>\n{call}\n</tool_call>"

    def _generate(self, prompts: Any) -> Any:
        made = super()._generate(prompts)
        self.script.rows += zip(map(list, made[0]), map(list, made[1]), strict=True)
        self.script.messages += made[3]
        return made


def tool_run(kind: str, models: dict[str, Path], folder: Path, **changes: Any) -> tuple[Run, Script]:
    script = Script()

    def reward(completion_ids: list[list[int]], number: list[int], **_: Any) -> list[float]:
        rows = enumerate(zip(completion_ids, number, strict=True))
        found = [0.25 if i < 4 else (len(ids) % 7) / 6 for i, (ids, _) in rows]  # the first group is dead
        script.rewards += found
        return found

    settings = arguments(folder, max_steps=1, gradient_accumulation_steps=2, max_completion_length=BUDGET)
    own = {"tools": [multiply]} if kind == "tools" else {"environment_factory": Silent}
    model = AutoModelForCausalLM.from_pretrained(models["tools"], dtype=torch.float32)
    start = {name: value.detach().clone() for name, value in model.state_dict().items()}
    trainer = Scripted(
        model,
        [reward],
        LabConfig(**{**settings, "learning_rate": RATE, "objective": "dr_grpo", **changes}),
        chats(),
        processing_class=AutoTokenizer.from_pretrained(models["tools"]),
        **own,
    )
    trainer.script = script
    trainer.train()
    return Run([], [], dict(model.state_dict()), start, trainer.state.log_history, trainer), script


def policys(row: tuple[list[int], list[int]], turns: list[tuple[list[int], list[int]]]) -> list[bool]:
    """Which tokens of the completion some turn of this conversation made."""
    prompt, completion = row
    whole, made = prompt + completion, [False] * (len(prompt) + len(completion))
    for before, said in turns:
        if len(before) >= len(prompt) and (before + said) == whole[: len(before) + len(said)]:
            made[len(before) : len(before) + len(said)] = [True] * len(said)
    return made[len(prompt) :]


def by_hand(script: Script, folder: Path, start: dict[str, torch.Tensor]) -> Run:
    """One SGD step of Dr.GRPO on-policy, row by row: ∇ of −1/N · Σ_i A_i · Σ_t log π(y_t) / budget over the sampler's
    tokens."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    rewards = torch.tensor(script.rewards, dtype=torch.float64).view(-1, 4)
    advantages = (rewards - rewards.mean(1, keepdim=True)).flatten()
    for row, advantage in zip(script.rows, advantages, strict=True):
        mask = torch.tensor(policys(row, script.turns))
        loss = -advantage * log_probs(model, row)[mask].sum() / BUDGET / len(script.rows)
        loss.backward()
    return stepped(model, start)


def log_probs(model: Any, row: tuple[list[int], list[int]]) -> torch.Tensor:
    """Of the tokens of a row's completion."""
    prompt, completion = row
    ids = torch.tensor([prompt + completion])
    logps = model(ids).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None]).squeeze(1)
    return logps[len(prompt) - 1 :]  # type: ignore[no-any-return]


def stepped(model: Any, start: dict[str, torch.Tensor]) -> Run:
    """``start`` after one SGD step by the gradients of ``model``."""
    grads = {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}
    weights = {name: value.double() - RATE * grads[name] if name in grads else value for name, value in start.items()}
    if "lm_head.weight" in weights:  # tied to the embedding, which the optimizer moves once
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    return Run([], [], weights, start, [{"step": 1}], None)


Trained = tuple[str, Run, Script]


@pytest.fixture(scope="module", params=["tools", "environment"])
def trained(
    request: pytest.FixtureRequest, models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Trained:
    """TRL's own loop, the exact update."""
    return request.param, *tool_run(request.param, models, tmp_path_factory.mktemp(request.param))


@pytest.mark.not_fast
def test_tokens_of_a_tool_carry_no_loss(trained: Trained, models: dict[str, Path], tmp_path: Path) -> None:
    kind, exact, script = trained
    roles = [[turn["role"] for turn in turns] for turns in script.messages]
    assert [r.count("tool") for r in roles[:8]] == [1, 2, 3, 0] * 2  # several turns in one conversation
    answers = [turn["content"] for turn in script.messages[5] if turn["role"] == "tool"]
    assert answers == (["10", "15"] if kind == "tools" else [str(answers[0]), str(int(answers[0]) + 15)])  # 5·2, 5·3
    heard = [mask.count(False) for mask in (policys(row, script.turns) for row in script.rows)]
    assert [count > 0 for count in heard] == [r.count("tool") > 0 for r in roles]
    (log,) = (row for row in exact.history if "loss" in row)
    assert log["tools/call_frequency"] == 12 / 8  # 1 + 2 + 3 + 0, twice
    assert log["tools/failure_frequency"] == 0
    own = [len(row[1]) - count for row, count in zip(script.rows, heard, strict=True)]
    assert log["completions/mean_length"] == pytest.approx(sum(own) / 8, rel=1e-6)
    assert log["update/live_share"] == 0.5  # the dead group is left out
    assert_same_movement(exact, by_hand(script, models["tools"], exact.start))
    stock_cut, same = tool_run(kind, models, tmp_path, update="off")
    assert same == script
    assert_same_movement(exact, stock_cut)


@pytest.mark.not_fast
def test_the_oracle_sees_a_tool_token_that_carries_loss(trained: Trained, models: dict[str, Path]) -> None:
    _, exact, script = trained
    row = next(row for row in script.rows[4:] if not all(policys(row, script.turns)))  # the first group is dead
    script = replace(script, turns=[*script.turns, row])  # as if the sampler had made the tool's answer, too
    with pytest.raises(AssertionError):
        assert_same_movement(exact, by_hand(script, models["tools"], exact.start))


@pytest.mark.not_fast
def test_trajectories_are_those_of_trls_loop(trained: Trained, models: dict[str, Path], tmp_path: Path) -> None:
    """``rollout.turns``: the same draws in the same order, the same rows, and the same weights to the bit."""
    kind, stock, script = trained
    ours, same = tool_run(kind, models, tmp_path, rollout={"turns": {}})
    assert same == script
    assert all(torch.equal(ours.weights[name], value) for name, value in stock.weights.items())
    (log,) = (row for row in stock.history if "loss" in row)
    (other,) = (row for row in ours.history if "loss" in row)
    for name in ("tools/call_frequency", "tools/failure_frequency", "completions/mean_length", "num_tokens"):
        assert other[name] == log[name]


@pytest.mark.not_fast
def test_an_environment_of_this_process_cannot_run_in_another(
    models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one_process = {"turns": {"threads": 1}}
    monkeypatch.setattr(Counter.multiply, "in_process", True, raising=False)
    with pytest.raises(ValueError, match=r"Counter.multiply is to run in a process .* a method of"):
        tool_run("environment", models, tmp_path, rollout=one_process)
    monkeypatch.setattr(multiply, "in_process", True, raising=False)
    _, script = tool_run("tools", models, tmp_path, rollout=one_process)
    assert [one["content"] for one in script.messages[5] if one["role"] == "tool"] == ["10", "15"]
