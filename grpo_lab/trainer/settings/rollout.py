"""The mapping ``rollout``: how completions are made, and what it cannot be combined with.

The sampler correction beside the sampling settings: what it cannot correct, and how it goes with completion length.

The correction weighs a completion by π_trainer/π_sampler. The engine's log-probs are those of the distribution that it drew
from: after temperature, and after top-p, top-k, min-p or penalties have cut it and it was renormalised over what was kept. The
trainer divides by the temperature, too, but cuts nothing. With a cut the ratio is then not 1 on-policy, but the
probability that the kept tokens had: below 1 at every token, and smallest where the policy is unsure.
See ``docs/algorithms/sampler_correction.md``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import field
from typing import Annotated, Any, Literal

from pydantic import Field

from grpo_lab.engines.vllm.engine import EngineOptions
from grpo_lab.engines.vllm.sampling_keys import refuse_ends, refuse_keys, refuse_two_names
from grpo_lab.settings import NULL_IS_DEFAULT, Count, Number, Seconds, must_be, settings

Budget = Annotated[int, Field(ge=0, strict=True), must_be("a number of tokens, 0 or more, or null for no budget")]
Text = Annotated[str, Field(strict=True), must_be("a text that closes the thinking")]
FileName = Annotated[str, Field(strict=True, min_length=1), must_be("the name of a file")]
Gone = Annotated[
    None,
    must_be("left out: whoever runs the server (systemd, Slurm, …) starts it again, and `return_timeout` waits for it"),
]


@settings()
class ServerSettings:
    """``rollout.server``: the talk with the server, beside TRL's ``vllm_server_base_url``, ``vllm_server_timeout``, ….

    Args:
        weights: ``auto``: NCCL between two GPUs, else shared memory; or one of the two by name.
        request_timeout: seconds without an answer after which a request counts as failed. A generation is one request: it must
            be longer than the longest generation.
        silence_timeout: seconds without a sign of work after which a wait ends: a generation during which the server counts no
            token or sleeps; any other request.
        retries: how often a failed request is sent again (not after ``request_timeout``).
        backoff: seconds before the second repetition; doubled each time.
        token_file: file with the server's token; null: ``GRPO_LAB_SERVER_TOKEN`` in the environment, else the file that
            ``grpo-lab serve`` makes for the address. The token itself is never a setting.
        restart: no longer a setting; a recipe that gives a command is refused.
        return_timeout: seconds within which a server that was lost must answer again; null: a lost server ends the run.
    """

    weights: Literal["auto", "nccl", "shared_memory"] = "auto"
    request_timeout: Seconds = 1800.0
    silence_timeout: Seconds = 180.0
    retries: Count = 4
    backoff: Seconds = 1.0
    token_file: FileName | None = None
    restart: Gone = None
    return_timeout: Seconds | None = None


#: sampling settings of either engine that would override the length limit of a phase, or end it for another reason
_LIMITS = ("max_tokens", "max_new_tokens", "max_length", "stop_strings", "stop", "stop_token_ids", "n")


_CUTS = ("repetition_detection", "max_time")


def check_thinking(args: Any, settings: RolloutSettings) -> None:
    """What a budget cannot be combined with, as far as the configuration knows. Raises ``ValueError``."""
    budget = settings.thinking_budget
    if budget is None:
        return
    if args.max_completion_length is None:
        raise ValueError(
            f"`rollout.thinking_budget` is {budget} and `max_completion_length` is None: what is left for the answer is the "
            "difference; set it"
        )
    if budget >= args.max_completion_length:
        raise ValueError(
            f"`rollout.thinking_budget` is {budget} and `max_completion_length` is {args.max_completion_length}: the budget, "
            "the inserted text and an answer must fit; lower the one or raise the other"
        )
    if getattr(args, "vllm_structured_outputs_regex", None) is not None:
        raise ValueError(
            "`vllm_structured_outputs_regex` would have to match the thinking and the answer each on its own under "
            "`rollout.thinking_budget`; leave one of them out"
        )
    overriding = [name for name in (*_LIMITS, *_CUTS) if name in (args.generation_kwargs or {})]
    if overriding:
        raise ValueError(
            f"`generation_kwargs.{overriding[0]}` would end the thinking or the answer where `rollout.thinking_budget` cannot "
            "see it; leave one of them out (`max_completion_length` is the limit of a whole completion)"
        )


@settings()
class RolloutSettings:
    """``rollout``: how completions are made, beside TRL's ``use_vllm``, ``vllm_mode`` and sampling settings.

    Args:
        verify_every: optimizer steps between proofs of the weight sync, after the first two syncs; 0: never.
        tolerance: largest mean |engine − trainer| in nats per token; ``None``: by dtype (float32 1e-4, float16 0.02,
            bfloat16 0.1).
        engine: options of the engine (``dtype``, ``max_model_len``, ``kv_cache_gib``, ``block_size``, ``seed``, …).
        server: the talk with a server (``weights``, ``request_timeout``, ``retries``, ``backoff``), see ``ServerSettings``.
        thinking_budget: tokens of thinking after which ``budget_text`` is inserted; ``None``: no budget (with any engine).
        budget_text: what is inserted; ``None``: the text of Qwen's documentation (``QWEN3_STOP_TEXT``).
    """

    verify_every: Count = 50
    tolerance: Number | None = None
    engine: Mapping[str, Any] | None = None
    server: Annotated[ServerSettings, NULL_IS_DEFAULT] = field(default_factory=ServerSettings)
    thinking_budget: Budget | None = None
    budget_text: Text | None = None

    def __post_init__(self) -> None:
        EngineOptions.from_mapping(self.engine or {})
        if self.budget_text is not None and self.thinking_budget is None:
            raise ValueError("`rollout.budget_text` has an effect only with `rollout.thinking_budget`; leave it out")


def refuse_idle_rollout(args: Any, written: Mapping[str, Any]) -> None:
    """ValueError for a setting of an engine or server that this run does not have."""
    idle = [name for name in ("verify_every", "tolerance", "engine", "server") if name in written]
    if idle and not args.use_vllm:
        raise ValueError(
            f"`rollout.{idle[0]}` has an effect only with `use_vllm: true`; leave it out or switch vLLM on"
        )
    if "server" in written and args.vllm_mode != "server":
        raise ValueError(
            f"`rollout.server` has an effect only with `vllm_mode: server`, and it is {args.vllm_mode!r}: leave it out"
        )
    if "engine" in written and args.vllm_mode == "server":
        raise ValueError(
            "`rollout.engine` has no effect with `vllm_mode: server`, where the server was started by itself: leave it out "
            "and give these options to `grpo-lab serve` (--dtype, --max-model-len, …)"
        )


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
