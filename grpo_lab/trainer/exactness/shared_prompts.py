"""``update: {share_prompts: auto | on | off}``: decide whether a group's prompt may be computed once and whether that
is cheaper, and check the result.

``why_unshared`` asks the model and ``_of_run`` the run, once, when the trainer is made. ``planned`` compares the plans
of each step. ``log_probs`` computes bins of either kind, and checks the first bin with shared prompts against unshared
rows.
"""

from __future__ import annotations

import logging
import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from grpo_lab.trainer import trl_bridge
from grpo_lab.trainer.exactness.model_conditions import dropout_rate, moves_positions
from grpo_lab.trainer.metrics.profile import LAYOUT, host
from grpo_lab.trainer.ports import UpdatePort
from grpo_lab.trainer.row_table import HOLED, Bin, Carried
from grpo_lab.trainer.settings.limits import kept_by_engine
from grpo_lab.update import DEARER, DEARER_BIN, Numbers, Plan, Rows, cheaper, plan_shared

#: nats a token that the first shared bin may differ from unshared rows: any token in float32, their mean in anything
#: coarser, whose rounding alone moves single tokens further
TOLERANCE, TOLERANCE_COARSE = 1e-4, 0.02
#: Names of attentions that read a packed row, beside flash kernels.
SERVED = ("sdpa", trl_bridge.FLEX, trl_bridge.SHARED_PROMPT, trl_bridge.SHARED_FLEX)
#: Form → what a packed row costs beyond its tokens: a share of them, and tokens per bin. For tiles it is measured on a
#: CPU. The others are estimates: nothing for flash kernels, half a sixteenth or half a block of padding for
#: FlexAttention.
DEARER_BY = {"tiles": (DEARER, DEARER_BIN), "flex": (1 / 32, 64), "varlen": (0.0, 0)}
#: how many prompts of the first shared bin are compared, and how many completions of each
PROMPTS, COMPLETIONS = 3, 4


