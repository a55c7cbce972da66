"""The look: the rows of an optimizer step are forwarded once without gradient, before their bins are planned.

Log-probs and entropies return to the rank that generated the row, and are put into the micro-batches as TRL cut them.
With these micro-batches

    selecting parts       are asked which tokens they choose (``objectives.Selecting``)
    the loss              is differentiated by its log-probs, which costs no backward of the model. A live row of which
                          no token has a gradient is *silent*: it needs no backward

The answers travel with the rows (``Carried``), and the silent rows are left out of the plan.

Why that is exact. A row's gradient is Σ_t ∂L/∂log π_t · ∇log π_t. The look's bins are those that the step would have
without it, so its log-probs are those that the step would see, to the bit. The second forward is in other bins and so
rounds otherwise. Its loss therefore takes the *values* of its log-probs from the look (``with_value``). So every
∂L/∂log π_t is that of a step without a look, also for a token at the very edge of a clip: a silent row's is exactly 0,
and no token changes its side of the clip. Only ∇log π_t comes from the second forward. A silent row has a loss, though
no gradient: it is added to the step's, and its metrics are counted.

Rows of advantage 0 are looked at only for a selecting part, which compares all tokens of a micro-batch. They are in
bins of their own, so that those of the others stay as they are.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from grpo_lab.batch import Denominators, TokenBatch
from grpo_lab.objectives import kept_tokens
from grpo_lab.trainer.metrics.book import Origin
from grpo_lab.trainer.ports import StepPort
from grpo_lab.trainer.ranks import named_place
from grpo_lab.trainer.row_table import CHOSEN, Carried
from grpo_lab.trainer.step.entropy_bonus import bonus_tokens
from grpo_lab.trainer.step.exchange import Forwarded
from grpo_lab.trainer.step.micro_batch import of_rows, token_batch, token_loss, with_choices, with_group_tokens
from grpo_lab.trainer.step.row_numbers import StepRows
from grpo_lab.trainer.step.silent import with_gradient
from grpo_lab.trainer.step.update_record import record_losses, record_tokens


@dataclass(frozen=True)
class Looked:
    """Results of a look.

    Args:
        step: the rows of the step, with what was found in their fields, and the silent ones marked in its numbers.
        forwarded: log-probs and entropies of this rank's rows.
        loss: scalar, the loss of this rank's silent rows.
    """

    step: StepRows
    forwarded: Forwarded
    loss: Tensor


def look(
    trainer: StepPort,
    step: StepRows,
    forwarded: Forwarded,
    denominators: Denominators,
    origin: Callable[[Tensor], Origin],
    leaves_out: bool,
) -> Looked:
    """Ask the selecting parts, and find the silent rows if ``leaves_out``. A collective on several ranks.

    Args:
        trainer: the trainer.
        step: the rows of the step.
        forwarded: log-probs and entropies of this rank's rows, from a forward without gradient.
        denominators: those of the step.
        origin: returns the origin of rows, for their metrics, from the micro-batch of each.
        leaves_out: whether silent rows may be left out.
    """
    assert forwarded.entropies is not None
    batches = []
    silent = []
    loss = torch.zeros((), device=forwarded.logps.device)
    end = 0
    for size in step.sizes:
        rows = slice(end, end + size)
        end += size
        batch = _micro_batch(trainer, step, forwarded, rows)
        batches.append(batch)
        if leaves_out:
            found, of_silent = _silent_rows(trainer, batch, of_rows(denominators, step.token_count[rows]))
            if step.rejected is not None:  # they are recorded as rejected
                found = found & ~step.rejected[rows]
            silent.append(found)
            loss = loss + of_silent
            seen = replace(batch, mask=batch.mask & found.unsqueeze(1))
            record_tokens(trainer, trainer.recorder.book("train"), seen, origin(step.slots[rows]))
    fields = {f"{CHOSEN}{name}": torch.cat([one.chosen[name] for one in batches]) for name in batches[0].chosen}
    carried = Carried(dict[str, Tensor](fields))
    carried.looked_logps = forwarded.logps
    carried.looked_entropies = forwarded.entropies
    numbers = step.numbers.with_fields(carried.fields)
    if leaves_out:
        with named_place("silent rows"):
            own = torch.cat(silent).byte()
            flags = trainer.accelerator.gather(own)
        came = flags.numel() - own.numel()
        numbers = replace(numbers, silent=flags.cpu().bool(), bytes_received=numbers.bytes_received + came)
    table = step.table.with_fields(dict(carried.fields))
    if trainer.exact_update.entropy.bonus is not None:
        Carried(table.fields).bonus_tokens = torch.cat([bonus_tokens(kept_tokens(one)) for one in batches])
    return Looked(replace(step, table=table, numbers=numbers), forwarded, loss)


def _micro_batch(trainer: StepPort, step: StepRows, forwarded: Forwarded, rows: slice) -> TokenBatch:
    """Return a micro-batch as TRL cut it, with the tokens that the selecting parts choose. Its log-probs and entropies
    are leaves of a graph, so that the loss can be differentiated by them."""
    fields = {name: value[rows] for name, value in step.table.fields.items()}
    mask = step.table.loss_mask[rows] & forwarded.made[rows]
    assert forwarded.entropies is not None
    logps = forwarded.logps[rows].clone().requires_grad_()
    entropies = forwarded.entropies[rows].clone().requires_grad_()
    return with_choices(trainer, token_batch(trainer, logps, entropies, mask, fields, None))


def _silent_rows(trainer: StepPort, batch: TokenBatch, denominators: Denominators) -> tuple[Tensor, Tensor]:
    """Return bool ``[B]``, the silent rows of a micro-batch, and the scalar loss of these rows. A row whose loss is not
    finite does not count as silent."""
    objective = trainer.algorithm.objective
    assert objective is not None
    denominators = with_group_tokens(denominators, batch)
    with trainer.recorder.unrecorded():  # a hook that logs is called for the bins again
        losses = token_loss(trainer, batch)
    acts = with_gradient(objective.aggregated(losses, batch, denominators), batch)
    losses = losses.detach()
    live = ((batch.advantages != 0) & batch.mask).any(dim=1)
    finite = (losses.isfinite() | ~batch.mask).all(dim=1)
    silent = live & finite & ~acts.any(dim=1)
    theirs = replace(batch, mask=batch.mask & silent.unsqueeze(1))
    record_losses(trainer, theirs, losses, denominators)
    return silent, objective.aggregated(losses, theirs, denominators).detach()


def with_value(value: Tensor, own: Tensor) -> Tensor:
    """Return a tensor with the value of ``value`` and the gradient of ``own``."""
    return value + (own - own.detach())
