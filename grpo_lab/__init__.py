"""grpo_lab: reinforcement learning from verifiable rewards as a plug-in for Hugging Face TRL.

A public name is imported when it is first used. So ``import grpo_lab`` is cheap and works on a machine without TRL,
vLLM or math-verify. So do the packages in pure torch, such as ``grpo_lab.objectives`` and ``grpo_lab.advantages``.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOMES = {
    **dict.fromkeys(("LabConfig", "LabTrainer", "DrGRPOTrainer"), "grpo_lab.trainer"),
    **dict.fromkeys(("PPOTrainer", "KimiTrainer", "R1ZeroTrainer"), "grpo_lab.trainer"),
    **dict.fromkeys(("register_aggregation", "register_correction", "register_objective"), "grpo_lab.objectives"),
    "register_advantage": "grpo_lab.advantages",
}
"""Public name → the package that defines it."""

__all__ = [
    "DrGRPOTrainer",
    "KimiTrainer",
    "LabConfig",
    "LabTrainer",
    "PPOTrainer",
    "R1ZeroTrainer",
    "__version__",
    "register_advantage",
    "register_aggregation",
    "register_correction",
    "register_objective",
]

if TYPE_CHECKING:
    from grpo_lab.advantages import register_advantage
    from grpo_lab.objectives import register_aggregation, register_correction, register_objective
    from grpo_lab.trainer import DrGRPOTrainer, KimiTrainer, LabConfig, LabTrainer, PPOTrainer, R1ZeroTrainer


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used (PEP 562)."""
    if name in _HOMES:
        return getattr(_imported(_HOMES[name]), name)
    raise AttributeError(f"module 'grpo_lab' has no attribute {name!r}; it offers {sorted(_HOMES)}")


def _imported(home: str) -> Any:
    """Import the package ``home``.

    Raises:
        ImportError: a requirement is missing or broken. The message names all such requirements, not only the first.
    """
    try:
        return import_module(home)
    except ImportError as error:
        from grpo_lab.requirements import failing, in_words

        lacking = failing()
        if not lacking:
            raise
        raise ImportError(in_words(lacking)) from error


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
