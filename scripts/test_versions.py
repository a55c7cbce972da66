"""Test the package with the oldest, the newest and mixed releases of what it needs, each in a fresh environment.

    make test-versions                             # all rows; some minutes each on two cores
    python scripts/test_versions.py oldest         # one row

Each row of ``ROWS`` gets a virtual environment of its own under ``build/versions/``, with the package installed from
this checkout and the row's pins. The environment is kept, so that a second call only tests. Five suites are run in it:
the contract with TRL's private names, the parity of our objectives with TRL's, the drop-in runs, prompts that are
computed once, and generation by groups. A table of their last lines is printed. Once every row has been run, it is also
written between the marks of docs/compatibility.md. The exit code is 1 if a suite failed.

TRL 1.15 computes log-probs with Triton only, so that neither TRL nor this package can train with it on a machine
without a GPU. There its ``trl/kernels`` is replaced by that of 1.16, which has the same kernel in plain torch.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
HOME = ROOT / "build" / "versions"
PAGE = ROOT / "docs" / "compatibility.md"
BEGIN, END = "<!-- versions: written by scripts/test_versions.py -->", "<!-- end of versions -->"
SUITES = {
    "contract": ["tests/contract"],
    "parity": ["tests/parity/test_presets.py", "tests/parity/test_exact_update.py"],
    "drop-in": ["tests/parity/test_drop_in.py"],
    "shared prompts": ["tests/parity/test_shared_prompts.py"],
    "generation": ["tests/unit/generation/test_generate.py", "tests/rollouts/test_transformers_engine.py"],
}
SHOWN = ("trl", "transformers", "peft", "accelerate", "datasets", "math-verify")
TORCH = "torch==2.13.0"

#: name of a row → pip's arguments that pin releases; other packages are as pip takes them within pyproject.toml's
#: ranges
ROWS: dict[str, list[str]] = {
    "oldest": [
        *("trl==1.15.0", "transformers==5.5.0", "peft==0.19.0", "accelerate==1.13.0", "datasets==4.7.0"),
        "math-verify==0.8.0",
    ],
    "tested daily": ["-c", "scripts/constraints.txt"],
    "mixed": ["trl==1.15.0", "transformers==5.17.0", "peft==0.21.2", "accelerate==1.13.0", "datasets==5.2.0"],
    "newest": ["trl==1.16.0"],
}


@dataclass(frozen=True)
class Outcome:
    """The result of a row: the releases found in its environment, and the last line of each suite."""

    name: str
    releases: dict[str, str]
    suites: dict[str, str]

    @property
    def green(self) -> bool:
        return all("passed" in line and "failed" not in line and "error" not in line for line in self.suites.values())


def environment(name: str) -> Path:
    """Return the Python of a row's environment, which is installed first if it is not there yet."""
    folder = HOME / name.replace(" ", "_")
    python = folder / "bin" / "python"
    if (folder / ".ready").exists():
        return python
    shutil.rmtree(folder, ignore_errors=True)
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    index = ["--extra-index-url", "https://download.pytorch.org/whl/cpu"]
    subprocess.run([*pip, "--retries", "0", "--timeout", "20", *index, TORCH], check=True)
    subprocess.run([*pip, *ROWS[name], TORCH, "-e", f"{ROOT}[dev]"], check=True, cwd=ROOT)
    if "trl==1.15.0" in ROWS[name] and not shutil.which("nvidia-smi"):
        _kernels_in_torch(python)
    (folder / ".ready").touch()
    return python


def _kernels_in_torch(python: Path) -> None:
    """Replace the kernels of TRL 1.15 by those of 1.16 (see this file's docstring)."""
    where = subprocess.run(
        [str(python), "-c", "import importlib.util as u; print(u.find_spec('trl').submodule_search_locations[0])"],
        capture_output=True,
        text=True,
        check=True,
    )
    kernels = Path(where.stdout.strip()) / "kernels"
    with tempfile.TemporaryDirectory() as scratch:
        download = [str(python), "-m", "pip", "download", "-q", "--no-deps", "-d", scratch, "trl==1.16.0"]
        subprocess.run(download, check=True)
        with zipfile.ZipFile(next(Path(scratch).glob("trl-*.whl"))) as wheel:
            wheel.extractall(scratch)
        shutil.rmtree(kernels)
        shutil.copytree(Path(scratch) / "trl" / "kernels", kernels)
    with (kernels / "__init__.py").open("a") as file:  # 1.15 imports both names or none
        file.write("\nif not is_triton_available():\n    selective_log_softmax_and_entropy = None\n")


def outcome(name: str) -> Outcome:
    """Run all suites in a row's environment."""
    python = environment(name)
    listing = subprocess.run(
        [str(python), "-m", "pip", "list", "--format", "freeze"], capture_output=True, text=True, check=True
    ).stdout
    releases = dict(line.lower().split("==", 1) for line in listing.splitlines() if "==" in line)
    suites = {}
    for suite, paths in SUITES.items():
        command = [str(python), "-m", "pytest", "-m", "not slow and not vllm", "-p", "no:cacheprovider", *paths]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        last = (done.stdout.strip().splitlines() or ["nothing was printed"])[-1]
        suites[suite] = re.sub(r" in [\d.]+s.*|, \d+ (deselected|warnings?)\b", "", last).strip("= ")
        print(f"{name}: {suite}: {last}", flush=True)
        if done.returncode:
            print("\n".join(line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR", "E  "))))
    return Outcome(name, {package: releases.get(package, "?") for package in SHOWN}, suites)


def table(outcomes: list[Outcome]) -> str:
    """Return the Markdown table with a line for each row."""
    head = ["environment", *SHOWN, *SUITES]
    lines = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    for row in outcomes:
        lines.append(f"| {' | '.join([row.name, *row.releases.values(), *row.suites.values()])} |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("rows", nargs="*", choices=[*ROWS, []], help="default: all")
    parser.add_argument("--no-write", action="store_true", help="leave docs/compatibility.md as it is")
    args = parser.parse_args()
    outcomes = [outcome(name) for name in (args.rows or ROWS)]
    for row in outcomes:
        _file(row.name).write_text(json.dumps(asdict(row)))
    print(table(outcomes))
    if not args.no_write and all(_file(name).exists() for name in ROWS):
        text = table([Outcome(**json.loads(_file(name).read_text())) for name in ROWS])
        page = PAGE.read_text()
        head, rest = page.split(BEGIN)
        PAGE.write_text(f"{head}{BEGIN}\n{text}\n{END}{rest.split(END)[1]}")
    return 0 if all(row.green for row in outcomes) else 1


def _file(name: str) -> Path:
    """Return the file beside a row's environment that keeps its result: the page shows all rows, and a call may run
    only some."""
    return HOME / f"{name.replace(' ', '_')}.json"


if __name__ == "__main__":
    sys.exit(main())
