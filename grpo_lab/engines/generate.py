"""`model.generate` for groups: equal prompts are read once, and rows that have ended leave the batch.

    transformers    every row reads its prompt; all rows go on until the last one ends; each token copies the cache
    here            equal neighbouring rows read their prompt as one; ended rows leave every `STRETCH` tokens; a token
                    is written into the cache without copying it; on a CPU a draw takes one random number

A row's computation and the distribution of its tokens are unchanged: transformers' own `generate` makes them, a stretch
at a time, with transformers' own cache. Two things differ: the random numbers, and so the tokens that are drawn; and a
repetition penalty, which in transformers takes padding for text of the row, and here does not.
"""

from __future__ import annotations

import inspect
import logging
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from functools import cache
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, GenerationConfig
from transformers.cache_utils import DynamicLayer
from transformers.generation.logits_process import LogitsProcessor, RepetitionPenaltyLogitsProcessor

logger = logging.getLogger("grpo_lab")

#: Number of tokens between two checks of which rows have ended. A check costs about as much as a token.
STRETCH = 6

#: Settings of a generation config whose effect on a token does not depend on where its completion began.
_PER_TOKEN = {
    "max_new_tokens", "do_sample", "temperature", "top_k", "top_p", "min_p", "typical_p", "epsilon_cutoff",
    "eta_cutoff", "repetition_penalty", "no_repeat_ngram_size", "suppress_tokens", "bad_words_ids",
    "renormalize_logits", "use_cache", "pad_token_id", "bos_token_id", "eos_token_id", "disable_compile",
    "transformers_version", "_from_model_config",
}  # fmt: skip
#: Values at which other settings have no effect.
_NEUTRAL = {
    "min_new_tokens": 0, "min_length": 0, "num_beams": 1, "num_return_sequences": 1, "num_beam_groups": 1,
    "diversity_penalty": 0.0, "length_penalty": 1.0, "encoder_repetition_penalty": 1.0,
    "encoder_no_repeat_ngram_size": 0,
}  # fmt: skip


def generate_by_groups(
    stock: Callable[..., Any],
    model: Any,
    input_ids: Tensor,
    attention_mask: Tensor,
    generation_config: GenerationConfig,
    logits_processor: Any = None,
    **more: Any,
) -> Tensor:
    """Complete prompts, as ``model.generate`` does; return prompts and completions ``[B, L + T]``.

    If `not_by_groups` gives a reason, ``stock`` makes all completions by itself, and the reason is logged once.

    Args:
        stock: the model's own ``generate``, which makes each stretch of tokens.
        input_ids: prompts ``[B, L]``, padded on the left; the rows of a group stand together.
        attention_mask: 1 for a token, 0 for padding ``[B, L]``.
        more: further arguments of ``generate``.
    """
    arguments = {"logits_processor": logits_processor, **more}
    filled = filled_config(generation_config, model)
    width = input_ids.size(1)
    room = int(filled.max_new_tokens or 0)
    read = None
    reason = not_by_groups(model, generation_config, more)
    if reason is None:
        read = prompts_read_once(model, input_ids, attention_mask, room)
        reason = "it does not keep a prompt's keys and values as they are read"
    if read is None:
        say_left_to_stock(reason)
        inputs = {"input_ids": input_ids, "attention_mask": attention_mask}
        return stock(**inputs, generation_config=generation_config, **arguments)
    config = deepcopy(generation_config)
    ends = torch.tensor(ends_of(filled), dtype=torch.long, device=input_ids.device)
    result = input_ids.new_full((input_ids.size(0), width + room), padding_of(filled))
    result[:, :width] = input_ids
    rows = torch.arange(input_ids.size(0), device=input_ids.device)
    longest = width
    ids = input_ids
    mask = attention_mask
    while longest < width + room and rows.numel():
        config.max_new_tokens = min(STRETCH, width + room - longest)
        if filled.repetition_penalty not in (None, 1.0):
            config.repetition_penalty = 1.0
            own = _PenaltyOnText(filled.repetition_penalty, begins=mask[:, :width].argmax(1))
            arguments["logits_processor"] = [own, *(logits_processor or ())]
        with one_number_a_draw():
            ids = stock(input_ids=ids, attention_mask=mask, past_key_values=read, generation_config=config, **arguments)
        written = ids[:, longest:]
        longest = ids.size(1)
        result[rows, longest - written.size(1) : longest] = written
        goes_on = (~torch.isin(written, ends).any(1)).nonzero().squeeze(1)
        if goes_on.numel() < rows.numel():
            rows = rows[goes_on]
            ids = ids[goes_on]
            mask = mask[goes_on]
            read.batch_select_indices(goes_on)
        mask = torch.cat([mask, mask.new_ones(mask.size(0), written.size(1))], dim=1)
    return result[:, :longest]


