"""Which checkpoint a training goes on from: the newest that is whole and finite on every node, or the one that was
asked for.

transformers saves some models (LLaVA and other vision models) under the names of their first release; ``Trainer`` reads
by the model's own names, finds none, warns, and would go on from the weights that the run began with
(``load_other_names``).
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Collection
from pathlib import Path
from typing import Any

from accelerate.utils import gather_object
from safetensors import safe_open
from transformers import PreTrainedModel

from grpo_lab.trainer.resume.whole import MARK, broken_pickles, damaged, lacking, newest_whole, step_of
from grpo_lab.trainer.trl_bridge import is_critics


def chosen(trainer: Any, given: Any) -> Any:
    """What ``resume_from_checkpoint`` means: ``True`` is the newest whole checkpoint, where transformers takes the
    newest.

    Raises:
        ValueError: there are checkpoints, and none is whole; or the one that was asked for by its path is not what was
            written.
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
            f"`resume_from_checkpoint` is True, and no checkpoint in {trainer.args.output_dir} is whole: "
            f"{'; '.join(passed)}"
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
            f"`resume_from_checkpoint`: {checkpoint} holds no {', '.join(missing)} (`save_only_model`, another "
            "number of processes, or it "
            "was removed): that starts anew, and the run is no longer the one that was saved",
            level=logging.WARNING,
        )


class WasRead(str):
    """The path of a checkpoint that was read against its checksums a moment ago, and need not be again."""


def newest_read(folder: Path, reads: bool) -> tuple[Path | None, list[str]]:
    """``newest_whole`` by its content, the same on every rank: one process of a node ``reads``, and the oldest answer
    holds."""
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


def load_other_names(trainer: Any, checkpoint: str) -> None:
    """Load a model's own tensors by ``from_pretrained`` where ``Trainer`` has passed any of them over; nothing where it
    has them all."""
    model = trainer.accelerator.unwrap_model(trainer.model)
    if not isinstance(model, PreTrainedModel) or trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled:
        return  # adapters; formats of their own
    state, names = model.state_dict(), saved_names(Path(checkpoint))
    there = {state[name].data_ptr() for name in names & state.keys()}  # a tied one is saved once
    passed_over = [name for name, one in state.items() if one.data_ptr() not in there and not is_critics(name)]
    if not names or not passed_over:
        return
    read: Any = type(model).from_pretrained
    whole, found = read(checkpoint, dtype="auto", output_loading_info=True)
    refuse_lacking(found["missing_keys"], (), len(state))
    model.load_state_dict(whole.state_dict(), strict=False)


def refuse_lacking(missing: Collection[str], unexpected: Collection[str], of: int) -> None:
    """A tensor that a checkpoint lacks would stay as the start model has it.

    Raises:
        ValueError: it lacks some, and has not the same under other names (LLaVA's).
    """
    if len(missing) > len(unexpected):
        raise ValueError(
            f"`resume_from_checkpoint`: the checkpoint lacks {len(missing)} of {of} tensors of the model "
            f"({min(missing)}, …): it is not "
            "whole, or of another model; take another one (renamed, this one is passed over)"
        )


def saved_names(checkpoint: Path) -> set[str]:
    """Names of the tensors that a checkpoint's safetensors files hold."""
    index = checkpoint / "model.safetensors.index.json"
    if index.is_file():
        return set(json.loads(index.read_text(encoding="utf-8"))["weight_map"])
    one = checkpoint / "model.safetensors"
    if not one.is_file():
        return set()
    with safe_open(one, framework="pt") as file:
        return set(file.keys())
