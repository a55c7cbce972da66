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
"""``surrogate(batch) -> per-token loss`` ``[B, T]`` (or ``[B, 1]``, spread over the row). May offer
``diagnostics(batch) -> dict[str, Tensor]``: values per token (or row) that are logged as means over all tokens (rows)
of the optimizer step; they must be 0 where the advantage is 0, since such rows may be left out. A name in
``of_computed_rows`` need not: its mean is over the rows that are computed.

What else a surrogate may say of itself, as class attributes or methods, and what holds where it does not:
``reads_ratio`` (True): the importance ratio matters; else ``objective.ratio`` beside it is refused.
``whole_response`` (False): the loss is of whole responses; then a sampler correction per token is refused.
``applies_correction`` (False): it multiplies by ``batch.sampler_weights`` itself; then the objective does not.
``against_sampler`` (False): its ratio is against ``batch.sampler_logps``; then ``correction`` is refused.
``idle_on_policy`` (none): names of knobs that do nothing until the policy has moved; said once where it never does.
``literal(row, t)``: the formula over single floats, for the start-up proof (``literal``)."""

Gate = Callable[[TokenBatch], Tensor]
"""``gate(batch) -> weight of the surrogate's loss``, ``[B, T]`` or ``[B, 1]``, without gradient: usually 1 for a token
that trains and 0 for one that does not."""
Gather = Callable[[Tensor], Tensor]
"""``gather(values) -> values of all ranks``, one-dimensional; ranks may bring different numbers of values."""


class Selecting(Protocol):
    """A surrogate or gate that chooses tokens by comparing those of a whole micro-batch, over all ranks.

    The loss of a row then depends on the others only through what was chosen. The trainer asks ``select`` before the
    loss, on log-probs without gradient, and hands the answer over as ``batch.chosen[selection]``. So the loss itself is
    still of each row alone, and rows may be computed in any bins.
    """

    selection: ClassVar[str]

    def select(self, batch: TokenBatch, gather: Gather) -> Tensor:
        """Return bool ``[B, T]``, the chosen tokens of ``batch``, this rank's rows of the micro-batch. The same number
        of calls of ``gather`` on every rank."""


@dataclass(frozen=True)
class Objective:
    """One objective: how a loss is computed once the advantages are known.

    loss = aggregate( g · w · surrogate(ρ, Â, log π) + β·KL ) − c·H, with g the gates, w the sampler correction and H
    the mean entropy.

    The KL term is not multiplied by g and w: as in TRL it acts on every token, even of a completion that they drop.
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
        """The objectives that a row may have: this one; of a mixture (``MixedObjective``) one a task."""
        return (self,)

    @property
    def marks(self) -> Mapping[str, int]:
        """What the rows of this objective carry in ``batch.extras``: the same number on each."""
        return {}

    @property
    def selecting(self) -> tuple[Any, ...]:
        """The parts that choose tokens (``Selecting``), which must be asked before the loss is computed."""
        return tuple(part for part in (self.surrogate, *self.gates) if hasattr(part, "select"))

    @property
    def local_denominator(self) -> bool:
        """Return whether the aggregation divides by counts of the local micro-batch, by definition."""
        return bool(getattr(self.aggregate, "local_denominator", False))

    @property
    def per_prompt(self) -> bool:
        """Return whether an aggregation reads the tokens of each row's prompt (``Denominators.group_tokens``)."""
        return any(getattr(one.aggregate, "per_prompt", False) for one in self.each)

    @property
    def whole_response(self) -> bool:
        """Return whether the surrogate's loss is defined for whole responses."""
        return bool(getattr(self.surrogate, "whole_response", False))

    @property
    def against_sampler(self) -> bool:
        """Return whether a surrogate's ratio is against the sampler, so that no correction is multiplied on top."""
        return any(getattr(one.surrogate, "against_sampler", False) for one in self.each)

    @property
    def kl_in_loss(self) -> KLTerm | None:
        if self.kl is not None and self.kl.placement == "loss" and self.kl.coefficient > 0:
            return self.kl
        return None

    @property
    def kl_in_reward(self) -> KLTerm | None:
        if self.kl is not None and self.kl.placement == "reward" and self.kl.coefficient > 0:
            return self.kl
        return None

    def token_loss(self, batch: TokenBatch) -> Tensor:
        """Return the per-token loss ``[B, T]``. Masked tokens have loss and gradient 0, whatever the inputs hold there.

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
        """Return the scalar loss. Its gradients, summed over micro-batches and averaged over ranks, are the step's
        gradient."""
        loss = self.aggregated(self.token_loss(batch), batch, denominators)
        if self.entropy is None:
            return loss
        return loss + self.entropy.loss(batch, denominators)

    def aggregated(self, loss: Tensor, batch: TokenBatch, denominators: Denominators) -> Tensor:
        """Return the scalar loss of losses per token ``[B, T]``, without an entropy bonus."""
        return self.aggregate(loss, batch.mask, denominators)

    @torch.no_grad()
    def diagnostics(self, batch: TokenBatch) -> dict[str, Tensor]:
        """Return what the surrogate reports for the log, ``[B, T]`` or ``[B, 1]``. For the ratio ``product`` also the
        rows whose ratio is held at its bound."""
        report = getattr(self.surrogate, "diagnostics", None)
        values: dict[str, Tensor] = {} if report is None else report(batch)
        if self.ratio == "product":
            acts = (batch.advantages != 0).any(dim=1, keepdim=True)
            values = {**values, "product_ratio/held_mean": (batch.log_ratio >= MAX_LOG_PRODUCT) & acts}
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
        f"{whose} returned {_seen(found)} for {rows} rows of {tokens} tokens; it must return a tensor [{rows}, "
        f"{tokens}], the loss per token, or [{rows}, 1], a loss per row"
    )


def checked_scalar(found: Any, whose: str) -> Tensor:
    """Return ``found`` if it is a tensor without dimensions; else raise a ValueError that names the function,
    ``whose``."""
    if isinstance(found, Tensor) and found.dim() == 0:
        return found
    needed = "a tensor without dimensions: the loss, summed up"
    raise ValueError(f"{whose} returned {_seen(found)}; it must return {needed}")


def _seen(found: Any) -> str:
    if isinstance(found, Tensor):
        return f"a tensor {list(found.shape)}"
    return f"a {type(found).__name__}"


def _safe_inputs(batch: TokenBatch) -> TokenBatch:
    """Set every ``[B, T]`` input to 0 at masked positions.

    Selecting the loss is not enough if an input is NaN there. The backward forms 0 · NaN, and a sequence-level ratio
    would spread that over the whole row.
    """
    names = ("logps", "proximal_logps", "log_ratio", "advantages", "ref_logps", "entropies", "sampler_weights")
    inputs: dict[str, Any] = {name: getattr(batch, name) for name in names}
    whole: dict[str, Any] = {
        name: safe(one, batch.mask) for name, one in inputs.items() if one is not None and one.shape == batch.mask.shape
    }
    reported = batch.extras.get(SAMPLER_LOGPS)
    if reported is not None:
        whole["extras"] = {**batch.extras, SAMPLER_LOGPS: safe(reported, batch.mask)}
    return replace(batch, **whole)
