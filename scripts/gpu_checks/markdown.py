"""The page: a line for every verdict, then a table a section, or why there is none."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from bench_tables import shown, table

from gpu_checks.sections import RATIOS

WORDS = {True: "pass", False: "**fail**", None: "no verdict"}


def page(found: dict[str, Any]) -> str:
    head = f"# gpu-check, {found['form']} form, {found['device_name']}, {found['made']}\n\n"
    head += f"{found.get('seconds', 0):.0f} s of {found['budget_s']:.0f} s."
    if found["form"] == "tiny":
        head += " Small models: a check that everything runs, no measurement."
    sections = found["sections"]
    parts = [head, table([*verdicts(sections), *ratios(found)])] if sections else [head]
    return "\n\n".join([*parts, *(part(name, outcome) for name, outcome in sections.items())]) + "\n"


def verdicts(sections: dict[str, Any]) -> Iterator[dict[str, str]]:
    """One line a question. A section without an answer has one line that says why."""
    for name, outcome in sections.items():
        asked = [row for row in outcome["rows"] if "asked" in row]
        for row in asked:
            yield line(name, row["asked"], shown(row["number"]), shown(row["bound"]), WORDS[row["pass"]])
        if why(outcome):
            yield line(name, outcome["status"], "", "", f"no verdict: {why(outcome)}")


def ratios(found: dict[str, Any]) -> Iterator[dict[str, str]]:
    """Seconds of one section over those of another, of the same machine, where both have them."""
    for asked, places in RATIOS.items():
        seconds = [first_of(found["sections"].get(name, {}), column) for name, column in places]
        if all(seconds):
            ratio = seconds[0] / seconds[1]
            passed = None if found["form"] == "tiny" else ratio > 1
            yield line(f"{places[0][0]} / {places[1][0]}", asked, f"{ratio:.2f}x", "> 1x", WORDS[passed])


def first_of(outcome: dict[str, Any], column: str) -> float:
    return next((row[column] for row in outcome.get("rows", []) if column in row), 0.0)


def line(section: str, asked: str, number: str, bound: str, word: str) -> dict[str, str]:
    return {"section": section, "asked": asked, "number": number, "bound or ratio": bound, "verdict": word}


def lines(name: str, outcome: dict[str, Any]) -> list[str]:
    """The same for a terminal."""
    return [" | ".join(one for one in row.values() if one) for row in verdicts({name: outcome})]


def why(outcome: dict[str, Any]) -> str:
    """Why the section has no answer, or not all of it; empty where it has."""
    return "" if outcome["status"] in ("ok", "failed") else str(outcome.get("reason", ""))


def part(name: str, outcome: dict[str, Any]) -> str:
    parts = [f"## {name}: {outcome['status']} ({outcome.get('seconds', 0):.0f} s)"]
    if why(outcome):
        parts.append(why(outcome))
    rows = [{key: value for key, value in row.items() if key != "bound" or value != ""} for row in outcome["rows"]]
    if rows:
        parts.append(table(rows))
    return "\n\n".join(parts)
