"""``scripts/gpu_lent.sh``: what a lent machine lacks is unpacked in two calls; vLLM is there whole or not at all."""

from __future__ import annotations

import lzma
import os
import shutil
import subprocess
import tarfile
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "gpu_lent.sh"
KERNELS = {"kernels.xz": "_C_stable_libtorch.abi3.so", "attention.xz": "vllm_flash_attn/_vllm_fa3_C.abi3.so"}


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout with the kit's packages; python is a stand-in that says what it was asked and leaves results."""
    (tmp_path / "scripts").mkdir()
    shutil.copy(SCRIPT, tmp_path / "scripts")
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\necho "asked $*"; for last; do :; done\necho {} >"$last"\nexit ${CODE:-0}\n')
    python.chmod(0o755)
    for place in ("trl/__init__.py", "vllm/__init__.py", "vllm/vllm_flash_attn/a.py", "vllm-0.26.0.dist-info/METADATA"):
        file = tmp_path / "site" / place
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(place)
    (tmp_path / ".kit").mkdir()
    with tarfile.open(tmp_path / ".kit" / "site.tar.xz", "w:xz") as packed:
        packed.add(tmp_path / "site", arcname=".")
    return tmp_path


def call(checkout: Path, what: str, **more: str) -> Any:
    places = {"SITE": str(checkout / "on it"), "OUT": str(checkout / "out"), "PYTHON": str(checkout / "python")}
    command = ["bash", str(checkout / "scripts" / "gpu_lent.sh"), what]
    return subprocess.run(command, env={**os.environ, **places, **more}, capture_output=True, text=True, check=False)


def test_two_calls_unpack_vllm_whole_or_not_at_all(checkout: Path) -> None:
    site = checkout / "on it"
    done = call(checkout, "first")
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"asked scripts/gpu_check.py --budget 260 --output {checkout}/out/gpu_check.json\n"
    assert [place.name for place in site.iterdir()] == ["trl"]
    assert (checkout / "runs" / "gpu_check.json").exists(), "for the second call, while the machine is warm"
    early = call(checkout, "second")
    assert (early.returncode, [place.name for place in site.iterdir()]) == (3, ["trl"])
    assert early.stderr.startswith("gpu_lent: .kit/kernels.xz* is not here")
    for file in KERNELS:
        (checkout / ".kit" / file).write_bytes(lzma.compress(file.encode()))
    whole = (checkout / ".kit" / "kernels.xz").read_bytes()
    (checkout / ".kit" / "kernels.xz").unlink()
    (checkout / ".kit" / "kernels.xz.aa").write_bytes(whole[:40])
    early = call(checkout, "second")
    assert (early.returncode, [place.name for place in site.iterdir()]) == (3, ["trl"])
    assert "the parts .kit/kernels.xz.* are not all here" in early.stderr
    (checkout / ".kit" / "kernels.xz.ab").write_bytes(whole[40:])
    done = call(checkout, "second")
    assert done.returncode == 0, done.stderr
    assert "--budget 255 --resume runs/gpu_check.json --output" in done.stdout
    assert sorted(place.name for place in site.iterdir()) == ["trl", "vllm", "vllm-0.26.0.dist-info"]
    assert {file: (site / "vllm" / place).read_text() for file, place in KERNELS.items()} == {f: f for f in KERNELS}


def test_a_failed_check_s_code_is_the_call_s_and_its_results_are_there(checkout: Path) -> None:
    done = call(checkout, "first", CODE="1")
    assert done.returncode == 1
    assert (checkout / "out" / "gpu_check.json").exists()
    assert "asked" in (checkout / "out" / "gpu_check.log").read_text()


def test_a_kit_that_did_not_travel_is_named(checkout: Path) -> None:
    (checkout / ".kit" / "site.tar.xz").unlink()
    done = call(checkout, "prepare")
    assert done.returncode == 3
    assert done.stderr.startswith("gpu_lent: .kit/site.tar.xz is not here: name it in carry")
