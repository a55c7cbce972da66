"""The state of a training beside a checkpoint's weights: one record, ``grpo_lab_state.json``, with a version and an
entry for each part that goes on after a resume (``Stateful``; docs/resume.md lists them all).

The record is JSON, tensors are in safetensors files beside it, and nothing is pickled. ``write_state`` and
``read_state`` are the file, ``SavedState`` is what a part reads its entry from. The reference model is one such part,
with files of its own (``save_reference``, ``load_reference``). The record of a supervised training has one entry,
``training``: its losses, metrics and tokens so far.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
from accelerate.utils import gather_object
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

from grpo_lab.io import write_whole, write_whole_text
from grpo_lab.reading import read_record

STATE = "grpo_lab_state.json"
VERSION = 1
REFERENCE = "grpo_lab_reference"
#: Bytes after which the reference model is continued in a new file. The rank that writes needs as much memory more.
PIECE = 2 << 30

T = TypeVar("T")


@dataclass(frozen=True)
class SavedState:
    """The entries of our parts in a checkpoint: name of the entry → what the part's ``save`` returned."""

    checkpoint: Path
    entries: Mapping[str, Any]

    def entry(self, name: str, read: Callable[[Any], T], without: str) -> T | None:
        """Return ``read(entry)`` for the entry ``name``, or None if the checkpoint has no such entry. Raises ValueError
        if ``read`` does, or fails on a damaged entry; ``without`` says in the message what a resume without the entry
        would mean."""
        if name not in self.entries:
            return None
        try:
            return read(self.entries[name])
        except (ValueError, KeyError, TypeError) as error:
            if isinstance(error, ValueError):
                why = str(error)
            else:
                why = repr(error)
            raise ValueError(
                f"`resume_from_checkpoint`: the entry `{name}` of {self.checkpoint / STATE} cannot be used ({why}); "
                f"take another checkpoint, or take the entry out: {without}"
            ) from error

    @property
    def without_moments(self) -> set[str]:
        """Names of weights that had no moments when the checkpoint was written (``trl_bridge.gradients``)."""
        names = self.entry("without_moments", lambda entry: set(entry["without_moments"]), "torch may then refuse it")
        return names or set()


class Stateful(Protocol):
    """A part of a training whose state is saved in checkpoints and restored from them.

    Attributes:
        holds: what the part's entry holds, in words for docs/resume.md.
    """

    holds: str

    def save(self, folder: Path, /) -> Any | None:
        """Write files of its own into a checkpoint, and return the record's entry, or None if there is nothing to save.
        Called on every rank."""

    def load(self, saved: SavedState | None, /) -> None:
        """Restore what ``save`` wrote; None: the training begins without a checkpoint. Called on every rank."""


class GeneratedTokens:
    """Counts the tokens that this training's policy has generated, over all ranks and resumes."""

    holds = "how many tokens the policy has made"

    def __init__(self) -> None:
        self.count = 0

    def save(self, _folder: Path) -> int:
        return self.count

    def load(self, saved: SavedState | None) -> None:
        self.count = 0
        if saved is not None:
            self.count = saved.entry("generated", int, "the tokens before it do not count") or 0


