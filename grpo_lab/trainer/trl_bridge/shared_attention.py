"""A group's prompt computed once: rows of a bin as one packed row, and the attention that reads it.

A packed row is, group after group, ``[prompt, head 1, completion 1, head 2, completion 2, …]``. A head is a copy of the
prompt's last token with its position: its output scores the completion's first token, and nobody attends to its key,
so every completion token sees each prompt token exactly once. Prompt tokens attend causally among themselves; a
completion's tokens attend to the whole prompt and causally to their own. All else in a transformer works token by
token, so log-probs and gradients are those of the unshared rows, up to the order of sums.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention as attend
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from grpo_lab.trainer.trl_bridge.forwards import score

#: the name under which transformers knows the attention
SHARED_PROMPT = "shared_prompt"


@dataclass(frozen=True)
class SharedGroup:
    """A group inside a packed row: its prompt ``[start, end)``; long ``[G, L]`` ``places`` of its G completions, each
    from its head on, in the packed row (a shorter one repeats its head); ``real`` long ``[sum of lengths]``: the
    entries of ``places``, flattened, that are no repetition."""

    start: int
    end: int
    places: Tensor
    real: Tensor


@dataclass(frozen=True)
class PackedRow:
    """``[1, S]`` ids and positions; ``scored`` long ``[n]``, the packed places whose outputs score ``targets`` ``[n]``,
    and ``home`` ``[n]``, where each stands in the flattened ``[B, L - 1]`` of the bin."""

    input_ids: Tensor
    position_ids: Tensor
    groups: tuple[SharedGroup, ...]
    scored: Tensor
    targets: Tensor
    home: Tensor

    @property
    def shares(self) -> bool:
        """Whether some prompt has two completions."""
        return any(group.places.size(0) > 1 for group in self.groups)


def packed_row(input_ids: Tensor, labels: Tensor, position_ids: Tensor) -> PackedRow | None:
    """The packed row of a bin ``[B, L]`` (arguments as for ``completion_log_probs``); None where nothing is scored.

    A row's prompt is what stands before its first label, its completion ends with its last one: what comes after, a
    causal model's scored tokens cannot see. Rows share a prompt where its tokens and its first position are equal.
    """
    following = (labels[:, 1:] != -100).tolist()
    tokens, starts = input_ids.tolist(), position_ids[:, 0].tolist()
    together: dict[tuple[int, ...], list[tuple[int, int, int]]] = {}
    for row, marks in enumerate(following):
        if True in marks:
            first, last = marks.index(True), len(marks) - marks[::-1].index(True)
            together.setdefault((starts[row], *tokens[row][: first + 1]), []).append((row, first, last))
    if not together:
        return None
    device, width = input_ids.device, input_ids.size(1)
    source: list[int] = []  # of each packed token, in the flattened bin
    scored: list[int] = []
    home: list[int] = []
    groups = []
    for rows in together.values():
        (row, first, _), start = rows[0], len(source)
        source += range(row * width, row * width + first + 1)
        end, heads = len(source), []
        for row, first, last in rows:
            heads.append((len(source), last - first))
            home += [row * (width - 1) + at for at in range(first, last) if following[row][at]]
            scored += [len(source) + at - first for at in range(first, last) if following[row][at]]
            source += range(row * width + first, row * width + last)
        longest = max(length for _, length in heads)
        places = [[head + at if at < length else head for at in range(longest)] for head, length in heads]
        real = [i * longest + at for i, (_, length) in enumerate(heads) for at in range(length)]
        groups.append(
            SharedGroup(start, end, torch.tensor(places, device=device), torch.tensor(real, device=device))
        )  # fmt: skip
    of, back = torch.tensor(source, device=device), torch.tensor(home, device=device)
    return PackedRow(
        input_ids.flatten()[of].unsqueeze(0),
        position_ids.expand_as(input_ids).flatten()[of].unsqueeze(0),
        tuple(groups),
        torch.tensor(scored, device=device),
        labels[:, 1:].flatten()[back],
        back,
    )


def shared_log_probs(
    trainer: Any, model: nn.Module, packed: PackedRow, shape: torch.Size
) -> tuple[Tensor, Tensor | None]:
    """As ``completion_log_probs`` of the bin of ``shape`` ``[B, L]`` that was packed; the model's attention must be
    ``SHARED_PROMPT``. Only scored positions leave the backbone, on every device."""
    # a mask of four dimensions is handed on as it is: transformers would make one of [S, S], which nobody reads
    inputs = {"attention_mask": packed.input_ids.new_ones(1, 1, 1, 1), "shared_groups": packed.groups}
    inputs |= {"input_ids": packed.input_ids, "position_ids": packed.position_ids}
    output = score(trainer, model, inputs, packed.scored, packed.targets.unsqueeze(0))

    def spread(values: Tensor) -> Tensor:
        flat = values.new_zeros(shape[0] * (shape[1] - 1))
        return flat.index_put((packed.home,), values.squeeze(0)).view(shape[0], shape[1] - 1)

    return spread(output.log_probs), None if output.entropy is None else spread(output.entropy)


def shared_prompt_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
    scaling: float | None = None, shared_groups: tuple[SharedGroup, ...] | None = None, **options: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """Attention over a packed row: ``[1, heads, S, d]`` → ``[1, S, heads, d]``. Without ``shared_groups`` (generation,
    bins as ever) it is transformers' ``sdpa``.

    The groups come as an argument of the model's forward, and the name stays set between forwards: gradient
    checkpointing computes a layer again in backward, with the arguments of its forward and the name of *that* moment.
    """
    if shared_groups is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **options)
    repeats = query.size(1) // key.size(1)
    key, value = repeat_kv(key, repeats), repeat_kv(value, repeats)
    made = []
    for group in shared_groups:
        prompt = slice(group.start, group.end)
        q, k, v = (part[:, :, prompt] for part in (query, key, value))
        made.append(attend(q, k, v, is_causal=True, scale=scaling)[0])
        made.append(_completions(group, query, (key, k), (value, v), scaling))
    return torch.cat(made, dim=1).transpose(0, 1).unsqueeze(0), None


def _completions(
    group: SharedGroup, query: Tensor, keys: tuple[Tensor, Tensor], values: tuple[Tensor, Tensor], scaling: float | None
) -> Tensor:
    """``[heads, sum of lengths, d]`` of a group's completions; ``keys``, ``values``: of the packed row, the prompt."""
    rows, length = group.places.shape

    def own(part: Tensor) -> Tensor:  # [G, heads, L, d]
        taken = part[0].index_select(1, group.places.flatten())
        return taken.unflatten(1, (rows, length)).transpose(0, 1)

    def with_prompt(part: tuple[Tensor, Tensor]) -> Tensor:
        return torch.cat([part[1].expand(rows, -1, -1, -1), own(part[0])], dim=2)

    seen = torch.ones(length, length, dtype=torch.bool, device=query.device).tril()
    seen[:, 0] = False  # the head stands in the prompt already
    mask = torch.cat([seen.new_ones(length, group.end - group.start), seen], dim=1)
    found = attend(own(query), with_prompt(keys), with_prompt(values), attn_mask=mask, scale=scaling)
    return found.transpose(0, 1).flatten(1, 2).index_select(1, group.real)


AttentionInterface.register(SHARED_PROMPT, shared_prompt_attention)
AttentionMaskInterface.register(SHARED_PROMPT, sdpa_mask)
