"""The small mappings of ``LabConfig`` as typed settings, checked at the door.

``objective``, ``advantage``, ``kl`` and ``update`` take a name or a mapping. Unknown keys are refused with the nearest
match; a knob that would have no effect is an error, not silence.
"""

from __future__ import annotations

import difflib
import importlib
import json
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

DEAD_GROUPS = ("skip", "keep", "resample")


class UnknownSettingError(ValueError, TypeError):
    """A key that no setting has. Both kinds of error, since Python calls a wrong keyword a ``TypeError``."""


def refuse_unknown(given: Iterable[str], allowed: Iterable[str], where: str) -> None:
    """Raise ``UnknownSettingError`` naming the unknown key, the nearest known one and what is allowed."""
    allowed = sorted(allowed)
    for key in given:
        if key not in allowed:
            near = difflib.get_close_matches(str(key), allowed, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            listing = f" Allowed: {allowed}" if len(allowed) <= 20 else ""
            raise UnknownSettingError(f"{where} has no setting {key!r}{hint}{listing}")


T = TypeVar("T")


def as_settings(kind: Callable[..., T], value: Any, where: str) -> T:
    """A mapping, a JSON string or a bare name → the dataclass ``kind``."""
    if isinstance(value, str) and value.lstrip().startswith("{"):
        value = json.loads(value)
    if not isinstance(value, Mapping):
        value = {"name": value}
    refuse_unknown(value, [f.name for f in fields(kind)], f"`{where}`")  # type: ignore[arg-type]
    return kind(**value)


@dataclass(frozen=True)
class ObjectiveSettings:
    """``objective``: a preset, and what to change of it. ``None`` = as the preset (or TRL's flat setting) says.

    Args:
        name: a preset (``grpo``, ``dr_grpo``, ``dapo``, ``bnpo``, ``gspo``, ``cispo``, ``reinforce``, ``mirror_descent``).
        advantage: overrides the preset's advantage rule.
        ratio: ``token`` or ``sequence``.
        surrogate: a name (``reinforce``, ``unclipped``, ``clipped``, ``cispo``, ``mirror_descent``), ``"module:attribute"`` or a callable.
        aggregation: a name, ``"module:attribute"`` or a callable.
        epsilon, epsilon_high, delta: as TRL's flat settings of these names.
        tau: pull towards the policy that made the responses, of ``mirror_descent``.
    """

    name: str | None = None
    advantage: Any = None
    ratio: str | None = None
    surrogate: Any = None
    aggregation: Any = None
    epsilon: float | None = None
    epsilon_high: float | None = None
    delta: float | None = None
    tau: float | None = None


@dataclass(frozen=True)
class AdvantageSettings:
    """``advantage``: a rule's name, ``"module:attribute"`` or a callable, with its ``epsilon`` where it has one."""

    name: Any = None
    epsilon: float | None = None


@dataclass(frozen=True)
class KLSettings:
    """``kl``: estimator ``k1|k2|k3|k1_clamped``, placement ``loss|reward``, coefficient (else TRL's ``beta``), ratio weighting.

    In the reward: ``per: sequence|token`` (default: sequence) and the discount ``gamma`` of the latter (default: 1).
    """

    estimator: str = "k3"
    placement: str = "loss"
    coefficient: float | None = None
    ratio_weighted: bool | None = None
    per: str | None = None
    gamma: float | None = None

    def __post_init__(self) -> None:
        if self.per is not None and self.placement == "loss":
            raise ValueError(
                "`kl.per` has no effect with `kl.placement: loss`, where every token pays anyway; leave it out"
            )
        if self.gamma is not None and self.per != "token":
            raise ValueError("`kl.gamma` has an effect only with `kl.per: token`; leave it out")


@dataclass(frozen=True)
class UpdateSettings:
    """``update``: ``"off"`` (stock), or the exact update.

    Args:
        dead_groups: ``skip`` leaves rows out that cannot contribute (exact), ``keep`` computes them, ``resample`` draws
            further prompts until the batch holds live groups only (DAPO; another data distribution).
        max_tokens: padded tokens of one forward; default: the footprint of the stock micro-batch.
        max_rounds: with ``resample``: generations per batch at most.
    """

    name: str = "exact"
    dead_groups: str = "skip"
    max_tokens: int | None = None
    max_rounds: int | None = None

    def __post_init__(self) -> None:
        if self.name not in ("exact", "off"):
            raise ValueError(f"`update` is {self.name!r}; it must be 'off', 'exact' or a mapping")
        if self.dead_groups not in DEAD_GROUPS:
            raise ValueError(f"`update.dead_groups` is {self.dead_groups!r}; it must be one of {DEAD_GROUPS}")
        if self.max_tokens is not None and self.max_tokens < 1:
            raise ValueError(f"`update.max_tokens` is {self.max_tokens}; it must be a positive number of tokens")
        if self.max_rounds is not None and self.dead_groups != "resample":
            raise ValueError("`update.max_rounds` has an effect only with `update.dead_groups: resample`; leave it out")
        if self.max_rounds is not None and self.max_rounds < 1:
            raise ValueError(f"`update.max_rounds` is {self.max_rounds}; it must be ≥ 1")

    @property
    def is_off(self) -> bool:
        return self.name == "off"


@dataclass(frozen=True)
class LabSettings:
    """All of it, parsed. ``None`` = not set."""

    objective: ObjectiveSettings | None
    advantage: AdvantageSettings | None
    kl: KLSettings | None
    update: UpdateSettings


def lab_settings(objective: Any, advantage: Any, kl: Any, update: Any) -> LabSettings:
    """Parse the four mappings. Raises ``ValueError`` naming what was seen, what is allowed and the setting."""
    if kl is not None and not isinstance(kl, (str, Mapping)):
        raise ValueError(f"`kl` is {kl!r}; it must be a mapping such as {{estimator: k2, placement: loss}}")
    if isinstance(kl, str) and not kl.lstrip().startswith("{"):
        kl = {"estimator": kl}
    if update is False:  # YAML 1.1 reads a bare `off` as false
        update = "off"
    return LabSettings(
        objective=None if objective is None else as_settings(ObjectiveSettings, objective, "objective"),
        advantage=None if advantage is None else as_settings(AdvantageSettings, advantage, "advantage"),
        kl=None if kl is None else as_settings(KLSettings, kl, "kl"),
        update=UpdateSettings() if update is None else as_settings(UpdateSettings, update, "update"),
    )


def load_object(reference: str, setting: str) -> Any:
    """``"package.module:attribute"`` → the object; classes are instantiated without arguments."""
    module_name, _, attribute = reference.partition(":")
    try:
        found = getattr(importlib.import_module(module_name), attribute)
    except (ImportError, AttributeError) as error:
        looked = f"looked on Python's path, which starts with {sys.path[0] or Path.cwd()}"
        raise ValueError(f"`{setting}` is {reference!r}, which cannot be loaded: {error} ({looked})") from error
    return found() if isinstance(found, type) else found


#: what ``LabConfig`` adds to TRL's fields
OUR_FIELDS: tuple[str, ...] = (
    "objective",
    "advantage",
    "kl",
    "rollout",
    "reward_schedules",
    "reset_optimizer",
    "sampler",
    "update",
)


def named_by(part: Any) -> str:
    """``"module:attribute"`` of a function or class, of the class for an instance."""
    kind = part if isinstance(part, type) or hasattr(part, "__qualname__") else type(part)
    return f"{kind.__module__}:{kind.__qualname__}"
