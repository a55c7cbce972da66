"""A vLLM server as the trainer's client sees it, in this process: the client is ours, what lies behind HTTP is a copy
of the model that samples by itself, knows which weights it holds, and sees who talks to it when.

Every completion is drawn from a generator of its own (prompt, place in the group), as with vLLM's ``seed``: with equal
weights the same prompt has the same completions, whoever asks and when. Where ``stop`` is set, also in whatever pieces
it is asked: each token is drawn by what stands before it.
"""

from __future__ import annotations

import contextlib
import copy
import threading
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from grpo_lab.trainer.generation import server_across_ranks
from grpo_lab.trainer.generation.prompt_fit import refuse_long
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
    #: whether the end token follows these tokens; None: completions have lengths of their own, and no end token
    stop: Callable[[tuple[int, ...]], bool] | None = None
    end: int = 0
    context: int = 256
    #: completions end after so many tokens at the latest
    longest: int = 1 << 30
    #: the trainer's step, and what it was at each sync
    step: Callable[[], int] = lambda: -1
    synced_at: list[int] = field(default_factory=list)
    #: with ``stop``: what was asked for and drawn, in order: (tokens before, tokens, log-probs, syncs before the draw)
    segments: list[tuple[tuple[int, ...], tuple[int, ...], list[float], int]] = field(default_factory=list)

    def load(self, named: Iterator[tuple[str, torch.Tensor]]) -> None:
        assert not self.busy, "weights were sent into a running batch"
        sent = dict(named)
        self.syncs += 1
        self.synced_at.append(self.step())
        self.said.append(f"sync {self.syncs}")
        self.fail(f"sync {self.syncs}")
        with torch.no_grad():
            for name, weight in self.model.named_parameters():
                weight.copy_(sent[name])

    def fail(self, place: str) -> None:
        if place in self.faults:
            raise self.faults.pop(place)

    @torch.no_grad()
    def generate(self, prompts: list[list[int]], n: int, max_tokens: int | None, **asked: Any) -> dict[str, Any]:
        assert not self.busy, "two requests at once"
        self.busy, probe = True, "repetition_penalty" not in asked  # the client's own request says no more than it must
        try:
            return self._generate(prompts, n, max_tokens, "probe" if probe else "generate")
        finally:
            self.busy = False

    def _generate(self, prompts: list[list[int]], n: int, max_tokens: int | None, kind: str) -> dict[str, Any]:
        held = self.syncs
        self.said.append(f"{kind} {held}")
        if kind == "generate":
            self.generations += 1
            assert self.gates.get(self.generations, _OPEN).wait(300)
            self.fail(f"generate {self.generations}")
        ids, logps, places = [], [], Counter[tuple[int, ...]]()
        for prompt in prompts:
            most = self.context - len(prompt) if max_tokens is None else max_tokens
            for _ in range(n):
                place, places[tuple(prompt)] = places[tuple(prompt)], places[tuple(prompt)] + 1
                if self.stop is not None and kind == "generate":
                    row, scores = self._follow(prompt, place, most)
                    self.segments.append((tuple(prompt), tuple(row), scores, held))
                else:
                    row, scores = self._sample(prompt, place, most)
                ids.append(row)
                logps.append([[score] for score in scores])
                self.drawn[*prompt, -1, *row] = held, scores
        assert held == self.syncs
        self.said.append(f"done {held}")
        token_ids = [[[token] for token in row] for row in ids]
        return {"prompt_ids": prompts, "completion_ids": ids, "logprobs": logps, "logprob_token_ids": token_ids}

    def _sample(self, prompt: list[int], place: int, max_tokens: int) -> tuple[list[int], list[float]]:
        own = torch.Generator().manual_seed(zlib.crc32(str((prompt, place)).encode()))
        longest = min(max_tokens, self.longest)
        length = 1 + int(torch.randint(longest, (1,), generator=own))  # lengths differ, whatever the model writes
        row, scores = list(prompt), []
        for _ in range(length):
            logps = self.model(torch.tensor([row])).logits[0, -1].double().log_softmax(-1)
            row.append(int(torch.multinomial(logps.exp(), 1, generator=own)))
            scores.append(float(logps[row[-1]]))
        return row[len(prompt) :], scores

    def _follow(self, prompt: list[int], place: int, max_tokens: int) -> tuple[list[int], list[float]]:
        """``place``: among the rows of a request that begin alike."""
        assert self.stop is not None
        row, scores = list(prompt), []
        while len(scores) < max_tokens and row[-1] != self.end:
            own = torch.Generator().manual_seed(zlib.crc32(str((row, 0 if scores else place)).encode()))
            logps = self.model(torch.tensor([row])).logits[0, -1].double().log_softmax(-1)
            chances = logps.exp()
            chances[self.end] = 0.0
            token = self.end if self.stop(tuple(row)) else int(torch.multinomial(chances, 1, generator=own))
            row.append(token)
            scores.append(float(logps[token]))
        return row[len(prompt) :], scores


def ends_at_random(chance: float) -> Callable[[tuple[int, ...]], bool]:
    """A ``stop`` that a hash of the tokens decides: lengths are geometric, with mean 1 / ``chance``."""
    return lambda tokens: zlib.crc32(str((tokens, "end")).encode()) < chance * 2**32


_OPEN = threading.Event()
_OPEN.set()


class StandIn(LabVLLMClient):
    """The client without HTTP; what waits, keeps and hands over answers is the real one's."""

    engine: Engine

    def __init__(self, settings: Any, **_: Any) -> None:
        self.settings, self.base_url = settings, "http://stand-in"
        self.info: dict[str, Any] = {
            "model_config": {
                "max_model_len": self.engine.context,
                "dtype": "torch.float32",
                "logprobs_mode": "processed_logprobs",
            },
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
        refuse_long(prompts, self.context, asked.get("max_tokens") or 1, self.decode)
        wanted = {name: asked[name] for name in ("n", "max_tokens", "repetition_penalty") if name in asked}
        return self.engine.generate(prompts, **wanted)

    def generate_unscored(self, prompts: list[list[int]], **asked: Any) -> dict[str, Any]:
        answer = self._drawn(prompts, **asked)
        return {**answer, "logprobs": [[[None] for _ in row] for row in answer["completion_ids"]]}


@contextlib.contextmanager
def stand_in(model: Any) -> Iterator[Engine]:
    """Inside, trainers in server mode talk to an engine that holds a copy of ``model``."""
    engine = Engine(copy.deepcopy(model).eval())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StandIn, "engine", engine, raising=False)
        patch.setattr(server_across_ranks, "LabVLLMClient", StandIn)
        patch.setattr(server_across_ranks, "check_same_model", lambda *_: None)
        patch.setattr("grpo_lab.trainer.generation.trl_engine.refuse_without_engine", lambda *_, **__: None)
        patch.setattr("trl.generation.vllm_generation.is_vllm_available", lambda *_, **__: True)
        yield engine
