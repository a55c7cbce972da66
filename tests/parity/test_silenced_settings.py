"""A setting that acts inside a method of ours is no setting where a team's code keeps that method from being called."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, SequentialSampler

from grpo_lab import LabConfig, LabTrainer
from grpo_lab.curation import PrioritizedSampler
from parity.harness import Run, arguments, problems, train


class OwnSampler(LabTrainer):
    def _get_train_sampler(self, dataset: Any = None) -> Any:
        return SequentialSampler(self.train_dataset if dataset is None else dataset)


class OwnLoader(LabTrainer):
    def get_train_dataloader(self) -> Any:
        return DataLoader(self.train_dataset, batch_size=12, collate_fn=list)


class OwnBatches(LabTrainer):
    def _generate_and_score_completions(self, inputs: Any) -> Any:
        one = torch.ones(len(inputs), 4, dtype=torch.long)
        fields = {f"{part}_{what}": one for part in ("prompt", "completion") for what in ("ids", "mask")}
        return {**fields, "advantages": torch.ones(len(inputs)), "num_items_in_batch": one.sum()}


class OwnNorm(LabTrainer):
    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> Any:
        return torch.zeros(())


class AsksOurs(LabTrainer):
    """Overrides all of them, and asks ``super()``."""

    def get_train_dataloader(self) -> Any:
        return super().get_train_dataloader()

    def _get_train_sampler(self, dataset: Any = None) -> Any:
        return super()._get_train_sampler(dataset)

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        return super()._generate_and_score_completions(inputs)

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> Any:
        return super()._get_grad_norm(model, grad_norm)


def correct(completion_ids: list[list[int]], **_: Any) -> list[float]:
    return [float(sum(ids) % 2) for ids in completion_ids]


correct.measures_correctness = True  # type: ignore[attr-defined]


def trained(kind: Any, tiny: Path, out: Path, **settings: Any) -> Run:
    args = LabConfig(**arguments(out, max_steps=2), objective="dr_grpo", **settings)
    return train(kind, args, tiny, reward=correct, train_dataset=problems(24))


SILENCED: dict[str, tuple[Any, dict[str, Any], str]] = {
    "sampler": (
        OwnSampler,
        {"sampler": "prioritized"},
        "`sampler` .* `LabTrainer._get_train_sampler`, and `OwnSampler._get_train_sampler` keeps it",
    ),
    "loader": (OwnLoader, {"sampler": "prioritized"}, "`sampler` .* `OwnLoader.get_train_dataloader` keeps it"),
    "advantage": (
        OwnBatches,
        {"advantage": "leave_one_out"},
        "`advantage` .* `OwnBatches._generate_and_score_completions` keeps it",
    ),
    "resample": (OwnBatches, {"update": {"dead_groups": "resample"}}, "`update.dead_groups: resample` would"),
    "groups": (LabTrainer, {"rollout": {"generate": "groups"}}, "`rollout.generate: groups` .* `rollout_func` keeps"),
    "compiled": (LabTrainer, {"rollout": {"generate": "compiled"}}, "`rollout.generate: compiled` .* `rollout_func`"),
    "guard": (OwnNorm, {"guard": {"max_bad_steps": 1}}, "`guard` .* `OwnNorm._get_grad_norm` keeps"),
}


@pytest.mark.parametrize("case", SILENCED)
def test_a_silenced_setting_is_refused(case: str, tiny_folder: Path, tmp_path: Path) -> None:
    kind, settings, said = SILENCED[case]
    with pytest.raises(ValueError, match=said):
        trained(kind, tiny_folder, tmp_path, **settings)


def test_one_that_is_set_on_the_object(tiny_folder: Path, tmp_path: Path) -> None:
    def prepare(trainer: Any) -> None:
        trainer._get_train_sampler = lambda dataset=None: SequentialSampler(trainer.train_dataset)

    args = LabConfig(**arguments(tmp_path), objective="dr_grpo", sampler="prioritized")
    with pytest.raises(ValueError, match=r"`sampler` .* `trainer._get_train_sampler` keeps it"):
        train(LabTrainer, args, tiny_folder, reward=correct, prepare=prepare)


def test_what_asks_super_leaves_all_in_force(tiny_folder: Path, tmp_path: Path) -> None:
    settings = {"sampler": "prioritized", "guard": {"max_bad_steps": 1}, "update": {"dead_groups": "resample"}}
    run = trained(AsksOurs, tiny_folder, tmp_path, **settings)
    assert isinstance(run.trainer.parts.prompts.sampler, PrioritizedSampler)
    assert any("sampler/seen_share" in row for row in run.history)


def test_without_the_setting_nothing_is_refused_and_the_record_names_it(tiny_folder: Path, tmp_path: Path) -> None:
    run = trained(OwnNorm, tiny_folder, tmp_path)
    assert "gradient norm=OwnNorm._get_grad_norm" in run.trainer.algorithm.describe()
