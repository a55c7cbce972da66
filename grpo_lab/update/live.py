"""When a row may be left out of the policy update, and which rows those are.

A row's policy loss is a sum over its tokens of (advantage × something). With advantage exactly 0 on every token the row
adds exactly 0 to the loss and to the gradient, so computing it buys nothing. That is only true while no other term of
the loss reads the row and while no row's value depends on which other rows share its micro-batch. `LiveConditions` lists
everything that could break either half; the trainer fills it from what the run really uses, and the two questions below
answer with a sentence for the log.

Rewards may contain a KL penalty: it is part of the advantage and no condition here. Neither is gradient clipping, weight
decay, momentum or the learning rate: they act on the summed gradient, which stays the same.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

import torch


@dataclass(frozen=True, kw_only=True)
class LiveConditions:
    """What the optimizer step reads besides advantage × surrogate. No defaults: every condition is looked at.

    Terms that act on rows whose advantage is 0:
        kl_in_loss: coefficient of a KL term in the loss (TRL's `beta`), 0 = none.
        value_loss: coefficient of a value-head loss on the same forward (PPO), 0 = none.
        surrogate_vanishes: the surrogate is 0, with zero gradient, where the advantage is 0 (true for every TRL loss type;
            false for mirror descent, whose squared log-ratio pulls on every row).
    Terms and layers through which the rows of a micro-batch act on each other:
        entropy_bonus: `entropy_coef`, a mean over the micro-batch's tokens, 0 = none.
        adaptive_entropy: `use_adaptive_entropy`; it measures the entropy of all rows even while its coefficient is 0.
        entropy_quantile: `top_entropy_quantile`; below 1 its threshold is a quantile over the micro-batch's tokens.
        moe_aux_loss: `router_aux_loss_coef` of a mixture-of-experts model, 0 = none or dense model.
        dropout: largest drop probability that is active in training mode (model and LoRA), 0 = none.
        layer_drop: largest probability of skipping a whole layer in training (`layerdrop`), 0 = none.
        router_noise: noise on the experts' or router's inputs in training (`router_jitter_noise`), 0 = none.
        random_forward: the training forward was seen to draw random numbers, for whatever reason.
        embedding_noise: `neftune_noise_alpha`, 0 = none.
        batch_dependent_layers: batch norm, expert capacity, activation scales per batch, …
        shift_invariant_positions: a row's log-probs do not depend on how far it is padded, up to rounding. True for plain
            rotary embeddings and ALiBi, and for learned absolute positions where the caller hands in the stock positions.
            False for rotary scaling that depends on the longest position in the batch ("dynamic", "longrope").
        state_reads_padding: a recurrent state runs through a row's padding (RWKV and other models that ignore the mask).
        local_denominator: the loss divides by what is in the local micro-batch (`loss_type="bnpo"`).
        off_policy_mask_per_row: the off-policy mask, if one is on, looks at one row at a time (TRL's does); True without.
        multimodal: images or other inputs that are not one tensor row per row.
    """

    kl_in_loss: float
    value_loss: float
    surrogate_vanishes: bool
    entropy_bonus: float
    adaptive_entropy: bool
    entropy_quantile: float
    moe_aux_loss: float
    dropout: float
    layer_drop: float
    router_noise: float
    random_forward: bool
    embedding_noise: float
    batch_dependent_layers: bool
    shift_invariant_positions: bool
    state_reads_padding: bool
    local_denominator: bool
    off_policy_mask_per_row: bool
    multimodal: bool

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.type == "bool":
                if not isinstance(value, bool):
                    raise ValueError(f"LiveConditions.{field.name} must be True or False; got {value!r}.")
            elif isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
                raise ValueError(f"LiveConditions.{field.name} must be a finite number; got {value!r}.")


def why_stock_batches(conditions: LiveConditions) -> str | None:
    """Why the micro-batches must stay as TRL cut them, or None where any grouping of the rows gives the same gradient."""
    c = conditions
    broken = (
        (
            c.local_denominator,
            "the loss divides by the tokens of its own micro-batch (loss_type='bnpo'), so its value depends on which "
            "rows share one; `loss_type='dapo'` divides by all of them",
        ),
        (
            c.entropy_bonus != 0,
            f"the entropy bonus (entropy_coef={c.entropy_bonus}) is a mean over all tokens of each micro-batch; "
            "entropy_coef=0 switches it off",
        ),
        (
            c.adaptive_entropy,
            "the adaptive entropy controller (use_adaptive_entropy=True) measures the entropy of every row; False switches it off",
        ),
        (
            c.entropy_quantile < 1,
            f"the entropy threshold (top_entropy_quantile={c.entropy_quantile}) is a quantile over all tokens of each "
            "micro-batch; 1.0 switches it off",
        ),
        (
            c.moe_aux_loss != 0,
            f"the load-balancing loss of the experts (router_aux_loss_coef={c.moe_aux_loss}) reads every token; 0 switches it off",
        ),
        (
            c.dropout > 0,
            f"dropout is active (p={c.dropout}; disable_dropout=True and lora_dropout=0 switch it off), so the random "
            "masks depend on the layout of the micro-batches",
        ),
        (
            c.layer_drop > 0,
            f"layers are skipped at random (layerdrop={c.layer_drop} in the model's config), and which ones is drawn "
            "anew for each micro-batch; layerdrop=0 there switches it off",
        ),
        (
            c.router_noise > 0,
            f"noise is added in the experts' routing (router_jitter_noise={c.router_noise} in the model's config), and it "
            "depends on the layout of the micro-batches; 0.0 there switches it off",
        ),
        (
            c.random_forward,
            "the model's forward drew random numbers in the first step, so it depends on the layout of the micro-batches",
        ),
        (
            c.embedding_noise != 0,
            f"noise is added to the embeddings (neftune_noise_alpha={c.embedding_noise}), and it depends on the layout "
            "of the micro-batches; None switches it off",
        ),
        (
            c.batch_dependent_layers,
            "the model has layers whose output for one row depends on the other rows of the batch (no setting changes that)",
        ),
        (
            not c.shift_invariant_positions,
            "the model's positions depend on the padding (rotary scaling that follows the longest row, or learned absolute "
            "positions), so a row cannot be re-aligned without changing its log-probs (no setting changes that)",
        ),
        (
            c.state_reads_padding,
            "the model carries a recurrent state through padding, which it does not mask, so a row's log-probs depend on how far "
            "it is padded (no setting changes that)",
        ),
        (
            not c.off_policy_mask_per_row,
            "the off-policy mask (off_policy_mask_threshold) looks at more than one row at a time",
        ),
        (c.multimodal, "the batch carries images or other inputs that are not one tensor row per row"),
    )
    return next((reason for is_broken, reason in broken if is_broken), None)


def why_all_rows(conditions: LiveConditions) -> str | None:
    """Why no row may be left out, or None where leaving out rows with zero advantage is exact.

    Every reason of `why_stock_batches` counts here too. The other direction does not hold: with a KL term every row must
    be computed, but in any grouping.
    """
    c = conditions
    if (reason := why_stock_batches(c)) is not None:
        return reason
    if c.kl_in_loss != 0:
        return (
            f"the KL term in the loss (beta={c.kl_in_loss}) acts on rows whose advantage is zero; 0 switches it off, and "
            "`kl.placement: reward` charges it in the advantage"
        )
    if c.value_loss != 0:
        return f"the value loss (coefficient {c.value_loss}) acts on rows whose advantage is zero"
    if not c.surrogate_vanishes:
        return "the objective's surrogate does not vanish where the advantage is zero"
    return None


def live_rows(advantages: torch.Tensor, loss_mask: torch.Tensor) -> torch.Tensor:
    """Which rows contribute to the policy loss: bool [N].

    live_i = some token t has mask_{i,t} ≠ 0 and advantage_{i,t} ≠ 0.

    advantages: [N], one value a row, or [N, T] (or [N, 1]). loss_mask: [N, T], 0 where the loss does not look (padding,
    tool outputs, masked truncated completions). A NaN advantage is ≠ 0: its row stays and the NaN reaches the loss, where
    it is seen, as in stock TRL. No tolerance: 1e-30 is live.
    """
    if loss_mask.dim() != 2:
        raise ValueError(f"loss_mask must be [rows, tokens]; got shape {tuple(loss_mask.shape)}.")
    if advantages.dim() == 1:
        advantages = advantages.unsqueeze(1)
    rows, tokens = loss_mask.shape
    if advantages.dim() != 2 or advantages.shape[0] != rows or advantages.shape[1] not in (1, tokens):
        raise ValueError(
            f"advantages must be [rows] or [rows, tokens] for a loss_mask of shape {tuple(loss_mask.shape)}; "
            f"got {tuple(advantages.shape)}."
        )
    return ((advantages != 0) & (loss_mask != 0)).any(dim=1)
