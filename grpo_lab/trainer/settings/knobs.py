"""Build the parts that ``objective``, ``advantage`` and ``aggregation`` choose, with their knobs. A part is given as a
name, ``"module:attribute"``, a class, or a finished callable. Its knobs are the fields of its dataclass; a knob that it
does not have is refused with the nearest match."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

from grpo_lab import registry
from grpo_lab.advantages import RULES, TOKEN_RULES, level_of
from grpo_lab.objectives import AGGREGATIONS, PRESETS, SURROGATES, Aggregation, Surrogate, is_ours, preset
from grpo_lab.objectives.corrections import CORRECTIONS, TRLS_MODES, Correction
from grpo_lab.objectives.presets import OUR_PRESETS
from grpo_lab.settings import refuse_unknown, typed
from grpo_lab.trainer.settings.parse import AdvantageSettings, CorrectionSettings, LabSettings, ObjectiveSettings

#: TRL's ``multi_objective_aggregation`` that is the advantage rule ``gdpo``
APART = "normalize_then_sum"
#: TRL's flat setting that is a knob of a surrogate → the surrogate's field.
FLAT: dict[str, str] = {
    **{name: name for name in ("epsilon", "epsilon_high", "delta")},
    **{f"sapo_{name}": name for name in ("temperature_neg", "temperature_pos")},
    **{f"vespo_{name}": name for name in ("k_pos", "lambda_pos", "k_neg", "lambda_neg")},
}
#: Knob of a correction → TRL's flat setting with the same meaning, for corrections that TRL has.
SAMPLER_BOUNDS = {"low": "vllm_importance_sampling_clip_min", "high": "vllm_importance_sampling_clip_max"}


def default_of(args: Any, name: str) -> Any:
    """Return the default of a field of TRL's configuration."""
    return args.__dataclass_fields__[name].default


def written(args: Any, name: str) -> bool:
    """Return whether ``name`` was set by the user: written down in the constructor, or different from its default."""
    return name in getattr(args, "_written", ()) or bool(getattr(args, name) != default_of(args, name))


def with_registered(settings: LabSettings) -> LabSettings:
    """Return ``settings`` with an ``objective`` of the form ``"module:name"`` replaced by its registered name. The
    module is loaded first; ``name`` may also be the registered class. Raises ValueError if there is no such module, or
    if it registers no such objective."""
    chosen = settings.objective
    if chosen is None or chosen.name is None:
        return settings
    module, colon, own = chosen.name.partition(":")
    if not colon:
        return settings
    registry.working_folder_on_path()  # a team's module may be there
    try:
        part = getattr(import_module(module), own, None)
    except ImportError as error:
        raise ValueError(f"`objective` is {chosen.name!r}, and {module!r} cannot be loaded: {error}") from error
    theirs = [name for name in PRESETS if name not in OUR_PRESETS]
    for name in theirs:
        if name == own or (part is not None and SURROGATES.get(name) is part):
            return replace(settings, objective=replace(chosen, name=name))
    raise ValueError(
        f"`objective` is {chosen.name!r}, and {module!r} registers no objective {own!r} "
        f"(`grpo_lab.register_objective`); registered are {sorted(theirs)}. A surrogate that is not registered is "
        "given as `surrogate`"
    )


def surrogate_part(chosen: ObjectiveSettings) -> Any:
    """Return the surrogate that ``objective`` names: a class, a function or an object."""
    return _part(chosen.surrogate or preset(chosen.name or "grpo").surrogate, SURROGATES, "surrogate")


def flat_settings(part: Any) -> dict[str, str]:
    """Return TRL's flat settings that are knobs of a surrogate → the field. A team's class reads those alone that are
    called as its field is."""
    known = registry.knobs_of(part)
    return {name: field for name, field in FLAT.items() if field in known and (name == field or is_ours(part))}


def surrogate_from(args: Any, chosen: ObjectiveSettings) -> Surrogate:
    """Build the surrogate in force. Its knobs have their own defaults; TRL's flat settings (``FLAT``) replace these,
    and what ``objective`` says replaces both.

    Our surrogates take every flat setting that they have a field for; a team's class takes those that the user set; one
    that is given as an object takes none. Raises ValueError if a setting would have no effect on the surrogate.
    """
    part = surrogate_part(chosen)
    _refuse_knobs_of_the_rule(chosen, part)
    own = _checked(chosen.knobs, part, "objective", "surrogate", SURROGATES)
    if chosen.ratio is not None and not getattr(part, "reads_ratio", True):
        raise ValueError(
            f"`objective.ratio`={chosen.ratio!r} has no effect on the surrogate {name_of(part)!r}; leave it out"
        )
    read = flat_settings(part)
    for name in (name for name in FLAT if getattr(args, name) != default_of(args, name)):
        value = getattr(args, name)
        has_none = f"`{name}`={value} has no effect on the surrogate {name_of(part)!r}"
        if name not in read:
            known = list(registry.knobs_of(part))
            raise ValueError(f"{has_none}, which reads {known or 'no settings'}; leave it out")
        held = getattr(part, read[name])
        if not isinstance(part, type) and value != held:  # it may be the same: `knobs_in_force` wrote it
            raise ValueError(f"{has_none} given as an object with {read[name]}={held}; set it there")
    if not isinstance(part, type):
        return _built(part, own, "surrogate")
    flat = {field: getattr(args, name) for name, field in read.items() if is_ours(part) or written(args, name)}
    papers = papers_bounds(chosen)
    if not any(field in own or written(args, name) for name, field in read.items() if field in papers):
        flat |= papers
    return _built(part, {**flat, **own}, "surrogate")


