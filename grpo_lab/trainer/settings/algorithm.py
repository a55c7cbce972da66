"""From configuration to the algorithm in force: an advantage rule and an objective, or TRL's own loss.

Three sources, in this order: the ``objective``/``advantage``/``kl`` mappings of ``LabConfig``; class attributes of the
trainer; TRL's own flat settings (``loss_type``, ``scale_rewards``, …), which are mapped to ours where we have the same.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from grpo_lab.advantages import AdvantageRule, advantage_rule
from grpo_lab.objectives import SURROGATES, Aggregation, KLTerm, Objective, Surrogate, aggregation, preset, surrogate
from grpo_lab.objectives.presets import KNOBS
from grpo_lab.objectives.ratios import RATIO_LEVELS
from grpo_lab.trainer.settings.parse import AdvantageSettings, KLSettings, LabSettings, ObjectiveSettings, load_object

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
    "_compute_loss": "loss",
    "compute_loss": "loss",
}
#: classes of these packages are no team's
LIBRARIES = ("grpo_lab", "trl", "transformers", "builtins")
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
    """

    objective: Objective | None
    advantage: AdvantageRule | None
    left_to_trl: str | None
    names: dict[str, str]

    def describe(self) -> str:
        """The parts in force and the hooks over them, in one line."""
        parts = ", ".join(f"{key}={value}" for key, value in self.names.items())
        return parts if self.objective is not None else f"TRL's own loss ({self.left_to_trl}): {parts}"

    def with_hooks(self, trainer: type) -> Algorithm:
        """The same, with what a subclass puts over the parts by overriding a method."""
        names = dict(self.names)
        for hook, part in HOOKS.items():
            home = next((c for c in trainer.__mro__ if hook in vars(c)), object)
            if home.__module__.split(".")[0] not in LIBRARIES:
                below = names.get(part)
                names[part] = f"{home.__name__}.{hook}" + (f" over {below}" if below else "")
        return replace(self, names=names)


