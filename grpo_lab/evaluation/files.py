"""Files that are written whole or not at all: a reader never meets half of one, wherever the writer was killed."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grpo_lab.io import write_whole, write_whole_text

if TYPE_CHECKING:
    import pyarrow as pa


def write_text(path: Path, text: str) -> None:
    """``text`` as UTF-8; half characters in it are the caller's to replace (`visible.encodable`)."""
    write_whole_text(path, text)


def write_json(path: Path, value: Any) -> None:
    """``value`` as JSON; what JSON does not know is written as its text."""
    write_text(path, json.dumps(value, indent=1, default=str) + "\n")


def write_json_lines(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """One object a line, readable as it stands (no escapes); the strings must be encodable."""
    write_text(path, "".join(json.dumps(row, ensure_ascii=False, default=str) + "\n" for row in rows))


def write_parquet(path: Path, table: pa.Table) -> None:
    """A table for tools."""
    import pyarrow.parquet as pq

    write_whole(path, lambda partial: pq.write_table(table, partial, compression="zstd"))
