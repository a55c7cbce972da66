"""``scripts/gpu_lent.sh``: what a lent machine lacks is unpacked in two calls; vLLM is there whole or not at all."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
STAND_IN = """#!/bin/sh
case "$1" in
*unpack.py) exec {python} "$@" ;;
esac
echo "asked $*"
echo "$PYTHONPATH" >path
for last; do :; done
echo {{}} >"$last"
exit ${{CODE:-0}}
"""


def packed(kit: Path, name: str, files: list[str]) -> dict[str, Any]:
    """An archive of a kit in two parts, as ``offline_kit.py`` leaves it."""
    whole = kit / name
    with tarfile.open(whole, "w:xz") as tar:
        for file in files:
            (kit / "one").write_text(file)
            tar.add(kit / "one", arcname=file)
    data = whole.read_bytes()
    whole.unlink()
    parts = []
    for number, piece in enumerate((data[:90], data[90:])):
        part = kit / f"{name}.tar.xz.{number:03d}"
        part.write_bytes(piece)
        parts.append({"file": part.name, "bytes": len(piece), "sha256": hashlib.sha256(piece).hexdigest()})
    return {"parts": parts, "bytes": 10, "files": len(files)}


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout with a kit; python is a stand-in that says what it was asked and leaves results."""
    (tmp_path / "scripts").mkdir()
    shutil.copy(SCRIPTS / "gpu_lent.sh", tmp_path / "scripts")
    python = tmp_path / "python"
    python.write_text(STAND_IN.format(python=sys.executable))
    python.chmod(0o755)
    kit = tmp_path / ".kit"
    kit.mkdir()
    shutil.copy(SCRIPTS / "offline_kits" / "unpack.py", kit)
    archives = {
        "packages": packed(kit, "packages", ["trl/__init__.py", "trl/a.py"]),
        "engine": packed(kit, "engine", ["vllm/__init__.py", "vllm/_C_stable_libtorch.abi3.so"]),
    }
    of = {"python": "{}.{}".format(*sys.version_info), "machine": platform.machine(), "archives": archives}
    (kit / "manifest.json").write_text(json.dumps(of))
    return tmp_path


def call(checkout: Path, what: str, **more: str) -> Any:
    places = {
        "KIT": str(checkout / "kept"),
        "SITE": str(checkout / "on it"),
        "OUT": str(checkout / "out"),
        "PYTHON": str(checkout / "python"),
    }
    command = ["bash", str(checkout / "scripts" / "gpu_lent.sh"), what]
    return subprocess.run(command, env={**os.environ, **places, **more}, capture_output=True, text=True, check=False)


def test_two_calls_unpack_vllm_whole_or_not_at_all(checkout: Path) -> None:
    site, second = checkout / "on it", checkout / ".kit" / "engine.tar.xz.001"
    second.rename(checkout / "later")
    done = call(checkout, "first")
    assert done.returncode == 0, done.stderr
    assert f"asked scripts/gpu_check.py --budget 260 --output {checkout}/out/gpu_check.json\n" in done.stdout
    assert (checkout / "path").read_text() == f"{checkout}:{site}/packages/site-packages\n"
    assert not (site / "engine").exists()
    assert (checkout / "runs" / "gpu_check.json").exists(), "for the second call, while the machine is warm"
    early = call(checkout, "second")
    assert early.returncode == 3
    assert "nothing was unpacked: engine.tar.xz.001 is missing" in early.stderr
    assert not (site / "engine").exists()
    (checkout / "later").rename(second)
    done = call(checkout, "second")
    assert done.returncode == 0, done.stderr
    assert "--budget 255 --resume runs/gpu_check.json --output" in done.stdout
    assert (checkout / "path").read_text().startswith(f"{checkout}:{site}/engine/site-packages:")
    assert (site / "engine" / "site-packages" / "vllm" / "_C_stable_libtorch.abi3.so").is_file()


def test_a_failed_check_s_code_is_the_call_s_and_its_results_are_there(checkout: Path) -> None:
    done = call(checkout, "first", CODE="1")
    assert done.returncode == 1
    assert (checkout / "out" / "gpu_check.json").exists()
    assert "asked" in (checkout / "out" / "gpu_check.log").read_text()


def test_a_kit_that_did_not_travel_is_named(checkout: Path) -> None:
    (checkout / ".kit" / "manifest.json").unlink()
    done = call(checkout, "first")
    assert done.returncode == 3
    assert done.stderr.startswith(f"gpu_lent: {checkout}/kept/manifest.json is not here: name it in carry")


def test_what_a_call_has_brought_is_kept_for_the_next(checkout: Path) -> None:
    """A call that carries other parts leaves none of the earlier ones in the checkout."""
    kit, site = checkout / ".kit", checkout / "on it"
    later = [kit / "packages.tar.xz.001", kit / "engine.tar.xz.001"]
    for part in later:
        part.rename(checkout / part.name)
    done = call(checkout, "prepare")
    assert done.returncode == 0, done.stderr
    assert "packages are not whole yet" in done.stdout
    assert not (site / "packages").exists()
    shutil.rmtree(kit)
    kit.mkdir()
    for part in later:
        (checkout / part.name).rename(part)
    done = call(checkout, "second")
    assert done.returncode == 0, done.stderr
    assert "--budget 255 --output" in done.stdout, "nothing to go on with"
    assert (site / "packages").is_dir()
    assert (site / "engine").is_dir()
