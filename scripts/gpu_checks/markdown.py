"""Page of a check's results: a line for every verdict, and then for each section its table, or why it has none."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from bench_tables import shown, table

from gpu_checks.sections import RATIOS

WORDS = {True: "pass", False: "**fail**", None: "no verdict"}


def page(found: dict[str, Any]) -> str:
    """Return the page of the results ``found``, as `Record.found` returns them."""
    head = f"# gpu-check, {found['form']} form, {found['device_name']}, {found['made']}\n\n"
    head += f"{found.get('seconds', 0):.0f} s of {found['budget_s']:.0f} s."
    if found["form"] == "tiny":
        head += " Small models: a check that everything runs, no measurement."
    sections = found["sections"]
    parts = [head, table([*verdicts(sections), *ratios(found)])] if sections else [head]
    return "\n\n".join([*parts, *(part(name, outcome) for name, outcome in sections.items())]) + "\n"


def verdicts(sections: dict[str, Any]) -> Iterator[dict[str, str]]:
    """Yield a line for each question that was answered, and one for each section without an answer that says why."""
    for name, outcome in sections.items():
        asked = [row for row in outcome["rows"] if "asked" in row]
        for row in asked:
            yield line(name, row["asked"], shown(row["number"]), shown(row["bound"]), WORDS[row["pass"]])
        if why(outcome):
            yield line(name, outcome["status"], "", "", f"no verdict: {why(outcome)}")


def ratios(found: dict[str, Any]) -> Iterator[dict[str, str]]:
    """Yield a line for each quotient of two sections' seconds (`RATIOS`), if both have them."""
    for asked, places in RATIOS.items():
        seconds = [first_of(found["sections"].get(name, {}), column) for name, column in places]
        if all(seconds):
            ratio = seconds[0] / seconds[1]
            passed = None if found["form"] == "tiny" else ratio > 1
            yield line(f"{places[0][0]} / {places[1][0]}", asked, f"{ratio:.2f}x", "> 1x", WORDS[passed])


def first_of(outcome: dict[str, Any], column: str) -> float:
    """Return the first value in a column of a section's rows; 0 if there is none."""
    return next((row[column] for row in outcome.get("rows", []) if column in row), 0.0)


def line(section: str, asked: str, number: str, bound: str, word: str) -> dict[str, str]:
    """Return a row of the table of verdicts."""
    return {"section": section, "asked": asked, "number": number, "bound or ratio": bound, "verdict": word}


def lines(name: str, outcome: dict[str, Any]) -> list[str]:
    """Return the lines of one section for a terminal."""
    return [" | ".join(one for one in row.values() if one) for row in verdicts({name: outcome})]


def why(outcome: dict[str, Any]) -> str:
    """Return why a section has no answer, or not all of it; "" if it has."""
    return "" if outcome["status"] in ("ok", "failed") else str(outcome.get("reason", ""))


def part(name: str, outcome: dict[str, Any]) -> str:
    """Return a section's part of the page: its status, why it has no answer, and its rows."""
    parts = [f"## {name}: {outcome['status']} ({outcome.get('seconds', 0):.0f} s)"]
    if why(outcome):
        parts.append(why(outcome))
    rows = [{key: value for key, value in row.items() if key != "bound" or value != ""} for row in outcome["rows"]]
    if rows:
        parts.append(table(rows))
    return "\n\n".join(parts)
