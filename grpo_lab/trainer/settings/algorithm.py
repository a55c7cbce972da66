"""The algorithm in force, made from the configuration: an advantage rule and an objective, or TRL's own loss.

With ``objective`` the mappings of ``LabConfig`` say what the algorithm is. Without it TRL's flat settings do
(``loss_type``, ``scale_rewards``, …): they are mapped to our parts, or left to TRL's own loss where we have no such
part (``Algorithm.left_to_trl``). ``advantage`` and ``kl`` count in both cases. TRL's fields are rewritten to agree with
ours (``agree``).
"""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass, replace
from typing import Any

from grpo_lab.advantages import AdvantageRule, reads_values
from grpo_lab.objectives import (
    PRESETS,
    RATIO_LEVELS,
    SURROGATES,
    AdaptiveEntropy,
    AdaptiveKL,
    Correction,
    EntropyBonus,
    Gate,
    KLTerm,
    Objective,
    OffPolicyMask,
    TopEntropy,
    aggregation,
    preset,
    surrogate,
)
from grpo_lab.settings import read
from grpo_lab.trainer.settings import knobs
from grpo_lab.trainer.settings.knobs import in_words, name_of
from grpo_lab.trainer.settings.parse import AdvantageSettings, KLSettings, LabSettings, ObjectiveSettings, ValueSettings
from grpo_lab.trainer.settings.tasks import mixed
from grpo_lab.trainer.trl_bridge import teams

#: TRL's loss_type → our aggregation that averages alike, for the losses that we have as presets of the same names.
LOSS_TYPES: dict[str, str] = {
    "grpo": "sequence_mean",
    "dr_grpo": "fixed_budget",
    "dapo": "token_mean",
    "bnpo": "local_token_mean",
    "cispo": "token_mean",
    "sapo": "sequence_mean",
    "luspo": "sequence_sum",
    "vespo": "token_mean",
}
#: Preset → the ``loss_type`` and ``importance_sampling_level`` of TRL that mean the same. Others have no counterpart.
TRL_EQUIVALENT: dict[str, tuple[str, str]] = {
    **{name: (name, "token") for name in LOSS_TYPES},
    "gspo": ("grpo", "sequence"),
    "luspo": ("luspo", "sequence"),
}
#: Advantage rule → the ``scale_rewards`` of TRL that means the same.
TRL_SCALING: dict[str, str] = {"group_zscore": "group", "group_mean": "none", "batch_zscore": "batch"}
#: Method that a team may override → the part of the algorithm, as in ``Algorithm.names``, that it replaces or changes.
HOOKS: dict[str, str] = {
    "_calculate_rewards": "rewards",
    "compute_advantages": "advantage",
    "_generate": "generation",
    "_generate_single_turn": "generation",
    "_generate_and_score_completions": "generation",
    "get_train_dataloader": "prompts",
    "_get_train_sampler": "prompts",
    "_get_grad_norm": "gradient norm",
    "token_loss": "surrogate",
    "_get_per_token_logps_and_entropies": "log-probs",
    "_compute_loss": "loss",
    "compute_loss": "loss",
    "training_step": "step",
}


@dataclass(frozen=True)
class Algorithm:
    """The algorithm that the trainer runs.

    Attributes:
        objective: surrogate, aggregation, ratio level, KL, gates and entropy bonus; ``None`` if the loss is TRL's own.
        advantage: the advantage rule; ``None`` if TRL makes the advantages, by ``scale_rewards``.
        left_to_trl: the setting because of which the loss is TRL's own; ``None`` if it is ours.
        names: what each part is called, for logs, the model card and ``--dry-run``: part → name.
        value: settings of the critic; ``None`` without one.
        correction: the sampler correction that the setting ``correction`` asks for; ``None`` if that is not set, so
            that TRL's fields decide (``correction_in_force``).
    """

    objective: Objective | None
    advantage: AdvantageRule | None
    left_to_trl: str | None
    names: dict[str, str]
    value: ValueSettings | None = None
    correction: Correction | None = None

    def describe(self) -> str:
        """Return the names of all parts in one line and, if the loss is TRL's own, the reason."""
        parts = ", ".join(f"{key}={value}" for key, value in self.names.items())
        if self.objective is not None:
            return parts
        return f"TRL's own loss ({self.left_to_trl}): {parts}"

    def with_hooks(self, trainer: Any) -> Algorithm:
        """Return the algorithm with ``names`` that also show which methods of ``trainer`` a team has overridden, in a
        subclass or on the object (``HOOKS``)."""
        names = dict(self.names)
        for hook, part in HOOKS.items():
            home = teams(trainer, hook)
            below = names.get(part, "")
            if home is not None and home not in below:
                names[part] = home + (f" over {below}" if below else "")
        return replace(self, names=names)


