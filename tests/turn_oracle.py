"""Credit for turns in float64, number by number: scripted trajectories, three environments that score their turns, and
what trainings on them must end at."""

from __future__ import annotations

import math
import random
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

import ppo_oracle
from grpo_lab.testing import ScriptedRollout
from grpo_lab.turns.trajectory import Call, Turn

GROUP, LR, BUDGET = 4, 0.2, 32
Scores = list[float | None]
#: rules as `advantage` names them
RULES: dict[str, dict[str, Any]] = {
    "returns": {"name": "turn_returns", "gamma": 0.9, "delta": "leave_one_out"},
    "zscore": {"name": "turn_returns", "gamma": 0.5, "delta": "group_zscore"},
    "spread": {"name": "turn_spread", "weight": 0.7},
}


def turns_of(ids: list[int]) -> tuple[Turn, ...]:
    """One to many turns with a tool's answers between them; some end with one."""
    rng = random.Random(str(ids))
    turns = []
    first = 0
    while first < len(ids):
        end = min(first + rng.randint(1, 6), len(ids))
        failures = [rng.choice([None, None, "raised"]) for _ in range(rng.randint(0, 2))]
        calls = tuple(Call("walk", {}, "ok", failure) for failure in failures)
        turns.append(Turn(first, end, 0, calls))
        first = end + rng.randint(0, 4)
    return tuple(turns)


def own_tokens(ids: list[int]) -> list[int]:
    turns = turns_of(ids)
    return [int(any(turn.first <= t < turn.end for turn in turns)) for t in range(len(ids))]


class Walk:
    """Scores every turn."""

    def turn_rewards(self, turns: Sequence[Turn]) -> Scores:
        return [(turn.end * 7 + turn.first) % 5 / 4.0 for turn in turns]


class Sparse:
    """Scores a turn now and then."""

    def turn_rewards(self, turns: Sequence[Turn]) -> Scores:
        return [1.0 if turn.end % 3 == 0 else None for turn in turns]


class Failing:
    """Charges failed calls, and says nothing of turns without a call."""

    def turn_rewards(self, turns: Sequence[Turn]) -> Scores:
        return [-sum(call.failure is not None for call in turn.calls) / 2 if turn.calls else None for turn in turns]


KINDS = (Walk, Sparse, Failing)


def environment_of(prompt: list[int]) -> Any:
    return KINDS[len(prompt) % 3]()


def outcome_of(ids: list[int]) -> float | None:
    return None if sum(ids) % 7 == 0 else (sum(ids) % 5) / 4.0


def outcome(completion_ids: list[list[int]], **_: Any) -> Scores:
    return [outcome_of(ids) for ids in completion_ids]


class InTurns(ScriptedRollout):
    """Tells the turns and the environments, and keeps what it made, a pair (prompts, completions) a generation."""

    def __call__(self, prompts: list[Any], trainer: Any) -> dict[str, Any]:
        made = super().__call__(prompts, trainer)
        self.__dict__.setdefault("batches", []).append([made["prompt_ids"], made["completion_ids"]])
        told = {
            "turns": [turns_of(ids) for ids in made["completion_ids"]],
            "environments": [environment_of(ids) for ids in made["prompt_ids"]],
            "env_mask": [own_tokens(ids) for ids in made["completion_ids"]],
        }
        return {**made, **told}


def single(number: float) -> float:
    """Rounded to float32."""
    return float(struct.unpack("f", struct.pack("f", number))[0])


def compared(values: Scores, delta: str) -> list[float]:
    """What ``delta`` makes of one group's returns at one turn."""
    known = [value for value in values if value is not None]
    n = len(known)
    found = []
    for value in values:
        if value is None or (n < 2 and delta != "raw"):
            found.append(0.0)
            continue
        mean = math.fsum(known) / n
        if delta == "raw":
            found.append(value)
        elif delta == "group_mean":
            found.append(value - mean)
        elif delta == "leave_one_out":
            found.append(value - (math.fsum(known) - value) / (n - 1))
        else:
            std = math.sqrt(math.fsum((other - mean) ** 2 for other in known) / (n - 1))
            found.append((value - mean) / (std + 1e-4))
    return found


