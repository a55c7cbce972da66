"""Weights sent to a server through shared memory, if trainer and server have no NCCL between them: both ends of it.

The trainer (`WeightCourier`) writes safetensors files into a folder of its own below /dev/shm, tells the server's
workers (`WeightLoading`) through `/collective_rpc` to load them, and deletes them. Memory: one copy of the model for
the time of a sync, plus `SHARD_BYTES` while writing. No pickle is involved.

The server has `--worker-extension-cls grpo_lab.engines.vllm.worker.WeightLoading` on its command line; vLLM mixes the
class into its workers. The class also describes the server's model in plain values, which the trainer compares with its
own before anything is loaded (`trainer/generation/server_across_ranks.py`).
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import itertools
import json
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from grpo_lab.engines.vllm.token import own_folder
from grpo_lab.engines.weights.sync import NamedTensors, WeightSyncError, clear_cache, dtype_of, fit, load_into_runner
from grpo_lab.io import saving

SHARED_MEMORY = Path("/dev/shm")
FOLDER_PREFIX = "grpo-lab-weights-"
SHARD_BYTES = 2 * 1024**3

#: Function (path, body) -> parsed JSON. It is the caller's HTTP client, with its time limits and retries.
Post = Callable[[str, Mapping[str, Any]], Any]


def write_shards(named_params: NamedTensors, folder: Path, shard_bytes: int = SHARD_BYTES) -> int:
    """Write a stream of tensors to shard-00000.safetensors, … in ``folder``; return the number of tensors. A file is
    written when its tensors have ``shard_bytes`` bytes. Each tensor is copied."""
    from safetensors.torch import save_file

    shard: dict[str, torch.Tensor] = {}
    size = 0
    shards = 0
    tensors = 0

    def write() -> None:
        with saving(folder):
            save_file(shard, folder / f"shard-{shards:05d}.safetensors")

    for name, tensor in named_params:
        shard[name] = tensor.detach().to("cpu", copy=True).contiguous()
        size += shard[name].nbytes
        tensors += 1
        if size >= shard_bytes:
            write()
            shard = {}
            size = 0
            shards += 1
    if shard:
        write()
    return tensors


def read_shards(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, tensor) from the files that `write_shards` wrote to a folder."""
    for path in sorted(folder.glob("shard-*.safetensors")):
        yield from tensors_of(path)


