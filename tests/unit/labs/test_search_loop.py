"""The loop of the search lab: what it trains on, what it goes on from, how it ranks. Trainings are real and tiny."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from transformers import AutoModelForTokenClassification

from grpo_lab.data import word_problems
from grpo_lab.engines.generators import in_form_of
from grpo_lab.io import write_json_lines
from grpo_lab.labs.search_cell import TASK, SearchCell, SearchModels, SearchSizes, right_of_each
from grpo_lab.labs.search_loop import (
    TRAINING,
    learnt_policy,
    learnt_value,
    loop_measured,
    ranked,
    solutions_found,
    value_rows,
)
from grpo_lab.runs.stage import Workspace
from grpo_lab.runs.stop_requests import StopRequests
from grpo_lab.stages.step_search import FoundSolution
from grpo_lab.stages.supervised import Train
from grpo_lab.testing import tiny_model

pytestmark = pytest.mark.not_fast

SIZES = SearchSizes(
    width=3, rounds=2, round_problems=2, round_tokens=160, round_steps=2, held_out=2, held_out_tokens=60,
    round_samples=3,
)  # fmt: skip


def problems_of(number: int) -> list[dict[str, Any]]:
    """The training problems of a round, with seed 0."""
    return word_problems(2, seed=100 + 1000 * number, split="train", template="chat", **TASK).to_list()


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> SearchModels:
    """A policy that has learnt the problems of both rounds by heart, and an untrained value model."""
    folder: Path = tmp_path_factory.mktemp("loop")
    model, words = tiny_model(hidden_size=64, num_heads=2, max_positions=256, initializer_range=0.1)
    model.save_pretrained(folder / "blank")
    words.save_pretrained(folder / "blank")
    rows = [*problems_of(1), *problems_of(2)]
    known = [{"prompt": row["prompt"], "completion": in_form_of(row["prompt"], row["worked_solution"])} for row in rows]
    write_json_lines(folder / "known.jsonl", known)
    training = {**TRAINING, "max_steps": 60, "learning_rate": 5.0e-3}
    Train(str(folder / "blank"), str(folder / "known.jsonl"), 0, training).run(Workspace(folder, StopRequests(folder)))
    value = AutoModelForTokenClassification.from_pretrained(folder / "model", num_labels=2)
    value.save_pretrained(folder / "value")
    words.save_pretrained(folder / "value")
    return SearchModels(folder / "model", folder / "value", folder / "value")


def rows_in(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()]


def same_weights(first: Path, second: Path) -> bool:
    one = load_file(first / "model.safetensors")
    two = load_file(second / "model.safetensors")
    return all(tensor.equal(two[name]) for name, tensor in one.items())


def test_each_round_goes_on_from_the_models_of_the_one_before(models: SearchModels, tmp_path: Path) -> None:
    rounds = loop_measured("loop by search", models, 0, SIZES, tmp_path)
    assert [len(one["greedy"]) for one in rounds] == [2, 2, 2]
    assert [one["solved"] for one in rounds[1:]] == [1.0, 1.0]
    for number, one in enumerate(rounds[1:], 1):
        place = tmp_path / f"round-{number}"
        answers = {row["prompt"][-1]["content"]: row["solution"] for row in problems_of(number)}
        for row in rows_in(place / "policy"):
            solution = answers[row["prompt"][-1]["content"]]
            assert row["completion"][-1]["content"].rstrip().endswith(f"#### {solution}")
        labels = [row["labels"] for row in rows_in(place / "value")]
        assert sum(own[0] for own in labels) == one["right_found"]
        assert all({*own} in ({0.0}, {1.0}) for own in labels)
    first = tmp_path / "round-1"
    second = tmp_path / "round-2"
    assert not same_weights(models.value, first / "value" / "model")
    assert not same_weights(first / "value" / "model", second / "value" / "model")
    after_first = SearchModels(first / "policy" / "model", first / "value" / "model", models.prm)
    cell = SearchCell(after_first, "train", SIZES.round_problems, 2000)
    found = solutions_found("loop by search", cell, SIZES)
    assert all(one.tokens <= SIZES.round_tokens for own in found for one in own)
    right = right_of_each(cell, found)
    policy = learnt_policy(after_first, cell, found, right, SIZES, tmp_path / "policy")
    assert same_weights(policy, second / "policy" / "model")
    value = learnt_value(after_first, cell, found, right, SIZES, tmp_path / "value")
    assert same_weights(value, second / "value" / "model")


def test_with_samples_the_policy_alone_learns(models: SearchModels, tmp_path: Path) -> None:
    sizes = SearchSizes(**{**vars(SIZES), "rounds": 1})
    start, after = loop_measured("loop by samples", models, 0, sizes, tmp_path)
    assert after["solved"] == 1.0
    assert start.keys() < after.keys()
    assert [one.name for one in (tmp_path / "round-1").iterdir()] == ["policy"]


def test_every_state_of_a_solution_has_its_outcome_as_label(models: SearchModels) -> None:
    cell = SearchCell(models, "train", 2, 1000)
    found = [
        [FoundSolution("1 + 1 = 2\n#### 2", 9), FoundSolution("\n", 10)],
        [FoundSolution("1\n2\n#### 3", 9), FoundSolution("#### 4", 12)],
    ]
    rows = value_rows(cell, found, [[True, False], [False, True]])
    assert [row["completions"] for row in rows] == [["1 + 1 = 2", "#### 2"], ["1", "2", "#### 3"], ["#### 4"]]
    assert [row["labels"] for row in rows] == [[1.0, 1.0], [0.0, 0.0, 0.0], [1.0]]
    assert [row["prompt"] for row in rows] == [cell.rows[place]["prompt"] for place in (0, 1, 1)]


def test_ranks_are_shares_of_pairs() -> None:
    values = [0.1, 0.9, 0.5, 0.5, 0.3]
    right = [True, False, True, False, False]
    own = [FoundSolution("", 0, value) for value in values]
    pairs = [(a, b) for a, good in zip(values, right) if good for b, bad in zip(values, right) if not bad]
    share = sum((a > b) + (a == b) / 2 for a, b in pairs) / len(pairs)
    assert ranked(own, right) == pytest.approx(share) == pytest.approx(0.25)
    assert ranked(own, [True] * 5) is None
    assert ranked(own, [False] * 5) is None
