"""Flash attention on packed rows: one call for sequences of any lengths, by transformers' own function.

The sequences of a packed row are one after another, so queries and outputs stay where they are. Only keys and values
are gathered: for each completion its prompt's, and its own behind the head. A flash kernel aligns a causal mask at the
end of both. So a head, the first query, sees the whole prompt, and query i of a completion sees i tokens of its own
more.

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
    """A packed row for a flash kernel.

    Attributes:
        keys: long ``[K]``, places of each sequence's keys, one sequence after another.
        ends_of_queries, ends_of_keys: int ``[n + 1]``, 0 and the place where each sequence ends.
        most_queries, most_keys: the longest sequence of each.
    """

    keys: Tensor
    ends_of_queries: Tensor
    ends_of_keys: Tensor
    most_queries: int
    most_keys: int

    @staticmethod
    def of(spans: Spans, device: torch.device) -> Varlen:
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
        taken = embedding(self.keys, flat)  # as index_select, whose backward adds in no fixed order on a GPU
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
    """Return whether the flash kernel of this name has a call for sequences of any lengths."""
    functions, _ = lazy_import_flash_attention(attention)
    return functions[1] is not None


def reads_packed_rows(attention: str) -> None:
    """Make an attention read packed rows: wrap the function that transformers has under this name, unless that was
    done."""
    served = ALL_ATTENTION_FUNCTIONS[attention]
    if not hasattr(served, _WRAPPED):
        AttentionInterface.register(attention, _wrapped(served))


def _wrapped(served: Callable[..., tuple[Tensor, Any]]) -> Callable[..., tuple[Tensor, Any]]:
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
