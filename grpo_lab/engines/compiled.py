"""`model.generate` with compiled forwards of few shapes, where kernel launches take most of a token's time.

Keys and values are kept in one buffer (`StaticRoom`), whose length is a power of two. The number of rows is one, too:
a batch is padded with copies of a row, whose tokens are not used, and halved when half of its rows have ended. So the
forward of a token has few shapes, each of which torch compiles and captures once. transformers' own `generate` makes
the tokens with its own static cache, `STRETCH` tokens at a time. A token is drawn from its row's distribution alone, as
in `generate_by_groups`, but with other random numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import CompileConfig, DynamicCache, GenerationConfig, StaticCache
from transformers.cache_utils import StaticLayer
from transformers.generation import StoppingCriteria

from grpo_lab.engines.generate import (
    ends_of,
    filled_config,
    not_by_groups,
    one_number_a_draw,
    padding_of,
    prompts_read_once,
)

#: Number of tokens between two checks of which rows have ended. The first token of each stretch is an uncompiled
#: forward.
STRETCH = 64


class CompiledGenerate:
    """Replacement of a model's ``generate`` whose forwards are compiled.

    A trainer keeps one: the memory for keys and values, and the compiled graphs that use it, then serve every call.

    Args:
        compile_config: transformers' options of ``torch.compile``.
    """

    def __init__(self, compile_config: CompileConfig | None = None) -> None:
        self.compile_config = compile_config or CompileConfig()
        self.room: StaticRoom | None = None

    def __call__(
        self,
        stock: Callable[..., Any],
        model: Any,
        input_ids: Tensor,
        attention_mask: Tensor,
        generation_config: GenerationConfig,
        **more: Any,
    ) -> Tensor:
        """Complete prompts, as ``model.generate`` does; return prompts and completions ``[B, L + T]``.

        Args:
            stock: the model's own ``generate``, which makes each stretch of tokens.
            input_ids: prompts ``[B, L]``, padded on the left; ``attention_mask`` has 0 for padding.
            more: ``logits_processor``, handed on to ``stock``, and ``disable_compile``, which is ignored.

        Raises:
            ValueError: `refuse_compiled` finds a reason against compiled forwards.
        """
        refuse_compiled(model, generation_config, more)
        filled = filled_config(generation_config, model)
        ends = torch.tensor(ends_of(filled), dtype=torch.long, device=input_ids.device)
        pad = padding_of(filled)
        if input_ids.size(1) == 1:  # the cache must hold a token before the last: a column of padding
            ids = torch.nn.functional.pad(input_ids, (1, 0), value=pad)
            mask = torch.nn.functional.pad(attention_mask, (1, 0), value=0)
            return self(stock, model, ids, mask, generation_config, **more)[:, 1:]
        read = _read(model, input_ids, attention_mask)
        width = input_ids.size(1)
        most = width + int(filled.max_new_tokens)
        result = input_ids.new_full((input_ids.size(0), most), pad)
        result[:, :width] = input_ids

        batch = _OpenRows.of(input_ids, attention_mask)
        room = self._room_for(read, len(batch.rows), power_of_two(most), model.config)
        room.fill(read, batch.rows)
        config = deepcopy(generation_config)
        config.compile_config = self.compile_config
        config.disable_compile = False  # TRL asks for it with every call
        more.pop("disable_compile", None)
        longest = width
        while longest < most and batch.live.any():
            config.max_new_tokens = min(STRETCH, most - longest)
            with one_number_a_draw():
                ids = stock(
                    input_ids=batch.ids,
                    attention_mask=batch.mask,
                    past_key_values=room.first(len(batch.rows), longest - 1),
                    generation_config=config,
                    stopping_criteria=[_EndsAtOnce(~batch.live)],
                    **more,
                )
            written = ids[:, longest:]
            result[batch.rows[batch.live], longest : ids.size(1)] = written[batch.live]
            longest = ids.size(1)
            batch = batch.after(written, ends)
            if (kept := batch.halved()) is not None:
                room.choose(kept, longest - 1)
                batch = batch.of_rows(kept)
        return result[:, :longest]

    def _room_for(self, read: Any, rows: int, length: int, model_config: Any) -> StaticRoom:
        """Return the buffer of the last call if it has ``rows`` rows of ``length`` tokens, and the dtype and device of
        the cache ``read``; else replace it by a new one."""
        like = read.layers[0].keys
        size = (rows, length, like.dtype, like.device)
        if self.room is None or self.room.size != size:
            self.room = None  # free its memory before the new one is made
            self.room = StaticRoom(read, rows, length, model_config)
        return self.room


REFUSED = "`rollout.generate` is 'compiled', and"
INSTEAD = "leave it out, or set it to 'stock'"


def refuse_compiled(model: Any, config: GenerationConfig, more: Mapping[str, Any] | None = None) -> None:
    """Raise ValueError if completions cannot be made by compiled forwards, because of the model, the generation config,
    or an argument of ``generate`` in ``more`` that is not served."""
    beside = {name: value for name, value in (more or {}).items() if name not in _SERVED}
    reason = not_by_groups(model, config, beside)
    if reason is None and not getattr(model, "_can_compile_fullgraph", False):
        reason = f"{type(model).__name__} says that its forward cannot be compiled as a whole"
    if reason is not None:
        raise ValueError(f"{REFUSED} {reason}; {INSTEAD}")


#: Arguments of ``generate`` that are served.
_SERVED = {"logits_processor", "disable_compile"}


def _read(model: Any, input_ids: Tensor, attention_mask: Tensor) -> DynamicCache:
    """Return `prompts_read_once`. Raises ValueError if the model does not cache a prompt's tokens as they are."""
    read = prompts_read_once(model, input_ids, attention_mask, room=0)
    if read is None:
        reason = "the model does not keep a prompt's keys and values as they are read"
        raise ValueError(f"{REFUSED} {reason}; {INSTEAD}")
    return read


