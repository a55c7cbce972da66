"""In what order a checkpoint is written, moved, pushed and others pruned, and what a failure leaves."""

from __future__ import annotations

import json
import math
import os
import random
import shutil
import time
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from transformers import TrainerState
from transformers.trainer_utils import rotate_checkpoints

from grpo_lab.finite import NumbersError
from grpo_lab.trainer.resume import checkpoint, going_on
from grpo_lab.trainer.resume import whole as checkpoints
from grpo_lab.trainer.resume.checkpoint import CheckpointNotWritten, save_final, save_whole, surplus
from grpo_lab.trainer.resume.going_on import VerifiedCheckpoint, chosen, newest_read
from grpo_lab.trainer.resume.whole import MARK, SAVING, mark_of, what_is_broken


class Saves:
    """What ``save_whole`` asks of a trainer; its checkpoint is written as transformers writes one."""

    is_fsdp_enabled = is_deepspeed_enabled = False

    def __init__(self, run: Path) -> None:
        self.run = run
        self.args = SimpleNamespace(should_save=True, local_process_index=0, save_total_limit=1, output_dir=str(run))
        self.args.save_checksums = True
        self.lab_settings = SimpleNamespace(keeps_nan=False)
        self.accelerator = SimpleNamespace(is_main_process=True, num_processes=1, wait_for_everyone=lambda: None)
        self.accelerator.process_index = 0
        self.state = TrainerState(global_step=4)
        self.recorder = SimpleNamespace(say=lambda words, level: self.events.append(words))
        self.events: list[str] = []

    def _get_output_dir(self, trial: Any = None) -> str:
        return str(self.run)

    def _push_from_checkpoint(self, folder: str) -> None:
        self.events.append(f"push {folder}")
        assert (Path(folder) / MARK).is_file()

    def ours(self, folder: Path, together: Any) -> None:
        (folder / "ours.json").write_text("{}")

    def stock(self, model: Any, trial: Any, then: Callable[[Path], None] = lambda folder: None) -> None:
        folder = Path(self._get_output_dir(trial=trial)) / f"checkpoint-{self.state.global_step}"
        save_file({"w": torch.zeros(64)}, folder / "model.safetensors")
        then(folder)
        if self.state.best_global_step == self.state.global_step:
            self.state.best_model_checkpoint = str(folder)
        self.state.save_to_json(str(folder / "trainer_state.json"))
        self._push_from_checkpoint(str(folder))
        self.events.append("written")


def nothing_beside(folder: Path) -> None:
    """A final model with nothing beside it."""


@pytest.fixture
def trainer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Saves:
    made = Saves(tmp_path)
    stock = checkpoint._prune

    def pruned(*args: Any) -> None:
        made.events.append("prune")
        stock(*args)

    monkeypatch.setattr(checkpoint, "_prune", pruned)
    return made


def test_written_moved_pushed_and_only_then_others_pruned(trainer: Saves) -> None:
    old, place, left = (trainer.run / name for name in ("checkpoint-2", "checkpoint-4", SAVING))
    old.mkdir()
    (left / "checkpoint-3").mkdir(parents=True)  # of a killed run
    trainer.state.best_global_step = 4

    def look(folder: Path) -> None:
        assert folder == left / "checkpoint-4"
        assert not place.exists()
        assert not (left / "checkpoint-3").exists()

    save_whole(trainer, None, None, lambda model, trial: trainer.stock(model, trial, look), trainer.ours)
    assert trainer.events == ["written", f"push {place}", "prune"]
    assert [path.name for path in trainer.run.iterdir()] == ["checkpoint-4"]
    mark = json.loads((place / MARK).read_text())
    assert mark["step"] == 4
    assert set(mark["files"]) == {"model.safetensors", "ours.json", "trainer_state.json"}
    weights = (place / "model.safetensors").read_bytes()
    assert mark["sha256"] == {"model.safetensors": sha256(sha256(weights).digest()).hexdigest()}
    assert mark["finite"] is True
    assert trainer.state.best_model_checkpoint == str(place)
    assert json.loads((place / "trainer_state.json").read_text())["best_model_checkpoint"] == str(place)


