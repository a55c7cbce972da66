"""``tests/not_fast.txt`` and ``tests/thorough.txt`` name tests that there are."""

from __future__ import annotations

import re

import pytest

from conftest import left_out
from documentation.blocks import ROOT


@pytest.mark.parametrize("marker", ["not_fast", "thorough"])
def test_every_line_names_a_test(marker: str) -> None:
    for test in left_out(marker):
        path, _, name = test.partition("[")[0].partition("::")
        assert re.search(rf"^def {name}\(", (ROOT / path).read_text(), re.M), test
