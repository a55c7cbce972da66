"""Rows of micro-batches: the fields that each carries, the table of an optimizer step's rows, and bins cut from it.

    dicts of tensors    what TRL's loop shuffles, cuts into micro-batches and buffers; ``Carried`` names the fields
    ``RowTable``        all rows of an optimizer step on this rank, with the same fields
    ``Bin``             the inputs of one forward: some rows of the table, without most of their padding

TRL pads the rows of a micro-batch to the longest prompt and completion of their rank's whole generation batch. In a bin
a row's completion directly follows its prompt, and rows are padded on the right to the longest row *of the bin*.
"""

from __future__ import annotations

import functools
from collections.abc import MutableMapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import pad

from grpo_lab.batch import TASK
from grpo_lab.objectives.mixed import TASK_ROWS, TASK_TOKENS
from grpo_lab.trainer.trl_bridge import COMPLETION_FIELDS

Ints = NDArray[np.int64]
OURS = "grpo_lab."  # begins the names of fields that are not TRL's, which no release of TRL can then use
#: Names of two fields of ``Carried``, which other code also reads by name.
POSITION_OFFSET = f"{OURS}position_offset"
POLICY_VERSION = f"{OURS}policy_version"
CHOSEN = f"{OURS}chosen."
"""A field of this prefix and the name of a selection (``objectives.Selecting``) says which tokens were selected."""
HOLED = -(2**63)
"""Value in place of a prompt's number (a hash of its tokens) if its mask has a hole."""


class _Field:
    """Descriptor of ``Carried``: reads and writes the field ``key`` of its dict."""

    def __init__(self, key: str) -> None:
        self.key = key

    def __get__(self, carried: Carried, _: Any = None) -> Any:
        return carried.fields.get(self.key)

    def __set__(self, carried: Carried, value: Tensor | None) -> None:
        if value is None:
            carried.fields.pop(self.key, None)
        else:
            carried.fields[self.key] = value


class Carried:
    """View of the fields of a micro-batch, table or bin. Reading an attribute reads its field (None if it is missing);
    setting it writes the field, and setting None removes it. B rows, T completion tokens, log-probs in nats.

    Args:
        fields: the dict itself, not a copy.

    Attributes:
        policy_version: long ``[B]`` on the CPU, optimizer steps that the policy had taken when it generated the row.
            For a row of several policies (``rollout.cut_after``) those of the first.
        behaviour_logps: ``[B, T]``, under the policy that sampled the row, as the engine reported them.
        proximal_logps: ``[B, T]``, under the policy before the first update on the batch; the denominator of ratios.
            ``step.log_probs.ProximalSource`` tells by this field, ``as_generated`` and ``unmoved`` where they come
            from.
        ref_logps: ``[B, T]``, under the reference model.
        sampler_weights: ``[B, T]`` or ``[B, 1]``, TRL's sampler correction, if it was computed at generation.
        as_generated: ``[B, T]``, a copy of ``proximal_logps``, by which the update sees whether a team's method changed
            them. A row that is equal uses the log-probs of the loss's own forward, which are rounded otherwise. Absent
            if forwards are random (dropout).
        unmoved: long ``[B]``, 1 if the forward that trains on the row also gives its proximal log-probs. Only in the
            bins of a step whose micro-batches differ in that.
        old_values: float32 ``[B, T]``, the critic's values at generation; only with a critic (``value``).
        returns: float32 ``[B, T]``, the critic's targets; NaN for tokens without one.
        position_offset: long ``[B]``, ``RowTable.offset`` of each row in the batch in which it was generated. Only in a
            batch that was put together from several (``scoring.resample``).
        length_quartile: long ``[B]``, 0 to 3 (``metrics.by_length``); only with the sampler correction or
            ``token_weights_every``.
        bonus_tokens: float ``[B]``, the number of tokens in the row's micro-batch over which its entropy bonus is
            averaged; only while an optimizer step with a bonus is computed.
        group_tokens: long ``[B]``, tokens that carry loss in all completions of the row's prompt, over all ranks; only
            for an aggregation that reads them (``prompt_mean``).
        task: long ``[B]``, the number of the row's task; only with ``tasks``.
        task_rows, task_tokens: float32 ``[B]``, the share of the row's task in the rows, and in the loss tokens, of its
            generation batch; only if a task has denominators of its own.
        pass_rate: float ``[B]``, share of right answers in the row's group, NaN if unknown; for
            ``token_weights_every``.
        kept_tokens: int ``[B, T, K]``, the tokens from which the engine sampled at each place: ids + 1, and 0 for none;
            only with ``top_k`` and the sampler correction (``generation.kept_sets``).
        looked_logps: ``[B, T]``, log-probs from the forward that looks for rows without a gradient (``step.look``);
            only in a step that has one.
        looked_entropies: ``[B, T]`` in nats, from the same forward.
    """

    policy_version = _Field(POLICY_VERSION)
    behaviour_logps = _Field("sampling_per_token_logps")
    proximal_logps = _Field("old_per_token_logps")
    ref_logps = _Field("ref_per_token_logps")
    sampler_weights = _Field("importance_sampling_ratio")
    as_generated = _Field(f"{OURS}as_generated")
    unmoved = _Field(f"{OURS}unmoved")
    length_quartile = _Field(f"{OURS}length_quartile")
    bonus_tokens = _Field(f"{OURS}bonus_tokens")
    group_tokens = _Field(f"{OURS}group_tokens")
    pass_rate = _Field(f"{OURS}pass_rate")
    task = _Field(TASK)
    task_rows = _Field(TASK_ROWS)
    task_tokens = _Field(TASK_TOKENS)
    old_values = _Field(f"{OURS}old_values")
    returns = _Field(f"{OURS}returns")
    position_offset = _Field(POSITION_OFFSET)
    kept_tokens = _Field(f"{OURS}kept_tokens")
    looked_logps = _Field(f"{OURS}looked_logps")
    looked_entropies = _Field(f"{OURS}looked_entropies")

    def __init__(self, fields: MutableMapping[str, Any]) -> None:
        self.fields = fields

    @property
    def chosen(self) -> dict[str, Tensor]:
        """Name of a selection → bool ``[B, T]``, the tokens that its selecting part has chosen."""
        keys = [key for key in self.fields if key.startswith(CHOSEN)]
        return {key.removeprefix(CHOSEN): self.fields[key] for key in keys}


