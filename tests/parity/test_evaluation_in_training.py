"""``eval_strategy: steps`` under an objective of ours: the metrics by hand, and what evaluating does to the training
beside it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from grpo_lab import LabConfig, LabTrainer
from parity.harness import Run, arguments, problems, train

EVALUATED = {"eval_strategy": "steps", "eval_steps": 1, "per_device_eval_batch_size": 4, "num_generations_eval": 2}
TIMED = {"step_time", "train_runtime"}


class Apart(LabTrainer):
    """An evaluation draws its random numbers from a copy of the stream."""

    def evaluate(self, *given: Any, **more: Any) -> Any:
        with torch.random.fork_rng():
            return super().evaluate(*given, **more)


def sampled(trainer: Any) -> None:
    trainer.rollout_func = None  # the model itself, by its own sampler


def run(kind: Any, folder: Path, model: Path, seen: dict[int, list[Any]] | None = None, **changes: Any) -> Run:
    def reward(completion_ids: list[list[int]], trainer_state: Any, number: list[int], **_: Any) -> list[float]:
        scores = [0.5 if n % 3 == 0 else (sum(ids) % 5) / 4 for n, ids in zip(number, completion_ids, strict=True)]
        if seen is not None and number[0] >= 100:  # rows of the evaluation
            seen.setdefault(trainer_state.global_step, []).extend(zip(completion_ids, scores, strict=True))
        return scores

    held_out = problems(6).map(lambda row: {"number": row["number"] + 102})  # 102 % 3 == 0
    settings = {**arguments(folder, max_steps=3, num_iterations=2, learning_rate=2.0), **changes}
    given = {"eval_dataset": held_out} if changes else {}
    return train(kind, LabConfig(**settings, objective="dr_grpo"), model, reward=reward, prepare=sampled, **given)


def windows(found: Run) -> list[dict[str, Any]]:
    return [{k: v for k, v in row.items() if k not in TIMED} for row in found.history if "loss" in row]


@pytest.mark.not_fast
def test_evaluating_touches_the_random_stream_and_nothing_else(models: dict[str, Path], tmp_path: Path) -> None:
    """After each step, in the middle of a generation batch, too. As in stock TRL an evaluation draws from the stream
    that training draws from (its sampler, its data loader's seed), so that later completions are others. With a copy of
    the stream the run is the same bit by bit: no metric, buffer, row or plan of the training is touched."""
    seen: dict[int, list[Any]] = {}
    alone = run(LabTrainer, tmp_path, models["text"])
    beside = run(LabTrainer, tmp_path, models["text"], **EVALUATED)
    apart = run(Apart, tmp_path, models["text"], seen, **EVALUATED)
    assert windows(apart) == windows(alone)
    assert all(torch.equal(value, alone.weights[name]) for name, value in apart.weights.items())
    assert windows(beside)[0] == windows(alone)[0]
    assert windows(beside)[2]["completions/mean_length"] != windows(alone)[2]["completions/mean_length"]
    evaluations = [row for row in apart.history if "eval_reward" in row]
    assert [row["step"] for row in evaluations] == [1, 2, 3] == sorted(seen)
    ends = {*apart.trainer.eos_token_ids, apart.trainer._tokenizer.pad_token_id}
    for row in evaluations:
        check(row, seen[row["step"]], ends)


def check(row: dict[str, Any], made: list[tuple[list[int], float]], ends: set[int]) -> None:
    """Over all 12 completions of the evaluation (6 problems, twice; three batches of one size)."""
    lengths, scores = [len(ids) for ids, _ in made], [score for _, score in made]
    groups = [scores[i : i + 2] for i in range(0, len(scores), 2)]
    assert len(made) == 12
    expected = {
        "eval_reward": sum(scores) / 12,
        "eval_completions/mean_length": sum(lengths) / 12,
        "eval_completions/truncated_share": sum(ids[-1] not in ends for ids, _ in made) / 12,
        "eval_groups/dead_share": sum(a == b for a, b in groups) / 6,
    }
    assert {name: row[name] for name in expected} == pytest.approx(expected, rel=1e-6)
    assert expected["eval_groups/dead_share"] >= 2 / 6  # numbers 102 and 105
    assert abs(row["eval_loss"]) < 10
    assert not any(name.startswith("eval_update/") for name in row)


@pytest.mark.not_fast
@pytest.mark.parametrize(("rows", "told"), [(5, "5 rows × 2 completions do not fill the last batch of 4"), (6, "")])
def test_a_last_batch_that_is_not_full_is_warned_of(
    models: dict[str, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture, rows: int, told: str
) -> None:
    """Its mean is one of two here: TRL logs the mean of the batches' means."""
    args = LabConfig(**{**arguments(tmp_path, max_steps=1), **EVALUATED}, objective="dr_grpo")
    seen: list[float] = []

    def reward(completion_ids: list[list[int]], number: list[int], **_: Any) -> list[float]:
        scores = [(sum(ids) % 5) / 4 for ids in completion_ids]
        seen.extend(scores if number[0] >= 100 else [])
        return scores

    held_out = problems(rows).map(lambda row: {"number": row["number"] + 100})
    found = train(LabTrainer, args, models["text"], reward=reward, eval_dataset=held_out)
    assert (told in caplog.text) if told else ("do not fill" not in caplog.text)
    logged = next(row["eval_reward"] for row in found.history if "eval_reward" in row)
    assert len(seen) == rows * 2
    assert (logged == pytest.approx(sum(seen) / len(seen), rel=1e-6)) == (not told)


@pytest.mark.slow
def test_continuous_batching_leaves_an_evaluation_one(models: dict[str, Path], tmp_path: Path) -> None:
    """Transformers' engine puts the model into training mode: the evaluation's metrics lost their ``eval_``, its rows
    went to the update."""
    blocks = {"num_blocks": 16, "block_size": 16, "max_batch_tokens": 64}
    engine = {"use_transformers_continuous_batching": True, "transformers_continuous_batching_config": blocks}
    changes = {**EVALUATED, **engine, "max_steps": 1, "num_iterations": 1, "max_completion_length": 3}
    found = run(LabTrainer, tmp_path, models["text"], **changes)
    assert sum("eval_reward" in row for row in found.history) == 1
    assert {weight.dtype for weight in found.weights.values()} == {torch.float32}
