"""Whose a method is: this package's and the libraries' below it, or a team's."""

from __future__ import annotations

import inspect
from types import FrameType
from typing import Any

from transformers import Trainer

#: classes and functions of these packages are no team's; what decorators make is made in some
LIBRARIES = ("grpo_lab", "trl", "transformers", "builtins", "contextlib", "functools", "torch")


def teams(trainer: Any, method: str) -> str | None:
    """``Class.method`` where a team's code stands in the place of ``method`` or over it; None where nobody's does.

    Args:
        trainer: a trainer, which may hold a function of that name itself (``trainer.compute_loss = …``), or its class.
            A team's class counts wherever it stands among the bases, and so does a team's function on a library's
            class.
    """
    if not isinstance(trainer, type):
        if not _is_librarys(vars(trainer).get(method)):
            return f"trainer.{method}"
        trainer = type(trainer)
    homes = [kind for kind in trainer.__mro__ if method in vars(kind)]
    of_team = (kind for kind in homes if not (_is_librarys(kind) and _is_librarys(vars(kind)[method])))
    return next((f"{kind.__name__}.{method}" for kind in of_team), None)


def hf_runs_the_step() -> bool:
    """Whether HF's own ``training_step`` is being run, so that HF runs the backward: a team's asked ``super()``, or
    there is none."""
    code, frame = inspect.unwrap(Trainer.training_step).__code__, inspect.currentframe()
    while isinstance(frame, FrameType) and frame.f_code is not code:
        frame = frame.f_back
    return frame is not None


def _is_librarys(code: Any) -> bool:
    """Of a function: it and all that it wraps (``functools.wraps`` gives a wrapper the module of what is wrapped)."""
    while code is not None:
        module = getattr(code, "__globals__", {}).get("__name__") or getattr(code, "__module__", LIBRARIES[0])
        if str(module).split(".")[0] not in LIBRARIES:
            return False
        code = getattr(code, "__wrapped__", None) or getattr(code, "func", None)
    return True