def loss_mask(fields: MutableMapping[str, Any]) -> Tensor:
    """Return bool ``[B, T]``: completion tokens that the policy itself generated (no padding, no tool output)."""
    mask: Tensor = fields["completion_mask"].bool()
    if "tool_mask" in fields:
        return mask & fields["tool_mask"].bool()
    return mask


def row_lengths(fields: MutableMapping[str, Any]) -> tuple[Tensor, Tensor]:
    """Return the numbers of prompt and completion tokens, long ``[B]`` each. Tokens in a hole of a mask (zeros between
    ones, which a team may make) count: they are part of the row, though no token attends to them."""
    return prompt_lengths(fields), reach(fields["completion_mask"])


def prompt_lengths(fields: MutableMapping[str, Any]) -> Tensor:
    """Return the number of prompt tokens, long ``[B]``, as ``row_lengths`` counts them."""
    return reach(fields["prompt_mask"].flip(1))


def reach(mask: Tensor) -> Tensor:
    """Return the place of each row's last token, counted from 1; 0 for a row without tokens."""
    if mask.size(1) == 0:
        return torch.zeros(mask.size(0), dtype=torch.long, device=mask.device)
    steps = torch.arange(1, mask.size(1) + 1, device=mask.device)
    return (steps * mask.bool()).amax(1)


def row_tensors(fields: MutableMapping[str, Any]) -> dict[str, Tensor]:
    """Return the fields that are tensors with one entry per row, ``[B]`` or ``[B, …]``."""
    rows = fields["prompt_ids"].size(0)
    tensors = {name: value for name, value in fields.items() if isinstance(value, Tensor)}
    return {name: value for name, value in tensors.items() if value.dim() >= 1 and value.size(0) == rows}


def has_hole(fields: MutableMapping[str, Any]) -> Tensor:
    """Return bool ``[B]``: whether a mask has a hole. Log-probs from the generation attend to the tokens in it."""
    return holes_in(fields, *row_lengths(fields))


def holes_in(fields: MutableMapping[str, Any], prompts: Tensor, completions: Tensor) -> Tensor:
    """Return what ``has_hole`` returns, from lengths that are known already."""
    return prompts + completions != fields["prompt_mask"].bool().sum(1) + fields["completion_mask"].bool().sum(1)


#: Field → padding value, for fields not padded with 0: TRL sums a ratio's log over padding, too (``vespo``).
FILL = {"importance_sampling_ratio": 1}


