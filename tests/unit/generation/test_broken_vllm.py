"""A vLLM that does not import, or has no kernels, takes nothing down but engines; what else is missing is all named."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from grpo_lab import requirements
from grpo_lab.engines.vllm import presence
from grpo_lab.recipe.ahead import Ahead, check_engine, looking_ahead
from grpo_lab.recipe.yaml import switched_on
from grpo_lab.trainer import trl_import
from unit.recipe.test_dry_run import GOOD

ROOT = Path(__file__).resolve().parents[3]
GONE = "libcudart.so.13: cannot open shared object file"
INITS = {
    "raises in its __init__": (f"raise OSError({GONE!r})\n", rf"OSError: {GONE}, in .*vllm/__init__\.py:1"),
    "lacks its extension": (
        "import vllm._C_stable_libtorch\n",
        r"ModuleNotFoundError: No module named 'vllm\._C_stable_libtorch', in .*vllm/__init__\.py:1",
    ),
    "is for another torch": ("import torch\ntorch.no_such_name\n", r"AttributeError: .*no_such_name.*__init__\.py:2"),
    "has a torn extension": ("import vllm._torn\n", r"ImportError: .*_torn\.abi3\.so: file too short|invalid ELF"),
}
RECIPE: dict[str, Any] = {
    **GOOD,
    "name": "beside",
    "use_cpu": True,
    "evaluation": {"data": {"loader": "word_problems", "split": "test", "n": 4}, "max_new_tokens": 8},
}


def plant(folder: Path, init: str) -> Path:
    """A vLLM in ``folder``, as pip leaves one, that does ``init`` when it is imported."""
    package = folder / "vllm"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(init, encoding="utf-8")
    (package / "_torn.abi3.so").write_bytes(b"\x7fELF")
    info = folder / "vllm-0.26.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.26.0\n", encoding="utf-8")
    return folder


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """This process without any vLLM and without what is known of one; put back afterwards."""
    for name in [one for one in sys.modules if one.split(".")[0] == "vllm" or one.startswith("trl.generation")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(presence, "_broken", None)
    monkeypatch.setattr(trl_import, "DOOR", "planted_door")
    monkeypatch.delitem(sys.modules, "planted_door", raising=False)
    return monkeypatch


@pytest.mark.parametrize("how", INITS)
def test_the_line_says_what_is_broken_and_where(
    how: str, alone: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    init, said = INITS[how]
    plant(tmp_path, init)
    door = "from importlib.util import find_spec\nif find_spec('vllm') is not None:\n    import vllm\n"
    (tmp_path / "planted_door.py").write_text(door, encoding="utf-8")
    alone.syspath_prepend(str(tmp_path))
    alone.setitem(sys.modules, "vllm", None)  # put back as it was
    del sys.modules["vllm"]
    with caplog.at_level(logging.WARNING):
        trl_import.import_trl()
    assert sys.modules["vllm"] is None
    [line] = [one.getMessage() for one in caplog.records]
    assert "engines are off" in line
    with pytest.raises(ValueError, match=f"`use_vllm` asks for an engine, and vLLM is broken here .*({said})"):
        presence.refuse_without_engine("`use_vllm`")


def test_variables_that_half_an_import_sets_are_taken_back(alone: pytest.MonkeyPatch, tmp_path: Path) -> None:
    plant(tmp_path, "import os\nos.environ['OF_VLLM'] = '1'\nos.environ['OURS'] = '2'\nraise ImportError('x')\n")
    (tmp_path / "planted_door.py").write_text("try:\n    import vllm\nfinally:\n    pass\n", encoding="utf-8")
    alone.setenv("OURS", "1")
    alone.syspath_prepend(str(tmp_path))
    alone.setitem(sys.modules, "vllm", None)
    del sys.modules["vllm"]
    with pytest.raises(ImportError):  # this door does not open without vLLM either: TRL is to blame
        trl_import.import_trl()
    assert "OF_VLLM" not in os.environ
    assert os.environ["OURS"] == "1"
    assert presence._broken is None


class Platform:
    """A CPU's, whose kernels cannot be loaded."""

    def is_cpu(self) -> bool:
        return True

    def import_kernels(self) -> None:
        logging.getLogger("vllm").warning("Failed to import from vllm._C: %s", "undefined symbol: _ZN3c10")