class SharedPrompts:
    """Makes plans in which a group's prompt is computed once, and computes the log-probs of their bins. A trainer has
    one.

    Unless the setting is ``off``, the model and a reference get an attention that reads packed rows, for good
    (``trl_bridge.served_as``). ``sdpa`` and FlexAttention are replaced by attentions of ours, which are ``sdpa``
    wherever no row is packed; a flash kernel keeps its own name.

    Attributes:
        asked: the setting ``update.share_prompts``.
        because: why no prompt is shared; "" if prompts may be shared.

    Raises:
        ValueError: the setting is ``on``, and the model or the run does not allow it.
    """

    def __init__(self, trainer: UpdatePort) -> None:
        self._trainer = trainer
        self._checked = False
        self.asked = trainer.lab_settings.update.share_prompts
        if self.asked == "off":
            self.because = "`update.share_prompts` is off"
        else:
            self.because = self._why_not()
        if self.asked == "on":
            refuse_unshared(self.because)
        if self.because and self.asked == "auto":
            trainer.recorder.say(
                f"each row computes its prompt: {self.because}", key="share_prompts", level=logging.INFO
            )
        for model in self._models() if self.may_be_shared else ():
            name = trl_bridge.served_as(attention_of(model))
            if name != attention_of(model):
                _inner(model).set_attn_implementation(name)

    @property
    def may_be_shared(self) -> bool:
        return not self.because

    def described(self) -> dict[str, str]:
        """Return the setting for ``run.json``; nothing if it is ``off``."""
        if self.asked == "off":
            return {}
        return {"share_prompts": f"no: {self.because}" if self.because else self.asked}

    def planned(
        self, plain: Plan, rows: Rows, prompts: Numbers | None, num_ranks: int, max_tokens: int, overhead: int
    ) -> Plan:
        """Return a plan of ``rows`` in which each prompt is computed once, or ``plain``: if prompts may not be shared,
        if a row has a hole in a mask (a packed row cannot have one), or with ``auto`` if ``plain`` is cheaper.

        Args:
            plain: the plan without shared prompts.
            rows: the rows, with the lengths that they have in packed rows.
            prompts: a number per row, equal for equal prompts; None if prompts may not be shared.
            num_ranks: number of ranks.
            max_tokens: tokens that one forward may have.
            overhead: what one more forward costs, in tokens.
        """
        if self.because:
            return plain
        assert prompts is not None  # they are asked for where prompts may be shared
        if (torch.as_tensor(prompts) == HOLED).any():
            return plain
        shared = plan_shared(rows, prompts, num_ranks, max_tokens)
        if self.asked == "on":
            return shared
        # not `_form`: how long FlexAttention compiles is not the same on every rank
        form = trl_bridge.form_of(attention_of(self._trainer.accelerator.unwrap_model(self._trainer.model)))
        return cheaper(plain, shared, *DEARER_BY[form], overhead)

    def log_probs(self, model: nn.Module, part: Bin) -> tuple[Tensor, Tensor | None]:
        """Compute a bin's log-probs and entropies as ``completion_log_probs`` does. A bin that scores nothing is
        computed unshared.

        The first shared bin that scores something on some rank is checked: every rank compares some groups with their
        unshared rows, which is a collective. If they differ, ``auto`` warns and shares no more; what is left of this
        step is computed in the bins at hand, each row with its prompt. With ``on`` a difference raises RuntimeError.
        """
        if part.shared and not self._checked and self._scores_somewhere(part):
            self._check(self._trainer.accelerator.unwrap_model(model), part)
        return self._forward(model, part)

    def _scores_somewhere(self, part: Bin) -> bool:
        """Return whether the bin scores a token on any rank (in a step without such rows all bins are dummies). A
        collective."""
        scores = (part.labels != -100).any().unsqueeze(0)
        return bool(self._trainer.accelerator.gather(scores).any())

    def _forward(self, model: nn.Module, part: Bin) -> tuple[Tensor, Tensor | None]:
        """Compute a bin's log-probs and entropies: as a packed row if it shares prompts and they may be shared, else
        row by row."""
        whole = part.shared and not self.because
        packed = None
        if whole:
            laid_out = part.layout or part
            prompts = laid_out.take[:, 0] + 1
            with host(LAYOUT):
                packed = trl_bridge.packed_row(*laid_out.inputs[:3], prompts, self._form(model), part.input_ids.device)
        if packed is None:
            kept = trl_bridge.kept_at(Carried(part.fields).kept_tokens, part.take, part.input_ids.size(1) - 1)
            return trl_bridge.completion_log_probs(self._trainer.accelerator, model, *part.inputs, kept=kept)
        return trl_bridge.shared_log_probs(self._trainer.accelerator, model, packed, part.input_ids.shape)

    def _form(self, model: nn.Module) -> trl_bridge.Form:
        """Return the form of packed rows that the model reads; ``tiles`` in place of ``flex`` once FlexAttention has
        spent too much time compiling."""
        form = trl_bridge.form_of(attention_of(self._trainer.accelerator.unwrap_model(model)))
        if form != "flex" or not trl_bridge.CLOCK.is_spent:
            return form
        self._trainer.recorder.say(
            "packed rows are read in tiles by `sdpa` from now on: FlexAttention compiled too much: "
            f"{trl_bridge.CLOCK.described()}",
            key="flex", level=logging.WARNING,
        )  # fmt: skip
        return "tiles"

    def _why_not(self) -> str:
        """Return why prompts may not be shared in this run; "" if they may."""
        reasons = (_of_run(self._trainer), *map(why_unshared, self._models()))
        return next(filter(None, reasons), "")

    def _models(self) -> list[nn.Module]:
        """Return the policy and, where there is one, the reference, without accelerate's wrappers."""
        found = (self._trainer.model, getattr(self._trainer, "ref_model", None))
        return [self._trainer.accelerator.unwrap_model(model) for model in found if model is not None]

    @torch.no_grad()
    def _check(self, model: nn.Module, part: Bin) -> None:
        """Compare the first shared bin that scores with unshared rows. Every rank takes part: with sharded weights
        these forwards are collectives."""
        accelerator = self._trainer.accelerator
        part = _some_groups(part)
        exact = accelerator.mixed_precision == "no" and trl_bridge.coarsest(model) == torch.float32
        allowed, of = (TOLERANCE, "a log-prob") if exact else (TOLERANCE_COARSE, "the mean log-prob")
        failed = ""
        with trl_bridge.without_checkpointing(self._trainer.model, self._trainer.args):
            expected = self._forward(model, replace(part, shared=False))[0]
            try:
                apart = _apart(self._forward(model, replace(part, shared=True))[0], expected)
            except (TypeError, ValueError, RuntimeError) as error:  # on every rank alike: the model is the same
                if isinstance(error, torch.cuda.OutOfMemoryError):
                    raise
                apart = torch.full_like(expected, math.inf)
                failed = f"{type(error).__name__}: {error}"[:300]
        apart = apart[part.labels[:, 1:] != -100].float()
        own = apart.new_zeros(1)
        if apart.numel() > 0:  # else this rank has a dummy, and another one compares
            own = (apart.max() if exact else apart.mean()).unsqueeze(0)
        gap = float(accelerator.gather(own).max())
        self._checked = True
        if gap <= allowed:
            return
        named = type(_inner(model)).__name__
        self.because = (
            f"{of} of the first shared bin differs by {gap:.2g} nats from that of unshared rows (allowed: "
            f"{allowed:g}): this model ({named}) reads more than its attention sees, or draws"
        )
        if failed:
            self.because = f"{named} has no forward for a packed row ({failed})"
        if self.asked == "on":
            raise RuntimeError(f"`update.share_prompts` is on, and {self.because}; set it to off")
        self._trainer.recorder.say(
            f"each row computes its prompt: {self.because}", key="share_prompts", level=logging.WARNING
        )