def write_state(folder: str | os.PathLike[str], entries: Mapping[str, Any]) -> None:
    """Write the record of a checkpoint into ``folder``. Only the rank that writes files (``should_save``) calls
    this."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    write_whole_text(Path(folder) / STATE, json.dumps({"version": VERSION, "entries": dict(entries)}))


def read_state(checkpoint: str | os.PathLike[str]) -> SavedState:
    """Return the entries of a checkpoint's record; none if it has no record, as stock TRL's. Raises ValueError if the
    record is damaged or of another version."""
    place = Path(checkpoint)
    if not (place / STATE).is_file():
        return SavedState(place, {})
    found = _json(place / STATE)
    if found.get("version") != VERSION or not isinstance(found.get("entries"), dict):
        raise ValueError(f"{place / STATE} has version {found.get('version')}, and this release reads {VERSION}")
    return SavedState(place, found["entries"])


def load_state(checkpoint: str | os.PathLike[str]) -> SavedState:
    """Return ``read_state`` for a resume. Called on every rank; an error on one is raised as ValueError on all."""
    problem: str | None = None
    try:
        found = read_state(checkpoint)
    except ValueError as error:
        problem = str(error)
    if problem := next(filter(None, gather_object([problem])), None):
        instead = "take another checkpoint, or remove the file to resume as stock TRL does"
        raise ValueError(f"`resume_from_checkpoint`: {problem}; {instead}")
    return found


def _json(file: Path) -> dict[str, Any]:
    try:
        return read_record(file)
    except (OSError, ValueError) as error:
        raise ValueError(f"{file} is damaged: {error}") from error


def plain_metrics(pending: Mapping[str, Iterable[Any]]) -> dict[str, list[float]]:
    """Return TRL's metrics since the last log as numbers that JSON can hold: int and float stay as they are, a scalar
    tensor (which a user may log) becomes a float."""
    return {name: [one if type(one) in (int, float) else float(one) for one in seen] for name, seen in pending.items()}


def save_reference(
    checkpoint: str | os.PathLike[str], tensors: Mapping[str, Tensor] | None, writes: bool
) -> dict[str, Any]:
    """Write the reference model into a checkpoint folder, and return its entry for the record.

    Every rank calls this, since gathering shards takes all of them; one ``writes``. ``tensors``: the reference's, by
    name; None: it is still the start model. Then no file is written, and the entry says so.
    """
    place = Path(checkpoint) / REFERENCE
    pieces = 0
    for piece in _pieces(tensors or {}, writes):
        if writes:
            place.mkdir(parents=True, exist_ok=True)
            write_whole(place / _file(pieces), lambda partial, piece=piece: save_file(piece, partial))  # type: ignore[misc]
        pieces += 1
    return {"moved": tensors is not None, "pieces": pieces}


def load_reference(saved: SavedState, tensors: Callable[[], Mapping[str, Tensor] | None]) -> bool | None:
    """Copy the reference model of a checkpoint into this run's reference, whole or sharded, to the bit.

    Args:
        saved: the checkpoint's entries.
        tensors: returns this run's reference tensors by name, or None if the run has no reference. It is called only if
            there is something to load.

    Returns:
        Whether the reference had been changed when it was saved; if it had not, nothing is loaded. None: the checkpoint
        does not say.

    Raises:
        ValueError: a file is damaged, missing or of another model.
    """

    def read(entry: Any) -> bool:
        place = saved.checkpoint / REFERENCE
        into = tensors() if entry["moved"] else None
        try:
            if into is not None:
                _load([place / _file(piece) for piece in range(entry["pieces"])], into)
        except (OSError, SafetensorError) as error:
            raise ValueError(f"the reference in {place} cannot be loaded: {error}") from error
        return bool(entry["moved"])

    return saved.entry("reference", read, "the reference is then the start model")


def _file(piece: int) -> str:
    return f"{piece:05d}.safetensors"


def _pieces(tensors: Mapping[str, Tensor], writes: bool) -> Iterator[dict[str, Tensor]]:
    """Yield the tensors, gathered and on the CPU, in pieces of at least ``PIECE`` bytes, one for each file. A rank that
    does not write takes part in the gathering, and yields empty tensors."""
    piece: dict[str, Tensor] = {}
    size = 0
    for name, value in tensors.items():
        whole = (value.full_tensor() if isinstance(value, DTensor) else value).detach()
        piece[name] = whole.cpu().clone().contiguous() if writes else torch.empty(0)
        size += whole.nbytes
        if size >= PIECE:
            yield piece
            piece = {}
            size = 0
    if piece:
        yield piece


@torch.no_grad()
def _load(files: list[Path], tensors: Mapping[str, Tensor]) -> None:
    """Copy the tensors in ``files`` into those of the same names. Raises ValueError if names, shapes or dtypes are not
    the same in both."""
    there: set[str] = set()
    for file in files:
        with safe_open(file, framework="pt") as stored:
            for name in stored.keys():  # noqa: SIM118 (no mapping)
                there.add(name)
                if name not in tensors:
                    continue
                saved = stored.get_tensor(name)
                into = tensors[name]
                if saved.shape != into.shape or saved.dtype != into.dtype:
                    ours = f"{tuple(into.shape)} {into.dtype} in this run"
                    raise ValueError(f"{name!r} is {tuple(saved.shape)} {saved.dtype} there and {ours}")
                if isinstance(into, DTensor):
                    saved = saved.to(into.device)
                    mine = distribute_tensor(saved, into.device_mesh, into.placements, src_data_rank=None)
                    into.to_local().copy_(mine.to_local())
                else:
                    into.copy_(saved)
    if other := sorted(there ^ tensors.keys()):
        raise ValueError(f"it is of another model: {other[0]!r} is in one of the two only")
