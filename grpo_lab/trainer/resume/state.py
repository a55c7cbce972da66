"""The state of a training beside a checkpoint: one record, ``grpo_lab_state.json``, with a version and an entry a part.

    generation       where in a generation batch; the rows of an open one are in
                     ``grpo_lab_generation_<rank>.safetensors``
    sampler          what the prompts' sampler knows            guard            bad steps in a row, a bad open batch
    kl               β of the next batch (``kl.target``)         evaluation_due   the resumed run evaluates first
    reference        whether it has moved; its weights are in ``grpo_lab_reference/``
    without_moments  weights for which FSDP2's optimizer holds nothing
    training         a supervised training's losses, metrics and tokens up to now

What is JSON is here, tensors are safetensors files beside it, nothing is pickled. Earlier releases wrote a file for
each entry; a checkpoint without a record is read from those.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from accelerate.utils import gather_object

from grpo_lab.io import write_whole_text

STATE = "grpo_lab_state.json"
VERSION = 1
#: entry → its file in checkpoints of earlier releases
EARLIER = {
    "generation": "grpo_lab_generation.json",
    "sampler": "grpo_lab_sampler.json",
    "guard": "grpo_lab_guard.json",
    "kl": "grpo_lab_kl.json",
    "evaluation_due": "grpo_lab_evaluation_due.json",
    "reference": "grpo_lab_reference/reference.json",
    "without_moments": "grpo_lab_without_moments.json",
    "training": "grpo_lab_training.json",
}

T = TypeVar("T")


@dataclass(frozen=True)
class SavedState:
    """What a checkpoint says of the parts."""

    checkpoint: Path
    entries: Mapping[str, Any]

    def entry(self, name: str, read: Callable[[Any], T], without: str) -> T | None:
        """What ``read`` makes of an entry; None where there is none.

        Args:
            without: what follows where somebody takes the entry out.

        Raises:
            ValueError: it is damaged, or does not fit this run.
        """
        if name not in self.entries:
            return None
        try:
            return read(self.entries[name])
        except (ValueError, KeyError, TypeError) as error:
            why = str(error) if isinstance(error, ValueError) else repr(error)
            raise ValueError(
                f"`resume_from_checkpoint`: the entry `{name}` of {self.checkpoint / STATE} cannot be used ({why}); "
                "take another "
                f"checkpoint, or take the entry out: {without}"
            ) from error

    @property
    def without_moments(self) -> set[str]:
        """Weights that had no moments when the checkpoint was written (``trl_bridge.fsdp_optimizer``)."""
        return (
            self.entry("without_moments", lambda entry: set(entry["without_moments"]), "torch may then refuse it")
            or set()
        )


def write_state(folder: str | os.PathLike[str], entries: Mapping[str, Any]) -> None:
    """The record of a checkpoint; called where the checkpoint is written (``should_save``)."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    write_whole_text(Path(folder) / STATE, json.dumps({"version": VERSION, "entries": dict(entries)}))


def read_state(checkpoint: str | os.PathLike[str]) -> SavedState:
    """Of this release or an earlier one; without entries where there is none (stock TRL's).

    Raises:
        ValueError: it is damaged, or of a later release.
    """
    place = Path(checkpoint)
    if not (place / STATE).is_file():
        return SavedState(
            place, {name: _json(place / file) for name, file in EARLIER.items() if (place / file).is_file()}
        )
    found = _json(place / STATE)
    if found.get("version") != VERSION or not isinstance(found.get("entries"), dict):
        raise ValueError(f"{place / STATE} has version {found.get('version')}, and this release reads {VERSION}")
    return SavedState(place, found["entries"])


def load_state(checkpoint: str | os.PathLike[str]) -> SavedState:
    """``read_state`` where a training goes on: called on every rank, and an error of one is an error of all."""
    problem: str | None = None
    try:
        found = read_state(checkpoint)
    except ValueError as error:
        problem = str(error)
    problem = next((words for words in gather_object([problem]) if words is not None), None)
    if problem is not None:
        raise ValueError(
            f"`resume_from_checkpoint`: {problem}; take another checkpoint, or remove the file to resume as stock "
            "TRL does"
        )
    return found


def _json(file: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(file.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise ValueError(f"{file} is damaged: {error}") from error
