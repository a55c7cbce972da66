"""TRL's settings beside ours: what contradicts is refused, and what says the same is written into both."""

from __future__ import annotations

import dataclasses
from typing import Any

from grpo_lab import registry
from grpo_lab.objectives import preset
from grpo_lab.trainer.settings.algorithm import NOT_TRLS, TRL_EQUIVALENT, TRL_SCALING, Algorithm, trl_loss_type
from grpo_lab.trainer.settings.knobs import CLIP, advantage_choice, written
from grpo_lab.trainer.settings.parse import LabSettings

#: TRL settings that act inside TRL's own loss or advantages only: refused beside `objective`.
NOT_HONOURED: tuple[str, ...] = (
    "top_entropy_quantile",
    "entropy_coef",
    "use_adaptive_entropy",
    "entropy_coef_min",
    "entropy_coef_max",
    "entropy_coef_delta",
    "entropy_target",
    "off_policy_mask_threshold",
    "multi_objective_aggregation",
    "sapo_temperature_neg",
    "sapo_temperature_pos",
    "vespo_k_pos",
    "vespo_lambda_pos",
    "vespo_k_neg",
    "vespo_lambda_neg",
)


#: advantage rule → TRL's ``scale_rewards``, as far as that goes: what divides. Of a rule that is not here TRL's scaling is not in force: "none"
SCALING: dict[str, str] = {**TRL_SCALING, "process": "group"}


def refuse_contradictions(args: Any, settings: LabSettings) -> None:
    """Refuse TRL settings beside ``objective`` that it does not honour, or that say the same thing differently."""
    chosen = settings.objective
    assert chosen is not None
    for name in NOT_HONOURED:
        if written(args, name) and getattr(args, name) != _default(args, name):
            raise ValueError(
                f"`{name}`={getattr(args, name)!r} acts in TRL's own loss, and `objective`={chosen.name!r} does not honour "
                f"it: leave out `{name}`, or leave out `objective` and use TRL's `loss_type`"
            )
    row = preset(chosen.name or "grpo")
    loss_type, level = TRL_EQUIVALENT.get(chosen.name or "grpo", (None, row.ratio))
    derived = args.loss_type == trl_loss_type(chosen) or args.loss_type.startswith(
        f"{NOT_TRLS}{chosen.name or 'grpo'}+"
    )
    if not derived:  # else it was written by ``agree_with_trl``; a saved record may hold a part by another name
        _same(args, "loss_type", loss_type, "objective", chosen.name)
    _same(args, "importance_sampling_level", chosen.ratio or level, "objective.ratio", chosen.ratio or row.ratio)
    rule = _rule(settings)
    _same(
        args,
        "scale_rewards",
        _scaling(rule),
        "advantage",
        rule,
    )
    if row.plain_k3 and settings.kl is None:
        _same(args, "use_bias_correction_kl", False, "objective", chosen.name)
    for name in CLIP:
        ours = chosen.knobs.get(name)
        if ours is not None:
            _same(args, name, ours, f"objective.{name}", ours)


def agree_on_advantages(args: Any, rule: Any) -> None:
    """``advantage`` without ``objective``: a rule of ours makes the advantages, so TRL's two settings for them say the same or nothing."""
    scaling = _scaling(rule)
    _same(args, "scale_rewards", scaling, "advantage", rule)
    name = "multi_objective_aggregation"
    if getattr(args, name) != _default(args, name):
        raise ValueError(
            f"`{name}`={getattr(args, name)!r} acts in TRL's own advantages, and `advantage`={rule!r} makes them: leave one out"
        )
    args.scale_rewards = scaling


def refuse_token_weights(args: Any, algorithm: Algorithm) -> None:
    """Whole responses are weighed as a whole."""
    objective, mode = algorithm.objective, args.vllm_importance_sampling_mode
    if objective is None or not objective.whole_response:
        return
    if args.use_vllm and args.vllm_importance_sampling_correction and mode.startswith("token"):
        raise ValueError(
            f"`vllm_importance_sampling_mode` is {mode!r}, and objective {objective.name!r} is about whole responses: use "
            "'sequence_mask' (TRL's default) or 'sequence_truncate', or switch `vllm_importance_sampling_correction` off"
        )


def _same(args: Any, name: str, expected: Any, ours: str, value: Any) -> None:
    if written(args, name) and getattr(args, name) != expected:
        meaning = f"means `{name}`={expected!r}" if expected is not None else f"has no counterpart among TRL's `{name}`"
        raise ValueError(
            f"`{name}`={getattr(args, name)!r} contradicts `{ours}`={value!r}, which {meaning}: leave one out"
        )


def agree_with_trl(args: Any, settings: LabSettings) -> None:
    """Write the objective into TRL's fields too, so that whatever reads those (model card, logs) reads the truth."""
    chosen = settings.objective
    assert chosen is not None
    row = preset(chosen.name or "grpo")
    args.loss_type = trl_loss_type(chosen)
    args.importance_sampling_level = chosen.ratio or row.ratio
    if row.plain_k3 and settings.kl is None:
        args.use_bias_correction_kl = False
    rule = _rule(settings)
    args.scale_rewards = _scaling(rule)
    for name in CLIP:
        if chosen.knobs.get(name) is not None:
            setattr(args, name, chosen.knobs[name])


def clip_in_force(args: Any, algorithm: Algorithm) -> None:
    """TRL's clip settings as the surrogate has them: a team's may have defaults of its own."""
    push = algorithm.objective.surrogate if algorithm.objective is not None else None
    for name in set(CLIP) & set(registry.knobs_of(push)):
        setattr(args, name, getattr(push, name))


def _rule(settings: LabSettings) -> Any:
    """The advantage rule that is named: by ``advantage``, else by the objective."""
    chosen = settings.objective
    assert chosen is not None
    beside = chosen.advantage or preset(chosen.name or "grpo").advantage
    return advantage_choice(settings.advantage, beside)[0]


def _scaling(rule: Any) -> str:
    return SCALING.get(rule, "none") if isinstance(rule, str) else "none"


def _default(args: Any, name: str) -> Any:
    return next(f.default for f in dataclasses.fields(args) if f.name == name)


__all__ = [
    "agree_on_advantages",
    "agree_with_trl",
    "clip_in_force",
    "refuse_contradictions",
    "refuse_token_weights",
]
