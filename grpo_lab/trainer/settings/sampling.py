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

from grpo_lab.rollouts.sampling_keys import refuse_ends, refuse_keys, refuse_two_names

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


def check_sampling_correction(args: Any) -> None:
    """Refuse sampling settings that would make wrong numbers, or under which the correction would be wrong.

    Raises:
        ValueError: continuous batching in half precision; a key of ``generation_kwargs`` that the engine ignores, that says something
            else than the setting it is another name for, or that changes what TRL reads from the answer (``rollouts.sampling_keys``); vLLM with the
            correction on, and a setting (flat or in ``generation_kwargs``) that cuts the distribution.
    """
    half = next((name for name in ("bf16", "fp16") if getattr(args, name)), None)
    if args.use_transformers_continuous_batching and not args.use_vllm and half is not None:
        raise ValueError(
            f"`use_transformers_continuous_batching` with `{half}`: for its first generation TRL casts the model itself to {half}, rotary "
            f"frequencies too, and leaves it so, whatever it was loaded in: small steps are lost from then on. Set `{half}: false`, or "
            "generate with `use_vllm`, or leave `use_transformers_continuous_batching` out"
        )
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
