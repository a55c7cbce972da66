"""Remove each guard once and see its test fail.

    python tests/stress/mutate_guards.py [--only WORD …] [--table tests/stress/guards.yaml]
                                         [--record runs/mutate_guards.json]

A row of the table: ``guard`` (the promise, in words), ``file``, ``old`` (text that stands there exactly once), ``new``
(without the guard), ``test`` (what must fail, as pytest is given it), and, if need be, ``why`` (why a second guard
makes it fail or not). The test is run in a copy of the checkout: first as it is (it must pass, and not be skipped),
then with the row's change (it must fail by an assertion or an error of the code, not by a file that cannot be imported
or a test that is not found). What was seen is kept in the record by the contents of file and test, and not run again
until one changes.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

from grpo_lab.recipe.yaml import parsed

ROOT = Path(__file__).resolve().parents[2]
LONGEST = 600


@dataclass(frozen=True)
class Guard:
    guard: str
    file: str
    old: str
    new: str
    test: str
    why: str = ""

    def fault(self, root: Path) -> str | None:
        """What is wrong with the row, without running anything."""
        path = root / self.file
        if not path.is_file():
            return f"{self.file} is not there"
        found = path.read_text(encoding="utf-8").count(self.old)
        if found != 1:
            return f"{self.file} holds {self.old!r} {found} times"
        try:
            changed = ast.dump(ast.parse(self.changed(root)))
        except SyntaxError as error:
            return f"{self.file} with {self.new!r} is no Python ({error})"
        if changed == ast.dump(ast.parse(path.read_text(encoding="utf-8"))):
            return f"{self.new!r} changes nothing"
        return fault_of_test(self.test, root)

    def changed(self, root: Path) -> str:
        return (root / self.file).read_text(encoding="utf-8").replace(self.old, self.new)

    def print_of(self, root: Path) -> str:
        """Changes with the row, its file and its test."""
        parts = [
            json.dumps(asdict(self)),
            *((root / name).read_text(encoding="utf-8") for name in (self.file, self.test.split("::")[0])),
        ]
        return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Seen:
    """``first``: the line of pytest that says why the test failed."""

    passed_before: bool
    failed: bool
    first: str

    @property
    def holds(self) -> bool:
        return self.passed_before and self.failed

    @property
    def in_words(self) -> str:
        return "fails" if self.holds else "DOES NOT FAIL" if self.passed_before else "DOES NOT PASS AS IT IS"


def read_guards(table: Path) -> list[Guard]:
    return [Guard(**row) for row in parsed(table.read_text(encoding="utf-8"), str(table))]


def fault_of_test(test: str, root: Path) -> str | None:
    """None where ``path::name`` (``::Class::name``, ``[case]``) is a test of the checkout."""
    file, _, name = test.partition("::")
    path = root / file
    if not path.is_file():
        return f"{file} is not there"
    name = name.partition("[")[0].split("::")[-1]
    functions = {
        node.name
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }
    return None if name in functions and name.startswith("test_") else f"{file} has no {name!r}"


def copy_of(root: Path, place: Path) -> Path:
    """What git knows of the checkout, as it is now, with a ``shared`` beside it."""
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"], cwd=root, capture_output=True, text=True, check=True
    )
    for name in listed.stdout.splitlines():
        if (root / name).is_file():
            (place / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(root / name, place / name)
    return place


def run_test(test: str, root: Path, data: Path) -> tuple[int, str]:
    """pytest's exit code and output. The copy's package wins over an installed one, and no bytecode is kept."""
    known = {
        "PYTHONPATH": str(root),
        "PYTHONDONTWRITEBYTECODE": "1",
        "GRPO_LAB_DATA": os.environ.get("GRPO_LAB_DATA", str(data)),
    }
    # no -q: a second one beside the checkout's own takes the line away that says how many passed
    command = [sys.executable, "-m", "pytest", test, "-x", "-rs", "-p", "no:cacheprovider"]
    try:
        done = subprocess.run(
            command, cwd=root, env=os.environ | known, capture_output=True, text=True, timeout=LONGEST
        )
    except subprocess.TimeoutExpired:
        return -1, f"E   it hung: no end within {LONGEST} s"
    return done.returncode, done.stdout + done.stderr


def see(guard: Guard, root: Path, data: Path, passes: dict[str, bool]) -> Seen:
    """``passes``: tests that were seen to pass as they are."""
    if guard.test not in passes:
        code, output = run_test(guard.test, root, data)
        passes[guard.test] = code == 0 and re.search(r"\d+ passed", output) is not None
        if not passes[guard.test]:
            return Seen(False, False, first_error(output))
    if not passes[guard.test]:
        return Seen(False, False, "see above")
    path, before = root / guard.file, (root / guard.file).read_text(encoding="utf-8")
    path.write_text(guard.changed(root), encoding="utf-8")
    try:
        code, output = run_test(guard.test, root, data)
    finally:
        path.write_text(before, encoding="utf-8")
    # 1: a test failed, or hung; 2 and more: it was not collected, which shows nothing
    return Seen(
        True, code in (1, -1) and "ImportError while" not in output, first_error(output) if code else "it passed"
    )


def first_error(output: str) -> str:
    lines = [line[1:].strip() for line in output.splitlines() if line.startswith("E ")]
    return (lines or output.strip().splitlines() or ["no output"])[0 if lines else -1][:160]


def table_of(guards: list[Guard], seen: dict[str, Seen], root: Path) -> str:
    lines = ["| guard | removed in | test | seen |", "|---|---|---|---|"]
    for guard in guards:
        found = seen.get(guard.print_of(root))
        said = (
            "not run"
            if found is None
            else f"fails: `{found.first}`"
            if found.holds
            else f"**{found.in_words.lower()}**: `{found.first}`"
        )
        lines.append(f"| {guard.guard} | `{guard.file}` | `{guard.test}` | {said.replace('|', '¦')} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--table", type=Path, default=ROOT / "tests" / "stress" / "guards.yaml")
    parser.add_argument("--root", type=Path, default=ROOT, help="the checkout that files and tests are of")
    parser.add_argument("--record", type=Path, default=Path("runs/mutate_guards.json"))
    parser.add_argument("--only", nargs="*", default=[], metavar="WORD", help="rows that hold one of these words")
    args = parser.parse_args()
    root = args.root.resolve()
    guards = [
        g for g in read_guards(args.table) if not args.only or any(word in json.dumps(asdict(g)) for word in args.only)
    ]
    faults = [f"{guard.guard}: {fault}" for guard in guards if (fault := guard.fault(root))]
    if faults:
        sys.exit("\n".join(faults))
    written = json.loads(args.record.read_text()) if args.record.is_file() else {}
    seen = {key: Seen(**value) for key, value in written.items()}
    passes = {g.test: True for g in guards if (found := seen.get(g.print_of(root))) is not None and found.passed_before}
    with tempfile.TemporaryDirectory(prefix="mutate-guards-") as name:
        place = copy_of(root, Path(name) / "checkout")
        for guard in guards:
            key = guard.print_of(root)
            if key not in seen:
                seen[key] = see(guard, place, root.parent / "shared" / "data", passes)
                args.record.parent.mkdir(parents=True, exist_ok=True)
                args.record.write_text(json.dumps({key: asdict(value) for key, value in seen.items()}, indent=1))
                print(f"{guard.guard}: {seen[key].in_words} ({seen[key].first})", flush=True)
    print("\n" + table_of(guards, seen, root))
    if not all(seen[guard.print_of(root)].holds for guard in guards):
        sys.exit("a guard can be removed and its test does not see it")


if __name__ == "__main__":
    main()
