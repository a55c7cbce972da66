"""`grpo-lab train`: killed, asked to stop, finished, extended, and gone on with, as real runs of a tiny model.

The team's parts stand in a module of the working folder. Runs are compared with the uninterrupted one: weights and
metrics.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

import forked
from grpo_lab.cli import main
from grpo_lab.engines.vllm.token import VARIABLE
from grpo_lab.pipelines.train import train
from grpo_lab.recipe.sections import recipe_from
from grpo_lab.runs.stop_requests import Interrupted
from grpo_lab.trainer.resume.whole import what_is_broken

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
TOKEN = "a-token-of-no-server-that-nobody-has-drawn"
GOOD: dict[str, Any] = {
    "name": "resumed",
    "model": {"tiny": {"hidden_size": 16, "num_layers": 1, "initializer_range": 0.2}},
    "data": {"loader": "word_problems", "n": 32},
    "rewards": ["pipeline_team:vowels"],
    "evaluation": {"data": {"loader": "word_problems", "split": "test", "n": 4}, "max_new_tokens": 4},
    "objective": "dr_grpo",
    "num_generations": 2,
    "per_device_train_batch_size": 4,
    "max_completion_length": 6,
    "max_steps": 4,
    "learning_rate": 1e-2,
    "lr_scheduler_type": "constant",
    "logging_steps": 1,
    "save_strategy": "steps",
    "save_steps": 2,
    "gradient_checkpointing": False,
    "use_cpu": True,
    "bf16": False,
    "seed": 0,
}
TIMES = ("step_time",)
TEAM = '''
import os, shutil, signal
from transformers import TrainerCallback
from grpo_lab import LabTrainer

def vowels(completions, **_):
    return [sum(c in "aeiou" for c in str(text)) / 10 for text in completions]

class Ask(TrainerCallback):
    """Asks its own process to end in step 3, once."""
    def __init__(self, signal_name: str, asked: str):
        self.name, self.asked = signal_name, asked
    def on_step_begin(self, args, state, control, **_):
        if state.global_step == 2 and not os.path.exists(self.asked):
            open(self.asked, "w").close()
            os.kill(os.getpid(), getattr(signal, self.name))

class Does(TrainerCallback):
    """In step 4: the learning rate is none, or the run's folder goes."""
    def __init__(self, what: str):
        self.what = what
    def on_pre_optimizer_step(self, args, state, control, optimizer=None, **_):
        if state.global_step == 3 and self.what == "break":
            optimizer.param_groups[0]["lr"] = float("nan")
        elif state.global_step == 3:
            shutil.rmtree(args.output_dir)

class Mine(LabTrainer):
    """A team's."""
