"""Weights to a server through shared memory, where the two have no NCCL between them (CPUs on one machine).

The trainer writes safetensors files into a folder of its own below /dev/shm, tells the server's workers through vLLM's
`/collective_rpc` to load them, and deletes them. Memory: one copy of the model in shared memory for the time of a sync,
plus `SHARD_BYTES` while writing. No pickle is involved: safetensors holds tensors and nothing else.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from grpo_lab.engines.vllm.leftovers import own_folder
from grpo_lab.engines.weights.sync import WeightSyncError

SHARED_MEMORY = Path("/dev/shm")
FOLDER_PREFIX = "grpo-lab-weights-"
SHARD_BYTES = 2 * 1024**3


def write_shards(named_params: Iterable[tuple[str, torch.Tensor]], folder: Path, shard_bytes: int = SHARD_BYTES) -> int:
    """Write a stream of tensors as shard-00000.safetensors, ... -> number of tensors. Each tensor is copied."""
    from safetensors.torch import save_file

    shard: dict[str, torch.Tensor] = {}
    size, shards, tensors = 0, 0, 0
    for name, tensor in named_params:
        shard[name] = tensor.detach().to("cpu", copy=True).contiguous()
        size, tensors = size + shard[name].nbytes, tensors + 1
        if size >= shard_bytes:
            save_file(shard, folder / f"shard-{shards:05d}.safetensors")
            shard, size, shards = {}, 0, shards + 1
    if shard:
        save_file(shard, folder / f"shard-{shards:05d}.safetensors")
    return tensors


def read_shards(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of a folder written by `write_shards`, one at a time."""
    from safetensors import safe_open

    for path in sorted(folder.glob("shard-*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - not a dict
                yield name, file.get_tensor(name)


def trusted_folder(name: str) -> Path:
    """The folder named by a trainer; ValueError for any that `WeightCourier` would not have made."""
    folder = Path(name).resolve()
    if folder.parent != SHARED_MEMORY or not folder.name.startswith(FOLDER_PREFIX):
        raise ValueError(f"weights are taken from {SHARED_MEMORY}/{FOLDER_PREFIX}* only, not from {folder}")
    return folder


class WeightCourier:
    """Brings the trainer's weights to a server started with `grpo_lab.engines.vllm.worker.WeightLoading`.

    `post(path, body) -> parsed JSON` is the caller's HTTP client, with its time limits and retries.
    """

    def __init__(self, post: Callable[[str, Mapping[str, Any]], Any]) -> None:
        self._post = post
        self._name = uuid.uuid4().hex  # two runs that share a server by mistake see each other's pushes
        self.pushes = 0
        self._version = ""

    def try_shared_memory(self) -> None:
        """ValueError where the server's workers do not see this process's shared memory."""
        with own_folder(FOLDER_PREFIX, SHARED_MEMORY) as folder:
            reports = self._call("grpo_lab_sees", folder=str(folder))
        if not all(report.get("sees") is True for report in reports):
            raise ValueError(
                f"the server's workers do not see {SHARED_MEMORY} of this process ({reports}): trainer and server "
                "must run "
                "on one machine, and in one container"
            )

    def push(self, named_params: Iterable[tuple[str, torch.Tensor]]) -> list[dict[str, Any]]:
        """Load a full stream of parameters into every worker of the server -> the workers' reports.

        Raises WeightSyncError where a worker did not load all of it, or kept cached prompts of the old weights.
        """
        self._version = ""  # a push that fails leaves the server with weights that are no longer the trainer's
        with own_folder(FOLDER_PREFIX, SHARED_MEMORY) as folder:
            tensors = write_shards(named_params, folder)
            self.pushes += 1
            version = f"{self._name}-{self.pushes}"
            reports = self._call("grpo_lab_load_weights", folder=str(folder), version=version)
        for report in reports:
            if "error" in report or report.get("tensors") != tensors:
                raise WeightSyncError(f"the server did not load the {tensors} tensors it was sent: {report}")
        if not self._post("/reset_prefix_cache", {}).get("success", False):
            raise WeightSyncError("the server would not drop its cached prompts after a weight sync")
        self._version = version
        return reports

    def note(self) -> None:
        """Name the weights that came another way (NCCL), for `is_current`."""
        self._version = ""
        self.pushes += 1
        version = f"{self._name}-{self.pushes}"
        self._call("grpo_lab_note_version", version=version)
        self._version = version

    def clear_cache(self) -> None:
        """Take NaN out of the server's KV cache. WeightSyncError where a worker could not."""
        for report in self._call("grpo_lab_clear_cache"):
            if "error" in report:
                raise WeightSyncError(f"the server could not clear its cache of NaN: {report['error']}")

    def is_current(self) -> bool:
        """True where the server holds the weights of the last `push`.

        False before the first, after a restart behind the same address, and where another run pushed its own.
        """
        return self._version != "" and all(
            report.get("version") == self._version for report in self._call("grpo_lab_weights_version")
        )

    def differing(self, named_params: Iterable[tuple[str, torch.Tensor]]) -> list[dict[str, Any]]:
        """Tensors in which the server differs from the trainer, as `proof.TensorDifference` fields, largest first."""
        with own_folder(FOLDER_PREFIX, SHARED_MEMORY) as folder:
            write_shards(named_params, folder)
            reports = self._call("grpo_lab_differing_tensors", folder=str(folder))
        for report in reports:
            if "error" in report:
                raise WeightSyncError(f"the server could not compare its tensors: {report['error']}")
        found: list[dict[str, Any]] = [entry for report in reports for entry in report["differing"]]
        return sorted(found, key=lambda entry: -entry["relative"])

    def _call(self, method: str, **arguments: str) -> list[dict[str, Any]]:
        return worker_reports(self._post, method, **arguments)


def worker_reports(
    post: Callable[[str, Mapping[str, Any]], Any], method: str, **arguments: Any
) -> list[dict[str, Any]]:
    """Answers of all workers of a server to a method of `WeightLoading`; WeightSyncError where they do not know it."""
    answer = post("/collective_rpc", {"method": method, "kwargs": arguments})
    results = answer.get("results") or []
    if not results or not all(isinstance(result, dict) for result in results):
        raise WeightSyncError(
            f"the server does not know {method}: start it with `--worker-extension-cls "
            f"grpo_lab.engines.vllm.worker.WeightLoading` (answer: {answer})"
        )
    return list(results)
