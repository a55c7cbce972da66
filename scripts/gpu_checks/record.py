"""The results: one JSON file, whole after every section, and what of it is kept when a check is taken up again."""

from __future__ import annotations

import datetime
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gpu_checks.markdown import page
from gpu_checks.section import Outcome
from grpo_lab.io import write_whole_text

#: statuses of a section that has answered; every other one leaves its question open
ANSWERED = ("ok", "failed")
BAD = ("failed", "broke", "limit", "killed")


@dataclass
class Record:
    """``file`` and the page beside it. ``told`` stands above the sections: form, device, budget."""

    file: Path
    told: dict[str, Any]
    sections: dict[str, Outcome] = field(default_factory=dict)

    def keep(self, name: str, outcome: Outcome) -> None:
        """One more section; a machine that goes away after it loses nothing. A section that was not begun this time
        leaves what an earlier check has of it."""
        earlier = self.sections.get(name, {})
        if not (outcome["status"] == "skipped" and earlier.get("rows")):
            self.sections[name] = outcome | {"ended": now()}
        self.write()

    def answered(self, name: str) -> bool:
        return self.sections.get(name, {}).get("status") in ANSWERED

    def write(self) -> None:
        found = self.found()
        write_whole_text(self.file, json.dumps(found, indent=1, default=str) + "\n")
        write_whole_text(self.file.with_suffix(".md"), page(found))

    def found(self) -> dict[str, Any]:
        return {**self.told, "written": now(), "sections": self.sections}

    @property
    def failed(self) -> bool:
        return any(outcome["status"] in BAD for outcome in self.sections.values())


def taken_up(file: Path, told: dict[str, Any]) -> dict[str, Outcome]:
    """The sections of an earlier check. SystemExit where it was of another form or machine."""
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
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
