"""Flash attention on packed rows: one call for sequences of any lengths, by transformers' own function.

The sequences of a packed row are one after another, so queries and outputs stay where they are. Only keys and values
are gathered: for each completion its prompt's, and its own without the head's. If there are more keys than queries, a
flash kernel aligns its causal mask so that the last query sees all keys. So the head, a completion's first query, sees
the whole prompt, and its query number i (from 0) sees the prompt and i tokens of the completion.

The model keeps its attention's name, which transformers asks for in many places. The function that is registered under
that name is wrapped once; without a packed row it does what it did before.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import embedding
from transformers import AttentionInterface
from transformers.modeling_flash_attention_utils import lazy_import_flash_attention
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from grpo_lab.trainer.trl_bridge.packed_layout import Spans, sent

_WRAPPED = "_reads_packed_rows"


@dataclass(frozen=True)
class Varlen:
    """What a flash kernel has to know of a packed row with n sequences.

    Attributes:
        keys: long ``[K]``, places in the row of each sequence's keys, one sequence after another.
        ends_of_queries, ends_of_keys: int ``[n + 1]``, 0 and then the place where each sequence ends, among the row's
            tokens and among ``keys``.
        most_queries, most_keys: number of queries and of keys in the longest sequence.
    """

    keys: Tensor
    ends_of_queries: Tensor
    ends_of_keys: Tensor
    most_queries: int
    most_keys: int

    @staticmethod
    def of(spans: Spans, device: torch.device) -> Varlen:
        """Make it from the sequences of a row, with tensors on ``device``."""
        parts = []
        for start, size, prompt, prompt_size, head in zip(
            spans.start, spans.size, spans.prompt, spans.prompt_size, spans.head, strict=True
        ):
            parts += [np.arange(prompt, prompt + prompt_size), np.arange(start + head, start + size)]
        ends = [np.concatenate([[0], sizes.cumsum()]).astype(np.int32) for sizes in (spans.size, spans.keys)]
        ends_of_queries, ends_of_keys = (sent(torch.from_numpy(found), device) for found in ends)
        keys = sent(torch.from_numpy(np.concatenate(parts)), device)
        return Varlen(keys, ends_of_queries, ends_of_keys, int(spans.size.max()), int(spans.keys.max()))

    def gathered(self, values: Tensor) -> Tensor:
        """Gather keys or values at ``keys``: ``[1, heads, S, d]`` → ``[1, heads, K, d]``."""
        flat = values[0].transpose(0, 1).flatten(1)
        taken = embedding(self.keys, flat)  # unlike index_select's, its backward adds in a fixed order on a GPU
        return taken.unflatten(1, (-1, values.size(3))).transpose(0, 1).unsqueeze(0)

    @property
    def arguments(self) -> dict[str, Any]:
        """The keyword arguments of transformers' flash attention."""
        return {
            "cu_seq_lens_q": self.ends_of_queries, "cu_seq_lens_k": self.ends_of_keys,
            "max_length_q": self.most_queries, "max_length_k": self.most_keys,
        }  # fmt: skip


def is_flash(attention: str | None) -> bool:
    """Return whether transformers uses its flash kernels for an attention of this name."""
    return attention is not None and "flash" in attention and not attention.startswith("paged|")


def has_varlen(attention: str) -> bool:
    """Return whether the flash kernel of this name has a call for sequences of different lengths."""
    functions, _ = lazy_import_flash_attention(attention)
    return functions[1] is not None


def reads_packed_rows(attention: str) -> None:
    """Make an attention read packed rows: wrap the function that transformers has under this name, unless it is wrapped
    already."""
    served = ALL_ATTENTION_FUNCTIONS[attention]
    if not hasattr(served, _WRAPPED):
        AttentionInterface.register(attention, _wrapped(served))


def _wrapped(served: Callable[..., tuple[Tensor, Any]]) -> Callable[..., tuple[Tensor, Any]]:
    """Return an attention function that reads packed rows by ``served``, and is ``served`` for any other row."""

    def attention(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
        shared_prompts: Varlen | None = None, **options: Any,
    ) -> tuple[Tensor, Any]:  # fmt: skip
        if shared_prompts is None:
            return served(module, query, key, value, attention_mask, **options)
        keys = shared_prompts.gathered(key)
        values = shared_prompts.gathered(value)
        return served(module, query, keys, values, None, **(options | shared_prompts.arguments))

    setattr(attention, _WRAPPED, True)
    return attention
