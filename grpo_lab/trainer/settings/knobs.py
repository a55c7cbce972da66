"""Build the parts that ``objective``, ``advantage`` and ``aggregation`` choose, with their knobs.

A part is given as a name, as ``"module:attribute"``, as a class, or as a callable that is ready. The knobs of a class
are the fields of its dataclass; an unknown one is refused with the nearest match. The value of a knob is, in this
order: what the user wrote beside the part's name; what the user wrote in TRL's flat setting of the same meaning
(``FLAT``, ``SAMPLER_BOUNDS``); the number of the preset's paper (``papers_bounds``); the default, TRL's for our
surrogates, else the part's own.
"""

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

#: Value of TRL's ``multi_objective_aggregation`` that means the same as the advantage rule ``gdpo``.
APART = "normalize_then_sum"
#: TRL's flat setting that is a knob of a surrogate → that knob.
FLAT: dict[str, str] = {
    **{name: name for name in ("epsilon", "epsilon_high", "delta")},
    **{f"sapo_{name}": name for name in ("temperature_neg", "temperature_pos")},
    **{f"vespo_{name}": name for name in ("k_pos", "lambda_pos", "k_neg", "lambda_neg")},
}
#: Knob of a correction → TRL's flat setting with the same meaning, for corrections that TRL has.
SAMPLER_BOUNDS = {"low": "vllm_importance_sampling_clip_min", "high": "vllm_importance_sampling_clip_max"}


def default_of(args: Any, name: str) -> Any:
    """Return the default of the field ``name`` of the configuration ``args``."""
    return args.__dataclass_fields__[name].default


def written(args: Any, name: str) -> bool:
    """Return whether the user set the field ``name``: it was an argument of the configuration's constructor, or its
    value is not the default."""
    return name in getattr(args, "_written", ()) or bool(getattr(args, name) != default_of(args, name))


def with_registered(settings: LabSettings) -> LabSettings:
    """Return ``settings`` with the registered name of an ``objective`` in place of the form ``"module:name"``.

    The module is imported, so that it registers its objectives; ``name`` is a registered name, or the class that was
    registered. Raises ValueError if there is no such module, or if it registers no such objective.
    """
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
    """Return the surrogate that the setting ``objective`` names, not built yet: a class, a function or an object."""
    return _part(chosen.surrogate or preset(chosen.name or "grpo").surrogate, SURROGATES, "surrogate")


def flat_settings(part: Any) -> dict[str, str]:
    """Return which of TRL's flat settings are knobs of the surrogate ``part``: setting → knob. For a team's surrogate
    both must have one name: ``epsilon`` counts, ``sapo_temperature_neg`` for a knob ``temperature_neg`` does not."""
    known = registry.knobs_of(part)
    return {name: field for name, field in FLAT.items() if field in known and (name == field or is_ours(part))}


def surrogate_from(args: Any, chosen: ObjectiveSettings) -> Surrogate:
    """Build the surrogate that the setting ``objective`` (``chosen``) names, with its knobs.

    What ``objective`` says of a knob counts first, then TRL's flat setting (``FLAT``). Our surrogates take every flat
    setting that is a knob of theirs, with TRL's defaults; a team's class takes those that the user set, and has
    defaults of its own; a surrogate that is given as an object takes none. The numbers of the preset's paper count if
    the user sets none of these knobs (``papers_bounds``). Raises ValueError if a setting would have no effect on the
    surrogate.
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
    sets_one = any(field in own or written(args, name) for name, field in read.items() if field in papers)
    if not sets_one:
        flat |= papers
    return _built(part, {**flat, **own}, "surrogate")


def papers_bounds(chosen: ObjectiveSettings) -> dict[str, float]:
    """Return the surrogate's knobs with the numbers of the preset's paper, which count if the run sets none of them. A
    preset must say so (``Preset.holds``), and its own surrogate be in force; else there are none."""
    row = preset(chosen.name or "grpo")
    if not row.holds or chosen.surrogate is not None:
        return {}
    known = registry.knobs_of(SURROGATES[row.surrogate])
    return {name: float(number) for name, number in row.paper.items() if name in known}


def other_than_the_paper(args: Any, chosen: ObjectiveSettings, surrogate: Any) -> str | None:
    """Return a warning if knobs of the surrogate have TRL's defaults, while the objective's paper (or our surrogate's
    own defaults) has other numbers, and the run sets none of them; else None."""
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
    """Raise ValueError if ``objective`` has a knob that belongs to the preset's advantage rule; the message shows how
    to write it in ``advantage``."""
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
    """Build the advantage rule that the setting ``advantage`` names or, if it names none, the rule ``fallback``, that
    of the objective. Returns None if there is neither: TRL then computes the advantages."""
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
    """Build the sampler correction that the setting ``correction`` asks for; None if it is not set. For a correction
    that TRL has, too, TRL's bounds count where the user set them and ``correction`` does not."""
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
    """Return the advantage rule that is chosen, not built yet, and its knobs. ``fallback`` is the objective's rule, a
    name or a mapping of a name and knobs. If ``advantage`` names no rule, its knobs override those of ``fallback``."""
    knobs = {}
    if settings is not None:
        knobs = settings.knobs
    if settings is not None and settings.name is not None:
        return settings.name, knobs
    name, beside = _named(fallback, "objective.advantage")
    return name, {**beside, **knobs}


