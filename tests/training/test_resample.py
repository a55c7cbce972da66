"""``update.dead_groups: resample``: the batch is filled with live groups, or as far as the rounds allow."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from datasets import IterableDataset

from grpo_lab import LabConfig, LabTrainer
from parity.harness import arguments, mixed_reward, problems, train


def resampling(folder: Path, **update: Any) -> LabConfig:
    return LabConfig(
        **arguments(folder, max_steps=3), objective="dr_grpo", update={"dead_groups": "resample", **update}
    )


def column(run: Any, name: str) -> list[float]:
    return [row[name] for row in run.history if name in row]


def distinct_or_dead(completion_ids: list[list[int]], number: list[int], **_: Any) -> list[float]:
    """Every third prompt is dead; elsewhere values so different that no row sits on its group's mean."""
    return [
        0.5 if n % 3 == 0 else (sum(ids) % 97) / 97 + row * 1e-3
        for row, (n, ids) in enumerate(zip(number, completion_ids, strict=True))
    ]


def test_batches_hold_live_groups_only(tiny_folder: Path, tmp_path: Path) -> None:
    run = train(LabTrainer, resampling(tmp_path, max_rounds=20), tiny_folder, reward=distinct_or_dead)
    assert column(run, "update/live_share") == [1.0] * 3
    assert sum(column(run, "update/resampled_share")) > 0
    assert max(column(run, "update/resample_rounds")) > 1
    assert column(run, "update/completions_generated") == [
        12.0 * rounds for rounds in column(run, "update/resample_rounds")
    ]


def test_rounds_are_bounded(tiny_folder: Path, tmp_path: Path) -> None:
    run = train(LabTrainer, resampling(tmp_path, max_rounds=3), tiny_folder, reward=mixed_reward(dead_every=1))
    assert (
        column(run, "update/resample_rounds") == [3.0] * 3
    )  # every group is dead: three rounds, then on with dead groups
    assert column(run, "update/live_share") == [0.0] * 3
    assert run.losses == [0.0] * 3


def test_nothing_is_drawn_when_all_groups_live(tiny_folder: Path, tmp_path: Path) -> None:
    ours = train(LabTrainer, resampling(tmp_path), tiny_folder, reward=mixed_reward(dead_every=0))
    plain = train(
        LabTrainer,
        LabConfig(**arguments(tmp_path, max_steps=3), objective="dr_grpo"),
        tiny_folder,
        reward=mixed_reward(0),
    )
    assert column(ours, "update/resample_rounds") == [1.0] * 3
    assert ours.losses == pytest.approx(plain.losses, rel=1e-6)


def test_streams_are_refused(tiny_folder: Path, tmp_path: Path) -> None:
    stream = IterableDataset.from_generator(lambda: iter(problems()))
    with pytest.raises(ValueError, match=r"update\.dead_groups: resample.*IterableDataset"):
        train(LabTrainer, resampling(tmp_path), tiny_folder, train_dataset=stream)
