"""Process supervision in float64, number by number: what trainings with scripted, ragged step scores must end at."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from grpo_lab.rewards import step_reward

GROUP, LR = 4, 0.2
PROCESS = {"name": "grpo", "advantage": "process"}


def scored(ids: list[int]) -> list[tuple[int, float | None]]:
    """Ragged and scripted: none to four steps, some that end before the completion does, some unscorable."""
    rng = random.Random(str(ids))
    ends = sorted(rng.sample(range(len(ids)), rng.randrange(0, min(len(ids), 4) + 1)))
    return [(end, rng.choice([0.0, 0.5, 1.0, None])) for end in ends]


@step_reward
def ragged_steps(prompts: Any, completions: Any, completion_ids: Any, **_: Any) -> Any:
    return [scored(ids) for ids in completion_ids]


def literal(rows: list[list[tuple[int, float | None]]], lengths: list[int]) -> list[list[float]]:
    """DeepSeekMath §4.1.3, number by number; the standard deviation with n − 1 and ε = 1e-4, as in outcome GRPO."""
    found = []
    for start in range(0, len(rows), GROUP):
        group = rows[start : start + GROUP]
        scores = [score for row in group for _, score in row if score is not None]
        mean = math.fsum(scores) / len(scores) if scores else 0.0
        std = math.sqrt(math.fsum((s - mean) ** 2 for s in scores) / (len(scores) - 1)) if len(scores) > 1 else 0.0
        for row, length in zip(group, lengths[start : start + GROUP], strict=True):
            made = [(end, (s - mean) / (std + 1e-4)) for end, s in row if s is not None]
            found.append([math.fsum(value for end, value in made if end >= t) for t in range(length)])
    return found


Advantages = Callable[[list[list[int]], list[torch.Tensor]], list[list[float]]]
"""(completions, the log-probs ``[T, V]`` of all tokens at each place) → an advantage for each token."""


def of_steps(completions: list[list[int]], _: list[torch.Tensor]) -> list[list[float]]:
    return literal([scored(ids) for ids in completions], [len(ids) for ids in completions])


def replayed(
    model_folder: Path, batches: list[Any], updates: int, advantages_of: Advantages = of_steps
) -> dict[str, torch.Tensor]:
    """The same training in float64, one row after the other: clipped GRPO with an advantage per token."""
    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float64)

    def of_all(prompt: list[int], ids: list[int]) -> torch.Tensor:
        logits = model(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1]
        return torch.as_tensor(logits.log_softmax(-1))

    def logps(prompt: list[int], ids: list[int]) -> torch.Tensor:
        return of_all(prompt, ids).gather(1, torch.tensor(ids)[:, None]).squeeze(1)

    for prompts, completions in batches:
        with torch.no_grad():
            advantages = advantages_of(completions, [of_all(p, c) for p, c in zip(prompts, completions, strict=True)])
            old = [logps(p, c) for p, c in zip(prompts, completions, strict=True)]
        for _ in range(updates):
            model.zero_grad()
            for prompt, ids, before, advantage in zip(prompts, completions, old, advantages, strict=True):
                a = torch.tensor(advantage, dtype=torch.float64)
                ratio = (logps(prompt, ids) - before).exp()
                loss = -torch.minimum(ratio * a, ratio.clamp(0.8, 1.2) * a).mean() / len(completions)
                loss.backward()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter -= LR * parameter.grad
    return {name: value.detach() for name, value in model.state_dict().items()}
