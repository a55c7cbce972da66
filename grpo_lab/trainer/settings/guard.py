"""The mapping ``guard``: what happens to an optimizer step with a number that is not finite."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator

from grpo_lab.reading import NULL_IS_DEFAULT, Positive, Switch, settings


def _off(value: Any) -> Any:
    """YAML 1.1 reads a bare `off` as false."""
    return "off" if value is False else value


@settings(bare="name")
class GuardSettings:
    """``guard``: ``off``, or what to do with a step whose loss, gradient, reward or engine log-prob is NaN or infinite.

    Args:
        max_bad_steps: the run stops after so many left-out steps in a row (a generation batch with a bad reward or log-prob counts
            once, however many steps it serves).
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


__all__ = ["GuardSettings"]
