"""Import TRL beside whichever vLLM is installed: one that works, one that is broken, or none.

TRL imports vLLM, if it finds one, in ``trl.generation``. A vLLM without its kernels, built for another torch or half
unpacked then makes TRL's own import fail. So that module is imported here first. If this fails with vLLM and works
without, vLLM is hidden from this process (and from TRL's ``is_vllm_available``), and one line says so. A vLLM that
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
"""TRL's module that imports vLLM."""
ASKED = "use_vllm: true"
"""The setting that needs vLLM, as the log names it."""

_log = logging.getLogger(__name__)


def import_trl() -> None:
    """Import TRL's module that imports vLLM, and hide vLLM from this process if it is broken. Raise the import's own
    error if it fails without vLLM, too."""
    if DOOR in sys.modules or not _is_there("vllm"):
        return  # TRL itself handles a vLLM that is not installed
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
    """Return whether a module can be found; its import may still fail. False for one that ``_hide_vllm`` has hidden."""
    try:
        return find_spec(name) is not None
    except ValueError:  # in sys.modules without a spec: a stand-in
        return True


def _hide_vllm(environment: dict[str, str]) -> None:
    """Hide vLLM and undo its failed import: remove the modules that it loaded, and restore the environment variables
    that it changed."""
    for name in [one for one in sys.modules if one.split(".")[0] == "vllm" or one.startswith("trl.generation")]:
        del sys.modules[name]
    sys.modules["vllm"] = None  # type: ignore[assignment]
    for name in os.environ.keys() - environment.keys():
        del os.environ[name]
    os.environ.update(environment)
