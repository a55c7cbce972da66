"""``tests/not_fast.txt`` names tests and cases that there are."""

from __future__ import annotations

import re

from conftest import not_fast
from documentation.blocks import ROOT


def test_every_line_names_a_test() -> None:
    for test in not_fast():
        path, _, name = test.partition("::")
        assert re.search(rf"^def {name}\(", (ROOT / path).read_text(), re.M), test
