"""Rows (mappings of column to value) as a Markdown table, and a measured number with its spread."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any


def table(rows: list[dict[str, Any]]) -> str:
    """Return rows (column → value) as a Markdown table. Columns stand in the order in which rows first name them; a
    cell is empty if its row lacks the column."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    lines = ["| " + " | ".join(names) + " |", "|" + " --- |" * len(names)]
    return "\n".join(lines + ["| " + " | ".join(shown(row.get(name, "")) for name in names) + " |" for row in rows])


def shown(value: Any) -> str:
    """Return a value as the text of a table's cell; a float gets two digits after the point."""
    if not isinstance(value, float):
        return str(value).replace("|", "\\|").replace("\n", " ")
    return f"{value:.1e}" if 0 < abs(value) < 1e-3 else f"{value:,.2f}"


def spread(values: Sequence[float]) -> str:
    """Return the median of measurements as text; for several of them also the smallest and the largest."""
    middle = f"{median(values):.3g}"
    if len(values) == 1:
        return middle
    return f"{middle} ({min(values):.3g} to {max(values):.3g})"
