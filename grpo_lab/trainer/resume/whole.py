"""Decide which checkpoints of a run are whole and finite: one rule for ``--resume``, for
``resume_from_checkpoint=True`` and for error messages.

Our checkpoints are written into ``_saving/``, and moved to their name once they are whole and finite, with a list of
their files (``MARK``). A checkpoint may still be of stock TRL or of an earlier version, or have lost files or parts of
them since. So there are two checks. A quick one reads only the heads and ends of files (``what_is_broken``). Before a
resume, all of the checkpoint is read and compared with the checksums of its list; it is also searched for NaN, unless
the list says whether this was done (``damaged``).
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
#: Name of the list of a checkpoint's files, written last: the step, and each file's size in bytes and checksum.
MARK = "grpo_lab_checkpoint.json"
#: Bytes of a piece of a file; threads compute the digests of pieces side by side.
PIECE = 64 * 2**20
#: Largest pickle, in bytes, that the quick check reads whole: random numbers and schedule, but not an optimizer.
SMALL = 16 * 2**20
#: Name of the file by which transformers marks an unfinished checkpoint, written at a signal.
INCOMPLETE = "checkpoint-is-incomplete.txt"
#: State that a resume needs beside the weights → patterns of its file names (FSDP's and DeepSpeed's, too).
BESIDE_WEIGHTS = {
    "optimizer.pt": ("optimizer.pt", "optimizer.bin", "optimizer_*", "global_step*"),
    "scheduler.pt": ("scheduler.pt", "global_step*"),
    "rng_state.pth": ("rng_state*.pth",),
}
#: Beginnings of the names of pickles that a resume loads, and the names of classes and functions that they may hold
#: besides torch's own.
LOADED = ("optimizer", "scheduler", "scaler", "rng_state")
MAY_BE_NAMED = {"numpy.ndarray", "numpy.dtype", "numpy.dtypes.UInt32DType", "_codecs.encode"}
MAY_BE_NAMED |= {f"numpy.{core}.multiarray._reconstruct" for core in ("core", "_core")}


def step_of(checkpoint: Path) -> int:
    """Return the number of optimizer steps in the name ``checkpoint-N`` of a folder; -1 for another name."""
    number = checkpoint.name.removeprefix("checkpoint-")
    if number.isascii() and number.isdigit():
        return int(number)
    return -1


def all_in(folder: Path) -> list[Path]:
    """Return the checkpoints in a folder, oldest first, whole or not."""
    return sorted((one for one in folder.glob("checkpoint-*") if one.is_dir() and step_of(one) >= 0), key=step_of)


def newest_whole(folder: Path, read: bool = False) -> tuple[Path | None, list[str]]:
    """Return the newest whole checkpoint in a folder, or None, and why each newer one was passed over. ``read``: read
    and check the content of all files (``damaged``), too."""
    passed: list[str] = []
    for checkpoint in reversed(all_in(folder)):
        broken = what_is_broken(checkpoint) or (damaged(checkpoint) if read else None)
        if broken is None:
            return checkpoint, passed
        passed.append(f"{checkpoint.name} ({broken})")
    return None, passed


def what_is_broken(checkpoint: Path) -> str | None:
    """Return why a checkpoint cannot be resumed from; None for a whole one. Only heads and ends of large files are
    read."""
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
    """Return which states of ``BESIDE_WEIGHTS``, such as the optimizer's, are not in a checkpoint. A resume begins them
    anew."""
    return [name for name, forms in BESIDE_WEIGHTS.items() if not any(any(checkpoint.glob(form)) for form in forms)]


def broken_weights(folder: Path) -> str | None:
    """Return why the model or adapter saved in ``folder`` cannot be loaded, by the heads and sizes of its safetensors
    files; None if it can. Weights in FSDP's and DeepSpeed's own formats are not checked."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        try:
            places: dict[str, str] = read_record(index, {"weight_map": dict})["weight_map"]
        except ValueError as error:
            return f"{index.name} is damaged: {error}"
    else:
        places = {path.name: path.name for path in folder.glob("*.safetensors")}  # a single file has no index
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
    """Return which ``.pt`` or ``.pth`` file of the checkpoint cannot be loaded, and why; None if all can. A file is
    refused, too, if it names a class or function that no training writes: a pickle could call it when it is loaded."""
    for file in sorted(checkpoint.glob("*.pt*")):
        try:  # torch.save writes a zip file, whose list of contents stands at its end
            with zipfile.ZipFile(file) as archive:
                bad = None
                if file.stat().st_size <= SMALL:
                    bad = archive.testzip()
            named = []
            if file.name.startswith(LOADED):
                named = get_unsafe_globals_in_checkpoint(str(file))
        except Exception:  # flipped bits may look like a compression, a bad name, a password
            return f"{file.name} is not whole"
        for name in named:
            if name not in MAY_BE_NAMED and not name.startswith(("torch.", "torchao.")):
                return f"{file.name} names {name}, which is not loaded from a file: no training wrote it"
        if bad is not None:
            return f"{file.name} is damaged: {bad} has another checksum"
    return None


