"""Folding equal prompts into one request, with a stand-in for the engine's answer objects (the engine itself:
test_engine)."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass, field
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_lab.engines.grouping import EngineFault, GroupedEngine


@dataclass
class Parameters:
    n: int = 1
    seed: int | None = None

    def clone(self) -> Parameters:
        return copy.copy(self)


@dataclass
class RecordingEngine:
    """Answers each sample with [first prompt token, sample index]; remembers the requests."""

    logprob: float = -0.5
    requests: list[tuple[tuple[int, ...], int]] = field(default_factory=list)
    name: str = "engine"

    def generate(self, prompts: list[dict[str, Any]], sampling_params: Any, use_tqdm: bool) -> list[Any]:
        parameters = sampling_params if isinstance(sampling_params, list) else [sampling_params] * len(prompts)
        outputs = []
        for prompt, parameter in zip(prompts, parameters, strict=True):
            ids = prompt["prompt_token_ids"]
            self.requests.append((tuple(ids), parameter.n))
            samples = [self.sample(ids, index) for index in reversed(range(parameter.n))]
            outputs.append(SimpleNamespace(prompt_token_ids=ids, outputs=samples))
        return outputs

    def sample(self, ids: list[int], index: int) -> Any:
        tokens = [ids[0], index]
        logprobs = [{token: SimpleNamespace(logprob=self.logprob)} for token in tokens]
        return SimpleNamespace(index=index, token_ids=tokens, logprobs=logprobs)


def rows(*prompts: int) -> list[dict[str, Any]]:
    return [{"prompt_token_ids": [prompt]} for prompt in prompts]


def test_group_becomes_one_request_and_comes_back_row_by_row() -> None:
    engine = RecordingEngine()
    outputs = GroupedEngine(engine).generate(rows(7, 7, 7, 9, 9, 7), Parameters())
    assert engine.requests == [((7,), 3), ((9,), 2), ((7,), 1)]
    assert [output.prompt_token_ids for output in outputs] == [[7], [7], [7], [9], [9], [7]]
    assert [output.outputs[0].token_ids for output in outputs] == [[7, 0], [7, 1], [7, 2], [9, 0], [9, 1], [7, 0]]


@pytest.mark.parametrize("parameters", [Parameters(n=2), Parameters(seed=3)])
def test_requests_that_ask_for_samples_or_a_seed_are_passed_on(parameters: Parameters) -> None:
    engine = RecordingEngine()
    GroupedEngine(engine).generate(rows(7, 7), parameters)
    assert engine.requests == [((7,), parameters.n)] * 2


def test_rows_with_images_are_passed_on() -> None:
    engine = RecordingEngine()
    GroupedEngine(engine).generate([{"prompt_token_ids": [7], "multi_modal_data": {}}] * 2, Parameters())
    assert engine.requests == [((7,), 1)] * 2


@pytest.mark.parametrize("value", [math.nan, -math.inf])
def test_log_prob_that_is_no_number_is_a_fault(value: float) -> None:
    with pytest.raises(EngineFault, match="position 0"):
        GroupedEngine(RecordingEngine(logprob=value)).generate(rows(7), Parameters())


def test_lost_completion_is_a_fault() -> None:
    class Forgetful(RecordingEngine):
        def sample(self, ids: list[int], index: int) -> Any:
            return super().sample(ids, index)

        def generate(self, *args: Any, **kwargs: Any) -> list[Any]:
            outputs = super().generate(*args, **kwargs)
            outputs[0].outputs.pop()
            return outputs

    with pytest.raises(EngineFault, match="3 completions of a prompt, got 2"):
        GroupedEngine(Forgetful()).generate(rows(7, 7, 7), Parameters())


def test_other_attributes_are_the_engine_s_own() -> None:
    engine = RecordingEngine()
    assert GroupedEngine(engine).name == "engine"
    assert GroupedEngine(engine).llm is engine
    with pytest.raises(AttributeError):
        _ = GroupedEngine(engine).nothing


@given(st.lists(st.integers(0, 3)))
def test_runs_put_the_rows_back_together(values: list[int]) -> None:
    engine = RecordingEngine()
    outputs = GroupedEngine(engine).generate(rows(*values), Parameters())
    assert [output.prompt_token_ids for output in outputs] == [[value] for value in values]
    assert all(one[0] != other[0] for one, other in pairwise(engine.requests))
