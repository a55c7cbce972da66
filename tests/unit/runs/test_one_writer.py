"""Two runs in one folder: the second is refused by name, and a killed first one holds nothing."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Callable
from inspect import signature
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from grpo_lab.curation import pass_rates
from grpo_lab.pipelines import curate, long2short, rounds, train
from grpo_lab.pipelines.curate import curation_recipe_from
from grpo_lab.pipelines.evaluate import claim_output
from grpo_lab.pipelines.long2short import long2short_recipe_from
from grpo_lab.pipelines.rounds_recipe import rounds_recipe_from
from grpo_lab.pipelines.run_folder import RunFolder
from grpo_lab.recipe.sections import recipe_from
from grpo_lab.runs.folder import LOCK, FolderGone, is_empty, one_writer, write_run
from grpo_lab.runs.metrics import MetricsFile


@pytest.fixture
def other(tmp_path: Path, holding: Callable[..., subprocess.Popen[str]]) -> subprocess.Popen[str]:
    """Another process that writes into ``tmp_path / "run"``."""
    return holding(tmp_path / "run")


@pytest.mark.not_fast
def test_a_second_writer_is_refused_until_the_first_ends_or_is_killed(
    tmp_path: Path, other: subprocess.Popen[str]
) -> None:
    folder = tmp_path / "run"
    (tmp_path / "link").symlink_to(folder)
    for name in ("run", "link"):
        with pytest.raises(ValueError, match=rf"in use: process {other.pid} on .*, since .*, writes there"):
            lock(tmp_path / name)
    assert is_empty(folder)
    other.send_signal(signal.SIGKILL)
    other.wait()
    assert (folder / LOCK).exists()
    with one_writer(folder):
        assert is_empty(folder)
    assert not (folder / LOCK).exists()


@pytest.mark.parametrize("what", ["removed", "moved away", "made anew"])
@pytest.mark.parametrize("fails", [False, True])
def test_a_folder_that_goes_meanwhile_is_said(what: str, fails: bool, tmp_path: Path) -> None:
    """A curation went on into a folder of its own making, without the samples, and ended with 0; others with a
    traceback."""
    folder = tmp_path / "run"

    def run() -> None:
        with one_writer(folder):
            folder.rename(tmp_path / "away") if what == "moved away" else shutil.rmtree(folder)
            if what == "made anew":
                folder.mkdir()
            if fails:
                raise FileNotFoundError(2, "No such file or directory", str(folder / "metrics.jsonl"))

    with pytest.raises(
        FolderGone, match=r"run' was moved away, or it and run.lock in it removed, while this wrote into it"
    ):
        run()


def lock(folder: Path) -> None:
    with one_writer(folder):
        pass


def log_a_step(folder: Path) -> None:
    MetricsFile(folder / "metrics.jsonl").on_log(
        None, SimpleNamespace(is_world_process_zero=True, global_step=1), None, {"loss": 0.5}
    )


def cut(folder: Path) -> None:
    pass_rates([{"prompt": "?"}], lambda *_: [["x"]], lambda **_: [1.0], 1, path=folder / "samples.jsonl")


@pytest.mark.parametrize(
    ("name", "write", "refused"),
    [
        (LOCK, lock, True), ("metrics.jsonl", log_a_step, True), ("samples.jsonl", cut, True),
        ("run.json.part", lambda folder: write_run(folder, {}), False),
    ],
)  # fmt: skip
def test_nothing_is_written_through_a_link_in_the_output_folder(
    tmp_path: Path, name: str, write: Callable[[Path], None], refused: bool
) -> None:
    """Of every file of ours with a name that somebody else can foresee; the lock's link emptied its target."""
    mine = tmp_path / "mine"
    mine.write_text("my notes")
    (tmp_path / name).symlink_to(mine)
    if refused:
        with pytest.raises(ValueError, match=rf"{name} is a link or no plain file"):
            write(tmp_path)
    else:
        write(tmp_path)
    assert mine.read_text() == "my notes"


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
def test_a_lock_that_is_no_file_is_refused(tmp_path: Path, make: Callable[[Path], None]) -> None:
    make(tmp_path / LOCK)
    with pytest.raises(ValueError, match="no plain file"):
        lock(tmp_path)


ROWS = {"loader": "word_problems", "split": "train", "n": 8, "seed": 0, "template": "chat"}


def training(folder: Path) -> Any:
    tiny = {"tiny": {"architecture": "qwen2", "hidden_size": 32, "num_heads": 2, "num_layers": 1, "max_positions": 256}}
    settings = {"max_completion_length": 8, "num_generations": 4, "per_device_train_batch_size": 4, "max_steps": 1}
    return recipe_from(
        {"name": "r", "model": tiny, "data": ROWS, "rewards": ["accuracy"], "use_cpu": True, "bf16": False}
        | {"objective": "dr_grpo", "output_dir": str(folder), **settings}
    )


def curation(folder: Path) -> Any:
    return curation_recipe_from({"name": "c", "data": ROWS, "filters": {"duplicates": {}}, "output_dir": str(folder)})


def of_a_model(folder: Path, method: str) -> dict[str, Any]:
    written = {"name": "s", "method": method, "model": {"path": str(folder.parent / "model")}, "data": ROWS}
    return {**written, "max_completion_length": 8, "output_dir": str(folder)}


def shortening(folder: Path) -> Any:
    return long2short_recipe_from(of_a_model(folder, "dpo"))


def by_rounds(folder: Path) -> Any:
    return rounds_recipe_from(of_a_model(folder, "rft"))


def measured(folder: Path) -> None:
    claim_output(folder, overwrite=False)


ALL = [
    (measured, lambda folder: folder),
    (train.train, training),
    (curate.curate, curation),
    (long2short.long2short, shortening),
    (rounds.run_rounds, by_rounds),
]


@pytest.mark.thorough(but="run_rounds-by_rounds")
@pytest.mark.parametrize(("run", "recipe"), ALL)
@pytest.mark.slow
def test_every_pipeline_asks(
    run: Callable[[Any], Any],
    recipe: Callable[[Path], Any],
    tmp_path: Path,
    tiny_folder: Path,
    other: subprocess.Popen[str],
) -> None:
    (tmp_path / "model").symlink_to(tiny_folder)
    with pytest.raises(ValueError, match=rf"in use: process {other.pid} on"):
        run(recipe(tmp_path / "run"))
    assert is_empty(tmp_path / "run")


@pytest.mark.parametrize(
    ("check", "recipe", "first"),
    [
        (RunFolder.open, training, "run.json"),
        (curate.CURATE.earlier, curation, "curation.json"),
        (long2short.LONG2SHORT.earlier, shortening, "run.json"),
        (rounds.ROUNDS.earlier, by_rounds, "run.json"),
    ],
    ids=["train", "curate", "long2short", "rounds"],
)
def test_a_command_that_was_killed_in_its_first_file_knows_its_folder(
    check: Callable[..., Any], recipe: Callable[[Path], Any], first: str, tmp_path: Path
) -> None:
    """It said "holds something else"."""
    folder = tmp_path / "run"
    folder.mkdir()
    for name in (LOCK, f"{first}.part"):
        (folder / name).touch()
    asked = {name: False for name in ("overwrite", "resume") if name in signature(check).parameters}
    check(recipe(folder), **asked)
    (folder / "thesis.tex").touch()
    with pytest.raises(ValueError, match="choose another"):
        check(recipe(folder), **asked)
