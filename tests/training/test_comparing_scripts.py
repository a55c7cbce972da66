"""The comparing scripts and the labs that train, with small numbers. Their cells are processes of their own, here forks
of one that has imported everything."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import math
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from transformers import AutoModelForSequenceClassification, AutoTokenizer

import forked
from grpo_lab import cli
from grpo_lab.labs import experiment
from grpo_lab.labs.arms import Arms, shipped_labs

ROOT = Path(__file__).resolve().parents[2]
TINY = {
    "model.tiny.hidden_size": "24",
    "model.tiny.num_layers": "1",
    "cold_start.max_steps": "2",
    "cold_start.data.n": "64",
    "data.n": "64",
}
SMALLER = [word for key, value in TINY.items() for word in ("--set", key, value)]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A script's ``main``, with words."""

    class Forks:
        @staticmethod
        def run(program: Sequence[str], words: Sequence[str], log: Path) -> int:
            done = forked.run([*program, *words])
            log.write_text(done.stdout + done.stderr)
            return done.returncode

    def main(script: ModuleType, *words: str, smaller: Sequence[str] = SMALLER) -> Any:
        monkeypatch.setattr(experiment, "CellForks", lambda imports: contextlib.nullcontext(Forks()))
        monkeypatch.setattr(experiment, "program", lambda: [str(script.__file__)])
        monkeypatch.setattr(sys, "argv", [str(script.__file__), *words, *smaller])
        return script.main()

    return main


@pytest.fixture
def console(tmp_path: Path) -> ModuleType:
    """The console script ``grpo-lab``."""
    file = tmp_path / "grpo-lab"
    file.write_text("import sys\nfrom grpo_lab.cli import main\nsys.exit(main())\n")
    script = ModuleType("grpo_lab_console")
    script.__dict__.update(__file__=str(file), main=cli.main)
    return script


ONE_STEP = {
    "max_steps": "1",
    "logging_steps": "1",
    "per_device_train_batch_size": "16",
    "max_completion_length": "8",
    "evaluation.data.n": "24",
}
LAB_WORDS = [word for key, value in ONE_STEP.items() for word in ("--set", key, value)]


@pytest.mark.slow
def test_a_lab_in_small(run: Any, console: ModuleType, tmp_path: Path) -> None:
    words = ["lab", "process", "--seeds", "0", "--folder", str(tmp_path / "out"), *LAB_WORDS]
    assert run(console, *words) == 0
    lines = (tmp_path / "out" / "table.md").read_text().splitlines()
    assert [line.split(" | ")[0] for line in lines[2:5]] == ["| (start)", "| outcome", "| steps and outcome"]
    assert lines[-1].startswith("- accuracy, steps and outcome − outcome, seed by seed: ")
    found = json.loads((tmp_path / "out" / "records.json").read_text())
    assert found["outcome"][0]["before"] == found["steps and outcome"][0]["before"]
    [[[tokens, _]], _] = [runs[0]["curves"]["rewards/accuracy_reward/mean"] for runs in found.values()]
    assert 0 < tokens <= 16 * 8
    logged = [json.loads(line) for line in (tmp_path / "out" / "outcome-0" / "metrics.jsonl").read_text().splitlines()]
    said = json.loads((tmp_path / "out" / "outcome-0" / "run.json").read_text())["tokens"]
    assert max(row.get("rollout/generated", 0) for row in logged) == said
    assert lines[6].startswith("After 0.1 k generated tokens:")
    assert (tmp_path / "out" / "curves.png").is_file() or importlib.util.find_spec("matplotlib") is None


IN_SMALL = {
    "bias": ["GRPO without σ", "Dr.GRPO with σ"],
    "noise": ["true", "wrong labels 30%"],
    "controls": ["random, unclipped", "inverted"],
    "entropy": ["entropy target", "annealed target"],
    "difficulty": ["hardest", "resample"],
    "kl_training": ["k1 in the reward", "k3 in the loss"],
    "length": ["no length reward", "large from step 0"],
    "language": ["without", "with"],
    "objective": ["mirror descent, reset", "Dr.GRPO"],
    "sorting": ["inclusion_ordering", "exact"],
    "prm": ["outcome", "model alone"],
    "reinforce": ["raw, naive", "only the maximum, clipped"],
    "court": ["grpo, 0 old", "grpo, 4 old, bf16"],
}
"""Lab → arms that are run in small."""
OF_THEIR_OWN = {"process", "preference", "capability", "capability_losses", "capability_bases"}
"""Labs that another test runs in small."""
NOT_RUN = {"reinforce_discounted": "`reinforce`, discounted"}


def test_every_lab_that_ships_is_run_in_small() -> None:
    """Or says why not."""
    assert {*shipped_labs()} == {*IN_SMALL, *OF_THEIR_OWN, *NOT_RUN}


@pytest.mark.thorough(but="controls-arms2")
@pytest.mark.slow
@pytest.mark.parametrize(("name", "arms"), IN_SMALL.items())
def test_every_lab_that_trains_in_small(
    name: str, arms: list[str], run: Any, console: ModuleType, tmp_path: Path
) -> None:
    words = ["lab", name, "--seeds", "0", "--arms", *arms, "--folder", str(tmp_path / "out"), *LAB_WORDS]
    smaller = SMALLER if name != "difficulty" else SMALLER[:-3]  # its problems come from a file, which has no `n`
    assert run(console, *words, smaller=smaller) == 0
    found = json.loads((tmp_path / "out" / "records.json").read_text())
    lab = Arms.read(name)
    assert list(found) == arms
    for [record] in found.values():
        assert list(record["after"]) == list(lab.said.columns)
        assert all(value >= 0 for value in record["after"].values() if not math.isnan(value))
        assert set(record["curves"]) == set(lab.said.curves.values())
    drawn = [one for [record] in found.values() for one in record["curves"].values() if one]
    assert drawn