def algorithm_from(args: Any, settings: LabSettings) -> Algorithm:
    """Build the algorithm that ``args`` (the configuration with TRL's flat settings) and ``settings`` (our mappings in
    it, parsed) define. Raises ValueError for unknown names and knobs, and for settings that contradict each other."""
    if settings.objective is None:
        found = _from_trl(args, settings)
    else:
        found = _mixture(args, _from_ours(args, settings.objective, settings), settings)
    correction = knobs.correction_from(args, settings.correction)
    if settings.correction is None or correction is None:
        return found
    named = in_words(correction, settings.correction.name)
    return replace(found, correction=correction, names={**found.names, "correction": named})


def _mixture(args: Any, whole: Algorithm, settings: LabSettings) -> Algorithm:
    """Return the algorithm of a run with ``tasks``, in which some tasks have parts of their own; ``whole``, the run's
    algorithm, if there are no tasks."""
    if not settings.tasks:
        return whole
    apart = {name: _of_task(name, settings) for name, task in settings.tasks.items() if task.has_own_rule}
    plain = _without_the_runs_own(args, settings)
    own = {name: _from_ours(plain, one.objective, one) for name, one in apart.items() if one.objective is not None}
    return replace(whole, **mixed(whole, own, settings.tasks))


def _without_the_runs_own(args: Any, settings: LabSettings) -> Any:
    """Return a copy of the configuration without what the run's ``objective`` and ``advantage`` wrote into TRL's fields
    (``agree``), since a task with an objective of its own does not inherit the run's knobs."""
    chosen = settings.objective
    assert chosen is not None  # a mixture has one
    plain = copy.copy(args)
    for name, knob in knobs.flat_settings(knobs.surrogate_part(chosen)).items():
        of_paper = knobs.papers_bounds(chosen).get(knob)
        if chosen.knobs.get(knob) is not None or (of_paper is not None and getattr(args, name) == of_paper):
            vars(plain)[name] = knobs.default_of(args, name)
    apart = "multi_objective_aggregation"
    if apart not in getattr(args, "_written", ()):
        vars(plain)[apart] = knobs.default_of(args, apart)
    return plain


def _of_task(name: str, settings: LabSettings) -> LabSettings:
    """Return the run's settings with the objective and the advantage rule of the task ``name`` in place of its own."""
    task = settings.tasks[name]
    objective = settings.objective
    advantage = settings.advantage
    if task.objective is not None:
        objective = read(ObjectiveSettings, task.objective, f"tasks.{name}.objective")
        advantage = None
    if task.advantage is not None:
        advantage = read(AdvantageSettings, task.advantage, f"tasks.{name}.advantage")
    return knobs.with_registered(replace(settings, objective=objective, advantage=advantage, tasks={}))


