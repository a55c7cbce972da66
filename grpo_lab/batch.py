"""Data classes that the packages exchange, the legend of axes, and all masking arithmetic of this package.

=====  ==========================================================================================
axis   meaning
=====  ==========================================================================================
N      rows (= samples = completions) of a generation batch over all ranks, groups contiguous
G      completions of one prompt (a *group*); ``N = groups * G``
F      reward components
B      rows of one micro-batch or bin on this rank
T      completion tokens, left-aligned: token 0 is the first token of the completion
=====  ==========================================================================================

Log-probabilities are in nats, lengths in tokens, shares are fractions of 1. A mask is bool ``[B, T]``.

Masking selects and does not multiply, since ``nan * 0`` is ``nan``. The gradient of a masked position must be exactly
zero, and autograd multiplies the derivative there by zero. So the masked values, too, must be finite: first fill them
with a harmless number (``safe``), then compute (exp, log), then select.
"""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

Carrier = TypeVar("Carrier", bound=type)
SAMPLER_LOGPS = "sampling_per_token_logps"
"""TRL's name of the log-probs that the engine reported for the tokens that it sampled."""
TASK = "grpo_lab.task"
"""Key of each row's task in a batch: its place in the setting ``tasks``, counted from 0; long ``[B]``."""
TOKEN_IDS = "completion_ids"
"""TRL's name of the completions' token ids."""


def earlier_name(old: str, new: str) -> Callable[[Carrier], Carrier]:
    """Return a decorator for a data class whose field ``old`` was renamed to ``new``.

    For one release the old name still works: as an attribute, as an argument of the constructor and in
    ``dataclasses.replace``. Its first use gives one DeprecationWarning per class.
    """

    def decorate(carrier: Carrier) -> Carrier:
        construct = carrier.__init__  # type: ignore[misc]

        @functools.cache
        def warn() -> None:
            message = f"`{carrier.__name__}.{old}` is called `{new}` now; the old name goes with the next release"
            warnings.warn(message, DeprecationWarning, stacklevel=3)

        @functools.wraps(construct)
        def initialise(self: Any, *values: Any, **fields: Any) -> None:
            if old in fields:
                warn()
                fields[new] = fields.pop(old)  # `replace` gives both: the one that it was asked for counts
            construct(self, *values, **fields)

        def read(self: Any) -> Any:
            warn()
            return getattr(self, new)

        carrier.__init__ = initialise  # type: ignore[misc]
        setattr(carrier, old, property(read, doc=f"Deprecated name of ``{new}``."))
        return carrier

    return decorate


@earlier_name("old_logps", "proximal_logps")
@dataclass(frozen=True)
class TokenBatch:
    """A micro-batch of completions with everything that the loss may read. A surrogate gets it as its only argument.

    Args:
        logps: ``[B, T]`` log-probs of the policy that is being trained; carries the gradient.
        proximal_logps: ``[B, T]`` log-probs of the policy at the start of this batch's updates, the *proximal* policy
            that the clipped ratio is taken against; no gradient. Before the first of these updates they equal
            ``logps.detach()``. They may differ from those with which the tokens were sampled: an engine computes
            others, and under ``rollout.overlap`` and ``rollout.cut_after`` an older policy sampled. The sampler's own
            are ``sampler_logps``; TRL's importance sampling corrects from them to the proximal policy
            (``sampler_weights``).
        log_ratio: ``[B, T]`` or ``[B, 1]``, log π_θ/π_proximal, the log of the importance ratio at the objective's
            level (see ``ratios``). Carries the gradient.
        advantages: ``[B, 1]`` (one per completion) or ``[B, T]`` (one per token).
        mask: bool ``[B, T]``, True where a token carries loss.
        ref_logps: ``[B, T]`` log-probs of the reference model, where a KL term reads them.
        entropies: ``[B, T]`` entropy of the policy at each token, nats. Carries a gradient (an entropy bonus reads it).
        sampler_weights: ``[B, T]`` or ``[B, 1]`` weights of the sampler correction in force: the ratio of the proximal
            policy to the one that sampled, truncated or masked; no gradient. ``None`` if nothing is corrected.
        extras: all tensors with B rows that the trainer's batch holds, by name, for team code.
        values: ``[B, T]`` values of the critic, in units of the reward; they carry the critic's gradient. ``None``
            without a critic.
        chosen: for each part of the objective that selects tokens (``objectives.Selecting``), by its name: bool
            ``[B, T]``, the tokens that it selected by comparing all tokens of the micro-batch.
    """

    logps: Tensor
    proximal_logps: Tensor
    log_ratio: Tensor
    advantages: Tensor
    mask: Tensor
    ref_logps: Tensor | None = None
    entropies: Tensor | None = None
    sampler_weights: Tensor | None = None
    extras: Mapping[str, Tensor] = field(default_factory=dict)
    values: Tensor | None = None
    chosen: Mapping[str, Tensor] = field(default_factory=dict)

    @property
    def ratio(self) -> Tensor:
        """Importance ratio π_θ/π_proximal at the objective's level, ``[B, T]`` or ``[B, 1]``."""
        return self.log_ratio.exp()

    @property
    def sampler_logps(self) -> Tensor:
        """``[B, T]`` log-probs with which the tokens were sampled; no gradient.

        They are those that the engine reported. Where it reported none (NaN for a token, or no engine at all), they are
        the proximal ones.
        """
        reported = self.extras.get(SAMPLER_LOGPS)
        if reported is None:
            return self.proximal_logps
        return torch.where(reported.isnan(), self.proximal_logps, reported)

    @property
    def token_ids(self) -> Tensor | None:
        """Token ids of the completions, long ``[B, T]``; ``None`` in a batch that was not made by a trainer."""
        return self.extras.get(TOKEN_IDS)


