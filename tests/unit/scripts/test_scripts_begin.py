"""Every script of ``scripts/`` finds what it imports: no type checker reads them, and some run seldom."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

SCRIPTS = sorted(file.stem for file in (Path(__file__).resolve().parents[3] / "scripts").glob("*.py"))


@pytest.mark.parametrize("name", SCRIPTS)
def test_it_can_be_imported(name: str) -> None:
    importlib.import_module(name)