def _from_ours(args: Any, chosen: ObjectiveSettings, settings: LabSettings) -> Algorithm:
    """Build the algorithm of the setting ``objective`` (``chosen``) and the mappings beside it, in ``settings``."""
    if chosen.name == "":
        raise ValueError(
            f"`objective` is '', an empty name; it must be one of {sorted(PRESETS)}, or left out for TRL's own settings"
        )
    row = preset(chosen.name or "grpo")
    surrogate = knobs.surrogate_from(args, chosen)
    ratio = _ratio(chosen.ratio or row.ratio, "objective.ratio", RATIO_LEVELS)
    aggregate = knobs.aggregation_from(chosen.aggregation or row.aggregation)
    beside = knobs.rule_beside(args, chosen)
    named, own = knobs.advantage_choice(settings.advantage, beside)
    other = None
    if chosen.advantage:
        other = knobs.advantage_choice(None, chosen.advantage)[0]
    if other is not None and other != named:
        raise ValueError(
            f"`advantage` is {name_of(named)!r} and `objective.advantage` is {name_of(other)!r}: they are one setting; "
            "leave one out"
        )
    rule = knobs.advantage_from(settings.advantage, beside)
    value = None
    if reads_values(rule):
        value = settings.value or ValueSettings()
    rule = _with_discounts(rule, value, own)
    kl = _kl_term(args, settings.kl, "sequence" if value is None else "token")
    objective = Objective(chosen.name or "custom", surrogate, aggregate, ratio, kl, _gates(args), entropy_bonus(args))
    names = _names(objective, in_words(rule, named))
    return Algorithm(objective, rule, None, names if value is None else {**names, "value": value.in_words()}, value)


def _with_discounts(rule: Any, value: ValueSettings | None, written: dict[str, Any]) -> Any:
    """Return the advantage rule with the discounts ``value.gamma`` and ``value.lam``, if these are set.

    Raises ValueError if the rule has no such field, or if ``written``, the knobs that the user gave the rule, hold
    another number.
    """
    for name in ("gamma", "lam"):
        number = None
        if value is not None:
            number = getattr(value, name)
        if number is None:
            continue
        if not hasattr(rule, name):
            raise ValueError(
                f"`value.{name}` is {number}, and the advantage rule in force has no `{name}`; leave it out"
            )
        if name in written and written[name] != number:
            other = f"`advantage.{name}` is {written[name]}"
            raise ValueError(f"`value.{name}` is {number} and {other}: two names for one number; set one")
        rule = replace(rule, **{name: float(number)})
    return rule


def _from_trl(args: Any, settings: LabSettings) -> Algorithm:
    """Build the algorithm of TRL's flat settings, of our parts if these mean the same, else with TRL's own loss."""
    rule = knobs.advantage_from(settings.advantage, None)
    if rule and settings.advantage:
        named = in_words(rule, settings.advantage.name)
    else:  # `scale_rewards` is not read where each reward is normalised on its own
        apart = args.multi_objective_aggregation == knobs.APART
        named = f"trl:{knobs.APART if apart else args.scale_rewards}"
    reason = _why_trl(args)
    if reason is not None:
        return Algorithm(None, rule, reason, {"objective": f"trl:{args.loss_type}", "advantage": named})
    kind = preset(args.loss_type).surrogate
    own = {field: getattr(args, name) for name, field in knobs.flat_settings(SURROGATES[kind]).items()}
    ratio = _ratio(args.importance_sampling_level, "importance_sampling_level", ("token", "sequence"))
    aggregate = aggregation(LOSS_TYPES[args.loss_type])
    kl = _kl_term(args, settings.kl, "sequence")
    parts = (surrogate(kind, **own), aggregate, ratio, kl, _gates(args), entropy_bonus(args))
    objective = Objective(args.loss_type, *parts)
    return Algorithm(objective, rule, None, {**_names(objective, named), "objective": f"trl:{args.loss_type}"})


def _names(objective: Objective, advantage: str) -> dict[str, str]:
    """Return what the parts of an objective, and an advantage rule, are called (``Algorithm.names``)."""
    names = {
        "objective": objective.name,
        "advantage": advantage,
        "ratio": objective.ratio,
        "surrogate": name_of(objective.surrogate),
    }
    knobs_of_surrogate = knobs.knobs_in_words(objective.surrogate)
    if knobs_of_surrogate:
        names["knobs"] = knobs_of_surrogate
    names["aggregation"] = in_words(objective.aggregate, objective.aggregate)
    names["kl"] = _kl_in_words(objective.kl)
    if objective.gates:
        names["gates"] = ", ".join(in_words(gate, gate) for gate in objective.gates)
    if objective.entropy:
        names["entropy"] = objective.entropy.in_words()
    return names


