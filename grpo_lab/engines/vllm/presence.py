"""Check that an engine can start here: vLLM is installed, it imports, and its kernels load.

A vLLM that cannot be imported does not prevent the use of the rest: ``grpo_lab.trainer.trl_import`` then hides it from
TRL and records why. Whatever asks for an engine is refused with that reason before a run starts.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

from grpo_lab.requirements import described

_broken: str | None = None
"""Why the installed vLLM cannot be imported. None until an import was tried and failed."""


def note_broken(why: str) -> None:
    """Record why the installed vLLM cannot be imported."""
    global _broken
    _broken = why


def why_not(kernels: bool = True) -> str | None:
    """Return the reason why no engine can be started in this process, None if one can. ``kernels``: whether an engine
    is to run here, rather than only a client of one. A vLLM that works is imported, which takes seconds."""
    if _broken is not None:
        return f"vLLM is broken here ({_broken})"
    if find_spec("vllm") is None:
        return "vLLM is not installed here (docs/vllm.md says how)"
    try:
        from vllm.platforms import current_platform

        found = None
        if kernels:
            found = _without_kernels(current_platform)
    except Exception as error:  # a broken installation may raise anything
        note_broken(described(error))
        return f"vLLM is broken here ({_broken})"
    return found and f"vLLM is broken here ({found})"


def refuse_without_engine(setting: str, kernels: bool = True) -> None:
    """Raise ValueError if no engine can be started here, although the setting ``setting`` asks for one. ``kernels``:
    see `why_not`."""
    why = why_not(kernels)
    if why is not None:
        raise ValueError(
            f"{setting} asks for an engine, and {why}: mend that, or leave {setting} out and generate with transformers"
        )


def engine_here(written: Mapping[str, Any]) -> dict[str, str]:
    """Return a note for the plan of a recipe with ``use_vllm`` if this machine has no engine, an empty mapping if it
    has one. No error is raised, since the run may take place on another machine. ``written``: the recipe's settings."""
    why = why_not(kernels=written.get("vllm_mode") != "server")
    if why is None:
        return {}
    return {"engine": f"{why}: `use_vllm` is refused by a run on this machine"}


class _Heard(logging.Handler):
    """Logging handler that keeps vLLM's messages while it loads its kernels."""

    def __init__(self) -> None:
        super().__init__()
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(record.getMessage())


def _without_kernels(platform: object) -> str | None:
    """Return what is wrong with the compiled kernels of vLLM on a CPU or on CUDA, None if nothing is. Without them vLLM
    can be imported all the same, with a warning, and fails in its first step. ``platform``: vLLM's current one."""
    import torch

    asked = [getattr(platform, name, None) for name in ("is_cpu", "is_cuda")]
    if not any(one is not None and one() for one in asked):
        return None
    heard = _Heard()
    logger = logging.getLogger("vllm")
    logger.addHandler(heard)
    try:
        platform.import_kernels()  # type: ignore[attr-defined]
    finally:
        logger.removeHandler(heard)
    if any(name.startswith(("_C::", "_C_")) for name in torch._C._dispatch_get_all_op_names()):
        return None
    if heard.said:
        return heard.said[-1]
    return "its compiled kernels, vllm/_C*.so, are not loaded"