def keep(partial: Path, place: Path, checksums: bool = True, finite: bool = True) -> None:
    """Write the list of files into ``partial``, a checkpoint that is whole, flush it to the disk, and move it to
    ``place`` in one rename. ``checksums`` and ``finite``: as for ``mark_of``."""
    write_whole_text(partial / MARK, json.dumps(mark_of(partial, step_of(place), checksums, finite)))
    move_whole(partial, place)
    shutil.rmtree(partial.parent, ignore_errors=True)


def mark_of(folder: Path, step: int, checksums: bool = True, finite: bool = True) -> dict[str, Any]:
    """Return the content of ``MARK`` for a checkpoint of optimizer step ``step`` in ``folder``: all files with their
    sizes, and the checksums if asked for. ``finite``: whether the folder was checked for NaN.

    For the checksums every binary file is read once, while it is being flushed to the disk, for which ``move_whole``
    would wait anyway. Text files have none: people edit ``trainer_state.json``, a configuration, a chat template.
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
    """Flush files to the disk, as far as that works."""
    for file in files:
        with suppress(OSError), file.open("rb") as opened:  # `move_whole` flushes again, and reports errors
            os.fsync(opened.fileno())


def checksums_of(folder: Path, names: list[str]) -> dict[str, str]:
    """Return name of a file → its checksum in hexadecimal: the SHA-256 of the SHA-256 digests of its pieces of
    ``PIECE`` bytes, which several threads read."""
    pieces = [(name, start) for name in names for start in range(0, (folder / name).stat().st_size, PIECE)]
    found = {name: hashlib.sha256() for name in names}
    with ThreadPoolExecutor(max_workers=min(16, own_cores())) as threads:
        for (name, _), digest in zip(pieces, threads.map(lambda piece: _digest(folder, *piece), pieces), strict=True):
            found[name].update(digest)
    return {name: one.hexdigest() for name, one in found.items()}


def _digest(folder: Path, name: str, start: int) -> bytes:
    """Return the SHA-256 of the piece of a file that begins at byte ``start``."""
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
    """Read all of a checkpoint, and return what is wrong with it; None if nothing is. Wrong is a file whose checksum is
    not that of the list. NaN and infinities are wrong, too, if there is no list (stock TRL), or none that says whether
    they were searched for (earlier versions)."""
    try:
        listed = _mark(checkpoint)
    except ValueError as error:
        return str(error)
    if listed is None:
        return not_finite(checkpoint)
    try:
        batch = "generation" in read_state(checkpoint).entries  # without it the rows' files are not used
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
    """Return the content of a checkpoint's ``MARK``; None if it has none. Raises ValueError if it cannot be read."""
    try:
        return read_record(checkpoint / MARK, {"files": dict})
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise ValueError(f"{MARK} is damaged: {error}") from error


def _against_mark(checkpoint: Path) -> str | None:
    """Compare the sizes of a checkpoint's files with its list, and return what is wrong; None if nothing is.

    Wrong is a listed file that is missing, or a binary file of another size; text files may change (people edit
    ``trainer_state.json``). Without a list, a state that a resume needs is missed only if others are there:
    ``save_only_model`` saves none of them.
    """
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
