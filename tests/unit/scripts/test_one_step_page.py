"""The memory table of docs/algorithms/one_step.md says what scripts/memory_table.py works out."""

from __future__ import annotations

from pathlib import Path

import memory_table as script

PAGE = Path(__file__).resolve().parents[3] / "docs" / "algorithms" / "one_step.md"
READ_ONLY = 6.0  # bytes a parameter: float32 weights and autocast's bf16 copy


def test_the_table() -> None:
    text = PAGE.read_text(encoding="utf-8")
    part = text[text.index("<!-- memory of the methods") : text.index("<!-- end of the memory")]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in part.splitlines() if line.startswith("| ")]
    expected = []
    for shape in script.SHAPES:
        trained, read = script.state_bytes(shape, "single"), READ_ONLY * shape.parameters
        sizes = (trained, trained + read, 2 * trained, 2 * trained + read)
        expected.append([shape.name, *(f"{size / script.GB:.1f}" for size in sizes)])
    assert rows[2:] == expected
