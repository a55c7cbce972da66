"""Engines behind ``grpo_lab.turns.loop``: what TRL drives, asked for one turn of one trajectory at a time.

    ColocatedTurns   vLLM in this process: the main thread steps the engine while tools run in threads
    ServerTurns      a vLLM server: a request for each turn, over this rank's own HTTP session
    RoundTurns       no vLLM, or a team's ``_generate_single_turn``: TRL's own call, for all rows that are ready

They have the methods of ``turns.protocols.TurnEngine``: ``submit`` asks for a turn, ``collect`` returns those that are
done. The sampling settings are those that TRL would send: its own ``generate`` is called with a stand-in for the client
that records them (``KeepsSampling``).
"""

from __future__ import annotations

import contextlib
import functools
import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent import futures
from concurrent.futures import Future
from contextlib import AbstractContextManager
from typing import Any

import requests
from trl.generation.vllm_client import VLLMClient
from trl.generation.vllm_generation import VLLMGeneration

from grpo_lab.engines.generators import of_engine
from grpo_lab.engines.grouping import EngineFault
from grpo_lab.engines.vllm import talk
from grpo_lab.engines.vllm.token import token_of
from grpo_lab.threads import in_thread
from grpo_lab.trainer.generation.all_ranks import from_main
from grpo_lab.trainer.generation.rollout_ports import EnginePort
from grpo_lab.trainer.generation.server_across_ranks import NOTHING
from grpo_lab.trainer.generation.server_client import LabVLLMClient
from grpo_lab.trainer.generation.turns import Turns
from grpo_lab.trainer.settings.parse import ServerSettings
from grpo_lab.trainer.trl_bridge import replaced
from grpo_lab.turns.protocols import TurnTokens

#: Largest number of requests that a rank has at the server at the same time; further ones wait until one is answered.
AT_ONCE = 64

OnFault = Callable[[EngineFault], None] | None


class ColocatedTurns:
    """Generates turns by vLLM in this process. A context manager, which on exit aborts the requests still running.

    Args:
        llm: the engine, a ``GroupedEngine``.
        sampling: TRL's ``SamplingParams``.
        version: number of optimizer steps that the policy has taken.
    """

    in_rounds = False

    def __init__(self, llm: Any, sampling: Any, version: int) -> None:
        self.llm = llm
        self.sampling = sampling
        self.version = version
        self._keys: dict[str, int] = {}

    def __enter__(self) -> ColocatedTurns:
        return self

    def __exit__(self, *_: object) -> None:
        self.llm.llm_engine.abort_request(list(self._keys))
        self._keys = {}

    def submit(self, key: int, ids: list[int], room: int) -> None:
        from vllm.inputs.engine import tokens_input
        from vllm.sampling_params import RequestOutputKind

        sampling = self.sampling.clone()
        sampling.max_tokens = room
        sampling.min_tokens = min(sampling.min_tokens, room)
        sampling.output_kind = RequestOutputKind.FINAL_ONLY
        name = str(next(self.llm.request_counter))
        self._keys[name] = key
        self.llm.llm_engine.add_request(name, tokens_input(ids), sampling, lora_request=self.llm.adapter)

    def collect(self, wait: float) -> list[tuple[int, TurnTokens]]:
        """Let the engine make one step, and return the turns that it finished. Without requests, sleep for ``wait``
        seconds."""
        if not self._keys:
            time.sleep(wait)
            return []
        return [
            (self._keys.pop(output.request_id), self._turn(output))
            for output in self.llm.llm_engine.step()
            if output.finished
        ]

    def _turn(self, output: Any) -> TurnTokens:
        """Return a finished request's turn, with None for a log-prob that is NaN. The engine checks log-probs first:
        without a guard one that is not finite raises ``EngineFault``."""
        self.llm.checked([output])
        made = of_engine(output.outputs[0])
        logprobs: list[float | None] | None = None
        if made.logprobs is not None:
            logprobs = [None if math.isnan(value) else value for value in made.logprobs]
        return TurnTokens(made.ids, logprobs, self.version)


