"""The table of guards (`tests/stress/guards.yaml`) is of this checkout, and its harness tells a guard that is held from
one that is not."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from mutate_guards import Guard, read_guards

ROOT = Path(__file__).resolve().parents[2]

GUARDS = read_guards(ROOT / "tests" / "stress" / "guards.yaml")


@pytest.mark.not_fast(cases="the facts say which row's reward was infinite")
@pytest.mark.parametrize("guard", GUARDS, ids=lambda guard: guard.guard)
def test_a_row_is_of_this_checkout(guard: Guard) -> None:
    assert guard.fault(ROOT) is None


def test_each_guard_stands_once() -> None:
    places = [(guard.file, guard.old, guard.new) for guard in GUARDS]
    assert len(set(places)) == len(places)


PACKAGE = (
    "def root(x):\n    if x < 0:\n        raise ValueError(x)\n    if x > 100:\n        raise ValueError(x)\n  "
    "  return x\n"
)
TESTS = """
import pytest
from package import root
def test_low():
    with pytest.raises(ValueError):
        root(-1)
def test_high():
    root(1)
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout of its own: one guard that a test holds, one that its test does not look at."""
    (tmp_path / "package.py").write_text(PACKAGE)
    (tmp_path / "test_it.py").write_text(TESTS)
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    return tmp_path


def harness(checkout: Path, *rows: dict[str, str]) -> subprocess.CompletedProcess[str]:
    (checkout / "guards.yaml").write_text(yaml.safe_dump(list(rows)))
    words = ["--table", "guards.yaml", "--root", ".", "--record", "seen.json"]
    command = [sys.executable, str(ROOT / "tests" / "stress" / "mutate_guards.py"), *words]
    return subprocess.run(command, cwd=checkout, env=dict(os.environ), capture_output=True, text=True, check=False)


HELD = {"guard": "not below 0", "file": "package.py", "old": "x < 0", "new": "False", "test": "test_it.py::test_low"}
LOOSE = {
    "guard": "not above 100",
    "file": "package.py",
    "old": "x > 100",
    "new": "False",
    "test": "test_it.py::test_high",
}


@pytest.mark.slow
def test_a_held_guard_and_a_loose_one_are_told_apart_and_run_once(checkout: Path) -> None:
    done = harness(checkout, HELD, LOOSE)
    assert done.returncode == 1
    assert "not below 0: fails (Failed: DID NOT RAISE" in done.stdout.replace("<class 'ValueError'>", "ValueError")
    assert "not above 100: DOES NOT FAIL (it passed)" in done.stdout
    assert (checkout / "package.py").read_text() == PACKAGE
    again = harness(checkout, HELD)
    assert again.returncode == 0
    assert "DOES NOT" not in again.stdout
    assert "not below 0: fails" not in again.stdout  # read from the record
    assert "| not below 0 | `package.py` | `test_it.py::test_low` | fails: `Failed: DID NOT RAISE" in again.stdout


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"file": "gone.py"}, "gone.py is not there"),
        ({"old": "ValueError"}, "holds 'ValueError' 2 times"),
        ({"new": "x <"}, "is no Python"),
        ({"new": "x  <  0"}, "changes nothing"),
        ({"test": "test_it.py::test_gone"}, "test_it.py has no 'test_gone'"),
    ],
)
def test_a_wrong_row_is_refused_before_anything_runs(change: dict[str, str], said: str, checkout: Path) -> None:
    fault = Guard(**{**HELD, **change}).fault(checkout)
    assert fault is not None
    assert said in fault