def trl_loss_type(chosen: ObjectiveSettings) -> str:
    """What TRL's field ``loss_type`` says of an objective of ours: TRL's name where it has the same loss, else ours.

    So whatever reads that field (saved arguments, trackers) reads what was trained. TRL reads it when it computes a loss of
    its own, which does not happen with an objective of ours, and refuses names that it does not know.
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
    row = preset(chosen.name) if chosen.name is not None else preset("grpo")
    ratio = _ratio(chosen.ratio or row.ratio, "objective.ratio")
    epsilon = args.epsilon if chosen.epsilon is None else chosen.epsilon
    epsilon_high = args.epsilon_high if chosen.epsilon_high is None else chosen.epsilon_high
    delta = args.delta if chosen.delta is None else chosen.delta
    _refuse_idle(chosen, chosen.surrogate or row.surrogate)
    push = _surrogate(chosen.surrogate or row.surrogate, epsilon, epsilon_high, delta, chosen.tau)
    average = _aggregation(chosen.aggregation or row.aggregation)
    rule, rule_name = _advantage(settings.advantage, chosen.advantage or row.advantage)
    kl = _kl_term(args, settings.kl)
    names = {
        "objective": chosen.name or "custom",
        "advantage": rule_name,
        "ratio": ratio,
        "surrogate": name_of(push),
        "aggregation": name_of(average),
        "kl": _kl_in_words(kl),
    }
    objective = Objective(names["objective"], push, average, ratio, kl)
    return Algorithm(objective, rule, None, names)


def _from_trl(args: Any, settings: LabSettings) -> Algorithm:
    rule, rule_name = _advantage(settings.advantage, None)
    reason = _why_trl(args)
    if reason is not None:
        if settings.kl is not None:
            raise ValueError(
                f"`kl` is set, but the loss is left to TRL ({reason}), which has a KL of its own; use `beta`"
            )
        return Algorithm(
            None,
            rule,
            reason,
            {"objective": f"trl:{args.loss_type}", "advantage": rule_name if rule else _trl_advantage(args)},
        )
    kind = "cispo" if args.loss_type == "cispo" else "clipped"
    push = _surrogate(kind, args.epsilon, args.epsilon_high, args.delta if kind == "clipped" else None)
    kl = _kl_term(args, settings.kl)
    ratio = _ratio(args.importance_sampling_level, "importance_sampling_level")
    objective = Objective(args.loss_type, push, aggregation(LOSS_TYPES[args.loss_type]), ratio, kl)
    names = {
        "objective": f"trl:{args.loss_type}",
        "advantage": rule_name if rule else _trl_advantage(args),
        "ratio": args.importance_sampling_level,
        "surrogate": name_of(push),
        "aggregation": LOSS_TYPES[args.loss_type],
        "kl": _kl_in_words(kl),
    }
    return Algorithm(objective, rule, None, names)


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
    return None


def _kl_term(args: Any, chosen: KLSettings | None) -> KLTerm | None:
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
    return KLTerm(
        coefficient,
        chosen.estimator,
        chosen.placement,
        bool(chosen.ratio_weighted),
        per=chosen.per or "sequence",
        gamma=gamma,
    )


def _kl_in_words(kl: KLTerm | None) -> str:
    if kl is None:
        return "none"
    tokens = "" if kl.per == "sequence" else f", per token (γ={kl.gamma:g})"
    return f"{kl.coefficient}·{kl.estimator} in the {kl.placement}{tokens}"


def _ratio(level: str, setting: str) -> str:
    if level not in RATIO_LEVELS:
        raise ValueError(f"`{setting}` is {level!r}; it must be one of {RATIO_LEVELS}")
    return level


def _refuse_idle(chosen: ObjectiveSettings, kind: Any) -> None:
    """A knob that the surrogate does not read is an error, not silence."""
    known = KNOBS.get(kind) if isinstance(kind, str) else None
    if known is None:
        if chosen.tau is not None:
            raise ValueError(f"`objective.tau` has no effect on the surrogate {name_of(kind)!r}; set it there")
        return
    for name in ("epsilon", "epsilon_high", "delta", "tau"):
        if getattr(chosen, name) is not None and name not in known:
            raise ValueError(
                f"`objective.{name}`={getattr(chosen, name)} has no effect on the surrogate {kind!r}, which reads "
                f"{list(known) or 'none of these settings'}; leave it out"
            )
    if chosen.ratio is not None and not getattr(SURROGATES[kind], "reads_ratio", True):
        raise ValueError(f"`objective.ratio`={chosen.ratio!r} has no effect on the surrogate {kind!r}; leave it out")


def _surrogate(
    chosen: Any, epsilon: float, epsilon_high: float | None, delta: float | None, tau: float | None = None
) -> Surrogate:
    if isinstance(chosen, str):
        if ":" not in chosen:
            return surrogate(chosen, epsilon, epsilon_high, delta, tau)
        chosen = load_object(chosen, "surrogate")
    return _callable(chosen, "surrogate")


def _aggregation(chosen: Any) -> Aggregation:
    if isinstance(chosen, str):
        if ":" not in chosen:
            return aggregation(chosen)
        chosen = load_object(chosen, "aggregation")
    return _callable(chosen, "aggregation")


def _advantage(settings: AdvantageSettings | None, fallback: Any) -> tuple[AdvantageRule | None, str]:
    chosen = fallback if settings is None or settings.name is None else settings.name
    parameters = {} if settings is None or settings.epsilon is None else {"epsilon": settings.epsilon}
    if chosen is None:
        if parameters:
            raise ValueError(
                "`advantage.epsilon` has no effect: advantages are TRL's (`scale_rewards`), whose ε is fixed; name a rule, such as "
                "`advantage: {name: group_zscore, epsilon: …}`"
            )
        return None, "trl"
    if isinstance(chosen, str):
        if ":" not in chosen:
            return advantage_rule(chosen, **parameters), chosen
        chosen = load_object(chosen, "advantage")
    if parameters:
        raise ValueError("`advantage.epsilon` has no effect on a rule given as an object; set it there")
    return _callable(chosen, "advantage"), name_of(chosen)


def _callable(chosen: Any, setting: str) -> Any:
    if isinstance(chosen, type):
        chosen = chosen()
    if not callable(chosen):
        raise ValueError(f"`{setting}` is {chosen!r}; it must be a name, 'module:attribute' or a callable")
    return chosen


def name_of(part: Any) -> str:
    """A readable name for a part: its function name, or its class; of a lambda, where it stands."""
    if isinstance(part, str):  # "module:attribute", as a function of that name
        return part.rpartition(":")[2].rpartition(".")[2]
    if isinstance(part, functools.partial):
        return f"partial({name_of(part.func)})"
    name = str(getattr(part, "__name__", None) or type(part).__name__)
    if name == "<lambda>":
        return f"lambda at {Path(part.__code__.co_filename).name}:{part.__code__.co_firstlineno}"
    return name