@dataclass(frozen=True)
class Denominators:
    """Counts that an aggregation divides a sum of token losses by, made by the trainer.

    They count the whole optimizer step over all ranks, *before* any row is left out. So they do not depend on how rows
    are cut into micro-batches. Data-parallel training averages gradients over ranks, so each count is already divided
    by the number of ranks, except where the list says otherwise.

    Args:
        rows: number of completions; a number or a 0-dim tensor.
        tokens: number of tokens that carry loss; a number, a 0-dim tensor, or ``[B, 1]`` per row.
        budget: the generation budget (``max_completion_length``), in tokens; the constant that Dr.GRPO divides by.
        micro_batches: number of micro-batches of the step; read only by ``local_token_mean`` and an entropy bonus.
        prompts: number of groups, which is ``rows`` divided by the completions of a prompt.
        group_tokens: number of tokens that carry loss in all completions of a row's prompt, over all ranks; a number,
            or ``[B, 1]`` per row. Not divided by the ranks. NaN unless the aggregation says ``per_prompt``.
        micro_batch_tokens: number of tokens that an entropy bonus averages over: those of the micro-batch in which TRL
            handed out the row, on the rank that got it (at least 1); a number, a 0-dim tensor, or ``[B, 1]`` per row.
            NaN without a bonus.
    """

    rows: float
    tokens: float | Tensor
    budget: float
    micro_batches: float = 1.0
    prompts: float = math.nan
    group_tokens: float | Tensor = math.nan
    micro_batch_tokens: float | Tensor = math.nan


def _alone(numbers: Tensor) -> Tensor:
    """Return ``numbers``, their own sum over the ranks where there is only one."""
    return numbers


@dataclass(frozen=True)
class LocalRows:
    """This rank's rows of a generation batch, for advantage rules that give each token an advantage (level ``token``).

    Args:
        rows: the slice of the ``RewardTable``'s N rows that these B are. It does not always begin at ``rank * B``.
        mask: bool ``[B, T]``, True where a token carries loss. T is the width to which this rank's completions are
            padded; it may differ between ranks.
        lengths: long ``[B]``, number of tokens of each completion, tool output included; padding follows.
        rewards: float64 ``[B, T]``, the reward of each token, with a critic only: minus β times the KL estimate of the
            token, weighted step scores at the last token of their step, the completion's weighted reward at its last
            token. ``value.missing_eos_penalty`` is subtracted and ``value.whiten_rewards`` applied already.
        values: float64 ``[B, T]``, the critic's values when the batch was generated; ``None`` without a critic.
        token_energy: float ``[B, T]``, 1 − 2π(token) + Σπ² (the sum over the vocabulary) under the policy at
            generation; ``None`` unless the rule ``reads_token_energy``.
        over_ranks: function that sums a tensor over the ranks. It is a collective: every rank calls it, with a tensor
            of the same shape.
    """

    rows: slice
    mask: Tensor
    lengths: Tensor
    rewards: Tensor | None = None
    values: Tensor | None = None
    token_energy: Tensor | None = None
    over_ranks: Callable[[Tensor], Tensor] = _alone


