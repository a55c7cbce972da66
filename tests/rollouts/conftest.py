"""Real vLLM engines for the tests of this folder; skipped with a reason where vLLM cannot be had."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import forked
from ports import free_port
from rollouts.checkpoints import random_checkpoint, widened_stories
from rollouts.forked_server import MODULES, forking


def pytest_collection_finish(session: pytest.Session) -> None:
    """Whatever is forked first, servers find vLLM imported."""
    if any(item.get_closest_marker("vllm") for item in session.items):
        forked.preload(MODULES)


@pytest.fixture(scope="session", autouse=True)
def tokens_of_tests(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Servers of the tests keep their tokens here, and not among the user's."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
        patch.delenv("GRPO_LAB_SERVER_TOKEN", raising=False)
        yield


@pytest.fixture(scope="module", autouse=True)
def port_of_worker() -> Iterator[None]:
    """TRL takes 29500 for an engine in the process where it is free at that moment, and so would another worker."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MASTER_PORT", str(free_port()))
        yield


@pytest.fixture(scope="module", autouse=True)
def nothing_is_compiled(request: pytest.FixtureRequest) -> Iterator[None]:
    """vLLM compiles its sampler in every process that samples on a CPU: three seconds of a core."""
    with pytest.MonkeyPatch.context() as patch:
        if request.node.get_closest_marker("vllm"):
            patch.setenv("TORCHDYNAMO_DISABLE", "1")
        yield


@pytest.fixture(scope="session", autouse=True)
def forked_servers() -> Iterator[None]:
    """`Server` forks its server from a process that has imported vLLM."""
    if importlib.util.find_spec("vllm") is None:
        yield
        return
    from grpo_lab.engines.vllm import server

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(server, "subprocess", forking())
        yield


@pytest.fixture(scope="session")
def vllm_or_skip() -> None:
    """Skip where vLLM is not installed."""
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("vLLM is not installed: run `make setup-vllm` (CPU) or `pip install 'grpo_lab[vllm]'` (GPU)")


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Name -> folder: "qwen2-tied", "qwen3-untied", "llama-tied", ..., or "stories" (skips without the real data)."""
    made: dict[str, Path] = {}

    def folder(name: str) -> Path:
        if name not in made:
            path = tmp_path_factory.mktemp("checkpoints") / name
            if name == "stories":
                if widened_stories(path) is None:
                    pytest.skip("real data not found; set GRPO_LAB_DATA to the folder that holds models/stories260K")
            else:
                architecture, tied = name.split("-")
                random_checkpoint(path, architecture, tied=tied == "tied")
            made[name] = path
        return made[name]

    return folder


@pytest.fixture(scope="module")
def tiny() -> tuple[Any, Any]:
    """(model, tokenizer) of the trainings with the stand-in engine."""
    from grpo_lab.testing import tiny_model

    return tiny_model("qwen2", hidden_size=32, num_heads=2, num_layers=2, initializer_range=0.1)


@pytest.fixture(scope="module")
def saved(tiny: tuple[Any, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of both, for a training in a process of its own."""
    folder = tmp_path_factory.mktemp("saved") / "model"
    for part in tiny:
        part.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def start_engine(vllm_or_skip: None, checkpoint: Callable[[str], Path]) -> Callable[..., Any]:
    """(checkpoint name, dtype, **options) -> (GroupedEngine in this process, the trainer's model)."""

    def start(name: str, dtype: str = "float32", **options: Any) -> tuple[Any, Any]:
        import torch
        from transformers import AutoModelForCausalLM

        from grpo_lab.engines.vllm.engine import EngineOptions, engine_factory

        folder = checkpoint(name)
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype))
        settings = EngineOptions(kv_cache_gib=0.125, max_model_len=256, **options)
        engine = engine_factory(settings, trainer_dtype=model.dtype)(
            model=str(folder), logprobs_mode="processed_logprobs", max_num_seqs=64, seed=0
        )
        return engine, model

    return start