@contextmanager
def one_number_a_draw() -> Iterator[None]:
    """Replace ``torch.multinomial(p, 1)`` on a CPU, within the block and in this thread: it takes one uniform number u
    of 53 bits per row, and returns the first token whose cumulated p is above u Σp.

    torch's own takes one for each token of the vocabulary, a quarter of a small model's generation time. Where Σp is
    not finite or not above 0, torch's own is called and raises its error.
    """
    thread = threading.get_ident()
    with _LOCK:
        if not +_INSIDE:
            torch.multinomial = _draw  # type: ignore[assignment]
        _INSIDE[thread] += 1
    try:
        yield
    finally:
        with _LOCK:
            _INSIDE[thread] -= 1
            if not +_INSIDE:
                _INSIDE.clear()
                torch.multinomial = _THEIRS


#: torch's own function for draws.
_THEIRS = torch.multinomial
#: Thread → how many blocks of `one_number_a_draw` it is in, and the lock of this count.
_LOCK = threading.Lock()
_INSIDE = Counter[int]()


def _draw(probs: Tensor, num_samples: int, *rest: Any, **more: Any) -> Tensor:
    """Stand in for ``torch.multinomial``: draw as `one_number_a_draw` says, and call torch's own in all other cases."""
    ours = num_samples == 1 and probs.device.type == "cpu" and _INSIDE[threading.get_ident()] > 0
    if not ours or rest or more:
        return _THEIRS(probs, num_samples, *rest, **more)
    up_to = probs.cumsum(-1, dtype=torch.float64)
    whole = up_to[..., -1:]
    if not bool(whole.isfinite().all() and (whole > 0).all()):
        return _THEIRS(probs, num_samples)
    below = (torch.rand_like(whole) * whole).minimum(whole.nextafter(torch.zeros_like(whole)))
    return torch.searchsorted(up_to, below, right=True)


class _PenaltyOnText(LogitsProcessor):  # type: ignore[misc]
    """transformers' repetition penalty without a row's left padding. The padding is replaced by the row's first token,
    since a token is penalised once, however often it stands there. ``begins``: position of each row's first token, long
    ``[b]``."""

    def __init__(self, penalty: float, begins: Tensor) -> None:
        self.stock = RepetitionPenaltyLogitsProcessor(penalty)
        self.begins = begins[:, None]

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        places = torch.arange(input_ids.size(1), device=input_ids.device)
        text = torch.where(places < self.begins, input_ids.gather(1, self.begins), input_ids)
        return self.stock(text, scores)  # type: ignore[no-any-return]


def not_by_groups(model: Any, config: GenerationConfig, more: Any = None) -> str | None:
    """Return the reason why transformers' ``generate`` must make the completions by itself; None if there is none.
    ``more``: arguments of ``generate`` beside the tokens and the config."""
    from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled
    from transformers.integrations.fsdp import is_fsdp_managed_module

    filled = filled_config(config, model)
    own = _own_model(model)
    layers = {type(layer) for layer in DynamicCache(config=model.config).layers}
    if is_deepspeed_zero3_enabled() or is_fsdp_managed_module(model):
        return "weights are sharded, so ranks make every token together"
    if getattr(getattr(model, "active_peft_config", None), "is_prompt_learning", False):
        return "the adapter is learnt prompts, which stand before a row's own"
    if not own._supports_default_dynamic_cache() or "past_key_values" not in _forward_takes(own):
        return f"{type(own).__name__} has no cache of keys and values"
    if filled.use_cache is False:
        return "`use_cache` is false in the generation config, or in the model's own"
    if model.config.is_encoder_decoder or layers - {DynamicLayer}:
        return f"its cache is no plain one: {sorted(one.__name__ for one in layers) or 'none'}"
    if more := {name for name, value in (more or {}).items() if value is not None and name != "synced_gpus"}:
        return f"inputs beside the text: {sorted(more)}"
    if asked := _asked(config):
        return f"the generation config asks for {sorted(asked)}"
    if asked := _asked(filled):
        return f"the model's own generation config asks for {sorted(asked)}"
    if filled.max_new_tokens:
        return None
    return "the generation config has no `max_new_tokens`"


@cache
def say_left_to_stock(reason: str) -> None:
    """Log once, on the main process, why transformers' ``generate`` makes the completions row by row."""
    if int(os.environ.get("RANK", "0")) == 0:
        logger.info("completions are made by transformers' `generate`, row by row: %s", reason)


def _own_model(model: Any) -> Any:
    """Return the transformers model inside an adapter or `torch.compile`."""
    inner = getattr(model, "_orig_mod", model)
    if hasattr(inner, "get_base_model"):
        return inner.get_base_model()
    return inner


def _forward_takes(model: Any) -> set[str]:
    """Return the names of the arguments of ``forward``, in the model's class and its bases."""
    forwards = [vars(one)["forward"] for one in type(model).__mro__ if "forward" in vars(one)]
    return {name for forward in forwards for name in inspect.signature(forward).parameters}