def papers_bounds(chosen: ObjectiveSettings) -> dict[str, float]:
    """Return the knobs for which the paper's numbers hold where the run sets none of them: of a preset that says so
    (``Preset.holds``), with its own surrogate."""
    row = preset(chosen.name or "grpo")
    if not row.holds or chosen.surrogate is not None:
        return {}
    known = registry.knobs_of(SURROGATES[row.surrogate])
    return {name: float(number) for name, number in row.paper.items() if name in known}


def other_than_the_paper(args: Any, chosen: ObjectiveSettings, surrogate: Any) -> str | None:
    """Return a sentence on the numbers that the run takes from TRL's defaults, where the objective's paper, or our
    surrogate, has others and the run sets none; None if there are none."""
    row = preset(chosen.name or "grpo")
    if chosen.surrogate is not None:
        return None
    names = {field: name for name, field in flat_settings(surrogate).items()}
    of_paper = {field: number for field, number in row.paper.items() if isinstance(number, float)}
    theirs = {**registry.knobs_of(type(surrogate)), **of_paper}
    apart = [field for field in names if theirs[field] is not None and getattr(surrogate, field) != theirs[field]]
    if not apart or any(names[field] in getattr(args, "_written", ()) or field in chosen.knobs for field in names):
        return None
    said = ", ".join(f"`{names[field]}` ({getattr(surrogate, field)})" for field in apart)
    better = ", ".join(f"{field}: {theirs[field]}" for field in apart)
    return (
        f"objective {chosen.name!r} runs with TRL's defaults of {said}, since none is written; its authors' are "
        f"`objective: {{name: {chosen.name}, {better}}}`"
    )


def _refuse_knobs_of_the_rule(chosen: ObjectiveSettings, part: Any) -> None:
    """Raise ValueError for a knob of the preset's advantage rule beside ``objective``; the message says where it
    stands."""
    rule = preset(chosen.name or "grpo").advantage
    of_rule = registry.knobs_of({**RULES, **TOKEN_RULES}[rule])
    for name in chosen.knobs:
        if name in of_rule and name not in registry.knobs_of(part):
            raise ValueError(
                f"`objective.{name}` is a knob of the advantage rule {rule!r}: write `advantage: {{name: {rule}, "
                f"{name}: {chosen.knobs[name]}}}`"
            )


def aggregation_from(chosen: Any) -> Aggregation:
    """Build the aggregation from a name, ``"module:attribute"``, a callable, or a mapping of a name and its knobs."""
    name, knobs = _named(chosen, "aggregation")
    part = _part(name, AGGREGATIONS, "aggregation")
    own = _checked(knobs, part, "aggregation", "aggregation", AGGREGATIONS)
    return _built(part, own, "aggregation")


def advantage_from(settings: AdvantageSettings | None, fallback: Any) -> Any:
    """Build the rule that ``advantage`` names, else ``fallback`` (the objective's). ``None``: TRL computes the
    advantages."""
    name, knobs = advantage_choice(settings, fallback)
    if name is None:
        if knobs:
            raise ValueError(
                f"`advantage.{next(iter(knobs))}` has no effect: advantages are TRL's (`scale_rewards`), whose ε is "
                "fixed; name a rule, such as `advantage: {name: group_zscore, epsilon: …}`"
            )
        return None
    rules = {**RULES, **TOKEN_RULES}
    part = _part(name, rules, "advantage")
    return _built(part, _checked(knobs, part, "advantage", "advantage rule", rules), "advantage")


def correction_from(args: Any, chosen: CorrectionSettings | None) -> Correction | None:
    """Build the correction that ``correction`` asks for; None if it is not set. One that TRL has, too, takes TRL's
    bounds where these are set and ``correction`` leaves them out."""
    if chosen is None:
        return None
    if chosen.name is None:
        raise ValueError(f"`correction` is {chosen.knobs!r}; as a mapping it needs a `name`")
    part = _part(chosen.name, CORRECTIONS, "correction")
    own = _checked(chosen.knobs, part, "correction", "correction", CORRECTIONS)
    flat = {}
    if part in TRLS_MODES:
        flat = {knob: getattr(args, name) for knob, name in SAMPLER_BOUNDS.items() if written(args, name)}
    made: Correction = _built(part, {**flat, **own}, "correction")
    return made


