"""Forwards in the place of TRL's: bins, given positions, and an LM head for scored tokens only.

``completion_log_probs`` scores a bin, ``score`` is the forward below it, and ``forwards_replaced`` puts such a forward
in the place of those that TRL runs at generation. Most other functions are contexts for speed: TRL's head, transformers
and torch do what is meant for one padded batch, and a bin needs less.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from accelerate.utils import is_compiled_module
from torch import Tensor
from transformers import masking_utils
from trl.models.utils import disable_gradient_checkpointing
from trl.trainer import distillation_trainer, utils

from grpo_lab.trainer.trl_bridge.kept import over_kept
from grpo_lab.trainer.trl_bridge.names import MULTIMODAL_FIELDS, is_multimodal, replaced
from grpo_lab.trainer.trl_bridge.packed_layout import sent
from grpo_lab.trainer.trl_bridge.values import inside

#: Number of tokens that TRL's head takes at once on a CPU.
CPU_TILE = 512


def completion_log_probs(
    accelerator: Any,
    model: torch.nn.Module,
    input_ids: Tensor,
    labels: Tensor,
    position_ids: Tensor,
    attention_mask: Tensor | None = None,
    on_host: Tensor | None = None,
    kept: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Compute log-probs and entropies ``[B, L - 1]``, in nats, of the tokens of a bin by TRL's fused LM head, at the
    trainer's sampling temperature. Entry t belongs to token t + 1; a token that is not scored gets 0. Entropies are
    None if the head makes none (TRL's reference model).

    TRL feeds left-padded rows without positions, so a row's rotary angles depend on its padding. Given the positions
    that a row has there, the same row with other padding gets the same numbers here.

    On a CPU TRL's head projects every position onto the vocabulary and drops most of it; on a GPU it asks the device
    which positions are scored, and waits. If the labels are known on the host, only scored positions go from the
    backbone to the head, as one row of ``shift_labels``, without waiting. This is not done under ``torch.compile``,
    where it depends on a setting of torch whether a changed hook is noticed.

    Args:
        input_ids: long ``[B, L]``, rows padded on the right, where a causal model cannot look.
        labels: long ``[B, L]``, the tokens to score; −100: not scored.
        position_ids: long ``[B, L]``.
        attention_mask: long ``[B, L]``, needed only for a hole in a row.
        on_host: the labels on the host, if ``labels`` are on a GPU.
        kept: int ``[B, L - 1, K]``, the tokens among which each token is scored (``trl_bridge.kept``); None: all.

    Raises:
        ValueError: ``kept`` is given, and the labels are not on the host or the model is compiled.
    """
    mask = {}
    if attention_mask is not None:
        mask = {"attention_mask": attention_mask}
    inputs = {"input_ids": input_ids, "position_ids": position_ids, **mask}
    if input_ids.device.type == "cpu":
        on_host = labels
    if kept is not None and (on_host is None or is_compiled(accelerator, model)):
        raise ValueError("`top_p`, `top_k`, `min_p`: not exact with `torch.compile`; leave one of them out")
    if on_host is None or is_compiled(accelerator, model):
        with accelerator.autocast(), one_sequence_a_row(input_ids.device):
            output = model(**inputs, labels=labels, fused_lm_head=True)
        return output.log_probs, output.entropy

    following = torch.nn.functional.pad(on_host[:, 1:], (0, 1), value=-100)
    scored = following != -100
    found = scored.flatten().nonzero().squeeze(1)
    chosen = sent(following.flatten()[found].unsqueeze(0), input_ids.device)
    places = sent(found, input_ids.device)
    with contextlib.ExitStack() as stack:
        if kept is not None:
            stack.enter_context(over_kept(kept.flatten(0, 1)[kept_places(found, scored.size(1), kept.device)]))
        output = score(accelerator, model, inputs, places, chosen)

    def spread(values: Tensor) -> Tensor:
        return values.new_zeros(scored.numel()).index_put((places,), values.squeeze(0)).view_as(scored)[:, :-1]

    return spread(output.log_probs), None if output.entropy is None else spread(output.entropy)


