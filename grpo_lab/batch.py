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

Masking selects and does not multiply, since ``nan * 0`` is ``nan``. A masked position's gradient must be an exact zero.
That needs finite numbers in the unselected branch: make inputs safe first (``safe``), compute, then select.
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
"""Name, among the fields that travel with the rows, of the number of each row's task (``tasks``), long ``[B]``."""
TOKEN_IDS = "completion_ids"
"""TRL's name of the completions' tokens."""


def earlier_name(old: str, new: str) -> Callable[[Carrier], Carrier]:
    """Decorate a data class whose field ``old`` is called ``new`` now.

    For one release the old name can still be read, given to the constructor and replaced (``dataclasses.replace``),
    with one DeprecationWarning per class.
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
    """A micro-batch of completions with everything that the loss may read. It is the one argument of a surrogate.

    Args:
        logps: ``[B, T]`` log-probs of the policy that is being trained; carries the gradient.
        proximal_logps: ``[B, T]`` log-probs of the policy at the start of this batch's updates, the *proximal* policy
            that the clipped ratio is taken against; no gradient. Before the first of these updates they equal
            ``logps.detach()``. They may differ from those with which the tokens were sampled: an engine computes
            others, and under ``rollout.overlap`` and ``rollout.cut_after`` an older policy sampled. The sampler's own
            are ``sampler_logps``; TRL's importance sampling corrects from them to the proximal policy
            (``sampler_weights``).
        log_ratio: ``[B, T]`` or ``[B, 1]`` log of the importance ratio at the objective's level (see ``ratios``): of
            the policy in training against the proximal one.
        advantages: ``[B, 1]`` or ``[B, T]``.
        mask: bool ``[B, T]``, True where a token carries loss.
        ref_logps: ``[B, T]`` log-probs of the reference model, where a KL term reads them.
        entropies: ``[B, T]`` entropy of the policy at each token, nats. Carries a gradient (an entropy bonus reads it).
        sampler_weights: ``[B, T]`` or ``[B, 1]`` ratio of the proximal policy to the one that sampled, cut as TRL's
            vLLM importance sampling says; ``None`` where nothing is corrected.
        extras: whatever else travelled with the rows (dataset-specific tensors with B rows), for team code.
        values: ``[B, T]`` of the critic, in units of the reward; carries its gradient. ``None`` without one.
        chosen: name of a part that selects tokens (``objectives.Selecting``) → bool ``[B, T]``, the tokens that it
            chose among those of the whole micro-batch.
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
        """``[B, T]`` log-probs with which the tokens were sampled, no gradient: those that the engine reported, and the
        proximal ones for a token that it reported none for (NaN), or without an engine."""
        reported = self.extras.get(SAMPLER_LOGPS)
        if reported is None:
            return self.proximal_logps
        return torch.where(reported.isnan(), self.proximal_logps, reported)

    @property
    def token_ids(self) -> Tensor | None:
        """Long ``[B, T]``, the completions' tokens; ``None`` in a batch that was not made by a trainer."""
        return self.extras.get(TOKEN_IDS)


@dataclass(frozen=True)
class Denominators:
    """Denominators of a sum over tokens: counts of the whole optimizer step over all ranks, made by the trainer.

    Data-parallel training averages gradients over ranks, so each count is divided by the number of ranks. Counted
    *before* any row is left out, hence independent of how rows are cut into micro-batches.

    Args:
        rows: completions; a number or a 0-dim tensor.
        tokens: tokens that carry loss; a number, a 0-dim tensor, or ``[B, 1]`` per row.
        budget: the generation budget (``max_completion_length``), tokens; Dr.GRPO's constant.
        micro_batches: micro-batches of the step; read only by ``local_token_mean`` and an entropy bonus.
        prompts: groups of completions, ``rows`` divided by the completions of a prompt.
        group_tokens: tokens that carry loss in all completions of a row's prompt, over all ranks; a number, or
            ``[B, 1]`` per row. Not divided by the ranks. Only for aggregations that say ``per_prompt``; else NaN.
        micro_batch_tokens: tokens that an entropy bonus is the mean of: those of the row's micro-batch on the rank that
            had it (at least 1); a number, a 0-dim tensor, or ``[B, 1]`` per row. NaN where there is no bonus.
    """

    rows: float
    tokens: float | Tensor
    budget: float
    micro_batches: float = 1.0
    prompts: float = math.nan
    group_tokens: float | Tensor = math.nan
    micro_batch_tokens: float | Tensor = math.nan


def _alone(numbers: Tensor) -> Tensor:
    return numbers