class TurnClient(LabVLLMClient):
    """A rank's own client of the server to which the main process has connected. It asks for one completion at a time.

    Args:
        settings: time limits and retries.
        base_url: the server's address.
        model: the name under which the server has the model, or the adapter's last version.
        sampling: keyword arguments of TRL's ``VLLMClient.generate``.
    """

    def __init__(self, settings: ServerSettings, base_url: str, model: str, sampling: Mapping[str, Any]) -> None:
        self.settings = settings
        self.base_url = base_url
        self.model = model
        self.sampling = dict(sampling)
        self.session = requests.Session()
        limits = {"timeout": settings.request_timeout, "retries": settings.retries, "backoff": settings.backoff}
        talk.bound_session(self.session, **limits)
        self._find_token()

    def _post(self, url: str, **arguments: Any) -> dict[str, Any]:
        """Send a POST request and return its answer. There is no watch over each request, since ``ServerTurns.collect``
        watches all of a rank's together."""
        answer = talk.answer_of(self.session, self.base_url, url, lambda: self.session.post(url, **arguments))
        with talk.read_as_vllms(self.base_url):
            talk.refuse_other_completions(arguments["json"], answer, self.base_url)
        return answer

    def turn(self, ids: list[int], room: int, scored: bool = True) -> tuple[list[int], list[float | None]]:
        """Return at most ``room`` tokens that follow ``ids``, and their log-probs in nats. Raise ``EngineFault`` if one
        is not finite. Without ``scored`` all log-probs are None; so an answer with NaN, which JSON cannot carry, can be
        generated again."""
        more = dict(self.sampling["generation_kwargs"] or {})
        more.pop("max_tokens", None)
        if "min_tokens" in more:
            more["min_tokens"] = min(more["min_tokens"], room)
        sampling = {**self.sampling, "n": 1, "max_tokens": room, "generation_kwargs": more}
        if not scored:
            sampling["logprobs"] = None
        with talk.read_as_vllms(self.base_url):
            answer = VLLMClient.generate(self, [ids], **sampling)
        made: list[int] = answer["completion_ids"][0]
        logprobs: Any = answer["logprobs"]
        if not scored or logprobs is None:
            return made, [None] * len(made)
        talk.check_answer(logprobs)
        return made, [position[0] for position in logprobs[0]]


class ServerTurns:
    """Generates turns by a vLLM server, up to ``AT_ONCE`` at a time. A context manager, which on exit closes the
    session; requests still running end by themselves.

    Args:
        client: this rank's client of the server.
        version: number of optimizer steps that the policy has taken.
        on_fault: called with the error for log-probs that are not finite; the turn is then generated again without
            log-probs. None: the error is raised.

    Attributes:
        faulty: whether an answer held a log-prob that is not finite, so that the server's cache may hold NaN.

    Raises:
        ServerGone: the server failed a request for good, or showed no sign of work for ``silence_timeout`` seconds.
    """

    in_rounds = False

    def __init__(self, client: TurnClient, version: int, on_fault: OnFault) -> None:
        self.client = client
        self.version = version
        self.on_fault = on_fault
        self.faulty = False
        self._coming: deque[tuple[int, list[int], int]] = deque()
        self._asked: dict[Future[Any], tuple[int, list[int], int]] = {}
        silence = client.settings.silence_timeout
        self._watch = talk.Watch(client.base_url, silence, "turns of trajectories", token_of(client.session))

    def __enter__(self) -> ServerTurns:
        return self

    def __exit__(self, *_: object) -> None:
        self._coming.clear()
        self.client.session.close()

    def submit(self, key: int, ids: list[int], room: int) -> None:
        if not self._asked:
            self._watch.moved()  # a server without requests is silent
        self._coming.append((key, ids, room))
        self._send()

    def _send(self) -> None:
        """Send requests that wait, as long as fewer than ``AT_ONCE`` are unanswered."""
        while self._coming and len(self._asked) < AT_ONCE:
            asked = self._coming.popleft()
            _, ids, room = asked
            self._asked[in_thread(functools.partial(self.client.turn, ids, room), talk.REQUEST)] = asked

    def collect(self, wait: float) -> list[tuple[int, TurnTokens]]:
        """Return the turns that the server has answered; wait at most ``wait`` seconds for the first."""
        answered = futures.wait(self._asked, wait, futures.FIRST_COMPLETED).done
        if not answered:
            self._watch.look()
            return []
        self._watch.moved()
        made = [self._turn(answer, *self._asked.pop(answer)) for answer in answered]
        self._send()
        return made

    def _turn(self, answer: Future[Any], key: int, ids: list[int], room: int) -> tuple[int, TurnTokens]:
        """Return the request's key and its turn, generated again without log-probs if one was not finite."""
        try:
            tokens, logprobs = answer.result()
        except EngineFault as fault:
            self.faulty = True
            if self.on_fault is None:
                raise
            self.on_fault(fault)
            tokens, logprobs = self.client.turn(ids, room, scored=False)
        return key, TurnTokens(tokens, logprobs, self.version)