def test_the_best_is_one_that_was_written_before(trainer: Saves) -> None:
    """An evaluation after its checkpoint found it the best: transformers looks for it where it writes."""
    (trainer.run / "checkpoint-2").mkdir()
    trainer.state.best_global_step = 2
    save_whole(trainer, None, None, trainer.stock, trainer.ours)
    best = json.loads((trainer.run / "checkpoint-4" / "trainer_state.json").read_text())["best_model_checkpoint"]
    assert best == str(trainer.run / "checkpoint-2")
    assert (trainer.run / "checkpoint-2").is_dir()


def test_what_goes_is_what_transformers_would_remove(tmp_path: Path) -> None:
    """As far as the clock is right: those of an earlier training may have any step, those of this one come in order."""
    rng = random.Random(0)
    for number in range(60):
        run = tmp_path / str(number)
        steps = sorted(rng.sample(range(1, 200), rng.randint(1, 6)))
        newest = rng.choice(steps)
        written = [*(step for step in steps if step > newest), *(step for step in steps if step <= newest)]
        for age, step in enumerate(written):
            (run / f"checkpoint-{step}").mkdir(parents=True)
            os.utime(run / f"checkpoint-{step}", times=(age * 10.0, age * 10.0))
        limit = rng.choice((None, 0, 1, 2, 3))
        best = rng.choice((None, str(run / f"checkpoint-{rng.choice(steps)}"), str(run / "checkpoint-999")))
        before = {path.name for path in run.iterdir()}
        going = {path.name for path in surplus(run, limit, best, newest)}
        rotate_checkpoints(str(run), limit, best, use_mtime=True)
        assert {path.name for path in run.iterdir()} == before - going


def test_a_clock_that_was_set_back_removes_no_new_checkpoint(trainer: Saves) -> None:
    """Three hours, between two savings: by its time the new one was the oldest, and went as soon as it was written."""
    for step, hours in ((2, 0), (4, -3), (6, -3)):
        trainer.state.global_step = step
        save_whole(trainer, None, None, trainer.stock, trainer.ours)
        then = time.time() + hours * 3600
        os.utime(trainer.run / f"checkpoint-{step}", times=(then, then))
        assert [path.name for path in trainer.run.iterdir()] == [f"checkpoint-{step}"]
    trainer.args.save_total_limit, trainer.state.global_step = 2, 8

    def touched(model: Any, trial: Any) -> None:
        os.utime(trainer.run / "checkpoint-6")
        trainer.stock(model, trial)

    save_whole(trainer, None, None, touched, trainer.ours)
    assert sorted(path.name for path in trainer.run.iterdir()) == ["checkpoint-6", "checkpoint-8"]


@pytest.mark.parametrize("number", [math.nan, math.inf])
@pytest.mark.parametrize("file", ["model.safetensors", "critic/critic.safetensors", "optimizer.pt"])
def test_nan_gets_no_name_and_removes_no_other(file: str, number: float, trainer: Saves) -> None:
    """`save_total_limit: 1`: the last good checkpoint went for one of NaN."""
    trainer.state.global_step = 2
    save_whole(trainer, None, None, trainer.stock, trainer.ours)
    trainer.state.global_step, trainer.state.best_model_checkpoint = 4, "before"

    def broken(folder: Path) -> None:
        (folder / file).parent.mkdir(exist_ok=True)
        bad = {"w": torch.tensor([0.0, number])}
        torch.save(bad, folder / file) if file.endswith(".pt") else save_file(bad, folder / file)

    def saving() -> None:
        save_whole(trainer, None, None, lambda model, trial: trainer.stock(model, trial, broken), trainer.ours)

    trainer.events.clear()
    with pytest.raises(
        NumbersError,
        match=rf"checkpoint of step 4 is not kept: {file} holds NaN or infinities, in 1 of 1 tensors \(w\)",
    ):
        saving()
    assert [path.name for path in trainer.run.iterdir()] == ["checkpoint-2"]
    assert trainer.events == ["written"]
    assert trainer.state.best_model_checkpoint == "before"
    trainer.lab_settings.keeps_nan = True  # `guard: off`, said so
    saving()
    assert json.loads((trainer.run / "checkpoint-4" / MARK).read_text())["finite"] is False
    assert chosen(trainer, True) == str(trainer.run / "checkpoint-4")


