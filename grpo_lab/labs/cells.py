"""Cells of a lab: an arm with a seed, the folder in which it works, and its record.

A cell works in ``<lab>/<arm>-<seed>``. `stage.json` there says what it is made from and whether it is done, as that of
a pipeline's stage does (``pipelines/stage_record.py``). `arm.json`, its record, is written last and as a whole. A cell
is run again only if what it is made from has changed, or files that it left are gone. The old folder is then renamed to
``<arm>-<seed>.before-<n>``, and is in no table. What a lab shows of its cells does not count as what they are made
from.
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
"""Reason why a cell is due whose settings cannot be read yet."""


@dataclass(frozen=True)
class LabCell:
    """An arm with a seed, and what it is to be made from.

    Args:
        lab: the folder of all cells.
        settings: as JSON returns them, with paths in ``lab`` relative to it; None: they are not known yet.
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
        """Make a cell from the lab's ``settings``. ``start``, and files and folders in them, are compared by
        contents."""
        plain = plain_facts(settings)
        held = digests_of(plain, {} if start is None else {"start": start})
        digests = {_seen_from(lab, name): digest for name, digest in held.items()}
        return cls(arm, seed, lab, None if settings is None else _seen_from(lab, plain), digests)

    @property
    def name(self) -> str:
        return f"{self.arm}, seed {self.seed}"

    @property
    def file(self) -> Path:
        return record_file(self.lab, self.arm, self.seed)

    @property
    def folder(self) -> Path:
        return self.file.parent

    @property
    def log(self) -> Path:
        return Path(f"{self.folder}.log")

    def due(self) -> str:
        """Return the reason why the cell is to be run; empty if its record is up to date."""
        stage = self._stage()
        if self.settings is None:
            return NOT_KNOWN
        return stage.due(self.folder, self.settings, self.digests, stage.results.get("kept", ()))

    def begin(self) -> None:
        """Prepare the folder. A killed cell's files stay; files made from something else are moved aside."""
        if self.settings is not None:
            stage = self._stage()
            stage.begin(self.folder, self.settings, dict(self.digests), stage.results.get("kept", ()))

    def finish(self, found: Record, kept: Iterable[str]) -> None:
        """Write the cell's record, and that it is done. ``kept``: places in its folder that are read later; those that
        exist now must still exist then."""
        self.folder.mkdir(parents=True, exist_ok=True)
        write_whole_text(self.file, json.dumps({"arm": self.arm, "seed": self.seed, **found}))
        stage = self._stage()
        stage.status = DONE
        stage.seconds = found.get("process_seconds")
        stage.results = {"kept": [place for place in kept if (self.folder / place).exists()]}
        stage.write(self.folder)

    def record(self) -> Record:
        """Read the cell's record."""
        return read_record(self.file, {"arm": str, "seed": int}, "remove it, and the cell runs again")

    def _stage(self) -> StageRecord:
        """Read the cell's stage from its folder. One that is done but has lost its record counts as running."""
        stage = StageRecord.read(self.folder, self.folder.name, "cell")
        if stage.status == DONE and not self.file.is_file():
            stage.status = RUNNING
        return stage


def folder_name(arm: str) -> str:
    """Return the arm's name as folders have it."""
    return arm.replace(", ", "_").replace(" ", "_")


def record_file(folder: Path, arm: str, seed: int) -> Path:
    """Return the file in which the lab in ``folder`` keeps the record of one arm with one seed."""
    return folder / f"{folder_name(arm)}-{seed}" / "arm.json"


def seeds_recorded(folder: Path, arm: str) -> list[int]:
    """List the seeds for which the arm has a record in the lab's folder, whatever it was made from."""
    start = record_file(folder, arm, 0).parent.name.removesuffix("0")
    seeds = [file.parent.name.removeprefix(start) for file in folder.glob(f"{escape(start)}*/arm.json")]
    return sorted(int(seed) for seed in seeds if re.fullmatch(r"-?\d+", seed))


def _seen_from(lab: Path, value: Any) -> Any:
    """Make the paths in ``value`` that lie in ``lab`` relative to it, so that the folder may be moved."""
    if isinstance(value, Mapping):
        return {name: _seen_from(lab, one) for name, one in value.items()}
    if isinstance(value, list):
        return [_seen_from(lab, one) for one in value]
    if isinstance(value, str):
        return value.removeprefix(f"{lab}/")
    return value
