"""Tests of the loss parts that a team brings: may the rows of a step be cut into other batches than TRL's?

The exact update computes rows in bins of any composition and width. That gives TRL's gradient only if the loss of a row
depends on that row alone. A team's part is tested on toy batches before every optimizer step, since its answer may
follow a schedule. The test leaves no trace: ``StateWatch`` restores random states and the part's own state. If it has
to, the part's value depends on how often it is called, and that is an answer, too. What the test cannot find: a
dependence that shows only on values that no toy batch has, or that changes within one step.
"""

from __future__ import annotations

import copy
import functools
import random
from collections import UserDict
from collections.abc import Iterator, MutableMapping
from dataclasses import replace
from types import FunctionType, MethodType
from typing import Any, NamedTuple

import numpy
import torch
from torch import Tensor

from grpo_lab.batch import TokenBatch
from grpo_lab.objectives import Objective, is_ours
from grpo_lab.trainer.exactness import loss_proof
from grpo_lab.trainer.exactness.loss_proof import TokenLoss
from grpo_lab.trainer.ports import Numbers, StepPort
from grpo_lab.trainer.settings.algorithm import name_of
from grpo_lab.trainer.trl_bridge import teams

#: Collections with more items than this count as tables, not as memory, and are not looked at.
MOST_ITEMS = 64
MOST_NUMBERS = 4096
DEPTH = 3
#: Attributes in which a trainer remembers what a hook logs or says.
OURS = ("_said", "_metrics", "_logs", "_pending_metrics", "_pending_extra_logs")
#: Packages whose objects are not looked into.
LIBRARIES = "torch", "transformers", "trl", "accelerate", "datasets", "peft", "numpy", "grpo_lab", "builtins", "logging"


class StateWatch:
    """Context in which ``parts`` are called. At its end random states and the parts' own state are restored.

    Compared are attributes of objects (also of objects that they hold), closures, and module variables that a function
    names. Only numbers, texts, tensors, and small lists, sets and dictionaries of such are compared.

    Args:
        parts: functions and objects that will be called.

    Attributes:
        touched: what the parts had changed, in words; None if nothing.
    """

    def __init__(self, parts: list[Any]) -> None:
        self.parts = parts
        self.touched: str | None = None

    def __enter__(self) -> StateWatch:
        self._random = _random_states()
        places = {id(place): (place, names) for p in self.parts for place, names in _places(p, DEPTH, set())}
        self._before = [(*one, copy.deepcopy(_plain_of(*one))) for one in places.values()]
        return self

    def __exit__(self, *_: Any) -> None:
        if not _equal(_random_states(), self._random):
            self.touched = "it draws random numbers"
            torch.set_rng_state(self._random[0])
            if self._random[1]:
                torch.cuda.set_rng_state_all(self._random[1])
            random.setstate(self._random[2])
            numpy.random.set_state(self._random[3])
        for place, names, before in self._before:
            now = _plain_of(place, names)
            for name in now.keys() | before.keys():
                if name not in before:
                    del place[name]
                elif name not in now or not _equal(now[name], before[name]):
                    place[name] = _put_back(place.get(name), before[name])
                else:
                    continue
                self.touched = f"it changes its own state ({name!r})"


def _plain_of(place: MutableMapping[str, Any], names: tuple[str, ...] | None) -> dict[str, Any]:
    """Return those variables of ``place`` (with these ``names``, or all) that can be compared, tensors detached."""
    chosen = {name: place[name] for name in list(place) if names is None or name in names}
    return {name: _detached(value) for name, value in chosen.items() if name not in OURS and _is_plain(value)}


class _Cells(UserDict[str, Any]):
    """The variables of a function's closure as a mapping."""

    def __init__(self, function: FunctionType) -> None:
        cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
        self.data = {name: cell for name, cell in cells if cell != type(cell)()}  # without those not yet assigned

    def __getitem__(self, name: str) -> Any:
        return self.data[name].cell_contents

    def __setitem__(self, name: str, value: Any) -> None:
        self.data[name].cell_contents = value


