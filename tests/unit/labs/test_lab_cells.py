"""``grpo_lab.labs.cells``: what a cell is made from, and which cells stand in one table."""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import yaml

from grpo_lab.cli import main
from grpo_lab.evaluation import EvaluationResult
from grpo_lab.labs import experiment
from grpo_lab.labs.arms import Arms
from grpo_lab.labs.cells import LabCell
from grpo_lab.labs.experiment import Experiment, run_experiment
from grpo_lab.labs.tables import draw, table
from grpo_lab.registry import load_named
from unit.reports.test_report import outcome

Options = Namespace
TINY: dict[str, Any] = {
    "model.tiny": {"architecture": "qwen2", "hidden_size": 24, "num_layers": 1}, "cold_start.data.n": 32,
    "max_steps": 2, "per_device_train_batch_size": 16, "data.n": 32, "evaluation.data.n": 4,
}  # fmt: skip
LAB: dict[str, Any] = {
    "about": "x",
    "recipe": "quickstart/dr_grpo.yaml",
    "arms": {"a": {}, "b": {"learning_rate": 1.0e-4}},
    "settings": TINY,
    "curves": {"entropy": "entropy"},
    "seeds": [0],
}


def words(folder: Path, **given: Any) -> Options:
    known = {"folder": folder, "arms": None, "seeds": [0, 1], "jobs": 1, "at_most": None, "run_one": None, "set": []}
    known |= {"difference": None, "spread": None, "dry_run": False, "recipe": None, "start": None}
    return Namespace(**{**known, **given})


def counted(ran: list[tuple[str, int]], **more: Any) -> Experiment:
    """An experiment whose cells only say how often they ran."""

    def run(arm: str, seed: int, folder: Path, options: Options) -> dict[str, Any]:
        ran.append((arm, seed))
        return {"after": {"runs": float(len(ran))}}

    return Experiment(["a", "b"], run, lambda found, _: table(found), in_process=True, **more)


