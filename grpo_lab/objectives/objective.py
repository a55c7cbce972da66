"""An objective: ratio level, surrogate, KL term and aggregation, combined into one loss."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from grpo_lab import registry
from grpo_lab.batch import SAMPLER_LOGPS, Denominators, TokenBatch, safe
from grpo_lab.objectives.aggregation import Aggregation
from grpo_lab.objectives.entropy import EntropyBonus
from grpo_lab.objectives.kl import KLTerm
from grpo_lab.objectives.ratios import MAX_LOG_PRODUCT

Surrogate = Callable[[TokenBatch], Tensor]
"""``surrogate(batch) -> loss per token``, ``[B, T]``; or ``[B, 1]``, one value for every token of a row.

A surrogate may have a method ``diagnostics(batch) -> dict[str, Tensor]``: metric name → values ``[B, T]`` or ``[B,
1]``, whose mean over all tokens (or rows) of the optimizer step is logged. Rows of advantage 0 may be left out of the
step and are then counted as 0, so a value must be 0 there. Exempt are names in the attribute ``of_computed_rows``:
their mean is over the rows that are computed.

Further attributes describe a surrogate; the value in brackets is the default:

``reads_ratio`` (True): it reads ``batch.log_ratio``. If False, ``objective.ratio`` beside it is refused.
``whole_response`` (False): its loss is defined for whole responses. A sampler correction per token is then refused.
``applies_correction`` (False): it accounts for ``batch.sampler_weights`` itself, so its loss is not multiplied by them.
``against_sampler`` (False): its ratio is taken against ``batch.sampler_logps``. ``correction`` is then refused.
``idle_on_policy`` (empty): names of knobs that have no effect until the policy has moved. A run in which each
generation batch gets a single update warns of them once.
``literal(row, t)`` (none): the same formula for one token in plain floats, for the start-up proof (``literal``).
"""

Gate = Callable[[TokenBatch], Tensor]
"""``gate(batch) -> weights``, ``[B, T]`` or ``[B, 1]``, without gradient. The surrogate's loss is multiplied by them:
usually 1 for a token that trains and 0 for one that does not."""
Gather = Callable[[Tensor], Tensor]
"""``gather(values) -> values of all ranks``, one-dimensional; ranks may bring different numbers of values."""


class Selecting(Protocol):
    """A surrogate or gate that chooses tokens by comparing all tokens of a micro-batch, over all ranks.

    The loss of a row then depends on other rows only through that choice. The trainer calls ``select`` before the loss,
    on log-probs without gradient, and hands the result to the loss as ``batch.chosen[selection]``. So the loss of each
    row can still be computed alone, and rows may be put into any bins.

    Attributes:
        selection: name of the choice, unique within an objective.
    """

    selection: ClassVar[str]

    def select(self, batch: TokenBatch, gather: Gather) -> Tensor:
        """Return the chosen tokens of ``batch``, bool ``[B, T]``.

        Args:
            batch: this rank's rows of the micro-batch.
            gather: returns values of all ranks. It is a collective, so every rank must call it equally often.
        """


@dataclass(frozen=True)
class Objective:
    """An objective: its ``loss`` turns the advantages of a micro-batch into a scalar.

        loss = aggregate( g · w · surrogate(ρ, Â, log π) + β·KL ) − c·H

    g are the gates, w is the weight of the sampler correction, H the mean entropy of the policy. The KL term is not
    multiplied by g and w: as in TRL it acts on every token, even of a completion that they drop.

    Attributes:
        name: name of the objective in messages and logs.
        surrogate: loss per token, before gates and correction.
        aggregate: average over tokens and completions.
        ratio: level of the importance ratio ρ, one of ``ratios.RATIO_LEVELS``.
        kl: the KL term, in the loss or in the reward; None for none.
        gates: weights of the surrogate's loss.
        entropy: the entropy bonus c·H; None for none.
    """

    name: str
    surrogate: Surrogate
    aggregate: Aggregation
    ratio: str = "token"
    kl: KLTerm | None = None
    gates: tuple[Gate, ...] = ()
    entropy: EntropyBonus | None = None

    @property
    def each(self) -> tuple[Objective, ...]:
        """The objectives that rows of the batch may have: this one alone; in a mixture (``MixedObjective``) one per
        task."""
        return (self,)

    @property
    def marks(self) -> Mapping[str, int]:
        """The fields of ``batch.extras``, name → number, that every row of this objective must carry: the number of its
        task for the objective of a task (``TaskObjective``), else none. Toy batches are given them."""
        return {}

    @property
    def selecting(self) -> tuple[Any, ...]:
        """The surrogate and gates that choose tokens (``Selecting``). The trainer asks them before it computes the
        loss."""
        return tuple(part for part in (self.surrogate, *self.gates) if hasattr(part, "select"))

    @property
    def local_denominator(self) -> bool:
        """Return whether the aggregation divides by counts of the local micro-batch (as ``local_token_mean`` does)."""
        return bool(getattr(self.aggregate, "local_denominator", False))

    @property
    def per_prompt(self) -> bool:
        """Return whether an aggregation divides by the tokens of each row's prompt (``Denominators.group_tokens``)."""
        return any(getattr(one.aggregate, "per_prompt", False) for one in self.each)

    @property
    def whole_response(self) -> bool:
        """Return whether the surrogate's loss is defined for whole responses."""
        return bool(getattr(self.surrogate, "whole_response", False))

    @property
    def against_sampler(self) -> bool:
        """Return whether a surrogate's ratio is taken against the sampler, so that no correction may be multiplied on
        top."""
        return any(getattr(one.surrogate, "against_sampler", False) for one in self.each)

    @property
    def kl_in_loss(self) -> KLTerm | None:
        """The KL term if it is added to the loss and β > 0, else None."""
        if self.kl is not None and self.kl.placement == "loss" and self.kl.coefficient > 0:
            return self.kl
        return None

    @property
    def kl_in_reward(self) -> KLTerm | None:
        """The KL term if it is charged to the reward and β > 0, else None."""
        if self.kl is not None and self.kl.placement == "reward" and self.kl.coefficient > 0:
            return self.kl
        return None

    def token_loss(self, batch: TokenBatch) -> Tensor:
        """Return the loss per token ``[B, T]``: surrogate, gates, sampler correction and KL term. A masked token has
        loss and gradient 0, whatever the inputs hold there.

        Raises ValueError if the surrogate returned something else than ``[B, T]`` or ``[B, 1]``.
        """
        batch = _safe_inputs(batch)
        whose = f"the surrogate {registry.address(self.surrogate)}"
        loss = checked_token_loss(self.surrogate(batch), batch.mask, whose)
        for gate in self.gates:
            loss = loss * gate(batch)
        corrects_itself = getattr(self.surrogate, "applies_correction", False)
        if batch.sampler_weights is not None and not corrects_itself:
            loss = loss * batch.sampler_weights
        if self.kl_in_loss is not None:
            loss = loss + self.kl_in_loss.coefficient * self.kl_in_loss.in_loss(batch)
        return safe(loss, batch.mask)

    def loss(self, batch: TokenBatch, denominators: Denominators) -> Tensor:
        """Return the scalar loss of a micro-batch, with the entropy bonus. Its gradients, summed over the micro-batches
        of an optimizer step and averaged over ranks, are the step's gradient."""
        loss = self.aggregated(self.token_loss(batch), batch, denominators)
        if self.entropy is None:
            return loss
        return loss + self.entropy.loss(batch, denominators)

    def aggregated(self, loss: Tensor, batch: TokenBatch, denominators: Denominators) -> Tensor:
        """Aggregate a loss per token ``[B, T]`` to the scalar loss, without the entropy bonus."""
        return self.aggregate(loss, batch.mask, denominators)

    @torch.no_grad()
    def diagnostics(self, batch: TokenBatch) -> dict[str, Tensor]:
        """Return metric name → values to log, ``[B, T]`` or ``[B, 1]``: what the surrogate reports and, for the ratio
        ``product``, which rows have their ratio held at its upper bound."""
        report = getattr(self.surrogate, "diagnostics", None)
        values: dict[str, Tensor] = {} if report is None else report(batch)
        if self.ratio == "product":
            has_advantage = (batch.advantages != 0).any(dim=1, keepdim=True)
            held = (batch.log_ratio >= MAX_LOG_PRODUCT) & has_advantage
            values = {**values, "product_ratio/held_mean": held}
        return values


