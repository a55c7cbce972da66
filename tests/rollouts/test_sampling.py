"""Completions for curation by a real vLLM engine: counts, seeds, agreement with transformers, `curate` with
`use_vllm`."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from grpo_lab.engines.generators import TransformersGenerator, VllmGenerator, render_prompt
from grpo_lab.pipelines.curate import curate, curation_recipe_from
from grpo_lab.recipe.sections import SamplingSettings
from grpo_lab.stages.sample import ModelGenerator
from rollouts.checkpoints import servable

pytestmark = [pytest.mark.slow, pytest.mark.vllm]

ENGINE = {"dtype": "float32", "kv_cache_gib": 0.125, "max_model_len": 256}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(servable(tmp_path_factory.mktemp("sampling") / "qwen2", max_positions=256, initializer_range=0.2))


def settings(**changes: Any) -> SamplingSettings:
    return SamplingSettings(**{"max_completion_length": 12, "use_cpu": True, "seed": 5, **changes})


def test_both_engines_serve_curation(vllm_or_skip: None, model: Path, tmp_path: Path) -> None:
    prompts = ["Ann has 3 stamps.", [{"role": "user", "content": "How many?"}], "Ann has 3 stamps."]
    ours = ModelGenerator(str(model), settings(use_vllm=True, engine=ENGINE))
    reference = ModelGenerator(str(model), settings())
    assert ours.context == reference.context == 256
    ids = [render_prompt(prompt, reference.tokenizer).ids for prompt in prompts]
    greedy = {"n": 1, "temperature": 0.0, "max_new_tokens": 12, "seed": 0}
    assert isinstance(ours.generate, VllmGenerator)
    assert isinstance(reference.generate, TransformersGenerator)
    expected = reference.generate(ids, **greedy)
    assert ours.generate(ids, **greedy) == expected
    scored = replace(ours.generate, logprobs=True)(ids, **greedy)
    assert [replace(one, logprobs=None) for (one,) in scored] == [one for (one,) in expected]
    assert all(len(one.logprobs or []) == len(one.ids) and max(one.logprobs or [0]) <= 0 for (one,) in scored)

    whole = expected[0][0].ids
    stop = whole[3]  # a completion ends with the first of `more_stops`
    cut = [replace(one, more_stops=[stop])(ids, **greedy) for one in (ours.generate, reference.generate)]
    assert cut[0] == cut[1]
    assert cut[0][0][0].ids == whole[: whole.index(stop) + 1]
    assert cut[0][0][0].ended

    first = ours(prompts, 4)
    assert first == ours(prompts, 4)  # the seed decides
    assert ours.made == 24
    assert (
        len({json.dumps(completion) for completion in [*first[0], *first[2]]}) > 4
    )  # the same prompt twice, other samples
    assert [isinstance(group[0], str) for group in first] == [True, False, True]


def test_curate_with_vllm(vllm_or_skip: None, model: Path, tmp_path: Path) -> None:
    written = {
        "model": {"path": str(model)},
        "data": {"loader": "word_problems", "n": 12, "template": "chat", "largest": 20, "steps": [1, 2]},
        "reward": "training.curation_rewards:by_digest",
        "n_samples": 4,
        "max_completion_length": 12,
        "use_vllm": True,
        "engine": ENGINE,
        "output_dir": str(tmp_path / "out"),
        "filters": {"band": {}, "guessable": {"tries": 2, "max_new_tokens": 4}},
    }
    done = curate(curation_recipe_from(written))
    header, *lines = (done.folder / "pass_rates.jsonl").read_text().splitlines()
    assert json.loads(header)["settings"]["engine"] == {"vllm": ENGINE}
    assert len(lines) == 12
    assert all(len(json.loads(line)["completions"]) == 4 for line in lines)