def _places(part: Any, depth: int, seen: set[int]) -> Iterator[tuple[MutableMapping[str, Any], tuple[str, ...] | None]]:
    """Yield the mappings in which ``part`` can keep state, each with the names in it that are the part's own (None:
    all). ``depth`` bounds how far held objects are followed; ``seen`` holds the ids of those already visited."""
    if depth < 0 or id(part) in seen:
        return
    seen.add(id(part))
    inner: list[Any] = []
    if isinstance(part, MethodType):
        inner += [part.__self__, part.__func__]
    elif isinstance(part, functools.partial):
        inner += [part.func, *part.args, *part.keywords.values()]
    elif isinstance(part, FunctionType):
        cells = _Cells(part)
        yield cells, None
        inner += cells.values()
        yield part.__globals__, part.__code__.co_names
    if isinstance(getattr(part, "__dict__", None), dict):
        yield vars(part), None
        inner += vars(part).values()
    for value in inner:
        if isinstance(value, (FunctionType, MethodType)) or type(value).__module__.split(".")[0] not in LIBRARIES:
            yield from _places(value, depth - 1, seen)


def _is_plain(value: Any, depth: int = DEPTH) -> bool:
    """Return whether a value is simple and small enough to be copied and compared."""
    if isinstance(value, Tensor):
        return value.numel() <= MOST_NUMBERS
    if isinstance(value, numpy.ndarray):
        return value.size <= MOST_NUMBERS
    if isinstance(value, (list, tuple, set, frozenset, dict)):
        if isinstance(value, dict):
            inner = [*value, *value.values()]
        else:
            inner = list(value)
        return depth > 0 and len(value) <= MOST_ITEMS and all(_is_plain(item, depth - 1) for item in inner)
    return isinstance(value, (bool, int, float, complex, str, bytes, type(None), random.Random))


def _detached(value: Any) -> Any:
    """Return ``value`` with its tensors detached: one that carries a graph cannot be copied."""
    if isinstance(value, Tensor):
        return value.detach()
    if isinstance(value, dict):
        return {key: _detached(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(_detached, value))
    return value


def _equal(one: Any, other: Any) -> bool:
    """Return whether two plain values are equal, types included (of an array: not its dtype). A NaN equals itself as a
    number, but a tensor or array with a NaN in it equals none."""
    if type(one) is not type(other):
        return False
    if isinstance(one, Tensor):
        return one.shape == other.shape and one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, numpy.ndarray):
        return bool(numpy.array_equal(one, other))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_equal(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(_equal, one, other))
    if isinstance(one, random.Random):
        return one.getstate() == other.getstate()
    return bool(one == other) or one != one  # NaN is itself


@torch.no_grad()
def _put_back(value: Any, before: Any) -> Any:
    """Return ``value`` with its former content ``before``. It is the same object if possible, since others may hold it,
    too."""
    if isinstance(value, Tensor) and value.shape == before.shape and not value.is_leaf and value.requires_grad:
        return before
    if isinstance(value, Tensor) and value.shape == before.shape:
        value.copy_(before)
    elif isinstance(value, list):
        value[:] = before
    elif isinstance(value, (dict, set)):
        value.clear()
        value.update(before)
    elif isinstance(value, random.Random):
        value.setstate(before.getstate())
    else:
        return before
    return value


def _random_states() -> list[Any]:
    """Return the states of the random number generators of torch, its GPUs, Python and numpy."""
    gpu = []
    if torch.cuda.is_initialized():
        gpu = torch.cuda.get_rng_state_all()
    return [torch.get_rng_state(), gpu, random.getstate(), numpy.random.get_state(legacy=True)]


class Answers(NamedTuple):
    """Answers about the loss parts in force.

    Attributes:
        stock: why TRL's batches must stay; None if rows may be put into other batches.
        pull: name of the part that has a loss or a gradient where a row's advantage is 0; "" if none has.
        rejects: rows whose sampler weight is 0 have neither loss nor gradient.
    """

    stock: str | None
    pull: str
    rejects: bool = False


