"""``--resume``: what the recipe does not say, and a resumed run must have again: its rows, and as many processes."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from datasets import Image

from grpo_lab.pipelines.run_folder import read_marker


def rows_fingerprint(rows: Any) -> dict[str, Any]:
    """Number and short hash of the rows in their order: names and values of their columns, an image by its bytes."""
    for name, feature in (rows.features or {}).items():
        if isinstance(feature, Image):
            rows = rows.cast_column(name, Image(decode=False))
    digest = hashlib.sha256()
    for row in rows:
        digest.update(json.dumps(row, sort_keys=True, default=_plain).encode() + b"\n")
    return {"count": len(rows), "fingerprint": digest.hexdigest()[:12]}


def _plain(value: Any) -> str:
    """What JSON has no form for; never an address in memory."""
    return hashlib.sha256(value).hexdigest() if isinstance(value, bytes) else f"<{type(value).__name__}> {_text(value)}"


def _text(value: Any) -> str:
    return str(value) if type(value).__repr__ is not object.__repr__ and " at 0x" not in repr(value) else ""


def refuse_other_rows(folder: Path, then: Any, rows: Any) -> None:
    """ValueError where the rows are not those that the run began with (``rows_fingerprint``; None: it does not say)."""
    now = rows_fingerprint(rows)
    if then is not None and then != now:
        raise ValueError(
            f"the data of the run in {str(folder)!r} has changed since: {then['count']} rows ({then['fingerprint']}) → "
            f"{now['count']} rows ({now['fingerprint']}). A resumed run goes on in the same order through the same "
            "rows: bring them back, or choose another `--output_dir`, or give --overwrite"
        )


def refuse_another_run(folder: Path, rows: Any, processes: int, max_steps: int) -> None:
    """A run that still has steps to train is gone on with on the same rows, by as many processes; nothing is written.

    Raises:
        ValueError: what it had, and what it would get.
    """
    record = read_marker(folder / "run.json")
    if 0 < max_steps <= (record.get("trained") or 0):
        return  # only the evaluation is left
    refuse_other_rows(folder, record.get("rows"), rows)
    before = record.get("processes")
    if before is not None and before != processes:
        raise ValueError(
            f"the run in {str(folder)!r} was trained by {before} process(es), and this is {processes}: its batches and random numbers "
            f"would be others. Start {before} (`accelerate launch --num_processes {before}`), or choose another `--output_dir`; "
            "trainer.train(resume_from_checkpoint=…) goes on with other batches, as TRL does"
        )