@dataclass(frozen=True)
class Bin:
    """Inputs of one forward: n rows of at most L tokens with completions of at most T tokens.

    Attributes:
        input_ids, position_ids: long ``[n, L]``.
        labels: long ``[n, L]``, the tokens whose log-probs the loss reads; −100 for all others.
        attention_mask: long ``[n, L]``, or None if no mask has a hole: a causal model ignores padding on the right.
        take: long ``[n, T]``, the index of each completion token's log-prob among the ``L - 1`` of the forward.
        loss_mask: bool ``[n, T]``, completion tokens that carry loss.
        fields: the table's per-row tensors for these rows, per-token ones cut to ``[n, T]``.
        micro_batch: long ``[n]``, in which micro-batch of the step TRL had the row.
        token_count: float ``[n]``, TRL's token denominator of the row's generation batch. Like ``micro_batch`` it is
            set only if the step's numbers are known (``step.row_numbers``).
        shared: whether the forward computes each prompt once, for all rows that have it.
        layout: a copy of this bin on the host, for code that lays tokens out there; None if this bin is on the host.
    """

    input_ids: Tensor
    labels: Tensor
    position_ids: Tensor
    attention_mask: Tensor | None
    take: Tensor
    loss_mask: Tensor
    fields: dict[str, Tensor]
    micro_batch: Tensor | None = None
    token_count: Tensor | None = None
    shared: bool = False
    layout: Bin | None = None

    @property
    def inputs(self) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
        """The arguments of ``trl_bridge.completion_log_probs``."""
        on_host = None
        if self.layout is not None:
            on_host = self.layout.labels
        return self.input_ids, self.labels, self.position_ids, self.attention_mask, on_host


#: Fields that the host needs to lay out a bin.
LAYOUT = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask", "tool_mask")


@dataclass(frozen=True)
class OnHost:
    """Lengths of prompt and completion in tokens, and whether a mask has a hole, of ``N`` rows: what the host must know
    to cut bins from them."""

    prompts: Ints
    completions: Ints
    holes: NDArray[np.bool_]


@dataclass(frozen=True)
class RowTable:
    """Table of ``N`` rows: prompts padded on the left to P tokens, completions on the right to T, and all other fields.

    Attributes:
        offset: long ``[N]``, the position id of the row's first prompt token. TRL passes none, so its padding counts;
            bins keep that position, and so get TRL's numbers.
        per_token: names of the fields ``[N, T, …]`` that are aligned with the completion.
    """

    fields: dict[str, Tensor]
    offset: Tensor
    per_token: frozenset[str]

    @staticmethod
    def of(window: list[dict[str, Any]]) -> RowTable:
        """Build the table of this rank's micro-batches of an optimizer step, which may be padded to several widths."""
        rows = [row_tensors(batch) for batch in window]
        names = set.intersection(*(set(row) for row in rows)) - {POSITION_OFFSET, POLICY_VERSION}
        offset = torch.cat([row.get(POSITION_OFFSET, row["prompt_ids"].size(1) - prompt_lengths(row)) for row in rows])
        widths = {name: max(row[name].size(1) for row in rows) for name in names if rows[0][name].dim() > 1}
        fields = {}
        for name in sorted(names):
            parts = [row[name] for row in rows]
            fields[name] = torch.cat([fitted(name, part, widths[name]) for part in parts] if name in widths else parts)
        return RowTable(fields, offset, per_token_fields(widths))

    def with_fields(self, fields: dict[str, Tensor]) -> RowTable:
        """Return the table with further fields ``[N, T]``, aligned with the completion."""
        return RowTable({**self.fields, **fields}, self.offset, self.per_token | fields.keys())

    def gathered(self, accelerator: Any) -> RowTable:
        """Return the table of all ranks' rows, in rank order. A collective."""
        if accelerator.num_processes == 1:
            return self
        fields = {}
        for name, value in self.fields.items():
            if value.dim() > 1:
                fill = FILL.get(name, 0)
                value = accelerator.pad_across_processes(value, dim=1, pad_index=fill, pad_first=is_of_prompt(name))
            fields[name] = accelerator.gather(value.contiguous())
        widths = {name: value.size(1) for name, value in fields.items() if value.dim() > 1}
        return RowTable(fields, accelerator.gather(self.offset), per_token_fields(widths))

    @functools.cached_property
    def lengths(self) -> tuple[Tensor, Tensor]:
        return row_lengths(self.fields)

    @functools.cached_property
    def holes(self) -> Tensor:
        return holes_in(self.fields, *self.lengths)

    @functools.cached_property
    def prompt_numbers(self) -> Tensor:
        """A hash of each prompt's tokens, long ``[N]``, to find equal prompts; ``HOLED`` if a mask of the row has a
        hole. It is Σ (token + 1) · wᵏ modulo 2⁶⁴, w a constant, over places k = 1, 2, … from the prompt's end."""
        tokens = ((self.fields["prompt_ids"] + 1) * self.fields["prompt_mask"]).long()
        weights = tokens.new_full((tokens.size(1),), 6364136223846793005).cumprod(0)
        return (tokens * weights.flip(0)).sum(1).masked_fill(self.holes, HOLED)

    @functools.cached_property
    def loss_mask(self) -> Tensor:
        return loss_mask(self.fields)

    @functools.cached_property
    def on_host(self) -> OnHost:
        """Lengths and holes of the rows on the host, from one transfer, after which cutting bins does not wait."""
        prompts, completions, holes = torch.stack([*self.lengths, self.holes.long()]).cpu().numpy()
        return OnHost(prompts, completions, holes.astype(bool))

    @functools.cached_property
    def _layout(self) -> RowTable:
        """A copy of the rows' tokens and masks on the host, one transfer per field."""
        fields = {name: self.fields[name].cpu() for name in LAYOUT if name in self.fields}
        return RowTable(fields, self.offset.cpu(), self.per_token)

    def prepared(self) -> RowTable:
        """Read from the device what the host needs to cut bins, and return this table."""
        _ = self.on_host
        if self.offset.device.type != "cpu":
            _ = self._layout.on_host
        return self

    def bin(self, rows: list[int], limit: int | None = None, shared: bool = False, index: Tensor | None = None) -> Bin:
        """Return the bin of ``rows``. Nothing is read from the device if the table is ``prepared``.

        Args:
            rows: indices in the table. None at all give a dummy row of two tokens without loss, with which a rank
                takes part in the forward of others.
            limit: number of positions that the model has. Right padding that would lie beyond gets the last position.
            shared: whether the forward is to compute each prompt once.
            index: ``rows`` as a tensor on the table's device, if it is there already (``on_device``).
        """
        if index is None:
            index = on_device([rows], self.offset.device)[0]
        prompt, completion = (lengths[index] for lengths in self.lengths)
        padding = self.fields["prompt_ids"].size(1) - prompt
        start = padding  # column of the row's first token, in prompt and completion side by side
        length = 2
        width = 1
        holed = False
        if rows:
            host = self.on_host
            length = int((host.prompts[rows] + host.completions[rows]).max())
            width = max(int(host.completions[rows].max()), 1)
            holed = bool(host.holes[rows].any())
        else:  # the last token of a prompt, and the first of its completion
            start = padding + prompt - 1
            prompt = torch.ones_like(prompt)
            completion = torch.ones_like(completion)
        places = torch.arange(length, device=index.device)
        real = places < (prompt + completion).unsqueeze(1)

        def contiguous(of: str) -> Tensor:
            both = torch.cat([self.fields[f"prompt_{of}"][index], self.fields[f"completion_{of}"][index]], dim=1)
            return both.gather(1, (start.unsqueeze(1) + places).clamp(max=both.size(1) - 1))

        input_ids = contiguous("ids")
        attended = contiguous("mask").bool() & real
        fields = {name: value[index] for name, value in self.fields.items()}
        fields = {name: value[:, :width] if name in self.per_token else value for name, value in fields.items()}
        del fields["prompt_ids"], fields["prompt_mask"]
        loss_mask = self.loss_mask[index, :width] & bool(rows)
        in_completion = places - prompt.unsqueeze(1)
        scored = loss_mask.gather(1, in_completion.clamp(0, width - 1)) & (in_completion >= 0) & real
        positions = (self.offset[index] + start - padding).unsqueeze(1) + places
        if limit is not None:
            positions = torch.where(real, positions, positions.clamp(max=limit - 1))
        return Bin(
            input_ids=input_ids,
            labels=input_ids.masked_fill(~scored, -100),
            position_ids=positions,
            attention_mask=attended.long() if holed else None,
            take=(prompt.unsqueeze(1) - 1 + torch.arange(width, device=index.device)).clamp(max=length - 2),
            loss_mask=loss_mask,
            fields=fields,
            shared=shared,
            layout=self._layout.bin(rows, limit) if index.device.type != "cpu" else None,
        )