def tensors_of(path: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, tensor) from a safetensors file, one at a time."""
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        for name in file.keys():  # noqa: SIM118 - not a dict
            yield name, file.get_tensor(name)


def trusted_folder(name: str) -> Path:
    """Return the path of a folder that a trainer named. Raises ValueError if no `WeightCourier` makes such folders."""
    folder = Path(name).resolve()
    if folder.parent != SHARED_MEMORY or not folder.name.startswith(FOLDER_PREFIX):
        raise ValueError(f"weights are taken from {SHARED_MEMORY}/{FOLDER_PREFIX}* only, not from {folder}")
    return folder


def worker_reports(post: Post, method: str, **arguments: Any) -> list[dict[str, Any]]:
    """Call a method of `WeightLoading` on all workers of a server; return one answer per worker. Raises WeightSyncError
    if a worker does not have the method, fails, or refuses the weights."""
    answer = post("/collective_rpc", {"method": method, "kwargs": arguments})
    results = answer.get("results") or []
    if not results or not all(isinstance(result, dict) for result in results):
        raise WeightSyncError(
            f"the server does not know {method}: start it with `--worker-extension-cls "
            f"grpo_lab.engines.vllm.worker.WeightLoading` (answer: {answer})"
        )
    for report in results:
        if "error" in report:
            raise WeightSyncError(f"the server's worker failed at {method}: {report['error']}")
        if "refused" in report:
            raise WeightSyncError(f"the server refused the weights, and loaded none of them: {report['refused']}")
    return list(results)


class WeightCourier:
    """Sends the trainer's weights to a server whose workers have the methods of `WeightLoading`.

    Each push has a version, a text that no other push of any run has. The workers keep the version of their weights, by
    which `is_current` finds out whether these are still the ones that this object sent.
    """

    def __init__(self, post: Post) -> None:
        self._post = post
        self._call = functools.partial(worker_reports, post)
        self._name = uuid.uuid4().hex
        self.pushes = 0
        self._version = ""  # of the last push that arrived

    def try_shared_memory(self) -> None:
        """Raise ValueError if the server's workers do not see this process's shared memory."""
        with own_folder(FOLDER_PREFIX, SHARED_MEMORY) as folder:
            reports = self._call("grpo_lab_sees", folder=str(folder))
        if not all(report.get("sees") is True for report in reports):
            raise ValueError(
                f"the server's workers do not see {SHARED_MEMORY} of this process ({reports}): trainer and server must "
                "run on one machine, and in one container"
            )

    def push(self, named_params: NamedTensors) -> list[dict[str, Any]]:
        """Load all parameters into every worker of the server; return the workers' reports. Raises WeightSyncError if a
        worker did not load all of them, or kept cached prompts of the old weights."""
        version = self._next_version()
        with own_folder(FOLDER_PREFIX, SHARED_MEMORY) as folder:
            tensors = write_shards(named_params, folder)
            reports = self._call("grpo_lab_load_weights", folder=str(folder), version=version)
        for report in reports:
            if report.get("tensors") != tensors:
                raise WeightSyncError(f"the server did not load the {tensors} tensors it was sent: {report}")
        if not self._post("/reset_prefix_cache", {}).get("success", False):
            raise WeightSyncError("the server would not drop its cached prompts after a weight sync")
        self._version = version
        return reports

    def note(self, moved: bool) -> None:
        """Record a new version on the server, for `is_current`, after weights came another way: through NCCL, or as an
        adapter beside the base. `moved`: whether they replaced the base weights."""
        version = self._next_version()
        self._call("grpo_lab_note_version", version=version, moved=moved)
        self._version = version

    def _next_version(self) -> str:
        self._version = ""  # a push that fails leaves the server with weights that are no longer the trainer's
        self.pushes += 1
        return f"{self._name}-{self.pushes}"

    def clear_cache(self) -> None:
        """Overwrite the server's KV cache with zeros, so that it holds no NaN."""
        self._call("grpo_lab_clear_cache")

    def is_current(self) -> bool:
        """Return whether the server holds the weights of the last `push` or `note`. False before the first one, after
        the server was restarted, and after another run pushed its own."""
        return self._version != "" and all(
            report.get("version") == self._version for report in self._call("grpo_lab_weights_version")
        )

    def base_is_moved(self) -> bool:
        """Return whether a run has replaced the weights that the server loaded from disk."""
        return any(report.get("moved", False) for report in self._call("grpo_lab_weights_version"))

    def differing(self, named_params: NamedTensors) -> list[dict[str, Any]]:
        """Return the tensors in which server and trainer differ, each as the fields of a `TensorDifference`, those with
        the largest relative difference first."""
        with own_folder(FOLDER_PREFIX, SHARED_MEMORY) as folder:
            write_shards(named_params, folder)
            reports = self._call("grpo_lab_differing_tensors", folder=str(folder))
        found: list[dict[str, Any]] = [entry for report in reports for entry in report["differing"]]
        return sorted(found, key=lambda entry: -entry["relative"])


