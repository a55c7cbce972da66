"""What an engine really multiplies with, under the trainer's names.

vLLM fuses the trainer's matrices (q, k and v into one, gate and up into one) and its CPU build repacks them for oneDNN
and keeps only the packed form: `layer.weight` is then empty, and reading it proves nothing. A linear layer is
therefore probed: fed with unit vectors it answers with the columns of the matrix it uses, in whatever form it keeps
them. Products with one and sums with zero are exact, so the answer equals the weight to the last bit.

    W[:, j] = layer(e_j) - bias,    computed without the bias

`_FUSED` is the naming of vLLM's dense decoder models (Qwen2, Qwen3, Llama, Mistral, Gemma); a model that says
otherwise in `packed_modules_mapping` is believed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

_FUSED = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}
_PROBE_ROWS = 512


def fused_parts(model: nn.Module) -> dict[str, list[str]]:
    """Engine's fused module name -> trainer's module names, in the order in which their rows are stacked."""
    return {**_FUSED, **getattr(model, "packed_modules_mapping", {})}


def trainer_names(engine_name: str, fused: Mapping[str, list[str]]) -> list[str]:
    """Trainer's names of the tensors that make up one engine tensor.

    >>> trainer_names("model.layers.0.self_attn.qkv_proj.bias", _FUSED)[1]
    'model.layers.0.self_attn.k_proj.bias'
    """
    parts = engine_name.split(".")
    for index, part in enumerate(parts):
        if part in fused:
            return [".".join([*parts[:index], piece, *parts[index + 1 :]]) for piece in fused[part]]
    return [engine_name]


def is_packed(module: nn.Module) -> bool:
    """True where the module multiplies through a CPU kernel, with or without a packed copy of its weight."""
    return callable(getattr(module, "cpu_linear", None)) and hasattr(module, "weight")


def is_head(model: nn.Module, module: nn.Module) -> bool:
    """True for a module whose `weight` belongs to an embedding table or an LM head (rows = vocabulary)."""
    return hasattr(module, "org_vocab_size")


def tied_modules(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Packed modules that share their weight with an earlier module: the tied LM head, first of all."""
    seen: set[int] = set()
    tied = []
    for name, module in model.named_modules():
        if not is_packed(module) or module.weight.numel() == 0:
            continue
        if id(module.weight) in seen:
            tied.append((name, module))
        seen.add(id(module.weight))
    return tied


@torch.no_grad()
def probed_weight(module: Any, columns: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """The matrix [rows, columns] that a linear layer multiplies with, column by column from its answers to e_j."""
    pieces = []
    for start in range(0, columns, _PROBE_ROWS):
        width = min(_PROBE_ROWS, columns - start)
        units = torch.zeros(width, columns, dtype=dtype, device=device)
        units[torch.arange(width), start + torch.arange(width)] = 1
        pieces.append(module.quant_method.apply(module, units, bias=None))
    return torch.cat(pieces).T.contiguous()


def input_width(module: Any) -> int:
    """Number of columns of a module's weight, also where the weight itself has been given up."""
    if module.weight.ndim == 2:
        return int(module.weight.shape[1])
    return int(module.input_size_per_partition)


def engine_tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """(engine's name, tensor it computes with) for every parameter, packed ones probed.

    A tied head is listed under its own name too, since it may compute with something else than the embedding. The
    embedding table itself is looked up, never multiplied, and is read as it stands. Vocabulary rows that vLLM pads
    are cut off.
    """
    dtype = next(parameter.dtype for parameter in model.parameters() if parameter.numel())
    device = next(parameter.device for parameter in model.parameters() if parameter.numel())
    listed: set[str] = set()
    for name, module in model.named_modules():
        looked_up = is_head(model, module) and type(module).__name__ != "ParallelLMHead"
        if not is_packed(module) or module.weight.ndim > 2 or looked_up:
            continue
        weight = probed_weight(module, input_width(module), dtype, device)
        rows = int(getattr(module, "org_vocab_size", weight.shape[0]))
        listed.add(f"{name}.weight")
        yield f"{name}.weight", weight[:rows]
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if name not in listed and parameter.numel():
            owner = model.get_submodule(name.rpartition(".")[0])
            rows = int(getattr(owner, "org_vocab_size", parameter.shape[0])) if parameter.ndim else 0
            yield name, parameter.detach()[:rows] if parameter.ndim else parameter.detach()
