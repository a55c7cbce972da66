"""When a row may be left out of the policy update, and which rows those are.

A row's policy loss is a sum over its tokens of (advantage × something). With advantage exactly 0 on every token the row
adds exactly 0 to the loss and to the gradient, so computing it buys nothing. That is only true while no other term of
the loss reads the row and while no row's value depends on which other rows share its micro-batch. `LiveConditions` lists
everything that could break either half; the trainer fills it from what the run really uses, and the two questions below
answer with a sentence for the log.

Rewards may contain a KL penalty: it is part of the advantage and no condition here. Neither is gradient clipping, weight
decay, momentum or the learning rate: they act on the summed gradient, which stays the same.

Dropout draws a mask of its own for every row. A row with advantage 0 adds 0 under any mask, and the masks of the others neither
know of it nor of the batch that they share: without it, and in other batches, the joint distribution of what the rows add is the
same. So dropout stands in the way only of a run that wants TRL's very draws (`same_draws`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

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
        dropout: largest drop probability that is active in training mode (model and LoRA), 0 = none. Every value of a row has
            its own draw. A condition only with `same_draws`.
        same_draws: the run is to have TRL's very masks, and not only their distribution.
        shared_dropout: largest drop probability of a mask that the rows of a batch share, 0 = none.
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
    same_draws: bool
    shared_dropout: float
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


def _is_set(value: bool) -> bool:
    return value


def _is_unset(value: bool) -> bool:
    return not value


def _not_zero(value: float) -> bool:
    return value != 0


def _above_zero(value: float) -> bool:
    return value > 0


def _below_one(value: float) -> bool:
    return value < 1


#: condition → (when it is broken, the sentence for the log)
_Table = dict[str, tuple[Callable[[Any], bool], str]]
_NEED_STOCK: _Table = {
    "local_denominator": (
        _is_set,
        "the loss divides by the tokens of its own micro-batch (loss_type='bnpo'), so its value depends on which "
        "rows share one; `loss_type='dapo'` divides by all of them",
    ),
    "entropy_bonus": (
        _not_zero,
        "the entropy bonus (entropy_coef={value}) is a mean over all tokens of each micro-batch; "
        "entropy_coef=0 switches it off",
    ),
    "adaptive_entropy": (
        _is_set,
        "the adaptive entropy controller (use_adaptive_entropy=True) measures the entropy of every row; False switches it off",
    ),
    "entropy_quantile": (
        _below_one,
        "the entropy threshold (top_entropy_quantile={value}) is a quantile over all tokens of each "
        "micro-batch; 1.0 switches it off",
    ),
    "moe_aux_loss": (
        _not_zero,
        "the load-balancing loss of the experts (router_aux_loss_coef={value}) reads every token; 0 switches it off",
    ),
    "dropout": (
        _above_zero,
        "dropout is active (p={value}), and its masks are to be the ones that TRL draws in its own batches "
        "(`update.randomness: same_draws`, the default while `objective` is unset); set `update.randomness: same_distribution` "
        "for other masks of the same distribution, or switch it off (disable_dropout=True, lora_dropout=0)",
    ),
    "shared_dropout": (
        _above_zero,
        "a dropout mask is shared by all rows of a micro-batch (p={value}: rank_dropout or module_dropout of an adapter, or whole "
        "channels), so rows in other batches are random together in another way; 0 switches it off",
    ),
    "layer_drop": (
        _above_zero,
        "layers are skipped at random (layerdrop={value} in the model's config), and which ones is drawn "
        "anew for each micro-batch, for all of its rows; layerdrop=0 there switches it off",
    ),
    "router_noise": (
        _above_zero,
        "noise is added in the experts' routing (router_jitter_noise={value} in the model's config), and it "
        "depends on the layout of the micro-batches; 0.0 there switches it off",
    ),
    "random_forward": (
        _is_set,
        "the model's forward drew random numbers in the first step that no dropout setting tells of, so it may depend on the "
        "layout of the micro-batches",
    ),
    "embedding_noise": (
        _not_zero,
        "noise is added to the embeddings (neftune_noise_alpha={value}), as large as the padded width of a "
        "micro-batch makes it; None switches it off",
    ),
    "batch_dependent_layers": (
        _is_set,
        "the model has layers whose output for one row depends on the other rows of the batch (no setting changes that)",
    ),
    "shift_invariant_positions": (
        _is_unset,
        "the model's positions depend on the padding (rotary scaling that follows the longest row, or learned absolute "
        "positions), so a row cannot be re-aligned without changing its log-probs (no setting changes that)",
    ),
    "state_reads_padding": (
        _is_set,
        "the model carries a recurrent state through padding, which it does not mask, so a row's log-probs depend on how far "
        "it is padded (no setting changes that)",
    ),
    "off_policy_mask_per_row": (
        _is_unset,
        "the off-policy mask (off_policy_mask_threshold) looks at more than one row at a time",
    ),
    "multimodal": (_is_set, "the batch carries images or other inputs that are not one tensor row per row"),
}
#: conditions that hold as they are where the distribution is enough
_ONLY_FOR_SAME_DRAWS = ("dropout",)
_NEED_ALL_ROWS: _Table = {
    "kl_in_loss": (
        _not_zero,
        "the KL term in the loss (beta={value}) acts on rows whose advantage is zero; 0 switches it off, and "
        "`kl.placement: reward` charges it in the advantage",
    ),
    "value_loss": (_not_zero, "the value loss (coefficient {value}) acts on rows whose advantage is zero"),
    "surrogate_vanishes": (_is_unset, "the objective's surrogate does not vanish where the advantage is zero"),
}


def _first_broken(table: _Table, conditions: LiveConditions) -> str | None:
    free = () if conditions.same_draws else _ONLY_FOR_SAME_DRAWS
    values = ((getattr(conditions, name), *entry) for name, entry in table.items() if name not in free)
    return next((sentence.format(value=value) for value, broken, sentence in values if broken(value)), None)


def why_stock_batches(conditions: LiveConditions) -> str | None:
    """Why the micro-batches must stay as TRL cut them, or None where any grouping of the rows gives the same gradient (with
    dropout and without `same_draws`: a gradient of the same distribution)."""
    return _first_broken(_NEED_STOCK, conditions)


def why_all_rows(conditions: LiveConditions) -> str | None:
    """Why no row may be left out, or None where leaving out rows with zero advantage is exact.

    Every reason of `why_stock_batches` counts here too. The other direction does not hold: with a KL term every row must
    be computed, but in any grouping.
    """
    return why_stock_batches(conditions) or _first_broken(_NEED_ALL_ROWS, conditions)


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
