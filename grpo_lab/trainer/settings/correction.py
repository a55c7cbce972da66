"""The sampler correction in force: from ``correction``, or from TRL's ``vllm_importance_sampling_*``.

A correction weighs the loss of tokens that another policy sampled than the one before the update. Our setting and TRL's
say the same thing: TRL's four modes are four of our corrections, and TRL's bounds are their knobs ``low`` and ``high``.
``LabConfig.agree`` calls ``agree_on_correction`` and ``check_correction``; the trainer calls the other functions.
"""

from __future__ import annotations

from typing import Any

from grpo_lab.objectives import CORRECTIONS, Correction
from grpo_lab.objectives.corrections import TRLS_MODES
from grpo_lab.trainer.settings import knobs
from grpo_lab.trainer.settings.algorithm import Algorithm
from grpo_lab.trainer.settings.limits import NOT_TRLS
from grpo_lab.trainer.settings.parse import LabSettings
from grpo_lab.trainer.trl_bridge import teams

ON = "vllm_importance_sampling_correction"
MODE = "vllm_importance_sampling_mode"
#: Methods in which a team's subclass may sample by itself, and so bring the sampler's log-probs.
SAMPLES = ("_generate_single_turn", "_generate", "_generate_and_score_completions")


def trls_correction(owner: Any) -> Correction:
    """Return the correction that TRL's fields describe. ``owner``: the configuration or the trainer that has them."""
    mode = getattr(owner, MODE)
    part = CORRECTIONS[mode]
    made: Correction = part(**{knob: getattr(owner, name) for knob, name in knobs.SAMPLER_BOUNDS.items()})
    return made


def is_trls(correction: Correction | None) -> bool:
    """Return whether ``correction`` is one of TRL's four."""
    return type(correction) in TRLS_MODES


def agree_on_correction(args: Any, ours: LabSettings) -> None:
    """Check TRL's fields in ``args`` against our setting ``correction``, then write into them what it says. Without
    ``correction`` they stay.

    Raises:
        ValueError: a field that the user set contradicts ``correction`` or has no effect beside it (the message names
            both settings); a knob of ``correction`` is not allowed; or, without ``correction``, TRL's mode is one that
            a run with ``correction`` wrote.
    """
    chosen = ours.correction
    if chosen is None and getattr(args, MODE).startswith(NOT_TRLS):
        raise ValueError(
            f"`{MODE}`={getattr(args, MODE)!r} is what a run with `correction` wrote there, and TRL has no such mode: "
            "set `correction` as in that run, or a mode of TRL's"
        )
    if chosen is None:
        return
    correction = knobs.correction_from(args, chosen)
    named = knobs.name_of(chosen.name)
    fixed: dict[str, Any] = {ON: True, MODE: TRLS_MODES.get(type(correction), f"{NOT_TRLS}{named}")}
    if is_trls(correction):
        fixed |= {name: getattr(correction, knob) for knob, name in knobs.SAMPLER_BOUNDS.items()}
    else:
        fixed |= {name: knobs.default_of(args, name) for name in knobs.SAMPLER_BOUNDS.values()}
    for name, expected in fixed.items():
        found = getattr(args, name)
        ours_already = name == MODE and str(found).startswith(NOT_TRLS)
        if not knobs.written(args, name) or found == expected or ours_already:
            continue
        if name in knobs.SAMPLER_BOUNDS.values() and not is_trls(correction):
            raise ValueError(
                f"`{name}`={found!r} has no effect on the correction {named!r}: leave it out (its own bounds stand in "
                "`correction`)"
            )
        raise ValueError(
            f"`{name}`={found!r} contradicts `correction`={named!r}, which means `{name}`={expected!r}: leave one out"
        )
    for name, value in fixed.items():
        setattr(args, name, value)


def check_correction(args: Any, algorithm: Algorithm) -> None:
    """Raise ValueError if the correction does not suit the loss: TRL's loss cannot apply it, the objective takes its
    ratio against the sampler already, or weights per token meet an objective about whole responses."""
    correction = algorithm.correction
    asked = correction is not None
    if correction is None and args.use_vllm and getattr(args, ON):
        correction = trls_correction(args)
    objective = algorithm.objective
    if asked and objective is None and not (args.use_vllm and is_trls(correction)):
        raise ValueError(
            f"`correction` is {algorithm.names['correction']!r}, but the loss is left to TRL "
            f"({algorithm.left_to_trl}), which corrects only with `use_vllm`, by one of its own `{MODE}`s: set "
            "`objective`, or leave it out"
        )
    if asked and objective is not None and objective.against_sampler:
        raise ValueError(
            f"`correction` is {algorithm.names['correction']!r}, and the ratio of objective {objective.name!r} is "
            "against the sampler already: leave it out"
        )
    of_tokens = getattr(correction, "level", None) == "token"
    if of_tokens and objective is not None and objective.whole_response:
        said = f"`correction` is {algorithm.names['correction']!r}" if asked else f"`{MODE}` is {getattr(args, MODE)!r}"
        raise ValueError(
            f"{said}, and objective {objective.name!r} is about whole responses: use "
            f"'sequence_mask' (TRL's default) or 'sequence_truncate', or switch `{ON}` off"
        )


def correction_in_force(trainer: Any) -> Correction | None:
    """Return the correction that weighs a trainer's completions: that of our setting ``correction``; else that of TRL's
    fields, if vLLM samples and they switch it on; else None."""
    asked: Correction | None = trainer.algorithm.correction
    if asked is not None:
        return asked
    if trainer.use_vllm and getattr(trainer, ON):
        return trls_correction(trainer)
    return None


def take_over_correction(trainer: Any) -> None:
    """Switch TRL's own correction off if the setting ``correction`` asks for one that TRL does not have. Raises
    ValueError if nothing in the run can bring the log-probs of the sampler."""
    asked = trainer.algorithm.correction
    if asked is None:
        return
    own = trainer.samples_itself or any(teams(trainer, method) is not None for method in SAMPLES)
    if not (trainer.use_vllm or trainer.rollout_func is not None or own):
        raise ValueError(
            f"`correction` is {trainer.algorithm.names['correction']!r}, and without `use_vllm` transformers' "
            "`generate` hands out no log-probs to correct by: set `use_vllm: true`, bring a `rollout_func` or a "
            "`_generate_single_turn` that returns them, or leave `correction` out"
        )
    if not is_trls(asked):
        setattr(trainer, ON, False)