@pytest.mark.thorough
@pytest.mark.slow
def test_the_lab_of_a_preference_model_in_small(
    run: Any, console: ModuleType, tiny_folder: Path, tmp_path: Path
) -> None:
    """The models of R1's pipeline, which it begins with, are a tiny one and its untrained classifier."""
    classifier = AutoModelForSequenceClassification.from_pretrained(tiny_folder, num_labels=1)
    classifier.save_pretrained(tmp_path / "judge")
    AutoTokenizer.from_pretrained(tiny_folder).save_pretrained(tmp_path / "judge")
    pair = {"prompt": "1 + 1?", "chosen": "#### 2", "rejected": "#### 3"}
    (tmp_path / "pairs.jsonl").write_text(json.dumps(pair) + "\n")
    words = ["lab", "preference", "--seeds", "0", "--folder", str(tmp_path / "out"), "--start", str(tiny_folder)]
    words += ["--set", "rewards.1.model", str(tmp_path / "judge")]
    words += ["--set", "rewards.1.comparisons", str(tmp_path / "pairs.jsonl")]
    assert run(console, *words, *LAB_WORDS, smaller=("--set", "data.n", "64")) == 0
    found = json.loads((tmp_path / "out" / "records.json").read_text())
    assert list(found) == ["frozen", "kept in training"]
    assert all(record["curves"]["rewards/preference_reward/mean"] for [record] in found.values())


@pytest.mark.thorough
@pytest.mark.slow
def test_a_team_s_lab_by_its_path_as_a_module(tmp_path: Path) -> None:
    """A process of the command and one of the cell, both real; ``lab_own`` lies beside the file."""
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "lab_own.py").write_text("def one_more(arm, seed, options):\n    return {'seed': 7, 'max_steps': 1}\n")
    (folder / "own.yaml").write_text(
        "about: a team's own\nrecipe: quickstart/dr_grpo.yaml\narms: {own: 'lab_own:one_more'}\nseeds: [3]\n"
    )
    words = [*SMALLER, *LAB_WORDS, "--folder", str(tmp_path / "out")]
    paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-m", "grpo_lab", "lab", str(folder / "own.yaml"), *words],
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": paths}, capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    log = tmp_path / "out" / "own-3.log"
    assert done.returncode == 0, done.stderr + log.read_text()
    assert "| own | 1 |" in done.stdout
    assert json.loads((tmp_path / "out" / "own-3" / "arm.json").read_text())["seed"] == 3


@pytest.mark.thorough
@pytest.mark.slow
def test_time_to_accuracy_in_small_and_gone_on_with(
    run: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An arm later what is recorded is not trained again; records of other options are refused."""
    import bench_accuracy

    small = {"per_device_train_batch_size": 16, "max_completion_length": 16}
    words = [word for key, value in small.items() for word in ("--set", key, str(value))]
    words += ["--tiny", "--seeds", "1", "--folder", str(tmp_path), "--start", str(tmp_path / "start")]
    run(bench_accuracy, *words, "--arms", "stock", "ours", smaller=())
    records = {file: file.stat().st_mtime_ns for file in tmp_path.glob("tiny/*/arm.json")}
    assert sorted(file.parent.name for file in records) == ["ours_0.0003_2_steps-1", "stock_0.0003_2_steps-1"]
    run(bench_accuracy, *words, "--arms", "update off", smaller=())
    assert all(file.stat().st_mtime_ns == before for file, before in records.items())
    found = json.loads((tmp_path / "tiny" / "results.json").read_text())
    assert list(found["runs"]) == ["stock", "ours", "update off"]
    for [one] in found["runs"].values():
        assert [point["step"] for point in one["points"]] == [0, 1, 2]
        assert 0 == one["points"][0]["seconds"] < one["points"][1]["seconds"] < one["points"][2]["seconds"]
        assert one["points"][2]["seconds"] < one["wall_seconds"]
        assert one["points"][0] == found["runs"]["stock"][0]["points"][0]
    assert "| update off | 1 |" in capsys.readouterr().out
    assert (tmp_path / "tiny" / "accuracy.png").is_file() or importlib.util.find_spec("matplotlib") is None
    with pytest.raises(SystemExit, match=r"asked for: take another --folder than .*/tiny"):
        run(bench_accuracy, *words[3:], smaller=())


@pytest.mark.slow
def test_smoke_of_two_presets(run: Any, tmp_path: Path) -> None:
    import lab_smoke

    words = ["--only", "gspo", "KimiTrainer", "--steps", "2", "--set", "max_completion_length", "8"]
    with contextlib.suppress(SystemExit):  # a start that never answers right moves no weight, and that is said
        run(lab_smoke, *words, "--folder", str(tmp_path))
    lines = (tmp_path / "table.md").read_text().splitlines()
    assert [line.split("|")[1].strip() for line in lines[2:]] == ["gspo", "KimiTrainer"]
    assert all(line.split("|")[2].strip() == "yes" for line in lines[2:])
