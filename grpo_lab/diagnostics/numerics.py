"""Gaps between the engine's and the trainer's log-probs of the same tokens, and what their pattern says. Pure numbers.

With ℓ_e of the engine and ℓ_t of the trainer, in nats, a token's gap is |ℓ_t − ℓ_e|.

Each fault shows in some measurements and cannot show in others. `likely_cause` names the fault by both:

    template   the engine renders messages to other tokens
    cache      a gap as written, none where the engine draws anew after the same tokens, without its cache
    adapter    a gap with the adapter, none without
    weights    a gap after a single token already, where attention has nothing to choose from
    rotary     no gap after a single token, and one that grows with the distance between tokens

In random models of two layers the gap of a wrong `rope_theta` or linear scaling grew 5 to 280 times from the second
token to the last quarter of 256, that of moved query and key matrices at most 2 times: `GROWS` lies between.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

#: Factor from near to far tokens at which a gap counts as growing with the distance.
GROWS = 4.0


@dataclass(frozen=True)
class Gap:
    """Gap over some tokens: how many they are, and the mean and the worst gap in nats."""

    tokens: int
    mean: float
    worst: float

    @classmethod
    def between(cls, engine: ArrayLike, trainer: ArrayLike) -> Gap:
        """Compute the gap between two lists of log-probs of the same tokens, ``[N]`` with N ≥ 1, all finite."""
        gap = np.abs(np.asarray(trainer, dtype=np.float64) - np.asarray(engine, dtype=np.float64))
        return cls(gap.size, float(gap.mean()), float(gap.max()))


def by_part(engine: ArrayLike, trainer: ArrayLike, part: ArrayLike) -> dict[int, Gap]:
    """Return the number of each part of a transcript → the gap of its tokens, by rising number. ``engine``,
    ``trainer``: log-probs ``[N]``; ``part``: the number of each token's part ``[N]``."""
    parts = np.asarray(part)
    numbers = [int(one) for one in np.unique(parts)]
    here = {number: parts == number for number in numbers}
    return {number: Gap.between(np.asarray(engine)[own], np.asarray(trainer)[own]) for number, own in here.items()}


def quarter_of(position: int, length: int) -> int:
    """Return the quarter, 1 to 4, of a token at ``position`` (from 0) in a row of ``length`` tokens."""
    return 4 * position // length + 1


@dataclass(frozen=True)
class Evidence:
    """What was measured of an engine against a trainer.

    Args:
        turns: turn → gap of the tokens that the engine wrote, with the log-probs that it gave them then.
        quarters: quarter of the transcript → gap of the same tokens.
        anew: gap of tokens that the engine draws anew after parts of the transcripts, without its cache.
        alone: the same after a single token.
        near: the same after two tokens.
        far: the same after at least three quarters of a transcript.
        base: as ``anew``, both without the adapter; None: there is no adapter.
        unused: gap of the engine with the adapter to the trainer without it; None: there is no adapter.
        template: how the engine renders messages to other tokens than the trainer; None: it does not.
    """

    turns: Mapping[int, Gap]
    quarters: Mapping[int, Gap]
    anew: Gap
    alone: Gap
    near: Gap
    far: Gap
    base: Gap | None = None
    unused: Gap | None = None
    template: str | None = None

    def off(self, limit: float) -> list[str]:
        """Return the names of what has a mean gap above ``limit`` nats: turns, quarters, and the tokens drawn anew."""
        named = [(f"turn {number}", gap) for number, gap in self.turns.items()]
        named += [(f"quarter {number}", gap) for number, gap in self.quarters.items()]
        named.append(("what is drawn anew", self.anew))
        return [name for name, gap in named if gap.mean > limit]


def likely_cause(found: Evidence, limit: float) -> tuple[str, str]:
    """Return the fault that the pattern of gaps points to, by its name in this module's docstring (empty if it points
    to none), and a sentence that says why. ``limit``: as in ``verdict``."""
    if found.template is not None:
        return "template", f"The engine has another chat template or tokenizer: {found.template}."
    if found.anew.mean <= limit:
        return "cache", (
            f"Drawn anew, without its cache, it is right ({found.anew.mean:.2g}): the engine goes on from cached pages "
            "of an older policy (clear its prefix cache after each sync), or its weights have changed meanwhile."
        )
    if found.base is not None and found.base.mean <= limit:
        held = "holds another adapter than the trainer, such as that of an earlier step"
        if found.unused is not None and found.unused.mean <= limit:
            held = "does not use the adapter at all"
        return "adapter", f"Without the adapter both agree ({found.base.mean:.2g}): the engine {held}."
    alone = found.alone.mean
    if alone > limit:
        return "weights", f"It is {alone:.2g} after a single token already: the engine holds other weights."
    grown = f"it is {alone:.2g} after one token, {found.near.mean:.2g} after two, {found.far.mean:.2g} far on"
    if found.far.mean > GROWS * found.near.mean:
        grows = f"The gap grows with the distance ({grown})"
        return "rotary", f"{grows}: other rotary settings (rope_theta, scaling) in one of them."
    return "", f"The gaps name no cause ({grown})."


def verdict(found: Evidence, limit: float, dtypes: Sequence[str]) -> tuple[bool, str, str]:
    """Return whether to train with this engine, the cause if not (`likely_cause`), and both in a sentence.

    ``limit``: largest mean gap that rounding explains, in nats a token; ``dtypes``: names of the number formats of
    engine and trainer, for which it is the limit.
    """
    off = found.off(limit)
    stated = f"limit {limit:.3g}, for {' against '.join(dtypes)}"
    worst_turn = max(gap.mean for gap in found.turns.values())
    if not off and found.template is None:
        return True, "", f"Train: in no turn is the mean gap above {worst_turn:.2g} nats a token ({stated})."
    cause, why = likely_cause(found, limit)
    said = f"the mean gap is {max(worst_turn, found.anew.mean):.2g} nats a token ({stated}) in {', '.join(off)}"
    if not off:
        said = "messages become other tokens in the engine"
    return False, cause, f"Do not train: {said}. {why}"
