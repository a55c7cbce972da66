"""Start-up proof that the loss in force is the one that was configured.

Before the first step a toy batch goes through the very path that training uses (the ``token_loss`` hook, the
aggregation). The result is compared with the formula written out as plain Python over single numbers. This finds a
subclass hook, a wrong denominator or an option that stopped having an effect. The same toy batches answer three
questions of the exact update about a loss (``vanishes_without_advantage``, ``vanishes_without_weight``,
``is_sum_over_rows``); ``part_questions`` tests a team's own parts further.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from grpo_lab.batch import SAMPLER_LOGPS, Denominators, TokenBatch
from grpo_lab.objectives import Correction, LiteralRow, Objective, literal_log_ratios, log_ratio
from grpo_lab.objectives.aggregation import LITERALS
from grpo_lab.objectives.objective import checked_scalar, checked_token_loss
from grpo_lab.registry import address

TokenLoss = Callable[[TokenBatch], Tensor]
#: Largest difference between the loss and its formula in float64, relative and absolute.
CLOSE = 1e-12
_DENOMINATORS = Denominators(rows=3.0, tokens=7.0, budget=5.0, micro_batches=2.0, prompts=1.5, group_tokens=4.0)


def toy_batch(objective: Objective, advantages: tuple[float, ...] = (1.5, -0.75, 0.5, -0.4)) -> TokenBatch:
    """Make a batch of four rows of up to four tokens in float64, without touching random states.

    Token ratios reach from e^-0.9 to e^2 and row means from -0.4 to 0.9, with either sign of the advantage, so that
    every clip, two-sided bound and weight bound in use cuts somewhere.
    """
    scored = [[-0.3, -1.2, -0.7, -2.0], [-0.9, -0.1, -1.5, 0.0], [-0.4, -2.2, 0.0, 0.0], [-1.1, -0.6, 0.0, 0.0]]
    steps = [[0.9, -0.6, 2.0, 0.1], [1.8, -0.5, 1.4, 0.0], [-0.9, 0.3, 0.0, 0.0], [-0.7, -0.1, 0.0, 0.0]]
    logps, step = (torch.tensor(rows, dtype=torch.float64) for rows in (scored, steps))
    mask = torch.arange(4) < torch.tensor([4, 3, 2, 2]).unsqueeze(1)
    return _batch(objective, advantages, mask, logps, step, 0.2 * torch.cos(3 * step), torch.full_like(step, 0.5))


def wide_toy_batch(
    objective: Objective, advantages: tuple[float, ...] = (2.0, -1.0, 0.3, -0.2, 1e-3, -3.0)
) -> TokenBatch:
    """Make a batch of six rows of one to seven tokens in float64, with log-probs from -20 to 0 and token ratios from
    e^-6 to e^6."""
    at = torch.arange(42, dtype=torch.float64).view(6, 7)
    mask = torch.arange(7) < torch.tensor([7, 5, 1, 3, 7, 2]).unsqueeze(1)
    values = -10 + 10 * torch.sin(1 + at), 6 * torch.sin(2 + 3 * at), torch.cos(5 * at), 2 + 2 * torch.cos(at)
    return _batch(objective, advantages, mask, *(one.masked_fill(~mask, 0.0) for one in values))


def _batch(
    objective: Objective, advantages: Any, mask: Tensor, logps: Tensor, step: Tensor, to_ref: Tensor, entropies: Tensor
) -> TokenBatch:
    """Put a toy batch together.

    Args:
        objective: what the batch is for: its ratio level, its marks, its parts that choose tokens.
        advantages: one per row.
        mask: bool ``[B, T]``.
        logps: ``[B, T]`` log-probs of the policy.
        step: log-ratios of the policy to the proximal policy.
        to_ref: log-ratios of the reference to the policy.
        entropies: ``[B, T]``.
    """
    old = logps - step
    # up to half a nat from the proximal policy, to either side, and a probability
    sampler = (old - 0.5 * torch.sin(5 * step)).clamp(max=-1e-3)
    logps.requires_grad_(True)
    marks = {name: torch.full((mask.size(0), 1), number) for name, number in objective.marks.items()}
    batch = TokenBatch(
        logps=logps,
        proximal_logps=old,
        log_ratio=log_ratio(objective.ratio, logps, old, mask),
        advantages=torch.tensor(advantages, dtype=torch.float64).unsqueeze(1),
        mask=mask,
        ref_logps=(logps + to_ref).detach(),
        entropies=entropies,
        extras={SAMPLER_LOGPS: sampler, **marks},
    )
    return with_choices(objective, batch)


@torch.no_grad()
def with_choices(objective: Objective, batch: TokenBatch) -> TokenBatch:
    """Return ``batch`` with the tokens that the selecting parts choose of it, as if it were the whole micro-batch."""
    chosen = {part.selection: part.select(batch, lambda values: values) for part in objective.selecting}
    return replace(batch, chosen=chosen)


def prove_loss(token_loss: TokenLoss, objective: Objective, own_hook: bool = False) -> str:
    """Compare the loss in force with the written-out formula, and return a sentence for the log.

    Args:
        token_loss: the loss per token that training uses.
        objective: the configured objective.
        own_hook: ``token_loss`` is a team's own. It has no formula here, nor has another part of a team; the sentence
            then says so.

    Raises:
        RuntimeError: the values differ.
        ValueError: the loss is not finite, has no gradient or has a wrong shape.
    """
    batch = toy_batch(objective)
    named = f"objective {objective.name!r}"
    loss = checked_token_loss(token_loss(batch), batch.mask, f"`{address(token_loss)}`")
    aggregate = objective.aggregate
    found = checked_scalar(aggregate(loss, batch.mask, _DENOMINATORS), f"the aggregation {address(aggregate)}")
    if not found.requires_grad:
        raise ValueError(f"the loss of {named} does not depend on the policy's log-probs: nothing trains")
    (gradient,) = torch.autograd.grad(found, batch.logps)
    if not (found.isfinite() and gradient.isfinite().all()):
        raise ValueError(f"the loss of {named} is not finite on the toy batch: {found.item()}")
    if gradient.abs().sum() == 0:
        raise ValueError(f"the loss of {named} has no gradient on the toy batch: nothing would train")
    expected = None
    if not own_hook:
        expected = literal_loss(objective, batch)
    if expected is None:
        return f"{named} has parts of its own: finite and with a gradient, not compared to a formula"
    if not math.isclose(found.item(), expected, rel_tol=CLOSE, abs_tol=CLOSE):
        raise RuntimeError(
            f"the loss in force is not the configured {named}: on the toy batch it gives {found.item():.12g}, the "
            f"formula gives {expected:.12g}"
        )
    return f"{named} proved on a toy batch (loss {expected:.6g}, difference below 1e-12)"


def vanishes_without_advantage(token_loss: TokenLoss, objective: Objective) -> bool:
    """Return whether rows of advantage 0 have exactly zero loss and gradient, whatever rows are beside them. Only then
    may they be left out.

    Of the choice of selecting parts two cases are tried: what they choose on the toy batch, and every token.
    """
    for batch in (
        toy_batch(objective, (0.0,) * 4),
        toy_batch(objective, (0.0, -0.75, 0.0, 0.5)),
        wide_toy_batch(objective, (0.0,) * 6),
        wide_toy_batch(objective, (2.0, 0.0, 0.3, 0.0, -1.0, 0.0)),
    ):
        without_advantage = (batch.advantages == 0).all(1)
        all_chosen = replace(batch, chosen=dict.fromkeys(batch.chosen, batch.mask))
        for one in (batch, all_chosen):
            if not _vanishes(token_loss, one, without_advantage):
                return False
    return True


def vanishes_without_weight(token_loss: TokenLoss, objective: Objective) -> bool:
    """Return whether rows whose sampler weight is 0 have exactly zero loss and gradient. Only then may they be left out
    without a forward."""
    for batch in (toy_batch(objective), wide_toy_batch(objective)):
        of_rows = (torch.arange(batch.mask.size(0)) % 2).double().unsqueeze(1)
        for weights in (of_rows, of_rows.expand(batch.mask.shape)):
            if not _vanishes(token_loss, replace(batch, sampler_weights=weights), of_rows.squeeze(1) == 0):
                return False
    return True


def _vanishes(token_loss: TokenLoss, batch: TokenBatch, rows: Tensor) -> bool:
    """Return whether the loss of ``rows`` (bool ``[B]``) and its gradient are exactly 0."""
    loss = token_loss(batch)
    gradient = torch.zeros_like(batch.logps)
    if loss.requires_grad:
        (found,) = torch.autograd.grad(loss.sum(), batch.logps, retain_graph=True, allow_unused=True)
        if found is not None:
            gradient = found
    return bool((loss[rows] == 0).all() and (gradient[rows] == 0).all())


def is_sum_over_rows(objective: Objective, several_generations: bool = False) -> bool:
    """Return whether aggregating all rows equals the sum of aggregating each row at its own width, with denominators
    fixed. Then bins of any composition, width and order add up to the same loss, also with a dummy row without loss
    tokens.

    Args:
        objective: the objective whose aggregation is asked.
        several_generations: rows of several generation batches are in an optimizer step, so that the token count is one
            number per row, ``[B, 1]``.
    """

    def aggregate(loss: Tensor, mask: Tensor, **changes: Any) -> Tensor:
        return objective.aggregate(loss, mask, replace(_DENOMINATORS, **changes))

    for batch in (toy_batch(objective), wide_toy_batch(objective)):
        mask = batch.mask
        lengths = mask.sum(1).tolist()
        for loss in (batch.logps.detach().square(), torch.sin(7 * batch.proximal_logps) * 3):
            loss = loss.masked_fill(~mask, 0.0)
            together = float(aggregate(loss, mask))
            ways = [
                [aggregate(loss[i : i + 1, :n], mask[i : i + 1, :n]) for i, n in enumerate(lengths)],
                [aggregate(pad(loss.flip(0), (0, 3)), pad(mask.flip(0), (0, 3)))],
                [aggregate(loss, mask), aggregate(torch.zeros_like(loss[:1, :1]), torch.zeros_like(mask[:1, :1]))],
            ]
            if several_generations:
                tokens = torch.full((len(lengths), 1), float(_DENOMINATORS.tokens), dtype=loss.dtype)
                ways.append([aggregate(loss, mask, tokens=tokens)])
            for apart in ways:
                if any(part.numel() != 1 for part in apart):
                    return False
                if not math.isclose(together, float(sum(apart)), rel_tol=1e-9, abs_tol=1e-9):
                    return False
    return True


def literal_loss(objective: Objective, batch: TokenBatch) -> float | None:
    """Compute the loss by the written-out formula, in loops over single floats; None if surrogate, aggregation or a
    gate has no such formula."""
    surrogate = _literal_of(objective.surrogate)
    aggregate = _literal_of(objective.aggregate)
    gates = [_literal_of(gate) for gate in objective.gates]
    if surrogate is None or aggregate is None or None in gates:
        return None
    losses = []
    for i in range(batch.mask.size(0)):
        assert batch.ref_logps is not None
        of_row = (batch.logps, batch.proximal_logps, batch.ref_logps, batch.sampler_logps)
        logps, old, ref, sampled = (values[i][batch.mask[i]].tolist() for values in of_row)
        steps = [new - was for new, was in zip(logps, old, strict=True)]
        row = LiteralRow(
            logps=logps,
            proximal_logps=old,
            log_ratios=literal_log_ratios(objective.ratio, steps),
            advantage=batch.advantages[i, 0].item(),
            sampler_logps=sampled,
            chosen={name: tokens[i][batch.mask[i]].tolist() for name, tokens in batch.chosen.items()},
        )
        losses.append(
            [
                surrogate(row, t) * math.prod(gate(row, t) for gate in gates)
                + _literal_kl(objective, row, ref[t] - logps[t], t)
                for t in range(len(logps))
            ]
        )
    return float(aggregate(losses, _DENOMINATORS))


def has_formula(objective: Objective) -> bool:
    """Return whether surrogate, gates and aggregation are written out as formulas."""
    return None not in map(_literal_of, (objective.surrogate, objective.aggregate, *objective.gates))


def _literal_of(part: Any) -> Any:
    """Return the formula of a surrogate, gate or aggregation, or None. A subclass that changes the tensor code does not
    inherit one."""
    ours = next((formula for one, formula in LITERALS.items() if one is part), None)
    if ours is None and "literal" in vars(type(part)):
        return part.literal
    return ours


def _literal_kl(objective: Objective, row: LiteralRow, x: float, t: int) -> float:
    """Return β·KL of token ``t`` in plain floats, weighted by the ratio if the term is; 0 without a KL term in the
    loss. ``x`` is log π_ref − log π."""
    kl = objective.kl_in_loss
    if kl is None:
        return 0.0
    value = {"k1": -x, "k2": x * x / 2, "k3": math.exp(x) - x - 1}[kl.estimator]
    return kl.coefficient * value * (math.exp(row.log_ratios[t]) if kl.ratio_weighted else 1.0)


def toy_ratios() -> tuple[Tensor, Tensor]:
    """Return x and mask ``[4, 4]`` in float64 for a correction: ratios from e^-2 to e^2.5, a row that nearly agrees,
    one of zeros."""
    steps = [[0.9, -2.0, 2.5, 0.1], [3e-4, -2e-4, 1e-4, 0.0], [-0.3, 0.2, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0]]
    return torch.tensor(steps, dtype=torch.float64), torch.arange(4) < torch.tensor([4, 3, 2, 3]).unsqueeze(1)


def prove_correction(correction: Correction) -> None:
    """Try ``correction`` on toy log-ratios.

    Raises:
        ValueError: the weights have another shape than ``[B, T]`` or ``[B, 1]``, have a gradient, are not finite or
            below 0; or those of a row depend on other rows or on padding, and the correction does not say
            ``whole_batch``.
        RuntimeError: the weights are not those of the correction's ``literal``.
    """
    whose = f"the correction {address(correction)}"
    x, mask = toy_ratios()
    weights = _weights_of(correction, x.clone().requires_grad_(True), mask)
    if not isinstance(weights, Tensor) or tuple(weights.shape) not in ((4, 4), (4, 1)):
        if isinstance(weights, Tensor):
            seen = f"a tensor {list(weights.shape)}"
        else:
            seen = f"a {type(weights).__name__}"
        raise ValueError(f"{whose} returned {seen} for 4 rows of 4 tokens; it must return a tensor [4, 4] or [4, 1]")
    if weights.requires_grad:
        raise ValueError(f"{whose} returned weights with a gradient; a weight is a constant of the loss: detach it")
    weights = weights.expand(mask.shape)
    if not (weights[mask].isfinite().all() and (weights[mask] >= 0).all()):
        raise ValueError(f"{whose} returned {weights[mask].tolist()}; weights must be finite and at least 0")
    if getattr(correction, "whole_batch", False):
        return
    formula: Any = None
    if "literal" in dir(type(correction)):
        formula = correction.literal  # type: ignore[attr-defined]
    for row, length in enumerate(mask.sum(1).tolist()):
        alone = _weights_of(correction, x[row : row + 1, :length], mask[row : row + 1, :length])
        if not torch.allclose(alone.expand(1, length)[0], weights[row, :length], rtol=CLOSE, atol=CLOSE):
            raise ValueError(
                f"{whose} weighs a row by other rows, or by its padding; if it is meant to, it must say "
                "`whole_batch = True`, and gets all rows of a generation batch"
            )
        if formula is not None:
            expected = [formula(x[row, :length].tolist(), t) for t in range(length)]
        else:
            expected = []
        for found, literal in zip(weights[row].tolist(), expected, strict=False):
            if not math.isclose(found, literal, rel_tol=CLOSE, abs_tol=CLOSE):
                raise RuntimeError(f"{whose} gives the weight {found:.12g}, and its formula gives {literal:.12g}")


def _weights_of(correction: Correction, x: Tensor, mask: Tensor) -> Any:
    """Return the weights of x, called as the correction wants it; one of a whole batch gets a ``gather`` for a single
    rank."""
    if getattr(correction, "whole_batch", False):
        return correction(x.detach(), mask, lambda values: values)
    return correction(x.detach(), mask)