'''


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The working folder, with the team's module; the tests' process has it on its path as the command line would."""
    folder = tmp_path_factory.mktemp("home")
    (folder / "pipeline_team.py").write_text(TEAM)
    before = Path.cwd()
    os.chdir(folder)
    yield folder
    os.chdir(before)
    sys.path[:] = [path for path in sys.path if path != str(folder)]
    sys.modules.pop("pipeline_team", None)


@pytest.fixture(scope="module")
def whole(home: Path) -> Path:
    """The uninterrupted run; a server's token is in the environment, as on a cluster."""
    folder = home / "whole"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(VARIABLE, TOKEN)
        train(recipe_from({**GOOD, "output_dir": str(folder)}))
    return folder


def test_the_token_of_a_server_is_in_no_file_of_the_run(whole: Path) -> None:
    files = [path for path in whole.rglob("*") if path.is_file()]
    written = {"run.json", "recipe.yaml", "metrics.jsonl", "report.html", "README.md", "training_args.bin"}
    assert written <= {file.name for file in files}
    assert [path for path in files if TOKEN.encode() in path.read_bytes()] == []


def again(folder: Path, **changes: Any) -> Any:
    return train(recipe_from({**GOOD, "output_dir": str(folder), **changes}), resume=True)


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def metrics(folder: Path) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in row.items() if name not in TIMES} for row in rows]


def run_of(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "run.json").read_text())
    return found


def same(one: Path, other: Path) -> None:
    ours, theirs = weights(one), weights(other)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert metrics(one) == metrics(other)
    assert run_of(one)["tokens"] == run_of(other)["tokens"] > 0


def copy(whole: Path, name: str, steps: int) -> Path:
    """The folder as a kill after checkpoint ``steps`` leaves it: no model, no later checkpoint, not finished."""
    folder = whole.parent / name
    shutil.copytree(whole, folder)
    for path in [folder / "model.safetensors", folder / "report.html"]:
        path.unlink()
    shutil.rmtree(folder / "evaluation" / "after")
    for path in folder.glob("checkpoint-*"):
        if int(path.name.split("-")[1]) > steps:
            shutil.rmtree(path)
    unfinished(folder, {name: value for name, value in run_of(folder).items() if name != "trained"})
    return folder


def unfinished(folder: Path, record: dict[str, Any]) -> None:
    """A copied folder becomes a run of its own, with this record."""
    (folder / "run.json").write_text(json.dumps({**record, "finished": False}))
    written = yaml.safe_load((folder / "recipe.yaml").read_text())
    written["arguments"]["output_dir"] = str(folder)
    (folder / "recipe.yaml").write_text(yaml.safe_dump(written))


def stamp(file: Path) -> int:
    return file.stat().st_mtime_ns


def test_a_finished_run_is_left_alone(whole: Path) -> None:
    """It trained a step more each time, and overwrote the model with it."""
    files = [path for path in whole.rglob("*") if path.is_file() and path.name != "recipe.yaml"]
    stamps = [stamp(path) for path in files]
    outcome = again(whole)
    assert stamps == [stamp(path) for path in files]
    assert outcome.after is not None
    assert outcome.report == whole / "report.html"
    outcome.report.unlink()  # killed before it
    again(whole)
    assert outcome.report.is_file()


def test_killed_after_the_last_checkpoint_only_the_end_is_made(whole: Path) -> None:
    folder = copy(whole, "killed-at-the-end", 4)
    before = stamp(folder / "evaluation" / "before" / "summary.json")
    outcome = again(folder)
    same(folder, whole)
    assert run_of(folder)["finished"] is True
    assert stamp(folder / "evaluation" / "before" / "summary.json") == before, "measured once"
    assert outcome.before is not None
    assert outcome.after is not None
    assert not (folder / "checkpoint-5").exists()


def test_killed_in_the_last_evaluation_nothing_is_trained_again(whole: Path) -> None:
    """Without a checkpoint, too, which a run with `save_strategy: no` never has."""
    folder = whole.parent / "in-evaluation"
    shutil.copytree(whole, folder)
    for path in folder.glob("checkpoint-*"):
        shutil.rmtree(path)
    shutil.rmtree(folder / "evaluation" / "after")
    unfinished(folder, run_of(folder))
    made = stamp(folder / "model.safetensors")
    outcome = again(folder)
    assert stamp(folder / "model.safetensors") == made
    assert outcome.after is not None
    assert run_of(folder)["finished"] is True
    wider = {**GOOD["evaluation"], "data": {**GOOD["evaluation"]["data"], "n": 6}}
    outcome = again(folder, evaluation=wider)  # a finished run measured on more problems
    assert stamp(folder / "model.safetensors") == made
    assert (outcome.before.n_problems, outcome.after.n_problems) == (6, 6)


def test_a_broken_checkpoint_is_passed_over_and_the_steps_after_it_are_logged_once(
    whole: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = copy(whole, "broken", 4)
    optimizer = folder / "checkpoint-4" / "optimizer.pt"
    optimizer.write_bytes(optimizer.read_bytes()[:1000])
    again(folder)
    said = capsys.readouterr().out
    assert "passed over checkpoint-4 (optimizer.pt is not whole)" in said
    assert "going on from checkpoint-2" in said
    same(folder, whole)
    assert [row["step"] for row in metrics(folder)] == [1, 2, 3, 4]
    assert (folder / "broken-checkpoint-4").is_dir()
    assert (folder / "checkpoint-4" / "optimizer.pt").stat().st_size > 1000


def test_a_run_is_extended_and_never_shortened(whole: Path) -> None:
    folder = copy(whole, "extended", 2)
    again(folder, max_steps=3)
    assert [row["step"] for row in metrics(folder)] == [1, 2, 3]
    again(folder, max_steps=4, save_steps=1)
    same(folder, whole)
    with pytest.raises(ValueError, match=r"`max_steps` is 3, and .* has done 4 steps"):
        again(folder, max_steps=3)
    with pytest.raises(ValueError, match=r"learning_rate: 0.01 → 0.02"):
        again(folder, max_steps=5, learning_rate=2e-2)


def test_a_half_saved_cold_start_is_made_again(whole: Path) -> None:
    """Its config.json is written first, and was taken for the whole model."""
    folder = copy(whole, "cold", 0)
    file = folder / "cold_start" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:1000])
    again(folder)
    same(folder, whole)


@pytest.mark.parametrize("objective", ["dr_grpo", None])
def test_nan_of_the_last_step_is_no_finished_run(
    objective: str | None, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It ended with 0, a model of NaN and a report."""
    folder = home / f"broken-{objective}"
    recipe = {**GOOD, "objective": objective, "save_strategy": "no", "output_dir": str(folder)}
    (home / "broken.yaml").write_text(
        yaml.safe_dump({**recipe, "callbacks": [{"name": "pipeline_team:Does", "what": "break"}]})
    )
    assert main(["train", "--config", str(home / "broken.yaml")]) == 4
    said = capsys.readouterr().err
    assert "the weights hold NaN" in said or "weights that the training has left hold NaN" in said
    assert run_of(folder)["finished"] is False
    assert not (folder / "model.safetensors").exists()
    assert not (folder / "report.html").exists()


@pytest.mark.parametrize("saves", ["steps", "no"])
def test_a_run_folder_that_is_removed_ends_the_run_in_a_line(
    saves: str, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It was made anew at the next checkpoint: the second half of a run; or a traceback."""
    folder = home / f"removed-{saves}"
    recipe = {**GOOD, "save_strategy": saves, "output_dir": str(folder), "logging_steps": 10, "evaluation": None}
    (home / "removed.yaml").write_text(
        yaml.safe_dump({**recipe, "callbacks": [{"name": "pipeline_team:Does", "what": "remove"}]})
    )
    assert main(["train", "--config", str(home / "removed.yaml")]) == 74
    err = capsys.readouterr().err
    (said,) = [line for line in err.splitlines() if "grpo-lab: error: " in line]
    assert f"{str(folder)!r} was moved away, or it and run.lock in it removed, while this wrote into it" in said
    assert not folder.exists()


def test_a_checkpoint_of_another_width_or_less_is_said_in_a_line(
    whole: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = copy(whole, "another", 4)
    file = folder / "checkpoint-4" / "model.safetensors"
    held = load_file(file)
    name = "model.layers.0.mlp.up_proj.weight"
    (folder / "checkpoint-4" / "grpo_lab_checkpoint.json").unlink()  # stock TRL's has none
    (folder.parent / "another.yaml").write_text(yaml.safe_dump({**GOOD, "output_dir": str(folder)}))
    words = ["train", "--config", str(folder.parent / "another.yaml"), "--resume"]
    for tensors, expected in (
        ({**held, name: held[name][:, :8].contiguous()}, f"checkpoint-4 is of another model: size mismatch for {name}"),
        ({one: value for one, value in held.items() if one != name}, f"lacks 1 of 15 tensors of the model ({name}"),
    ):
        save_file(tensors, file, metadata={"format": "pt"})
        assert main(words) == 2
        said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("grpo-lab: error: ")]
        assert len(said) == 1
        assert expected in said[0]


def asked(home: Path, name: str) -> dict[str, Any]:
    """A recipe whose run is asked to end by the signal ``name``, with a trainer of the team's."""
    return {
        **GOOD,
        "trainer": "pipeline_team:Mine",
        "callbacks": [{"name": "pipeline_team:Ask", "signal_name": name, "asked": str(home / f"asked.{name}")}],
        "output_dir": str(home / f"asked-{name}"),
    }


def stopped(folder: Path, name: str) -> None:
    found = run_of(folder)
    assert found["finished"] is False
    assert found["interrupted"]["signal"] == name
    checkpoint = folder / f"checkpoint-{found['interrupted']['step']}"
    assert what_is_broken(checkpoint) is None
    assert not (folder / "evaluation" / "after").exists()
    assert not (folder / "model.safetensors").exists()


def test_asked_to_stop_it_stops_after_the_checkpoint(home: Path) -> None:
    """By the real command, in a folder whose module it must find. It went on to the evaluation, `finished: true`, exit
    0."""
    (home / "asked.yaml").write_text(yaml.safe_dump(asked(home, "SIGTERM")))
    command = [str(ROOT / "scripts" / "train.py"), "--config", "asked.yaml"]
    done = forked.run(command, folder=home)
    assert done.returncode == 75, done.stdout + done.stderr
    assert "SIGTERM: stopped at step" in done.stderr
    stopped(home / "asked-SIGTERM", "SIGTERM")


def test_asked_by_the_launcher_and_gone_on_with(home: Path) -> None:
    """SIGUSR1: what a launcher can pass on without ending its workers itself (`scripts/slurm/train.sbatch`)."""
    handlers = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)]
    recipe = recipe_from(asked(home, "SIGUSR1"))
    folder = recipe.output_dir
    with pytest.raises(Interrupted, match="SIGUSR1: stopped at step"):
        train(recipe)
    assert handlers == [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)]
    stopped(folder, "SIGUSR1")
    train(recipe, resume=True)
    assert run_of(folder)["finished"] is True
    assert "interrupted" not in run_of(folder)
    assert [row["step"] for row in metrics(folder)] == [1, 2, 3, 4]


def test_when_its_hours_are_over_it_stops_and_is_gone_on_with_to_the_bit(home: Path, whole: Path) -> None:
    recipe = recipe_from({**GOOD, "output_dir": str(home / "hours"), "max_hours": 1e-6})
    with pytest.raises(Interrupted, match="max_hours: stopped at step 1"):
        train(recipe)
    stopped(recipe.output_dir, "max_hours")
    again(recipe.output_dir)
    same(recipe.output_dir, whole)
    assert not (recipe.output_dir / "_saving").exists()


def test_rows_that_have_changed_leave_the_run_as_it_was(whole: Path) -> None:
    folder = copy(whole, "other-rows", 2)
    record = run_of(folder)
    (folder / "run.json").write_text(json.dumps({**record, "rows": {**record["rows"], "fingerprint": "another"}}))
    stamps = {path: stamp(path) for path in folder.rglob("*") if path.is_file()}
    with pytest.raises(ValueError, match=r"has changed since: 32 rows \(another\) → 32 rows"):
        again(folder)
    assert stamps == {path: stamp(path) for path in folder.rglob("*") if path.is_file()}