def advantage_choice(settings: AdvantageSettings | None, fallback: Any) -> tuple[Any, dict[str, Any]]:
    """Return the chosen rule and its knobs. Knobs set in ``advantage`` override those beside the objective's rule."""
    knobs = {}
    if settings is not None:
        knobs = settings.knobs
    if settings is not None and settings.name is not None:
        return settings.name, knobs
    name, beside = _named(fallback, "objective.advantage")
    return name, {**beside, **knobs}


SCALED_BY_TRL = ("group_zscore", "group_mean", "batch_zscore")
"""Rules of presets in whose place TRL's settings may put another."""


def rule_beside(args: Any, chosen: ObjectiveSettings) -> Any:
    """Return the advantage rule where ``advantage`` names none: of ``objective.advantage``, else ``gdpo`` if TRL's
    setting says so, else the preset's. PPO's critic is not given up for TRL's setting."""
    row = preset(chosen.name or "grpo")
    if chosen.advantage:
        return chosen.advantage
    if args.multi_objective_aggregation != APART or row.advantage in TOKEN_RULES or row.advantage == "gdpo":
        return row.rule
    if row.advantage not in SCALED_BY_TRL:
        raise ValueError(
            f"`multi_objective_aggregation`={APART!r} contradicts `objective`={chosen.name!r}, whose advantage rule is "
            f"{row.advantage!r}: leave one out"
        )
    return "gdpo"


def in_words(part: Any, chosen: Any) -> str:
    """Return ``name(knob=value, …)``: the name chosen by the user, and the knobs that differ from their default."""
    knobs = knobs_in_words(part, only_set=True)
    return name_of(chosen) + (f"({knobs})" if knobs else "")


def knobs_in_words(part: Any, only_set: bool = False) -> str:
    """Return ``knob=value, …`` of an object."""
    values = {name: (getattr(part, name), default) for name, default in registry.knobs_of(part).items()}
    shown = {name: value for name, (value, default) in values.items() if not (only_set and value == default)}
    return ", ".join(f"{name}={value}" for name, value in shown.items() if value is not None)


def _named(chosen: Any, setting: str) -> tuple[Any, dict[str, Any]]:
    if not isinstance(chosen, Mapping):
        return chosen, {}
    if "name" not in chosen:
        raise ValueError(f"`{setting}` is {dict(chosen)!r}; as a mapping it needs a `name`")
    return chosen["name"], {key: value for key, value in chosen.items() if key != "name"}


def _part(chosen: Any, table: Mapping[str, Any], setting: str) -> Any:
    if isinstance(chosen, str):
        if ":" in chosen:
            return registry.load_named(chosen, setting)
        return registry.found(table, chosen, setting)
    if not (callable(chosen) or level_of(chosen) == "token"):
        raise ValueError(f"`{setting}` is {chosen!r}; it must be a name, 'module:attribute' or a callable")
    return chosen


def _checked(knobs: Mapping[str, Any], part: Any, where: str, what: str, table: Mapping[str, Any]) -> dict[str, Any]:
    """Return the knobs that are set, as numbers and switches of the declared types. Raises ValueError for a knob that
    the part does not read, or that no part of ``table`` has. The same for a number that is not finite, unless it is the
    default."""
    is_class = isinstance(part, type)
    known = registry.knobs_of(part)
    elsewhere = {name for other in table.values() for name in registry.knobs_of(other)}
    if where == "objective":
        own = {*ObjectiveSettings.__dataclass_fields__} - {"knobs"}
    else:
        own = {"name"}
    allowed = {*own, *known} if is_class else own
    refuse_unknown([name for name in knobs if name not in elsewhere], allowed, f"`{where}`")
    chosen = {name: value for name, value in knobs.items() if value is not None}
    for name in chosen:
        if not is_class or name not in known:
            reads = f", which reads {list(known) or 'none of these settings'}; leave it out"
            raise ValueError(
                f"`{where}.{name}`={chosen[name]} has no effect on the {what} "
                f"{name_of(part)!r}{reads if is_class else ' given as an object; set it there'}"
            )
    found = {}
    if chosen:
        found = typed(chosen, part, where)
    for name, value in found.items():
        if isinstance(value, float) and not math.isfinite(value) and value != known[name]:
            raise ValueError(f"`{where}.{name}` is {value}; it must be a finite number")
    return found


def _built(part: Any, knobs: Mapping[str, Any], setting: str) -> Any:
    made = registry.built(part, knobs, setting)
    if not (callable(made) or level_of(made) == "token"):
        raise ValueError(f"`{setting}` is {made!r}; it must be a name, 'module:attribute' or a callable")
    return made


def name_of(part: Any) -> str:
    """Return a readable name of a part: that of its function or class; of a lambda its file and line."""
    if isinstance(part, Mapping):
        part = part.get("name")
    if isinstance(part, str):  # "module:attribute", as a function of that name
        if ":" in part:
            return part.rpartition(":")[2].rpartition(".")[2]
        return part
    if isinstance(part, functools.partial):
        return f"partial({name_of(part.func)})"
    name = str(getattr(part, "__name__", None) or type(part).__name__)
    if name == "<lambda>":
        return f"lambda at {Path(part.__code__.co_filename).name}:{part.__code__.co_firstlineno}"
    return name
