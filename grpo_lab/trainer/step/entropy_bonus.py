"""The entropy bonus in a run: what it adds to the loss, how its coefficient moves, and what is logged of both.

The coefficient, and the entropy of the step before, are kept in TRL's own attributes, so TRL's checkpoint holds them
(``entropy_ctrl_state.json``). All micro-batches of an optimizer step use the values that the step before left there.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from grpo_lab.batch import Denominators, TokenBatch, masked_sum
from grpo_lab.objectives import EntropyBonus, kept_tokens, token_mean
from grpo_lab.trainer.critic import is_warming_up
from grpo_lab.trainer.ports import UpdatePort
from grpo_lab.trainer.ranks import named_place
from grpo_lab.trainer.row_table import Carried, loss_mask
from grpo_lab.trainer.settings.algorithm import entropy_bonus


def bonus_tokens(kept: Tensor) -> Tensor:
    """Return float ``[B]``: for each row of a micro-batch the number of tokens over which its bonus is averaged, those
    of ``kept`` (bool ``[B, T]``) in the whole micro-batch, at least 1."""
    return kept.sum().clamp(min=1).float().repeat(kept.size(0))


class EntropyOfStep:
    """Adds the entropy bonus to the losses of an optimizer step, and measures the step's entropy and policy loss."""

    def __init__(self, trainer: UpdatePort) -> None:
        self._trainer = trainer
        self.begin()

    @property
    def bonus(self) -> EntropyBonus | None:
        """The bonus as the arguments have it now (a callback may change them); None if the objective has none."""
        objective = self._trainer.algorithm.objective
        if objective is None or objective.entropy is None:
            return None
        return entropy_bonus(self._trainer.args) or objective.entropy

    def begin(self) -> None:
        """Forget what was measured of the current step."""
        self._entropy: Tensor | None = None  # nats and tokens of this rank's rows so far, [2]
        self._policy_loss: Tensor | None = None

    def counted(self, window: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return copies of the micro-batches in which each row carries its ``bonus_tokens``; the micro-batches
        themselves without a bonus. Where tokens are chosen, the look counts again."""
        if self.bonus is None:
            return window
        marked = [dict(batch) for batch in window]
        for batch in marked:
            Carried(batch).bonus_tokens = bonus_tokens(loss_mask(batch))
        return marked

    def added(self, policy_loss: Tensor, batch: TokenBatch, denominators: Denominators) -> Tensor:
        """Return the loss of some rows plus their bonus, and measure both. Rows without ``bonus_tokens`` are a whole
        micro-batch."""
        bonus = self.bonus
        if bonus is None:
            return policy_loss
        kept = kept_tokens(batch)
        self._measure(policy_loss.detach(), batch, kept)
        coefficient = self._coefficient(bonus)
        if coefficient == 0:
            return policy_loss
        tokens = Carried(dict(batch.extras)).bonus_tokens
        if tokens is None:
            tokens = bonus_tokens(kept)
        own = replace(denominators, micro_batch_tokens=tokens.unsqueeze(1))
        return policy_loss + bonus.loss(batch, own, coefficient)

    def _coefficient(self, bonus: EntropyBonus) -> float:
        """Return c in force; 0 while a critic is trained alone."""
        trainer = self._trainer
        if is_warming_up(trainer):
            return 0.0
        if bonus.control is None:
            return trainer.entropy_coef
        return bonus.control.in_force(trainer.entropy_coef, trainer.last_entropy)

    @torch.no_grad()
    def _measure(self, policy_loss: Tensor, batch: TokenBatch, kept: Tensor) -> None:
        """Add the rows' policy loss and, in training, their entropy to the sums of the step."""
        assert batch.entropies is not None  # the policy's head makes them
        if self._trainer.recorder.mode() == "train":  # an evaluation does not steer the coefficient
            entropy = torch.stack([masked_sum(batch.entropies, kept).float(), kept.sum().float()])
            if self._entropy is None:
                self._entropy = entropy
            else:
                self._entropy = self._entropy + entropy
        if self._policy_loss is None:
            self._policy_loss = policy_loss
        else:
            self._policy_loss = self._policy_loss + policy_loss

    def record(self, micro_batches: int, accumulation: float) -> None:
        """Log the policy loss of the rows measured since the last call, as the step's loss.

        TRL logs for ``token_mean`` the mean over micro-batches, although each micro-batch's loss is a share of the
        step's. In a drop-in (without ``objective``) this is logged likewise.

        Args:
            micro_batches: how many micro-batches of the step were measured.
            accumulation: how many the step has.
        """
        if self._policy_loss is None:
            return
        trainer = self._trainer
        objective = trainer.algorithm.objective
        assert objective is not None
        of_one = self._policy_loss / micro_batches
        if trainer.lab_settings.objective is not None or objective.aggregate is not token_mean:
            of_one = of_one * accumulation
        self._policy_loss = None
        trainer.recorder.book().add("policy_loss", of_one.repeat(micro_batches), torch.ones(micro_batches))

    def end_step(self) -> None:
        """Move the coefficient by the entropy over all ranks, and log it. A collective if the coefficient can move."""
        bonus = self.bonus
        if bonus is None:
            return
        trainer = self._trainer
        if bonus.control is not None and self._entropy is not None and not is_warming_up(trainer):
            with named_place("entropy of all ranks"):
                nats, tokens = trainer.accelerator.reduce(self._entropy, reduction="sum").tolist()
            trainer.last_entropy = nats / max(tokens, 1.0)
            trainer.entropy_coef = bonus.control.following(trainer.entropy_coef, trainer.last_entropy)
        self.begin()
        trainer.recorder.book().add_alike("entropy_coef", torch.tensor([trainer.entropy_coef]), 1)
