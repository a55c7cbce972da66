"""Whether asking a part changed anything, and putting it back: random states, and what a function or an object remembers."""

from __future__ import annotations

import copy
import functools
import random
from collections.abc import Iterator, MutableMapping
from types import FunctionType, MethodType
from typing import Any

import numpy
import torch
from torch import Tensor

PLAIN = (bool, int, float, complex, str, bytes, type(None))
#: state larger than this is a table, not a memory; not looked at
MOST_ITEMS, MOST_NUMBERS, DEPTH = 64, 4096, 3
#: what a trainer remembers by itself when a hook logs or says something
OURS = ("_said", "_metrics", "_logs", "_pending_metrics", "_pending_extra_logs")
#: objects of these packages are not looked into
LIBRARIES = (
    "torch",
    "transformers",
    "trl",
    "accelerate",
    "datasets",
    "peft",
    "numpy",
    "grpo_lab",
    "builtins",
    "logging",
)


class StateWatch:
    """A context in which ``parts`` are called: afterwards random states and their own memory are as before.

    ``touched`` then says in words what they had changed, or is ``None``. Looked at: attributes of objects (also of those that they
    hold), closures, and module variables that a function names, as far as they are numbers, texts, tensors, or
    small lists, sets and dictionaries of such.
    """

    def __init__(self, parts: list[Any]) -> None:
        self.parts = parts
        self.touched: str | None = None

    def __enter__(self) -> StateWatch:
        self._random = _random_states()
        self._places = list(
            {id(place): (place, names) for p in self.parts for place, names in _places(p, DEPTH, set())}.values()
        )
        self._before = [copy.deepcopy(_plain_of(place, names)) for place, names in self._places]
        return self

    def __exit__(self, *_: Any) -> None:
        after = _random_states()
        if not _equal(after, self._random):
            self.touched = "it draws random numbers"
            _set_random_states(self._random)
        for (place, names), before in zip(self._places, self._before, strict=True):
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
    chosen = {name: place[name] for name in list(place) if names is None or name in names}
    return {name: _detached(value) for name, value in chosen.items() if name not in OURS and _is_plain(value)}


class _Cells(MutableMapping[str, Any]):
    """The variables of a closure as a mapping."""

    def __init__(self, function: FunctionType) -> None:
        cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
        self.cells = {name: cell for name, cell in cells if cell != type(cell)()}  # without those not yet assigned

    def __getitem__(self, name: str) -> Any:
        return self.cells[name].cell_contents

    def __setitem__(self, name: str, value: Any) -> None:
        self.cells[name].cell_contents = value

    def __delitem__(self, name: str) -> None:
        del self.cells[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.cells)

    def __len__(self) -> int:
        return len(self.cells)


def _places(part: Any, depth: int, seen: set[int]) -> Iterator[tuple[MutableMapping[str, Any], tuple[str, ...] | None]]:
    """Where ``part`` can remember something, and which names there are its own (``None``: all)."""
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
    if isinstance(value, Tensor):
        return value.numel() <= MOST_NUMBERS
    if isinstance(value, numpy.ndarray):
        return value.size <= MOST_NUMBERS
    if isinstance(value, (list, tuple, set, frozenset, dict)):
        inner = [*value, *value.values()] if isinstance(value, dict) else list(value)
        return depth > 0 and len(value) <= MOST_ITEMS and all(_is_plain(item, depth - 1) for item in inner)
    return isinstance(value, (*PLAIN, random.Random))


def _detached(value: Any) -> Any:
    """A tensor that carries a graph cannot be copied."""
    if isinstance(value, Tensor):
        return value.detach()
    if isinstance(value, dict):
        return {key: _detached(item) for key, item in value.items()}
    return type(value)(map(_detached, value)) if type(value) in (list, tuple) else value


def _equal(one: Any, other: Any) -> bool:
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
    """``value`` with its former content, the same object where it can be: others may hold it, too."""
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
    gpu = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    return [torch.get_rng_state(), gpu, random.getstate(), numpy.random.get_state(legacy=True)]


def _set_random_states(states: list[Any]) -> None:
    torch.set_rng_state(states[0])
    if states[1]:
        torch.cuda.set_rng_state_all(states[1])
    random.setstate(states[2])
    numpy.random.set_state(states[3])


__all__ = ["StateWatch"]
