"""`vllm_enable_sleep_mode`: the sync is proven on an engine that TRL has put to sleep, and it sleeps again after it.

vLLM's sleep needs a GPU's allocator, so the engine is a stand-in behind vLLM's `LLM`, with what it hands back; all that
drives it is TRL's own. Its sleep of level 2 drops the weights, and it refuses what a sleeping engine cannot do.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch

pytest.importorskip("vllm", reason="vLLM is not installed; `make setup-vllm` installs the CPU build")

from transformers import AutoModelForCausalLM
from trl.trainer import grpo_trainer
from vllm import SamplingParams
from vllm.logprobs import Logprob
from vllm.outputs import CompletionOutput

from grpo_lab import LabTrainer
from grpo_lab.engines.grouping import GroupedEngine
from grpo_lab.engines.weights.sync import WeightSyncError
from grpo_lab.trainer.generation import trajectories
from grpo_lab.trainer.generation import trl_engine as engine
from grpo_lab.turns.protocols import TurnTokens
from rollouts import trajectory_runs
from rollouts.server_runs import logged
from rollouts.test_lab_trainer_vllm import build

pytestmark = pytest.mark.vllm

STEPS = 3
#: what a generation of TRL's does with an engine that sleeps, the weights being those of a new step
WHOLE = ["wake weights", "load", "reset cache", "wake kv_cache", "generate", "sleep 2"]


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    """TRL sets torch.distributed's variables for an engine; without a real one the next trainer would join by them."""
    with patch.dict(os.environ):
        yield


class Sleeper:
    """``LLM`` around a model of transformers. ``said``: what was asked of it, in order (a stream of weights once)."""

    def __init__(self, spoilt: Callable[[str], bool] = lambda name: False, context: int = 128, **asked: Any) -> None:
        assert asked["enable_sleep_mode"] is True
        self.model = AutoModelForCausalLM.from_pretrained(asked["model"], dtype=torch.float32).eval()
        self.model.load_weights = self.load  # type: ignore[assignment]
        self.spoilt, self.said, self.asleep = spoilt, list[str](), set[str]()
        runner = SimpleNamespace(model=self.model, get_model=lambda: self.model)
        self.llm_engine = SimpleNamespace(
            model_executor=SimpleNamespace(driver_worker=SimpleNamespace(model_runner=runner)),
            model_config=SimpleNamespace(max_model_len=context, dtype=torch.float32),
            vllm_config=SimpleNamespace(cache_config=SimpleNamespace(block_size=32)),
        )

    @torch.no_grad()
    def sleep(self, level: int) -> None:
        assert not self.asleep, f"asleep already: {self.asleep}"
        self.said.append(f"sleep {level}")
        self.asleep = {"weights", "kv_cache"}
        for weight in self.model.parameters():
            weight.fill_(torch.nan)

    def wake_up(self, tags: list[str]) -> None:
        assert set(tags) <= self.asleep, f"{tags} is awake already: its memory would be mapped twice"
        self.said += [f"wake {tag}" for tag in tags]
        self.asleep -= set(tags)

    @torch.no_grad()
    def load(self, named: Iterable[tuple[str, torch.Tensor]]) -> None:
        assert "weights" not in self.asleep, "weights were written into memory that was given back"
        own = dict(self.model.named_parameters())
        for name, tensor in named:
            own[name].copy_(1.5 * tensor if self.spoilt(name) else tensor)
        if self.said[-1] != "load":
            self.said.append("load")

    def reset_prefix_cache(self) -> bool:
        self.said.append("reset cache")
        return True

    @torch.no_grad()
    def generate(self, requests: list[Any], sampling_params: Any, use_tqdm: bool) -> list[Any]:
        assert not self.asleep, f"asked an engine that sleeps, which would never answer: {self.asleep}"
        self.said.append("generate")
        asked = sampling_params if isinstance(sampling_params, list) else [sampling_params] * len(requests)
        ids = [list(request["prompt_token_ids"]) for request in requests]
        drawn = [[self._drawn(row, one.max_tokens, place) for place in range(one.n)] for row, one in zip(ids, asked)]
        return [SimpleNamespace(prompt_token_ids=row, outputs=outputs) for row, outputs in zip(ids, drawn)]

    def _drawn(self, prompt: list[int], tokens: int, place: int) -> CompletionOutput:
        row, scores = list(prompt), []
        for _ in range(tokens):
            logps = self.model(torch.tensor([row])).logits[0, -1].log_softmax(-1)
            row.append(int(torch.multinomial(logps.exp(), 1)))
            scores.append({row[-1]: Logprob(logprob=float(logps[row[-1]]), rank=1)})
        return CompletionOutput(place, "", row[len(prompt) :], None, scores, finish_reason="length")


