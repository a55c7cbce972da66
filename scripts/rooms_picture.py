"""Draw the rooms (folders) of the package, docs/images/rooms.svg: each stands above those that it may import.

    python scripts/rooms_picture.py            # writes the picture

A test compares the picture with what this script would write.
"""

from __future__ import annotations

from html import escape
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "grpo_lab"
PICTURE = ROOT / "docs" / "images" / "rooms.svg"

#: floors from the top down: what a floor is for, and its rooms with a few words on each. A room without a folder or
#: file is not drawn.
FLOORS: tuple[tuple[str, dict[str, str]], ...] = (
    ("what is typed", {"cli": "options, exit codes", "commands": "one table of commands"}),
    ("experiments", {"labs": "arms × seeds"}),
    ("what a command does", {"pipelines": "train, curate, rounds, long2short, evaluate"}),
    ("one piece of it", {"stages": "sample, filter, train, merge, measure"}),
    ("a folder on disk", {"runs": "one writer, same run?, asked to stop"}),
    ("a YAML file", {"recipe": "read, checked and resolved once"}),
    (
        "a run",
        {
            "trainer": "the step, read down lab_trainer.py; the only room that knows TRL",
            "evaluation": "accuracy with intervals, comparisons, pages",
        },
    ),
    (
        "what a step is made of",
        {
            "data": "rows, prompts",
            "curation": "which rows",
            "engines": "completions, vLLM",
            "turns": "tools, trajectories",
            "rewards": "text → score",
            "advantages": "score → advantage",
            "objectives": "ratio, surrogate, KL",
            "update": "plan of bins",
            "diagnostics": "is it working?",
            "testing": "tiny real models",
        },
    ),
    (
        "what all stand on",
        {
            "requirements": "what this Python lacks",
            "verifiers": "is it right?",
            "sandbox": "programs behind walls",
            "batch": "carriers, masks",
            "registry": "parts by name",
            "settings": "checked types",
            "io": "whole files",
            "reading": "files from outside",
            "hub": "asked once",
            "locks": "one writer a file",
            "finite": "where NaN is",
            "visible": "text fit to show",
            "signals": "handlers, put back",
            "threads": "that never hang the end",
        },
    ),
)
INSIDE_TRAINER = (
    ("before", ("settings", "exactness", "critic")),
    ("in a step", ("generation", "scoring", "step")),
    ("around it", ("metrics", "resume", "ranks", "supervised")),
    ("TRL's private names", ("trl_bridge",)),
)

WIDTH, LEFT, GAP, HIGH, ABREAST = 1120, 190, 10, 52, 5
COLOURS = ("#e8eefc", "#e8eefc", "#e8eefc", "#e8eefc", "#e8eefc", "#e8eefc", "#fdeccf", "#e2f3e5", "#ececf1")


def is_there(room: str, within: Path = PACKAGE) -> bool:
    """Return whether a room exists, as a folder or as a file."""
    return (within / room).is_dir() or (within / f"{room}.py").is_file()


def box(x: float, y: float, width: float, height: float, colour: str, name: str, said: str) -> list[str]:
    """Return a room's box as lines of SVG: its name, and below it what is said of it."""
    middle = x + width / 2
    return [
        f'<rect x="{x:.0f}" y="{y:.0f}" width="{width:.0f}" height="{height:.0f}" rx="6" fill="{colour}" '
        'stroke="#64748b"/>',
        f'<text x="{middle:.0f}" y="{y + 22:.0f}" class="name">{escape(name)}</text>',
        f'<text x="{middle:.0f}" y="{y + 40:.0f}" class="said">{escape(said)}</text>',
    ]


