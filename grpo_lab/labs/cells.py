"""Cells of a lab: an arm with a seed, the folder in which it works, and its record.

A cell works in ``<lab>/<arm>-<seed>``. Two files there say how it stands:

    stage.json    what the cell is made from, and whether it is done, as for a stage of a pipeline
                  (``pipelines/stage_record.py``)
    arm.json      its record, written last and as a whole

A cell is run again only if what it is made from has changed, or if files that it left are gone. The old folder is then
renamed to ``<arm>-<seed>.before-<n>``, and no table counts it. What a lab shows of its cells is not part of what they
are made from.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from glob import escape
from pathlib import Path
from typing import Any

from grpo_lab.evaluation.run_record import DONE, RUNNING
from grpo_lab.io import write_whole_text
from grpo_lab.pipelines.stage_record import StageRecord, digests_of
from grpo_lab.reading import read_record
from grpo_lab.runs.stage import Facts, plain_facts

Record = dict[str, Any]
Found = dict[str, list[Record]]
"""Arm → its records, one per seed."""

NOT_KNOWN = "after the lab's `prepare`"
"""Reason given for a cell whose settings cannot be read yet."""


@dataclass(frozen=True)
class LabCell:
    """An arm with a seed, and what it is to be made from.

    Args:
        arm: the arm's name.
        seed: the seed.
        lab: the folder of all cells.
        settings: the settings as JSON gives them back, with paths in ``lab`` relative to it; None: they are not known
            yet.
        digests: file or folder that the settings name → digest of its contents.
    """

    arm: str
    seed: int
    lab: Path
    settings: Facts | None
    digests: Mapping[str, str]

    @classmethod
    def of(
        cls, arm: str, seed: int, lab: Path, settings: Mapping[str, Any] | None, start: Path | None = None
    ) -> LabCell:
        """Make a cell from the lab's ``settings``.

        ``start`` (the model that the cell begins from) and the files and folders that the settings name are compared by
        their contents.
        """
        plain = plain_facts(settings)
        held = digests_of(plain, {} if start is None else {"start": start})
        digests = {_seen_from(lab, name): digest for name, digest in held.items()}
        return cls(arm, seed, lab, None if settings is None else _seen_from(lab, plain), digests)

    @property
    def name(self) -> str:
        """Return the cell's name for messages."""
        return f"{self.arm}, seed {self.seed}"

    @property
    def file(self) -> Path:
        """Return the path of the cell's record."""
        return record_file(self.lab, self.arm, self.seed)

    @property
    def folder(self) -> Path:
        """Return the folder in which the cell works."""
        return self.file.parent

    @property
    def log(self) -> Path:
        """Return the path of the file with all that the cell prints."""
        return Path(f"{self.folder}.log")

    def due(self) -> str:
        """Return the reason why the cell has to be run; empty if its record is up to date."""
        stage = self._stage()
        if self.settings is None:
            return NOT_KNOWN
        return stage.due(self.folder, self.settings, self.digests, stage.results.get("kept", ()))

    def begin(self) -> None:
        """Prepare the folder. What a killed cell left stays; files made from something else are moved aside."""
        if self.settings is not None:
            stage = self._stage()
            stage.begin(self.folder, self.settings, dict(self.digests), stage.results.get("kept", ()))

    def finish(self, found: Record, kept: Iterable[str]) -> None:
        """Write the cell's record, and that the cell is done.

        ``kept``: places in its folder that are read later. Those that exist now must still exist then, or the cell is
        run again.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        write_whole_text(self.file, json.dumps({"arm": self.arm, "seed": self.seed, **found}))
        stage = self._stage()
        stage.status = DONE
        stage.seconds = found.get("process_seconds")
        stage.results = {"kept": [place for place in kept if (self.folder / place).exists()]}
        stage.write(self.folder)

    def record(self) -> Record:
        """Read the cell's record. Raises ValueError if it is damaged."""
        return read_record(self.file, {"arm": str, "seed": int}, "remove it, and the cell runs again")

    def _stage(self) -> StageRecord:
        """Read the cell's `stage.json`. A stage that is done but has lost its record counts as running."""
        stage = StageRecord.read(self.folder, self.folder.name, "cell")
        if stage.status == DONE and not self.file.is_file():
            stage.status = RUNNING
        return stage


def folder_name(arm: str) -> str:
    """Return the arm's name in a form that a folder can have."""
    return arm.replace(", ", "_").replace(" ", "_")


def record_file(folder: Path, arm: str, seed: int) -> Path:
    """Return the path of the record of one arm with one seed, for the lab in ``folder``."""
    return folder / f"{folder_name(arm)}-{seed}" / "arm.json"


def seeds_recorded(folder: Path, arm: str) -> list[int]:
    """List the seeds for which the arm has a record in the lab's folder, up to date or not."""
    start = record_file(folder, arm, 0).parent.name.removesuffix("0")
    seeds = [file.parent.name.removeprefix(start) for file in folder.glob(f"{escape(start)}*/arm.json")]
    return sorted(int(seed) for seed in seeds if re.fullmatch(r"-?\d+", seed))


def _seen_from(lab: Path, value: Any) -> Any:
    """Return ``value`` with paths below ``lab`` made relative to it, so that the lab's folder may be moved."""
    if isinstance(value, Mapping):
        return {name: _seen_from(lab, one) for name, one in value.items()}
    if isinstance(value, list):
        return [_seen_from(lab, one) for one in value]
    if isinstance(value, str):
        return value.removeprefix(f"{lab}/")
    return value
