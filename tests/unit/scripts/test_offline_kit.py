"""The offline kit: what its lock says, how it is cut, and that half of it, or a damaged one, is never unpacked."""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[3]
HERE = "{}.{}".format(*sys.version_info)


def load() -> Any:
    spec = importlib.util.spec_from_file_location("offline_kit", ROOT / "scripts" / "offline_kit.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


kit = load()


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A kit of two small packages and an engine, in parts of 200 bytes; nothing is downloaded."""

    def packages(site: Path, lines: Any, python: str, machine: str) -> None:
        for name in ("good_one", "half_one", "grpo_lab"):
            (site / name).mkdir(parents=True)
            said = "import no_such_thing_at_all\n" if name == "half_one" else f"SEED = {os.urandom(400).hex()!r}\n"
            (site / name / "__init__.py").write_text(said, encoding="utf-8")
        (site / "grpo_lab" / "trainer.py").write_text("open(f'{__file__}.imported', 'w').close()", encoding="utf-8")
        (site / "bin").mkdir()
        (site / "bin" / "tool").write_text("never used", encoding="utf-8")

    def engine(site: Path, version: str, python: str, machine: str) -> None:
        (site / "vllm").mkdir(parents=True)
        (site / "vllm" / "__init__.py").write_text("", encoding="utf-8")

    monkeypatch.setattr(kit, "install_packages", packages)
    monkeypatch.setattr(kit, "install_engine", engine)
    monkeypatch.setattr(kit, "NEEDED", ("good-one==1", "half-one==1", "no-torch-here==2"))
    monkeypatch.setattr(kit, "module_of", lambda one: one.split("==")[0].replace("-", "_"))
    lock = tmp_path / "lock.txt"
    lock.write_text("# a lock\ngood-one==1\nno-torch-here==2 ; python_version > '3'\ntorch==2.11.0\n", encoding="utf-8")
    words = ["--python", HERE, "--torch", "2.11.0", "--vllm", "0.26.0", "--machine", platform.machine()]
    words += ["--lock", str(lock), "--max-part", "200", "--have", "no-torch-*"]
    assert kit.main(["pack", str(tmp_path / "kit"), *words]) == 0
    return tmp_path / "kit"


def unpack(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Called in this checkout, whose grpo_lab must not be taken for the kit's."""
    command = [sys.executable, "-S", str(folder / "unpack.py"), *words]
    return subprocess.run(command, capture_output=True, text=True, env={"PATH": os.environ["PATH"]}, cwd=ROOT)


def test_it_is_cut_and_says_what_is_in_it(made: Path) -> None:
    manifest = json.loads((made / "manifest.json").read_text(encoding="utf-8"))
    sizes = [file.stat().st_size for file in made.glob("packages.tar.xz.*")]
    assert max(sizes) == 200
    assert len(sizes) > 2
    assert manifest["versions"] == {"good-one": "1"}
    assert manifest["expected_there"] == ["no-torch-here", "torch"]
    assert (manifest["python"], manifest["torch"], manifest["vllm"]) == (HERE, "2.11.0", "0.26.0")


@pytest.mark.not_fast
def test_unpacked_it_says_what_imports_and_names_all_that_is_missing(made: Path, tmp_path: Path) -> None:
    done = unpack(made, "--to", str(tmp_path / "site"))
    assert done.returncode == 1
    assert "half-one         -                        no: ModuleNotFoundError: No module named 'no_such" in done.stdout
    assert "missing: half-one, no-torch-here (no-torch-here was not packed" in done.stdout
    assert (tmp_path / "site" / "packages" / "site-packages" / "grpo_lab" / "trainer.py.imported").exists()
    assert not (tmp_path / "site" / "packages" / "site-packages" / "bin").exists()
    activate = (tmp_path / "site" / "activate").read_text(encoding="utf-8")
    assert f"PYTHONPATH={tmp_path}/site/engine/site-packages:{tmp_path}/site/packages/site-packages" in activate


def test_the_engine_stays_packed_until_it_is_asked_for(made: Path, tmp_path: Path) -> None:
    """Its parts need not be there yet: a small transfer brings them later."""
    for part in made.glob("engine.*"):
        part.rename(tmp_path / part.name)
    assert unpack(made, "--to", str(tmp_path / "site"), "--only", "packages", "--no-check").returncode == 0
    assert "vllm" not in (tmp_path / "site" / "activate").read_text(encoding="utf-8")
    done = unpack(made, "--to", str(tmp_path / "site"), "--only", "engine", "--no-check")
    assert done.returncode == 2
    assert "nothing was unpacked: engine.tar.xz.000 is missing" in done.stderr
    for part in tmp_path.glob("engine.*"):
        part.rename(made / part.name)
    assert unpack(made, "--to", str(tmp_path / "site"), "--no-check").returncode == 0
    assert (tmp_path / "site" / "engine" / "site-packages" / "vllm" / "__init__.py").is_file()


def test_a_damaged_or_missing_part_leaves_nothing_behind(made: Path, tmp_path: Path) -> None:
    (made / "packages.tar.xz.000").write_bytes(b"\0" * 200)
    (made / "packages.tar.xz.001").unlink()
    done = unpack(made, "--to", str(tmp_path / "site"))
    assert done.returncode == 2
    assert "packages.tar.xz.000 is not what was packed (SHA-256); packages.tar.xz.001 is missing" in done.stderr
    assert not (tmp_path / "site").exists()


def test_a_kit_for_another_python_is_refused(made: Path, tmp_path: Path) -> None:
    manifest = json.loads((made / "manifest.json").read_text(encoding="utf-8"))
    (made / "manifest.json").write_text(json.dumps({**manifest, "python": "3.99"}), encoding="utf-8")
    done = unpack(made, "--to", str(tmp_path / "site"))
    assert done.returncode == 2
    assert "this kit is for Python 3.99" in done.stderr


def test_without_xz_python_packs_the_same(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    site = tmp_path / "site"
    (site / "one").mkdir(parents=True)
    (site / "one" / "file").write_text("words", encoding="utf-8")
    said = kit.archive(site, tmp_path, "slow", 100, ())
    assert (said["files"], said["bytes"]) == (1, 5)
    assert (tmp_path / "slow.tar.xz.000").read_bytes()[:6] == b"\xfd7zXZ\0"


@pytest.mark.parametrize("lock", sorted((ROOT / "scripts" / "offline_kits").glob("*.txt")), ids=lambda path: path.stem)
def test_the_committed_locks_can_be_read(lock: Path) -> None:
    lines, versions, _ = kit.read_lock(lock, [])
    assert versions["trl"] == "1.16.0"
    assert all("==" in one and not one.startswith(("torch==", "nvidia")) for one in lines)


def test_what_is_not_pinned_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lock = tmp_path / "lock.txt"
    lock.write_text("trl>=1.15\n", encoding="utf-8")
    words = ["pack", str(tmp_path / "kit"), "--python", "3.12", "--torch", "2.11.0", "--lock", str(lock)]
    assert kit.main(words) == 2
    assert "'trl>=1.15' is no pinned package" in capsys.readouterr().err
    assert not (tmp_path / "kit").exists()
