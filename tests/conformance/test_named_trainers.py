"""What every named trainer must do. A new one costs one row in ``ROWS``."""

from __future__ import annotations

import inspect
import pickle
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from trl import GRPOConfig, GRPOTrainer

import grpo_lab
from grpo_lab import LabConfig, LabTrainer
from grpo_lab.trainer import named
from grpo_lab.trainer.trl_bridge.rewards import reward_name
from parity.harness import Run, arguments, assert_same_movement, movement_difference, train

DOCS = Path(__file__).resolve().parents[2] / "docs" / "algorithms"


@dataclass(frozen=True)
class Row:
    """What is true of one trainer.

    Args:
        objective: the preset that it declares.
        declares: rewards it brings where the caller brings none.
        adds: rewards it adds to a single one of the caller's.
        settings: what its algorithm needs beside the harness's.
    """

    objective: str
    declares: tuple[str, ...] = ()
    adds: tuple[str, ...] = ()
    settings: dict[str, Any] = field(default_factory=dict)


ROWS: dict[str, Row] = {
    "DrGRPOTrainer": Row("dr_grpo"),
    "KimiTrainer": Row(
        "mirror_descent",
        declares=("accuracy_reward", "kimi_length_reward"),
        adds=("kimi_length_reward",),
        settings={"num_iterations": 2, "learning_rate": 0.01},
    ),
    "PPOTrainer": Row("ppo", settings={"num_iterations": 2, "learning_rate": 0.1}),
    "R1ZeroTrainer": Row("grpo", declares=("accuracy_reward", "think_format_reward"), settings={"beta": 0.04}),
}


@pytest.fixture(params=sorted(ROWS))
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def row(name: str) -> Row:
    return ROWS[name]


@pytest.fixture
def kind(name: str) -> type[LabTrainer]:
    found: type[LabTrainer] = getattr(grpo_lab, name)
    return found


def run(kind: type[LabTrainer], row: Row, folder: Path, model: Path, **settings: Any) -> Run:
    return train(kind, LabConfig(**arguments(folder, **row.settings, **settings)), model)


def test_every_named_trainer_has_a_row() -> None:
    assert {n for n, c in vars(named).items() if inspect.isclass(c) and c.__module__ == named.__name__} == ROWS.keys()


def test_the_constructor_is_trls(kind: type[LabTrainer]) -> None:
    assert list(inspect.signature(kind.__init__).parameters) == list(inspect.signature(GRPOTrainer.__init__).parameters)


def test_it_says_where_it_comes_from(kind: type[LabTrainer], row: Row) -> None:
    assert re.search(r"arXiv \d{4}\.\d{5}", kind.__doc__ or "")
    assert kind.__name__ in "".join(page.read_text(encoding="utf-8") for page in DOCS.glob("*.md"))
    assert kind.objective == row.objective


def test_its_rewards(kind: type[LabTrainer], row: Row) -> None:
    def accuracy_reward(completions: list[Any], **_: Any) -> list[float]:
        return [0.0 for _ in completions]

    declared = kind.declared_rewards([])
    assert tuple(reward_name(reward) for reward in declared) == row.declares
    assert [reward_name(reward) for reward in pickle.loads(pickle.dumps(declared))] == list(row.declares)
    completed = kind.declared_rewards([accuracy_reward])
    assert [reward_name(reward) for reward in completed] == ["accuracy_reward", *row.adds]
    assert kind.declared_rewards(completed) == completed, "adding twice"


@pytest.mark.slow
def test_it_trains_exactly_and_with_a_plain_grpo_config_too(
    kind: type[LabTrainer], row: Row, tiny_folder: Path, tmp_path: Path
) -> None:
    exact = run(kind, row, tmp_path, tiny_folder)
    assert exact.trainer.algorithm.names["objective"] == row.objective
    assert any((exact.weights[n] != value).any() for n, value in exact.start.items())
    assert_same_movement(exact, run(kind, row, tmp_path, tiny_folder, update="off"))
    plain = train(kind, GRPOConfig(**arguments(tmp_path, **row.settings)), tiny_folder)
    assert movement_difference(plain, exact) == 0.0, "the same computation twice: the same bits on any CPU"


def test_another_objective_is_refused(kind: type[LabTrainer], tiny_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=rf"`{kind.__name__}` declares objective="):
        train(kind, LabConfig(**arguments(tmp_path), objective="dapo"), tiny_folder)
