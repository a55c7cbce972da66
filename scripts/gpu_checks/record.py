"""The results of a check: one JSON file, which is whole after every section, and its page. With ``--resume`` a check
continues the file of an earlier one."""

from __future__ import annotations

import datetime
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gpu_checks.markdown import page
from gpu_checks.section import Outcome
from grpo_lab.io import write_whole_text

#: statuses of a section that has answered; a check with ``--resume`` runs the others again
ANSWERED = ("ok", "failed")
BAD = ("failed", "broke", "limit", "killed")


@dataclass
class Record:
    """The results so far.

    Attributes:
        file: the JSON file; the page stands beside it.
        told: facts of the whole check: form, device, budget, seconds.
        sections: name of a section → its outcome.
    """

    file: Path
    told: dict[str, Any]
    sections: dict[str, Outcome] = field(default_factory=dict)

    def keep(self, name: str, outcome: Outcome) -> None:
        """Add the outcome of a section, and write the file. If the section was skipped for lack of time, the rows that
        an earlier check has of it are kept."""
        earlier = self.sections.get(name, {})
        if not (outcome["status"] == "skipped" and earlier.get("rows")):
            self.sections[name] = outcome | {"ended": now()}
        self.write()

    def answered(self, name: str) -> bool:
        """Return whether a section has answered."""
        return self.sections.get(name, {}).get("status") in ANSWERED

    def write(self) -> None:
        """Write the file and the page."""
        found = self.found()
        write_whole_text(self.file, json.dumps(found, indent=1, default=str) + "\n")
        write_whole_text(self.file.with_suffix(".md"), page(found))

    def found(self) -> dict[str, Any]:
        """Return the content of the file."""
        return {**self.told, "written": now(), "sections": self.sections}

    @property
    def failed(self) -> bool:
        """Whether a section failed, broke or was ended."""
        return any(outcome["status"] in BAD for outcome in self.sections.values())


def taken_up(file: Path, told: dict[str, Any]) -> dict[str, Outcome]:
    """Return the sections of an earlier check. Raises SystemExit if it was of another form or machine than ``told``
    says, or cannot be read."""
    try:
        earlier = json.loads(file.read_text())
        sections: dict[str, Outcome] = earlier["sections"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise SystemExit(f"--resume {file}: no results of a check can be read there ({error})") from None
    for name in ("form", "device", "device_name"):
        if earlier.get(name) != told[name]:
            raise SystemExit(
                f"--resume {file}: its {name} is {earlier.get(name)!r}, this check's {told[name]!r}; numbers of two "
                "machines or forms do not stand in one table. Leave --resume out, or give another file"
            )
    return sections


def now() -> str:
    """Return the time in UTC as text."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
