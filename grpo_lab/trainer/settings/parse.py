"""What ``LabConfig`` adds to TRL's settings, as typed settings: its small mappings, and single values.

``objective``, ``advantage``, ``kl``, ``update`` and ``sampler`` take a name or a mapping, and all mappings JSON text.
Unknown keys are refused with the nearest match; a knob that would have no effect is an error, not silence. Keys that
belong to a part (``objective: {tau: …}``) are ``knobs``: which there are, the part's dataclass says.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import field
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from grpo_lab.rewards.schedules import Schedule, schedule_from
from grpo_lab.settings import (
    NULL_IS_DEFAULT,
    Hours,
    Number,
    OnlySwitch,
    Positive,
    Switch,
    from_json,
    must_be,
    read,
    settings,
)
from grpo_lab.trainer.settings.rollout import RolloutSettings
from grpo_lab.trainer.settings.sampler import SamplerSettings
from grpo_lab.trainer.settings.value import ValueSettings


def reward_schedules(written: Any) -> dict[str, Schedule]:
    """``{reward name: schedule}`` from the configuration. Raises ``ValueError`` naming the reward and the setting."""
    if written is None:
        return {}
    if not isinstance(written, Mapping):
        raise ValueError(
            f"`reward_schedules` is {written!r}; it must be a mapping of reward names to schedules, such as "
            "{accuracy_reward: {kind: warmup, start: 100, value: 1.0}}"
        )
    found = {}
    for name, spec in written.items():
        try:
            found[str(name)] = schedule_from(spec)
        except (ValueError, TypeError) as error:
            raise ValueError(f"`reward_schedules.{name}`: {error}") from error
    return found


def _off(value: Any) -> Any:
    """YAML 1.1 reads a bare `off` as false."""
    return "off" if value is False else value


def _digits(value: Any) -> Any:
    """Command lines have text."""
    return int(value) if isinstance(value, str) and value.strip().isdigit() else value


def _path_of_a_file(value: Any) -> str:
    """ValueError for no path, and for that of a folder, which is always there."""
    if not isinstance(value, str | os.PathLike) or not os.fspath(value) or os.path.isdir(value):
        raise ValueError
    return os.fspath(value)


@settings(bare="name")
class GuardSettings:
    """``guard``: ``off``, or what to do with a step whose loss, gradient, reward or engine log-prob is NaN or infinite.

    Args:
        max_bad_steps: the run stops after so many left-out steps in a row (a generation batch with a bad reward or
            log-prob counts once, however many steps it serves).
        save: keep the batch of a left-out step under ``<output_dir>/bad_steps``.
    """

    name: Annotated[Literal["on", "off"], BeforeValidator(_off)] = "on"
    max_bad_steps: Annotated[Positive, NULL_IS_DEFAULT] = 3
    save: Annotated[Switch, NULL_IS_DEFAULT] = True

    def __post_init__(self) -> None:
        if self.is_off and (self.max_bad_steps != 3 or not self.save):
            idle = "max_bad_steps" if self.max_bad_steps != 3 else "save"
            raise ValueError(f"`guard.{idle}` has no effect with `guard: off`; leave it out")

    @property
    def is_off(self) -> bool:
        return self.name == "off"


@settings(bare="name", rest="knobs")
class ObjectiveSettings:
    """``objective``: a preset, and what to change of it. ``None`` = as the preset (or TRL's flat setting) says.

    Args:
        name: a preset (``grpo_lab.objectives.PRESETS``), one that a team registered, or ``"module:name"``: the module
            is loaded first.
        advantage: overrides the preset's advantage rule: a name, ``"module:attribute"``, a callable, or a mapping
            ``{name: …, …}``.
        ratio: ``token``, ``sequence``, ``sequence_token`` or ``product``.
        surrogate: a name, ``"module:attribute"``, a class or a callable.
        aggregation: a name, ``"module:attribute"``, a callable, or a mapping ``{name: …, …}``.
        knobs: every other key: a field of the chosen surrogate's dataclass (checked by ``algorithm``).
    """

    name: str | None = None
    advantage: Any = None
    ratio: str | None = None
    surrogate: Any = None
    aggregation: Any = None
    knobs: dict[str, Any] = field(default_factory=dict)


@settings(bare="name", rest="knobs")
class AdvantageSettings:
    """``advantage``: a rule's name, ``"module:attribute"``, a class or a callable; ``knobs``: every other key, a field
    of its dataclass."""

    name: Any = None
    knobs: dict[str, Any] = field(default_factory=dict)


@settings(bare="estimator")
class KLSettings:
    """``kl``: estimator ``k1|k2|k3|k1_clamped``, placement ``loss|reward``, coefficient (else TRL's ``beta``), ratio
    weighting.

    In the reward: ``per: sequence|token`` (default: sequence) and the discount ``gamma`` of the latter (default: 1);
    ``target``, nats a completion, to which β is steered from ``coefficient`` on, by ``rate`` (default: 0.1) or
    ``horizon`` (``objectives.AdaptiveKL``).
    """

    estimator: Annotated[str, Field(strict=True), must_be("a name, as in {estimator: k2, coefficient: 0.1}")] = "k3"
    placement: str = "loss"
    coefficient: Number | None = None
    ratio_weighted: Switch | None = None
    per: str | None = None
    gamma: Number | None = None
    target: Number | None = None
    rate: Number | None = None
    horizon: Number | None = None

    def __post_init__(self) -> None:
        if self.per is not None and self.placement == "loss":
            raise ValueError(
                "`kl.per` has no effect with `kl.placement: loss`, where every token pays anyway; leave it out"
            )
        if self.gamma is not None and self.per != "token":
            raise ValueError("`kl.gamma` has an effect only with `kl.per: token`; leave it out")
        for name in ("rate", "horizon"):
            if getattr(self, name) is not None and self.target is None:
                raise ValueError(f"`kl.{name}` has an effect only with `kl.target`; leave it out, or set a target")


@settings(bare="name")
class UpdateSettings:
    """``update``: ``"off"`` (stock), or the exact update.

    Args:
        dead_groups: ``skip`` leaves rows out that cannot contribute (exact), ``keep`` computes them, ``resample`` draws
            further prompts until the batch holds live groups only (DAPO; another data distribution).
        max_tokens: padded tokens of one forward; default: the footprint of the stock micro-batch.
        max_rounds: with ``resample``: generations per batch at most.
        randomness: where dropout is active: ``same_distribution`` draws masks for the rows that are computed (the
            update is exact in distribution), ``same_draws`` draws stock's very masks, which takes stock's batches of
            all rows. Default: the distribution where ``objective`` is set, the draws where it is not (a run that is to
            equal stock TRL number by number).
    """

    name: Annotated[Literal["exact", "off"], BeforeValidator(_off)] = "exact"
    dead_groups: Literal["skip", "keep", "resample"] = "skip"
    max_tokens: Positive | None = None
    max_rounds: Positive | None = None
    randomness: Literal["same_distribution", "same_draws"] | None = None

    def __post_init__(self) -> None:
        if self.randomness is not None and self.is_off:
            raise ValueError(
                "`update.randomness` has no effect with `update: off`, which has stock's draws anyway; leave it out"
            )
        if self.is_off and (self.max_tokens is not None or self.dead_groups == "keep"):
            idle = "max_tokens" if self.max_tokens is not None else "dead_groups: keep"
            raise ValueError(
                f"`update.{idle}` has no effect with `update: off`, which computes all rows in stock's batches; leave "
                "it out"
            )
        if self.max_rounds is not None and self.dead_groups != "resample":
            raise ValueError("`update.max_rounds` has an effect only with `update.dead_groups: resample`; leave it out")

    @property
    def is_off(self) -> bool:
        return self.name == "off"


GENERATION = "generation"
ReferenceEvery = Annotated[
    Literal["generation"] | Annotated[int, BeforeValidator(_digits), Field(ge=1, strict=True)],
    must_be(f"a number of optimizer steps (at least 1), or {GENERATION!r}: before every generation batch"),
]
StopFile = Annotated[
    str,
    BeforeValidator(_path_of_a_file),
    must_be("the path of a file, there or not yet, or left out (STOP in `output_dir`)"),
]


@settings()
class LabSettings:
    """What ``LabConfig`` adds, parsed and checked. ``None`` = not set."""

    objective: ObjectiveSettings | None = None
    advantage: AdvantageSettings | None = None
    kl: KLSettings | None = None
    value: ValueSettings | None = None
    update: Annotated[UpdateSettings, NULL_IS_DEFAULT] = field(default_factory=UpdateSettings)
    rollout: Annotated[RolloutSettings, NULL_IS_DEFAULT] = field(default_factory=RolloutSettings)
    sampler: SamplerSettings | None = None
    guard: GuardSettings | None = None
    reward_schedules: Annotated[Mapping[str, Schedule], BeforeValidator(reward_schedules)] = field(default_factory=dict)
    reset_optimizer: OnlySwitch | None = None
    reference_every: ReferenceEvery | None = None
    max_hours: Hours | None = None
    stop_file: StopFile | None = None
    save_checksums: OnlySwitch | None = None

    @property
    def randomness(self) -> str:
        """``update.randomness`` in force: ``same_distribution`` or ``same_draws``."""
        drop_in = self.objective is None or self.update.is_off
        return self.update.randomness or ("same_draws" if drop_in else "same_distribution")

    @property
    def guard_in_force(self) -> GuardSettings | None:
        """``guard`` where it acts: as asked for; unasked with ``objective``, and not in a drop-in run, since stock TRL
        has none."""
        if self.guard is None:
            return None if self.objective is None else GuardSettings()
        return None if self.guard.is_off else self.guard

    @property
    def keeps_nan(self) -> bool:
        """Whether what is not finite may be saved: ``guard: off``, said so. A drop-in run, too, keeps no checkpoint
        that is not."""
        return self.guard is not None and self.guard.is_off


def parsed(args: Any) -> LabSettings:
    """Our settings of a ``LabConfig``. ValueError: what was seen, what is allowed, which setting."""
    return read(LabSettings, {name: from_json(getattr(args, name), name) for name in LabSettings.__dataclass_fields__})


OUR_FIELDS: tuple[str, ...] = tuple(LabSettings.__dataclass_fields__)
"""What ``LabConfig`` adds to TRL's fields."""


def named_by(part: Any) -> str:
    """``"module:attribute"`` of a function or class, of the class for an instance."""
    kind = part if isinstance(part, type) or hasattr(part, "__qualname__") else type(part)
    return f"{kind.__module__}:{kind.__qualname__}"