def trainer(x: float, y: float, width: float, colour: str, said: str) -> list[str]:
    """Return the box of the largest room, `trainer`, with its own rooms inside."""
    drawn = box(x, y, width, HIGH * 2.6, colour, "trainer", said)
    groups = [(what, [room for room in rooms if is_there(room, PACKAGE / "trainer")]) for what, rooms in INSIDE_TRAINER]
    one = (width - GAP * (len(groups) + 1)) / len(groups)
    for number, (what, rooms) in enumerate(groups):
        left = x + GAP + number * (one + GAP)
        drawn.append(
            f'<rect x="{left:.0f}" y="{y + 50:.0f}" width="{one:.0f}" height="74" rx="4" fill="#fff8ea" '
            'stroke="#c9a35a"/>'
        )
        drawn.append(f'<text x="{left + one / 2:.0f}" y="{y + 66:.0f}" class="said">{escape(what)}</text>')
        lines = [rooms[:2], rooms[2:]] if len(rooms) > 2 else [rooms]
        drawn += [
            f'<text x="{left + one / 2:.0f}" y="{y + 88 + 18 * row:.0f}" class="room">{", ".join(line)}</text>'
            for row, line in enumerate(lines)
        ]
    return drawn


def in_rows(names: list[str]) -> list[list[str]]:
    """Divide names into as few rows of at most ``ABREAST`` as possible, as evenly as possible."""
    count = -(-len(names) // ABREAST)
    each = -(-len(names) // count)
    return [names[start : start + each] for start in range(0, len(names), each)]


def floor(number: int, y: float) -> tuple[list[str], float]:
    """Return the boxes of a floor, whose top is at ``y``, and their height; none and 0 if none of its rooms exists."""
    what, rooms = FLOORS[number]
    here = {name: said for name, said in rooms.items() if is_there(name)}
    if not here:
        return [], 0.0
    drawn = [f'<text x="24" y="{y + 30:.0f}" class="floor">{escape(what)}</text>']
    room = WIDTH - LEFT - 24
    if "trainer" in here:
        wide = room * 0.68
        drawn += trainer(LEFT, y, wide, COLOURS[number], here["trainer"])
        rest = room - wide - GAP
        return [
            *drawn,
            *box(LEFT + wide + GAP, y, rest, HIGH * 2.6, COLOURS[number], "evaluation", here["evaluation"]),
        ], HIGH * 2.6
    names = list(here)
    rows = in_rows(names)
    for row, line in enumerate(rows):
        one = (room - GAP * (len(line) - 1)) / len(line)
        for place, name in enumerate(line):
            drawn += box(
                LEFT + place * (one + GAP), y + row * (HIGH + GAP), one, HIGH, COLOURS[number], name, here[name]
            )
    return drawn, len(rows) * HIGH + (len(rows) - 1) * GAP


def picture() -> str:
    """Return the picture as SVG. It has a light background of its own, so that it can be read on dark pages, too."""
    drawn: list[str] = []
    y = 24.0
    for number in range(len(FLOORS)):
        boxes, height = floor(number, y)
        if not boxes:
            continue
        if drawn:
            drawn.append(f'<path d="M{LEFT + (WIDTH - LEFT) / 2:.0f} {y - 22:.0f} v14" class="arrow"/>')
        drawn += boxes
        y += height + 28
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {y:.0f}" role="img" '
            'font-family="sans-serif">',
            "<title>The rooms of grpo_lab: each knows only rooms below it</title>",
            "<style>.name{font-weight:bold;font-size:16px}.said{font-size:12px;fill:#475569}.room{font-size:14px}"
            ".floor{font-size:13px;font-style:italic;fill:#475569}.name,.said,.room{text-anchor:middle}"
            ".arrow{stroke:#64748b;stroke-width:2;fill:none;marker-end:url(#head)}</style>",
            '<defs><marker id="head" viewBox="0 0 8 8" refX="6" refY="4" markerWidth="6" markerHeight="6" '
            'orient="auto">'
            '<path d="M0 0 8 4 0 8z" fill="#64748b"/></marker></defs>',
            f'<rect width="{WIDTH}" height="{y:.0f}" rx="10" fill="#ffffff" stroke="#cbd5e1"/>',
            *drawn,
            "</svg>",
            "",
        ]
    )


if __name__ == "__main__":
    PICTURE.write_text(picture(), encoding="utf-8")