def kept_places(found: Tensor, length: int, device: torch.device) -> Tensor:
    """Convert places in a flattened ``[B, length]`` to places in the flattened ``[B, length - 1]`` without each row's
    last column, where no token is scored."""
    return sent(found - found // length, device)


@contextlib.contextmanager
def one_sequence_a_row(device: torch.device) -> Iterator[None]:
    """Keep transformers, inside the block, from searching the positions of a row for several sequences.

    A row of a bin is one sequence, or comes with its own mask. The search would run in every forward, and the host
    would wait until the GPU has finished all bins before this one. Nothing is changed on a CPU.
    """
    with contextlib.ExitStack() as stack:
        if device.type != "cpu" and hasattr(masking_utils, "find_packed_sequence_indices"):
            stack.enter_context(replaced(masking_utils, "find_packed_sequence_indices", lambda position_ids: None))
        yield


@contextlib.contextmanager
def of_any_shape(device: torch.device) -> Iterator[None]:
    """Switch off cuDNN's attention on a GPU inside the block, which then runs fast for rows of any shape. cuDNN is
    torch's first choice on Hopper, but plans anew for every shape, and every bin has another one (an update of the 0.5B
    shape on an H200: 1.24 s with it, 0.47 s without)."""
    if device.type != "cuda" or not torch.backends.cuda.cudnn_sdp_enabled():
        yield
        return
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(True)


@contextlib.contextmanager
def all_are_scored() -> Iterator[None]:
    """Tell TRL's head, inside the block, that all positions that it gets are scored. Where Triton runs it would search
    for positions without a label, and wait for the answer; here they never reach it."""
    with contextlib.ExitStack() as stack:
        if hasattr(utils, "_use_triton"):  # the kernels check for Triton on their own
            stack.enter_context(replaced(utils, "_use_triton", lambda device: False))
        yield


def score(accelerator: Any, model: torch.nn.Module, inputs: dict[str, Any], places: Tensor, chosen: Tensor) -> Any:
    """Run the model's forward on ``inputs``, and TRL's fused head for n tokens only: token i of ``chosen`` ``[1, n]``
    is scored from the hidden states at place ``places[i]`` of the flattened batch. Returns the model's output, with
    log-probs and entropies ``[1, n]``."""

    def pick(_module: torch.nn.Module, _args: Any, output: Any) -> Any:
        output.last_hidden_state = output.last_hidden_state.flatten(0, 1).index_select(0, places).unsqueeze(0)
        return output

    hook = backbone(accelerator, model).register_forward_hook(pick)
    with accelerator.autocast(), hook, one_sequence_a_row(places.device), all_are_scored():
        return model(**inputs, shift_labels=chosen, fused_lm_head=True)


@contextlib.contextmanager
def energies_for_log_probs() -> Iterator[None]:
    """Let TRL's head, inside the block, return each token's score energy in the place of its log-prob.

    That is the squared norm of the gradient of log π by the logits, 1 − 2π + Σ_v π_v² ≥ 0, where π is the token's
    probability and π_v that of each token v of the vocabulary, at the sampling temperature. It has no gradient here.
    The head computes Σπ² in its tiles on request; TRL's trainer does not ask for it.
    """
    head = utils._ChunkedLogProbFunction

    class Energies:
        @staticmethod
        def apply(*given: Any) -> tuple[Tensor, None, None, None, None]:
            log_probs, _, log_squares, *_ = head.apply(*given[:-1], ("log_probs", "log_sum_sq_probs"))
            return (1 - 2 * log_probs.exp() + log_squares.exp()).clamp(min=0), None, None, None, None

    with replaced(utils, "_ChunkedLogProbFunction", Energies):
        yield


@contextlib.contextmanager
def scored_alone() -> Iterator[None]:
    """Let the fused head of TRL's SFT, DPO and other trainers skip positions without a label, inside the block, on a
    CPU too. TRL skips them only where Triton runs; the kernels check that on their own. TRL 1.15 has no such check:
    there nothing changes, and all positions are scored."""
    with contextlib.ExitStack() as stack:
        for module in (utils, distillation_trainer):
            if (asks := getattr(module, "_use_triton", None)) is not None:
                on_cpu = functools.partial(_or_on_cpu, asks)
                stack.enter_context(replaced(module, "_use_triton", on_cpu))
        yield


@contextlib.contextmanager
def small_tiles(device: torch.device) -> Iterator[None]:
    """Let TRL's head, inside the block, take `CPU_TILE` tokens at once on a CPU, forward and backward.

    TRL's own 4,096 suit a GPU. On a CPU they mean a dozen passes over a tile that no cache holds (1.5 times as long at
    Qwen's vocabulary, twice at a small one). The weight's gradient adds the same summands in another order. TRL 1.15
    takes all tokens at once, which is not changed.
    """
    head = sys.modules.get("trl.kernels.chunked_logprob")
    with contextlib.ExitStack() as stack:
        if device.type == "cpu" and hasattr(head, "TOKEN_CHUNK_SIZE"):
            stack.enter_context(replaced(head, "TOKEN_CHUNK_SIZE", CPU_TILE))
        yield


def _or_on_cpu(asks: Callable[[torch.device], bool], device: torch.device) -> bool:
    """Return whether ``asks(device)`` is true or the device is a CPU."""
    return device.type == "cpu" or asks(device)


def stock_forward(trainer: Any, model: Any, rows: Mapping[str, Any], **options: Any) -> tuple[Any, Any, Any]:
    """Run TRL's own forward on padded ``rows``. Returns the completions' log-probs ``[B, T]``, their entropies and the
    router's loss; the last two are None unless ``options`` ask for them."""
    return trainer._get_per_token_logps_and_entropies(
        model,
        torch.cat([rows["prompt_ids"], rows["completion_ids"]], dim=1),
        torch.cat([rows["prompt_mask"], rows["completion_mask"]], dim=1),
        rows["completion_ids"].size(1),
        **options,
        **{name: rows.get(name) for name in MULTIMODAL_FIELDS},
    )


def coarsest(model: torch.nn.Module) -> torch.dtype:
    """Return the coarsest dtype of at least 16 bits among the model's weights, which limits the precision of its
    log-probs. The first weight's dtype would not do: with ``cast_lm_head_to_fp32`` a tied embedding is float32, and the
    layers are not."""
    found = {p.dtype for p in model.parameters() if p.is_floating_point() and p.element_size() > 1}
    return max(found, key=lambda dtype: torch.finfo(dtype).eps, default=torch.float32)


@contextlib.contextmanager
def fp32_head_in_words(asked: bool) -> Iterator[None]:
    """Turn the AttributeError of TRL's constructor, inside the block, into a ValueError that says the reason, if the
    error is that it cannot cast the head. ``asked``: whether ``cast_lm_head_to_fp32`` is set."""
    try:
        yield
    except AttributeError as error:
        if not asked or "embed_tokens" not in str(error):
            raise
        raise ValueError(
            "`cast_lm_head_to_fp32` and a head that is tied to the embeddings: TRL looks for the embeddings at "
            f"`model.embed_tokens`, and they are not there ({error}), as inside PEFT's wrapper: leave it out, train "
            "without an adapter, or untie the head (`tie_word_embeddings`)"
        ) from error


def is_compiled(accelerator: Any, model: torch.nn.Module) -> bool:
    """Return whether ``model`` or the layers below its head run through ``torch.compile``."""
    modules = (accelerator.unwrap_model(model), backbone(accelerator, model))
    return any(is_compiled_module(module) or module._compiled_call_impl is not None for module in modules)


def backbone(accelerator: Any, model: torch.nn.Module) -> torch.nn.Module:
    """Return the layers below the LM head, inside every wrapper; TRL's fused forward calls them as ``base_model``."""
    return inside(accelerator.unwrap_model(model)).base_model


@contextlib.contextmanager
def forwards_replaced(
    trainer: Any, forward: Callable[[Any, Tensor, Tensor, int], Tensor], without_policy: bool = False
) -> Iterator[list[str]]:
    """Replace TRL's forwards without gradient at generation, inside the block, by
    ``forward(model, input_ids, attention_mask, T)``, which returns log-probs ``[B, T]``.

    With ``without_policy`` the policy's forward (old log-probs) is not run, and TRL gets zeros; the caller must drop
    what TRL makes of them. TRL asks for this forward before it knows the rewards, over all rows. The reference's
    forwards are always replaced. With PEFT they run through the same model object as the policy's; TRL asks for the
    policy first and only once, so only the first call is left out. Multimodal forwards stay TRL's.

    Yields a list that holds ``"policy"`` once the policy's forward was left out.
    """
    original = trainer._get_per_token_logps_and_entropies
    left_out: list[str] = []

    @functools.wraps(original)
    def answered(
        model: Any, input_ids: Tensor, attention_mask: Tensor, logits_to_keep: int, *args: Any, **kwargs: Any
    ) -> Any:
        if args or kwargs.get("compute_entropy") or kwargs.get("compute_aux_loss") or is_multimodal(kwargs):
            return original(model, input_ids, attention_mask, logits_to_keep, *args, **kwargs)
        if without_policy and model is trainer.model and not left_out:
            left_out.append("policy")
            return torch.zeros(input_ids.size(0), logits_to_keep, device=input_ids.device), None, None
        return forward(model, input_ids, attention_mask, logits_to_keep), None, None

    with replaced(trainer, "_get_per_token_logps_and_entropies", answered):
        yield left_out


def positions_given(
    accelerator: Any, model: torch.nn.Module, position_ids: Tensor | None
) -> contextlib.AbstractContextManager[Any]:
    """Return a context in which every forward of ``model`` gets ``position_ids`` ``[B, L]``, which TRL does not pass.
    With None nothing is changed."""
    if position_ids is None:
        return contextlib.nullcontext()

    def give(_module: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        return args, {**kwargs, "position_ids": position_ids}

    return accelerator.unwrap_model(model).register_forward_pre_hook(give, with_kwargs=True)


@contextlib.contextmanager
def without_autocast(accelerator: Any, model: torch.nn.Module) -> Iterator[None]:
    """Switch off mixed precision inside the block: accelerate's ``autocast`` does nothing, and the policy's forward
    runs without the wrapper that accelerate gave it, if any."""
    inner = accelerator.unwrap_model(model)
    plain = None
    if accelerator.mixed_precision != "no":
        plain = getattr(inner, "_original_forward", None)
    with contextlib.ExitStack() as stack:
        stack.enter_context(replaced(accelerator, "autocast", contextlib.nullcontext))
        if plain is not None:
            stack.enter_context(replaced(inner, "forward", plain))
        yield


def without_checkpointing(model: Any, args: Any) -> contextlib.AbstractContextManager[Any]:
    """Return TRL's own context that switches off gradient checkpointing, for forwards without gradient."""
    return disable_gradient_checkpointing(model, args.gradient_checkpointing_kwargs)
