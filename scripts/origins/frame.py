"""What a row of ``agree_with_origins.py`` is, how one function is taken from a checkout, and the tensors it gets.

Nothing of a checkout is installed or imported. The functions that a row names are cut out of their files, without
decorators, and run in a namespace of their own: ``torch``, ``numpy``, ``typing`` and what the row puts in place of the
origin's imports.
"""

from __future__ import annotations

import ast
import subprocess
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from grpo_lab.batch import SAMPLER_LOGPS, Denominators, TokenBatch
from grpo_lab.objectives import Objective, aggregation, log_ratio, surrogate

Pairs = Iterator[tuple[Tensor, Tensor]]
"""(theirs, ours): values or gradients of any one shape."""
SEEDS = range(5)


@dataclass(frozen=True)
class Origin:
    """A function of somebody's repository.

    Args:
        repository: owner/name.
        path: the file in it.
        function: its name.
        beside: further functions and constants of that file that it calls.
        names: what its imports are replaced by, name → value.
    """

    repository: str
    path: str
    function: str
    beside: tuple[str, ...] = ()
    names: Mapping[str, Any] = field(default_factory=dict)

    def load(self, checkouts: Path) -> Callable[..., Any]:
        """Return the function of the checkout's HEAD."""
        source = git(checkouts, self.repository, "show", f"HEAD:{self.path}")
        return cut_out(source, (*self.beside, self.function), self.names)[self.function]  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Row:
    """A part beside its origin.

    Args:
        part: its name here.
        origin: whose code it is held against.
        pairs: ``pairs(function, seed)`` calls both on the same tensors.
        remark: how the two are called so that they are the same, where that is not obvious.
    """

    part: str
    origin: Origin
    pairs: Callable[[Callable[..., Any], int], Pairs]
    remark: str = ""


def git(checkouts: Path, repository: str, *arguments: str) -> str:
    """Ask git about the checkout ``OWNER+NAME/repo``, a bare repository or a work tree."""
    folder = checkouts / repository.replace("/", "+") / "repo"
    return subprocess.run(["git", "-C", folder, *arguments], check=True, capture_output=True, text=True).stdout


def cut_out(source: str, wanted: tuple[str, ...], names: Mapping[str, Any]) -> dict[str, Any]:
    """Run only the definitions called ``wanted`` of ``source``, and return their namespace."""
    space: dict[str, Any] = {**vars(typing), "torch": torch, "np": np, "F": torch.nn.functional, "Tensor": Tensor}
    space.update(names)
    found = [node for node in ast.parse(source).body if _name(node) in wanted]
    missing = set(wanted) - {_name(node) for node in found}
    if missing:
        raise ValueError(f"the origin's file has no {', '.join(sorted(missing))} at its top level")
    for node in found:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            node.decorator_list = []
    future = ast.parse("from __future__ import annotations").body
    exec(compile(ast.Module([*future, *found], []), "<origin>", "exec"), space)
    return space


def _name(node: ast.stmt) -> str:
    if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
        return node.targets[0].id
    return str(getattr(node, "name", ""))


def tensors(seed: int, rows: int = 6, width: int = 9, spread: float = 0.5, per_token: bool = False) -> TokenBatch:
    """Make a float64 batch: rows of one to ``width`` tokens, padded on the right, log-ratios of either sign on both
    sides of every clip, advantages ``[B, 1]`` (or one a token) of which a row's are 0, and a sampler beside the
    proximal policy."""
    random = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=random, dtype=torch.float64)

    lengths = torch.randint(1, width + 1, (rows, 1), generator=random)
    lengths[0] = width
    mask = torch.arange(width) < lengths
    logps = -normal(rows, width).abs() - 0.02
    old = logps - spread * normal(rows, width)
    advantages = normal(rows, width if per_token else 1)
    advantages[-1] = 0.0
    logps.requires_grad_()
    return TokenBatch(
        logps=logps,
        proximal_logps=old,
        log_ratio=log_ratio("token", logps, old, mask),
        advantages=advantages,
        mask=mask,
        ref_logps=logps.detach() + 0.3 * normal(rows, width),
        entropies=normal(rows, width).abs(),
        extras={SAMPLER_LOGPS: (old + 0.3 * normal(rows, width)).clamp(max=-1e-3)},
    )


def ours(batch: TokenBatch, part: Any, averaged: str, ratio: str = "token") -> tuple[Tensor, Tensor]:
    """Return loss and gradient by the log-probs of a surrogate (its name, or one that is built) with an aggregation;
    the batch is a whole micro-batch."""
    batch = with_ratio(batch, ratio)
    push = surrogate(part) if isinstance(part, str) else part
    objective = Objective("origin", push, aggregation(averaged), ratio)
    with torch.no_grad():
        chosen = {one.selection: one.select(batch, lambda values: values) for one in objective.selecting}
    loss = objective.loss(replace(batch, chosen=chosen), denominators(batch))
    return loss.detach(), gradient(loss, batch)


def with_ratio(batch: TokenBatch, ratio: str) -> TokenBatch:
    """Return ``batch`` with the log-ratio of that level, its graph its own."""
    return replace(batch, log_ratio=log_ratio(ratio, batch.logps, batch.proximal_logps, batch.mask))


def gradient(loss: Tensor, batch: TokenBatch) -> Tensor:
    """Return the gradient by the log-probs, ``[B, T]``."""
    return torch.autograd.grad(loss, batch.logps, retain_graph=True)[0]


def denominators(batch: TokenBatch) -> Denominators:
    """Return the counts of ``batch`` as a whole optimizer step, its rows in groups of two."""
    rows, width = batch.mask.shape
    of_group = batch.mask.view(rows // 2, -1).sum(1).repeat_interleave(2).unsqueeze(1)
    tokens = float(batch.mask.sum())
    return Denominators(float(rows), tokens, float(width), prompts=rows / 2, group_tokens=of_group)


def same(theirs: Tensor, batch: TokenBatch, mine: tuple[Tensor, Tensor]) -> Pairs:
    """Compare a loss of theirs, and its gradient, with ours."""
    yield theirs.detach(), mine[0]
    yield gradient(theirs, batch), mine[1]


class Config(types.SimpleNamespace):
    """A configuration of theirs: attributes, and ``get`` as a mapping has it."""

    def get(self, name: str, default: Any = None) -> Any:
        return getattr(self, name, default)
