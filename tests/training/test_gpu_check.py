"""``make gpu-check`` in its tiny form: every section gives numbers here, and one that breaks does not take the others
with it."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import forked

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
HERE = ("versions", "parity, fp32", "parity, bf16", "update, 0.5B", "update, 1.5B", "whole step, transformers")


@pytest.fixture
def runner(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    from gpu_checks import runner

    return runner


def checked(folder: Path, *words: str) -> tuple[int, dict[str, Any], str]:
    """The script in a process of its own -> exit code, JSON, table."""
    command = [str(SCRIPTS / "gpu_check.py"), "--tiny", "--output", str(folder / "found.json"), *words]
    done = forked.run(command, CUDA_VISIBLE_DEVICES="")
    assert (folder / "found.json").is_file(), done.stderr[-3000:]
    return done.returncode, json.loads((folder / "found.json").read_text()), (folder / "found.md").read_text()


@pytest.mark.slow
def test_every_section_gives_numbers(tmp_path: Path) -> None:
    """Engines and DeepSpeed have tests of their own kind; one section that this machine cannot run says why."""
    apart = ["whole step, vLLM, stock", "whole step, vLLM, ours", "engine, sleep mode", "engine, LoRA"]
    code, found, table = checked(tmp_path, "--skip", *apart[1:], "DeepSpeed, ZeRO-2", "DeepSpeed, ZeRO-3")
    sections = found["sections"]
    assert code == 0, table
    assert [sections[name]["status"] for name in HERE] == ["ok"] * len(HERE)
    for name in ("parity, fp32", "parity, bf16"):
        assert all(row["pass"] is True for row in sections[name]["rows"])
    updates = sections["update, 0.5B"]["rows"]
    every = [("plain", 0.0), ("plain", 0.5), ("checkpointing", 0.5), ("LoRA", 0.5)]
    assert [(r["variant"], r["dead"], r["side"]) for r in updates] == [
        (*c, s) for c in every for s in ("stock", "ours")
    ]
    for row in updates:
        assert min(row["seconds"], row["tokens/s"], row["peak MiB"]) > 0
        assert row["MFU"] == "unknown", "no CPU has a peak in the table"
        assert (
            row["computed"] >= row["real"]
            if row["dead"] == 0 or row["side"] == "stock"
            else row["computed"] < row["real"]
        )
    for row in sections["whole step, transformers"]["rows"]:
        shares = [row[f"{part} %"] for part in ("sync", "generate", "score", "update")]
        assert sum(shares) == pytest.approx(100)
        assert min(shares[1:]) > 0
        assert row["rollout tokens/s"] > 0
    absent = sections["whole step, vLLM, stock"]
    assert absent["status"] == ("skipped" if find_spec("vllm") else "not installed")
    assert absent["reason"] in table


def test_what_breaks_or_does_not_fit_says_so(runner: ModuleType, tmp_path: Path) -> None:
    def broken(_: Any) -> list[dict[str, Any]]:
        raise MemoryError("CUDA out of memory")

    sections = [
        runner.Section("broken", broken, 1, 1),
        runner.Section("outside", lambda _: [{"gap": 1.0, "pass": False}], 1, 1),
        runner.Section("half", lambda _: [{"seconds": 1.0}, {"error": "MemoryError: of one row"}], 1, 1),
        runner.Section("long", lambda _: [{"seconds": 1.0}], 1000, 1000),
        runner.Section("missing", lambda _: [{"seconds": 1.0}], 1, 1, needs=("no_such_package",)),
        runner.Section("last", lambda _: [{"seconds": 1.0, "pass": True}], 1, 1),
    ]
    said: list[str] = []
    setting = runner.Setting(True, "cpu", time.monotonic() + 60, tmp_path)
    found = runner.run_all(sections, setting, True, said.append)
    assert {name: outcome["status"] for name, outcome in found.items()} == {
        "broken": "failed", "outside": "failed", "half": "failed", "long": "skipped", "missing": "not installed",
        "last": "ok",
    }  # fmt: skip
    assert found["broken"]["error"]["message"] == "MemoryError: CUDA out of memory"
    assert "in broken" in found["broken"]["error"]["traceback"]
    assert "of one row" in found["half"]["error"]["message"]
    assert found["long"]["reason"].startswith("needs about 1000 s, ")
    from gpu_checks.markdown import page

    text = page({"form": "tiny", "device": "cpu", "made": "now", "seconds": 1.0, "budget_s": 60.0, "sections": found})
    for words in (
        "MemoryError: CUDA out of memory",
        "of one row",
        "needs about 1000 s",
        "no_such_package not installed",
    ):
        assert words in text
    assert len(said) == 6


@pytest.mark.slow
def test_a_process_that_ends_without_an_answer_or_too_late(runner: ModuleType, tmp_path: Path) -> None:
    """A section of its own process that the script does not know: the script refuses, and its words are in the
    report."""
    section = runner.Section("no such section", lambda _: [], 1, 1, apart=True)
    late = runner.Setting(True, "cpu", time.monotonic() + 1.5, tmp_path)
    outcome = runner.run_one(section, late, False)
    assert (outcome["status"], outcome["error"]["type"]) == ("failed", "TimeoutError")


def test_the_work_of_a_row_by_hand(runner: ModuleType) -> None:
    """h 64, I 128, k 32, 2 layers: attention 2·64² + 2·64·32 + 64 + 2·32 = 12,416, MLP 3·64·128 = 24,576, norms 128:
    37,120 a layer.

    A row of 6 + 4 tokens: 10 · (2 · 74,240 + 2 · 2 · 64 · 10) = 1,510,400 for the layers, 4 · 2 · 1,024 · 64 = 524,288
    for the head.
    """
    from gpu_checks.work import needed_flops, shape_of

    shape = shape_of("tiny")
    assert shape.layer_parameters == 37_120
    assert needed_flops(shape, [(6, 4)], adapter=False) == 3 * (1_510_400 + 524_288)
    assert needed_flops(shape, [(6, 4)] * 2, adapter=True) == 4 * (1_510_400 + 524_288)


def test_shapes_are_those_of_the_memory_table(runner: ModuleType) -> None:
    import memory_table
    from gpu_checks.work import shape_of

    small, middle = memory_table.SHAPES[:2]
    assert (shape_of("0.5B"), shape_of("1.5B")) == (small, middle)


@pytest.mark.parametrize(
    ("name", "teraflops"),
    [("NVIDIA H100 80GB HBM3", 989), ("NVIDIA H100 PCIe", 756), ("NVIDIA A100-SXM4-80GB", 312), ("Tesla T4", None)],
)
def test_the_peak_is_found_by_the_device_s_name(runner: ModuleType, name: str, teraflops: int | None) -> None:
    from gpu_checks.device import peak_flops

    found = peak_flops(name)
    assert (None if found is None else found[0] / 1e12) == teraflops


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    """The scripts' modules have short names; no other test shall find them."""
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", "") or "").startswith(str(SCRIPTS)):
            del sys.modules[name]
