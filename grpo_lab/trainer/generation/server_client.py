"""TRL's client of a vLLM server, with waits that end, errors that say what happened, and two ways for the weights.

    nccl            trainer and server on GPUs: TRL's own transfer, unchanged
    shared_memory   no NCCL between them (a CPU on either side, or one GPU for both): safetensors in /dev/shm and the
                    server's own reload (``engines/vllm/worker.py``), on one machine

Which one is settled once, before the first step, by the devices of both sides and by what the server says about itself.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from urllib.parse import urlparse

import torch
from trl.generation.vllm_client import VLLMClient

from grpo_lab.engines.grouping import EngineFault
from grpo_lab.engines.vllm.server import WORKER_EXTENSION
from grpo_lab.engines.vllm.talk import (
    CONNECT_TIMEOUT,
    NAN_ADVICE,
    ServerGone,
    bound_session,
    check_answer,
    post_json,
    read_as_vllms,
    refusal,
    refuse_other_completions,
    server_errors,
    wait_until_ready,
    watched,
)
from grpo_lab.engines.vllm.token import Bearer, of_trainer, token_of
from grpo_lab.engines.vllm.worker import WeightCourier
from grpo_lab.engines.weights.proof import Probe, TensorDifference
from grpo_lab.engines.weights.sync import WeightSyncError
from grpo_lab.trainer.generation.prompt_fit import refuse_long
from grpo_lab.trainer.settings.parse import ServerSettings

#: requests that may take as long as a generation takes
GENERATIONS = ("/v1/completions", "/inference/v1/generate", "/v1/chat/completions")
LOOPBACK = ("127.0.0.1", "localhost", "0.0.0.0", "::1")


def weight_way(chosen: str, trainer: torch.device, server: Mapping[str, Any], url: str) -> str:
    """``nccl`` or ``shared_memory``. ``server``: its ``vllm_config`` (``/server_info``).

    Raises ``ValueError`` where the way that is due cannot be gone, naming what the server lacks.
    """
    server_device = str((server.get("device_config") or {}).get("device", "unknown")).partition(":")[0]
    gpus = trainer.type == "cuda" and server_device == "cuda"
    way = ("nccl" if gpus else "shared_memory") if chosen == "auto" else chosen
    sides = f"the trainer is on {trainer.type}, the vLLM server at {url} on {server_device}"
    if way == "nccl":
        if not gpus:
            raise ValueError(f"`rollout.server.weights: nccl` needs a GPU on both sides; {sides}: use shared_memory")
        if server.get("weight_transfer_config") is None:
            raise ValueError(
                f"{sides}, so the weights go over NCCL, but the server has no weight-transfer engine: start it with "
                """`grpo-lab serve`, or add --weight-transfer-config '{"backend": "nccl"}' to `vllm serve`"""
            )
        return way
    if urlparse(url).hostname not in LOOPBACK:
        raise ValueError(
            f"{sides}, so the weights go through shared memory, but the server is not on this machine: run it at "
            "127.0.0.1, or train on a GPU with a server on GPUs"
        )
    extension = (server.get("parallel_config") or {}).get("worker_extension_cls")
    if extension != WORKER_EXTENSION:
        raise ValueError(
            f"{sides}, so the weights go through shared memory, but the server cannot read them (its worker "
            "extension is "
            f"{extension!r}): start it with `grpo-lab serve --model …`"
        )
    return way


class RequestRefused(ValueError):
    """The server answered that it will not do what it was asked for."""


class LabVLLMClient(VLLMClient):  # type: ignore[misc]
    """``VLLMClient`` whose calls end in time and fail with ``ServerGone``, ``EngineFault`` or ``WeightSyncError``."""

    def __init__(self, settings: ServerSettings, **arguments: Any) -> None:
        self.settings = settings
        super().__init__(**arguments)
        self.info = self.get_server_info()
        self.courier = WeightCourier(functools.partial(post_json, self.session, self.base_url))
        self.way = ""  # settled by open_way
        self.decode: Callable[[list[int]], str] | None = None  # the trainer's, to name a prompt by its text
        self.meet: Callable[[], None] = lambda: None  # set by server.connect: is it this model
        self.faulty = False  # a log-prob was not finite, so pages of the server's cache may hold NaN

    def check_server(self, total_timeout: float = 0.0, retry_interval: float = 2.0) -> None:
        """TRL's constructor calls this first; its own waits for ever where the port is open and nobody answers."""
        limit = min(self.settings.request_timeout, self.settings.silence_timeout)
        bound_session(self.session, timeout=limit, retries=self.settings.retries, backoff=self.settings.backoff)
        wait_until_ready(self.base_url, total_timeout, token=self._find_token)

    def wait(self, limit: float) -> None:
        """Until the server answers that was lost (``wait_until_ready``)."""
        wait_until_ready(self.base_url, limit, token=self._find_token, setting="rollout.server.return_timeout")

    def _find_token(self) -> str | None:
        """The server's token, for every request from here on; None for a server of somebody else's."""
        token = of_trainer(self.base_url, self.settings.token_file)
        self.session.auth = None if token is None else Bearer(token)
        return token

    @property
    def token(self) -> str | None:
        """What requests of this client carry."""
        return token_of(self.session)

    def _get(self, url: str, **arguments: Any) -> dict[str, Any]:
        with server_errors(self.base_url, self.token):
            response = self.session.get(url, **arguments)
        return self._read(url, response)

    def _read(self, url: str, response: Any) -> dict[str, Any]:
        """A response as JSON; what is wrong with one that is no success."""
        if response.status_code == 200:
            with read_as_vllms(self.base_url):
                return dict(response.json())
        said = f"{url} answered {response.status_code}: {response.text[:500]}"
        if response.status_code == 401:
            raise ServerGone(f"{refusal(self.base_url, self.token is not None)}. Was it started again? {said}")
        if "JSON compliant" in response.text:  # vLLM cannot write NaN into its answer, and says so in these words
            raise EngineFault(
                f"the engine behind {self.base_url} returned a log-prob that is NaN or infinite ({said}); {NAN_ADVICE}"
            )
        if response.status_code >= 500:
            raise ServerGone(f"the vLLM server failed a request for good: {said}")
        raise RequestRefused(f"the vLLM server refused a request: {said}")

    def _post(self, url: str, **arguments: Any) -> dict[str, Any]:
        answer = self._read(url, self._answer(url, **arguments))
        if url.endswith(GENERATIONS):
            with read_as_vllms(self.base_url):
                refuse_other_completions(arguments["json"], answer, self.base_url)
        return answer

    def _answer(self, url: str, **arguments: Any) -> Any:
        """The response to a POST; a generation is watched, since it may rightly take long."""
        if not url.endswith(GENERATIONS):
            with server_errors(self.base_url, self.token):
                return self.session.post(url, **arguments)

        def call() -> Any:
            with server_errors(self.base_url, self.token):
                return self.session.post(url, timeout=(CONNECT_TIMEOUT, self.settings.request_timeout), **arguments)

        body = arguments.get("json", {})
        rows = len(body["prompt"]) if isinstance(body.get("prompt"), list) else 1
        what = f"{rows * body.get('n', 1)} completions of {rows} prompts"
        return watched(call, self.base_url, silence=self.settings.silence_timeout, what=what, token=self.token)

    def get_server_info(self) -> dict[str, Any]:
        """The server's resolved configuration (TRL 1.15's client cannot ask for it)."""
        try:
            answer = self._get(f"{self.base_url}/server_info", params={"config_format": "json"})
        except RequestRefused as refused:
            raise RuntimeError(
                f"the vLLM server at {self.base_url} does not expose the endpoints that weight sync needs; start it "
                "with "
                f"`grpo-lab serve --model …` (or with VLLM_SERVER_DEV_MODE=1 in its environment): {refused}"
            ) from refused
        return dict(answer["vllm_config"])

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the server's weights."""
        return getattr(torch, str(self.info["model_config"]["dtype"]).removeprefix("torch."))  # type: ignore[no-any-return]

    @property
    def has_worker(self) -> bool:
        """Whether our worker extension runs inside the server."""
        return bool((self.info.get("parallel_config") or {}).get("worker_extension_cls") == WORKER_EXTENSION)

    @property
    def context(self) -> int:
        """Tokens of prompt and completion together that the server takes."""
        return int(self.info["model_config"]["max_model_len"])

    def post(self, path: str, body: Mapping[str, Any]) -> Any:
        """POST JSON to a path of the server → its answer, or ``ServerGone``."""
        return post_json(self.session, self.base_url, path, body)

    # -- weights -----------------------------------------------------------------------------------------------------

    def open_way(self, device: torch.device) -> None:
        """Settle how weights travel, and try it. Raises ``ValueError`` where no way is possible."""
        self.way = weight_way(self.settings.weights, device, self.info, self.base_url)
        if self.way == "nccl":
            self.init_communicator(device=device)
        else:
            self.courier.try_shared_memory()

    @property
    def reads_tensors(self) -> bool:
        """Whether the server's tensors can be compared with the trainer's: our worker, on this machine."""
        return self.has_worker and urlparse(self.base_url).hostname in LOOPBACK

    def update_named_params(self, metadata: Any, named_params: Iterator[tuple[str, torch.Tensor]]) -> None:
        """All weights to the server. The stream is read to its end also after a failure: gathering a shard needs every
        rank, and merged adapters are unmerged at the end of it."""
        try:
            self._see_that_it_is_the_same()
            if self.way == "nccl":
                super().update_named_params(metadata, named_params)
                if self.has_worker:
                    self.courier.note()
            else:
                self.courier.push(named_params)
            if self.faulty and self.has_worker:
                self.courier.clear_cache()
            self.faulty = False
        finally:
            for _ in named_params:
                pass

    def _see_that_it_is_the_same(self) -> None:
        """A server that was started since the last sync may serve another model, and is compared as at the start."""
        if not (self.has_worker and self.courier.pushes) or self.courier.is_current():
            return
        self.model, self.info = self._get(f"{self.base_url}/v1/models")["data"][0]["id"], self.get_server_info()
        try:
            self.meet()
        except ValueError as other:
            raise ServerGone(f"the vLLM server was started again since the last sync: {other}") from other
        if self.way == "nccl":
            raise ServerGone(
                f"the vLLM server at {self.base_url} was started again since the last sync, without this run's NCCL "
                "group"
            )

    def reset_prefix_cache(self) -> None:
        if not self._post(f"{self.base_url}/reset_prefix_cache").get("success", True):
            raise WeightSyncError("the server would not drop its cached prompts after a weight sync")

    def check_same_weights(self) -> None:
        """``ServerGone`` where the server no longer holds what this run sent last (known where our worker runs in
        it)."""
        if self.has_worker and not self.courier.is_current():
            raise ServerGone(
                f"the vLLM server at {self.base_url} no longer holds this run's weights: it was started again, or "
                "another run "
                "uses it too"
            )

    def differing(self, named_params: Iterator[tuple[str, torch.Tensor]]) -> list[TensorDifference]:
        """Tensors in which server and trainer differ; the stream is read to its end."""
        try:
            return [TensorDifference(**entry) for entry in self.courier.differing(named_params)]
        finally:
            for _ in named_params:
                pass

    # -- completions -------------------------------------------------------------------------------------------------

    def generate(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """As TRL's. Raises ``EngineFault`` for a log-prob that is missing, NaN or infinite, ``PromptTooLong``."""
        refuse_long(args[0] if args else kwargs["prompts"], self.context, kwargs.get("max_tokens") or 1, self.decode)
        try:
            with read_as_vllms(self.base_url):
                answer: dict[str, Any] = super().generate(*args, **kwargs)
            check_answer(answer["logprobs"])
        except EngineFault:
            self.faulty = True
            raise
        self.check_same_weights()
        return answer

    def generate_unscored(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """The same, drawn once more without log-probs, each of them None: an answer with NaN in it cannot be had as
        JSON."""
        answer: dict[str, Any] = super().generate(*args, **{**kwargs, "logprobs": None})
        ids = answer["completion_ids"]
        unscored = [[[None] for _ in row] for row in ids]
        self.check_same_weights()
        return {**answer, "logprobs": unscored, "logprob_token_ids": [[[token] for token in row] for row in ids]}

    def probe(self, prompt_ids: list[list[int]], max_tokens: int = 16) -> Probe:
        """Fresh samples at temperature 1 from the whole vocabulary, see ``rollouts.proof``."""
        answer = self.generate(prompt_ids, n=1, temperature=1.0, max_tokens=max_tokens, logprobs=0)
        logprobs = [[position[0] for position in row] for row in answer["logprobs"]]
        return Probe(answer["prompt_ids"], answer["completion_ids"], logprobs)