def test_one_that_goes_leaves_its_name_in_one_move(trainer: Saves, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kill in the middle of the removal leaves nothing under its name."""
    old = trainer.run / "checkpoint-2"
    old.mkdir()
    stock = shutil.rmtree

    def killed(path: Any, **kwargs: Any) -> None:
        if any(Path(path).glob("checkpoint-2")):
            raise KeyboardInterrupt
        stock(path, **kwargs)

    monkeypatch.setattr(checkpoint.shutil, "rmtree", killed)
    with pytest.raises(KeyboardInterrupt):
        save_whole(trainer, None, None, trainer.stock, trainer.ours)
    assert not old.exists()
    assert (trainer.run / "checkpoint-4" / MARK).is_file()


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), RuntimeError("file write failed")])
def test_a_failure_leaves_what_was_there(error: Exception, trainer: Saves) -> None:
    (trainer.run / "checkpoint-2").mkdir()
    trainer.state.best_model_checkpoint = "before"

    def fails(_folder: Path) -> None:
        raise error

    with pytest.raises(CheckpointNotWritten, match=r"checkpoint-4 could not be written .*MiB are free") as caught:
        save_whole(trainer, None, None, lambda model, trial: trainer.stock(model, trial, fails), trainer.ours)
    assert str(error) in str(caught.value)
    assert [path.name for path in trainer.run.iterdir()] == ["checkpoint-2"]
    assert trainer.events == []
    assert trainer.state.best_model_checkpoint == "before"
    assert trainer._get_output_dir() == str(trainer.run)


def test_a_folder_that_cannot_be_written(trainer: Saves) -> None:
    """Root may write in any folder; a file in its place stops root, too."""
    (trainer.run / SAVING).write_text("")
    with pytest.raises(CheckpointNotWritten, match=r"NotADirectoryError|FileExistsError"):
        save_whole(trainer, None, None, trainer.stock, trainer.ours)


def test_a_run_folder_that_was_removed_is_not_made_anew(trainer: Saves, tmp_path: Path) -> None:
    """The end of a run stood there without its beginning, as a finished one."""
    trainer.run = gone = tmp_path / "run"
    trainer.args.output_dir, trainer.lab_settings.keeps_nan = str(gone), True
    saves = (
        lambda: save_whole(trainer, None, None, trainer.stock, trainer.ours),
        lambda: save_final(trainer, gone, nothing_beside),
    )
    for save in saves:
        with pytest.raises(CheckpointNotWritten, match="run is gone: it was removed while the run wrote into it"):
            save()
    assert not gone.exists()


def test_the_same_step_again_takes_the_place_of_the_first(trainer: Saves) -> None:
    for text in ("1", "2"):
        ours = lambda folder, _, text=text: (folder / f"ours-{text}.json").write_text(text)  # noqa: E731
        save_whole(trainer, None, None, trainer.stock, ours)
    place = trainer.run / "checkpoint-4"
    assert sorted(path.name for path in place.glob("ours*")) == ["ours-2.json"]
    assert [path.name for path in trainer.run.iterdir()] == ["checkpoint-4"]


def test_true_is_the_newest_whole_one(trainer: Saves) -> None:
    assert chosen(trainer, True) is True  # none there: transformers says so
    (trainer.run / "checkpoint-5").mkdir()
    with pytest.raises(ValueError, match=r"no checkpoint in .* is whole: checkpoint-5 \(no trainer_state.json"):
        chosen(trainer, True)
    assert [chosen(trainer, given) for given in (None, False, "there")] == [None, False, "there"]


def test_a_pickle_that_runs_a_command_is_refused_by_its_path_too(trainer: Saves) -> None:
    (place := trainer.run / "mine").mkdir()
    torch.save({"x": Path("/")}, place / "scheduler.pt")
    with pytest.raises(ValueError, match=r"mine: scheduler.pt names pathlib.*, which is not loaded from a file"):
        chosen(trainer, str(place))


def test_one_that_is_not_what_was_written_is_passed_over_and_refused(trainer: Saves) -> None:
    """``True`` goes on from the one before; a path that was asked for is an error. Without the list nothing is
    compared."""
    places = [trainer.run / f"checkpoint-{step}" for step in (4, 5)]
    trainer.args.save_total_limit = None
    for step, place in zip((4, 5), places, strict=True):
        trainer.state.global_step = step
        save_whole(trainer, None, None, trainer.stock, trainer.ours)
        save_file({"w": torch.zeros(64)}, place / "model.safetensors")
        (place / MARK).write_text(json.dumps(mark_of(place, step, checksums=trainer.args.save_checksums)))
    assert chosen(trainer, True) == str(places[1])
    file = places[1] / "model.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[:-9] + bytes([whole[-9] ^ 1]) + whole[-8:])
    assert what_is_broken(places[1]) is None, "its head and its length are right"
    assert chosen(trainer, True) == str(places[0])
    said, anew = trainer.events[-2:]
    assert said.endswith(
        "checkpoint-5 (model.safetensors is damaged: its content is not what was written (another checksum))"
    )
    assert "checkpoint-4 holds no optimizer.pt, rng_state.pth, scheduler.pt" in anew
    with pytest.raises(ValueError, match=r"checkpoint-5: model.safetensors is damaged"):
        chosen(trainer, str(places[1]))
    assert chosen(trainer, VerifiedCheckpoint(places[1])) == str(places[1])
    listed = json.loads((places[1] / MARK).read_text())
    del listed["sha256"]  # of an earlier version, or `save_checksums: false`
    (places[1] / MARK).write_text(json.dumps(listed))
    assert chosen(trainer, str(places[1])) == str(places[1])
    (places[1] / MARK).write_text("[]")
    with pytest.raises(ValueError, match=r"checkpoint-5: grpo_lab_checkpoint.json is damaged"):
        chosen(trainer, str(places[1]))


def test_a_checksum_is_of_all_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against the definition, with pieces of 5 bytes: SHA-256 of the pieces' SHA-256."""
    monkeypatch.setattr(checkpoints, "PIECE", 5)
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)  # macOS has none
    content = {"empty.pt": b"", "one.pt": b"12345", "more.pt": bytes(range(17))}
    for name, written in content.items():
        (tmp_path / name).write_bytes(written)
    found = checkpoints.checksums_of(tmp_path, list(content))
    for name, written in content.items():
        pieces = [sha256(written[at : at + 5]).digest() for at in range(0, len(written), 5)]
        assert found[name] == sha256(b"".join(pieces)).hexdigest(), name


def test_every_rank_goes_on_from_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One process of each node reads; where a node finds its newest one damaged, all take the one before."""
    two, four = tmp_path / "checkpoint-2", tmp_path / "checkpoint-4"
    others = [(four, []), (two, ["checkpoint-4 (optimizer.pt is damaged)"])]
    monkeypatch.setattr(going_on, "gather_object", lambda own: [*others, *own])
    assert newest_read(tmp_path, reads=False) == (two, ["checkpoint-4 (optimizer.pt is damaged)"])
    others.append((None, []))
    assert newest_read(tmp_path, reads=False)[0] is None


def test_a_final_model_that_cannot_be_written_says_where_it_is_kept(trainer: Saves, tmp_path: Path) -> None:
    """safetensors' error is no OSError; it came out as a traceback with exit code 1."""

    def full(_: str) -> None:
        raise SafetensorError("I/O error: No space left on device (os error 28)")

    trainer.save_model, trainer.lab_settings.keeps_nan = full, True
    with pytest.raises(
        CheckpointNotWritten, match=r"the trained model could not be written .*No space left .*there is no checkpoint"
    ):
        save_final(trainer, tmp_path, nothing_beside)
