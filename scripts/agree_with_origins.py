"""Compare parts of this package with the code that they come from, on the same tensors in float64.

    python scripts/agree_with_origins.py --checkouts FOLDER [--write docs/origins.json] [part ...]

``FOLDER`` holds a git repository ``OWNER+NAME/repo`` for each origin (a bare one will do). Every row of
``origins/*.py`` compares one part of ours with a function of its origin, for five seeds. For each row the part, the
origin's function and commit, and the largest difference of losses and gradients are printed, and written as JSON with
``--write``. The exit code is 1 if a difference is above 1e-6. This is no test of the suite, since the checkouts are not
part of this repository.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Sequence
from importlib import import_module
from pathlib import Path

import torch
from origins.frame import SEEDS, Row, git

from grpo_lab.io import write_whole_text

ALLOWED = 1e-6
FILES = sorted(file.stem for file in (Path(__file__).parent / "origins").glob("*.py"))


def rows() -> list[Row]:
    """Return the rows of all files in ``origins/``, file by file."""
    return [row for file in FILES for row in getattr(import_module(f"origins.{file}"), "ROWS", ())]


def compared(row: Row, checkouts: Path) -> dict[str, object]:
    """Run one comparison for all seeds, and return its line of the record. Raises ValueError if it compares nothing, or
    tensors of different shapes."""
    theirs = row.origin.load(checkouts)
    pairs = [pair for seed in SEEDS for pair in row.pairs(theirs, seed)]
    if not pairs:
        raise ValueError(f"the row of {row.part!r} compares nothing")
    for one, other in pairs:
        if one.shape != other.shape:
            raise ValueError(f"{row.part!r}: shapes {list(one.shape)} and {list(other.shape)} cannot be compared")
    return {
        "part": row.part,
        "repository": row.origin.repository,
        "commit": git(checkouts, row.origin.repository, "rev-parse", "HEAD").strip(),
        "function": f"{row.origin.path}:{row.origin.function}",
        "remark": row.remark,
        "difference": max((one.double() - other.double()).abs().max().item() for one, other in pairs),
        "size": max(one.abs().max().item() for one, _ in pairs),
    }


def show(lines: Iterable[dict[str, object]]) -> None:
    """Print the lines of the record, and mark those that differ by more than `ALLOWED`."""
    for line in lines:
        verdict = "" if agrees(line) else "  DIFFERS"
        function = str(line["function"]).rsplit(":", 1)[1]
        print(
            f"{line['part']:<22} {line['repository']}@{str(line['commit'])[:8]} {function}: "
            f"{line['difference']:.1e}{verdict}"
        )


def agrees(line: dict[str, object]) -> bool:
    """Return whether the largest difference in a line of the record is allowed."""
    return float(str(line["difference"])) <= ALLOWED


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", help="only rows of these parts")
    parser.add_argument("--checkouts", type=Path, required=True, help="folder of git repositories OWNER+NAME/repo")
    parser.add_argument("--write", type=Path, help="write the record here, as JSON")
    options = parser.parse_args(arguments)
    chosen = [row for row in rows() if not options.parts or row.part in options.parts]
    lines = [compared(row, options.checkouts) for row in chosen]
    show(lines)
    if options.write is not None:
        record = {"torch": torch.__version__, "allowed": ALLOWED, "rows": lines}
        write_whole_text(options.write, json.dumps(record, indent=1, ensure_ascii=False) + "\n")
    return 0 if lines and all(map(agrees, lines)) else 1


if __name__ == "__main__":
    sys.exit(main())
