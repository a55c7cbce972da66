"""A reference that has moved, in the checkpoint: TRL saves only the policy, and a resumed run would be pulled to the
start model again.

``grpo_lab_reference/00000.safetensors``, … hold its weights, of any number of ranks: sharded ones are put together,
piece by piece. The record (``state.py``) says whether it has moved, and how many pieces there are.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

from grpo_lab.io import write_whole
from grpo_lab.trainer.resume.state import SavedState

FOLDER = "grpo_lab_reference"
#: bytes after which a new file is begun; what the writing rank holds in memory beside the model
PIECE = 2 << 30


def save_reference(
    checkpoint: str | os.PathLike[str], tensors: Mapping[str, Tensor] | None, writes: bool
) -> dict[str, Any]:
    """Write the reference into a checkpoint folder; called on every rank, since putting shards together takes all of
    them.

    Args:
        tensors: by name; ``None``: it has not moved, which is an answer, too.
        writes: whether this rank writes.

    Returns:
        The record's entry.
    """
    place, pieces = Path(checkpoint) / FOLDER, 0
    for piece in _pieces(tensors or {}, writes):
        if writes:
            place.mkdir(parents=True, exist_ok=True)
            write_whole(place / _file(pieces), lambda partial, piece=piece: save_file(piece, partial))  # type: ignore[misc]
        pieces += 1
    return {"moved": tensors is not None, "pieces": pieces}


def load_reference(saved: SavedState, tensors: Callable[[], Mapping[str, Tensor] | None]) -> bool | None:
    """Put the saved weights into this run's reference, whole or sharded, to the bit.

    Args:
        tensors: its weights by name, asked for where there is something to load; ``None``: the run has no reference,
            nothing is read.

    Returns:
        Whether it had moved when the checkpoint was written (then it has been loaded); ``None``: the checkpoint does
        not say.

    Raises:
        ValueError: a file is damaged or missing, or of another model.
    """

    def read(entry: Any) -> bool:
        into = tensors() if entry["moved"] else None
        try:
            if into is not None:
                _load([saved.checkpoint / FOLDER / _file(piece) for piece in range(entry["pieces"])], into)
        except (OSError, SafetensorError) as error:
            raise ValueError(f"the reference in {saved.checkpoint / FOLDER} cannot be loaded: {error}") from error
        return bool(entry["moved"])

    return saved.entry("reference", read, "the reference is then the start model")


def _file(piece: int) -> str:
    return f"{piece:05d}.safetensors"


def _pieces(tensors: Mapping[str, Tensor], writes: bool) -> Iterator[dict[str, Tensor]]:
    piece: dict[str, Tensor] = {}
    size = 0
    for name, value in tensors.items():
        whole = (value.full_tensor() if isinstance(value, DTensor) else value).detach()
        piece[name] = whole.cpu().clone().contiguous() if writes else torch.empty(0)
        size += whole.numel() * whole.element_size()
        if size >= PIECE:
            yield piece
            piece, size = {}, 0
    if piece:
        yield piece


@torch.no_grad()
def _load(files: list[Path], tensors: Mapping[str, Tensor]) -> None:
    where: dict[str, Path] = {}
    for file in files:
        with safe_open(file, framework="pt") as stored:
            where |= dict.fromkeys(stored.keys(), file)
    if where.keys() != tensors.keys():
        other = sorted(where.keys() ^ tensors.keys())
        raise ValueError(f"it is of another model: {other[0]!r} is in one of the two only")
    for file in files:
        with safe_open(file, framework="pt") as stored:
            for name in stored.keys():  # noqa: SIM118 (no mapping)
                _put(name, stored.get_tensor(name), tensors[name])


def _put(name: str, saved: Tensor, into: Tensor) -> None:
    if saved.shape != into.shape or saved.dtype != into.dtype:
        raise ValueError(
            f"{name!r} is {tuple(saved.shape)} {saved.dtype} there and {tuple(into.shape)} {into.dtype} in this run"
        )
    if isinstance(into, DTensor):
        mine = distribute_tensor(saved.to(into.device), into.device_mesh, into.placements, src_data_rank=None)
        into.to_local().copy_(mine.to_local())
    else:
        into.copy_(saved)
