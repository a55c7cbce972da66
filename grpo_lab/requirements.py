"""Requirements of this package, and which of them this Python lacks: all of them, in one message.

Only the standard library is used here: ``scripts/offline_kit.py`` reads the same table on a machine that lacks all
requirements.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from importlib import import_module
from importlib.util import find_spec

NEEDED: tuple[str, ...] = (
    "torch>=2.10",
    "transformers>=5.5,<5.25",
    "trl>=1.15,<1.17",
    "accelerate>=1.13,<2",
    "peft>=0.19,<0.22",
    "datasets>=4.7,<6",
    "math-verify>=0.8,<0.10",
    "rich>=13",
    "pydantic>=2.12,<3",
    "pyyaml>=6",
    "scipy>=1.11",
    "pyarrow>=15",
    "jinja2>=3.1",
    "tqdm>=4.66",
    "numpy>=1.26",
    "regex>=2024.5.15",
    "safetensors>=0.4.5,<1",
    "psutil>=5.9,<8",
    "datasketch>=1.6,<3",
    "rapidfuzz>=3.9,<4",
)
"""``dependencies`` of pyproject.toml (a test holds them equal)."""
NOT_INSTALLED = "not installed"
OTHER_MODULES = {"math-verify": "math_verify", "pyyaml": "yaml"}
"""Package → name of its module, where they differ."""


def name_of(requirement: str) -> str:
    """Return a requirement's package: ``trl`` of ``trl>=1.15,<1.17``."""
    return re.split(r"[<>=!~;\[ ]", requirement, maxsplit=1)[0]


def module_of(requirement: str) -> str:
    """Return the module that is imported for a requirement."""
    name = name_of(requirement)
    return OTHER_MODULES.get(name, name)


def absent(needed: Sequence[str] = NEEDED) -> dict[str, str]:
    """Return the requirements whose module is not found, each with the reason ``NOT_INSTALLED``. It imports nothing,
    and takes a millisecond."""
    gone = [one for one in needed if module_of(one) not in sys.modules and find_spec(module_of(one)) is None]
    return dict.fromkeys(gone, NOT_INSTALLED)


def failing(needed: Sequence[str] = NEEDED) -> dict[str, str]:
    """Return the requirements that cannot be imported, each with the reason: it is not installed, or raises an error.

    It imports all of them, which takes seconds: call it only once something has failed.
    """
    found = dict[str, str]()
    for requirement in needed:
        try:
            import_module(module_of(requirement))
        except Exception as error:  # whatever a half package raises
            found[requirement] = described(error, module_of(requirement))
    return found


def described(error: BaseException, module: str = "") -> str:
    """Describe an error of an import: what was raised, and in which file; ``not installed`` if ``module`` itself is
    missing."""
    if isinstance(error, ModuleNotFoundError) and error.name == module:
        return NOT_INSTALLED
    while error.__cause__ is not None:
        error = error.__cause__
    said = next(iter(str(error).splitlines()), "")
    return f"{type(error).__name__}: {said}{_place(error)}"


def _place(error: BaseException) -> str:
    """Return the file of an extension that could not be loaded, else the last line of Python that ran."""
    extension = getattr(error, "path", None)
    if isinstance(extension, str) and extension not in str(error):
        return f", in {extension}"
    trace = error.__traceback__
    place = ""
    while trace is not None:
        file = trace.tb_frame.f_code.co_filename
        if not file.startswith("<"):
            place = f", in {file}:{trace.tb_lineno}"
        trace = trace.tb_next
    return place


def in_words(found: Mapping[str, str]) -> str:
    """Return a sentence on the requirements that ``absent`` or ``failing`` found, and how to install them."""
    missing = [name_of(one) for one, why in found.items() if why == NOT_INSTALLED]
    broken = [f"{name_of(one)} ({why})" for one, why in found.items() if why != NOT_INSTALLED]
    parts = []
    if missing:
        parts.append(f"{', '.join(missing)} ({NOT_INSTALLED})")
    said = "; ".join([*parts, *broken])
    asked = " ".join(f"'{one}'" for one in found)
    return (
        f"grpo_lab needs what {sys.executable} (Python {sys.version.split()[0]}) cannot import: {said}. Install it: "
        f"pip install {asked}; on a machine without a network: docs/no_network.md"
    )
