"""``generation_kwargs``: what passes is listed for each engine, and what makes wrong numbers is refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from grpo_lab import LabConfig
from grpo_lab.engines.vllm.sampling_keys import PASS

VLLM = {"use_vllm": True, "vllm_mode": "colocate"}
SERVER = {"use_vllm": True, "vllm_mode": "server"}


def config(folder: Path, **settings: Any) -> LabConfig:
    return LabConfig(str(folder), use_cpu=True, bf16=False, max_completion_length=16, **settings)


@pytest.mark.parametrize("engine", [VLLM, SERVER])
@pytest.mark.parametrize("correction", [True, False])
@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("logprobs", 2), ("logprobs", None), ("seed", 7), ("n", 2), ("max_tokens", 8), ("temperature", 0.5),
        ("temprature", 0.5), ("best_of", 4), ("max_new_tokens", 8), ("ignore_eos", True), ("logprob_token_ids", [3]),
        ("thinking_token_budget", 4), ("trace_decode_token_ids", [1, 2]), ("prompt_logprobs", 1),
    ],
)  # fmt: skip
def test_a_key_that_makes_wrong_numbers_is_refused_by_name(
    engine: dict[str, Any], correction: bool, key: str, value: Any, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=rf"`generation_kwargs\.{key}`"):
        config(tmp_path, **engine, vllm_importance_sampling_correction=correction, generation_kwargs={key: value})


@pytest.mark.parametrize(
    ("engine", "key", "value"),
    [
        (VLLM, "skip_clone", True),  # the engine's groups would share one n
        (SERVER, "prompt", "Hello"),
        (SERVER, "truncate_prompt_tokens", 3),
        (SERVER, "use_beam_search", True),
        (SERVER, "echo", True),
        (SERVER, "n", 1),  # a request of a server is a group
        ({}, "num_return_sequences", 2),
        ({}, "do_sample", False),
        ({}, "eos_token_id", 5),
        ({}, "forced_eos_token_id", 5),
        ({}, "temperature", 0.5),
        ({}, "max_tokens", 8),
        ({}, "repetition_penalti", 1.1),
    ],
)
def test_what_only_one_engine_would_do(engine: dict[str, Any], key: str, value: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=rf"`generation_kwargs\.{key}`"):
        config(tmp_path, **engine, generation_kwargs={key: value})


def test_a_misspelt_key_is_told_its_neighbour(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"SamplingParams(.|\n)*did you mean 'repetition_penalty'"):
        config(tmp_path, **VLLM, generation_kwargs={"repetition_penaltie": 1.1})
    with pytest.raises(ValueError, match="one of transformers' GenerationConfig; did you mean 'min_tokens'"):
        config(tmp_path, **VLLM, generation_kwargs={"min_new_tokens": 3})


def test_what_is_right_stays_allowed(tmp_path: Path) -> None:
    off = {"vllm_importance_sampling_correction": False}
    for engine in (VLLM, SERVER):
        config(tmp_path, **engine, generation_kwargs={"max_tokens": 16, "temperature": 1.0, "stop": ["</answer>"]})
        config(tmp_path, **engine, **off, generation_kwargs={"top_p": 0.9, "frequency_penalty": 0.1})
    config(tmp_path, generation_kwargs={"min_new_tokens": 3, "num_beams": 2, "suppress_tokens": [4]})
    config(tmp_path, generation_kwargs={"do_sample": True})  # as TRL sets it
    config(tmp_path, generation_kwargs={"max_new_tokens": 8})  # drop-in: TRL's own loss counts by masks
    LabConfig(
        str(tmp_path), use_cpu=True, bf16=False, max_completion_length=None, **VLLM, generation_kwargs={"max_tokens": 8}
    )


def test_two_lengths_beside_an_objective_are_refused_on_transformers(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"generation_kwargs\.max_new_tokens` is 8 and `max_completion_length` is 16"):
        config(tmp_path, objective="dr_grpo", generation_kwargs={"max_new_tokens": 8})


def test_stops_that_would_be_masked_as_truncated_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"generation_kwargs\.stop`(.|\n)*mask_truncated_completions"):
        config(tmp_path, **VLLM, mask_truncated_completions=True, generation_kwargs={"stop": ["</answer>"]})


@pytest.mark.parametrize("temperature", [0.001, 2.5])
def test_a_temperature_that_vllm_changes_silently_is_refused(temperature: float, tmp_path: Path) -> None:
    """Below 0.01 vLLM samples at 0.01 and says so in a log line only."""
    config(tmp_path, temperature=temperature)
    with pytest.raises(ValueError, match="`temperature` is"):
        config(tmp_path, **VLLM, temperature=temperature)


def test_every_key_of_transformers_is_one() -> None:
    """Named by its library: a key that is renamed there would pass here and be ignored."""
    from transformers import GenerationConfig

    assert set(PASS["transformers"]) <= set(vars(GenerationConfig()))


@pytest.mark.vllm
def test_every_key_of_vllm_is_one() -> None:
    """Of SamplingParams (an engine in this process) and of a completion request (a server)."""
    pytest.importorskip("vllm", reason="vLLM is not installed; `make setup-vllm` installs the CPU build")
    from vllm import SamplingParams
    from vllm.entrypoints.openai.completion.protocol import CompletionRequest

    assert set(PASS["colocate"]) <= set(SamplingParams.__struct_fields__)
    assert set(PASS["server"]) <= set(CompletionRequest.model_fields)
