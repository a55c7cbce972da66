"""From configuration to the algorithm in force: an advantage rule and an objective, or TRL's own loss.

Three sources, in this order: the ``objective``/``advantage``/``kl`` mappings of ``LabConfig``; class attributes of the
trainer; TRL's own flat settings (``loss_type``, ``scale_rewards``, …), which are mapped to ours where we have the same.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from grpo_lab import registry
from grpo_lab.advantages import AdvantageRule, reads_values
from grpo_lab.objectives import (
    PRESETS,
    RATIO_LEVELS,
    SURROGATES,
    AdaptiveKL,
    KLTerm,
    Objective,
    aggregation,
    preset,
    surrogate,
)
from grpo_lab.trainer.settings.knobs import (
    CLIP,
    advantage_choice,
    advantage_from,
    aggregation_from,
    in_words,
    name_of,
    refuse_two_rules,
    surrogate_from,
)
from grpo_lab.trainer.settings.parse import KLSettings, LabSettings, ObjectiveSettings
from grpo_lab.trainer.settings.value import CRITIC, ValueSettings, with_discounts
from grpo_lab.trainer.trl_bridge import teams

#: what TRL's ``importance_sampling_level`` may be
TRL_LEVELS = ("token", "sequence")
#: preset → (TRL's loss_type, importance_sampling_level) that say the same; ``reinforce`` has no counterpart.
TRL_EQUIVALENT: dict[str, tuple[str, str]] = {
    "grpo": ("grpo", "token"),
    "dr_grpo": ("dr_grpo", "token"),
    "dapo": ("dapo", "token"),
    "bnpo": ("bnpo", "token"),
    "gspo": ("grpo", "sequence"),
    "cispo": ("cispo", "token"),
}
#: advantage rule → TRL's scale_rewards
TRL_SCALING: dict[str, str] = {"group_zscore": "group", "group_mean": "none", "batch_zscore": "batch"}
#: TRL's loss_type → aggregation, for the losses that we have
LOSS_TYPES: dict[str, str] = {
    "grpo": "sequence_mean",
    "dr_grpo": "fixed_budget",
    "dapo": "token_mean",
    "bnpo": "local_token_mean",
    "cispo": "token_mean",
}


#: method that a subclass may override → which part of the algorithm it replaces or changes
HOOKS: dict[str, str] = {
    "_calculate_rewards": "rewards",
    "compute_advantages": "advantage",
    "_generate_and_score_completions": "generation",
    "token_loss": "surrogate",
    "_get_per_token_logps_and_entropies": "log-probs",
    "_compute_loss": "loss",
    "compute_loss": "loss",
    "training_step": "step",
}
#: how `loss_type` begins where TRL has no such loss; TRL refuses it by name, should it ever be asked for that loss
NOT_TRLS = "grpo_lab:"


@dataclass(frozen=True)
class Algorithm:
    """What the trainer runs.

    Args:
        objective: ours, or ``None``: TRL's own loss is in force, for the reason in ``left_to_trl``.
        advantage: our rule, or ``None``: TRL's own advantages (``scale_rewards``, ``multi_objective_aggregation``).
        left_to_trl: why the loss is left to TRL; ``None`` when it is ours.
        names: what each part is called, for logs, the model card and ``--dry-run``.
        value: the critic, or ``None``.
    """

    objective: Objective | None
    advantage: AdvantageRule | None
    left_to_trl: str | None
    names: dict[str, str]
    value: ValueSettings | None = None

    def describe(self) -> str:
        """The parts in force and the hooks over them, in one line."""
        parts = ", ".join(f"{key}={value}" for key, value in self.names.items())
        return parts if self.objective is not None else f"TRL's own loss ({self.left_to_trl}): {parts}"

    def with_hooks(self, trainer: Any) -> Algorithm:
        """The same, with what a team puts over the parts by replacing a method of ``trainer``, or of its class."""
        names = dict(self.names)
        for hook, part in HOOKS.items():
            home, below = teams(trainer, hook), names.get(part, "")
            if home is not None and home not in below:
                names[part] = home + (f" over {below}" if below else "")
        return replace(self, names=names)


def trl_loss_type(chosen: ObjectiveSettings) -> str:
    """What TRL's field ``loss_type`` says of an objective of ours: TRL's name where it has the same loss, else ours.

    So whatever reads that field (saved arguments, trackers) reads what was trained. TRL reads it when it computes a
    loss of its own, which does not happen with an objective of ours, and refuses names that it does not know.
    """
    name = chosen.name or "grpo"
    row = preset(name)
    own = [
        f"+{part}={name_of(value)}"
        for part, value in (("surrogate", chosen.surrogate), ("aggregation", chosen.aggregation))
        if value is not None and value != getattr(row, part)
    ]
    if not own and name in TRL_EQUIVALENT:
        return TRL_EQUIVALENT[name][0]
    return NOT_TRLS + name + "".join(own)


def algorithm_from(args: Any, settings: LabSettings) -> Algorithm:
    """The algorithm that ``args`` (flat TRL settings) and ``settings`` (our mappings) say."""
    if settings.objective is None:
        return _from_trl(args, settings)
    return _from_ours(args, settings.objective, settings)


def _from_ours(args: Any, chosen: ObjectiveSettings, settings: LabSettings) -> Algorithm:
    if chosen.name == "":
        raise ValueError(
            f"`objective` is '', an empty name; it must be one of {sorted(PRESETS)}, or left out for TRL's own settings"
        )
    row = preset(chosen.name or "grpo")
    push = surrogate_from(args, chosen)
    ratio = _ratio(chosen.ratio or row.ratio, "objective.ratio", RATIO_LEVELS)
    average = aggregation_from(chosen.aggregation or row.aggregation)
    refuse_two_rules(settings.advantage, chosen.advantage)
    beside = chosen.advantage or row.rule
    named, knobs = advantage_choice(settings.advantage, beside)
    rule = advantage_from(settings.advantage, beside)
    value = (settings.value or CRITIC) if reads_values(rule) else None
    rule = with_discounts(rule, value, knobs)
    kl = _kl_term(args, settings.kl, "sequence" if value is None else "token")
    objective = Objective(chosen.name or "custom", push, average, ratio, kl)
    names = _names(objective, in_words_as(rule, named))
    return Algorithm(objective, rule, None, names if value is None else {**names, "value": value.in_words()}, value)


def _from_trl(args: Any, settings: LabSettings) -> Algorithm:
    rule = advantage_from(settings.advantage, None)
    named = in_words_as(rule, settings.advantage.name) if rule and settings.advantage else _trl_advantage(args)
    reason = _why_trl(args)
    if reason is not None:
        return Algorithm(None, rule, reason, {"objective": f"trl:{args.loss_type}", "advantage": named})
    kind = "cispo" if args.loss_type == "cispo" else "clipped"
    clip = {name: getattr(args, name) for name in CLIP if name in registry.knobs_of(SURROGATES[kind])}
    ratio = _ratio(args.importance_sampling_level, "importance_sampling_level", TRL_LEVELS)
    push, average = surrogate(kind, **clip), aggregation(LOSS_TYPES[args.loss_type])
    objective = Objective(args.loss_type, push, average, ratio, _kl_term(args, settings.kl, "sequence"))
    return Algorithm(objective, rule, None, {**_names(objective, named), "objective": f"trl:{args.loss_type}"})


def _names(objective: Objective, advantage: str) -> dict[str, str]:
    kl, knobs = objective.kl, in_words(objective.surrogate, only_set=False)[len(name_of(objective.surrogate)) + 1 : -1]
    return {
        "objective": objective.name,
        "advantage": advantage,
        "ratio": objective.ratio,
        "surrogate": name_of(objective.surrogate),
        **({"knobs": knobs} if knobs else {}),
        "aggregation": in_words(objective.aggregate),
        "kl": _kl_in_words(kl),
    }


def in_words_as(rule: Any, chosen: Any) -> str:
    """The rule with the knobs that are set, under the name that it was chosen by."""
    told = in_words(rule)[len(name_of(rule)) :]
    return (chosen if isinstance(chosen, str) and ":" not in chosen else name_of(chosen)) + told


def _trl_advantage(args: Any) -> str:
    """What TRL's own advantages are: ``scale_rewards`` is not read where each reward is normalised on its own."""
    apart = args.multi_objective_aggregation == "normalize_then_sum"
    return f"trl:{args.multi_objective_aggregation if apart else args.scale_rewards}"


