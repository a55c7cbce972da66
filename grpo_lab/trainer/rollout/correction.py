"""The sampler correction beside the sampling settings: what it cannot correct, and how it goes with completion length.

The correction weighs a completion by π_trainer/π_sampler. The engine's log-probs are those of the distribution that it drew
from: after temperature, and after top-p, top-k, min-p or penalties have cut it and it was renormalised over what was kept. The
trainer divides by the temperature, too, but cuts nothing. With a cut the ratio is then not 1 on-policy, but the
probability that the kept tokens had: below 1 at every token, and smallest where the policy is unsure.
See ``docs/algorithms/sampler_correction.md``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from grpo_lab.rollouts.sampling_keys import refuse_ends, refuse_keys, refuse_two_names
from grpo_lab.trainer.metrics.book import MetricBook

#: settings that cut or bend the engine's distribution → the values that leave it alone
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "top_p": (None, 1.0),
    "top_k": (None, 0, -1),
    "min_p": (None, 0.0),
    "repetition_penalty": (None, 1.0),
    "presence_penalty": (None, 0.0),
    "frequency_penalty": (None, 0.0),
    "min_tokens": (None, 0),
    "logit_bias": (None, {}),
    "bad_words": (None, []),
    "allowed_token_ids": (None,),
    "structured_outputs": (None,),
    "response_format": (None, {"type": "text"}),
    "extra_args": (None, {}),
    "vllm_xargs": (None, {}),
    "vllm_structured_outputs_regex": (None,),
}
#: vLLM raises a lower temperature (other than 0, greedy) to this one, without an error
LOWEST_TEMPERATURE, HIGHEST_TEMPERATURE = 0.01, 2.0
QUARTILES = 4


def check_sampling_correction(args: Any) -> None:
    """Refuse sampling settings that would make wrong numbers, or under which the correction would be wrong.

    Raises:
        ValueError: a key of ``generation_kwargs`` that the engine ignores, that says something else than the setting it is
            another name for, or that changes what TRL reads from the answer (``rollouts.sampling_keys``); vLLM with the
            correction on, and a setting (flat or in ``generation_kwargs``) that cuts the distribution.
    """
    extra = args.generation_kwargs or {}
    refuse_keys(extra, args.vllm_mode if args.use_vllm else "transformers")
    alike = {"temperature": args.temperature}
    if args.use_vllm or getattr(args, "objective", None) is not None:  # without either, all that counts is TRL's
        alike["max_completion_length"] = args.max_completion_length
    refuse_two_names(extra, alike)
    if args.mask_truncated_completions:
        refuse_ends(extra)
    if args.use_vllm and not LOWEST_TEMPERATURE <= args.temperature <= HIGHEST_TEMPERATURE:
        raise ValueError(
            f"`temperature` is {args.temperature!r}: vLLM samples at {LOWEST_TEMPERATURE} to {HIGHEST_TEMPERATURE}. Below it takes "
            f"{LOWEST_TEMPERATURE} instead, while the trainer computes its log-probs at the value written; above it refuses"
        )
    if not (args.use_vllm and args.vllm_importance_sampling_correction):
        return
    for setting, name, value in _written(args, extra):
        if value not in NEUTRAL[name]:
            neutral = next(allowed for allowed in NEUTRAL[name][::-1])
            raise ValueError(
                f"`{setting}`={value!r} does not combine with `vllm_importance_sampling_correction`: the engine's log-probs are "
                "renormalised over the tokens that it keeps, the trainer's are not, so the ratio would be below 1 even where "
                f"both agree. Leave `{setting}` at {neutral!r}, or set `vllm_importance_sampling_correction: false`"
            )


def _written(args: Any, extra: dict[str, Any]) -> Iterator[tuple[str, str, Any]]:
    """(setting as the user writes it, name, value); ``generation_kwargs`` win over the flat settings."""
    for name in NEUTRAL:
        if name in extra:
            yield f"generation_kwargs.{name}", name, extra[name]
        elif hasattr(args, name):
            yield name, name, getattr(args, name)


def length_quartiles(lengths: Tensor) -> Tensor:
    """Quartile 0 to 3 of each completion's length among all of the batch, long ``[N]``; equal lengths share one."""
    cuts = torch.quantile(lengths.float(), torch.tensor([0.25, 0.5, 0.75], device=lengths.device))
    return torch.bucketize(lengths.float(), cuts)


def kept_by_bounds(weights: Tensor, mode: str, low: float | None, high: float | None) -> Tensor:
    """bool like ``weights``: the ratio lay within the bounds (``*_mask`` sets others to 0, ``*_truncate`` to the bound)."""
    if mode.endswith("mask"):
        return weights != 0
    kept = torch.ones_like(weights, dtype=torch.bool)
    if low is not None:
        kept &= weights > low
    if high is not None:
        kept &= weights < high
    return kept


def by_length(weights: Tensor, mask: Tensor, quartiles: Tensor, kept: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
    """Sums and counts of the weights and of what was kept, per quartile of completion length.

    Args:
        weights: ``[B, T]`` per token, or ``[B, 1]`` per completion; then completions are counted.
        mask: bool ``[B, T]``, tokens that carry loss.
        quartiles: long ``[B]``.
        kept: bool like ``weights``.
    """
    chosen = mask.any(1, keepdim=True) if weights.size(1) == 1 else mask
    pairs = {}
    for quartile in range(QUARTILES):
        where = chosen & (quartiles == quartile).unsqueeze(1)
        count = where.sum()
        pairs[f"sampling/ratio_mean/len_q{quartile + 1}"] = (weights.float().masked_fill(~where, 0.0).sum(), count)
        pairs[f"sampling/kept_share/len_q{quartile + 1}"] = ((kept & where).sum(), count)
    return pairs


def add_by_length(book: MetricBook, trainer: Any, weights: Tensor, mask: Tensor, quartiles: Tensor) -> None:
    """``by_length`` of some rows into the book, this rank's share."""
    for name, (total, count) in by_length(weights, mask, quartiles, _kept(trainer, weights)).items():
        book.add(name, total, count)


def record_by_length(trainer: Any, output: dict[str, Any], mask: Tensor, mode: str) -> None:
    """``by_length`` of a generation batch whose weights TRL made, gathered over ranks."""
    weights = output["importance_sampling_ratio"]
    pairs = by_length(weights, mask, output["length_quartile"], _kept(trainer, weights))
    local = torch.stack([torch.stack([total.float(), count.float()]) for total, count in pairs.values()])
    sums = trainer.accelerator.gather(local.unsqueeze(0)).sum(0)
    book = trainer.metric_book(mode)
    for name, (total, count) in zip(pairs, sums, strict=True):
        book.add_alike(name, total, count)


def _kept(trainer: Any, weights: Tensor) -> Tensor:
    low, high = trainer.vllm_importance_sampling_clip_min, trainer.vllm_importance_sampling_clip_max
    return kept_by_bounds(weights, trainer.vllm_importance_sampling_mode, low, high)
