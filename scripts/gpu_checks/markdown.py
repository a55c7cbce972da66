"""The page: a table a section, or why there is none."""

from __future__ import annotations

from typing import Any

from bench_tables import table


def page(found: dict[str, Any]) -> str:
    head = f"# gpu-check, {found['form']} form, {found['device']}, {found['made']}\n\n"
    head += f"{found['seconds']:.0f} s of {found['budget_s']:.0f} s."
    if found["form"] == "tiny":
        head += " Small models: a check that everything runs, no measurement."
    return "\n\n".join([head, *(part(name, outcome) for name, outcome in found["sections"].items())]) + "\n"


def part(name: str, outcome: dict[str, Any]) -> str:
    lines = [f"## {name}: {outcome['status']} ({outcome['seconds']:.0f} s)"]
    why = outcome.get("reason") or (outcome.get("error") or {}).get("message")
    if why:
        lines.append(str(why))
    if outcome["rows"]:
        lines.append(table(outcome["rows"]))
    return "\n\n".join(lines)