def _why_trl(args: Any) -> str | None:
    """The first TRL setting that only TRL's own loss honours, or ``None``."""
    if args.loss_type not in LOSS_TYPES:
        return f"loss_type={args.loss_type!r}"
    if args.top_entropy_quantile < 1.0:
        return f"top_entropy_quantile={args.top_entropy_quantile}"
    if args.entropy_coef != 0.0 or args.use_adaptive_entropy:
        return "an entropy bonus (entropy_coef, use_adaptive_entropy)"
    if args.off_policy_mask_threshold is not None:
        return f"off_policy_mask_threshold={args.off_policy_mask_threshold}"
    end = 1 + (args.epsilon if args.epsilon_high is None else args.epsilon_high)
    reads = args.delta is not None and args.loss_type != "cispo"
    if reads and args.delta > 0 and not end < args.delta < math.inf:
        return f"delta={args.delta}, no bound beyond the clip, which ends at 1 + epsilon_high = {end:g}"
    return None


def _kl_term(args: Any, chosen: KLSettings | None, per: str) -> KLTerm | None:
    if chosen is None:
        if args.beta == 0.0:
            return None
        return KLTerm(args.beta, "k3", "loss", ratio_weighted=bool(args.use_bias_correction_kl))
    coefficient = args.beta if chosen.coefficient is None else chosen.coefficient
    if coefficient == 0.0:
        raise ValueError(
            "`kl` is set but its coefficient is 0 (and `beta` is 0): it has no effect; leave one of them out"
        )
    gamma = 1.0 if chosen.gamma is None else chosen.gamma
    control = None if chosen.target is None else AdaptiveKL(chosen.target, chosen.rate, chosen.horizon)
    return KLTerm(
        coefficient,
        chosen.estimator,
        chosen.placement,
        bool(chosen.ratio_weighted),
        per=chosen.per or (per if chosen.placement == "reward" else "sequence"),
        gamma=gamma,
        control=control,
    )


def _kl_in_words(kl: KLTerm | None) -> str:
    if kl is None:
        return "none"
    tokens = "" if kl.per == "sequence" else f", per token (γ={kl.gamma:g})"
    target = "" if kl.control is None else f", steered to {kl.control.target:g} nats a completion"
    return f"{kl.coefficient}·{kl.estimator} in the {kl.placement}{tokens}{target}"


def _ratio(level: str, setting: str, allowed: tuple[str, ...]) -> str:
    if level not in allowed:
        raise ValueError(f"`{setting}` is {level!r}; it must be one of {allowed}")
    return level
