"""A vLLM server as the trainer's client sees it, in this process: the client is ours, what lies behind HTTP is a copy
of the model that samples by itself, knows which weights it holds, and sees who talks to it when.

Every completion is drawn from a generator of its own (prompt, place in the group), as with vLLM's ``seed``: with equal
weights the same prompt has the same completions, whoever asks and when.
"""

from __future__ import annotations

import contextlib
import copy
import threading
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from grpo_lab.trainer.generation import server
from grpo_lab.trainer.generation.background import Background
from grpo_lab.trainer.generation.server_client import LabVLLMClient


@dataclass
class Engine:
    """``said``: what was asked of it, in order: ``sync n``, ``generate n``, ``done n``, ``probe n``; n: the weights."""

    model: Any
    syncs: int = 0
    said: list[str] = field(default_factory=list)
    #: tokens of prompt and completion → syncs before the draw, and the log-probs
    drawn: dict[tuple[int, ...], tuple[int, list[float]]] = field(default_factory=dict)
    #: the background's generation number n waits here, where it is set
    gates: dict[int, threading.Event] = field(default_factory=dict)
    generations: int = 0
    busy: bool = False
    faults: dict[str, Exception] = field(default_factory=dict)

    def load(self, named: Iterator[tuple[str, torch.Tensor]]) -> None:
        assert not self.busy, "weights were sent into a running batch"
        sent = dict(named)
        self.syncs += 1
        self.said.append(f"sync {self.syncs}")
        self.fail(f"sync {self.syncs}")
        with torch.no_grad():
            for name, weight in self.model.named_parameters():
                weight.copy_(sent[name])

    def fail(self, place: str) -> None:
        if place in self.faults:
            raise self.faults.pop(place)

    @torch.no_grad()
    def generate(self, prompts: list[list[int]], n: int, max_tokens: int, **asked: Any) -> dict[str, Any]:
        assert not self.busy, "two requests at once"
        self.busy, probe = True, n == 1
        try:
            return self._generate(prompts, n, max_tokens, "probe" if probe else "generate")
        finally:
            self.busy = False

    def _generate(self, prompts: list[list[int]], n: int, max_tokens: int, kind: str) -> dict[str, Any]:
        held = self.syncs
        self.said.append(f"{kind} {held}")
        if kind == "generate":
            self.generations += 1
            assert self.gates.get(self.generations, _OPEN).wait(300)
            self.fail(f"generate {self.generations}")
        ids, logps = [], []
        for prompt in prompts:
            for place in range(n):
                row, scores = self._sample(prompt, place, max_tokens)
                ids.append(row)
                logps.append([[score] for score in scores])
                self.drawn[*prompt, -1, *row] = held, scores
        assert held == self.syncs
        self.said.append(f"done {held}")
        token_ids = [[[token] for token in row] for row in ids]
        return {"prompt_ids": prompts, "completion_ids": ids, "logprobs": logps, "logprob_token_ids": token_ids}

    def _sample(self, prompt: list[int], place: int, max_tokens: int) -> tuple[list[int], list[float]]:
        own = torch.Generator().manual_seed(zlib.crc32(str((prompt, place)).encode()))
        length = 1 + int(torch.randint(max_tokens, (1,), generator=own))  # lengths differ, whatever the model writes
        row, scores = list(prompt), []
        for _ in range(length):
            logps = self.model(torch.tensor([row])).logits[0, -1].double().log_softmax(-1)
            row.append(int(torch.multinomial(logps.exp(), 1, generator=own)))
            scores.append(float(logps[row[-1]]))
        return row[len(prompt) :], scores


_OPEN = threading.Event()
_OPEN.set()


class StandIn(LabVLLMClient):
    """The client without HTTP; what waits, keeps and hands over answers is the real one's."""

    engine: Engine

    def __init__(self, settings: Any, **_: Any) -> None:
        self.settings, self.background, self.base_url = settings, Background(), "http://stand-in"
        self.info: dict[str, Any] = {
            "model_config": {"max_model_len": 256, "dtype": "torch.float32", "logprobs_mode": "processed_logprobs"},
            "cache_config": {"block_size": 16},
        }
        self.courier = SimpleNamespace(push=self.engine.load)  # type: ignore[assignment]

    def get_server_info(self) -> dict[str, Any]:
        return self.info

    def open_way(self, device: torch.device, lora_rank: int | None = None) -> None:
        self.way = "shared_memory"

    def reset_prefix_cache(self) -> None:
        pass

    def wait(self, limit: float) -> None:
        self.engine.said.append("wait")

    def _drawn(self, prompts: list[list[int]], **asked: Any) -> dict[str, Any]:
        assert torch.is_inference_mode_enabled() is False
        wanted = {name: asked[name] for name in ("n", "max_tokens")}
        return self.engine.generate(prompts, **wanted)


@contextlib.contextmanager
def stand_in(model: Any) -> Iterator[Engine]:
    """Inside, trainers in server mode talk to an engine that holds a copy of ``model``."""
    engine = Engine(copy.deepcopy(model).eval())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StandIn, "engine", engine, raising=False)
        patch.setattr(server, "LabVLLMClient", StandIn)
        patch.setattr(server, "check_same_model", lambda *_: None)
        patch.setattr("trl.generation.vllm_generation.is_vllm_available", lambda *_, **__: True)
        yield engine
