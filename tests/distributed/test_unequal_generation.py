"""Sharded ranks that finish generating at different times wait for one another: each decoding step gathers parameters.

(``fully_shard`` marks the module, transformers' ``generate`` reads the mark and keeps ranks in step. This test tells if
one stops.)
"""

from __future__ import annotations

from pathlib import Path

import pytest

from distributed.launch import HERE, RECIPES, accelerate_launch

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_one_rank_ends_at_once(kind: str, tiny_folder: Path, tmp_path: Path) -> None:
    before = [str(HERE / "cpu_fsdp2.py")] if kind == "fsdp2" else []
    words = [*before, str(HERE / "unequal_worker.py"), str(tiny_folder), str(tmp_path)]
    output = accelerate_launch(RECIPES / f"{kind}.yaml", 2, words)
    assert "lengths: [(1.0, 32.0), (1.0, 32.0)]" in output
