"""``profile``: the parts of a step's time, which add up to what a clock beside it says."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from grpo_lab import LabConfig, LabTrainer
from grpo_lab.data import word_problems
from grpo_lab.trainer import ranks
from grpo_lab.trainer.metrics.profile import (
    BACKWARD,
    EXCHANGE,
    FILE,
    FORWARD,
    LAYOUT,
    PARTS,
    PLANNING,
    WAITING,
    as_table,
    by_part,
    host,
    host_counted,
    host_table,
)
from grpo_lab.trainer.ranks import counted, named_place

SLEEP = 0.05


def slow_reward(completions: list[Any], **_: Any) -> list[float]:
    time.sleep(SLEEP)
    return [float(len(str(one)) % 3) for one in completions]


def trained(folder: Path, model: Path, **changes: Any) -> LabTrainer:
    args = LabConfig(
        output_dir=str(folder), objective="dr_grpo", num_generations=4, per_device_train_batch_size=8, max_steps=4,
        max_completion_length=8, report_to="none", use_cpu=True, bf16=False, save_strategy="no", **changes,
    )  # fmt: skip
    rows = word_problems(n=16, template="chat")
    trainer = LabTrainer(model=str(model), reward_funcs=slow_reward, args=args, train_dataset=rows)
    trainer.train()
    return trainer


def test_places_have_the_time_between_two_names() -> None:
    spent: dict[str, float] = {}
    with named_place("step"), counted(spent):
        began = time.monotonic()
        time.sleep(SLEEP)
        with named_place("rewards"):
            time.sleep(2 * SLEEP)
        whole = time.monotonic() - began
    with named_place("rewards"):
        time.sleep(SLEEP)  # nobody counts
    assert set(spent) == {"step", "step › rewards"}
    assert spent["step"] >= SLEEP
    assert spent["step › rewards"] >= 2 * SLEEP
    assert sum(spent.values()) == pytest.approx(whole, abs=SLEEP / 5)
    assert ranks._spent is None


def test_the_host_does_one_thing_at_a_time() -> None:
    spent: dict[str, float] = {}
    with host(FORWARD):
        pass  # nobody counts
    with host_counted(spent):
        with host(FORWARD):
            time.sleep(SLEEP)
            with host(LAYOUT):
                time.sleep(2 * SLEEP)
        time.sleep(SLEEP)
        with host(BACKWARD):
            time.sleep(SLEEP)
    assert spent == {name: pytest.approx(seconds, abs=SLEEP / 2) for name, seconds in
                     {FORWARD: SLEEP, LAYOUT: 2 * SLEEP, BACKWARD: SLEEP}.items()}  # fmt: skip
    text = host_table({PLANNING: 0.02, FORWARD: 1.0}, update=2.0, steps=2)
    assert f"| {PLANNING} | 0.0100 | 0.5% |" in text
    assert f"| {WAITING} | 1.4900 | 74.5% |" in text


def test_a_gpu_that_is_not_used_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first wait would begin to use it: seconds, and memory on a machine that trains on its CPUs."""
    monkeypatch.setattr(ranks.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(ranks.torch.cuda, "synchronize", lambda: pytest.fail("waited for the device"))
    with named_place("step"), counted({}):
        pass


def test_the_table() -> None:
    """Of ten seconds in two steps four are a collective's within the rewards, and belong to them."""
    seconds = {"training › step › rewards › gather": 4.0, "training › step › update": 5.0, "elsewhere": 1.0}
    found = by_part(seconds, 2)
    assert found == {PARTS["rewards"]: 2.0, PARTS["update"]: 2.5, PARTS["training"]: 0.5}
    text = as_table({"ours": found, "stock": {PARTS["update"]: 10.0}}, 2)
    assert "| rewards | 2.000 | 40% | 0.000 | 0% |" in text
    assert "| all | 5.000 | 100% | 10.000 | 100% |" in text


@pytest.mark.not_fast
def test_a_run_writes_its_profile(tmp_path: Path, tiny_folder: Path) -> None:
    trained(tmp_path / "profiled", tiny_folder, profile=True)
    lines = (tmp_path / "profiled" / FILE).read_text().splitlines()
    cut = next(at for at, line in enumerate(lines) if line.startswith("| the host"))
    of_host = {line.split("|")[1].strip(): float(line.split("|")[2]) for line in lines[cut + 2 :]}
    assert list(of_host) == [PLANNING, EXCHANGE, LAYOUT, FORWARD, BACKWARD, WAITING]
    lines = lines[: cut - 1]
    cells = {line.split("|")[1].strip(): line.split("|")[2].strip() for line in lines[2:] if line.startswith("|")}
    assert sum(of_host.values()) == pytest.approx(float(cells[PARTS["update"]]), abs=0.002)
    assert 0.0 < of_host[PLANNING] < of_host[FORWARD]
    assert {PARTS[name] for name in ("generation", "rewards", "update", "optimizer", "step", "training")} < set(cells)
    assert float(cells[PARTS["rewards"]]) >= SLEEP
    assert float(cells["all"]) == pytest.approx(sum(float(v) for k, v in cells.items() if k != "all"), abs=0.01)
    assert "Wall time of 3 optimizer steps" in lines[-1]


@pytest.mark.not_fast
def test_without_it_nothing_is_counted(tmp_path: Path, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks.torch.cuda, "synchronize", lambda: pytest.fail("waited for the device"))
    trained(tmp_path / "plain", tiny_folder)
    assert not (tmp_path / "plain" / FILE).exists()
