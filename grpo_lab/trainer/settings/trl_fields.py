"""TRL's own fields, kept saying what our settings say: whatever reads those (model card, logs) reads the truth."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from grpo_lab import registry
from grpo_lab.objectives import preset
from grpo_lab.trainer.settings.algorithm import NOT_TRLS, TRL_EQUIVALENT, TRL_SCALING, Algorithm, trl_loss_type
from grpo_lab.trainer.settings.knobs import CLIP, advantage_choice, written
from grpo_lab.trainer.settings.parse import LabSettings

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
    """Refuse TRL settings that say otherwise than ours, or that ours do not honour; then write ours into TRL's fields,
    so that whatever reads those (model card, logs) reads the truth.

    Raises:
        ValueError: names both settings.
    """
    chosen, said = ours.objective, _said_of(ours)
    place = ("advantage", ours.advantage and ours.advantage.name) if chosen is None else ("objective", chosen.name)
    for name in NOT_HONOURED if chosen is not None else ("multi_objective_aggregation",) if said else ():
        default = next(f.default for f in dataclasses.fields(args) if f.name == name)
        if getattr(args, name) != default:
            raise ValueError(
                f"`{name}`={getattr(args, name)!r} acts in TRL's own loss or advantages, and `{place[0]}`={place[1]!r} "
                "does not honour it: leave one out"
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