def refuse_unshared(because: str) -> None:
    """Raise ValueError if ``because`` is not empty: it says why prompts cannot be shared, though
    ``update.share_prompts`` is ``on``."""
    if because:
        raise ValueError(f"`update.share_prompts` is on, and {because}; set it to auto or off")


def why_unshared(model: nn.Module, attention: str | None = None) -> str:
    """Return why ``model`` would compute something else from a packed row; "" if no reason is known. ``attention``:
    name of the attention that the model will be loaded with; None for its present one."""
    inner = _inner(model)
    if not isinstance(inner, PreTrainedModel) or not inner._supports_attention_backend:
        return f"{type(inner).__name__} does not take its attention from transformers' `AttentionInterface`"
    config: Any = inner.config.get_text_config()
    used = attention or attention_of(model)
    if used not in SERVED and not trl_bridge.is_flash(used):
        return (
            f"the model's attention is {used!r}; prompts are shared by sdpa, flex_attention and flash kernels "
            "(`attn_implementation`)"
        )
    own_flash = attention is None and used is not None and trl_bridge.is_flash(used)
    if own_flash and not trl_bridge.has_varlen(str(used)):
        return f"the model's attention {used!r} has no call for sequences of any lengths (`flash_attn_varlen_func`)"
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
    if rate > 0:
        return f"a dropout of {rate:g} is active, which draws other masks for other rows"
    return ""


def attention_of(model: nn.Module) -> str | None:
    """Return transformers' name of the model's attention; None for a model of another library."""
    inner = _inner(model)
    if isinstance(inner, PreTrainedModel):
        return inner.config.get_text_config()._attn_implementation
    return None


def _of_run(trainer: UpdatePort) -> str:
    """Return why this run's settings do not allow shared prompts; "" if they do."""
    if trainer.lab_settings.update.is_off:
        return "`update` is off"
    if kept_by_engine(trainer.args):
        return "tokens are scored among those that the engine kept (`top_k`)"
    if trainer.algorithm.value is not None:
        return "a critic (`value`) reads the prompt's last place in every row"
    model = trainer.accelerator.unwrap_model(trainer.model)
    if trl_bridge.form_of(attention_of(model)) == "flex" and trainer.accelerator.device.type == "cpu":
        return "FlexAttention has no backward on a CPU (`attn_implementation: sdpa`)"
    kind = trainer.accelerator.distributed_type.value
    sharded = getattr(trainer.accelerator, "is_fsdp2", False)
    if kind not in ("NO", "MULTI_CPU", "MULTI_GPU") and not sharded:
        return f"it was not tested with weights in parts by {kind} (DDP and FSDP2 are)"
    if trainer.args.torch_compile or trl_bridge.is_compiled(trainer.accelerator, trainer.model):
        return "every bin has another form, which `torch.compile` would compile anew"
    if trainer.args.use_transformers_continuous_batching:
        return "`use_transformers_continuous_batching` puts an attention of its own in place of the model's"
    if trl_bridge.may_bring_images(trainer):
        return "the rows may bring images"
    return ""


def _apart(found: Tensor, expected: Tensor) -> Tensor:
    """Return |difference|; 0 where both are the same NaN or infinity. (A NaN of broken weights is left to the guard; it
    is no reason not to share.)"""
    same = (found == expected) | (found.isnan() & expected.isnan())
    return (found - expected).abs().masked_fill(same, 0.0)


def _some_groups(part: Bin) -> Bin:
    """Return a bin of the first few completions of the first few prompts of ``part``, with what a forward reads of
    it."""
    steps = torch.arange(part.input_ids.size(1), device=part.input_ids.device)
    of_prompt = steps <= part.take[:, :1]
    _, prompt = part.input_ids.masked_fill(~of_prompt, -1).unique(dim=0, return_inverse=True)
    found: dict[int, list[int]] = {}
    for row, of in enumerate(prompt.tolist()):
        found.setdefault(of, []).append(row)
    rows = [row for group in [*found.values()][:PROMPTS] for row in group[:COMPLETIONS]]
    inputs: dict[str, Any] = {
        name: None if (value := getattr(part, name)) is None else value.expand_as(part.input_ids)[rows]
        for name in ("input_ids", "labels", "position_ids", "attention_mask")
    }
    return replace(part, take=part.take[rows], layout=None, **inputs)


def _inner(model: nn.Module) -> Any:
    """Return the transformers model below an adapter."""
    return getattr(model, "get_base_model", lambda: model)()