def checked_token_loss(found: Any, mask: Tensor, whose: str) -> Tensor:
    """Return ``found`` if it is a loss per token ``[B, T]`` or per row ``[B, 1]``.

    Raises ValueError for another shape, which may broadcast to a wrong loss; ``whose`` names the function in the
    message.
    """
    rows, tokens = mask.shape
    if isinstance(found, Tensor) and tuple(found.shape) in ((rows, tokens), (rows, 1)):
        return found
    raise ValueError(
        f"{whose} returned {_described(found)} for {rows} rows of {tokens} tokens; it must return a tensor [{rows}, "
        f"{tokens}], the loss per token, or [{rows}, 1], a loss per row"
    )


def checked_scalar(found: Any, whose: str) -> Tensor:
    """Return ``found`` if it is a tensor without dimensions. Raises ValueError otherwise; ``whose`` names the function
    in the message."""
    if isinstance(found, Tensor) and found.dim() == 0:
        return found
    needed = "a tensor without dimensions: the loss, summed up"
    raise ValueError(f"{whose} returned {_described(found)}; it must return {needed}")


def _described(found: Any) -> str:
    if isinstance(found, Tensor):
        return f"a tensor {list(found.shape)}"
    return f"a {type(found).__name__}"


def _safe_inputs(batch: TokenBatch) -> TokenBatch:
    """Set every ``[B, T]`` input to 0 at masked positions.

    Masking the loss is not enough where an input is NaN: the backward would multiply 0 by NaN, and a sequence-level
    ratio would spread the NaN over the whole row.
    """
    names = ("logps", "proximal_logps", "log_ratio", "advantages", "ref_logps", "entropies", "sampler_weights")
    changed: dict[str, Any] = {}
    for name in names:
        values = getattr(batch, name)
        if values is not None and values.shape == batch.mask.shape:
            changed[name] = safe(values, batch.mask)
    reported = batch.extras.get(SAMPLER_LOGPS)
    if reported is not None:
        changed["extras"] = {**batch.extras, SAMPLER_LOGPS: safe(reported, batch.mask)}
    return replace(batch, **changed)