def has_team_parts(trainer: Numbers) -> bool:
    """Return whether the loss in force has a part that is not this package's, so that the answers may change during the
    run."""
    objective = trainer.algorithm.objective
    return objective is not None and any(any(_team_parts(trainer, one)) for one in objective.each)


def answers(trainer: StepPort, objective: Objective) -> Answers:
    """Test the loss parts in force on toy batches. In a mixture those of every task are tested, and the strictest
    answers count. The answers are the same on every rank; with a team's parts this is a collective."""
    found = [_answers(trainer, one) for one in objective.each]
    stock = next((one.stock for one in found if one.stock is not None), None)
    pull = next((one.pull for one in found if one.pull), "")
    return Answers(stock, pull, all(one.rejects for one in found))


def _answers(trainer: StepPort, objective: Objective) -> Answers:
    """Test the loss parts of one objective, one task's of a mixture."""
    of_token, of_average = _team_parts(trainer, objective)
    parts = [*of_token, *of_average]
    names = " and ".join(parts)
    per_token = " and ".join(of_token) or f"the surrogate `{name_of(objective.surrogate)}`"
    hook = []
    if teams(trainer, "token_loss") is not None:
        hook = [trainer.token_loss]
    stock = None
    rejects = False
    with (
        StateWatch([objective.surrogate, *objective.gates, objective.aggregate, *hook]) as watch,
        trainer.recorder.unrecorded(),
    ):
        try:
            if of_token:
                stock = _why_not_row_by_row(trainer.token_loss, objective)
            pull = ""
            matters = objective.kl_in_loss is None  # with a KL in the loss every row is computed anyway
            if matters and not loss_proof.vanishes_without_advantage(trainer.token_loss, objective):
                pull = per_token
            if trainer.correction is not None:
                rejects = loss_proof.vanishes_without_weight(trainer.token_loss, objective)
            several = trainer.args.gradient_accumulation_steps > trainer.args.steps_per_generation
            if stock is not None:
                stock = f"{per_token}: {stock}"
            elif not objective.local_denominator and not loss_proof.is_sum_over_rows(objective, several):
                average = f"the aggregation `{name_of(objective.aggregate)}` is no sum over rows"
                stock = f"{average}, so its value depends on how rows share micro-batches"
        except Exception as error:
            if not parts:
                raise
            stock = f"{names} cannot be asked on a toy batch ({type(error).__name__}: {error})"
            pull = per_token
    if not parts:
        return Answers(stock, pull, rejects)
    if watch.touched:
        stock = f"{names}: {watch.touched}, so its value depends on how often it is called"
    flags = torch.tensor([[stock is None, pull == "", rejects]], device=trainer.accelerator.device)
    free, quiet, rejects = trainer.accelerator.gather(flags).all(0).tolist()  # the strictest answer: ranks do the same
    if not free and stock is None:
        stock = "a part depends on the batch on another rank"
    return Answers(stock, "" if quiet else per_token, rejects)


def _team_parts(trainer: Numbers, objective: Objective) -> tuple[list[str], list[str]]:
    """Return the names of a team's parts in two lists: those that compute the loss of a token, and those that aggregate
    it."""
    found = []
    hook = teams(trainer, "token_loss")
    if hook is not None:
        found = [f"`{hook}`"]
    if not is_ours(objective.surrogate):
        found.append(f"the surrogate `{name_of(objective.surrogate)}`")
    found += [f"the gate `{name_of(gate)}`" for gate in objective.gates if not is_ours(gate)]
    return found, [] if is_ours(objective.aggregate) else [f"the aggregation `{name_of(objective.aggregate)}`"]


