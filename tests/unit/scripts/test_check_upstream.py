"""``scripts/check_upstream.py``: what moved between two releases, read from wheels that are made here (the index is not
asked)."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from importlib.util import find_spec
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[3] / "scripts" / "check_upstream.py"


@pytest.fixture(scope="module")
def installed() -> Path:
    spec = find_spec("trl")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent


def wheel(installed: Path, to: Path, changes: dict[str, tuple[str, str]]) -> Path:
    """The installed TRL as release 1.99.0, with texts of some files replaced."""
    path = to / "trl-1.99.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for file in installed.rglob("*.py"):
            name, text = str(file.relative_to(installed.parent)), file.read_text()
            if name in changes:
                old, new = changes[name]
                assert old in text, name
                text = text.replace(old, new)
            archive.writestr(name, text)
    return path


def look(wheel: Path) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--wheel", str(wheel), "--diff"], capture_output=True, text=True
    )
    assert done.stderr == ""
    return done.returncode, done.stdout


LOSS = "def _compute_loss(self, model, inputs):"


@pytest.mark.not_fast
@pytest.mark.thorough(but="parameter")
@pytest.mark.parametrize(
    ("old", "new", "code", "line", "counts"),
    [
        (LOSS, f"{LOSS}\n        print(1)", 1, "body      GRPOTrainer._compute_loss", ", 1 body, 0 signature, 0 gone"),
        (
            LOSS,
            LOSS.replace("inputs", "batch"),
            2,
            "signature GRPOTrainer._compute_loss",
            ", 0 body, 1 signature, 0 gone",
        ),
        ("_buffered_inputs", "_buffered", 2, "gone      GRPOTrainer._buffered_inputs", " gone"),
        ("def _calculate_rewards(", "def _score(", 2, "gone      GRPOTrainer._calculate_rewards", ", 1 gone"),
    ],
    ids=["body", "parameter", "attribute", "method"],
)
def test_what_moved_is_named(
    installed: Path, tmp_path: Path, old: str, new: str, code: int, line: str, counts: str
) -> None:
    """And nothing else is."""
    found = look(wheel(installed, tmp_path, {"trl/trainer/grpo_trainer.py": (old, new)}))
    assert found[0] == code
    assert "found trl 1.99.0" in found[1]  # what its user reads
    assert line in found[1]
    assert counts in found[1]


@pytest.mark.not_fast
@pytest.mark.thorough
def test_a_comment_is_no_change(installed: Path, tmp_path: Path) -> None:
    changes = {"trl/trainer/grpo_trainer.py": (LOSS, f"{LOSS}\n        # another comment")}
    code, said = look(wheel(installed, tmp_path, changes))
    assert code == 0
    assert ", 0 body, 0 signature, 0 gone" in said


@pytest.mark.parametrize(
    ("name", "arguments", "said"),
    [
        ("bad.whl", ["--wheel"], "names no release"),
        ("trl-1.99.0-py3-none-any.whl", ["--wheel"], "cannot be read as a wheel"),
        ("garbage", [], "names no release"),
    ],
)
def test_garbage_is_named_without_a_traceback(name: str, arguments: list[str], said: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text("no archive")
    command = [sys.executable, str(SCRIPT), *arguments, str(tmp_path / name) if arguments else name]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode
    assert said in done.stderr
    assert "Traceback" not in done.stderr