def test_a_new_question_is_not_answered_with_old_records(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Cells of other options stand in no table with the rest, and run again; what was there stands beside them."""
    ran: list[tuple[str, int]] = []
    run_experiment(counted(ran), words(tmp_path, steps=60))
    run_experiment(counted(ran), words(tmp_path, steps=60))
    assert len(ran) == 4
    capsys.readouterr()
    run_experiment(counted(ran), words(tmp_path, steps=2, at_most=0))
    assert "not in the table: a, seed 0 (again: steps: 60 → 2)" in capsys.readouterr().out
    run_experiment(counted(ran), words(tmp_path, steps=2, at_most=1))
    said = capsys.readouterr().out
    assert "| a | 1 | 5.000 |" in said
    assert "| b |" not in said
    assert json.loads((tmp_path / "a-0.before-1" / "arm.json").read_text())["after"] == {"runs": 1.0}
    run_experiment(counted(ran), words(tmp_path, steps=2))
    assert len(ran) == 8
    assert [*json.loads((tmp_path / "records.json").read_text())] == ["a", "b"]


def test_which_cells_run_is_no_setting_of_a_cell(tmp_path: Path) -> None:
    ran: list[tuple[str, int]] = []
    run_experiment(counted(ran), words(tmp_path))
    run_experiment(counted(ran), words(tmp_path, seeds=[1], jobs=2, arms=["b"], difference=3.0, at_most=7))
    assert len(ran) == 4


def test_one_arm_edited_runs_again_and_the_other_does_not(tmp_path: Path) -> None:
    ran: list[tuple[str, int]] = []
    of_arm: dict[str, Mapping[str, Any]] = {"a": {"rate": 0.1}, "b": {"rate": 0.2}}
    made = counted(ran, settings=lambda arm, seed, options: of_arm[arm])
    run_experiment(made, words(tmp_path))
    of_arm["b"] = {"rate": 0.3}
    run_experiment(made, words(tmp_path))
    assert ran[4:] == [("b", 0), ("b", 1)]


def test_the_start_counts_by_what_it_holds(tmp_path: Path) -> None:
    ran: list[tuple[str, int]] = []
    one, other, moved = (tmp_path / name for name in ("one", "other", "moved"))
    for place, held in ((one, "1"), (other, "2"), (moved, "1")):
        place.mkdir()
        (place / "weights").write_text(held)
    for start in (one, moved, other):
        run_experiment(counted(ran, start=lambda *_, at=start: at, settings=lambda *_: {}), words(tmp_path / "lab"))
    assert len(ran) == 8
    (other / "weights").unlink()
    other.rmdir()  # the table is drawn without it
    run_experiment(counted(ran, start=lambda *_: other, settings=lambda *_: {}), words(tmp_path / "lab"))
    assert len(ran) == 8


def test_a_folder_that_was_moved_holds_the_same_cells(tmp_path: Path) -> None:
    (tmp_path / "lab").mkdir()
    (tmp_path / "lab" / "rows.jsonl").write_text("{}\n")
    settings: Any = {"settings": lambda arm, seed, options: {"data": {"source": str(options.folder / "rows.jsonl")}}}
    ran: list[tuple[str, int]] = []
    run_experiment(counted(ran, **settings), words(tmp_path / "lab"))
    (tmp_path / "lab").rename(tmp_path / "moved")
    run_experiment(counted(ran, **settings), words(tmp_path / "moved"))
    assert len(ran) == 4
    (tmp_path / "moved" / "rows.jsonl").write_text("{}\n{}\n")
    run_experiment(counted(ran, **settings), words(tmp_path / "moved"))
    assert len(ran) == 8


def test_settings_that_are_known_after_the_start_is_made(tmp_path: Path) -> None:
    ran: list[tuple[str, int]] = []
    made: list[str] = []
    how: Any = {
        "prepare": lambda options: made.append("x"),
        "settings": lambda *_: {"pool": "".join(made)} if made else None,
    }
    run_experiment(counted(ran, **how), words(tmp_path))
    assert len(ran) == 4
    run_experiment(counted(ran, **how), words(tmp_path))
    assert made == ["x"]  # all is there


def test_a_lost_record_is_gone_on_with(tmp_path: Path) -> None:
    cell = LabCell.of("a", 0, tmp_path, {"steps": 1})
    cell.begin()
    cell.finish({"after": {}}, ())
    (tmp_path / "a-0" / "model").write_text("")
    cell.file.unlink()
    assert cell.due() == "goes on"
    cell.begin()
    assert (tmp_path / "a-0" / "model").is_file()


def trained(lab: Arms, options: Options, arm: str, seed: int, entropy: float, metrics: bool = True) -> None:
    """What a training of a cell leaves, without one."""
    cell = lab.experiment().cell(arm, seed, options)
    cell.begin()
    result = EvaluationResult((outcome(0, 1.0, tokens=3), outcome(1, 0.0, tokens=5)))
    result.write(cell.folder / "evaluation" / "after")
    if metrics:
        row = {"step": 1, "rollout/generated": 64, "entropy": entropy}
        (cell.folder / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    cell.finish(lab.measured(cell.folder), lab.experiment().kept)


@pytest.fixture
def lab_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A lab with the records of both arms; no cell can run."""
    file = tmp_path / "lab.yaml"
    file.write_text(yaml.safe_dump(LAB, sort_keys=False))
    options = words(tmp_path / "out", seeds=[0])
    for arm, entropy in {"a": 0.5, "b": 0.25}.items():
        trained(Arms.read(str(file)), options, arm, 0, entropy)
    monkeypatch.setattr(experiment, "CellForks", None)
    return file


def test_a_column_and_a_curve_that_are_added_are_read_anew(lab_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    columns = {"accuracy": "greedy.accuracy.value", "H": "mean.entropy", "tokens": "greedy.mean_length"}
    lab_file.write_text(
        yaml.safe_dump({**LAB, "columns": columns, "curves": {"reward": "reward", "H": "entropy"}}, sort_keys=False)
    )
    assert main(["lab", str(lab_file), "--folder", str(lab_file.parent / "out")]) == 0
    said = capsys.readouterr().out
    assert "| b | 1 | 0.500 | 0.250 | 4.000 |" in said
    assert "| a | – | 0.500 |" in said.partition("After 0.1 k")[2]


def test_a_metric_that_no_run_has_logged_is_said(lab_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A misspelt one was "–" without a word."""
    columns = {"accuracy": "greedy.accuracy.value", "H": "mean.entropi", "there": "last.entropy"}
    file = {**LAB, "columns": columns, "curves": {"of nothing": "xyz", "H": "entropy"}}
    lab_file.write_text(yaml.safe_dump(file, sort_keys=False))
    assert main(["lab", str(lab_file), "--folder", str(lab_file.parent / "out")]) == 0
    said = capsys.readouterr().out
    assert "`columns.H` is 'mean.entropi', and no run here has logged 'entropi': it is empty; did you mean 'ent" in said
    assert "`curves.of nothing` is 'xyz', and no run here has logged 'xyz': it is empty." in said
    assert said.count("no run here") == 2


def test_it_is_said_after_the_first_cell(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    seen: list[list[str]] = []

    def odd(folders: Sequence[Path]) -> list[str]:
        seen.append([one.name for one in folders])
        return []

    one = experiment.Experiment(["a", "b"], lambda *_: {}, lambda *_: "", odd=odd)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(experiment, "CellForks", lambda imports: nullcontext())
        patch.setattr(
            experiment, "_in_own_process", lambda _, cell: None if cell.arm == "b" else f"{cell.name}: failed"
        )
        options = words(tmp_path, seeds=[0, 1])
        assert experiment._run(one, experiment._cells(one, ["a", "b"], options), options) == [
            "a, seed 0: failed",
            "a, seed 1: failed",
        ]
    assert seen == [["b-0"]]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"settings": {**TINY, "max_steps": 3}}, "max_steps: 2 → 3"),
        ({"settings": {**TINY, "rewards.0.mode": "lenient"}}, "rewards.0.mode: 'strict' → 'lenient'"),
        ({"arms": {"a": {"learning_rate": 0.5}, "b": LAB["arms"]["b"]}}, "learning_rate: 0.0003 → 0.5"),
        ({"threads": 1}, "threads: not set → 1"),
        ({"recipe": "lab/misreading/dr_grpo.yaml"}, ""),
    ],
)
def test_what_a_lab_file_says_is_what_a_cell_is_made_from(
    change: dict[str, Any], said: str, lab_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lab_file.write_text(yaml.safe_dump({**LAB, **change}, sort_keys=False))
    assert main(["lab", str(lab_file), "--folder", str(lab_file.parent / "out"), "--at-most", "0"]) == 0
    assert f"not in the table: a, seed 0 (again: {said}" in capsys.readouterr().out


def test_set_is_what_a_cell_is_made_from(lab_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    at = ["lab", str(lab_file), "--folder", str(lab_file.parent / "out"), "--at-most", "0"]
    assert main([*at, "--set", "max_steps", "2", "--set", "logging_steps", "7"]) == 0  # no number follows from these
    assert "| b | 1 |" in capsys.readouterr().out
    assert main([*at, "--set", "max_steps", "1e3"]) == 0
    assert "not in the table: b, seed 0 (again: max_steps: 2 → 1000)" in capsys.readouterr().out


def test_what_columns_are_read_of_is_gone(lab_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (lab_file.parent / "out" / "a-0" / "metrics.jsonl").unlink()
    assert main(["lab", str(lab_file), "--folder", str(lab_file.parent / "out"), "--at-most", "0"]) == 0
    assert "not in the table: a, seed 0 (again: its metrics.jsonl is gone)" in capsys.readouterr().out


def test_a_lab_whose_runs_log_no_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "lab.yaml"
    curves = {"entropy": "entropy", "held out": "evaluation.greedy.accuracy.value"}
    columns = {"accuracy": "greedy.accuracy.value", "H": "last.entropy"}
    file.write_text(yaml.safe_dump({**LAB, "curves": curves, "columns": columns}, sort_keys=False))
    for arm in "ab":
        trained(Arms.read(str(file)), words(tmp_path / "out", seeds=[0]), arm, 0, 0.0, metrics=False)
    assert main(["lab", str(file), "--folder", str(tmp_path / "out")]) == 0
    said = capsys.readouterr()
    assert "| a | 1 | 0.500 | – |" in said.out
    assert "Traceback" not in said.err


def test_a_panel_without_a_curve_is_drawn_empty(tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    pytest.importorskip("matplotlib")
    draw({"nothing": {"a": [], "b": []}, "some": {"a": [[(0, 1.0), (1, 2.0)]], "b": []}}, tmp_path / "c.png", "x")
    assert (tmp_path / "c.png").is_file()
    assert not [one for one in recwarn if "legend" in str(one.message)]


@pytest.mark.parametrize(
    ("change", "set_", "said"),
    [
        ({"columns": {"accuracy": "greedy.acuracy.value"}}, [], "has no 'acuracy' there"),
        ({"columns": {"accuracy": "sampled.accuracy.value"}}, [], "has no 'accuracy' there, but None"),
        ({"columns": {"accuracy": "lab_gone:x"}}, [], "`columns.accuracy` is 'lab_gone:x', which cannot be loaded"),
        ({"curves": {"held out": "evaluation.greedy.x"}}, [], "`curves.held out` is 'greedy.x'"),
        ({"curves": {"reward": "rewards/acuracy_reward/mean"}}, [], "did you mean 'rewards/accuracy_reward/mean'"),
        (
            {"columns": {"accuracy": "greedy.accuracy.value", "dead": "mean.update/dead_fracton"}},
            [],
            "`columns.dead` is 'update/dead_fracton', which no run logs (docs/metrics.md lists what is logged)",
        ),
        (
            {"columns": {"accuracy": "greedy.accuracy.value", "long": "last.completions/mean_lenght"}},
            [],
            "lists what is logged); did you mean 'completions/mean_length'?",
        ),
        ({"curves": {"of nothing": "xyz"}}, [], "`curves.of nothing` is 'xyz', which no run logs (docs/metrics.md"),
        ({"curves": {"H": "entropi"}}, [], "what is logged); did you mean 'entropy'?"),
        ({"arms": {"a": {"lerning_rate": 1}, "b": {}}}, [], "has no setting 'lerning_rate'; did you mean"),
        ({"arms": {"a": {"rewards": ["acuracy"]}, "b": {}}}, [], "arm 'a': `rewards`: unknown reward 'acuracy'"),
        ({"settings": {**TINY, "cold_start": None}}, [], "the recipe has no `cold_start` to share among the arms"),
        ({"arms": {"a": "lab_gone:x"}}, [], "`arms.a` is 'lab_gone:x', which cannot be loaded"),
        ({"prepare": "lab_gone:x"}, [], "`prepare` is 'lab_gone:x', which cannot be loaded"),
        ({}, ["max_stepz", "3"], "has no setting 'max_stepz'; did you mean 'max_steps'"),
        ({}, ["max_steps", "{"], "`--set max_steps` '{': no YAML"),
        ({}, ["evaluation", "null"], "the recipe of arm 'a' has no `evaluation`"),
    ],
)
def test_a_mistake_is_named_before_anything_is_made(
    change: dict[str, Any], set_: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "lab.yaml"
    file.write_text(yaml.safe_dump({**LAB, **change}, sort_keys=False))
    words = [word for pair in [set_] if pair for word in ("--set", *pair)]
    assert main(["lab", str(file), "--folder", str(tmp_path / "out"), *words]) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("own", [{"rewards.0": "lab_team:reward"}, {"callbacks": ["lab_team:Callback"]}])
def test_a_metric_that_a_team_may_log_is_looked_for_in_the_runs(
    own: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Beside code of a team no name is refused before training; neither is one that a seed's function may ask for."""
    (tmp_path / "lab_team.py").write_text(
        "from transformers import TrainerCallback\n"
        "def reward(completions, log_metric=None, **_): ...\n"
        "class Callback(TrainerCallback): ...\n"
        "def arm(arm, seed, options): return {}\n"
    )
    file = tmp_path / "lab.yaml"
    for arms in ({"a": own}, {"a": {}, "b": "lab_team:arm"}):
        file.write_text(yaml.safe_dump({**LAB, "arms": arms, "curves": {"ours": "team/name"}}, sort_keys=False))
        assert main(["lab", str(file), "--folder", str(tmp_path / "out"), "--dry-run"]) == 0, capsys.readouterr().err


def test_a_dry_run_says_which_cells_would_run_and_writes_nothing(
    lab_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = sorted(lab_file.parent.rglob("*"))
    at = ["lab", str(lab_file), "--folder", str(lab_file.parent / "out"), "--dry-run", "--seeds", "0", "1"]
    assert main(at) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "2 cells, done already a, seed 0; b, seed 0 2 cells, new a, seed 1; b, seed 1" in said
    assert sorted(lab_file.parent.rglob("*")) == before


def test_the_shipped_difficulty_lab_waits_for_its_pools(tmp_path: Path) -> None:
    """Its arms choose among problems that `prepare` makes of the start."""
    lab = Arms.read("difficulty")
    assert lab.settings("hardest", 0, words(tmp_path)) is None
    assert callable(load_named(str(lab.said.arms["hardest"]), "arms.hardest"))
    assert str(Path(sys.modules["lab_pools"].__file__ or "").parent).endswith("difficulty")
