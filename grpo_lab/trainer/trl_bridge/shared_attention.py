"""A group's prompt computed once: rows of a bin as one packed row, and the attention that reads it.

A packed row is, group after group, ``[prompt, head 1, completion 1, head 2, completion 2, …]``. A head is a copy of the
prompt's last token with its position: its output scores the completion's first token. Nobody attends to a head's key,
so every completion token sees each prompt token exactly once. Prompt tokens attend causally among themselves; a
completion's tokens attend to the whole prompt and causally to their own. All else in a transformer works token by
token, so log-probs and gradients are those of the unshared rows, up to the order of sums.

Three attentions read it. For a model with ``sdpa`` it is `SHARED_PROMPT`, which calls ``sdpa`` on rectangles (`Tiles`).
For one with ``flex_attention`` it is `SHARED_FLEX`, which gives the kernel a mask of blocks. A flash kernel keeps its
name and gets sequences of any lengths (`Varlen`).
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask
from torch.nn.functional import embedding
from torch.nn.functional import scaled_dot_product_attention as attend
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from grpo_lab.trainer.trl_bridge.flex_mask import block_mask, flex_attend, on_ladder
from grpo_lab.trainer.trl_bridge.forwards import score
from grpo_lab.trainer.trl_bridge.packed_layout import Ints, PackedGroup, Spans, sent
from grpo_lab.trainer.trl_bridge.varlen import Varlen, is_flash, reads_packed_rows
from grpo_lab.update import cheapest_cuts

#: How an attention reads a packed row.
Form = Literal["tiles", "flex", "varlen"]
#: transformers' name of FlexAttention.
FLEX = "flex_attention"
#: transformers' names of our attention, which reads a packed row; for any other row it is ``sdpa``.
SHARED_PROMPT = "shared_prompt"
SHARED_FLEX = "shared_prompt_flex"
#: Cost of one more call of attention, in the number of keys of padding that take as long.
CALL = 512


@dataclass(frozen=True)
class Tile:
    """One call of attention on m sequences of similar length.

    Attributes:
        queries: long ``[m, q]``, places in the packed row of the tokens that attend; padded with 0.
        keys: long ``[m, k]``, places of the tokens that they attend to; padded with 0.
        seen: bool ``[m or 1, 1, q, k]``, the mask; None: causal, where queries and keys are the same tokens.
    """

    queries: Tensor
    keys: Tensor
    seen: Tensor | None


@dataclass(frozen=True)
class Tiles:
    """All calls of attention for a packed row of S tokens. Long ``back`` ``[S]``: the place of each token's output when
    the outputs of all calls, flattened, are joined."""

    calls: tuple[Tile, ...]
    back: Tensor


@dataclass(frozen=True)
class PackedRow:
    """A bin ``[B, L]`` as one row of S tokens, in which completions of the same prompt share it.

    Attributes:
        input_ids: long ``[1, S]``.
        position_ids: long ``[1, S]``.
        seen: which tokens each token attends to, in the form that the model's attention reads.
        scored: long ``[n]``, places in the row whose outputs predict ``targets``.
        targets: long ``[n]``, the tokens that are predicted.
        home: long ``[n]``, where each result belongs in the flattened ``[B, L - 1]`` of the bin.
        shares: whether some prompt has two completions or more.
    """

    input_ids: Tensor
    position_ids: Tensor
    seen: Tiles | BlockMask | Varlen
    scored: Tensor
    targets: Tensor
    home: Tensor
    shares: bool


@dataclass(frozen=True)
class _Sequence:
    """A sequence of a packed row: the places of its tokens, which attend (``queries``), and of all tokens that the last
    of them attends to (``keys``)."""

    queries: Ints
    keys: Ints


def packed_row(
    input_ids: Tensor, labels: Tensor, position_ids: Tensor, prompts: Tensor, form: Form = "tiles",
    device: torch.device | None = None,
) -> PackedRow | None:  # fmt: skip
    """Pack a bin ``[B, L]`` into one row, in the ``form`` that the model's attention reads; None if nothing is scored.

    The row is laid out on the host, so nothing waits for a GPU if the bin is on the host. A row's completion ends with
    its last label, since a causal model's scored tokens cannot see what comes after; it may begin with tokens without a
    label (a tool's answer). Rows share a prompt if its tokens and its first position are equal. For FlexAttention the
    packed row is padded with copies of the bin's first token, which nobody attends to.

    Args:
        input_ids, labels, position_ids: long ``[B, L]``, as for ``completion_log_probs``.
        prompts: long ``[B]``, number of tokens of each row's prompt.
        device: where the packed row's tensors are to be; None: where the bin is.
    """
    device = device or input_ids.device
    input_ids = input_ids.cpu()
    labels = labels.cpu()
    position_ids = position_ids.cpu()
    following = (labels[:, 1:] != -100).numpy()
    tokens = input_ids.numpy()
    first = prompts.cpu().numpy() - 1  # each row's last token of the prompt
    last = following.shape[1] - following[:, ::-1].argmax(1)
    rows_of_prompts = _together(np.flatnonzero(following.any(1)), position_ids[:, 0].numpy(), tokens, first)
    if not rows_of_prompts:
        return None
    width = tokens.shape[1]
    length = 0
    source: list[Ints] = []  # place of each packed token in the flattened bin
    scored: list[Ints] = []
    home: list[Ints] = []
    groups = []
    for rows in rows_of_prompts:
        prompt = np.arange(first[rows[0]] + 1)
        source.append(rows[0] * width + prompt)
        groups.append(PackedGroup(length + prompt, []))
        length += prompt.size
        for row in rows:
            own = np.arange(first[row], last[row])
            asked = own[following[row, own]]
            home.append(row * (width - 1) + asked)
            scored.append(length + asked - first[row])
            source.append(row * width + own)
            groups[-1].completions.append(length + own - first[row])
            length += own.size
    filled = on_ladder(length) if form == "flex" else length
    source.append(np.zeros(filled - length, dtype=np.int64))

    sources = torch.from_numpy(np.concatenate(source))
    homes = torch.from_numpy(np.concatenate(home))
    return PackedRow(
        sent(input_ids.flatten()[sources].unsqueeze(0), device),
        sent(position_ids.expand_as(input_ids).flatten()[sources].unsqueeze(0), device),
        _read_by(form, groups, filled, device),
        sent(torch.from_numpy(np.concatenate(scored)), device),
        sent(labels[:, 1:].flatten()[homes], device),
        sent(homes, device),
        any(len(group.completions) > 1 for group in groups),
    )


def _together(rows: Ints, starts: Ints, tokens: Ints, last: Ints) -> list[list[int]]:
    """Divide rows by their prompts. Two rows share one if they begin at the same position (``starts``) and have the
    same ``tokens`` up to the end of the prompt, whose last place in a row is in ``last``."""
    found: dict[tuple[int, bytes], list[int]] = {}
    for row in rows.tolist():
        found.setdefault((int(starts[row]), tokens[row, : last[row] + 1].tobytes()), []).append(row)
    return list(found.values())


def _read_by(form: Form, groups: list[PackedGroup], length: int, device: torch.device) -> Tiles | BlockMask | Varlen:
    """Return which tokens attend to which in a packed row of ``length`` tokens, in the given form."""
    if form == "tiles":
        return _tiles(groups, length, device)
    spans = Spans.of(groups)
    if form == "flex":
        return block_mask(spans, length, device)
    return Varlen.of(spans, device)


def _tiles(groups: list[PackedGroup], length: int, device: torch.device) -> Tiles:
    """Make the calls of attention for a packed row of ``length`` tokens: first for prompts, then for completions with
    their prompts, each call with sequences of similar length."""
    prompts = [_Sequence(group.prompt, group.prompt) for group in groups]
    # a completion's tokens attend to its prompt and to each other, but not to the head, a copy of a prompt's token
    completions = [
        _Sequence(own, np.concatenate([group.prompt, own[1:]])) for group in groups for own in group.completions
    ]
    calls: list[Tile] = []
    back = np.empty(length, dtype=np.int64)
    done = 0  # outputs of the calls so far
    for sequences in (prompts, completions):
        for together in _of_like_length(sequences):
            queries = _rectangle([one.queries for one in together])
            keys = _rectangle([one.keys for one in together])
            for row, one in enumerate(together):
                back[one.queries] = done + row * queries.shape[1] + np.arange(one.queries.size)
            done += queries.size
            seen = None
            if sequences is completions:
                seen = _seen(together, queries.shape[1], keys.shape[1], device)
            calls.append(Tile(sent(torch.from_numpy(queries), device), sent(torch.from_numpy(keys), device), seen))
    return Tiles(tuple(calls), sent(torch.from_numpy(back), device))


def _of_like_length(sequences: list[_Sequence]) -> list[list[_Sequence]]:
    """Divide sequences into calls of similar length, by the least cost of padding and of calls (``CALL``)."""
    sequences = sorted(sequences, key=lambda one: -one.keys.size)
    lengths = np.asarray([one.keys.size for one in sequences])
    starts = cheapest_cuts(lengths, int(lengths.sum()) * int(lengths[0]), CALL).tolist()
    return [sequences[start:end] for start, end in pairwise([*starts, len(sequences)])]


def _seen(together: list[_Sequence], queries: int, keys: int, device: torch.device) -> Tensor:
    """Make the mask of a call, bool ``[m or 1, 1, q, k]``: query number i (from 0) of a completion sees all tokens of
    its prompt and i of its own. If all prompts have the same length, one mask serves all m completions. It is made on
    the device, so only one number per completion is sent."""
    before = np.asarray([one.keys.size - one.queries.size + 1 for one in together])  # the prompts' tokens
    if (before == before[0]).all():
        before = before[:1]
    reach = sent(torch.from_numpy(before), device).unsqueeze(1) + torch.arange(queries, device=device)
    return (torch.arange(keys, device=device) < reach.unsqueeze(2)).unsqueeze(1)


def _rectangle(rows: list[Ints]) -> Ints:
    """Stack lists of places as rows of one array, padded on the right with 0."""
    found = np.zeros((len(rows), max(map(len, rows))), dtype=np.int64)
    for row, places in enumerate(rows):
        found[row, : places.size] = places
    return found


def shared_log_probs(
    accelerator: Any, model: nn.Module, packed: PackedRow, shape: torch.Size
) -> tuple[Tensor, Tensor | None]:
    """Compute log-probs and entropies ``[B, L - 1]`` of a bin from its packed row, as ``completion_log_probs`` does
    from the bin itself: 0 where nothing is scored, and no entropies if the head makes none.

    ``shape`` is the bin's, ``(B, L)``. The row must be packed in the form that the model's attention reads
    (``form_of``, ``served_as``). Only scored positions go from the backbone to the LM head, on every device.
    """
    inputs = {
        "input_ids": packed.input_ids, "position_ids": packed.position_ids, "shared_prompts": packed.seen,
        # a mask of four dimensions is passed on by transformers, which would else make a useless one of [S, S]
        "attention_mask": packed.input_ids.new_ones(1, 1, 1, 1),
    }  # fmt: skip
    output = score(accelerator, model, inputs, packed.scored, packed.targets.unsqueeze(0))

    def spread(values: Tensor) -> Tensor:
        flat = values.new_zeros(shape[0] * (shape[1] - 1))
        return flat.index_put((packed.home,), values.squeeze(0)).view(shape[0], shape[1] - 1)

    return spread(output.log_probs), None if output.entropy is None else spread(output.entropy)


def shared_prompt_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
    scaling: float | None = None, shared_prompts: Tiles | BlockMask | None = None, **options: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """Compute attention over a packed row, ``[1, heads, S, d]`` → ``[1, S, heads, d]``. Without ``shared_prompts``
    (generation, ordinary bins) it is transformers' ``sdpa``.

    Which tokens attend to which is passed as an argument of the model's forward (``shared_prompts``), and the
    attention's name stays set between forwards. The reason is gradient checkpointing: it computes a layer again in the
    backward, with the arguments of the layer's forward but with the attention's name at the time of the backward.
    """
    if shared_prompts is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **options)
    if isinstance(shared_prompts, BlockMask):
        return flex_attend(module, query, key, value, shared_prompts, scaling=scaling, **options)
    repeats = query.size(1) // key.size(1)
    flat = [part[0].transpose(0, 1).flatten(1) for part in (query, key, value)]  # [S, heads · d]

    def at(part: int, places: Tensor) -> Tensor:  # [m, heads, length, d]
        taken = embedding(places, flat[part])  # index_select with a faster backward on a CPU
        taken = taken.unflatten(2, (-1, (query, key, value)[part].size(3))).transpose(1, 2)
        return taken if part == 0 else repeat_kv(taken, repeats)

    made = []
    for tile in shared_prompts.calls:
        sequences = at(0, tile.queries), at(1, tile.keys), at(2, tile.keys)
        found = attend(*sequences, attn_mask=tile.seen, is_causal=tile.seen is None, scale=scaling)
        made.append(found.transpose(1, 2).flatten(2).flatten(0, 1))
    return embedding(shared_prompts.back, torch.cat(made)).unflatten(1, (-1, value.size(3))).unsqueeze(0), None


def form_of(attention: str | None) -> Form:
    """Return the form of packed rows that an attention reads; ``attention`` is transformers' name of it."""
    if is_flash(attention):
        return "varlen"
    if attention in (FLEX, SHARED_FLEX):
        return "flex"
    return "tiles"


def served_as(attention: str | None) -> str:
    """Return the name to which a model's attention must be changed to read packed rows. A flash kernel keeps its name,
    and its function is wrapped here."""
    form = form_of(attention)
    if form == "varlen":
        assert attention is not None
        reads_packed_rows(attention)
        return attention
    if form == "flex":
        return SHARED_FLEX
    return SHARED_PROMPT


for _name in (SHARED_PROMPT, SHARED_FLEX):
    AttentionInterface.register(_name, shared_prompt_attention)
    AttentionMaskInterface.register(_name, sdpa_mask)