def on_device(bins: list[list[int]], device: torch.device) -> list[Tensor]:
    """Send the row indices of all bins to the device in one transfer; long ``[n]`` per bin (row 0 for an empty one)."""
    sizes = [max(len(rows), 1) for rows in bins]
    flat = torch.tensor([row for rows in bins for row in rows or [0]], dtype=torch.long)
    return list(flat.to(device).split(sizes))


def per_token_fields(widths: dict[str, int]) -> frozenset[str]:
    """Return the names of the fields aligned with the completion: those that TRL has, and others that are as wide as
    ``completion_ids``. ``widths``: field → its size in dimension 1, the same on all ranks."""
    wide = widths.get("completion_ids")
    follows = {name for name, width in widths.items() if width == wide and not is_of_prompt(name)}
    return frozenset(follows | (widths.keys() & COMPLETION_FIELDS))


def is_of_prompt(name: str) -> bool:
    """Return whether a field belongs to the prompt, and so is padded on the left."""
    return name.startswith("prompt_")


def fitted(name: str, value: Tensor, width: int) -> Tensor:
    """Return the field ``name`` as ``[rows, width, …]``, cut or padded on the side where it has its padding."""
    missing = width - value.size(1)
    if missing <= 0:
        if is_of_prompt(name):
            return value[:, -missing:]
        return value[:, :width]
    edges = (missing, 0) if is_of_prompt(name) else (0, missing)
    return pad(value, (0, 0) * (value.dim() - 2) + edges, value=FILL.get(name, 0))
