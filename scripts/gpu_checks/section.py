"""What a section is: where it starts, how long it may take, whether it is timed; and the rows that it gives.

A row with ``asked`` is a verdict, of one line: what was asked, the number, the bound or ratio that it is held against,
and ``pass``: True, False, or None where nothing was judged. Other columns of a row are for the table below it. A
section yields its rows as they come: one that is ended at its limit keeps those that it has.
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
    """``tiny``: models that a CPU trains in a second. ``deadline``: on ``time.monotonic()``'s clock; in a section it is
    the end of its own limit. ``folder``: scratch of all sections; a section writes below ``own``. ``cores``: those that
    it is bound to; empty: none. ``patience``: limits are so many times as long."""

    tiny: bool
    device: str
    deadline: float
    folder: Path
    own: Path = Path()
    cores: tuple[int, ...] = ()
    patience: float = 1.0

    def left(self) -> float:
        return self.deadline - time.monotonic()

    @property
    def gpu(self) -> bool:
        return self.device != "cpu"


@dataclass(frozen=True)
class Section:
    """One question to the machine, answered in a process of its own.

    run: ``module:function``, called as ``function(setting, **options)``; it gives rows.
    seconds: what it takes on an H200 once its process has imported everything: it is not begun with less left.
    tiny_seconds: the same of its tiny form on two CPU cores.
    limit: seconds after which it is killed (tiny: ``tiny_limit``).
    timed: its seconds are a result, so it runs alone.
    tags: names under which ``--only`` and ``--skip`` find it, beside its own.
    cores: those that it keeps busy, so many are not given to others meanwhile (tiny: ``tiny_cores``).
    needs: packages without which there is nothing to ask.
    gpu_only: why a CPU cannot run it; there ``builds``, another ``module:function``, is run as far as it goes.
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
        return self.tiny_cores if setting.tiny else self.cores

    def only_built(self, setting: Setting) -> bool:
        return self.gpu_only is not None and not setting.gpu

    def begins(self, setting: Setting) -> Callable[[Setting], Iterable[Row]]:
        """The function to call with a setting, with everything imported that it needs."""
        place = self.builds if self.only_built(setting) else self.run
        assert place is not None, f"{self.name}: a section that a CPU cannot run says what it builds"
        module, _, name = place.partition(":")
        function = getattr(import_module(module), name)
        return lambda setting: function(setting, **self.options)

    def names(self) -> tuple[str, ...]:
        return (self.name, "timed" if self.timed else "functional", *self.tags)


def verdict(asked: str, number: Any, bound: Any = "", passed: bool | None = None, **columns: Any) -> Row:
    """A row that answers one question. ``passed`` None: a number without a judgement."""
    return {"asked": asked, "number": number, "bound": bound, "pass": passed, **columns}


def below(asked: str, number: float, bound: float, **columns: Any) -> Row:
    """Passes where the number is at most the bound; NaN does not."""
    return verdict(asked, number, f"<= {bound:.3g}", bool(number <= bound), **columns)


def faster(setting: Setting, asked: str, before: float, now: float, **columns: Any) -> Row:
    """A ratio of seconds, passed above 1; with small models it is a number and no judgement."""
    passed = None if setting.tiny else before > now
    return verdict(asked, f"{before / now:.2f}x", "> 1x", passed, **columns)
