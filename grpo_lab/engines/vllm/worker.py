"""What runs inside the workers of a vLLM server: loads weights that the trainer left in shared memory.

Named on the server's command line as `--worker-extension-cls grpo_lab.engines.vllm.worker.WeightLoading`; vLLM mixes
the class into its worker, and `/collective_rpc` calls its methods. An exception here would end the engine, so
each method answers with its error instead, and the trainer raises it.

What a server must have in common with the trainer, besides the weights: told before anything is loaded.

Weights can be sent; what they mean cannot. A server with another end-of-sequence id makes completions that never end, and the
proof of the sync is perfect. One with other shapes fails in the middle of loading. Both sides describe themselves in plain values
(`describe_tokenizer`, `end_ids`, the model's config), and `mismatches` compares. Prompts are sent as token ids, so another chat
template changes nothing that is sampled: `remarks` tells of it.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import nn

from grpo_lab.engines.weights.weight_files import read_shards, shard_shapes, trusted_folder


class WeightLoading:
    """Methods that a worker gains. `model_runner` and `vllm_config` are the worker's own."""

    def grpo_lab_load_weights(self, folder: str, version: str) -> dict[str, Any]:
        """Load the shards of a folder into this worker -> {tensors, seconds, repacked, version} or {error}."""
        from vllm.config import set_current_vllm_config

        from grpo_lab.engines.weights.sync import load_into_runner, refuse_stream

        worker: Any = self
        try:
            refuse_stream(worker.model_runner.get_model(), shard_shapes(trusted_folder(folder)), ranks=_ranks(worker))
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
        """Name the weights that came another way (NCCL), so that a server that was started since does not know the name."""
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
        """Compare this worker's tensors with those of a folder -> {differing: [{name, relative, largest}]} or {error}."""
        from grpo_lab.engines.weights.proof import differing_tensors

        worker: Any = self
        try:
            found = differing_tensors(worker.model_runner.get_model(), read_shards(trusted_folder(folder)))
        except Exception as error:
            return {"error": f"{type(error).__name__}: {error}"}
        return {"differing": [dataclasses.asdict(entry) for entry in itertools.islice(found, 20)]}


def _ranks(worker: Any) -> int:
    """Over how many workers one copy of the model is cut."""
    parallel = worker.vllm_config.parallel_config
    return int(parallel.tensor_parallel_size * parallel.pipeline_parallel_size)


#: what two tokenizers with the same vocabulary can still cut differently
PROBE_TEXT = "  Tom has 1234 apples;\n\tthey cost $5.07 – “naïve” 苹果 \\frac{1}{2} isn't\n\n"


def end_ids(declared: Any, tokenizer_id: int | None) -> list[int]:
    """Token ids that end a completion: the generation config's (`declared`: None, one, or several) and the tokenizer's."""
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


def parameter_shapes(model_class: type[nn.Module], config: Any) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every parameter that a model of this class and config has; no memory is used."""
    with torch.device("meta"):
        model = model_class(config)
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}


def shape_mismatches(model_class: type[nn.Module], ours: Any, theirs: Mapping[str, Any]) -> list[str]:
    """Sentences about parameters in which a model of our config and one of theirs differ; empty where all agree."""
    if theirs.get("model_type") != ours.model_type:
        return [f"its model is a {theirs.get('model_type')!r}, the trainer's a {ours.model_type!r}"]
    mine = parameter_shapes(model_class, ours)
    other = parameter_shapes(model_class, type(ours).from_dict(dict(theirs)))
    wrong = [
        f"{n}: {list(other[n])}, the trainer's {list(mine[n])}" for n in mine if n in other and mine[n] != other[n]
    ]
    wrong += [f"{n}: not there, the trainer's {list(mine[n])}" for n in mine if n not in other]
    wrong += [f"{n}: {list(other[n])}, the trainer has none" for n in other if n not in mine]
    more = f" and {len(wrong) - 4} more" if len(wrong) > 4 else ""
    return [f"shapes of its parameters ({'; '.join(wrong[:4])}{more})"] if wrong else []


def mismatches(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> list[str]:
    """Sentences about end-of-sequence ids and tokenizer; `ours`, `theirs`: `describe_tokenizer` and `end_ids`."""
    found = []
    if theirs["end_ids"] != ours["end_ids"]:
        found.append(
            f"its end-of-sequence ids are {theirs['end_ids']}, the trainer's {ours['end_ids']} (generation_config.json and "
            "tokenizer): completions would not end where the trainer takes them to end"
        )
    if theirs["vocabulary_size"] != ours["vocabulary_size"]:
        found.append(f"its vocabulary has {theirs['vocabulary_size']} tokens, the trainer's {ours['vocabulary_size']}")
    elif theirs["vocabulary"] != ours["vocabulary"]:
        found.append("its vocabulary has other tokens behind the same ids")
    elif theirs["encoding"] != ours["encoding"]:
        found.append("its tokenizer cuts the same text into other tokens")
    return found


def remarks(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> list[str]:
    """Differences that change no completion, since prompts are sent as token ids."""
    if theirs["chat_template"] == ours["chat_template"]:
        return []
    return ["its chat template is not the trainer's (the trainer's is in force: prompts are sent as token ids)"]


def says(url: str, found: Collection[str]) -> str:
    """The sentence that a run with the wrong server does not start with."""
    return (
        f"the vLLM server at {url} serves another model than the trainer trains: {'; '.join(found)}. Start it from the folder "
        "that training starts from: `grpo-lab serve --model FOLDER`"
    )
