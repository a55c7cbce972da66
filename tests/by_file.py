"""Which worker of xdist runs what: a file, or the files of one ``xdist_group``, goes to one worker as a whole.

So that what a module or a session makes once (a world of ranks, the golden trainings, a stock run to compare with) is made once and not by
each worker. Not xdist's own ``loadgroup``: xdist 3.8 writes the group into an attribute that pytest 9.2 no longer reads, and spreads
the tests of a group over all workers. Groups and slow files first, so that no worker ends with a long one.
"""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import Any

import pytest
from xdist.scheduler import LoadScopeScheduling

TESTS = Path(__file__).resolve().parent


@functools.cache
def group_of(path: str) -> str:
    """The name in the file's ``xdist_group("…")``, or the file: a mark counts for all of it."""
    file = TESTS.parent / path
    named = re.search(r'xdist_group\("(\w+)"\)', file.read_text()) if file.is_file() else None
    return named[1] if named else path


def unit(nodeid: str) -> str:
    return group_of(nodeid.partition("::")[0])


def slow_first(items: list[pytest.Item]) -> None:
    """In place; the same order in every worker. Within a file or a group the order stays."""
    units = [unit(item.nodeid) for item in items]
    slow = {name for name, item in zip(units, items, strict=True) if item.get_closest_marker("slow")}
    order = dict(zip(map(id, items), units, strict=True))
    items.sort(key=lambda item: (order[id(item)] not in slow, order[id(item)].endswith(".py")))


class ByFile(LoadScopeScheduling):  # type: ignore[misc]
    def __init__(self, config: pytest.Config, log: Any = None) -> None:
        super().__init__(config, log)
        config.option.loadscopereorder = False  # keep `slow_first`

    def _split_scope(self, nodeid: str) -> str:
        return unit(nodeid)
