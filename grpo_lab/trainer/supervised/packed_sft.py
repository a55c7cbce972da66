"""TRL's SFT trainer, which computes each micro-batch as one packed row.

TRL pads every row to the longest of its micro-batch. Here the rows stand one after another, without padding, and tokens
with which all of them begin (a chat template's, a system prompt) are computed once: the packed row of
``trl_bridge.shared_attention``. TRL's loss is a sum over tokens, divided by the number of labels in the optimizer step.
So loss and gradient are TRL's, up to the order of sums.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from accelerate.utils import DistributedType
from torch import Tensor, nn
from trl import SFTTrainer

from grpo_lab.trainer import trl_bridge
from grpo_lab.trainer.exactness.model_conditions import mixes_rows
from grpo_lab.trainer.exactness.shared_prompts import TOLERANCE, TOLERANCE_COARSE, attention_of, why_unshared

logger = logging.getLogger("grpo_lab")

PADDED = {"input_ids", "attention_mask", "labels"}
"""The fields of a micro-batch of text, as TRL's collator makes it."""
COMPARED = 8
"""Number of rows of the first micro-batch that are computed both ways."""


class PackedSFTTrainer(SFTTrainer):  # type: ignore[misc]
    """TRL's SFTTrainer, which computes micro-batches as packed rows where that is exact, and as TRL does elsewhere.

    Not packed are images, trainings of several processes (whose rows differ in number of tokens), models in which
    tokens meet outside of attention, and losses that read more than the log-probs of labels. `COMPARED` rows of the
    first micro-batch are computed both ways; if their log-probs differ, no row is packed.

    Attributes:
        because: why no row is packed; "" if rows may be packed.
    """

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self.because = self._why_padded()
        self._compared = False

    def train(self, *args: Any, **more: Any) -> Any:
        """Train as TRL does, with an attention that reads packed rows; afterwards the model has its own again."""
        if self.because:
            logger.info("rows are padded to the longest of their micro-batch: %s", self.because)
            return super().train(*args, **more)
        inner = trl_bridge.inside(self.model)
        own = attention_of(self.model)
        inner.set_attn_implementation(trl_bridge.served_as(own))
        try:
            return super().train(*args, **more)
        finally:
            inner.set_attn_implementation(own)

    def training_step(self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Any = None) -> Tensor:
        """Run forward and backward of a micro-batch, and return its loss. The micro-batch is packed first, if that is
        exact; the very first one is also compared with TRL's padded form."""
        if not self.because and num_items_in_batch is not None and set(inputs) == PADDED:
            if not self._compared:
                self._compared = True
                self._compare(model, {name: value[:COMPARED] for name, value in inputs.items()})
            packed = self._packed(inputs)
            if packed is not None:
                inputs = forward_arguments(packed, int(inputs["attention_mask"].sum()))
        return super().training_step(model, inputs, num_items_in_batch)

    def _packed(self, inputs: dict[str, Tensor]) -> trl_bridge.PackedRow | None:
        """Return a micro-batch as a packed row; None if it has no label, or if rows must not be packed."""
        if self.because:
            return None
        input_ids = inputs["input_ids"]
        labels = inputs["labels"]
        positions = torch.arange(input_ids.size(1)).expand_as(input_ids)
        prompts = torch.full((input_ids.size(0),), common_tokens(input_ids, labels))
        form = trl_bridge.form_of(attention_of(self.model))
        return trl_bridge.packed_row(input_ids, labels, positions, prompts, form)

    @torch.no_grad()
    def _compare(self, model: nn.Module, inputs: dict[str, Tensor]) -> None:
        """Compare the log-probs of a few rows, packed and padded, in nats. If they differ by more than rounding, warn,
        and pack no rows from now on (``because``)."""
        packed = self._packed(inputs)
        if packed is None:
            return
        with self.compute_loss_context_manager():
            found = model(**forward_arguments(packed, 1), fused_lm_head=True).log_probs
            expected = model(**inputs, fused_lm_head=True).log_probs
        apart = (found[0, packed.scored] - expected.flatten()[packed.home]).abs()
        gap = float(apart.mean())
        allowed = TOLERANCE_COARSE
        if self.accelerator.mixed_precision == "no" and trl_bridge.coarsest(model).itemsize >= 4:
            gap = float(apart.max())
            allowed = TOLERANCE
        if gap > allowed:
            self.because = f"log-probs of packed rows differ by {gap:.2g} nats from those of padded rows"
            logger.warning("rows are padded to the longest of their micro-batch: %s", self.because)

    def _why_padded(self) -> str:
        """Return why this training must not pack rows, in words; "" if it may."""
        model = self.accelerator.unwrap_model(self.model)
        if self.accelerator.distributed_type != DistributedType.NO:
            return "several processes train together"
        if self.args.neftune_noise_alpha is not None:
            return "`neftune_noise_alpha` scales its noise by the padded length"
        if self.label_smoother is not None or self.aux_loss_enabled:
            return "the loss reads more than the log-probs of labels (`label_smoothing_factor`, a router's loss)"
        if self.args.torch_compile or trl_bridge.form_of(attention_of(model)) == "flex":
            return "every micro-batch has another form, which would be compiled anew"
        return why_unshared(model) or mixes_rows(model, self.accelerator.mixed_precision)


def common_tokens(input_ids: Tensor, labels: Tensor) -> int:
    """Return the number of tokens with which all rows ``[B, L]`` begin and that have no label; at least 1, since
    nothing predicts a row's first token."""
    alike = (input_ids == input_ids[:1]).all(0) & (labels == -100).all(0)
    return max(1, int(alike.long().cumprod(0).sum()))


def forward_arguments(packed: trl_bridge.PackedRow, tokens: int) -> dict[str, Any]:
    """Return the arguments that TRL's ``compute_loss`` passes to the model, for a packed row. ``tokens``: number of
    tokens in the micro-batch without padding, which TRL logs."""
    labels = torch.full_like(packed.input_ids, -100)
    labels[0, packed.scored] = packed.targets
    return {
        "input_ids": packed.input_ids, "position_ids": packed.position_ids, "shift_labels": labels,
        "shared_prompts": packed.seen,
        # our attention does not read it; transformers passes on a mask of four dimensions, and TRL logs its sum
        "attention_mask": labels.new_ones(1, 1, 1, tokens),
    }  # fmt: skip
