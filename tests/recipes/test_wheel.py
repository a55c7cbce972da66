"""The wheel: built, installed into an environment of its own, and used outside any checkout, without network."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ("grpo_lab", "recipes", "pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "LICENSE")
SHRUNK = [
    *("--max_steps", "2", "--cold_start.max_steps", "2", "--cold_start.data.n", "128", "--data.n", "64"),
    *("--per_device_train_batch_size", "16", "--max_completion_length", "16", "--evaluation.data.n", "10"),
]
MOST_LINES = 25
"""Of a shrunk quick start on stderr, redrawn bars included."""
THEN_IMPORT_ALL = """
import runpy, sys
sys.argv = sys.argv[1:]
try:
    runpy.run_path(sys.argv[0], run_name="__main__")
except SystemExit as ended:
    assert not ended.code, ended.code
import importlib, pkgutil, grpo_lab
for name in grpo_lab.__all__:  # each is found when it is asked for
    found = getattr(grpo_lab, name)
    assert name in dir(grpo_lab), name
    if name != "__version__":
        assert found.__name__ == name, (name, found)
try:
    grpo_lab.NoSuchName
except AttributeError as error:
    assert "NoSuchName" in str(error) and "offers" in str(error), error
else:
    raise AssertionError("grpo_lab invents names")
from grpo_lab import LabConfig, LabTrainer, DrGRPOTrainer
import trl
assert issubclass(LabConfig, trl.GRPOConfig) and issubclass(LabTrainer, trl.GRPOTrainer)
assert issubclass(DrGRPOTrainer, LabTrainer)
for module in pkgutil.walk_packages(grpo_lab.__path__, "grpo_lab."):
    if not module.name.endswith(("__main__", "server_worker", "vllm.access")):
        importlib.import_module(module.name)
print(grpo_lab.__file__)
"""
"""The console script that is given with its words; and in the same process whatever there is to import."""

pytestmark = pytest.mark.slow


@dataclass(frozen=True)
class Installed:
    """The wheel, the environment that holds it, and a folder far from the checkout."""

    wheel: Path
    environment: Path
    elsewhere: Path

    def run(self, *words: str) -> subprocess.CompletedProcess[str]:
        """``words`` with the environment's program in front, the checkout out of sight."""
        program = [str(self.environment / "bin" / words[0]), *words[1:]]
        done = subprocess.run(program, cwd=self.elsewhere, env=bare(), capture_output=True, text=True)
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
        return done


def bare() -> dict[str, str]:
    """The variables without those that lead back to a checkout: pip, too, would find it and install nothing."""
    there = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    return there | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    top = tmp_path_factory.mktemp("wheel")
    source, environment, elsewhere = top / "source", top / "environment", top / "elsewhere"
    source.mkdir()
    elsewhere.mkdir()
    for name in SOURCES:
        here = ROOT / name
        if here.is_dir():
            shutil.copytree(here, source / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(here, source / name)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    alone = ("--quiet", "--no-index", "--no-deps")
    subprocess.run([*pip, "wheel", *alone, "--no-build-isolation", "-w", str(top), str(source)], check=True, env=bare())
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(environment)], check=True)
    (wheel,) = top.glob("*.whl")
    python = str(environment / "bin" / "python")
    subprocess.run([*pip, "--python", python, "install", *alone, str(wheel)], check=True, env=bare())
    (site,) = environment.glob("lib/python*/site-packages")
    # the dependencies of this environment; its own .pth files, an editable grpo_lab among them, are not read from here
    places = dict.fromkeys(sysconfig.get_paths()[name] for name in ("purelib", "platlib"))
    (site / "dependencies.pth").write_text("\n".join(places) + "\n")
    return Installed(wheel, environment, elsewhere)


def test_the_wheel_holds_every_recipe_and_says_that_it_is_typed(installed: Installed) -> None:
    names = set(zipfile.ZipFile(installed.wheel).namelist())
    recipes = {f"grpo_lab/{path.relative_to(ROOT)}" for path in (ROOT / "recipes").rglob("*.yaml")}
    assert len(recipes) > 20
    assert recipes | {"grpo_lab/py.typed", "grpo_lab/evaluation/templates/page.html.j2"} <= names
    assert not any(name.startswith(("recipes/", "tests/", "setup")) for name in names)


@pytest.fixture(scope="module")
def quick_start(installed: Installed) -> subprocess.CompletedProcess[str]:
    script = str(installed.environment / "bin" / "grpo-lab")
    return installed.run("python", "-c", THEN_IMPORT_ALL, script, "quickstart", *SHRUNK)


def test_everything_imports_and_help_is_there(
    installed: Installed, quick_start: subprocess.CompletedProcess[str]
) -> None:
    assert Path(quick_start.stdout.split()[-1]).is_relative_to(installed.environment)
    said = installed.run("grpo-lab", "--help").stdout
    assert "quickstart" in said
    assert installed.run("python", "-m", "grpo_lab", "--help").stdout == said
    assert "--key value" in installed.run("grpo-lab", "quickstart", "--help").stdout


def assert_little_noise(said: str) -> None:
    """On stderr: two trainings and two evaluations with a line of progress each (begin, middle, end), and the package's
    own lines."""
    lines = [line for line in re.split(r"[\r\n]+", said) if line.strip()]
    assert len(lines) <= MOST_LINES, said
    noise = ("Map", "Loading weights", "Writing model", "Tokenizing", "{'", "FutureWarning", "Triton", "special tokens")
    assert not [line for line in lines if any(word in line for word in noise)], said
    assert any(line.startswith("step 2: ") for line in lines)


def test_the_quick_start_runs_with_overrides(
    installed: Installed, quick_start: subprocess.CompletedProcess[str]
) -> None:
    lines = quick_start.stdout.strip().splitlines()
    assert_little_noise(quick_start.stderr)
    assert lines[0].startswith("recipe: ")
    assert Path(lines[0].removeprefix("recipe: ")).is_relative_to(installed.environment)
    accuracy, length, _ = lines[-3:]
    assert re.fullmatch(r"held-out accuracy: before \d\.\d{3} after \d\.\d{3} \(n=10\)", accuracy)
    assert re.fullmatch(r"held-out length: before \d+\.\d after \d+\.\d tokens", length)
    folder = installed.elsewhere / "runs" / "quickstart-dr_grpo"
    assert (folder / "model.safetensors").is_file()
    assert "Accuracy, working out and length" in (folder / "report.html").read_text()
