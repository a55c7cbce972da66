"""The grid command's twelve cells are twelve algorithms, with and without a discount; its table and what is skipped."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from grpo_lab import LabConfig

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    import reinforce_menu

    return reinforce_menu


@pytest.mark.parametrize("gamma", [None, 0.9])
def test_twelve_algorithms(script: ModuleType, gamma: float | None) -> None:
    seen = set()
    for delta in script.DELTAS:
        for loss in script.LOSSES:
            config = LabConfig(output_dir="x", use_cpu=True, bf16=False, **script.algorithm(delta, loss, gamma))
            found = config.algorithm
            seen.add((str(found.advantage), str(found.objective.surrogate)))
    assert len(seen) == 12
    assert all(("Returns" in rule) is (gamma is not None) for rule, _ in seen)


def test_finished_runs_are_not_repeated(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ran: list[str] = []

    def instead(delta: str, loss: str, seed: int, output: Path, *_: Any) -> None:
        ran.append(f"{delta} {loss}")
        output.mkdir(parents=True)
        curve = [0.1, 0.2, 0.3, 0.4 + len(ran) / 100]
        (output / "arm.json").write_text(json.dumps({"before": 0.2, "after": 0.5, "curve": curve, "entropy": 1.0}))

    monkeypatch.setattr(script, "run_arm", instead)
    monkeypatch.setattr(script, "draw", lambda *_: None)
    for stop in ("5", "100"):
        monkeypatch.setattr(sys, "argv", ["reinforce_menu.py", "--folder", str(tmp_path), "--stop-after", stop])
        script.main()
        assert len(ran) == (5 if stop == "5" else 12)
    assert len(set(ran)) == 12
    assert "| only the maximum | 0.500; 0.500 | 0.500; 0.510 | 0.500; 0.520 |" in capsys.readouterr().out
