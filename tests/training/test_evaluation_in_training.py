"""``eval_strategy: steps`` under an objective of ours: the metrics by hand, and what evaluating does to the training beside it."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from grpo_lab import LabConfig, LabTrainer
from parity.harness import Run, arguments, problems, train

EVALUATED = {"eval_strategy": "steps", "eval_steps": 1, "per_device_eval_batch_size": 4, "num_generations_eval": 2}
END = 1


class ByStep:
    """Completions that depend on the prompt, the row, the step and on whether it is an evaluation: not on how often it was asked."""

    def __call__(self, prompts: list[Any], trainer: Any) -> dict[str, Any]:
        mode = "train" if trainer.model.training else "eval"
        rows = [self.row(f"{mode}/{trainer.state.global_step}/{i}/{prompt}") for i, prompt in enumerate(prompts)]
        prompt_ids, _, _ = trainer._tokenize_prompts(prompts)
        return {"prompt_ids": [list(ids) for ids in prompt_ids], "completion_ids": rows, "logprobs": None}

    def row(self, key: str) -> list[int]:
        draw = random.Random(key)
        ids = [draw.randrange(20, 90) for _ in range(draw.choice((3, 5, 9, 14)))]
        return [*ids[:-1], END] if draw.random() < 0.7 else ids


def run(folder: Path, model: Path, rollout: Any, seen: dict[int, list[Any]] | None = None, **changes: Any) -> Run:
    def reward(completion_ids: list[list[int]], trainer_state: Any, number: list[int], **_: Any) -> list[float]:
        scores = [0.5 if n % 3 == 0 else (sum(ids) % 5) / 4 for n, ids in zip(number, completion_ids, strict=True)]
        if seen is not None and number[0] >= 100:  # rows of the evaluation
            seen.setdefault(trainer_state.global_step, []).extend(zip(completion_ids, scores, strict=True))
        return scores

    held_out = problems(6).map(lambda row: {"number": row["number"] + 102})  # 102 % 3 == 0
    settings = {**arguments(folder, max_steps=3, num_iterations=2, learning_rate=2.0), **changes}
    given = {"eval_dataset": held_out} if "eval_strategy" in changes else {}
    return train(LabTrainer, LabConfig(**settings, objective="dr_grpo"), model, rollout=rollout, reward=reward, **given)


def test_evaluating_leaves_the_training_as_it_is(tiny_folder: Path, tmp_path: Path) -> None:
    """The same completions, and an evaluation after each step, in the middle of a generation batch, too: the same run, bit by bit."""
    seen: dict[int, list[Any]] = {}
    with_it = run(tmp_path, tiny_folder, ByStep(), seen, **EVALUATED)
    without = run(tmp_path, tiny_folder, ByStep())
    assert with_it.losses == without.losses
    assert all(torch.equal(value, without.weights[name]) for name, value in with_it.weights.items())
    rows, plain = ([row for row in r.history if "loss" in row] for r in (with_it, without))
    timed = {"step_time", "num_tokens"}  # TRL counts the tokens of evaluations, too
    for one, other in zip(rows, plain, strict=True):
        assert {k: v for k, v in one.items() if k not in timed} == {k: v for k, v in other.items() if k not in timed}
    evaluations = [row for row in with_it.history if "eval_reward" in row]
    assert [row["step"] for row in evaluations] == [1, 2, 3] == sorted(seen)
    for row in evaluations:
        _check(row, seen[row["step"]])


def _check(row: dict[str, Any], made: list[tuple[list[int], float]]) -> None:
    """TRL: a mean of the batches' means, all batches equal here (12 completions, 4 a batch)."""
    lengths, scores = [len(ids) for ids, _ in made], [score for _, score in made]
    groups = [scores[i : i + 2] for i in range(0, len(scores), 2)]
    cut = sum(ids[-1] != END for ids, _ in made)
    assert len(made) == 12
    expected = {
        "eval_reward": sum(scores) / 12,
        "eval_completions/mean_length": sum(lengths) / 12,
        "eval_completions/truncated_share": cut / 12,
        "eval_groups/dead_share": sum(a == b for a, b in groups) / 6,
    }
    found = {name: row[name] for name in expected}
    assert found == pytest.approx(expected, rel=1e-6)
    assert sum(a == b for a, b in groups) >= 2  # the third part of the rows, at least
    assert row["eval_loss"] == row["eval_loss"]
    assert not any(name.startswith("eval_update/") for name in row)


@pytest.mark.parametrize("seeds", [{}])
def test_with_a_real_sampler_evaluating_draws_from_the_same_stream(
    seeds: dict[str, Any], tiny_folder: Path, tmp_path: Path
) -> None:
    """As in stock TRL: the sampler's random numbers go on where the evaluation left them, so that later completions are others (of
    the same distribution). What was drawn before the first evaluation is the same."""
    with_it = run(tmp_path, tiny_folder, None, **EVALUATED)
    without = run(tmp_path, tiny_folder, None)
    assert with_it.losses[0] == without.losses[0]
    rewards = [[row["reward"] for row in r.history if "loss" in row] for r in (with_it, without)]
    assert rewards[0][0] == rewards[1][0]
    lengths = [
        [row["completions/mean_length"] for row in r.history if "completions/mean_length" in row]
        for r in (with_it, without)
    ]
    assert lengths[0] != lengths[1]
