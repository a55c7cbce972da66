"""What runs inside the workers of a vLLM server: loads weights that the trainer left in shared memory.

Named on the server's command line as `--worker-extension-cls grpo_lab.engines.vllm.worker.WeightLoading`; vLLM mixes
the class into its worker, and `/collective_rpc` calls its methods. An exception here would end the engine, so
each method answers with its error instead, and the trainer raises it.

It also describes the server's model in plain values, for `trainer/generation/server_check.py` to compare before
anything is loaded.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
from typing import Any

from grpo_lab.engines.weights.weight_files import read_shards, trusted_folder


class WeightLoading:
    """Methods that a worker gains. `model_runner` and `vllm_config` are the worker's own."""

    def grpo_lab_load_weights(self, folder: str, version: str) -> dict[str, Any]:
        """Load the shards of a folder into this worker -> {tensors, seconds, repacked, version} or {error}."""
        from vllm.config import set_current_vllm_config

        from grpo_lab.engines.weights.sync import load_into_runner

        worker: Any = self
        try:
            worker.grpo_lab_version = ""  # until it is done, what this worker holds is nobody's version
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

    def grpo_lab_describe(self) -> dict[str, Any]:
        """What a trainer compares with its own before it sends anything (`model_identity`), or {error}."""
        from vllm.tokenizers import cached_tokenizer_from_config

        config = self.vllm_config.model_config  # type: ignore[attr-defined]
        try:
            tokenizer: Any = cached_tokenizer_from_config(config)
            declared = config.try_get_generation_config().get("eos_token_id")
            ends = end_ids(declared, tokenizer.eos_token_id)
            return {**describe_tokenizer(tokenizer), "end_ids": ends, "config": plain_config(config.hf_config)}
        except Exception as error:
            return {"error": f"{type(error).__name__}: {error}"}

    def grpo_lab_note_version(self, version: str) -> dict[str, Any]:
        """Name the weights that came another way (NCCL), so that a server that was started since does not know the
        name."""
        worker: Any = self
        worker.grpo_lab_version = version
        return {"version": version}

    def grpo_lab_weights_version(self) -> dict[str, Any]:
        """The version of the last complete load, "" for a worker that has its weights from the disk."""
        return {"version": getattr(self, "grpo_lab_version", "")}

    def grpo_lab_clear_cache(self) -> dict[str, Any]:
        """Write zeros over this worker's KV cache (`sync.clear_cache`) -> {} or {error}."""
        from grpo_lab.engines.weights.sync import clear_cache

        try:
            clear_cache(self.model_runner)  # type: ignore[attr-defined]
        except Exception as error:
            return {"error": f"{type(error).__name__}: {error}"}
        return {}

    def grpo_lab_differing_tensors(self, folder: str) -> dict[str, Any]:
        """Compare this worker's tensors with those of a folder -> {differing: [{name, relative, largest}]} or
        {error}."""
        from grpo_lab.engines.weights.proof import differing_tensors

        worker: Any = self
        try:
            found = differing_tensors(worker.model_runner.get_model(), read_shards(trusted_folder(folder)))
        except Exception as error:
            return {"error": f"{type(error).__name__}: {error}"}
        return {"differing": [dataclasses.asdict(entry) for entry in itertools.islice(found, 20)]}


#: what two tokenizers with the same vocabulary can still cut differently
PROBE_TEXT = "  Tom has 1234 apples;\n\tthey cost $5.07 – “naïve” 苹果 \\frac{1}{2} isn't\n\n"


def end_ids(declared: Any, tokenizer_id: int | None) -> list[int]:
    """Token ids that end a completion: the generation config's (`declared`: None, one, or several) and the
    tokenizer's."""
    ids = [] if declared is None else [declared] if isinstance(declared, int) else list(declared)
    return sorted({*ids, *([] if tokenizer_id is None else [tokenizer_id])})


def describe_tokenizer(tokenizer: Any) -> dict[str, Any]:
    """Vocabulary, how text is cut, and chat template, as sizes and hashes."""
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


def plain_config(config: Any) -> dict[str, Any]:
    """A transformers config as JSON values; `model_type` is one of them."""
    written: dict[str, Any] = json.loads(config.to_json_string(use_diff=False))
    return written
