"""The setting ``update``: what the exact update leaves out, in which batches, with which random numbers."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator

from grpo_lab.settings import Positive, must_be, settings


def word(value: Any) -> Any:
    """Return true and false as the words ``on`` and ``off``, other values as they are."""
    if isinstance(value, bool):  # YAML 1.1 reads a bare `off` as false
        return "on" if value else "off"
    return value


MaxTokens = Annotated[
    Literal["auto"] | Positive, must_be("a whole number of at least 1, or 'auto': by the device's free memory")
]


@settings(bare="name")
class UpdateSettings:
    """``update``: ``"off"`` (stock), or the exact update.

    Args:
        dead_groups: ``skip`` leaves out rows that cannot contribute (exact); ``keep`` computes them; ``resample`` draws
            further prompts until every group of the batch contributes (DAPO; another data distribution).
        max_tokens: most tokens of one forward, padding included; ``None``: as many as the stock micro-batch has.
            ``auto``: what fits the device's free memory, measured in the first step; on a CPU as ``None``.
        max_rounds: with ``resample``: most rounds of generation for one batch.
        randomness: what is kept under active dropout: ``same_distribution`` draws masks for the rows that are computed
            (the default with ``objective``); ``same_draws`` draws exactly stock's masks and computes all rows (the
            default without).
        share_prompts: compute a group's prompt once (full attention by ``sdpa``, FlexAttention or a flash kernel);
            ``auto``: if that is cheaper.
        silent_rows: rows of which no token has a gradient (clipped, gated, rejected by the sampler's correction) are
            left out after a forward without gradient (exact). ``auto``: where that pays, by the shares measured so far;
            ``skip``: at every step; ``keep``: never.
    """

    name: Annotated[Literal["exact", "off"], BeforeValidator(word)] = "exact"
    dead_groups: Literal["skip", "keep", "resample"] = "skip"
    max_tokens: MaxTokens | None = None
    max_rounds: Positive | None = None
    randomness: Literal["same_distribution", "same_draws"] | None = None
    share_prompts: Annotated[Literal["auto", "on", "off"], BeforeValidator(word)] = "auto"
    silent_rows: Literal["auto", "skip", "keep"] = "auto"

    def __post_init__(self) -> None:
        of_the_exact_update = {
            "randomness": self.randomness is not None,
            "max_tokens": self.max_tokens is not None,
            "dead_groups: keep": self.dead_groups == "keep",
            "share_prompts: on": self.share_prompts == "on",
            "silent_rows: skip": self.silent_rows == "skip",
        }
        for setting, is_set in of_the_exact_update.items():
            if self.is_off and is_set:
                said = "which computes all rows in stock's batches, with stock's draws; leave it out"
                raise ValueError(f"`update.{setting}` has no effect with `update: off`, {said}")
        if self.silent_rows == "skip" and self.dead_groups == "keep":
            said = "which computes all rows; leave one of them out"
            raise ValueError(f"`update.silent_rows: skip` has no effect with `update.dead_groups: keep`, {said}")
        if self.max_rounds is not None and self.dead_groups != "resample":
            raise ValueError("`update.max_rounds` has an effect only with `update.dead_groups: resample`; leave it out")

    @property
    def is_off(self) -> bool:
        return self.name == "off"
