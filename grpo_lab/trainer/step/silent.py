"""Silent rows: live rows of which no token has a gradient, and whether a step is looked at to leave them out.

A token outside a one-sided clip has a loss and no gradient. So has one that a gate or the sampler's correction drops. A
row whose tokens are all of this kind needs no backward. But this is known only after a forward, the look
(``step.look``): one more forward without gradient, about a third of the cost of forward and backward. If a share s of
the live rows' tokens is in silent rows, a step then costs 1/3 + (1 − s), which is less than 1 from s = 1/3 on.

    update.silent_rows: auto    look if s was above ``BEGIN`` at the same place of the last generation batch, and go on
                                until it is below ``END``. Every step measures s, looked at or not
                        skip    look at every step
                        keep    leave out no silent row

A part that chooses tokens (``objectives.Selecting``) needs the look anyway. Silent rows are not looked for where
another term of the loss acts on every row, so that none is silent, nor with dropout, whose next draw may give a row a
gradient.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from grpo_lab.batch import TokenBatch
from grpo_lab.trainer.exactness.update_verdict import UpdateVerdict
from grpo_lab.trainer.ports import UpdatePort
from grpo_lab.trainer.resume.state import SavedState
from grpo_lab.trainer.step.out_of_memory import ALONE
from grpo_lab.trainer.step.row_numbers import RowNumbers

BEGIN = 0.4
END = 0.3
"""Shares of tokens in silent rows at which looking begins and ends: on either side of 1/3, so that a share near it does
not switch the look on and off."""
WORTH_ASKING = 0.05
"""The host waits for the answer whether a bin is silent only if that is at least this likely."""


def with_gradient(loss: Tensor, batch: TokenBatch) -> Tensor:
    """Return bool ``[B, T]``: loss tokens for whose log-prob, entropy or value the scalar ``loss`` has a gradient, or a
    NaN. The model is not differentiated, and the graph is kept."""
    of = [one for one in (batch.logps, batch.entropies, batch.values) if one is not None and one.requires_grad]
    found = torch.zeros_like(batch.mask)
    if not loss.requires_grad or not of:
        return found
    for gradient in torch.autograd.grad(loss, of, retain_graph=True, allow_unused=True):
        if gradient is not None:
            found = found | (gradient != 0)
    return found & batch.mask


class SilentRows:
    """Decides which steps are looked at, by the shares of silent rows so far. A trainer has one; it decides the same on
    every rank.

    Shares are kept by place: the number of an optimizer step within its generation batch. Steps at different places
    differ: the rows of the first one are not stale.
    """

    holds = "with `update.silent_rows: auto` the shares of silent rows, so that the resumed run looks at the same steps"

    def __init__(self, trainer: UpdatePort) -> None:
        self._trainer = trainer
        self.asked = trainer.lab_settings.update.silent_rows
        self._leaves_out = False
        self.forget()

    def forget(self) -> None:
        """Forget all shares, when a training begins."""
        #: place → share, or tokens of silent and of live rows ``[2]`` on the device, not read yet
        self._shares: dict[int, float | Tensor] = {}
        self._looks: set[int] = set()

    @property
    def _place(self) -> int:
        """Number of the current optimizer step within its generation batch."""
        phase = self._trainer.phase
        return (phase.done % phase.every) // phase.accumulation

    @property
    def share(self) -> float:
        """Share of live rows' tokens in silent rows, when this place of a generation batch was last computed; 0 before.
        The first reading waits for the device."""
        return self._read(self._place)

    def _read(self, place: int) -> float:
        found = self._shares.get(place, 0.0)
        if isinstance(found, Tensor):
            silent, live = found.tolist()
            found = silent / max(live, 1.0)
            self._shares[place] = found
        return found

    def may_be_left_out(self, found: UpdateVerdict) -> bool:
        """Return whether silent rows are left out where they are known."""
        return self.asked != "keep" and found.all_rows is None and not found.draws

    def looks(self, found: UpdateVerdict) -> bool:
        """Return whether the step that begins is to be looked at."""
        objective = self._trainer.algorithm.objective
        self._leaves_out = self.may_be_left_out(found)
        if objective is not None and objective.selecting:
            return True
        if not self._leaves_out:
            self._say_why_not(found)
            return False
        if self.asked == "skip":
            return True
        place = self._place
        if self.share > BEGIN and place not in self._looks:
            self._looks.add(place)
            self._trainer.recorder.say(
                f"`update.silent_rows: auto`: rows without a gradient hold {self.share:.0%} of the live rows' tokens: "
                "such steps are looked at first, by a forward without gradient, and these rows left out",
                key="silent rows",
            )
        elif self.share < END:
            self._looks.discard(place)
        return place in self._looks

    def _say_why_not(self, found: UpdateVerdict) -> None:
        """Say once, if the setting is ``skip``, why no row is left out."""
        if self.asked != "skip":
            return
        why = found.all_rows or "the forward draws random numbers, and the next draw may give a row a gradient"
        self._trainer.recorder.say(f"`update.silent_rows: skip` leaves no row out: {why}", key="silent rows kept")

    def may_ask(self, rows: int) -> bool:
        """Return whether the host should wait for the answer whether a bin of ``rows`` rows is silent, which would save
        its backward. It should not where a backward is a collective."""
        if not self._leaves_out or rows == 0:
            return False
        alone = self._trainer.accelerator.distributed_type.value in ALONE
        return alone and self.share**rows >= WORTH_ASKING

    def record_share(self, tokens: Tensor, numbers: RowNumbers) -> None:
        """Record the share of the step at hand. ``tokens``: ``[2]``, tokens in silent and in live rows over all ranks.
        Both count the rejected rows, which are left out without a look; they are subtracted."""
        rejected = int(numbers.lengths[numbers.rejected].sum())
        self._shares[self._place] = tokens - rejected

    def save(self, _folder: Path) -> dict[str, Any] | None:
        """Return the checkpoint entry, or None if there is nothing to save."""
        known = {str(place): self._read(place) for place in self._shares}
        if self.asked != "auto" or not any(known.values()):
            return None
        return {"shares": known, "looks": sorted(self._looks)}

    def load(self, saved: SavedState | None) -> None:
        """Restore what ``save`` returned. Must be called after ``forget``."""
        if saved is None or self.asked != "auto":
            return
        found = saved.entry("silent_rows", _checked, "the shares are then measured anew")
        if found is not None:
            self._shares = dict(found[0])
            self._looks = found[1]


def _checked(state: dict[str, Any]) -> tuple[dict[int, float], set[int]]:
    shares = {int(place): float(share) for place, share in state["shares"].items()}
    if not all(0 <= share <= 1 for share in shares.values()):
        raise ValueError(f"shares of silent rows: {shares}")
    return shares, {int(place) for place in state["looks"]}