def test_a_vllm_without_kernels_is_found_before_its_first_step(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(torch._C, "_dispatch_get_all_op_names", lambda: ["aten::add"])
    assert "undefined symbol: _ZN3c10" in str(presence._without_kernels(Platform()))
    monkeypatch.setattr(Platform, "import_kernels", lambda self: None)
    assert "_C*.so, are not loaded" in str(presence._without_kernels(Platform()))
    monkeypatch.setattr(torch._C, "_dispatch_get_all_op_names", lambda: ["aten::add", "_C::silu_and_mul"])
    assert presence._without_kernels(Platform()) is None
    monkeypatch.setattr(Platform, "is_cpu", lambda self: False)  # a TPU's has none
    assert presence._without_kernels(Platform()) is None


@pytest.mark.parametrize(
    ("here_only", "run", "refused"), [(False, False, True), (True, True, True), (True, False, False)]
)
def test_a_run_is_refused_and_a_dry_run_plans_for_another_machine(
    here_only: bool, run: bool, refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``run``: of a pipeline, which looks at all stages before the first of them."""
    monkeypatch.setattr(presence, "_broken", "OSError: planted")
    check_engine(False, "use_vllm", here_only)
    with looking_ahead(Ahead(here_only=not run)):
        if not refused:
            check_engine(True, "use_vllm", here_only)
            return
        with pytest.raises(ValueError, match=r"`evaluation\.use_vllm` asks for an engine.*OSError: planted"):
            check_engine(True, "evaluation.use_vllm", here_only)


def test_a_switch_is_found_wherever_it_stands() -> None:
    assert switched_on("use_vllm", {"stages": [{"stage": "sample", "use_vllm": True}]})
    assert not switched_on("use_vllm", {"use_vllm": False, "stages": {"a": {"name": "use_vllm"}}})


def run(*words: str, beside: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": f"{beside}:{ROOT}", "HF_HUB_OFFLINE": "1"}
    return subprocess.run([sys.executable, *words], capture_output=True, text=True, env=environment, timeout=300)


@pytest.mark.not_fast
def test_all_that_needs_no_engine_works_beside_a_broken_vllm(tmp_path: Path) -> None:
    """The import, a training with evaluations, and the refusal of an engine, in one process with stock TRL."""
    beside = plant(tmp_path / "site", INITS["raises in its __init__"][0])
    file = tmp_path / "recipe.yaml"
    file.write_text(yaml.safe_dump({**RECIPE, "output_dir": str(tmp_path / "out")}), encoding="utf-8")
    program = (
        "import sys\n"
        "from grpo_lab import LabTrainer\n"
        "from grpo_lab.cli import main\n"
        f"codes = [main(['train', '--config', {str(file)!r}]),\n"
        f"         main(['train', '--config', {str(file)!r}, '--use_vllm', 'true', '--output_dir', 'never']),\n"
        f"         main(['train', '--config', {str(file)!r}, '--use_vllm', 'true', '--overwrite', '--dry-run'])]\n"
        "print('codes', codes)\n"
    )
    done = run("-c", program, beside=beside)
    assert "codes [0, 2, 0]" in done.stdout, done.stderr
    assert done.stderr.count("engines are off") == 1
    assert "`use_vllm` asks for an engine, and vLLM is broken here (OSError" in done.stderr
    assert "`use_vllm` is refused by a run on this machine" in " ".join(done.stdout.split())
    assert (tmp_path / "out" / "report.html").is_file()


# --- what else is missing --------------------------------------------------------------------------------------------


def test_the_table_is_that_of_the_package() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert list(requirements.NEEDED) == project["dependencies"]
    assert requirements.absent() == {}


def test_all_that_is_missing_is_named_in_one_line() -> None:
    """A Python without any package: refused before anything is imported."""
    done = subprocess.run(
        [sys.executable, "-S", "-m", "grpo_lab", "quickstart", "--dry-run"], capture_output=True, text=True, cwd=ROOT
    )
    [line] = done.stderr.splitlines()
    assert done.returncode == 2
    for one in requirements.NEEDED:
        assert f"'{one}'" in line
    assert "trl, accelerate, peft, datasets, math-verify, rich, pydantic" in line
    assert "no_network.md" in line


def test_half_a_package_is_named_beside_those_that_are_missing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "half_package.py").write_text("raise OSError('undefined symbol: _ZN3')\n", encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    found = requirements.failing(("json>=1", "half_package>=1.2", "no-such-thing==3"))
    assert list(found) == ["half_package>=1.2", "no-such-thing==3"]
    said = requirements.in_words(found)
    assert "no-such-thing (not installed); half_package (OSError: undefined symbol: _ZN3, in " in said
    assert "'half_package>=1.2' 'no-such-thing==3'" in said

    from grpo_lab import cli

    def fails(*_: Any, **__: Any) -> int:
        raise ImportError("the first of them")

    monkeypatch.setattr(cli, "_run", fails)
    monkeypatch.setattr(cli, "failing", lambda: found)
    assert cli.main(["report", "x"]) == 2
    assert "the first of them" not in capsys.readouterr().err
    monkeypatch.setattr(cli, "failing", dict)
    with pytest.raises(ImportError, match="the first of them"):  # ours: it shows its traceback
        cli.main(["report", "x"])
