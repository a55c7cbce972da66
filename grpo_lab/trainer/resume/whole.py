"""Decide which checkpoints of a run are whole and finite: one rule for ``--resume``, for
``resume_from_checkpoint=True`` and for error messages.

A checkpoint is written into ``_saving/`` and moved to its name when it is whole and finite, with a list of its files
(``MARK``). So a folder ``checkpoint-N`` of ours is both. Checkpoints of stock TRL or of earlier versions, and files
that were cut since, are checked by the heads and ends of the files. Before a resume, all of a checkpoint is read
(``damaged``) and compared with the checksums of the list. It is also searched for NaN, unless the list says that this
was done.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import zipfile
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch.serialization import get_unsafe_globals_in_checkpoint

from grpo_lab.finite import ROWS, not_finite
from grpo_lab.io import move_whole, own_cores, write_whole_text
from grpo_lab.reading import read_record
from grpo_lab.trainer.resume.state import read_state

#: Folder beside the checkpoints in which the next one is written. The underscore keeps it out of pushes to the hub.
SAVING = "_saving"
#: The list of files, written last: the step, and every file with its bytes and its checksum.
MARK = "grpo_lab_checkpoint.json"
#: Bytes of a file that one thread reads for its checksum.
PIECE = 64 * 2**20
#: Largest pickle, in bytes, that a look at a checkpoint reads: random numbers, schedule, no optimizer.
SMALL = 16 * 2**20
#: transformers' mark of an unfinished checkpoint that a signal asked for.
INCOMPLETE = "checkpoint-is-incomplete.txt"
#: What a resume needs beside the weights, and its file names (FSDP's and DeepSpeed's, too).
BESIDE_WEIGHTS = {
    "optimizer.pt": ("optimizer.pt", "optimizer.bin", "optimizer_*", "global_step*"),
    "scheduler.pt": ("scheduler.pt", "global_step*"),
    "rng_state.pth": ("rng_state*.pth",),
}
#: Pickles that a resume loads; they may name only ``MAY_BE_NAMED`` and torch's own globals.
LOADED = ("optimizer", "scheduler", "scaler", "rng_state")
MAY_BE_NAMED = {"numpy.ndarray", "numpy.dtype", "numpy.dtypes.UInt32DType", "_codecs.encode"}
MAY_BE_NAMED |= {f"numpy.{core}.multiarray._reconstruct" for core in ("core", "_core")}


def step_of(checkpoint: Path) -> int:
    """Return the finished optimizer steps in the folder's name; -1 for another name."""
    number = checkpoint.name.removeprefix("checkpoint-")
    if number.isascii() and number.isdigit():
        return int(number)
    return -1


def all_in(folder: Path) -> list[Path]:
    """Return the checkpoints in a folder, oldest first, whole or not."""
    return sorted((one for one in folder.glob("checkpoint-*") if one.is_dir() and step_of(one) >= 0), key=step_of)


def newest_whole(folder: Path, read: bool = False) -> tuple[Path | None, list[str]]:
    """Return the newest whole checkpoint, and why each newer one was passed over. ``read``: check the content, too."""
    passed: list[str] = []
    for checkpoint in reversed(all_in(folder)):
        broken = what_is_broken(checkpoint) or (damaged(checkpoint) if read else None)
        if broken is None:
            return checkpoint, passed
        passed.append(f"{checkpoint.name} ({broken})")
    return None, passed


def what_is_broken(checkpoint: Path) -> str | None:
    """Return why a checkpoint cannot be resumed from, None for a whole one. Read only heads and ends of its files."""
    if (checkpoint / INCOMPLETE).exists():
        return f"{INCOMPLETE} stands in it: saving was not finished"
    try:
        state = read_record(checkpoint / "trainer_state.json")
    except FileNotFoundError:
        return "no trainer_state.json, which is written last: saving was not finished"
    except ValueError as error:
        return f"trainer_state.json is damaged: {error}"
    if state.get("global_step") != step_of(checkpoint):
        return "trainer_state.json is of another step"
    try:
        read_state(checkpoint)
        return broken_weights(checkpoint) or broken_pickles(checkpoint) or _against_mark(checkpoint)
    except ValueError as error:
        return str(error)


def lacking(checkpoint: Path) -> list[str]:
    """Return which states, such as the optimizer's, are not in a checkpoint. A resume then begins them anew."""
    return [name for name, forms in BESIDE_WEIGHTS.items() if not any(any(checkpoint.glob(form)) for form in forms)]