def sleeping(
    folder: Path, monkeypatch: pytest.MonkeyPatch, verify_every: int = 1, **asked: Any
) -> tuple[LabTrainer, Sleeper]:
    monkeypatch.setattr(
        engine, "engine_factory", lambda *_, **__: lambda **given: GroupedEngine(Sleeper(**asked, **given))
    )
    changes = {"rollout": {"verify_every": verify_every}, "max_steps": STEPS, "max_completion_length": 4}
    trainer = build(folder, "qwen2", tie=True, vllm_enable_sleep_mode=True, **changes)
    return trainer, trainer.vllm_generation.llm.llm


def test_every_sync_is_proven_and_the_engine_sleeps_between_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer, sleeper = sleeping(tmp_path, monkeypatch)
    assert sleeper.said == ["sleep 2"]
    trainer.train()
    gaps = [gap for gap in logged(trainer.state.log_history, "rollout/sync_gap") if gap is not None]
    assert len(gaps) == STEPS
    assert max(gaps) < 1e-4  # `proof.TOLERANCE` of float32
    assert sleeper.said[1:] == 2 * STEPS * WHOLE  # a generation, then its proof
    assert trainer.vllm_generation._llm_weights_sleeping


def test_without_a_proof_the_engine_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer, sleeper = sleeping(tmp_path, monkeypatch, verify_every=0)
    trainer.train()
    assert sleeper.said[1:] == STEPS * WHOLE


def test_weights_that_arrive_wrong_are_caught_and_the_engine_sleeps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer, sleeper = sleeping(
        tmp_path, monkeypatch, spoilt=lambda name: name.endswith("layers.1.mlp.down_proj.weight")
    )
    with pytest.raises(WeightSyncError, match=r"1 tensors differ; most:\n  model.layers.1.mlp.down_proj.weight"):
        trainer.train()
    assert sleeper.said[1:] == 2 * WHOLE
    assert sleeper.asleep == {"weights", "kv_cache"}
    assert trainer.vllm_generation._llm_weights_sleeping
    assert trainer.model.training


class AwakeTurns:
    """In the place of ``ColocatedTurns``: whole turns from ``Sleeper``, which refuses to be asked while it sleeps."""

    in_rounds = False

    def __init__(self, llm: Any, sampling: Any, version: int) -> None:
        self.llm = llm
        self.version = version
        self.asked: dict[int, list[int]] = {}

    def __enter__(self) -> AwakeTurns:
        return self

    def __exit__(self, *_: object) -> None:
        assert not self.llm.llm.asleep

    def submit(self, key: int, ids: list[int], room: int) -> None:
        self.asked[key] = ids

    def collect(self, wait: float) -> list[tuple[int, TurnTokens]]:
        requests = [{"prompt_token_ids": ids} for ids in self.asked.values()]
        outputs = self.llm.llm.generate(requests, SamplingParams(n=1, max_tokens=4), use_tqdm=False)
        keys = list(self.asked)
        self.asked = {}
        return [
            (key, TurnTokens(list(output.outputs[0].token_ids), None, self.version))
            for key, output in zip(keys, outputs, strict=True)
        ]


def test_turns_with_tools_are_written_by_an_engine_that_is_awake(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is woken once for all turns of a batch, and sleeps after them."""
    monkeypatch.setattr(
        engine, "engine_factory", lambda *_, **__: lambda **given: GroupedEngine(Sleeper(context=900, **given))
    )
    monkeypatch.setattr(trajectories, "ColocatedTurns", AwakeTurns)
    monkeypatch.setattr(grpo_trainer, "parse_response", trajectory_runs.parsed)
    model = trajectory_runs.saved_model(tmp_path / "model")
    changes = {"vllm_mode": "colocate", "vllm_enable_sleep_mode": True, "max_tool_calling_iterations": 2}
    trainer = trajectory_runs.build(model, tmp_path / "out", {}, {}, **changes)
    trainer.train()
    said = trainer.vllm_generation.llm.llm.said
    once = [word for word, before in zip(said, [None, *said[:-1]], strict=True) if word != before]
    assert once[1:] == 2 * 2 * WHOLE
    assert said.count("generate") > once.count("generate")  # several turns while it is awake