SCALED_BY_TRL = ("group_zscore", "group_mean", "batch_zscore")
"""Advantage rules of presets in whose place TRL's ``multi_objective_aggregation`` may put ``gdpo``."""


def rule_beside(args: Any, chosen: ObjectiveSettings) -> Any:
    """Return the advantage rule that counts if ``advantage`` names none: that of ``objective.advantage``; else ``gdpo``
    if TRL's ``multi_objective_aggregation`` asks for it; else the preset's.

    A preset whose rule makes advantages per token (PPO) keeps it. Raises ValueError if TRL's setting contradicts
    another rule.
    """
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
    """Return a part as ``name(knob=value, …)``: the name by which the user chose it (``chosen``), and those knobs of
    ``part`` that differ from their defaults."""
    knobs = knobs_in_words(part, only_set=True)
    return name_of(chosen) + (f"({knobs})" if knobs else "")


def knobs_in_words(part: Any, only_set: bool = False) -> str:
    """Return the knobs of a part as ``knob=value, …``; with ``only_set`` those that differ from their defaults."""
    values = {name: (getattr(part, name), default) for name, default in registry.knobs_of(part).items()}
    shown = {name: value for name, (value, default) in values.items() if not (only_set and value == default)}
    return ", ".join(f"{name}={value}" for name, value in shown.items() if value is not None)


def _named(chosen: Any, setting: str) -> tuple[Any, dict[str, Any]]:
    """Return name and knobs of a part that is given as a mapping; of another form the part itself, without knobs."""
    if not isinstance(chosen, Mapping):
        return chosen, {}
    if "name" not in chosen:
        raise ValueError(f"`{setting}` is {dict(chosen)!r}; as a mapping it needs a `name`")
    return chosen["name"], {key: value for key, value in chosen.items() if key != "name"}


def _part(chosen: Any, table: Mapping[str, Any], setting: str) -> Any:
    """Return the part that ``chosen`` gives: by its name in ``table``, by ``"module:attribute"``, or itself."""
    if isinstance(chosen, str):
        if ":" in chosen:
            return registry.load_named(chosen, setting)
        return registry.found(table, chosen, setting)
    if not (callable(chosen) or level_of(chosen) == "token"):
        raise ValueError(f"`{setting}` is {chosen!r}; it must be a name, 'module:attribute' or a callable")
    return chosen


def _checked(knobs: Mapping[str, Any], part: Any, where: str, what: str, table: Mapping[str, Any]) -> dict[str, Any]:
    """Return those of ``knobs`` that are not None, with numbers and switches in the types that the part declares.

    Args:
        knobs: what the user wrote.
        part: the part whose knobs they should be.
        where: the setting that they stand in.
        what: the kind of part, for messages.
        table: all parts of this kind. A knob of another part is an error of its own: it has no effect here.

    Raises:
        ValueError: a knob is unknown, has no effect on this part, or is a number that is not finite (a default may be).
    """
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
        if is_class and name in known:
            continue
        why = " given as an object; set it there"
        if is_class:
            why = f", which reads {list(known) or 'none of these settings'}; leave it out"
        raise ValueError(f"`{where}.{name}`={chosen[name]} has no effect on the {what} {name_of(part)!r}{why}")
    found = {}
    if chosen:
        found = typed(chosen, part, where)
    for name, value in found.items():
        if isinstance(value, float) and not math.isfinite(value) and value != known[name]:
            raise ValueError(f"`{where}.{name}` is {value}; it must be a finite number")
    return found


def _built(part: Any, knobs: Mapping[str, Any], setting: str) -> Any:
    """Return the part, built with its knobs if it is a class. Raises ValueError if the result cannot be called."""
    made = registry.built(part, knobs, setting)
    if not (callable(made) or level_of(made) == "token"):
        raise ValueError(f"`{setting}` is {made!r}; it must be a name, 'module:attribute' or a callable")
    return made


def name_of(part: Any) -> str:
    """Return a name of a part for people: the one in a mapping, that of its function or class, or file and line of a
    lambda."""
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
