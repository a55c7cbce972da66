"""Write the numbers of measured runs into the pages that show them, from one record a run: docs/measured_runs.json.

    python scripts/measured_runs.py                                          # writes the pages
    python scripts/measured_runs.py --add RUN --recipe quickstart/dr_grpo    # adds the record of a finished run first

``--add`` replaces the record of the same recipe and seed. Records of `rounds` and pipelines are written by hand, from
the table on the run's own page.

Numbers stand between ``<!-- measured: RECIPE FORM -->`` and ``<!-- end of measured -->``. FORM is ``words`` (a
sentence), ``table`` (a row for each seed), ``cell`` (of a table) or ``seeds`` (their number).
"""

from __future__ import annotations

import argparse
import json
import platform
import re
from datetime import date
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RECORDS = ROOT / "docs" / "measured_runs.json"
PAGES = [
    ROOT / name
    for name in (
        "README.md",
        "docs/measured.md",
        "recipes/quickstart/README.md",
        "recipes/lab/misreading/README.md",
        "recipes/turns/README.md",
    )
]
MARKED = re.compile(r"(<!-- measured: (\S+) (\w+) -->).*?(<!-- end of measured -->)", re.S)
SHOWN = {
    "accuracy": ".3f", "with thinking": ".3f", "without": ".3f", "modes obeyed": ".3f", "sorted": ".3f",
    "reward": ".2f", "format": ".3f", "language": ".3f", "tokens": ".1f",
}  # fmt: skip
"""Number in a record → its format, in the order in which a cell of docs/measured.md shows them."""
NUMBERS = ("no", "One", "Two", "Three", "Four", "Five")
Record = dict[str, Any]


def records(recipe: str) -> list[Record]:
    """Return the records of a recipe's runs, in the order of their seeds. Raises ValueError if there are none."""
    found = [one for one in json.loads(RECORDS.read_text(encoding="utf-8")) if one["recipe"] == recipe]
    if not found:
        raise ValueError(f"{RECORDS.name} has no run of {recipe!r}")
    return sorted(found, key=lambda one: int(one["seed"]))


def pairs(runs: list[Record], name: str, form: str) -> str:
    """Return a number before and after each run, as ``0.234 → 0.840, 0.242 → 0.960``; "" if runs do not have it."""
    if name not in runs[0]["after"]:
        return ""
    return ", ".join(f"{run['before'][name]:{form}} → {run['after'][name]:{form}}" for run in runs)


def words(runs: list[Record]) -> str:
    """Return the form ``words``: a sentence with the accuracy and the tokens of all runs."""
    seeds = f"{NUMBERS[len(runs)]} seed{'s' * (len(runs) > 1)}"
    tokens = pairs(runs, "tokens", ".1f")
    problems = runs[0]["problems"]
    accuracy = f"{seeds}: {pairs(runs, 'accuracy', '.3f')} (strict greedy accuracy on {problems} held-out problems)"
    return f"\n{accuracy}{', ' * bool(tokens)}{tokens}{' tokens' * bool(tokens)}.\n"


def cell(runs: list[Record]) -> str:
    """Return the form ``cell``: the numbers of all runs, for a cell of a table."""
    return "; ".join(f"{name} {said}" for name, form in SHOWN.items() if (said := pairs(runs, name, form)))


def table(runs: list[Record]) -> str:
    """Return the form ``table``: a Markdown table with a row for each run."""
    rows = [columns(run) for run in runs]
    lines = ["| " + " | ".join(rows[0]) + " |", "|---" * len(rows[0]) + "|"]
    return "\n".join(["", *lines, *("| " + " | ".join(row.values()) + " |" for row in rows), "", ""])


def columns(run: Record) -> dict[str, str]:
    """Return a run's row of the table: column → cell."""
    before = run["before"]
    after = run["after"]
    found = {
        "seed": str(run["seed"]),
        "accuracy before RL": f"{before['accuracy']:.3f}",
        "after RL": f"{after['accuracy']:.3f}",
        "gain": f"{after['accuracy'] - before['accuracy']:+.3f}",
    }
    if "tokens" in after:
        found |= {
            "tokens before": f"{before['tokens']:.1f}",
            "tokens after": f"{after['tokens']:.1f}",
            "times as long": f"{after['tokens'] / before['tokens']:.1f}",
        }
    if "worked_out" in after:
        found |= {
            "worked out before": f"{before['worked_out']:.1%}",
            "worked out after": f"{after['worked_out']:.1%}",
        }
    return found | ({"CPU seconds": str(run["cpu_seconds"])} if "cpu_seconds" in run else {})


FORMS = {"words": words, "cell": cell, "table": table, "seeds": lambda runs: str(len(runs))}


def page_with(text: str) -> str:
    """Return the page ``text`` with everything between its marks made anew."""

    def made(mark: re.Match[str]) -> str:
        return f"{mark[1]}{FORMS[mark[3]](records(mark[2]))}{mark[4]}"

    return MARKED.sub(made, text)


def record_of(run: Path, recipe: str) -> Record:
    """Return the record of a run of ``grpo-lab train``, from its folder. Raises ValueError if it is not finished, and
    FileNotFoundError if it was not evaluated before and after."""
    marker = json.loads((run / "run.json").read_text(encoding="utf-8"))
    if not marker.get("finished"):
        raise ValueError(f"{run} is not finished")
    measured: dict[str, Record] = {}
    for when in ("before", "after"):
        greedy = json.loads((run / "evaluation" / when / "summary.json").read_text(encoding="utf-8"))["greedy"]
        measured[when] = {
            "accuracy": greedy["accuracy"]["value"],
            "tokens": greedy["mean_length"],
            "worked_out": greedy["worked_out_share"],
        }
    problems = greedy["completions"]
    day = date.fromtimestamp((run / "run.json").stat().st_mtime).isoformat()
    return {
        "recipe": recipe, "problems": problems, "date": day, "machine": platform.processor() or platform.machine(),
        "seed": marker["seed"], **measured,
    }  # fmt: skip


def add(record: Record) -> None:
    """Add a record to the file, in place of that of the same recipe and seed."""
    kept = json.loads(RECORDS.read_text(encoding="utf-8"))
    kept = [one for one in kept if (one["recipe"], one["seed"]) != (record["recipe"], record["seed"])]
    lines = ",\n".join(f"  {json.dumps(one)}" for one in [*kept, record])
    RECORDS.write_text(f"[\n{lines}\n]\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--add", type=Path, metavar="RUN")
    parser.add_argument("--recipe", help="its name below recipes/, without .yaml")
    args = parser.parse_args()
    if args.add is not None:
        add(record_of(args.add, args.recipe or parser.error("--add needs --recipe")))
    for page in PAGES:
        page.write_text(page_with(page.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