@dataclass(frozen=True)
class RewardTable:
    """Rewards of one generation batch. Every field but ``local`` is the same on all ranks.

    Args:
        values: ``[N, F]``, the score that each of F reward components gave each completion; NaN where a component could
            not score it. Converted to float64, since advantages are differences of nearly equal numbers, divided by
            small ones.
        names: F component names.
        weights: ``[F]``, the weight of each component in the total; converted to float64.
        group_size: G, completions per prompt. Groups are contiguous, so ``N % G == 0``.
        penalties: number of columns at the end that hold no rewards but penalties which the trainer computed (a KL).
        steps: for each column of a step reward, by its index: the scores of all steps, over all ranks
            (``advantages.StepTable``). The column itself holds the mean of each completion's step scores.
        local: this rank's rows, for rules that make an advantage per token; ``None`` outside a trainer.
        lengths: long ``[N]``, number of tokens that the policy wrote in each completion; ``None`` if not counted.
        tasks: long ``[N]``, the place of each row's task in the setting ``tasks``, counted from 0; ``None`` without
            ``tasks``. All rows of a group have the same task.

    Raises:
        ValueError: the numbers of columns, names and weights differ, or N is no multiple of G.
    """

    values: Tensor
    names: tuple[str, ...]
    weights: Tensor
    group_size: int
    penalties: int = 0
    steps: Mapping[int, Any] = field(default_factory=dict)
    local: LocalRows | None = None
    lengths: Tensor | None = None
    tasks: Tensor | None = None

    def __post_init__(self) -> None:
        for name in ("values", "weights"):
            tensor: Tensor = getattr(self, name)
            device = "cpu" if tensor.device.type == "mps" else tensor.device  # MPS has no float64
            object.__setattr__(self, name, tensor.to(device, torch.float64))
        rows, columns = self.values.shape
        if columns != len(self.names) or columns != self.weights.numel():
            raise ValueError(
                f"reward table has {columns} columns, but {len(self.names)} names {self.names} and "
                f"{self.weights.numel()} weights; `reward_funcs` and `reward_weights` must have the same length"
            )
        if rows % self.group_size:
            raise ValueError(f"{rows} rows are not whole groups of num_generations={self.group_size}")

    def picked(self, index: Tensor) -> RewardTable:
        """Return a table of the rows at ``index`` (long ``[M]``, whole groups) in that order, without ``local``."""

        def rows_of(tensor: Tensor | None) -> Tensor | None:
            return None if tensor is None else tensor[index.to(tensor.device)]

        return replace(
            self,
            values=self.values[index.to(self.values.device)],
            steps={column: steps.picked(index) for column, steps in self.steps.items()},
            local=None,
            lengths=rows_of(self.lengths),
            tasks=rows_of(self.tasks),
        )

    @property
    def total(self) -> Tensor:
        """Weighted sum of each row's scores and penalties, float64 ``[N]``; NaN where *no* component scored the row.

        The sum of the rewards is rounded to float32, the type in which TRL gathers rewards. So 0.1 + 0.2 and 0.3 are
        equal, and a group of such rewards is dead (it has no differences to learn from). Penalties are added in
        float64.
        """
        weighted = self.values * self.weights.to(self.values.device)
        first_penalty = weighted.size(1) - self.penalties
        rewards = weighted[:, :first_penalty].nansum(dim=1).float().double()
        penalties = weighted[:, first_penalty:].nansum(dim=1)
        return (rewards + penalties).masked_fill(self.values.isnan().all(dim=1), float("nan"))


def padded(rows: Sequence[Sequence[int]], pad: int, device: Any, left: bool = False) -> tuple[Tensor, Tensor]:
    """Pad rows of token ids with ``pad`` to the length of the longest, on the right or, with ``left``, on the left.

    Returns:
        the ids and the attention mask (1 for a token, 0 for padding), both long ``[rows, longest]`` on ``device``.
    """
    longest = max(map(len, rows))
    places = torch.arange(longest, device=device)
    lengths = torch.tensor([[len(row)] for row in rows], device=device)
    mask = places >= longest - lengths if left else places < lengths
    ids = torch.full(mask.shape, pad, device=device)
    ids[mask] = torch.tensor([token for row in rows for token in row], dtype=ids.dtype, device=device)
    return ids, mask.long()


def safe(values: Tensor, mask: Tensor, fill: float = 0.0) -> Tensor:
    """Return ``values`` as ``[B, T]`` with ``fill`` where ``mask`` is False. Use it on *inputs*, before exp or log."""
    return values.expand(mask.shape).masked_fill(~mask, fill)


def masked_sum(values: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Return the sum of ``values`` where ``mask`` is True, over everything or along ``dim``. Where nothing is selected,
    it is a differentiable zero."""
    selected = safe(values, mask)
    if dim is None:
        return selected.sum()
    return selected.sum(dim)


def masked_row_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Return the mean of each row's selected tokens, ``[B]``. A row without any gives a differentiable zero."""
    return masked_sum(values, mask, dim=-1) / mask.sum(-1).clamp(min=1).float()
