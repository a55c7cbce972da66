"""Rows that may be on the hub and not here: what a dry run loads where it can."""

from __future__ import annotations

from typing import Any

from grpo_lab.pipelines import parts


def rows_here(section: Any, where: str) -> Any:
    """The rows; None where they are on the hub and not here."""
    try:
        return parts.load_rows(section, where)
    except (ValueError, OSError) as error:
        if not may_be_elsewhere(section, error):
            raise
        return None


def may_be_elsewhere(section: Any, error: Exception) -> bool:
    """Whether ``error`` says only that the rows are not here, and not that the section is wrong."""
    source = section.arguments.get("source")
    unknown = section.loader not in parts.LOADERS or isinstance(error.__cause__, TypeError)
    here = section.loader in (*parts.MADE, "file") or (source is not None and parts.looks_local(str(source)))
    return not (unknown or here or parts.is_local(source))
