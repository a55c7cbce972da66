"""What travels with the rows of a micro-batch, by attribute: every name that we read or write in TRL's dict.

TRL's loop forces a dict: it shuffles the rows of a generation batch, cuts them into micro-batches and keeps those in
its buffer; the table of an optimizer step, its bins and a checkpoint hold the same fields. Those that are not TRL's
begin with ``OURS``, so that no release of TRL can mean another thing by one.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

OURS = "grpo_lab."
#: names that checkpoints of earlier versions have for fields of ours
EARLIER: dict[str, str] = {
    "old_log_probs_as_generated": f"{OURS}as_generated",
    "length_quartile": f"{OURS}length_quartile",
    "position_offset": f"{OURS}position_offset",
}
#: the fields of ``Carried`` that rows are also picked by
POSITION_OFFSET, POLICY_VERSION = f"{OURS}position_offset", f"{OURS}policy_version"


class _Field:
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
    """A view of a micro-batch, a table's fields or a bin's: reading an attribute reads its field (None where there is
    none), setting one writes it, None takes it out. B rows, T completion tokens, log-probs in nats.

    Args:
        fields: the dict itself, not a copy.

    Attributes:
        policy_version: long ``[B]`` on the CPU, the optimizer steps that the policy had taken when it wrote the row.
        behaviour_logps: ``[B, T]`` of what sampled the row, as the engine reported them.
        proximal_logps: ``[B, T]`` of the policy before the update, which ratios are taken against; where there is none
            it is the loss's own forward (``step.log_probs``).
        ref_logps: ``[B, T]`` of the reference model.
        sampler_weights: ``[B, T]`` or ``[B, 1]``, TRL's sampler correction, where it was made at generation.
        as_generated: ``[B, T]``, a copy of ``proximal_logps`` that were made in other shapes than the loss has (by bins
            at generation, for a batch that a team's method sees; by TRL, for a resampled one): where nobody changed
            them they count as missing. Not where forwards are random.
        unmoved: long ``[B]``, 1 where no update has happened since generation; only in a step where some row has
            ``proximal_logps``.
        old_values: float32 ``[B, T]``, the critic's at generation; only with one (``value``).
        returns: float32 ``[B, T]``, what the critic learns; NaN where there is nothing to learn.
        position_offset: long ``[B]``, ``RowTable.offset`` of each row in the batch that it was generated in; only in a
            batch that was put together from several.
        length_quartile: long ``[B]``, 0 to 3 (``metrics.by_length``); only with the sampler correction.
    """

    policy_version = _Field(POLICY_VERSION)
    behaviour_logps = _Field("sampling_per_token_logps")
    proximal_logps = _Field("old_per_token_logps")
    ref_logps = _Field("ref_per_token_logps")
    sampler_weights = _Field("importance_sampling_ratio")
    as_generated = _Field(f"{OURS}as_generated")
    unmoved = _Field(f"{OURS}unmoved")
    length_quartile = _Field(f"{OURS}length_quartile")
    old_values = _Field(f"{OURS}old_values")
    returns = _Field(f"{OURS}returns")
    position_offset = _Field(POSITION_OFFSET)

    def __init__(self, fields: MutableMapping[str, Any]) -> None:
        self.fields = fields


def loss_mask(fields: MutableMapping[str, Any]) -> Tensor:
    """bool ``[B, T]``: completion tokens that the policy itself made (no padding, no tool output)."""
    mask: Tensor = fields["completion_mask"].bool()
    return mask & fields["tool_mask"].bool() if "tool_mask" in fields else mask


def row_lengths(fields: MutableMapping[str, Any]) -> tuple[Tensor, Tensor]:
    """Long ``[B]`` each: tokens of prompt and completion. A hole in a mask (a team's) counts: its tokens stand there,
    and nobody attends to them."""
    return _reach(fields["prompt_mask"].flip(1)), _reach(fields["completion_mask"])


def _reach(mask: Tensor) -> Tensor:
    """Place of each row's last token, from 1 on; 0 where there is none."""
    steps = torch.arange(1, mask.size(1) + 1, device=mask.device)
    return pad(steps * mask.bool(), (1, 0)).amax(1)


def row_tensors(fields: MutableMapping[str, Any]) -> dict[str, Tensor]:
    """What has one entry a row: ``[B]`` or ``[B, …]``."""
    rows, tensors = fields["prompt_ids"].size(0), {n: v for n, v in fields.items() if isinstance(v, Tensor)}
    return {name: value for name, value in tensors.items() if value.dim() >= 1 and value.size(0) == rows}


def has_hole(fields: MutableMapping[str, Any]) -> Tensor:
    """bool ``[B]``: a mask of the row has a hole. TRL's log-probs at generation are of the row without it."""
    tokens = fields["prompt_mask"].bool().sum(1) + fields["completion_mask"].bool().sum(1)
    return sum(row_lengths(fields)) != tokens