@dataclass(frozen=True)
class LocalRows:
    """This rank's rows of a generation batch, for which a rule of level ``token`` makes advantages.

    Args:
        rows: the slice of the table's N rows that these B are. It does not always begin at ``rank * B``.
        mask: bool ``[B, T]``, True where a token carries loss. T: this rank's longest completion, so ranks differ.
        lengths: long ``[B]``, tokens of each completion, tool output included; what lies behind is padding.
        rewards: float64 ``[B, T]``, only with a critic: −β·k of each token, a completion's rewards on its last one.
        values: float64 ``[B, T]``, the critic's at generation; ``None`` without one.
        token_energy: float ``[B, T]``, 1 − 2π + Σπ² of each token under the policy at generation, only for a rule that
            ``reads_token_energy``.
        over_ranks: sums a tensor, of the same shape on every rank, over the ranks. A collective.
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
    """Rewards of one generation batch, the same on every rank but for ``local``.

    Args:
        values: float64 ``[N, F]`` (given in any float type: advantages are differences of nearly equal numbers, divided
            by small ones); NaN where a component could not score a completion.
        names: F component names.
        weights: float64 ``[F]``.
        group_size: G; ``N % G == 0``, groups are contiguous.
        penalties: how many of the last columns are no rewards but penalties computed here (KL).
        steps: column of a step reward (which holds means) → its steps over all ranks (``advantages.StepTable``).
        local: this rank's rows, for rules that make an advantage per token; ``None`` outside a trainer.
        lengths: long ``[N]``, the tokens that the policy wrote in each completion; ``None`` where nobody counted them.
        tasks: long ``[N]``, the number of each row's task; ``None`` without ``tasks``. A group is of one task.
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
            where = "cpu" if tensor.device.type == "mps" else tensor.device  # MPS has no float64
            object.__setattr__(self, name, tensor.to(where, torch.float64))
        n, f = self.values.shape
        if f != len(self.names) or f != self.weights.numel():
            raise ValueError(
                f"reward table has {f} columns, but {len(self.names)} names {self.names} and {self.weights.numel()} "
                "weights; `reward_funcs` and `reward_weights` must have the same length"
            )
        if n % self.group_size:
            raise ValueError(f"{n} rows are not whole groups of num_generations={self.group_size}")

    def picked(self, index: Tensor) -> RewardTable:
        """Return the table of some rows (long ``[M]``, whole groups), in that order, without ``local``."""

        def of(values: Tensor | None) -> Tensor | None:
            return None if values is None else values[index.to(values.device)]

        steps = {column: steps.picked(index) for column, steps in self.steps.items()}
        values = self.values[index.to(self.values.device)]
        return replace(self, values=values, steps=steps, local=None, lengths=of(self.lengths), tasks=of(self.tasks))

    @property
    def total(self) -> Tensor:
        """Weighted sum ``[N]``, float64; NaN where *no* component could score the row.

        The sum of rewards has float32's resolution, since TRL gathers rewards in float32. So 0.1 + 0.2 and 0.3 are
        equal, and a group of such rewards is dead. Penalties are added in float64.
        """
        weighted = self.values * self.weights.to(self.values.device)
        rewards = weighted.size(1) - self.penalties
        total = weighted[:, :rewards].nansum(dim=1).float().double() + weighted[:, rewards:].nansum(dim=1)
        return total.masked_fill(self.values.isnan().all(dim=1), float("nan"))


def padded(rows: Sequence[Sequence[int]], pad: int, device: Any, left: bool = False) -> tuple[Tensor, Tensor]:
    """Pad rows of token ids on the right (or ``left``), and return ids and attention mask, ``[rows, widest]``."""
    width = max(map(len, rows))
    place = torch.arange(width, device=device)
    lengths = torch.tensor([[len(row)] for row in rows], device=device)
    mask = place >= width - lengths if left else place < lengths
    ids = torch.full(mask.shape, pad, device=device)
    ids[mask] = torch.tensor([token for row in rows for token in row], dtype=ids.dtype, device=device)
    return ids, mask.long()


def safe(values: Tensor, mask: Tensor, fill: float = 0.0) -> Tensor:
    """Return ``values`` with ``fill`` at masked-out positions, ``[B, T]``. Use it on *inputs*, before exp or log."""
    return values.expand(mask.shape).masked_fill(~mask, fill)


def masked_sum(values: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Sum over selected positions (all of them, or along ``dim``). All-masked input gives a differentiable zero."""
    selected = safe(values, mask)
    if dim is None:
        return selected.sum()
    return selected.sum(dim)


def masked_row_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Mean over the selected tokens of each row, ``[B]``. An all-masked row gives a differentiable zero."""
    return masked_sum(values, mask, dim=-1) / mask.sum(-1).clamp(min=1).float()
