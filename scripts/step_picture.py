"""Draw one step of training, docs/images/step.svg: six boxes in a ring, each with the rooms where it is done.

    python scripts/step_picture.py             # writes the picture

A test compares the picture with what this script would write.
"""

from __future__ import annotations

from html import escape
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PICTURE = ROOT / "docs" / "images" / "step.svg"

#: the parts of a step in their order: name, what is done in two short lines, and the rooms below grpo_lab/
PARTS: tuple[tuple[str, tuple[str, str], tuple[str, ...]], ...] = (
    ("1. Prompts", ("some problems", "with known answers"), ("data", "curation")),
    ("2. Completions", ("the model answers", "each one G times"), ("engines", "trainer/generation")),
    ("3. Rewards", ("a program says which", "answers are right"), ("rewards", "verifiers")),
    ("4. Advantages", ("each answer against", "the others of its group"), ("advantages", "trainer/scoring")),
    ("5. Loss", ("good answers more", "likely, bad ones less"), ("objectives", "update")),
    ("6. Step", ("weights move, unless", "a number is not finite"), ("trainer/step", "trainer/resume")),
)
WIDTH, EDGE, GAP, HIGH, TOP = 1060, 20, 20, 118, 20
BACK = "the next step begins with the new weights; vLLM gets them, and checks prove that it answers with them"


def box(number: int, width: float) -> list[str]:
    """Return a part's box as lines of SVG: its name, two lines on it, and its rooms."""
    name, said, rooms = PARTS[number]
    x = EDGE + number * (width + GAP)
    middle = x + width / 2
    lines = [
        f'<rect x="{x:.0f}" y="{TOP}" width="{width:.0f}" height="{HIGH}" rx="6" fill="#e8eefc" stroke="#64748b"/>',
        f'<text x="{middle:.0f}" y="{TOP + 26}" class="name">{escape(name)}</text>',
    ]
    for row, line in enumerate(said):
        lines.append(f'<text x="{middle:.0f}" y="{TOP + 48 + 16 * row}" class="said">{escape(line)}</text>')
    for row, room in enumerate(rooms):
        lines.append(f'<text x="{middle:.0f}" y="{TOP + 90 + 16 * row}" class="room">{escape(room)}/</text>')
    if number + 1 < len(PARTS):
        lines.append(f'<path d="M{x + width + 2:.0f} {TOP + HIGH / 2:.0f} h{GAP - 6}" class="arrow"/>')
    return lines


def picture() -> str:
    """Return the picture as SVG. It has a light background of its own, so that it can be read on dark pages, too."""
    width = (WIDTH - 2 * EDGE - GAP * (len(PARTS) - 1)) / len(PARTS)
    bottom = TOP + HIGH
    first = EDGE + width / 2
    last = WIDTH - EDGE - width / 2
    height = bottom + 62
    drawn = [line for number in range(len(PARTS)) for line in box(number, width)]
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" '
            'font-family="sans-serif">',
            "<title>One step of training: prompts, completions, rewards, advantages, loss, step, and again</title>",
            "<style>.name{font-weight:bold;font-size:15px}.said,.back{font-size:12px;fill:#475569}"
            ".room{font-size:12px;font-family:monospace}.name,.said,.room,.back{text-anchor:middle}"
            ".arrow{stroke:#64748b;stroke-width:2;fill:none;marker-end:url(#head)}</style>",
            '<defs><marker id="head" viewBox="0 0 8 8" refX="6" refY="4" markerWidth="6" markerHeight="6" '
            'orient="auto">'
            '<path d="M0 0 8 4 0 8z" fill="#64748b"/></marker></defs>',
            f'<rect width="{WIDTH}" height="{height}" rx="10" fill="#ffffff" stroke="#cbd5e1"/>',
            *drawn,
            f'<path d="M{last:.0f} {bottom + 2} v24 H{first:.0f} v-20" class="arrow"/>',
            f'<text x="{WIDTH / 2:.0f}" y="{bottom + 46}" class="back">{escape(BACK)}</text>',
            "</svg>",
            "",
        ]
    )


if __name__ == "__main__":
    PICTURE.write_text(picture(), encoding="utf-8")
