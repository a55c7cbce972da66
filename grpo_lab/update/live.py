"""When a row may be left out of the policy update, and which rows those are.

A row's policy loss is a sum over its tokens of (advantage × something). With advantage 0 on every token the row adds
exactly 0 to the loss and to the gradient, and may be left out. Two things must hold for that: no other term of the loss
reads the row, and no row's value depends on which rows share its micro-batch. `LiveConditions` lists what could break
either of them.

A KL penalty in the reward is part of the advantage and no condition. Neither is gradient clipping, weight decay,
momentum or the learning rate: they act on the summed gradient, which stays the same.

Dropout draws a mask of its own for every row. A row with advantage 0 adds 0 under any mask. Without that row, or in
other batches, what the other rows add has the same joint distribution. So dropout matters only with `same_draws`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

import torch


@dataclass(frozen=True, kw_only=True)
class LiveConditions:
    """Everything that can forbid leaving rows out of the update, or cutting them into other micro-batches. No field has
    a default, so that whoever decides has looked at each.

    A condition forbids it unless it is 0, False or "". A `str` says the reason in words.

    Terms of the loss that act on rows whose advantage is 0:
        kl_in_loss: coefficient of a KL term in the loss (TRL's `beta`).
        value_loss: coefficient of a value-head loss on the same forward (PPO).
        entropy_bonus: settings of the entropy bonus in the loss.
        pull: name of a part that has a loss or a gradient where the advantage is 0 (mirror descent, a team's part).

    Terms and layers through which the rows of a micro-batch act on each other:
        moe_aux_loss: `router_aux_loss_coef` of a mixture-of-experts model.
        dropout: largest drop probability active in training (model and LoRA). A condition only with `same_draws`.
        same_draws: the run must draw exactly TRL's dropout masks, not only masks of the same distribution.
        shared_dropout: largest drop probability of a mask that the rows of a batch share.
        layer_drop: largest probability of skipping a whole layer in training (`layerdrop`).
        router_noise: noise on the experts' or router's inputs in training (`router_jitter_noise`).
        random_forward: the training forward was seen to draw random numbers, for whatever reason.
        embedding_noise: `neftune_noise_alpha`.
        mixed_rows: what makes a row's output depend on other rows (batch norm, expert capacity, …).
        moved_positions: what makes a row's positions depend on its padding, even if TRL's positions are passed in
            (rotary scaling that follows the longest position, virtual tokens, …). Plain rotary, ALiBi and learned
            positions do not.
        state_reads_padding: a recurrent state runs through a row's padding (RWKV and others that ignore the mask).
        local_average: the average that divides by what is in the local micro-batch (`loss_type="bnpo"`).
        multimodal: images or other inputs that are not one tensor row per row.

    Raises:
        ValueError: a condition has another type than its field, or is not finite.
    """

    kl_in_loss: float
    value_loss: float
    entropy_bonus: str
    pull: str
    moe_aux_loss: float
    dropout: float
    same_draws: bool
    shared_dropout: float
    layer_drop: float
    router_noise: float
    random_forward: bool
    embedding_noise: float
    mixed_rows: str
    moved_positions: str
    state_reads_padding: bool
    local_average: str
    multimodal: bool

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.type in ("bool", "str"):
                if type(value).__name__ != field.type:
                    raise ValueError(f"LiveConditions.{field.name} must be a {field.type}; got {value!r}.")
            elif isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
                raise ValueError(f"LiveConditions.{field.name} must be a finite number; got {value!r}.")


#: Condition → sentence for the log.
_NEED_STOCK: dict[str, str] = {
    "local_average": "the average `{value}` divides by the tokens of its own micro-batch (as loss_type='bnpo'), so "
    "its value depends on which rows share one; `token_mean` (loss_type='dapo') divides by all of them",
    "moe_aux_loss": "the load-balancing loss of the experts (router_aux_loss_coef={value}) reads every token; 0 "
    "switches it off",
    "dropout": "dropout is active (p={value}), and its masks are to be the ones that TRL draws in its own batches "
    "(`update.randomness: same_draws`, the default while `objective` is unset); set `update.randomness: "
    "same_distribution` "
    "for other masks of the same distribution, or switch it off (disable_dropout=True, lora_dropout=0)",
    "shared_dropout": "a dropout mask is shared by all rows of a micro-batch (p={value}: rank_dropout or "
    "module_dropout of an adapter, "
    "or whole channels), so rows in other batches are random together in another way; 0 switches it off",
    "layer_drop": "layers are skipped at random (layerdrop={value} in the model's config), and which ones is drawn "
    "anew for each micro-batch, for all of its rows; layerdrop=0 there switches it off",
    "router_noise": "noise is added in the experts' routing (router_jitter_noise={value} in the model's config; DBRX "
    "calls it moe_jitter_eps), and it depends on the layout of the micro-batches; 0.0 there switches it off",
    "random_forward": "the model's forward drew random numbers in the first step that no dropout setting tells of, "
    "so it may depend on the layout of the micro-batches",
    "embedding_noise": "noise is added to the embeddings (neftune_noise_alpha={value}), as large as the padded width "
    "of a micro-batch makes it; None switches it off",
    "mixed_rows": "a row's output depends on the other rows of its batch: {value}",
    "moved_positions": "a row cannot be re-aligned without changing its log-probs: {value}",
    "state_reads_padding": "the model carries a recurrent state through padding, which it does not mask, so a row's "
    "log-probs depend on how far it is padded (no setting changes that)",
    "multimodal": "the model takes images, and the data may bring some (a column of images, prompts that are not "
    "plain text, tools, an environment), which are not one tensor row per row",
}
_NEED_ALL_ROWS: dict[str, str] = {
    "kl_in_loss": "the KL term in the loss (beta={value}) acts on rows whose advantage is zero; 0 switches it off, and "
    "`kl.placement: reward` charges it in the advantage",
    "value_loss": "the value loss (value.vf_coef={value}) acts on rows whose advantage is zero",
    "entropy_bonus": "the entropy bonus ({value}) acts on rows whose advantage is zero; `entropy_coef: 0` and "
    "`use_adaptive_entropy: false` switch it off",
    "pull": "{value}: the loss of a row does not vanish where its advantage is zero",
}


def _first_broken(table: dict[str, str], conditions: LiveConditions) -> str | None:
    """Return the sentence of ``table`` for the first condition that forbids it; None if there is none."""
    for name, sentence in table.items():
        if name == "dropout" and not conditions.same_draws:
            continue  # masks of the same distribution are enough
        value = getattr(conditions, name)
        if value:
            return sentence.format(value=value)
    return None


def why_stock_batches(conditions: LiveConditions) -> str | None:
    """Return why the micro-batches must stay as TRL cut them; None if any grouping of the rows gives the same gradient.

    With dropout and without `same_draws`, "the same" means a gradient of the same distribution.
    """
    return _first_broken(_NEED_STOCK, conditions)


def why_all_rows(conditions: LiveConditions) -> str | None:
    """Return why no row may be left out; None if leaving out rows with zero advantage is exact.

    Every reason of `why_stock_batches` is also a reason here. The others, such as a KL term, need every row, but in any
    grouping.
    """
    return why_stock_batches(conditions) or _first_broken(_NEED_ALL_ROWS, conditions)


def live_rows(advantages: torch.Tensor, loss_mask: torch.Tensor) -> torch.Tensor:
    """Mark the rows that contribute to the policy loss: bool [N].

        live_i = some token t has mask_{i,t} ≠ 0 and advantage_{i,t} ≠ 0

    There is no tolerance: an advantage of 1e-30 is live. So is a NaN, which then reaches the loss, where it is seen, as
    in stock TRL.

    Args:
        advantages: [N], [N, 1] or [N, T].
        loss_mask: [N, T], 0 where a token carries no loss.

    Raises:
        ValueError: the shapes do not fit each other.
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
