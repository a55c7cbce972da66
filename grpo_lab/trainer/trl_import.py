"""TRL imported beside whichever vLLM is there: one that works, one that is broken, none.

TRL imports vLLM where it finds one, in ``trl.generation``, and a vLLM without its kernels, built for another torch or
half unpacked then takes down everything. So that door is opened here first. Where it fails and opens without vLLM, vLLM
is to blame: it is hidden from this process (and from TRL's ``is_vllm_available``), and one line says so. A vLLM that
works is imported exactly as before, and at the same cost.
"""

from __future__ import annotations

import logging
import os
import sys
from importlib import import_module
from importlib.util import find_spec

from grpo_lab.engines.vllm.presence import note_broken
from grpo_lab.requirements import described

DOOR = "trl.generation.vllm_generation"
"""The module of TRL's that imports vLLM."""
ASKED = "use_vllm: true"

_log = logging.getLogger(__name__)


def import_trl() -> None:
    """Import TRL's door to vLLM, without vLLM where that is broken. ImportError: TRL itself cannot be imported."""
    if DOOR in sys.modules or not _is_there("vllm"):
        return  # TRL is asked for what it says without one
    before = dict(os.environ)
    try:
        import_module(DOOR)
    except Exception as error:  # ImportError, OSError, AttributeError, RuntimeError of a C extension, …
        _hide_vllm(before)
        import_module(DOOR)  # raises where vLLM was not to blame
        note_broken(described(error))
        if os.environ.get("RANK", "0") == "0":
            _log.warning(
                "the vLLM that is installed is broken (%s): engines are off, `%s` is refused, all else works",
                described(error),
                ASKED,
            )


def _is_there(name: str) -> bool:
    """Return whether a module could be imported; False for one that was hidden."""
    try:
        return find_spec(name) is not None
    except ValueError:  # in sys.modules without a spec: a stand-in
        return True


def _hide_vllm(environment: dict[str, str]) -> None:
    """Take back what half an import has left: modules, and variables that vLLM sets for what comes after it."""
    for name in [one for one in sys.modules if one.split(".")[0] == "vllm" or one.startswith("trl.generation")]:
        del sys.modules[name]
    sys.modules["vllm"] = None  # type: ignore[assignment]
    for name in os.environ.keys() - environment.keys():
        del os.environ[name]
    os.environ.update(environment)
