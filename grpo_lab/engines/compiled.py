"""`model.generate` in compiled forwards of few shapes, for a device where a token costs what its launches cost.

Keys and values stay in one place (`StaticRoom`), whose length is a power of two. A batch has a power of two of rows:
it is filled up with copies that end at once, and shrinks when half of its rows have ended. So the forward of a token
has few shapes, each of which torch compiles and captures once. transformers' own `generate` makes the tokens out of its
own static cache, `STRETCH` at a time. A token is drawn from what the model says of its row alone, as by
`generate_by_groups`; which one is drawn differs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import CompileConfig, GenerationConfig, StaticCache
from transformers.cache_utils import StaticLayer
from transformers.generation import StoppingCriteria

from grpo_lab.engines.generate import ends_of, filled_config, not_by_groups, one_number_a_draw, prompts_read_once

#: tokens between two looks at which rows have ended; the first of each stretch is a plain forward
STRETCH = 64


class CompiledGenerate:
    """Replacement of a model's ``generate`` whose forwards are compiled. A trainer keeps one: the memory for keys and
    values, and the compiled graphs that use it, then serve every call.

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
        """Left-padded prompts ``[B, L]`` with their completions ``[B, L + T]``, as ``stock``, the ``generate`` of
        ``model``, returns them.

        Raises:
            ValueError: `refuse_compiled` says why this cannot be had.
        """
        refuse_compiled(model, generation_config, more)
        said = filled_config(generation_config, model)
        ends = torch.tensor(ends_of(said), dtype=torch.long, device=input_ids.device)
        pad = int(next((token for token in (said.pad_token_id, *ends.tolist()) if token is not None), 0))
        if input_ids.size(1) == 1:  # what is read before is all but a prompt's last token: here a column of padding
            ids = torch.nn.functional.pad(input_ids, (1, 0), value=pad)
            mask = torch.nn.functional.pad(attention_mask, (1, 0), value=0)
            return self(stock, model, ids, mask, generation_config, **more)[:, 1:]
        read = prompts_read_once(model, input_ids, attention_mask, room=0)
        if read is None:
            reason = "the model does not keep a prompt's keys and values as they are read"
            raise ValueError(f"{REFUSED} {reason}; {INSTEAD}")
        width = input_ids.size(1)
        most = width + int(said.max_new_tokens)
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
        """The room of the last call where it is of this size, else another one in its place."""
        like = read.layers[0].keys
        size = (rows, length, like.dtype, like.device)
        if self.room is None or self.room.size != size:
            self.room = None  # its memory goes before there is another one
            self.room = StaticRoom(read, rows, length, model_config)
        return self.room


REFUSED = "`rollout.generate` is 'compiled', and"
INSTEAD = "leave it out, or set it to 'stock'"


def refuse_compiled(model: Any, config: GenerationConfig, more: Mapping[str, Any] | None = None) -> None:
    """Raise ValueError where completions cannot be made by compiled forwards."""
    beside = {name: value for name, value in (more or {}).items() if name not in _SERVED}
    reason = not_by_groups(model, config, beside)
    if reason is None and not getattr(model, "_can_compile_fullgraph", False):
        reason = f"{type(model).__name__} says that its forward cannot be compiled as a whole"
    if reason is not None:
        raise ValueError(f"{REFUSED} {reason}; {INSTEAD}")


#: arguments of ``generate`` that are handed on
_SERVED = {"logits_processor", "disable_compile"}


def power_of_two(least: int) -> int:
    """The smallest power of two that is not below ``least``."""
    return 1 << (least - 1).bit_length()


@dataclass(frozen=True)
class _OpenRows:
    """Rows in the making, a power of two of them: ids and mask ``[b, S]``; long ``rows`` ``[b]``, where each stands in
    the result; bool ``live`` ``[b]``, whether it still writes there."""

    ids: Tensor
    mask: Tensor
    rows: Tensor
    live: Tensor

    @classmethod
    def of(cls, ids: Tensor, mask: Tensor) -> _OpenRows:
        """Make them of all rows of a call, filled up with copies of the first."""
        rows = torch.arange(len(ids), device=ids.device)
        return cls(ids, mask, rows, torch.ones_like(rows, dtype=torch.bool)).of_rows(_filled_up(rows))

    def of_rows(self, kept: Tensor) -> _OpenRows:
        """Pick some of its rows; one that is picked twice is live once."""
        again = torch.zeros_like(kept, dtype=torch.bool)
        again[1:] = kept[1:] <= kept[:-1]
        return _OpenRows(self.ids[kept], self.mask[kept], self.rows[kept], self.live[kept] & ~again)

    def after(self, written: Tensor, ends: Tensor) -> _OpenRows:
        """Return the rows with what was ``written`` ``[b, t]`` behind them."""
        return _OpenRows(
            torch.cat([self.ids, written], dim=1),
            torch.cat([self.mask, torch.ones_like(written)], dim=1),
            self.rows,
            self.live & ~torch.isin(written, ends).any(1),
        )

    def halved(self) -> Tensor | None:
        """The rows of a smaller batch with all that are live; None where there is none, or no row is live."""
        live = self.live.nonzero().squeeze(1)
        if len(live) == 0 or power_of_two(len(live)) == len(self.rows):
            return None
        return _filled_up(live)


def _filled_up(rows: Tensor) -> Tensor:
    """Fill ``rows`` up to a power of two with its first one."""
    return torch.cat([rows, rows[:1].expand(power_of_two(len(rows)) - len(rows))])


class _EndsAtOnce(StoppingCriteria):  # type: ignore[misc]
    """Rows that nobody reads have ended: a stretch is over when the others have."""

    def __init__(self, ended: Tensor) -> None:
        self.ended = ended

    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Tensor:
        return self.ended


class StaticRoom:
    """Keys and values ``[rows, heads, length, d]`` of every layer, and static caches of their first 1, 2, 4, … rows.

    A captured graph reads and writes fixed addresses, so there is one room for all batches of a size.
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
        """Put what was ``read`` of the call's prompts at the beginning of each row; all else is 0."""
        for whole, layer in zip(self._whole, read.layers, strict=True):
            for part, own in zip(whole, (layer.keys, layer.values), strict=True):
                part.zero_()  # a masked key counts for nothing unless it is NaN
                part[:, :, : own.size(2)] = own[rows]

    def choose(self, rows: Tensor, length: int) -> None:
        """Move ``rows`` to the front, with their first ``length`` tokens."""
        for whole in self._whole:
            for part in whole:
                part[: len(rows), :, :length] = part[rows, :, :length]

    def first(self, rows: int, length: int) -> Any:
        """The cache of the first ``rows``, which holds ``length`` tokens."""
        if rows not in self._caches:
            made = StaticCache(config=self._config, max_cache_len=self.size[1])
            made.layers = [_LayerInRoom(keys[:rows], values[:rows]) for keys, values in self._whole]
            self._caches[rows] = made
        for layer in self._caches[rows].layers:
            layer.cumulative_length.fill_(length)
        return self._caches[rows]


class _LayerInRoom(StaticLayer):  # type: ignore[misc]
    """transformers' static layer in tensors that are there already."""

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
