"""Keep TRL's settings and ours from contradicting each other: what one of ours says is written into TRL's field.

Whatever reads TRL's fields (model card, logs, a saved record) then reads the truth. With ``objective: dr_grpo``, for
example, ``loss_type`` becomes ``dr_grpo`` and ``scale_rewards`` becomes ``none``. For an objective that TRL does not
have ``loss_type`` gets a name that TRL refuses to compute (``limits.NOT_TRLS``).
"""

from __future__ import annotations

from typing import Any, NamedTuple

from grpo_lab.objectives import preset
from grpo_lab.trainer.settings import knobs
from grpo_lab.trainer.settings.algorithm import TRL_EQUIVALENT, TRL_SCALING, Algorithm
from grpo_lab.trainer.settings.knobs import name_of
from grpo_lab.trainer.settings.limits import NOT_TRLS
from grpo_lab.trainer.settings.parse import LabSettings, ObjectiveSettings


class Fixed(NamedTuple):
    """What a setting of ours makes a field of TRL's.

    Attributes:
        value: the value that the field must have; None if TRL has nothing that means the same.
        setting: name of our setting.
        chosen: its value.
    """

    value: Any
    setting: str
    chosen: Any


def _loss_type(chosen: ObjectiveSettings, by_task: bool) -> str:
    """Return the ``loss_type`` to write for an objective of ours: TRL's name if TRL has the same loss, else a name that
    TRL refuses. ``by_task``: whether tasks have losses of their own."""
    name = chosen.name or "grpo"
    row = preset(name)
    own = [
        f"+{part}={name_of(value)}"
        for part, value in (("surrogate", chosen.surrogate), ("aggregation", chosen.aggregation))
        if value is not None and value != getattr(row, part)
    ]
    if by_task:
        own.append("+tasks")
    if own or name not in TRL_EQUIVALENT:
        return NOT_TRLS + name + "".join(own)
    return TRL_EQUIVALENT[name][0]


def _fixed_by_rule(rule: Any) -> dict[str, Fixed]:
    """Return the TRL fields that an advantage rule fixes. ``gdpo`` does not fix ``scale_rewards``, since TRL does not
    read it where each reward is normalised on its own."""
    if rule == "gdpo":
        return {"multi_objective_aggregation": Fixed(knobs.APART, "advantage", rule)}
    return {
        "scale_rewards": Fixed(_scaling(rule), "advantage", rule),
        "multi_objective_aggregation": Fixed("sum_then_normalize", "advantage", rule),
    }


def _fixed_by(args: Any, ours: LabSettings) -> dict[str, Fixed]:
    """Return the TRL fields that our settings fix."""
    chosen = ours.objective
    if chosen is None:
        if ours.advantage is None or ours.advantage.name is None:
            return {}
        return _fixed_by_rule(ours.advantage.name)
    row = preset(chosen.name or "grpo")
    loss_type, level = TRL_EQUIVALENT.get(chosen.name or "grpo", (None, row.ratio))
    rule = knobs.advantage_choice(ours.advantage, knobs.rule_beside(args, chosen))[0]
    fixed = {
        "loss_type": Fixed(loss_type, "objective", chosen.name),
        "importance_sampling_level": Fixed(chosen.ratio or level, "objective.ratio", chosen.ratio or row.ratio),
        **_fixed_by_rule(rule),
    }
    if row.plain_k3 and ours.kl is None:
        fixed["use_bias_correction_kl"] = Fixed(False, "objective", chosen.name)
    for name, knob in knobs.flat_settings(knobs.surrogate_part(chosen)).items():
        value = chosen.knobs.get(knob)
        if value is not None:
            fixed[name] = Fixed(value, f"objective.{knob}", value)
    return fixed


def agree_with_trl(args: Any, ours: LabSettings) -> None:
    """Check TRL's settings in ``args`` against ours, then write into TRL's fields what ours say. Raises ValueError,
    which names both settings, if a field that the user set contradicts a setting of ours."""
    chosen = ours.objective
    fixed = _fixed_by(args, ours)
    loss_type = None
    if chosen is not None:
        loss_type = _loss_type(chosen, any(task.has_own_loss for task in ours.tasks.values()))
    for name, (expected, setting, value) in fixed.items():
        found = getattr(args, name)
        # as written here before; a saved record may hold a part by another name
        ours_already = name == "loss_type" and (
            found == loss_type or found.startswith(f"{NOT_TRLS}{chosen.name or 'grpo'}+")
        )
        if not ours_already and knobs.written(args, name) and found != expected:
            if expected is None:
                meaning = f"has no counterpart among TRL's `{name}`"
            else:
                meaning = f"means `{name}`={expected!r}"
            raise ValueError(f"`{name}`={found!r} contradicts `{setting}`={value!r}, which {meaning}: leave one out")
    for name, one in fixed.items():
        setattr(args, name, one.value)
    if chosen is not None:
        args.loss_type = loss_type
        args.importance_sampling_level = chosen.ratio or preset(chosen.name or "grpo").ratio


def knobs_in_force(args: Any, algorithm: Algorithm) -> None:
    """Write the knobs of the surrogate in force into the TRL fields of the same meaning (``epsilon``, …): they may
    differ from TRL's defaults, since a paper or a team's surrogate can have defaults of its own."""
    if algorithm.objective is None:
        return
    surrogate = algorithm.objective.surrogate
    for name, field in knobs.flat_settings(surrogate).items():
        setattr(args, name, getattr(surrogate, field))


def _scaling(rule: Any) -> str:
    """Return the ``scale_rewards`` by which TRL divides as an advantage rule does; ``none`` for a rule of a team."""
    if isinstance(rule, str):
        return {**TRL_SCALING, "process": "group"}.get(rule, "none")
    return "none"
