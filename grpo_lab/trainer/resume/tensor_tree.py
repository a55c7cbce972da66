"""Nested lists and dicts of tensors → one flat table of tensors and a description in JSON, and back to the bit.

What a generation batch consists of: micro-batches (dicts) of tensors, None, numbers and lists of them. Nothing is pickled.
One tensor object that stands in several places (``num_items_in_batch`` of all micro-batches) is stored once and is one object
again afterwards: the exact update asks by ``is`` whether micro-batches come from one generation batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


def flattened(value: Any, path: str = "") -> tuple[Any, dict[str, Tensor]]:
    """``value`` → (description for ``json.dumps``, tensors on the CPU by key).

    Raises:
        ValueError: something in it is neither a plain tensor, None, bool, number, string, list, tuple nor a dict with string
            keys; the message says where it stands and what it is.
    """
    tensors: dict[str, Tensor] = {}
    keys: dict[int, str] = {}

    def walk(item: Any, place: str) -> Any:
        if item is None or type(item) in (bool, int, float, str):
            return {"value": item}
        if type(item) is Tensor and item.layout is torch.strided and not item.is_quantized:
            if id(item) not in keys:
                keys[id(item)] = f"{len(keys):06d}"
                tensors[keys[id(item)]] = item.detach().to("cpu", copy=True).contiguous()
            return {"tensor": keys[id(item)], "on": "cpu" if item.device.type == "cpu" else "device"}
        if type(item) in (list, tuple):
            return {type(item).__name__: [walk(part, f"{place}[{i}]") for i, part in enumerate(item)]}
        if isinstance(item, Mapping) and all(isinstance(name, str) for name in item):
            return {"dict": {name: walk(part, f"{place}[{name!r}]") for name, part in item.items()}}
        raise ValueError(f"{place} is a {type(item).__module__}.{type(item).__name__}")

    return walk(value, path), tensors


def rebuilt(description: Any, tensors: Mapping[str, Tensor], device: torch.device) -> Any:
    """The inverse of ``flattened``; tensors that were not on the CPU come to ``device``.

    Raises:
        ValueError: the description is not one of ours. KeyError: a tensor that it names is missing.
    """
    placed: dict[tuple[str, str], Tensor] = {}

    def tensor(key: str, on: str) -> Tensor:
        if (key, on) not in placed:
            placed[key, on] = tensors[key] if on == "cpu" else tensors[key].to(device)
        return placed[key, on]

    def walk(node: Any) -> Any:
        match node:
            case {"value": value}:
                return value
            case {"tensor": str(key), "on": ("cpu" | "device") as on}:
                return tensor(key, on)
            case {"list": list(parts)}:
                return [walk(part) for part in parts]
            case {"tuple": list(parts)}:
                return tuple(walk(part) for part in parts)
            case {"dict": dict(parts)}:
                return {name: walk(part) for name, part in parts.items()}
        raise ValueError(f"{str(node)[:80]!r} is no part of a description of tensors")

    return walk(description)


__all__ = ["flattened", "rebuilt"]
