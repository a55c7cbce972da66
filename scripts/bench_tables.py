"""Rows (mappings of column to value) as a Markdown table, and a measured number with its spread."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any


def table(rows: list[dict[str, Any]]) -> str:
    """Columns in the order in which rows name them; an empty cell where a row has none."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    lines = ["| " + " | ".join(names) + " |", "|" + " --- |" * len(names)]
    return "\n".join(lines + ["| " + " | ".join(shown(row.get(name, "")) for name in names) + " |" for row in rows])


def shown(value: Any) -> str:
    if not isinstance(value, float):
        return str(value).replace("|", "\\|").replace("\n", " ")
    return f"{value:.1e}" if 0 < abs(value) < 1e-3 else f"{value:,.2f}"


def spread(values: Sequence[float]) -> str:
    """The median, and the least and the most where there are several."""
    middle = f"{median(values):.3g}"
    if len(values) == 1:
        return middle
    return f"{middle} ({min(values):.3g} to {max(values):.3g})"
