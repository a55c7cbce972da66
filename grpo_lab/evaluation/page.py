"""Templates → HTML pages. Texts of models and data sets are not trusted: all of them are escaped."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from grpo_lab.evaluation.samples import visible

_TEMPLATES = Path(__file__).parent / "templates"


def page(template: str, **values: Any) -> str:
    """``template`` filled in; it may use the filter ``visible`` and ``written``, the time. A name that is not there is an error."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(_TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["visible"] = visible
    written = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    return environment.get_template(template).render(written=written, **values)
