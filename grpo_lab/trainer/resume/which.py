"""Which checkpoint a training goes on from: the newest that is whole and finite on every node, or the one that was asked for."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

from accelerate.utils import gather_object

from grpo_lab.checkpoints import MARK, broken_pickles, damaged, lacking, newest_whole, step_of


def chosen(trainer: Any, given: Any) -> Any:
    """What ``resume_from_checkpoint`` means: ``True`` is the newest whole checkpoint, where transformers takes the newest.

    Raises:
        ValueError: there are checkpoints, and none is whole; or the one that was asked for by its path is not what was written.
    """
    if isinstance(given, str | os.PathLike) and not isinstance(given, WasRead):
        _refuse_damaged(Path(given), trainer.args.local_process_index == 0)
    if isinstance(given, str | os.PathLike):
        _say_what_starts_anew(trainer, Path(given))
    if given is not True:
        return given
    newest, passed = newest_read(Path(trainer.args.output_dir), trainer.args.local_process_index == 0)
    if newest is None and passed:
        raise ValueError(
            f"`resume_from_checkpoint` is True, and no checkpoint in {trainer.args.output_dir} is whole: {'; '.join(passed)}"
        )
    for why in passed:
        trainer.recorder.say(f"`resume_from_checkpoint`: passed over {why}", level=logging.WARNING)
    if newest is None:
        return given
    _say_what_starts_anew(trainer, newest)
    return str(newest)


def _say_what_starts_anew(trainer: Any, checkpoint: Path) -> None:
    """transformers takes a checkpoint without optimizer, schedule or random numbers, and says nothing."""
    ranks = trainer.accelerator.num_processes
    random = "rng_state.pth" if ranks == 1 else f"rng_state_{trainer.accelerator.process_index}.pth"
    own = [name for name in lacking(checkpoint) if name != "rng_state.pth"]
    own += [] if (checkpoint / random).is_file() else [random]
    if missing := sorted(set(gather_object(own if checkpoint.is_dir() else []))):
        trainer.recorder.say(
            f"`resume_from_checkpoint`: {checkpoint} holds no {', '.join(missing)} (`save_only_model`, another number of processes, or it "
            "was removed): that starts anew, and the run is no longer the one that was saved",
            level=logging.WARNING,
        )


class WasRead(str):
    """The path of a checkpoint that was read against its checksums a moment ago, and need not be again."""


def newest_read(folder: Path, reads: bool) -> tuple[Path | None, list[str]]:
    """``newest_whole`` by its content, the same on every rank: one process of a node ``reads``, and the oldest answer holds."""
    own = newest_whole(folder, read=True) if reads else None
    told = [one for one in gather_object([own]) if one is not None]
    passed = list(dict.fromkeys(why for _, words in told for why in words))
    found = min((place for place, _ in told if place is not None), key=step_of, default=None)
    return None if any(place is None for place, _ in told) else found, passed


def _refuse_damaged(checkpoint: Path, reads: bool) -> None:
    own = (broken_pickles(checkpoint) or damaged(checkpoint)) if reads else None
    why = next(filter(None, gather_object([own])), None)
    if why is not None:
        despite = f"; to go on from this one all the same, remove {MARK} in it" if (checkpoint / MARK).is_file() else ""
        raise ValueError(f"`resume_from_checkpoint`: {checkpoint}: {why}. Take another checkpoint{despite}")


__all__ = ["WasRead", "chosen", "newest_read"]
