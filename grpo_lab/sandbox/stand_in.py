"""The tester's proxy of an object of the program: every question about it is asked in the program's process.

Compared with the tests' data it has no order, and arithmetic with them never gives data. So an object passes nothing by
claiming to be less than everything, or to differ from anything by 0. Objects of the program compare with each other as
the program says.
"""

from __future__ import annotations

import functools
from typing import Any, NoReturn

from grpo_lab.sandbox.wire import pack_error

_QUESTIONS = (
    "startswith endswith isalnum isalpha isascii isdecimal isdigit isidentifier islower isnumeric isprintable isspace "
    "istitle isupper issubset issuperset isdisjoint is_integer match fullmatch difference symmetric_difference"
)
YES_OR_NO = frozenset(_QUESTIONS.split())
"""Methods of texts and sets that answer with yes, no or a difference. Objects of the program do not have them here, so
that none passes for a text or a set by answering as a test wants."""
_OF_DIFFERENCES = ("total_seconds", "days", "seconds", "microseconds", "is_zero")
"""Methods that tests call on a difference of plain data: ``(f(x) - datetime(…)).total_seconds() < 1``."""
_PLAIN_NAMES = ("__name__", "__qualname__", "__annotations__", "__wrapped__")


class RemoteObject:
    """Proxy of an object in the program's process.

    Args:
        program: the ``remote.Program`` that answers for it.
        number: number of the object in that process.
        derived: whether it came out of arithmetic with the tests' data, which may contain the expected value. Such an
            object is never asked for its truth, number, order or content, so that a program cannot make
            ``not f(x) - 3`` true.
    """

    def __init__(self, program: Any, number: int, derived: bool = False) -> None:
        object.__setattr__(self, "_program", program)
        object.__setattr__(self, "_number", number)
        object.__setattr__(self, "_derived", derived)

    def _ask(self, what: str, *args: Any) -> Any:
        """Ask the object in its process (``Program.ask``)."""
        return self._program.ask(self._number, what, *args)

    def _own(self, what: str, *args: Any) -> Any:
        """Ask the object in its process, unless it is derived: then fail the running test."""
        if self._derived:
            self._refuse(f"no {what} of an object of the program's that was reckoned with the tests' data")
        return self._ask(what, *args)

    def _refuse(self, why: str) -> NoReturn:
        """Raise ``TypeError`` and fail the running test even if it catches that error."""
        self._program.refused = True
        raise TypeError(why)

    def _reckoned(self, what: str, name: str, other: Any) -> Any:
        """Do arithmetic in the program's process; with the tests' data the result is a derived object, never data.

        Args:
            what: ``math``, or ``rmath`` with ``other`` on the left.
            name: the operator, a name of the module ``operator``.
            other: the other operand.
        """
        theirs = isinstance(other, RemoteObject) and not other._derived and not self._derived
        if not theirs and not self._derived:
            self._program.holds(self._number)  # kept before it sees the data: it cannot become 3 after `x - 3`
        found = self._ask(what, name, other)
        if theirs:
            return found
        if not isinstance(found, RemoteObject):
            self._refuse(f"{name}: an object of the program's and data of the tests give no data")
        return RemoteObject(self._program, found._number, derived=True)

    def _ordered(self, name: str, other: Any) -> Any:
        """Compare the order of two objects of the program, in its process; with anything else there is none."""
        if not isinstance(other, RemoteObject):
            return NotImplemented
        if other._derived:
            other._own(name)
        return self._own("math", name, other) is True

    def __call__(self, *args: Any, **named: Any) -> Any:
        return self._program.call(self._number, args, named)

    def __getattr__(self, name: str) -> Any:
        if name in YES_OR_NO or (name.startswith("__") and name not in _PLAIN_NAMES):
            raise AttributeError(name)
        if name in _OF_DIFFERENCES and self._derived:
            self._refuse(f"no {name} of an object of the program's that was reckoned with the tests' data")
        return self._ask("attr", name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._ask("set", name, value)

    def __len__(self) -> int:
        return int(self._own("len"))

    def __bool__(self) -> bool:
        return self._own("bool") is True

    def __iter__(self) -> Any:
        return self._own("iter")

    async def __anext__(self) -> Any:
        return self._own("anext")

    def __contains__(self, value: Any) -> bool:
        return any(value == one for one in self)  # here, since the program would simply answer True

    def __eq__(self, other: object) -> bool:
        """Compare with another object in the program's process, and with data of the tests by content, here. A derived
        object equals no data."""
        if isinstance(other, RemoteObject):
            return self._number == other._number or self._ask("same", other) is True
        if self._derived:
            return False
        held = self._program.holds(self._number)  # a subclass of list, str or int is compared by its content, here
        return held is not None and not isinstance(held, RemoteObject) and bool(held == other)

    def __hash__(self) -> int:
        return int(self._own("hash"))

    def __str__(self) -> str:
        return str(self._ask("str"))

    def __repr__(self) -> str:
        return str(self._ask("repr"))

    def __int__(self) -> int:
        return int(_number(self._own("int")))

    def __float__(self) -> float:
        return float(_number(self._own("float")))

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        """Leave the context without suppressing errors: ``with f(x) as y: assert y == 3`` is a test."""
        self._program.leave(self._number, None if error is None else pack_error(error)["raised"])

    def __instancecheck__(self, value: Any) -> bool:
        return isinstance(value, RemoteObject) and self._ask("instance", value) is True

    def __subclasscheck__(self, value: Any) -> bool:
        return isinstance(value, RemoteObject) and self._ask("subclass", value) is True

    @property
    def __doc__(self) -> Any:  # type: ignore[override]
        return self._ask("attr", "__doc__")

    @property
    def __dict__(self) -> Any:  # type: ignore[override]
        return self._ask("attr", "__dict__")


def _number(value: Any) -> Any:
    if not isinstance(value, int | float):
        raise TypeError("no number")
    return value


for _name in ("lt", "le", "gt", "ge"):
    setattr(RemoteObject, f"__{_name}__", functools.partialmethod(RemoteObject._ordered, _name))
for _name in ("abs", "neg", "pos", "invert", "round", "next", "aiter", "enter"):
    setattr(RemoteObject, f"__{_name}__", functools.partialmethod(RemoteObject._own, _name))
for _name, _what in (("getitem", "item"), ("setitem", "put"), ("delitem", "del")):
    setattr(RemoteObject, f"__{_name}__", functools.partialmethod(RemoteObject._ask, _what))
_OPERATORS = "add sub mul truediv floordiv mod pow matmul and_ or_ xor lshift rshift"
for _name in _OPERATORS.split():
    for _what, _side in (("math", ""), ("rmath", "r")):
        _method = functools.partialmethod(RemoteObject._reckoned, _what, _name)
        setattr(RemoteObject, f"__{_side}{_name.strip('_')}__", _method)
DOC = vars(RemoteObject)["__doc__"]
"""Property `__doc__` of `RemoteObject`, which asks the program. Each subclass must be given it anew, since making a
class sets its `__doc__`."""
