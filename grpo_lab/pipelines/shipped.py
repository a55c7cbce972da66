"""The recipes that travel with the package: in a wheel beside its modules (``setup.py`` puts them there), in a checkout at its top."""

from __future__ import annotations

from pathlib import Path

_PACKAGE = Path(__file__).resolve().parents[1]
PLACES = (_PACKAGE / "recipes", _PACKAGE.parent / "recipes")
QUICKSTART = "quickstart/dr_grpo.yaml"


def shipped_recipe(name: str, places: tuple[Path, ...] = PLACES) -> Path:
    """Where the recipe ``name`` lies, such as ``quickstart/dr_grpo.yaml``. ValueError: this installation has none."""
    for place in places:
        if (place / name).is_file():
            return place / name
    raise ValueError(
        f"this installation of grpo_lab ships no recipe {name!r}; looked in {' and '.join(map(str, places))}. Install a wheel or "
        "an editable checkout, or name a file: grpo-lab train --config FILE"
    )


__all__ = ["QUICKSTART", "shipped_recipe"]