def _why_not_row_by_row(token_loss: TokenLoss, objective: Objective) -> str | None:
    """Return why the loss of a row does not depend on that row alone, or None. Each toy batch is computed again, wider,
    in parts and with other advantages beside a row."""
    for whole in (loss_proof.toy_batch(objective), loss_proof.wide_toy_batch(objective)):
        loss, gradient = _computed(token_loss, whole)
        again = _computed(token_loss, whole)
        if not (torch.equal(loss, again[0]) and torch.equal(gradient, again[1])):
            return "asked twice, it gives two answers"
        rows = tuple(range(whole.mask.size(0)))
        width = whole.mask.size(1)
        padded = _computed(token_loss, cut(whole, rows, width + 3))
        if not _alike((loss, gradient), (padded[0][:, :width], padded[1][:, :width])):
            return "its value depends on how wide a batch is padded"
        for part in ((0,), (1,), (2,), (3,), (0, 2), (3, 1), (2, 1, 0), rows[::-1]):  # each cut to its longest row
            longest = int(whole.mask[list(part)].sum(1).max())
            expected = loss[list(part), :longest], gradient[list(part), :longest]
            if not _alike(expected, _computed(token_loss, cut(whole, part, longest))):
                return "the loss of a row depends on the other rows of its batch, or on its width"
        kept = torch.arange(len(rows)) % 2 == 1
        others_at_zero = replace(whole, advantages=whole.advantages.masked_fill(~kept.unsqueeze(1), 0.0))
        changed = _computed(token_loss, others_at_zero)
        if not _alike((loss[kept], gradient[kept]), (changed[0][kept], changed[1][kept])):
            return "the loss of a row depends on the advantages of others"
    return None


def _computed(token_loss: TokenLoss, batch: TokenBatch) -> tuple[Tensor, Tensor]:
    """Return the loss per token and its gradient by the log-probs, both ``[B, T]``."""
    logps = batch.logps.detach().clone().requires_grad_(True)
    moved = logps - batch.logps.detach()  # 0, with the gradient of logps
    per_token = batch.log_ratio.shape == batch.mask.shape
    lengths = batch.mask.sum(1, keepdim=True).clamp(min=1)
    if per_token:
        steps = moved * batch.mask
    else:
        steps = (moved * batch.mask).sum(1, keepdim=True) / lengths
    loss = token_loss(replace(batch, logps=logps, log_ratio=batch.log_ratio.detach() + steps))
    loss = loss.expand(batch.mask.shape).masked_fill(~batch.mask, 0.0)
    if not loss.requires_grad:
        return loss, torch.zeros_like(logps)
    (gradient,) = torch.autograd.grad(loss.sum(), logps, allow_unused=True)
    return loss.detach(), torch.zeros_like(logps) if gradient is None else gradient


def cut(batch: TokenBatch, rows: tuple[int, ...], width: int) -> TokenBatch:
    """Return the rows ``rows`` of ``batch`` as a batch of their own, ``width`` tokens wide; additional columns are
    padding."""
    tall = batch.mask.size(1)

    def field(value: Tensor | None) -> Any:
        if value is None:
            return None
        chosen = value.detach()[list(rows)]
        if chosen.size(1) != tall:  # one value a row
            return chosen
        return torch.nn.functional.pad(chosen[:, :width], (0, max(width - tall, 0)))

    names = ("logps", "proximal_logps", "log_ratio", "advantages", "mask", "ref_logps", "entropies", "sampler_weights")
    extras = {name: field(value) for name, value in batch.extras.items()}
    chosen = {name: field(value) for name, value in batch.chosen.items()}
    return replace(batch, **{name: field(getattr(batch, name)) for name in names}, extras=extras, chosen=chosen)


def _alike(expected: tuple[Tensor, Tensor], found: tuple[Tensor, Tensor]) -> bool:
    """Return whether two pairs of loss and gradient are equal up to rounding: 1e-9 relative in float64, else 1e-5."""
    for one, other in zip(expected, found, strict=True):
        size = max(1.0, float(one.abs().max())) if one.numel() else 1.0
        precision = 1e-9 if one.dtype == torch.float64 else 1e-5
        if not ((one - other).abs() <= precision * size).all():
            return False
    return True
