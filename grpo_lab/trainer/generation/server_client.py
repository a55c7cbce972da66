"""TRL's client of a vLLM server, with limits on waits, errors that say what happened, and two ways to send weights.

    nccl            trainer and server on GPUs: TRL's own transfer, unchanged
    shared_memory   no NCCL between them (a CPU on either side, or one GPU for both): safetensors in /dev/shm and the
                    server's own reload (``engines/vllm/worker.py``), on one machine

With ``rollout.sync: adapter`` only the LoRA adapter is sent: it is written to a folder in /dev/shm, which the server
loads under the version's own name.

Before anything is sent, the server's model is compared with the trainer's (``same_model.py``). A sync, a generation or
a probe first waits for the request that runs in the background (``rollout.overlap``), if there is one.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from urllib.parse import urlparse

import torch
from trl.generation.vllm_client import VLLMClient

from grpo_lab.engines.grouping import EngineFault
from grpo_lab.engines.vllm import talk
from grpo_lab.engines.vllm.engine import LORA_VERSIONS
from grpo_lab.engines.vllm.server import WORKER_EXTENSION
from grpo_lab.engines.vllm.token import LOCAL_NAMES, Bearer, of_trainer, token_of
from grpo_lab.engines.vllm.worker import WeightCourier
from grpo_lab.engines.weights.adapter import AdapterVersion
from grpo_lab.engines.weights.proof import PROBE_TOKENS, Probe, TensorDifference
from grpo_lab.engines.weights.sync import WeightSyncError
from grpo_lab.trainer.generation.background import BackgroundRequest
from grpo_lab.trainer.generation.prompt_fit import fill_rooms, refuse_long
from grpo_lab.trainer.settings.parse import ServerSettings

logger = logging.getLogger("grpo_lab")

#: Paths of requests that generate, and so may rightly take long.
GENERATIONS = ("/v1/completions", "/inference/v1/generate", "/v1/chat/completions")


def weight_way(chosen: str, trainer: torch.device, server: Mapping[str, Any], url: str) -> str:
    """Return the way in which weights travel to the server: ``nccl`` or ``shared_memory``.

    Args:
        chosen: ``rollout.server.weights``: one of the two, or ``auto``, which is NCCL if both sides have a GPU.
        trainer: the trainer's device.
        server: the server's ``vllm_config``.
        url: the server's address.

    Raises:
        ValueError: the way is not possible; the message says what is missing.
    """
    server_device = str((server.get("device_config") or {}).get("device", "unknown")).partition(":")[0]
    gpus = trainer.type == "cuda" and server_device == "cuda"
    if chosen != "auto":
        way = chosen
    elif gpus:
        way = "nccl"
    else:
        way = "shared_memory"
    extension = (server.get("parallel_config") or {}).get("worker_extension_cls")
    if way == "nccl" and not gpus:
        lacks = "`rollout.server.weights: nccl` needs a GPU on both sides: use shared_memory"
    elif way == "nccl" and server.get("weight_transfer_config") is None:
        lacks = (
            "the weights go over NCCL, but the server has no weight-transfer engine: start it with `grpo-lab serve`, "
            """or add --weight-transfer-config '{"backend": "nccl"}' to `vllm serve`"""
        )
    elif way == "shared_memory" and urlparse(url).hostname not in LOCAL_NAMES:
        lacks = (
            "the weights go through shared memory, but the server is not on this machine: run it at 127.0.0.1, or "
            "train on a GPU with a server on GPUs"
        )
    elif way == "shared_memory" and extension != WORKER_EXTENSION:
        lacks = (
            "the weights go through shared memory, but the server cannot read them (its worker extension is "
            f"{extension!r}): start it with `grpo-lab serve --model …`"
        )
    else:
        return way
    raise ValueError(f"the trainer is on {trainer.type}, the vLLM server at {url} on {server_device}; {lacks}")


def refuse_without_lora(rank: int, server: Mapping[str, Any], url: str) -> None:
    """Raise ``ValueError`` if a server with the ``vllm_config`` in ``server`` cannot take LoRA adapters of rank
    ``rank``."""
    lora = server.get("lora_config")
    replicas = (server.get("parallel_config") or {}).get("data_parallel_size") or 1
    start = f"start it with `grpo-lab serve --model … --max-lora-rank {rank}`"
    if not lora:
        lacks = f"takes no adapters: {start}"
    elif lora["max_lora_rank"] < rank:
        lacks = f"takes adapters of a rank of at most {lora['max_lora_rank']}: {start}"
    elif lora["max_loras"] < LORA_VERSIONS:
        lacks = f"holds {lora['max_loras']} adapter (--max-loras), and a sync needs {LORA_VERSIONS}: {start}"
    elif replicas > 1:
        lacks = f"has {replicas} replicas (--data-parallel-size), of which one would get the adapter: use one"
    else:
        return
    raise ValueError(f"`rollout.sync: adapter`: the vLLM server at {url} {lacks}")


def read_to_end(stream: Iterator[Any]) -> None:
    """Exhaust a stream of tensors. This is needed after a failure, too, and on ranks that send nothing: gathering a
    shard takes every rank, and merged adapters are unmerged at the end of the stream."""
    for _ in stream:
        pass


class LabVLLMClient(VLLMClient):  # type: ignore[misc]
    """TRL's client of a vLLM server, with a time limit on every call.

    Attributes:
        info: the server's resolved configuration (``vllm_config``).
        adapters: names of the LoRA adapters that the server holds; it samples with the last.

    Raises:
        ServerGone: from any method, if the server does not answer, or no longer holds what this run sent.
        EngineFault: a completion has a log-prob that is not finite.
        WeightSyncError: weights that were sent did not arrive.
    """

    way = ""  # how weights travel, ``nccl`` or ``shared_memory``; set by open_way
    decode: Callable[[list[int]], str] | None = None  # the tokenizer's, to quote a prompt in an error
    meet: Callable[[], None] = staticmethod(lambda: None)  # raises ValueError for another model; set by connect
    faulty = False  # whether a log-prob was not finite, so that the server's cache may hold NaN
    sends_adapters = False  # whether adapters are sent instead of weights; set by open_way
    in_background: BackgroundRequest | None = None  # the request whose completions were not yet taken

    def __init__(self, settings: ServerSettings, **arguments: Any) -> None:
        self.settings = settings
        super().__init__(**arguments)
        self.info = self.get_server_info()
        #: Sends JSON to a path of the server and returns its answer.
        self.post = functools.partial(talk.post_json, self.session, self.base_url)
        self.courier = WeightCourier(self.post)
        self.adapters: list[str] = []

    def check_server(self, total_timeout: float = 0.0, retry_interval: float = 2.0) -> None:
        """Wait at most ``total_timeout`` seconds until the server is ready. TRL's constructor calls this; TRL's own
        method waits for ever at a port that accepts connections and never answers."""
        limit = min(self.settings.request_timeout, self.settings.silence_timeout)
        talk.bound_session(self.session, timeout=limit, retries=self.settings.retries, backoff=self.settings.backoff)
        talk.wait_until_ready(self.base_url, total_timeout, token=self._find_token)

    def wait(self, limit: float) -> None:
        """Wait at most ``limit`` seconds until a server answers in place of the lost one."""
        self.close_communicator()
        talk.wait_until_ready(self.base_url, limit, token=self._find_token, setting="rollout.server.return_timeout")

    def _find_token(self) -> str | None:
        """Find the server's access token, set it for all later requests and return it; None if the server has none that
        is known here."""
        token = of_trainer(self.base_url, self.settings.token_file)
        self.session.auth = None if token is None else Bearer(token)
        return token

    def _get(self, url: str, **arguments: Any) -> dict[str, Any]:
        return talk.answer_of(self.session, self.base_url, url, lambda: self.session.get(url, **arguments))

    def _post(self, url: str, **arguments: Any) -> dict[str, Any]:
        """Send a POST request and return its answer. A request that generates may rightly take long, so the server is
        watched meanwhile, and only its silence ends the wait."""
        if not url.endswith(GENERATIONS):
            return talk.answer_of(self.session, self.base_url, url, lambda: self.session.post(url, **arguments))

        body = arguments["json"]
        limits = (talk.CONNECT_TIMEOUT, self.settings.request_timeout)
        ask = functools.partial(self.session.post, url, timeout=limits, **arguments)
        if isinstance(body.get("prompt"), list):
            rows = len(body["prompt"])
        else:
            rows = 1
        what = f"{rows * body.get('n', 1)} completions of {rows} prompts"
        call = functools.partial(talk.answer_of, self.session, self.base_url, url, ask)
        silence = self.settings.silence_timeout
        token = token_of(self.session)
        answer = talk.watched(call, self.base_url, silence=silence, what=what, token=token)
        with talk.read_as_vllms(self.base_url):
            talk.refuse_other_completions(body, answer, self.base_url)
        return dict(answer)

    def get_server_info(self) -> dict[str, Any]:
        """Return the server's resolved configuration, ``vllm_config`` (TRL 1.15's client cannot ask for it)."""
        try:
            answer = self._get(f"{self.base_url}/server_info", params={"config_format": "json"})
        except talk.RequestRefused as refused:
            raise RuntimeError(
                f"the vLLM server at {self.base_url} does not expose the endpoints that weight sync needs; start it "
                f"with `grpo-lab serve --model …` (or with VLLM_SERVER_DEV_MODE=1 in its environment): {refused}"
            ) from refused
        return dict(answer["vllm_config"])

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the server's weights."""
        return getattr(torch, str(self.info["model_config"]["dtype"]).removeprefix("torch."))  # type: ignore[no-any-return]

    @property
    def has_worker(self) -> bool:
        """Return whether our worker extension runs inside the server."""
        return bool((self.info.get("parallel_config") or {}).get("worker_extension_cls") == WORKER_EXTENSION)

    @property
    def reads_tensors(self) -> bool:
        """Return whether the server's tensors can be compared with the trainer's: it runs our worker extension, on this
        machine."""
        return self.has_worker and urlparse(self.base_url).hostname in LOCAL_NAMES

    @property
    def context(self) -> int:
        """Largest number of tokens of prompt and completion together that the server takes."""
        return int(self.info["model_config"]["max_model_len"])

    @property
    def page(self) -> int:
        """Number of tokens in a page of the server's cache."""
        return int(self.info["cache_config"]["block_size"])

    def open_way(self, device: torch.device, lora_rank: int | None = None) -> None:
        """Choose the way of the weights and open it: a NCCL group, or a test that the server can read this machine's
        shared memory. With ``lora_rank`` adapters of at most that rank are sent instead. Raise ``ValueError`` if no way
        is possible."""
        self.sends_adapters = lora_rank is not None
        if lora_rank is not None:
            refuse_without_lora(lora_rank, self.info, self.base_url)
        if self.sends_adapters:
            chosen = "shared_memory"
        else:
            chosen = self.settings.weights
        self.way = weight_way(chosen, device, self.info, self.base_url)
        if self.way == "nccl":
            self.init_communicator(device=device)
        else:
            self.courier.try_shared_memory()
        if self.sends_adapters and self.courier.base_is_moved():
            raise ValueError(
                f"`rollout.sync: adapter`: the vLLM server at {self.base_url} holds weights that another run sent, and "
                "an adapter needs the base that the server reads from the disk: start it again (`grpo-lab serve`)"
            )

    def update_named_params(self, metadata: Any, named_params: Iterator[tuple[str, torch.Tensor]]) -> None:
        """Send all weights to the server, once it is idle. The stream ``named_params`` is always read to its end."""
        try:
            self.wait_until_idle()
            self._see_that_it_is_the_same()
            if self.way == "nccl":
                super().update_named_params(metadata, named_params)
                if self.has_worker:
                    self.courier.note(moved=True)
            else:
                self.courier.push(named_params)
            if self.faulty and self.has_worker:
                self.courier.clear_cache()
            self.faulty = False
        finally:
            read_to_end(named_params)

    def load_adapter(self, version: AdapterVersion) -> None:
        """Have the server load a version of the LoRA adapter, once it is idle, and sample with it from then on. Before
        that, unload the version before the last."""
        self.wait_until_idle()
        self._see_that_it_is_the_same()
        for old in self.adapters[: 1 - LORA_VERSIONS]:
            self._say("/v1/unload_lora_adapter", {"lora_name": old})
        self._say("/v1/load_lora_adapter", {"lora_name": version.name, "lora_path": str(version.folder)})
        self.courier.note(moved=False)
        self.adapters = [*self.adapters[1 - LORA_VERSIONS :], version.name]
        self.model = version.name
        if self.faulty:
            self.courier.clear_cache()
        self.faulty = False

    def _say(self, path: str, body: dict[str, str]) -> None:
        """Send JSON to a path whose answer is text."""
        url = self.base_url + path
        talk.answer_of(self.session, self.base_url, url, lambda: self.session.post(url, json=body), is_text=True)

    def _see_that_it_is_the_same(self) -> None:
        """Check again the model of a server that was started again since the last sync. Raise ``ServerGone`` if it has
        another model, or cannot take this run's weights without a new connection."""
        if not (self.has_worker and self.courier.pushes) or self.courier.is_current():
            return
        self.model = self._get(f"{self.base_url}/v1/models")["data"][0]["id"]
        self.info = self.get_server_info()
        again = f"the vLLM server at {self.base_url} was started again since the last sync"
        try:
            self.meet()
        except ValueError as other:
            raise talk.ServerGone(f"{again}: {other}") from other
        if self.way == "nccl":
            raise talk.ServerGone(f"{again}, without this run's NCCL group")
        if self.sends_adapters:  # and its base weights are unknown
            raise talk.ServerGone(f"{again}, without this run's adapter")

    def reset_prefix_cache(self) -> None:
        """Have the server drop its cached prompts; raise ``WeightSyncError`` if it does not."""
        if not self._post(f"{self.base_url}/reset_prefix_cache").get("success", True):
            raise WeightSyncError("the server would not drop its cached prompts after a weight sync")

    def check_same_weights(self) -> None:
        """Raise ``ServerGone`` if the server no longer holds the weights that this run sent last. Without our worker
        extension in the server this cannot be known, and nothing is raised."""
        if self.has_worker and not self.courier.is_current():
            raise talk.ServerGone(
                f"the vLLM server at {self.base_url} no longer holds this run's weights: it was started again, or "
                "another run uses it too"
            )

    def differing(self, named_params: Iterator[tuple[str, torch.Tensor]]) -> list[TensorDifference]:
        """Return the tensors in which server and trainer differ. The stream ``named_params`` is read to its end."""
        try:
            return [TensorDifference(**entry) for entry in self.courier.differing(named_params)]
        finally:
            read_to_end(named_params)

    def begin(self, prompts: list[list[int]], version: int, **arguments: Any) -> None:
        """Send a request as ``generate`` does, but in the background (``in_background``). ``version`` is the number of
        optimizer steps of the policy whose weights the server has. Raise RuntimeError if another request's completions
        were not yet taken."""
        if self.in_background is not None:
            raise RuntimeError("a generation was begun while another's completions were not yet taken")
        ask = functools.partial(self._drawn, prompts, **arguments)
        self.in_background = BackgroundRequest(ask, prompts, version)

    def wait_until_idle(self) -> None:
        """Wait for the request in the background, if there is one."""
        if self.in_background is not None:
            self.in_background.wait()

    def generate(self, prompts: list[list[int]], **sampling: Any) -> dict[str, Any]:  # type: ignore[override]
        """Generate completions of ``prompts`` (token ids) as TRL's client does, once the server is idle. Raise
        ``EngineFault`` for a log-prob that is missing, NaN or infinite, ``PromptTooLong`` for a prompt without room."""
        self.wait_until_idle()
        return self._drawn(prompts, **sampling)

    def _drawn(self, prompts: list[list[int]], **sampling: Any) -> dict[str, Any]:
        """Generate as ``generate`` does, without waiting for a request in the background."""
        refuse_long(prompts, self.context, sampling.get("max_tokens") or 1, self.decode)
        try:
            with talk.read_as_vllms(self.base_url):
                answer = self._asked(prompts, **sampling)
            talk.check_answer(answer["logprobs"])
        except talk.RequestRefused:
            if self.adapters:  # a server that was started again knows no such name
                self.check_same_weights()
            raise
        except EngineFault:
            self.faulty = True
            raise
        self.check_same_weights()
        return answer

    def _asked(self, prompts: list[list[int]], **sampling: Any) -> dict[str, Any]:
        """Send TRL's request and return the answer. If ``max_tokens`` is None, each row gets as many tokens as there is
        room for."""
        ask = super().generate
        if sampling.get("max_tokens", 1) is None:
            return fill_rooms(ask, prompts, self.context, **sampling)
        return dict(ask(prompts, **sampling))

    def generate_unscored(self, prompts: list[list[int]], **sampling: Any) -> dict[str, Any]:
        """Generate completions with None in place of each log-prob. Called after a server could not answer because a
        log-prob is NaN, which JSON cannot carry."""
        answer = self._asked(prompts, **{**sampling, "logprobs": None})
        ids = answer["completion_ids"]
        unscored = [[[None] for _ in row] for row in ids]
        self.check_same_weights()
        return {**answer, "logprobs": unscored, "logprob_token_ids": [[[token] for token in row] for row in ids]}

    def probe(self, prompt_ids: list[list[int]]) -> Probe:
        """Return fresh samples at temperature 1 from the whole vocabulary, with their log-probs, to prove a sync
        (``engines/weights/proof.py``)."""
        answer = self.generate(prompt_ids, n=1, temperature=1.0, max_tokens=PROBE_TOKENS, logprobs=0)
        logprobs = [[position[0] for position in row] for row in answer["logprobs"]]
        return Probe(answer["prompt_ids"], answer["completion_ids"], logprobs)