class RoundTurns:
    """Generates turns by TRL's ``_generate_single_turn``: each ``collect`` asks for all turns that were submitted.

    Args:
        turns: asks TRL, with ranks in step.
        first: the first turns by key, which TRL has made already.
        version: number of optimizer steps that the policy has taken.
    """

    in_rounds = True

    def __init__(self, turns: Turns, first: dict[int, TurnTokens], version: int) -> None:
        self.turns = turns
        self.version = version
        self._first = first
        self._asked: dict[int, list[int]] = {}

    def submit(self, key: int, ids: list[int], room: int) -> None:
        self._asked[key] = ids

    def collect(self, wait: float) -> list[tuple[int, TurnTokens]]:
        made = {key: self._first.pop(key) for key in self._asked if key in self._first}
        drawn = {key: ids for key, ids in sorted(self._asked.items()) if key not in made}
        self._asked = {}
        if drawn:
            ids, logprobs = self.turns.ask(list(drawn.values()), None, {}, num_generations=1, has_tool_images=False)
            made |= zip(drawn, turns_of_trl(ids, logprobs, self.version), strict=True)
        return sorted(made.items())


def turns_of_trl(ids: Sequence[Sequence[int]], logprobs: Any, version: int) -> list[TurnTokens]:
    """Return the turns that TRL's own call has made: their tokens ``ids`` and ``logprobs`` of each token (None: the
    engine returned none)."""
    turns = []
    for row, scored in zip(ids, logprobs or [None] * len(ids), strict=True):
        turns.append(TurnTokens(list(row), scored and list(scored), version))
    return turns


class KeepsSampling:
    """Stands in for the client while TRL puts a request together: records the sampling settings and returns an empty
    answer."""

    def __init__(self) -> None:
        self.sampling: dict[str, Any] = {}

    def generate(self, prompts: list[list[int]], **sampling: Any) -> dict[str, Any]:
        self.sampling = sampling
        return dict(NOTHING)


def turn_client(generation: EnginePort, settings: ServerSettings, prompts: list[list[int]], group: int) -> TurnClient:
    """Return this rank's client of the run's server, with the sampling settings of TRL's request for ``prompts``, in
    groups of ``group``. Every rank calls this."""
    known: Any = None
    keeps = KeepsSampling()
    main: AbstractContextManager[None] = contextlib.nullcontext()
    if generation.accelerator.is_main_process:
        client = generation.vllm_client.client  # behind the guard of ``server_across_ranks.generate``
        known = (client.base_url, client.model)
        main = replaced(generation, "vllm_client", keeps)
    with main:
        VLLMGeneration.generate(generation, prompts, None, group)
    (base_url, model), sampling = from_main(generation.accelerator, (known, keeps.sampling))
    return TurnClient(settings, base_url, model, sampling)