def broken_weights(folder: Path) -> str | None:
    """Return why the saved model (or adapter) in ``folder`` cannot be loaded, judged by its files' heads and sizes."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        try:
            places: dict[str, str] = read_record(index, {"weight_map": dict})["weight_map"]
        except ValueError as error:
            return f"{index.name} is damaged: {error}"
    else:
        places = {path.name: path.name for path in folder.glob("*.safetensors")}  # no list: a file for itself
    sharded = any(folder.glob("pytorch_model*")) or any(folder.glob("global_step*"))  # FSDP's and DeepSpeed's own forms
    if not places and not sharded:
        return "it holds no weights"
    for name in sorted(set(places.values())):
        try:
            with safe_open(folder / name, framework="pt") as file:  # checks the length of the file against its head
                here = {*file.keys(), name}
        except (SafetensorError, OSError) as error:
            return f"{name} is not whole: {error}"
        if missing := sorted(tensor for tensor, shard in places.items() if shard == name and tensor not in here):
            return f"{name} lacks {missing[0]}"
    return None


def broken_pickles(checkpoint: Path) -> str | None:
    """Return which ``.pt`` or ``.pth`` file of the checkpoint cannot be loaded, and why; None if all can."""
    for file in sorted(checkpoint.glob("*.pt*")):
        try:  # torch.save writes a zip file, whose list of contents stands at its end
            with zipfile.ZipFile(file) as archive:
                bad = None
                if file.stat().st_size <= SMALL:
                    bad = archive.testzip()
            named = []
            if file.name.startswith(LOADED):
                named = get_unsafe_globals_in_checkpoint(str(file))
        except Exception:  # flipped bits: an unknown compression, a name that is no text, a request for a password
            return f"{file.name} is not whole"
        for name in named:
            if name not in MAY_BE_NAMED and not name.startswith(("torch.", "torchao.")):
                return f"{file.name} names {name}, which is not loaded from a file: no training wrote it"
        if bad is not None:
            return f"{file.name} is damaged: {bad} has another checksum"
    return None


def keep(partial: Path, place: Path, checksums: bool = True, finite: bool = True) -> None:
    """Add the list to ``_saving/checkpoint-N``, which is whole, and move it to ``place``: flushed, in one rename."""
    write_whole_text(partial / MARK, json.dumps(mark_of(partial, step_of(place), checksums, finite)))
    move_whole(partial, place)
    shutil.rmtree(partial.parent, ignore_errors=True)


def mark_of(folder: Path, step: int, checksums: bool = True, finite: bool = True) -> dict[str, Any]:
    """Return the content of ``MARK`` for a whole folder: shards of FSDP and DeepSpeed have no other list. ``finite``:
    whether it was checked for NaN.

    For the checksums every file is read once, while it is being flushed to the disk, for which ``move_whole`` would
    wait anyway. Files that are read as text have none: people edit ``trainer_state.json``, a configuration, a chat
    template.
    """
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != MARK)
    sizes = {path.relative_to(folder).as_posix(): path.stat().st_size for path in files}
    found = {"step": step, "finite": finite, "files": sizes}
    if checksums:
        with ThreadPoolExecutor(max_workers=1) as beside:
            beside.submit(_towards_disk, files)
            binary = [name for name in sizes if not name.endswith((".json", ".txt", ".jinja", ".md"))]
            found["sha256"] = checksums_of(folder, binary)
    return found


def _towards_disk(files: list[Path]) -> None:
    for file in files:
        with suppress(OSError), file.open("rb") as opened:  # an error is the move's, which asks again
            os.fsync(opened.fileno())


def checksums_of(folder: Path, names: list[str]) -> dict[str, str]:
    """Return file → SHA-256 of the SHA-256 digests of its pieces of ``PIECE`` bytes, which several threads read."""
    pieces = [(name, start) for name in names for start in range(0, (folder / name).stat().st_size, PIECE)]
    found = {name: hashlib.sha256() for name in names}
    with ThreadPoolExecutor(max_workers=min(16, own_cores())) as threads:
        for (name, _), digest in zip(pieces, threads.map(lambda piece: _digest(folder, *piece), pieces), strict=True):
            found[name].update(digest)
    return {name: one.hexdigest() for name, one in found.items()}


def _digest(folder: Path, name: str, start: int) -> bytes:
    found = hashlib.sha256()
    buffer = memoryview(bytearray(2**20))
    left = PIECE
    with (folder / name).open("rb", buffering=0) as file:
        file.seek(start)
        while left > 0 and (got := file.readinto(buffer[: min(left, len(buffer))])):
            found.update(buffer[:got])
            left -= got
    return found.digest()


def damaged(checkpoint: Path) -> str | None:
    """Return what differs from what was written, or is not finite and was never checked; None if nothing is. All of the
    checkpoint is read."""
    try:
        listed = _mark(checkpoint)
    except ValueError as error:
        return str(error)
    if listed is None:
        return not_finite(checkpoint)
    try:
        batch = "generation" in read_state(checkpoint).entries  # else taken out by hand, and its rows are not read
    except ValueError:
        batch = True
    wanted: dict[str, str] = listed.get("sha256") or {}
    here = [name for name in wanted if (checkpoint / name).is_file() and (batch or not name.startswith(ROWS))]
    found = checksums_of(checkpoint, here)
    if other := next((name for name in here if found[name] != wanted[name]), None):
        return f"{other} is damaged: its content is not what was written (another checksum)"
    if "finite" in listed:
        return None
    return not_finite(checkpoint)


def _mark(checkpoint: Path) -> dict[str, Any] | None:
    """Return the content of ``MARK``, None without one. Raise ``ValueError`` if it cannot be read."""
    try:
        return read_record(checkpoint / MARK, {"files": dict})
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise ValueError(f"{MARK} is damaged: {error}") from error


def _against_mark(checkpoint: Path) -> str | None:
    """Return the first listed file that is missing or cut; text files may change (people edit ``trainer_state.json``).
    Without a list, return what is missing if only part of what a resume needs is there."""
    mark = _mark(checkpoint)
    if mark is None:
        missing = lacking(checkpoint)
        if 0 < len(missing) < len(BESIDE_WEIGHTS):
            return f"{missing[0]} is missing"
        return None
    for name, size in mark["files"].items():
        file = checkpoint / name
        if not file.is_file():
            return f"{name} is missing"
        if file.suffix in (".safetensors", ".pt", ".pth", ".bin", ".distcp") and file.stat().st_size != size:
            return f"{name} has {file.stat().st_size} bytes of {size}"
    return None
