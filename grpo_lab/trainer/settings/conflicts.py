"""Settings that cannot stand beside each other, one row each; and TRL's fields, kept saying what ours say.

A row is (setting, when, sentence). ``BEFORE`` is asked of what is written, ``AFTER`` of the algorithm that it comes to.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from grpo_lab import registry
from grpo_lab.advantages import reads_values
from grpo_lab.engines.vllm.sampling_keys import refuse_ends, refuse_keys, refuse_two_names
from grpo_lab.objectives import preset
from grpo_lab.settings import from_json
from grpo_lab.trainer.settings.algorithm import NOT_TRLS, TRL_EQUIVALENT, TRL_SCALING, Algorithm, trl_loss_type
from grpo_lab.trainer.settings.knobs import CLIP, advantage_choice, written
from grpo_lab.trainer.settings.parse import LabSettings


class Conflict(NamedTuple):
    """A setting, when it cannot be (anything but None and False of it is ``found``), and what is said then.

    ``sentence`` is formatted with ``args`` (TRL's fields), ``ours`` (``LabSettings``), ``algorithm`` and ``found``.
    """

    setting: str
    when: Callable[[Any, LabSettings, Any], Any]
    sentence: str


def refuse(rows: Iterable[Conflict], args: Any, ours: LabSettings, algorithm: Algorithm | None = None) -> None:
    """``ValueError`` with the sentence of the first row that holds."""
    for row in rows:
        found = row.when(args, ours, algorithm)
        if found is not None and found is not False:
            raise ValueError(row.sentence.format(args=args, ours=ours, algorithm=algorithm, found=found))


def _first(names: Iterable[str], among: Any) -> str | None:
    return next((name for name in names if name in (among or ())), None)


def _engine_settings(args: Any) -> Any:
    """What is written of ``rollout``."""
    return from_json(args.rollout, "rollout")


_PHASE = (
    *("max_tokens", "max_new_tokens", "max_length", "stop_strings", "stop", "stop_token_ids", "n"),
    *("repetition_detection", "max_time"),
)
"""Sampling settings of either engine that would end a phase of thinking or answering."""
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
"""Settings that cut or bend the engine's distribution → the values that leave it alone."""
LOWEST, HIGHEST = 0.01, 2.0
"""vLLM raises a lower temperature (other than 0, greedy) to the lowest, without an error."""


class _Cut(NamedTuple):
    setting: str
    value: Any
    neutral: Any


def _cut(args: Any, *_: Any) -> _Cut | None:
    """What cuts the engine's distribution under the sampler correction; ``generation_kwargs`` win over the flat settings.

    The engine's log-probs are of the distribution that it drew from, cut and renormalised; the trainer's are not: with a cut
    the ratio is below 1 on-policy at every token. See ``docs/algorithms/sampler_correction.md``.
    """
    extra = args.generation_kwargs or {}
    if args.use_vllm and args.vllm_importance_sampling_correction:
        for name, allowed in NEUTRAL.items():
            value = extra[name] if name in extra else getattr(args, name, None)
            if value not in allowed:
                return _Cut(f"generation_kwargs.{name}" if name in extra else name, value, allowed[-1])
    return None


def _half(args: Any, *_: Any) -> str | None:
    batching = args.use_transformers_continuous_batching and not args.use_vllm
    return next((name for name in ("bf16", "fp16") if getattr(args, name)), None) if batching else None


def _budget(args: Any, ours: LabSettings, *_: Any) -> Any:
    return ours.rollout.thinking_budget


BEFORE = (
    Conflict(
        "rollout",
        lambda args, *_: (
            None if args.use_vllm else _first(("verify_every", "tolerance", "engine", "server"), _engine_settings(args))
        ),
        "`rollout.{found}` has an effect only with `use_vllm: true`; leave it out or switch vLLM on",
    ),
    Conflict(
        "rollout.server",
        lambda args, *_: args.vllm_mode != "server" and _first(["server"], _engine_settings(args)),
        "`rollout.server` has an effect only with `vllm_mode: server`, and it is {args.vllm_mode!r}: leave it out",
    ),
    Conflict(
        "rollout.engine",
        lambda args, *_: args.vllm_mode == "server" and _first(["engine"], _engine_settings(args)),
        "`rollout.engine` has no effect with `vllm_mode: server`, where the server was started by itself: leave it out "
        "and give these options to `grpo-lab serve` (--dtype, --max-model-len, …)",
    ),
    Conflict(
        "rollout.thinking_budget",
        lambda args, *all: _budget(args, *all) is not None and args.max_completion_length is None,
        "`rollout.thinking_budget` is {ours.rollout.thinking_budget} and `max_completion_length` is None: what is left for "
        "the answer is the difference; set it",
    ),
    Conflict(
        "rollout.thinking_budget",
        lambda args, *all: _budget(args, *all) is not None and _budget(args, *all) >= args.max_completion_length,
        "`rollout.thinking_budget` is {ours.rollout.thinking_budget} and `max_completion_length` is "
        "{args.max_completion_length}: the budget, the inserted text and an answer must fit; lower the one or raise the "
        "other",
    ),
    Conflict(
        "rollout.thinking_budget",
        lambda args, *all: _budget(args, *all) is not None and args.vllm_structured_outputs_regex,
        "`vllm_structured_outputs_regex` would have to match the thinking and the answer each on its own under "
        "`rollout.thinking_budget`; leave one of them out",
    ),
    Conflict(
        "rollout.thinking_budget",
        lambda args, *all: _budget(args, *all) is not None and _first(_PHASE, args.generation_kwargs),
        "`generation_kwargs.{found}` would end the thinking or the answer where `rollout.thinking_budget` cannot see it; "
        "leave one of them out (`max_completion_length` is the limit of a whole completion)",
    ),
    Conflict(
        "sampler",
        lambda args, ours, _: ours.sampler is not None and not args.shuffle_dataset,
        "`shuffle_dataset`=False asks for the order of the data set and `sampler`={ours.sampler.name!r} for another: leave "
        "one out",
    ),
    Conflict(
        "sampler",
        lambda args, ours, _: ours.sampler is not None and args.ignore_data_skip,
        "`ignore_data_skip`=True would resume with other prompts than the run had: `sampler` replays the epoch from its "
        "start; leave one out",
    ),
    Conflict(
        "objective",
        lambda args, ours, _: ours.objective is None and args.loss_type.startswith(NOT_TRLS),
        "`loss_type`={args.loss_type!r} is what a run with `objective` wrote there, and TRL has no such loss: set "
        "`objective` as in that run, or a `loss_type` of TRL's",
    ),
    Conflict(
        "kl.coefficient",
        lambda args, ours, _: (
            ours.kl is not None and ours.kl.coefficient is not None and args.beta not in (0.0, ours.kl.coefficient)
        ),
        "`kl.coefficient` is {ours.kl.coefficient} and `beta` is {args.beta}: two names for one number; set one",
    ),
    Conflict(
        "use_transformers_continuous_batching",
        _half,
        "`use_transformers_continuous_batching` with `{found}`: for its first generation TRL casts the model itself to "
        "{found}, rotary frequencies too, and leaves it so, whatever it was loaded in: small steps are lost from then on. "
        "Set `{found}: false`, or generate with `use_vllm`, or leave `use_transformers_continuous_batching` out",
    ),
    Conflict(
        "temperature",
        lambda args, *_: args.use_vllm and not LOWEST <= args.temperature <= HIGHEST,
        f"`temperature` is {{args.temperature!r}}: vLLM samples at {LOWEST} to {HIGHEST}. Below it takes {LOWEST} instead, "
        "while the trainer computes its log-probs at the value written; above it refuses",
    ),
    Conflict(
        "vllm_importance_sampling_correction",
        _cut,
        "`{found.setting}`={found.value!r} does not combine with `vllm_importance_sampling_correction`: the engine's "
        "log-probs are renormalised over the tokens that it keeps, the trainer's are not, so the ratio would be below 1 "
        "even where both agree. Leave `{found.setting}` at {found.neutral!r}, or set "
        "`vllm_importance_sampling_correction: false`",
    ),
)


def _critic(_: Any, ours: LabSettings, algorithm: Algorithm) -> bool:
    return algorithm.value is not None


def _updates(args: Any) -> float:
    """Optimizer steps on one generation batch."""
    return float(args.steps_per_generation * args.num_iterations / args.gradient_accumulation_steps)


def _fresh_reference(args: Any, *_: Any) -> bool:
    """Whether the reference is the policy whenever a batch is generated."""
    every, updates = args.reference_every, _updates(args)
    if not isinstance(every, int):
        return every is not None
    return every == 1 if updates < 1 else updates % every == 0


AFTER = (
    Conflict(
        "vllm_importance_sampling_mode",
        lambda args, _, algorithm: (
            algorithm.objective is not None
            and algorithm.objective.whole_response
            and args.use_vllm
            and args.vllm_importance_sampling_correction
            and args.vllm_importance_sampling_mode.startswith("token")
        ),
        "`vllm_importance_sampling_mode` is {args.vllm_importance_sampling_mode!r}, and objective "
        "{algorithm.objective.name!r} is about whole responses: use 'sequence_mask' (TRL's default) or 'sequence_truncate', "
        "or switch `vllm_importance_sampling_correction` off",
    ),
    Conflict(
        "value",
        lambda _, ours, algorithm: ours.value is not None and not reads_values(algorithm.advantage),
        "`value` is set, and no critic is asked for: the advantage rule is {algorithm.names[advantage]!r}; set "
        "`objective: ppo` (or `advantage: gae`), or leave `value` out",
    ),
    Conflict(
        "advantage",
        lambda _, ours, algorithm: ours.objective is None and reads_values(algorithm.advantage),
        "`advantage` is 'gae', which needs a critic: set `objective` (e.g. 'ppo') beside it",
    ),
    Conflict(
        "update.dead_groups",
        lambda args, ours, algorithm: _critic(args, ours, algorithm) and ours.update.dead_groups == "resample",
        "`update.dead_groups` is 'resample', and with a critic no group is dead: every completion has returns to learn from; "
        "leave it out",
    ),
    Conflict(
        "value.missing_eos_penalty",
        lambda args, _, algorithm: (
            algorithm.value is not None
            and algorithm.value.missing_eos_penalty is not None
            and args.mask_truncated_completions
        ),
        "`value.missing_eos_penalty` has no effect with `mask_truncated_completions`, which takes the same completions out "
        "of the loss; leave one out",
    ),
    Conflict(
        "kl.gamma",
        lambda args, ours, algorithm: (
            _critic(args, ours, algorithm) and ours.kl is not None and ours.kl.gamma is not None
        ),
        "`kl.gamma` has no effect with a critic, whose discount is for all rewards: set `value.gamma`, and leave it out",
    ),
    Conflict(
        "kl",
        lambda _, ours, algorithm: ours.kl is not None and algorithm.objective is None,
        "`kl` is set, but the loss is left to TRL ({algorithm.left_to_trl}), which has a KL of its own; use `beta`",
    ),
    Conflict(
        "reference_every",
        lambda args, *_: args.reference_every is not None and args.beta == 0.0,
        "`reference_every` is {args.reference_every!r}, but nothing reads a reference (`beta` is 0 and `kl` is not set): set "
        "one of them, or leave it out",
    ),
    Conflict(
        "reference_every",
        lambda args, *_: args.reference_every is not None and args.sync_ref_model,
        "`reference_every`={args.reference_every!r} and `sync_ref_model` both move the reference (TRL's with "
        "`ref_model_mixup_alpha`={args.ref_model_mixup_alpha}): leave one out",
    ),
    Conflict(
        "reference_every",
        lambda args, _, algorithm: (
            _updates(args) if _fresh_reference(args) and _kl_placement(algorithm) == "reward" else None
        ),
        "`reference_every`={args.reference_every!r} makes the reference the policy that generates ({found:g} updates a "
        "generation batch), so a KL in the reward is always 0: raise `reference_every`, or put the KL in the loss "
        "(`kl.placement: loss`)",
    ),
    Conflict(
        "reference_every",
        lambda args, *_: _updates(args) if _fresh_reference(args) and _updates(args) <= 1 else None,
        "`reference_every`={args.reference_every!r} has no effect but to switch the KL off: a generation batch gets {found:g} "
        "updates, and the reference is the policy itself; raise it, or raise `steps_per_generation` or `num_iterations`",
    ),
)


def _kl_placement(algorithm: Algorithm) -> str | None:
    kl = None if algorithm.objective is None else algorithm.objective.kl
    return None if kl is None else kl.placement


def refuse_sampling_keys(args: Any) -> None:
    """``ValueError`` for a key of ``generation_kwargs`` that the engine ignores, that says something else than the setting it is
    another name for, or that changes what TRL reads from the answer."""
    extra = args.generation_kwargs or {}
    refuse_keys(extra, args.vllm_mode if args.use_vllm else "transformers")
    alike = {"temperature": args.temperature}
    if args.use_vllm or args.objective is not None:  # without either, all that counts is TRL's
        alike["max_completion_length"] = args.max_completion_length
    refuse_two_names(extra, alike)
    if args.mask_truncated_completions:
        refuse_ends(extra)


# -- TRL's fields and ours ------------------------------------------------------------------------------------------------

NOT_HONOURED: tuple[str, ...] = (
    *("top_entropy_quantile", "entropy_coef", "use_adaptive_entropy", "entropy_coef_min", "entropy_coef_max"),
    *("entropy_coef_delta", "entropy_target", "off_policy_mask_threshold", "multi_objective_aggregation"),
    *("sapo_temperature_neg", "sapo_temperature_pos"),
    *("vespo_k_pos", "vespo_lambda_pos", "vespo_k_neg", "vespo_lambda_neg"),
)
"""TRL settings that act inside TRL's own loss or advantages only: refused beside ``objective``."""
SCALING: dict[str, str] = {**TRL_SCALING, "process": "group"}
"""Advantage rule → TRL's ``scale_rewards``, as far as that goes: what divides. Of a rule that is not here: "none"."""


def _said_of(ours: LabSettings) -> dict[str, tuple[Any, str, Any]]:
    """TRL's field → (what ours make it, our setting, its value)."""
    chosen = ours.objective
    if chosen is None:
        rule = None if ours.advantage is None else ours.advantage.name
        return {} if rule is None else {"scale_rewards": (_scaling(rule), "advantage", rule)}
    row = preset(chosen.name or "grpo")
    loss_type, level = TRL_EQUIVALENT.get(chosen.name or "grpo", (None, row.ratio))
    rule = advantage_choice(ours.advantage, chosen.advantage or row.advantage)[0]
    said: dict[str, tuple[Any, str, Any]] = {
        "loss_type": (loss_type, "objective", chosen.name),
        "importance_sampling_level": (chosen.ratio or level, "objective.ratio", chosen.ratio or row.ratio),
        "scale_rewards": (_scaling(rule), "advantage", rule),
    }
    if row.plain_k3 and ours.kl is None:
        said["use_bias_correction_kl"] = (False, "objective", chosen.name)
    knobs = {name: chosen.knobs[name] for name in CLIP if chosen.knobs.get(name) is not None}
    return said | {name: (value, f"objective.{name}", value) for name, value in knobs.items()}


def agree_with_trl(args: Any, ours: LabSettings) -> None:
    """Refuse TRL settings that say otherwise than ours, or that ours do not honour; then write ours into TRL's fields, so that
    whatever reads those (model card, logs) reads the truth.

    Raises:
        ValueError: names both settings.
    """
    chosen, said = ours.objective, _said_of(ours)
    place = ("advantage", ours.advantage and ours.advantage.name) if chosen is None else ("objective", chosen.name)
    for name in NOT_HONOURED if chosen is not None else ("multi_objective_aggregation",) if said else ():
        default = next(f.default for f in dataclasses.fields(args) if f.name == name)
        if getattr(args, name) != default:
            raise ValueError(
                f"`{name}`={getattr(args, name)!r} acts in TRL's own loss or advantages, and `{place[0]}`={place[1]!r} does "
                f"not honour it: leave one out"
            )
    for name, (expected, setting, value) in said.items():
        if name == "loss_type" and chosen is not None and _is_derived(args, chosen):
            continue
        if written(args, name) and getattr(args, name) != expected:
            meaning = f"has no counterpart among TRL's `{name}`" if expected is None else f"means `{name}`={expected!r}"
            raise ValueError(
                f"`{name}`={getattr(args, name)!r} contradicts `{setting}`={value!r}, which {meaning}: leave one out"
            )
    values: Mapping[str, Any] = {name: expected for name, (expected, *_) in said.items()}
    if chosen is not None:
        row = preset(chosen.name or "grpo")
        values = {**values, "loss_type": trl_loss_type(chosen), "importance_sampling_level": chosen.ratio or row.ratio}
    for name, value in values.items():
        setattr(args, name, value)


def _is_derived(args: Any, chosen: Any) -> bool:
    """Whether ``agree_with_trl`` wrote the ``loss_type``; a saved record may hold a part by another name."""
    return args.loss_type == trl_loss_type(chosen) or args.loss_type.startswith(f"{NOT_TRLS}{chosen.name or 'grpo'}+")


def clip_in_force(args: Any, algorithm: Algorithm) -> None:
    """TRL's clip settings as the surrogate has them: a team's may have defaults of its own."""
    surrogate = algorithm.objective.surrogate if algorithm.objective is not None else None
    for name in set(CLIP) & set(registry.knobs_of(surrogate)):
        setattr(args, name, getattr(surrogate, name))


def _scaling(rule: Any) -> str:
    return SCALING.get(rule, "none") if isinstance(rule, str) else "none"
