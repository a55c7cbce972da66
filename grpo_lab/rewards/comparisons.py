"""Simulated judges, whose comparisons of completions train a preference model: one without noise, one with people's
noise, and one with a preference for length.

    truth        prefers the better one, by quality; between equals it says nothing
    people       P(first is preferred) = σ((q₁ − q₂)/T): the closer the qualities, the more often it is wrong
    systematic   prefers the longer one with probability ``longer``, whatever their quality

The noise of people averages out over many comparisons. The systematic one does not: a model learns from it that length
is good. Sources: Bradley & Terry, Biometrika 39 (1952). Dubois et al., arXiv 2305.14387: reward models over-optimise
under judges that vary, and did not under one that does not; people agree in about two thirds of the comparisons.
Singhal et al., arXiv 2310.03716: length as what a reward model pays for.

A verdict is a hash of the seed and of what is compared (`grpo_lab.rewards.noise.draw`), the same in either order.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from grpo_lab.rewards.noise import draw


@dataclass(frozen=True)
class Judge:
    """A judge that says which of two completions is better, with simulated errors. Without errors the one of higher
    quality is better; that is the judge ``truth``, which has ``temperature`` and ``longer`` at 0.

    Args:
        temperature: T of people's noise, in units of quality; 0: none.
        longer: share of the comparisons of unequal lengths that length alone decides, in [0, 1].
        seed: another seed gives other errors at the same rates.
    """

    temperature: float = 0.0
    longer: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not (0 <= self.temperature < math.inf and 0 <= self.longer <= 1):
            raise ValueError(
                f"`temperature` is {self.temperature} and `longer` {self.longer}: a number from 0 on, and a share in "
                "[0, 1]"
            )

    def prefers(
        self, prompt: Any, texts: tuple[Any, Any], qualities: tuple[float, float], lengths: tuple[int, int]
    ) -> bool | None:
        """Return whether the first of two completions is preferred; None if the judge cannot decide, as they are
        equally good and it has no noise of people. ``lengths`` may be in any unit."""
        one, other = (json.dumps(text, sort_keys=True, default=str) for text in texts)
        in_order = one <= other  # the verdict is drawn for the texts in this order, so it is the same in the other
        compared = [self.seed, prompt, *(texts if in_order else reversed(texts))]
        if lengths[0] != lengths[1] and draw("longer", *compared) < self.longer:
            return lengths[0] > lengths[1]
        gap = qualities[0] - qualities[1]
        if self.temperature == 0:
            return None if gap == 0 else gap > 0
        ahead = gap if in_order else -gap
        chance = 0.5 * (1 + math.tanh(ahead / self.temperature / 2))  # σ, without overflow
        return (draw("people", *compared) < chance) == in_order

    def pairs(
        self,
        prompt: Any,
        completions: Sequence[Any],
        qualities: Sequence[float | None],
        lengths: Sequence[int],
        most: int | None = None,
    ) -> list[tuple[int, int]]:
        """Compare the completions of one prompt, and return pairs (preferred, other) of indices into ``completions``.

        Pairs are judged in a random order that follows from the seed and the prompt, not from the noise, until
        ``most`` of them are decided (None: all). A completion whose quality is None or NaN is in no pair, and two
        equal completions make none.
        """
        known = [place for place, one in enumerate(qualities) if one is not None and not math.isnan(one)]
        different = [two for two in combinations(known, 2) if completions[two[0]] != completions[two[1]]]
        found: list[tuple[int, int]] = []
        for one, other in sorted(different, key=lambda two: draw(self.seed, "order", prompt, two)):
            if most is not None and len(found) >= most:
                break
            both: Any = [(values[one], values[other]) for values in (completions, qualities, lengths)]
            verdict = self.prefers(prompt, *both)
            if verdict is not None:
                found.append((one, other) if verdict else (other, one))
        return found