def _kl_in_words(kl: KLTerm | None) -> str:
    if kl is None:
        return "none"
    tokens = ""
    if kl.per != "sequence":
        tokens = f", per token (γ={kl.gamma:g})"
    target = ""
    if kl.control is not None:
        target = f", steered to {kl.control.target:g} nats a completion"
    return f"{kl.coefficient}·{kl.estimator} in the {kl.placement}{tokens}{target}"


def _gates(args: Any) -> tuple[Gate, ...]:
    """Return the gates (parts that drop tokens from the loss) that TRL's flat settings ask for, in the order in which
    TRL applies them."""
    found: list[Gate] = []
    if args.off_policy_mask_threshold is not None:
        found.append(OffPolicyMask(float(args.off_policy_mask_threshold)))
    if args.top_entropy_quantile < 1.0:
        found.append(TopEntropy(float(args.top_entropy_quantile)))
    return tuple(found)


def entropy_bonus(args: Any) -> EntropyBonus | None:
    """Return the entropy bonus that TRL's ``entropy_coef`` and ``use_adaptive_entropy`` ask for; None without one."""
    if args.use_adaptive_entropy:
        bounds = (args.entropy_coef_min, args.entropy_coef_max)
        return EntropyBonus(args.entropy_coef, AdaptiveEntropy(args.entropy_target, args.entropy_coef_delta, *bounds))
    if args.entropy_coef != 0.0:
        return EntropyBonus(args.entropy_coef)
    return None


def _why_trl(args: Any) -> str | None:
    """Return the first TRL setting that only TRL's own loss can honour; None if ours computes the same."""
    if args.loss_type not in LOSS_TYPES:
        return f"loss_type={args.loss_type!r}"
    end = 1 + (args.epsilon if args.epsilon_high is None else args.epsilon_high)
    reads = "delta" in knobs.flat_settings(SURROGATES[preset(args.loss_type).surrogate])
    if reads and args.delta is not None and args.delta > 0 and not end < args.delta < math.inf:
        return f"delta={args.delta}, no bound beyond the clip, which ends at 1 + epsilon_high = {end:g}"
    return None


def _kl_term(args: Any, chosen: KLSettings | None, per: str) -> KLTerm | None:
    """Return the KL term that ``kl`` (``chosen``) or else TRL's ``beta`` asks for; None without one.

    ``per``: what a KL in the reward is charged to, a ``sequence`` or a ``token``, if ``kl.per`` does not say.
    """
    if chosen is None:
        if args.beta == 0.0:
            return None
        return KLTerm(args.beta, "k3", "loss", ratio_weighted=bool(args.use_bias_correction_kl))
    if chosen.coefficient is None:
        coefficient = args.beta
    else:
        coefficient = chosen.coefficient
    if coefficient == 0.0:
        raise ValueError(
            "`kl` is set but its coefficient is 0 (and `beta` is 0): it has no effect; leave one of them out"
        )
    per = chosen.per or (per if chosen.placement == "reward" else "sequence")
    gamma = 1.0 if chosen.gamma is None else chosen.gamma
    control = None
    if chosen.target is not None:
        control = AdaptiveKL(chosen.target, chosen.rate, chosen.horizon)
    weighted = bool(chosen.ratio_weighted)
    return KLTerm(coefficient, chosen.estimator, chosen.placement, weighted, per=per, gamma=gamma, control=control)


def _ratio(level: str, setting: str, allowed: tuple[str, ...]) -> str:
    """Return the ratio's ``level`` if it is allowed; else raise ValueError, which names the setting."""
    if level not in allowed:
        raise ValueError(f"`{setting}` is {level!r}; it must be one of {allowed}")
    return level
