"""What runs inside the workers of a vLLM server: loads weights that the trainer left in shared memory.

Named on the server's command line as `--worker-extension-cls grpo_lab.rollouts.server_worker.WeightLoading`; vLLM mixes
the class into its worker, and `/collective_rpc` calls its methods. An exception here would end the engine, so
each method answers with its error instead, and the trainer raises it.
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

from grpo_lab.rollouts.weight_files import read_shards, trusted_folder


class WeightLoading:
    """Methods that a worker gains. `model_runner` and `vllm_config` are the worker's own."""

    def grpo_lab_load_weights(self, folder: str, version: str) -> dict[str, Any]:
        """Load the shards of a folder into this worker -> {tensors, seconds, repacked, version} or {error}."""
        from vllm.config import set_current_vllm_config

        from grpo_lab.rollouts.sync import load_into_runner

        worker: Any = self
        worker.grpo_lab_version = ""  # until it is done, what this worker holds is nobody's version
        try:
            with set_current_vllm_config(worker.vllm_config):
                report = load_into_runner(worker.model_runner, read_shards(trusted_folder(folder)))
        except Exception as error:
            return {"error": f"{type(error).__name__}: {error}"}
        worker.grpo_lab_version = version
        return {**dataclasses.asdict(report), "version": version}

    def grpo_lab_sees(self, folder: str) -> dict[str, Any]:
        """Whether a folder of the trainer's shared memory exists on this side."""
        try:
            return {"sees": trusted_folder(folder).is_dir()}
        except Exception as error:
            return {"error": f"{type(error).__name__}: {error}"}

    def grpo_lab_weights_version(self) -> dict[str, Any]:
        """The version of the last complete load, "" for a worker that has its weights from the disk."""
        return {"version": getattr(self, "grpo_lab_version", "")}

    def grpo_lab_differing_tensors(self, folder: str) -> dict[str, Any]:
        """Compare this worker's tensors with those of a folder -> {differing: [{name, relative, largest}]} or {error}."""
        from grpo_lab.rollouts.proof import differing_tensors

        worker: Any = self
        try:
            found = differing_tensors(worker.model_runner.get_model(), read_shards(trusted_folder(folder)))
        except Exception as error:
            return {"error": f"{type(error).__name__}: {error}"}
        return {"differing": [dataclasses.asdict(entry) for entry in itertools.islice(found, 20)]}
