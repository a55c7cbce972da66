"""`ratio: product` and `sequence_token` with `std: population`, through the real trainer: bins and TRL's batches
against loops in float64."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from grpo_lab import LabConfig, LabTrainer
from parity.harness import LENGTHS, Kept, Run, arguments, mixed_reward, movement_difference, train

pytestmark = pytest.mark.slow
GROUP, LR, EPSILON = 4, 0.2, 0.02


def run(folder: Path, model: Path, rewards: Any, ratio: str, **settings: Any) -> Run:
    end = AutoTokenizer.from_pretrained(model).eos_token_id
    objective = {
        "name": "gspo",
        "ratio": ratio,
        "epsilon": EPSILON,
        "advantage": {"name": "group_zscore", "std": "population"},
    }
    made = {"learning_rate": LR, "objective": objective, "num_iterations": 2, "epsilon": EPSILON, **settings}
    config = LabConfig(**arguments(folder, **made))
    rollout = Kept(range(20, 90), LENGTHS, end_id=end, truncated_share=0.2)
    return train(LabTrainer, config, model, rollout=rollout, reward=rewards)


def standardised(rewards: list[float]) -> list[float]:
    """(r − mean)/(std + 1e-4) in each group, n in the denominator of the variance."""
    found = []
    for start in range(0, len(rewards), GROUP):
        group = rewards[start : start + GROUP]
        mean = math.fsum(group) / GROUP
        std = math.sqrt(math.fsum((r - mean) ** 2 for r in group) / GROUP)
        found += [(r - mean) / (std + 1e-4) for r in group]
    return found


def replayed(model_folder: Path, batches: list[Any], rewards: list[list[float]], ratio: str) -> tuple[Any, list[float]]:
    """The same training in float64, row by row, and the share of clipped rows (tokens) of each step.

    One advantage a row: GSPO-token is GSPO (its gradient through s_i), weighed by the tokens where it is logged.
    """
    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float64)

    def logps(prompt: list[int], ids: list[int]) -> torch.Tensor:
        logits = model(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1]
        return logits.log_softmax(-1).gather(1, torch.tensor(ids)[:, None]).squeeze(1)

    shares = []
    for (prompts, completions), scores in zip(batches, rewards, strict=True):
        advantages = standardised(scores)
        with torch.no_grad():
            old = [logps(p, c) for p, c in zip(prompts, completions, strict=True)]
        for _ in range(2):
            model.zero_grad()
            cut = whole = 0.0
            for prompt, ids, before, advantage in zip(prompts, completions, old, advantages, strict=True):
                moved = logps(prompt, ids) - before
                s = (moved.sum() if ratio == "product" else moved.mean()).exp()
                weight = 1 if ratio == "product" else len(ids)
                out = (s < 1 - EPSILON and advantage < 0) or (s > 1 + EPSILON and advantage > 0)
                cut, whole = cut + weight * float(out), whole + weight
                if advantage:
                    (
                        -torch.minimum(s * advantage, s.clamp(1 - EPSILON, 1 + EPSILON) * advantage) / len(completions)
                    ).backward()
            shares.append(cut / whole)
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter -= LR * parameter.grad
    return {name: value.detach() for name, value in model.state_dict().items()}, shares


@pytest.mark.parametrize("ratio", ["product", "sequence_token"])
def test_against_loops_in_float64_in_bins_and_in_trls_batches(ratio: str, tiny_folder: Path, tmp_path: Path) -> None:
    seen: list[list[float]] = []
    score = mixed_reward()

    def parity_reward(**inputs: Any) -> list[float]:
        seen.append(score(**inputs))
        return seen[-1]

    for update in (None, "off"):
        seen.clear()
        ours = run(tmp_path, tiny_folder, parity_reward, ratio, update=update)
        assert ours.trainer.exact_update.described()["batches"] == ("as TRL" if update == "off" else "bins")
        weights, shares = replayed(tiny_folder, ours.trainer.rollout_func.batches, seen, ratio)
        stock = Run([], [], weights, ours.start, [], None)
        # a float32 log-prob of 6 nats is off by 8e-6 at most (`log_prob_gap`), a sum of 30 of them by √30 as much, and
        # four steps that build on each other make it 3e-4; taking one level for another moves the second step of each
        # batch by
        # tenths
        assert movement_difference(ours, stock) < 1e-3
        logged = [row["clip_ratio/region_mean"] for row in ours.history if "loss" in row]
        assert logged == pytest.approx(shares, abs=1e-6)
        assert max(shares) > 0, "a clip must act"
