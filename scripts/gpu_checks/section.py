"""What a section is: its function, how long it may take, whether it is timed; and the rows that it yields.

A row with ``asked`` is a verdict: what was asked, the ``number`` found, the ``bound`` to which it is compared, and
``pass``, which is True, False, or None if nothing was judged. Other columns of a row are for the section's table. A
section yields each row as soon as it has it, so that a section that is ended at its limit keeps those so far.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

Row = dict[str, Any]
Outcome = dict[str, Any]


@dataclass(frozen=True)
class Setting:
    """What a section is given.

    Attributes:
        tiny: whether models are so small that a CPU trains them in a second.
        device: ``cuda`` or ``cpu``.
        deadline: end of the check, on the clock of ``time.monotonic()``; inside a section the end of its own limit.
        folder: scratch folder of all sections.
        own: the section's own folder in it.
        cores: cores to which the section is bound; empty: to none.
        patience: factor on all limits, for a machine that is busy otherwise.
    """

    tiny: bool
    device: str
    deadline: float
    folder: Path
    own: Path = Path()
    cores: tuple[int, ...] = ()
    patience: float = 1.0

    def left(self) -> float:
        """Return the seconds until the deadline."""
        return self.deadline - time.monotonic()

    @property
    def gpu(self) -> bool:
        return self.device != "cpu"


@dataclass(frozen=True)
class Section:
    """One question to the machine, answered in a process of its own.

    Attributes:
        run: ``module:function``, called as ``function(setting, **options)``; it yields rows.
        seconds: what it takes on an H200 once its process has imported everything. It is skipped if less time is left.
        tiny_seconds: the same for its tiny form on two CPU cores.
        limit: seconds after which it is killed (tiny: ``tiny_limit``).
        timed: whether its seconds are a result, so that it runs alone.
        tags: names under which ``--only`` and ``--skip`` find it, besides its own.
        cores: number of cores that it keeps busy, and that others do not get meanwhile (tiny: ``tiny_cores``).
        needs: packages without which it cannot run.
        gpu_only: why a CPU cannot run it; there ``builds``, another ``module:function``, is run instead.
    """

    name: str
    run: str
    seconds: float
    tiny_seconds: float
    limit: float = 60.0
    tiny_limit: float = 60.0
    timed: bool = False
    tags: tuple[str, ...] = ()
    cores: int = 1
    tiny_cores: int = 1
    needs: tuple[str, ...] = ()
    gpu_only: str | None = None
    builds: str | None = None
    options: dict[str, Any] = field(default_factory=dict)

    def keeps_busy(self, setting: Setting) -> int:
        """Return the number of cores that it keeps busy."""
        return self.tiny_cores if setting.tiny else self.cores

    def only_built(self, setting: Setting) -> bool:
        """Return whether ``builds`` is run in place of ``run``."""
        return self.gpu_only is not None and not setting.gpu

    def begins(self, setting: Setting) -> Callable[[Setting], Iterable[Row]]:
        """Import the section's module, and return the function to call with a setting."""
        place = self.builds if self.only_built(setting) else self.run
        assert place is not None, f"{self.name}: a section that a CPU cannot run says what it builds"
        module, _, name = place.partition(":")
        function = getattr(import_module(module), name)
        return lambda setting: function(setting, **self.options)

    def names(self) -> tuple[str, ...]:
        """Return all names under which the section is found."""
        return (self.name, "timed" if self.timed else "functional", *self.tags)


def verdict(asked: str, number: Any, bound: Any = "", passed: bool | None = None, **columns: Any) -> Row:
    """Return a row that answers one question. ``passed`` None: the number is not judged."""
    return {"asked": asked, "number": number, "bound": bound, "pass": passed, **columns}


def below(asked: str, number: float, bound: float, **columns: Any) -> Row:
    """Return a verdict that passes if the number is at most the bound; NaN does not pass."""
    return verdict(asked, number, f"<= {bound:.3g}", bool(number <= bound), **columns)


def faster(setting: Setting, asked: str, before: float, now: float, **columns: Any) -> Row:
    """Return a verdict on a quotient of seconds, which passes above 1; in the tiny form it is not judged."""
    passed = None if setting.tiny else before > now
    return verdict(asked, f"{before / now:.2f}x", "> 1x", passed, **columns)
