"""``update: {share_prompts: on}``: which models may read a group's prompt once, and whether this one did it right."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from grpo_lab.trainer import trl_bridge
from grpo_lab.trainer.exactness.model_conditions import dropout_rate, moves_positions
from grpo_lab.trainer.ports import StepPort
from grpo_lab.trainer.rows import Bin

#: nats a token that the first shared bin may differ from unshared rows: in float32, in anything coarser
TOLERANCE, TOLERANCE_COARSE = 1e-4, 0.2


class SharedPrompts:
    """Log-probs of a bin with each prompt once. One per trainer with ``share_prompts: on``; it sets the model's
    attention to ``trl_bridge.SHARED_PROMPT`` for good (``sdpa`` wherever no prompt is shared).

    Raises:
        ValueError: the model or the run cannot be served.
    """

    def __init__(self, trainer: StepPort) -> None:
        model = trainer.accelerator.unwrap_model(trainer.model)
        reason = _of_run(trainer) or why_unshared(model)
        if reason:
            raise ValueError(f"`update.share_prompts` is on, and {reason}; leave `update.share_prompts` out")
        _inner(model).set_attn_implementation(trl_bridge.SHARED_PROMPT)
        self._trainer = trainer
        self._checked = False

    def log_probs(self, model: nn.Module, part: Bin) -> tuple[Tensor, Tensor | None]:
        """``completion_log_probs`` of a bin. One with a hole in a mask, and one that scores nothing, is computed as
        without this setting. RuntimeError: the first bin that shares differs from its unshared rows."""
        packed = trl_bridge.packed_row(*part.inputs[:3]) if part.attention_mask is None else None
        if packed is None:
            return trl_bridge.completion_log_probs(self._trainer, model, *part.inputs)
        found = trl_bridge.shared_log_probs(self._trainer, model, packed, part.input_ids.shape)
        if packed.shares and not self._checked:
            self._check(model, part, found[0].detach())
            self._checked = True
        return found

    @torch.no_grad()
    def _check(self, model: nn.Module, part: Bin, found: Tensor) -> None:
        # not through DistributedDataParallel: other ranks may have no prompt to share yet
        plain = self._trainer.accelerator.unwrap_model(model)
        with trl_bridge.without_checkpointing(self._trainer):
            expected, _ = trl_bridge.completion_log_probs(self._trainer, plain, *part.inputs)
        exact = self._trainer.accelerator.mixed_precision == "no" and next(plain.parameters()).dtype == torch.float32
        gap, allowed = float((found - expected).abs().max()), TOLERANCE if exact else TOLERANCE_COARSE
        if not gap <= allowed:
            raise RuntimeError(
                f"with `update.share_prompts: on` a log-prob of the first shared bin differs by {gap:.2g} nats from "
                f"that of unshared rows (allowed: {allowed:g}): this model ({type(_inner(plain)).__name__}) reads more "
                "than its attention sees; leave `update.share_prompts` out"
            )


def why_unshared(model: nn.Module) -> str:
    """Why a packed row would be another function of ``model``; "" where nothing is known."""
    inner = _inner(model)
    if not isinstance(inner, PreTrainedModel) or not inner._supports_attention_backend:
        return f"{type(inner).__name__} does not take its attention from transformers' `AttentionInterface`"
    config: Any = inner.config.get_text_config()
    used = config._attn_implementation
    if used not in ("sdpa", trl_bridge.SHARED_PROMPT):
        return f"the model's attention is {used!r}; prompts are shared by 'sdpa' (`attn_implementation`)"
    others = sorted(set(getattr(config, "layer_types", None) or ()) - {"full_attention"})
    if others:
        return f"the model has layers of {', '.join(others)}; all must be full attention"
    if getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True):
        return f"the model's attention has a sliding window ({config.sliding_window} tokens)"
    for name, module in model.named_modules():
        if getattr(module, "_is_stateful", False) or isinstance(module, nn.modules.conv._ConvNd | nn.RNNBase):
            return f"tokens meet outside attention, in `{name or type(module).__name__}` (a state or a convolution)"
    for name, _ in model.named_parameters():
        if name.rpartition(".")[2] == "sinks":
            return f"the model's attention has sinks (`{name}`)"
    if moves_positions(model):
        return moves_positions(model)
    rate = dropout_rate(model)
    return f"a dropout of {rate:g} is active, which draws other masks for other rows" if rate > 0 else ""


def _of_run(trainer: StepPort) -> str:
    if trainer.algorithm.value is not None:
        return "a critic (`value`) reads the prompt's last place in every row"
    if trainer.accelerator.distributed_type not in ("NO", "MULTI_CPU", "MULTI_GPU"):
        return f"it was not tested with weights in parts ({trainer.accelerator.distributed_type.value})"
    if trainer.args.torch_compile or trl_bridge.is_compiled(trainer, trainer.model):
        return "every bin has another form, which `torch.compile` would compile anew"
    return "the rows may bring images" if trl_bridge.may_bring_images(trainer) else ""


def _inner(model: nn.Module) -> Any:
    """The transformers model below an adapter."""
    return getattr(model, "get_base_model", lambda: model)()
