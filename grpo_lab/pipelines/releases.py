"""Which releases a run is computed with: a resumed run is exact with the same ones, on the same kind of machine."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any

PACKAGES = ("grpo_lab", "torch", "transformers", "trl", "accelerate", "peft", "datasets", "math-verify", "vllm")


def versions() -> dict[str, str]:
    """Of Python, the machine and the packages that numbers depend on."""
    found = {"python": platform.python_version(), "machine": f"{platform.machine()} {platform.system()}"}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def other_releases(record: Mapping[str, Any]) -> list[str]:
    """Old → new, of what ``run.json`` says the run was computed with; empty where it says nothing yet."""
    then, now = record.get("versions") or {}, versions()
    names = sorted({*then, *now}) if then else []
    changed = [name for name in names if then.get(name) != now.get(name)]
    return [f"{name} {then.get(name, 'not installed')} → {now.get(name, 'not installed')}" for name in changed]