def _answered(method: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    """Make a method return {error: text} instead of raising, which would end the engine. `worker_reports` then raises
    the error in the trainer."""

    @functools.wraps(method)
    def answer(*given: Any, **named: Any) -> dict[str, Any]:
        try:
            return method(*given, **named)
        except Exception as error:
            return {"error": f"{type(error).__name__}: {error}"}

    return answer


class WeightLoading:
    """Methods that vLLM mixes into its workers, to be called through `/collective_rpc`.

    Attributes:
        model_runner: vLLM's model runner, set by its worker.
        vllm_config: vLLM's configuration, set by its worker.
        grpo_lab_version: version of the weights (`WeightCourier`); "" for those from the disk, or after a load failed.
        grpo_lab_moved: whether a run has replaced the weights from the disk.
    """

    model_runner: Any
    vllm_config: Any
    grpo_lab_version = ""
    grpo_lab_moved = False

    @_answered
    def grpo_lab_load_weights(self, folder: str, version: str) -> dict[str, Any]:
        """Load the shards of a folder into this worker; return {tensors: their number, version}. If a tensor is unfit
        for an engine (`fit`), load none and return {refused: why}."""
        from vllm.config import set_current_vllm_config

        try:
            for _ in fit(read_shards(trusted_folder(folder)), dtype_of(self.model_runner)):
                pass
        except WeightSyncError as unfit:
            return {"refused": str(unfit)}
        self.grpo_lab_version = ""  # until the load is done, this worker holds no complete version
        self.grpo_lab_moved = True
        with set_current_vllm_config(self.vllm_config):
            tensors = load_into_runner(self.model_runner, read_shards(trusted_folder(folder)))
        self.grpo_lab_version = version
        return {"tensors": tensors, "version": version}

    @_answered
    def grpo_lab_sees(self, folder: str) -> dict[str, Any]:
        """Return {sees: whether this worker sees a folder that the trainer made in its shared memory}."""
        return {"sees": trusted_folder(folder).is_dir()}

    @_answered
    def grpo_lab_describe(self) -> dict[str, Any]:
        """Describe the model by its tokenizer (`describe_tokenizer`), end tokens and config, which a trainer compares
        with its own before it sends anything."""
        from vllm.tokenizers import cached_tokenizer_from_config

        config = self.vllm_config.model_config
        tokenizer: Any = cached_tokenizer_from_config(config)
        declared = config.try_get_generation_config().get("eos_token_id")
        plain = json.loads(config.hf_config.to_json_string(use_diff=False))
        return {**describe_tokenizer(tokenizer), "end_ids": end_ids(declared, tokenizer.eos_token_id), "config": plain}

    @_answered
    def grpo_lab_note_version(self, version: str, moved: bool) -> dict[str, Any]:
        """Record the version of weights that came another way (`WeightCourier.note`)."""
        self.grpo_lab_version = version
        self.grpo_lab_moved = self.grpo_lab_moved or moved
        return {"version": version}

    @_answered
    def grpo_lab_weights_version(self) -> dict[str, Any]:
        """Return the version of the weights, and whether they are others than those from the disk."""
        return {"version": self.grpo_lab_version, "moved": self.grpo_lab_moved}

    @_answered
    def grpo_lab_clear_cache(self) -> dict[str, Any]:
        """Write zeros over this worker's KV cache (`sync.clear_cache`)."""
        clear_cache(self.model_runner)
        return {}

    @_answered
    def grpo_lab_differing_tensors(self, folder: str) -> dict[str, Any]:
        """Compare this worker's tensors with those in a folder.

        Returns:
            ``{"differing": [{"name": …, "relative": …, "largest": …}, …]}``, the fields of a ``TensorDifference``, for
            at most 20 tensors that differ.
        """
        from grpo_lab.engines.weights.proof import differing_tensors

        found = differing_tensors(self.model_runner.get_model(), read_shards(trusted_folder(folder)))
        return {"differing": [dataclasses.asdict(entry) for entry in itertools.islice(found, 20)]}


#: A text that tokenizers can encode differently although they have the same vocabulary.
PROBE_TEXT = "  Tom has 1234 apples;\n\tthey cost $5.07 – “naïve” 苹果 \\frac{1}{2} isn't\n\n"


def end_ids(declared: int | list[int] | None, tokenizer_id: int | None) -> list[int]:
    """Return the token ids that end a completion, sorted: those of the generation config (``declared``) and the
    tokenizer's."""
    ids = declared if isinstance(declared, list) else [declared]
    return sorted({token for token in (*ids, tokenizer_id) if token is not None})


def describe_tokenizer(tokenizer: Any) -> dict[str, Any]:
    """Describe a tokenizer so that two can be compared: the size of its vocabulary, and hashes of the vocabulary, of a
    test text's token ids and of the chat template."""
    vocabulary = tokenizer.get_vocab()
    template = getattr(tokenizer, "chat_template", None)
    return {
        "vocabulary_size": len(vocabulary),
        "vocabulary": _hash(sorted(vocabulary.items())),
        "encoding": _hash(list(tokenizer(PROBE_TEXT, add_special_tokens=False)["input_ids"])),
        "chat_template": None if template is None else _hash(template),
    }


def _hash(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]