def credited(rule: dict[str, Any], scores: list[Scores], outcomes: Scores, size: int = GROUP) -> list[list[float]]:
    """The advantage of each turn of each completion."""
    spreads = rule["name"] == "turn_spread"
    gamma = rule.get("gamma", 0.0 if spreads else 1.0)
    delta = rule.get("delta", "group_zscore" if spreads else "group_mean")
    returns: list[Scores] = []
    for row, paid in zip(scores, outcomes, strict=True):
        of_row: Scores = []
        for k in range(len(row)):
            ahead = [gamma ** (j - k) * r for j, r in enumerate(row) if j >= k and r is not None]
            value = single(math.fsum(ahead)) if ahead else None
            if not spreads and paid is not None:
                value = (value or 0.0) + gamma ** (len(row) - 1 - k) * paid
            of_row.append(value)
        returns.append(of_row)
    found = [[0.0] * len(row) for row in scores]
    for start in range(0, len(scores), size):
        group = range(start, start + size)
        of_outcome = compared([outcomes[i] for i in group], delta)
        for k in range(max((len(scores[i]) for i in group), default=0)):
            made = compared([returns[i][k] if k < len(returns[i]) else None for i in group], delta)
            for i, value, spread in zip(group, made, of_outcome, strict=True):
                if k < len(scores[i]):
                    found[i][k] = spread + rule.get("weight", 1.0) * value if spreads else value
    return found


def over_tokens(of_turns: list[float], turns: Sequence[Turn], length: int) -> list[float]:
    found = [0.0] * length
    for value, turn in zip(of_turns, turns, strict=True):
        for t in range(turn.first, turn.end):
            found[t] = value
    return found


def advantages_of(rule: dict[str, Any], prompts: list[list[int]], completions: list[list[int]]) -> list[list[float]]:
    """The advantage of each token of the scripted trajectories; 0 for a tool's."""
    turns = [turns_of(ids) for ids in completions]
    scores = [environment_of(prompt).turn_rewards(own) for prompt, own in zip(prompts, turns, strict=True)]
    of_turns = credited(rule, scores, [outcome_of(ids) for ids in completions])
    return [over_tokens(*one) for one in zip(of_turns, turns, map(len, completions), strict=True)]


def replayed(model_folder: Path, batches: list[Any], rule: dict[str, Any], objective: str) -> dict[str, torch.Tensor]:
    """The same training in float64, one row after the other and one SGD step a generation: GRPO's mean over each
    completion's own tokens, or Dr.GRPO's constant budget."""
    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float64)
    for prompts, completions in batches:
        model.zero_grad()
        for prompt, ids, advantage in zip(prompts, completions, advantages_of(rule, prompts, completions), strict=True):
            logits = model(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1]
            logps = logits.log_softmax(-1).gather(1, torch.tensor(ids)[:, None]).squeeze(1)
            own = torch.tensor(own_tokens(ids), dtype=torch.float64)
            share = own.sum() if objective == "grpo" else BUDGET
            loss = -(logps * torch.tensor(advantage, dtype=torch.float64) * own).sum() / share / len(completions)
            loss.backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= LR * parameter.grad
    return {name: value.detach() for name, value in model.state_dict().items()}


class BiLevel(ppo_oracle.Oracle):
    """PPO whose advantages go over turns, then over the tokens of each: RAGEN's, number by number."""

    own_tokens = staticmethod(own_tokens)
    turn_gamma = 0.7

    def ends(self, ids: list[int]) -> list[int]:
        """Where the turns end among the own tokens."""
        lengths = [turn.end - turn.first for turn in turns_of(ids)]
        return [sum(lengths[: k + 1]) - 1 for k in range(len(lengths))]

    def step_scores(self, prompt: list[int], ids: list[int]) -> dict[int, float]:
        scores = environment_of(prompt).turn_rewards(turns_of(ids))
        return {end: score for end, score in zip(self.ends(ids), scores, strict=True) if score is not None}

    def credited(self, ids: list[int], earned: Scores, values: list[float]) -> Scores:
        if None in earned:
            return [None] * len(earned)
        goals: dict[int, float] = {}
        ahead, following = 0.0, 0.0
        ends = self.ends(ids)
        for end in reversed(ends):
            delta = earned[end] + self.turn_gamma * following - values[end]  # type: ignore[operator]
            ahead = delta + self.turn_gamma * ppo_oracle.LAM * ahead
            following = values[end]
            goals[end] = ahead + values[end]
        found: Scores = []
        later, after = 0.0, 0.0
        for t in reversed(range(len(values))):
            if t in goals:
                later, after = 0.0, 0.0
            delta = goals.get(t, earned[t]) + ppo_oracle.GAMMA * after - values[t]  # type: ignore[operator]
            later = delta + ppo_oracle.GAMMA * ppo_oracle.LAM * later
            after = values[t]
            found.append(later)
        return found[::-1]
