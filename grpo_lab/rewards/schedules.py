"""A reward's weight as a function of the optimizer step, and of nothing else.

Therefore a resumed run has at each step the weight that the uninterrupted run has there. ``step`` counts finished
optimizer steps, as ``trainer_state.global_step`` does: the first batch is generated at step 0.

===============  =============================  ====================================================================
``kind``         settings                       weight at ``step``
===============  =============================  ====================================================================
``constant``     value                          value
``warmup``       start, value                   0 before ``start``, then value (Kimi k1.5's default: off, then constant)
``linear``       start, end, initial, value     a straight line from initial (≤ start; default 0) to value (≥ end)
``cosine``       start, end, initial, value     half a cosine between the same ends, flat at both
``piecewise``    points ``[[step, value], …]``  value of the last point that ``step`` has reached; the first is at 0
===============  =============================  ====================================================================

All values are weights without unit. Kimi k1.5 (section 2.3.3): "first without the length penalty, then a constant one".
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from dataclasses import asdict, fields
from itertools import pairwise
from typing import Annotated, Any, ClassVar

from grpo_lab.settings import Count, Float, did_you_mean, must_be, refuse_unknown, settings

Points = Annotated[tuple[tuple[Count, Float], ...], must_be("pairs [step, value]")]


class Schedule:
    """Base class of weight schedules: picklable, comparable, pure functions ``step -> weight``."""

    kind: ClassVar[str] = ""

    def __call__(self, step: int) -> float:
        """Return the weight at ``step`` ≥ 0."""
        if isinstance(step, bool) or int(step) != step or step < 0:
            raise ValueError(f"a schedule takes the number of finished optimizer steps, whole and ≥ 0; got {step!r}")
        return self.weight(int(step))

    def weight(self, step: int) -> float:
        """Compute the weight at ``step``, which is known to be whole and not negative."""
        raise NotImplementedError

    def in_words(self, factor: float = 1.0) -> str:
        """Describe ``factor`` · weight over the steps in words, as ``0.5 from step 100 on, 0 before``."""
        raise NotImplementedError

    def as_mapping(self) -> dict[str, Any]:
        """Return the mapping that ``schedule_from`` turns back into this schedule (for logs and run summaries)."""
        return {"kind": self.kind, **asdict(self)}  # type: ignore[call-overload]

    @property
    def final(self) -> float:
        """The weight after the last change."""
        return self.weight(sys.maxsize)

    @property
    def is_constant(self) -> bool:
        """True if the weight is the same at every step, so that no training progress is needed."""
        return False


@settings()
class Constant(Schedule):
    """Weight that is the same at every step."""

    kind: ClassVar[str] = "constant"
    is_constant: ClassVar[bool] = True
    value: Float

    def weight(self, step: int) -> float:
        return self.value

    def in_words(self, factor: float = 1.0) -> str:
        return f"{factor * self.value:g}"


@settings()
class Warmup(Schedule):
    """Weight 0 before step ``start``, then ``value``."""

    kind: ClassVar[str] = "warmup"
    start: Count
    value: Float

    def weight(self, step: int) -> float:
        if step < self.start:
            return 0.0
        return self.value

    def in_words(self, factor: float = 1.0) -> str:
        before = ""
        if self.start:
            before = f" from step {self.start} on, 0 before"
        return f"{factor * self.value:g}{before}"


@settings()
class Linear(Schedule):
    """Weight ``initial`` up to step ``start``, ``value`` from step ``end`` on, and a straight line between them."""

    kind: ClassVar[str] = "linear"
    start: Count
    end: Count
    value: Float
    initial: Float = 0.0

    def __post_init__(self) -> None:
        if self.end <= self.start:
            raise ValueError(f"`end` {self.end} must be after `start` {self.start}; for a jump use kind 'warmup'")

    def weight(self, step: int) -> float:
        if step <= self.start:  # both ends exactly, not up to rounding
            return self.initial
        if step >= self.end:
            return self.value
        return self.initial + (self.value - self.initial) * self.curve((step - self.start) / (self.end - self.start))

    def in_words(self, factor: float = 1.0) -> str:
        ends = f"{factor * self.initial:g} to {factor * self.value:g}"
        return f"{ends} over the steps {self.start} to {self.end} ({self.kind})"

    def curve(self, progress: float) -> float:
        """Return how much of the way from ``initial`` to ``value`` is done; both numbers are in [0, 1]."""
        return progress


@settings()
class Cosine(Linear):
    """Weight as by ``Linear``, with half a cosine in the place of the straight line."""

    kind: ClassVar[str] = "cosine"

    def curve(self, progress: float) -> float:
        return 0.5 * (1.0 - math.cos(math.pi * progress))


@settings()
class Piecewise(Schedule):
    """Weight of the last of the ``points`` (step, value) that the step has reached; the first point is at step 0."""

    kind: ClassVar[str] = "piecewise"
    points: Points

    def __post_init__(self) -> None:
        steps = [at for at, _ in self.points]
        if not steps or steps[0] != 0 or any(late <= early for early, late in pairwise(steps)):
            raise ValueError(f"`points` must start at step 0 and rise strictly; got steps {steps}")

    def weight(self, step: int) -> float:
        return next(value for at, value in reversed(self.points) if at <= step)

    def in_words(self, factor: float = 1.0) -> str:
        return ", ".join(f"{factor * value:g} from step {at} on" for at, value in self.points)

    @property
    def is_constant(self) -> bool:
        return len(self.points) == 1


_KINDS: dict[str, type[Schedule]] = {kind.kind: kind for kind in (Constant, Warmup, Linear, Cosine, Piecewise)}


def schedule_from(spec: float | Mapping[str, Any] | Schedule) -> Schedule:
    """Make a schedule of a number, which is a constant weight, or of a mapping such as
    ``{"kind": "warmup", "start": 100, "value": 0.5}``. A schedule is returned as it is. Raises ValueError for an
    unknown kind or setting, a missing setting, a bad value."""
    if isinstance(spec, Schedule):
        return spec
    if isinstance(spec, (int, float)) and not isinstance(spec, bool):
        spec = {"kind": "constant", "value": spec}
    if not isinstance(spec, Mapping):
        raise ValueError(f"a schedule is a number, a mapping with 'kind' or a Schedule; got {spec!r}")
    kind = spec.get("kind")
    if not isinstance(kind, str) or kind not in _KINDS:
        raise ValueError(f"unknown schedule kind {kind!r}{did_you_mean(kind, _KINDS)}; kinds: {sorted(_KINDS)}")
    given = {key: value for key, value in spec.items() if key != "kind"}
    refuse_unknown(given, {field.name for field in fields(_KINDS[kind])}, f"schedule {kind!r}")  # type: ignore[arg-type]
    try:
        return _KINDS[kind](**given)
    except ValueError as error:
        raise ValueError(f"schedule {kind!r}: {error}") from None


def weight_in_words(reward: Any, factor: float) -> str:
    """Describe the weight in force over the steps: ``factor``, the reward's entry in ``reward_weights``, times the
    weight that the reward itself has by its ``schedule`` or ``weight_at``, if any."""
    own = getattr(reward, "schedule", None)
    if isinstance(own, Schedule):
        return own.in_words(factor)
    weight_at = getattr(reward, "weight_at", None)
    if weight_at is None:
        return f"{factor:g}"
    return f"{factor * weight_at(0):g} at step 0, then as its `weight_at` says"