def filled_config(config: GenerationConfig, model: Any) -> GenerationConfig:
    """Return ``config`` with its unset values filled from the model's own configuration, as `generate` does.
    ``max_length`` is not filled: `generate` ignores it beside ``max_new_tokens``."""
    filled = deepcopy(config)
    own = model.generation_config.to_dict()
    own.pop("max_length", None)
    filled.update(**own, defaults_only=True, allow_custom_entries=True)
    return filled


def _asked(config: GenerationConfig) -> set[str]:
    """Return the names of settings that a config asks for and whose effect depends on where a completion began, or on
    several rows. Each stretch of `STRETCH` tokens would begin them anew."""
    said = config.to_diff_dict().items()
    names = {name for name, value in said if not (value is None or value is False or value == _NEUTRAL.get(name))}
    return names - _PER_TOKEN


def ends_of(config: GenerationConfig) -> list[int]:
    """Return the ids of the tokens that end a completion."""
    ends = config.eos_token_id
    if ends is None:
        return []
    return [int(one) for one in (ends if isinstance(ends, list) else [ends])]


def padding_of(config: GenerationConfig) -> int:
    """Return the token id that fills a row behind its end: the padding token, else an end token, else 0."""
    return next((int(token) for token in (config.pad_token_id, *ends_of(config)) if token is not None), 0)


def prompts_read_once(model: Any, ids: Tensor, mask: Tensor, room: int) -> DynamicCache | None:
    """Return a cache with the keys and values of all prompts without their last token, which the first stretch reads.

    Each group's prompt goes through the model once; its keys and values are copied to the group's rows.

    Args:
        ids: prompts ``[B, L]``, padded on the left.
        mask: their attention mask ``[B, L]``.
        room: how many more tokens a row may get.

    Returns:
        The cache; None if the model did not cache exactly these tokens.
    """
    begins = torch.ones(ids.size(0), dtype=torch.bool, device=ids.device)
    begins[1:] = (ids[1:] != ids[:-1]).any(1) | (mask[1:] != mask[:-1]).any(1)
    cache = DynamicCache(config=model.config)
    layers = [_WithRoom(ids.size(1) + room) for _ in cache.layers]
    cache.layers = list(layers)
    if ids.size(1) > 1:
        first = ids[begins, :-1]
        seen = mask[begins, :-1]
        positions = (seen.long().cumsum(1) - 1).clamp(min=0)  # as `generate` counts: left padding does not
        named = _forward_takes(_own_model(model))
        more = {
            name: value for name, value in {"position_ids": positions, "logits_to_keep": 1}.items() if name in named
        }
        model(input_ids=first, attention_mask=seen, past_key_values=cache, use_cache=True, **more)
        if not all(layer.is_initialized and layer.get_seq_length() == first.size(1) for layer in layers):
            return None
        cache.batch_select_indices(begins.long().cumsum(0) - 1)
    return cache


class _WithRoom(DynamicLayer):  # type: ignore[misc]
    """transformers' cache layer with spare room: its tensors are the first part of larger ones (``whole``), so a new
    token is written behind the others without a copy. When the room is used up, it grows to twice the tokens held, but
    not beyond ``length`` tokens.
    """

    def __init__(self, length: int) -> None:
        super().__init__()
        self.length = length
        self.whole = list[Tensor]()

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append keys and values ``[b, heads, t, d]`` of new tokens; return those of all, ``[b, heads, S, d]``."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
            self.whole = [new[:, :, :0] for new in (key_states, value_states)]
        before = self.get_seq_length()
        after = before + key_states.size(2)
        if after > self.whole[0].size(2):
            room = max(after, min(self.length, 2 * after))
            self.whole = [self._with_room(whole, before, room) for whole in self.whole]
        for whole, new in zip(self.whole, (key_states, value_states), strict=True):
            whole[:, :, before:after] = new
        self.keys, self.values = (whole[:, :, :after] for whole in self.whole)
        return self.keys, self.values

    @staticmethod
    def _with_room(whole: Tensor, held: int, room: int) -> Tensor:
        larger = whole.new_empty(*whole.shape[:2], room, whole.size(3))
        larger[:, :, :held] = whole[:, :, :held]
        return larger

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the rows ``indices``, long ``[b']``, in this order; a row may be repeated."""
        length = self.get_seq_length()
        before = self.whole
        self.whole = [whole.new_empty(indices.numel(), *whole.shape[1:]) for whole in before]
        self.keys, self.values = (whole[:, :, :length] for whole in self.whole)
        for kept, whole in zip((self.keys, self.values), before, strict=True):  # the room behind them holds nothing yet
            kept.copy_(whole[:, :, :length].index_select(0, indices))

    def _another_way(self, *_: Any, **__: Any) -> None:
        raise NotImplementedError("rows of this cache are chosen by batch_select_indices alone")

    crop = reorder_cache = batch_repeat_interleave = _another_way