def power_of_two(least: int) -> int:
    """Return the smallest power of two that is not below ``least``."""
    return 1 << (least - 1).bit_length()


@dataclass(frozen=True)
class _OpenRows:
    """Rows of a batch that is being generated; their number b is a power of two.

    Attributes:
        ids: tokens so far ``[b, S]``.
        mask: attention mask ``[b, S]``.
        rows: each row's index in the result, long ``[b]``.
        live: whether the row's tokens are still written to the result, bool ``[b]``: it has not ended, and is no copy.
    """

    ids: Tensor
    mask: Tensor
    rows: Tensor
    live: Tensor

    @classmethod
    def of(cls, ids: Tensor, mask: Tensor) -> _OpenRows:
        """Make a batch of all rows of a call, padded with copies of the first."""
        rows = torch.arange(len(ids), device=ids.device)
        return cls(ids, mask, rows, torch.ones_like(rows, dtype=torch.bool)).of_rows(_filled_up(rows))

    def of_rows(self, kept: Tensor) -> _OpenRows:
        """Select rows by the indices ``kept``: ascending, then copies of the first. The copies are not live."""
        again = torch.zeros_like(kept, dtype=torch.bool)
        again[1:] = kept[1:] <= kept[:-1]
        return _OpenRows(self.ids[kept], self.mask[kept], self.rows[kept], self.live[kept] & ~again)

    def after(self, written: Tensor, ends: Tensor) -> _OpenRows:
        """Append the new tokens ``written`` ``[b, t]``. A row with one of the tokens ``ends`` is no longer live."""
        return _OpenRows(
            torch.cat([self.ids, written], dim=1),
            torch.cat([self.mask, torch.ones_like(written)], dim=1),
            self.rows,
            self.live & ~torch.isin(written, ends).any(1),
        )

    def halved(self) -> Tensor | None:
        """Return indices of a smaller batch with all live rows. None if no power of two below b holds them, or if no
        row is live."""
        live = self.live.nonzero().squeeze(1)
        if len(live) == 0 or power_of_two(len(live)) == len(self.rows):
            return None
        return _filled_up(live)


def _filled_up(rows: Tensor) -> Tensor:
    """Pad the indices ``rows`` to a power of two with copies of the first."""
    return torch.cat([rows, rows[:1].expand(power_of_two(len(rows)) - len(rows))])


class _EndsAtOnce(StoppingCriteria):  # type: ignore[misc]
    """Stopping criterion that counts the rows ``ended``, bool ``[b]``, as ended from the start. So a stretch is over as
    soon as all other rows have ended."""

    def __init__(self, ended: Tensor) -> None:
        self.ended = ended

    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Tensor:
        return self.ended


class StaticRoom:
    """Buffer for keys and values ``[rows, heads, length, d]`` of every layer, and static caches over its first 1, 2, 4,
    … rows.

    A captured graph reads and writes fixed addresses, so all batches of one size share these tensors.

    Args:
        like: a cache whose layers have the heads, dtype and device to use.
        rows: rows of the buffer.
        length: tokens of a row.
        model_config: the model's configuration.
    """

    def __init__(self, like: Any, rows: int, length: int, model_config: Any) -> None:
        keys = like.layers[0].keys
        self.size = (rows, length, keys.dtype, keys.device)
        self._config = model_config
        self._whole = [
            tuple(part.new_zeros(rows, part.size(1), length, part.size(3)) for part in (layer.keys, layer.values))
            for layer in like.layers
        ]
        self._caches: dict[int, Any] = {}

    def fill(self, read: Any, rows: Tensor) -> None:
        """Copy row ``rows[i]`` of the cache ``read``, a prompt's keys and values, to the start of row i of the buffer;
        set all else to 0."""
        for whole, layer in zip(self._whole, read.layers, strict=True):
            for part, own in zip(whole, (layer.keys, layer.values), strict=True):
                part.zero_()  # a masked key has no effect unless it is NaN
                part[:, :, : own.size(2)] = own[rows]

    def choose(self, rows: Tensor, length: int) -> None:
        """Copy the first ``length`` tokens of the rows ``rows`` to the first rows of the buffer."""
        for whole in self._whole:
            for part in whole:
                part[: len(rows), :, :length] = part[rows, :, :length]

    def first(self, rows: int, length: int) -> Any:
        """Return a transformers cache over the first ``rows`` rows that says it holds ``length`` tokens."""
        if rows not in self._caches:
            made = StaticCache(config=self._config, max_cache_len=self.size[1])
            made.layers = [_LayerInRoom(keys[:rows], values[:rows]) for keys, values in self._whole]
            self._caches[rows] = made
        for layer in self._caches[rows].layers:
            layer.cumulative_length.fill_(length)
        return self._caches[rows]


class _LayerInRoom(StaticLayer):  # type: ignore[misc]
    """transformers' static cache layer over tensors of the buffer instead of its own."""

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        super().__init__(max_cache_len=keys.size(2))
        self.dtype = keys.dtype
        self.device = keys.device
        self.batch_size, self.num_heads, _, self.k_head_dim = keys.shape
        self.v_head_dim = values.size(3)
        self.keys = keys
        self.values = values
        self.cumulative_length: Any = torch.tensor(0, device=keys.device)
        for part in (self.keys, self.values, self.cumulative_length):
            torch._dynamo.mark_static_address(part)
        self.is_initialized = True
