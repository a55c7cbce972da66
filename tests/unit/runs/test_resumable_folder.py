"""What `--resume` takes for the same run, and which checkpoint it goes on from. Checkpoints are real files, cut
short."""

from __future__ import annotations

import errno
import json
import math
import os
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from datasets import Dataset
from safetensors.torch import save_file

from folders import ROWS, claim, job_in
from grpo_lab.evaluation import EvaluationResult
from grpo_lab.pipelines.open_run import _clear_after, set_aside
from grpo_lab.pipelines.run_folder import RunFolder, is_measured
from grpo_lab.pipelines.train import _evaluate, train
from grpo_lab.recipe.sections import Recipe, recipe_from
from grpo_lab.runs.differences import Difference, rows_fingerprint, versions
from grpo_lab.runs.folder import read_marker, write_run
from grpo_lab.runs.metrics import cut_metrics
from grpo_lab.runs.stop_requests import Interrupted, heed_stop_file
from grpo_lab.trainer.resume.state import STATE, write_state
from grpo_lab.trainer.resume.whole import MARK, mark_of, newest_whole, what_is_broken

WRITTEN: dict[str, Any] = {
    "name": "r",
    "model": {"path": "m", "expected": "none"},
    "data": {"loader": "gsm8k"},
    "rewards": [{"name": "accuracy", "mode": "strict", "weight": 1.0}],
    "evaluation": {"data": {"loader": "gsm8k", "split": "test"}},
    "learning_rate": 1e-3,
    "max_steps": 4,
    "objective": {"name": "dr_grpo", "epsilon": 0.2},
}


def given(folder: Path, **changes: Any) -> Recipe:
    return recipe_from({**WRITTEN, "output_dir": str(folder), **changes})


def begun(recipe: Recipe) -> Path:
    """The folder of a run of ``recipe`` that has made a step."""
    folder = claim(recipe, overwrite=False)
    (folder / "metrics.jsonl").write_text('{"step": 1, "loss": 1.0}\n')
    return folder


def save(folder: Path, step: int) -> Path:
    """A checkpoint as transformers leaves it, with small tensors."""
    place = folder / f"checkpoint-{step}"
    place.mkdir(parents=True)
    save_file({"w": torch.zeros(64)}, place / "model.safetensors", metadata={"format": "pt"})
    for name in ("optimizer.pt", "scheduler.pt", "rng_state.pth"):
        torch.save({"x": torch.zeros(64)}, place / name)
    (place / "trainer_state.json").write_text(json.dumps({"global_step": step, "max_steps": 9}))
    return place


def found(folder: Path, *changed: Difference, **record: Any) -> RunFolder:
    """The folder of a run that has made a step, of which ``run.json`` says ``record``."""
    return RunFolder(folder, {}, "", record=record, has_begun=True, changed=changed)


def test_a_flipped_bit_in_random_numbers_or_schedule_is_seen(tmp_path: Path) -> None:
    """torch reads them without looking at their checksums, or ends with an error that names no file."""
    place = save(tmp_path, 2)
    assert what_is_broken(place) is None
    file = place / "rng_state.pth"
    whole = file.read_bytes()
    at = whole.index(b"\0" * 256) + 128  # inside the 64 zeros
    for where in (at, whole.index(b"data.pkl") + 3):
        file.write_bytes(whole[:where] + bytes([whole[where] ^ 0x41]) + whole[where + 1 :])
        assert "rng_state.pth is" in str(what_is_broken(place))


def test_other_releases_are_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    newest = save(tmp_path, 2)
    now = versions()
    _clear_after(found(tmp_path, versions=now), newest, [])
    assert not caplog.records
    then = {name: value for name, value in now.items() if name != "trl"} | {"torch": "2.9.0"}
    _clear_after(found(tmp_path, versions=then), newest, [])
    assert f"torch 2.9.0 → {now['torch']}; trl not installed → {now['trl']}" in caplog.text


def test_a_stop_file_that_waits_for_a_resumed_run_is_heeded_once(tmp_path: Path) -> None:
    """Put there while the job stood in a queue: no step is made; the next start goes on."""
    file, config = tmp_path / "STOP", SimpleNamespace(stop_file=None, output_dir=str(tmp_path))
    heed_stop_file(config, tmp_path)
    file.touch()
    with pytest.raises(Interrupted, match=rf"stop file \({file} was there before this start, and is removed now\)"):
        heed_stop_file(config, tmp_path)
    heed_stop_file(config, tmp_path)


# -- settings ----------------------------------------------------------------------------------------------------------


def test_half_an_evaluation_before_the_training_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C left the answers that were there; a whole one is read."""
    made: list[str] = []

    def evaluated(model: str, section: Any, target: Path, **_: Any) -> EvaluationResult:
        made.append(model)
        EvaluationResult(()).write(target)
        return EvaluationResult(())

    monkeypatch.setattr("grpo_lab.pipelines.train.evaluate_saved_model", evaluated)
    target = tmp_path / "evaluation" / "before"
    evaluation = given(tmp_path).evaluation
    job: Any = SimpleNamespace(folder=tmp_path, evaluation=evaluation, config=SimpleNamespace(use_cpu=True, seed=0))
    EvaluationResult((), {"stopped": "after 2 of 4 greedy answers"}).write(target)
    for _ in range(2):
        if not is_measured(tmp_path):
            _evaluate(job, "start", "before")
        assert made == ["start"]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"max_steps": 8}, "max_steps: 4 → 8"),
        ({"num_train_epochs": 2}, "num_train_epochs: not set → 2"),
        ({"save_steps": 1, "logging_steps": 5}, "logging_steps: not set → 5"),
        ({"evaluation": {**WRITTEN["evaluation"], "n_samples": 4}}, "evaluation.n_samples: 0 → 4"),
        ({"evaluation": None}, "evaluation.batch_size: 128 → not set"),
        ({"name": "other"}, "name: 'r' → 'other'"),
        ({"model": {"path": "m", "expected": "50%"}}, "model.expected: 'none' → '50%'"),
        ({"eval_dataset": {"loader": "gsm8k"}, "eval_strategy": "steps"}, "eval_strategy: not set → 'steps'"),
    ],
)
def test_what_cannot_change_the_past_may_differ_and_is_listed(
    changes: dict[str, Any], said: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    claim(given(tmp_path / "o"), overwrite=False)
    claim(given(tmp_path / "o", **changes), overwrite=False)
    assert f"resumed with another setting: {said}" in caplog.text
    caplog.clear()
    claim(given(tmp_path / "o", **changes), overwrite=False)  # is now this run's
    assert not caplog.text


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"learning_rate": 2e-3}, "learning_rate: 0.001 → 0.002"),
        ({"objective": {"name": "dr_grpo", "epsilon": 0.1}}, "objective.epsilon: 0.2 → 0.1"),
        ({"rewards": [{"name": "accuracy", "mode": "lenient"}]}, "rewards.0.mode: 'strict' → 'lenient'"),
        ({"rewards": [{"name": "accuracy", "mode": "strict", "weight": 2}]}, "rewards.0.weight: 1.0 → 2.0"),
        ({"data": {"loader": "math"}}, "data.loader: 'gsm8k' → 'math'"),
        ({"model": {"path": "n", "expected": "none"}}, "model.path: 'm' → 'n'"),
        ({"callbacks": ["team:C"]}, "callbacks.0.name: not set → 'team:C'"),
        ({"seed": 1}, "seed: not set → 1"),
    ],
)
def test_the_rest_is_refused_by_name(changes: dict[str, Any], said: str, tmp_path: Path) -> None:
    begun(given(tmp_path / "o"))
    with pytest.raises(ValueError, match="other settings") as caught:
        claim(given(tmp_path / "o", max_steps=8, **changes), overwrite=False)
    assert said in str(caught.value)
    assert "max_steps" not in str(caught.value), "only what is refused is named"


def test_a_finished_run_is_opened_again_by_a_longer_one_only(tmp_path: Path) -> None:
    folder = claim(given(tmp_path / "o"), overwrite=False)
    write_run(folder, {**read_marker(folder / "run.json"), "finished": True, "trained": 4})
    claim(given(folder, logging_steps=2), overwrite=False)
    assert read_marker(folder / "run.json")["finished"] is True
    with pytest.raises(ValueError, match="trained run without a checkpoint"):
        claim(given(folder, max_steps=8), overwrite=False)
    save(folder, 4)
    claim(given(folder, max_steps=8), overwrite=False)
    assert read_marker(folder / "run.json")["finished"] is False
    assert "trained" not in read_marker(folder / "run.json")


def test_overwrite_and_resume_contradict(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="contradict"):
        RunFolder.open(given(tmp_path / "o"), overwrite=True, resume=True)


def test_another_evaluation_is_made_anew(tmp_path: Path) -> None:
    folder = claim(given(tmp_path / "o"), overwrite=False)
    (folder / "evaluation" / "before").mkdir(parents=True)
    claim(given(folder, max_steps=9), overwrite=False)
    assert (folder / "evaluation" / "before").is_dir()
    claim(given(folder, max_steps=9, evaluation={"data": {"loader": "math"}}), overwrite=False)
    assert not (folder / "evaluation").exists()


# -- checkpoints -------------------------------------------------------------------------------------------------------


def cut(name: str) -> Callable[[Path], None]:
    def half(place: Path) -> None:
        file = place / name
        file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])

    return half


def named_by(file: str) -> Callable[[Path], Any]:
    """A pickle that would run a command."""
    return lambda place: torch.save({"state": {}, "more": Runs()}, place / file)


class Runs:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("true",)


def holds(file: str, number: float) -> Callable[[Path], Any]:
    """One number of a tensor is NaN or infinite."""

    def plant(place: Path) -> None:
        bad = torch.zeros(64)
        bad[7] = number
        (place / file).parent.mkdir(exist_ok=True)
        if file.endswith(".safetensors"):
            save_file({"w": bad}, place / file)
        elif file.endswith(".distcp"):
            dcp.save({"w": bad, "step": 3}, checkpoint_id=(place / file).parent, no_dist=True)
        else:
            torch.save({"state": {0: {"exp_avg": bad}}, "param_groups": [{"lr": 1e-3}]}, place / file)

    return plant


def one_is_missing(place: Path) -> None:
    """A shard that has lost a tensor."""
    save_file({"w": torch.zeros(64)}, place / "model-1.safetensors")
    listed = {"weight_map": {"w": "model-1.safetensors", "bias": "model-1.safetensors"}}
    (place / "model.safetensors.index.json").write_text(json.dumps(listed))


DAMAGES: dict[str, Callable[[Path], Any]] = {
    "weights cut": cut("model.safetensors"),
    "optimizer cut": cut("optimizer.pt"),
    "random state cut": cut("rng_state.pth"),
    "state cut": cut("trainer_state.json"),
    "no state": lambda place: (place / "trainer_state.json").unlink(),
    "no weights": lambda place: (place / "model.safetensors").unlink(),
    "empty scheduler": lambda place: (place / "scheduler.pt").write_bytes(b""),
    "a shard is missing": lambda place: (place / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"w": "model-00001-of-00002.safetensors"}})
    ),
    "a record that is cut": lambda place: (place / STATE).write_text('{"version": 1, "ent'),
    "marked by transformers": lambda place: (place / "checkpoint-is-incomplete.txt").write_text("…"),
    "empty folder": lambda place: [file.unlink() for file in place.iterdir()],
    "no optimizer": lambda place: (place / "optimizer.pt").unlink(),
    "no schedule": lambda place: (place / "scheduler.pt").unlink(),
    "no random numbers": lambda place: (place / "rng_state.pth").unlink(),
    "a shard without a tensor": one_is_missing,
    **{f"{file} runs a command": named_by(file) for file in ("optimizer.pt", "scheduler.pt", "rng_state.pth")},
}
NOT_FINITE: dict[str, Callable[[Path], Any]] = {
    "weights, NaN": holds("model.safetensors", math.nan),
    "weights, infinite": holds("model.safetensors", -math.inf),
    "an adapter": holds("adapter_model.safetensors", math.nan),
    "a copy of an adapter": holds("ref/adapter_model.safetensors", math.nan),
    "a critic": holds("critic/critic.safetensors", math.nan),
    "a reference that has moved": holds("grpo_lab_reference/00000.safetensors", math.nan),
    "moments": holds("optimizer.pt", math.nan),
    "a learning rate": lambda place: torch.save(
        {"state": {}, "param_groups": [{"lr": math.nan}]}, place / "optimizer.pt"
    ),
    "FSDP's whole weights": holds("pytorch_model_fsdp.bin", math.nan),
    "FSDP's shards": holds("pytorch_model_fsdp_0/__0_0.distcp", math.nan),
    "FSDP's shards of moments": holds("optimizer_0/__0_0.distcp", math.inf),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_the_newest_whole_checkpoint_is_taken(damage: Callable[[Path], Any], tmp_path: Path) -> None:
    for step in (2, 9, 10):
        save(tmp_path, step)
    assert newest_whole(tmp_path) == (tmp_path / "checkpoint-10", [])
    damage(tmp_path / "checkpoint-10")
    newest, passed = newest_whole(tmp_path)
    assert newest == tmp_path / "checkpoint-9"
    assert len(passed) == 1
    assert passed[0].startswith("checkpoint-10 (")


@pytest.mark.parametrize("marked", [False, True], ids=["stock TRL's", "an earlier version's"])
@pytest.mark.parametrize("plant", NOT_FINITE.values(), ids=NOT_FINITE)
def test_one_with_nan_is_passed_over(plant: Callable[[Path], Any], marked: bool, tmp_path: Path) -> None:
    """A run on NaN weights wrote it, and it was what `--resume` took, for ever."""
    for step in (9, 10):
        place = save(tmp_path, step)
    plant(place)
    if marked:
        mark = mark_of(place, 10)
        mark.pop("finite", None)
        (place / MARK).write_text(json.dumps(mark))
    newest, passed = newest_whole(tmp_path, read=True)
    assert newest == tmp_path / "checkpoint-9"
    assert len(passed) == 1
    assert re.match(r"checkpoint-10 \(\S+ holds NaN or infinities, in 1 of \d+ tensors \(\S+\)\)$", passed[0]), passed


def test_infinite_rows_of_an_open_batch_are_no_fault(tmp_path: Path) -> None:
    place = save(tmp_path, 3)
    holds("grpo_lab_generation_0.safetensors", -math.inf)(place)
    assert newest_whole(tmp_path, read=True) == (place, [])


def test_broken_checkpoints_are_set_aside_not_removed(tmp_path: Path) -> None:
    """Left in place, files of the broken one would stay among those that are written there next."""
    for step in (2, 4, 6):
        save(tmp_path, step)
    for _ in range(2):
        set_aside(tmp_path, tmp_path / "checkpoint-2")
        save(tmp_path, 4)
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {
        "checkpoint-2", "checkpoint-4", "broken-checkpoint-4", "broken-checkpoint-4-2", "broken-checkpoint-6",
    }  # fmt: skip


def test_none_is_whole(tmp_path: Path) -> None:
    assert newest_whole(tmp_path) == (None, [])
    place = save(tmp_path, 3)
    (tmp_path / "checkpoint-final").mkdir()
    cut("optimizer.pt")(place)
    newest, passed = newest_whole(tmp_path)
    assert newest is None
    assert passed == ["checkpoint-3 (optimizer.pt is not whole)"]


def test_a_checkpoint_without_an_optimizer_is_whole_where_only_the_model_was_saved(tmp_path: Path) -> None:
    place = save(tmp_path, 3)
    for name in ("optimizer.pt", "scheduler.pt", "rng_state.pth"):
        (place / name).unlink()
    assert what_is_broken(place) is None  # `save_only_model`


def test_a_listed_file_that_is_missing_or_cut_is_seen(tmp_path: Path) -> None:
    """Shards of FSDP have no list of their own. A text edited by hand and a file more are fine."""
    place = save(tmp_path, 3)
    shard = place / "optimizer_0" / "__1_0.distcp"
    shard.parent.mkdir()
    shard.write_bytes(b"0" * 100)
    write_state(place, {"kl": {"coefficient": 0.1}})
    (place / MARK).write_text(json.dumps(mark_of(place, 3)))
    assert what_is_broken(place) is None
    write_state(place, {})
    (place / "trainer_state.json").write_text('{"global_step": 3}')
    (place / "notes.txt").write_text("of the team's")
    assert what_is_broken(place) is None
    shard.write_bytes(b"0" * 99)
    assert what_is_broken(place) == "optimizer_0/__1_0.distcp has 99 bytes of 100"
    shard.unlink()
    assert what_is_broken(place) == "optimizer_0/__1_0.distcp is missing"


# -- what the recipe does not say --------------------------------------------------------------------------------------


def test_other_rows_or_another_number_of_processes_are_another_run(tmp_path: Path) -> None:
    again = Dataset.from_dict({"prompt": ["a", "b"], "solution": ["1", "2"]})
    changed = Dataset.from_dict({"prompt": ["a", "b"], "solution": ["1", "3"]})
    then: dict[str, Any] = {"rows": rows_fingerprint(ROWS), "processes": 2, "finished": False}

    def asked(folder: RunFolder, rows: Any, processes: int, max_steps: int = 4) -> Any:
        return folder.rows_to_train(job_in(tmp_path, max_steps, rows), processes)

    run = found(tmp_path, **then)
    assert asked(run, again, 2) == then["rows"]
    with pytest.raises(ValueError, match=r"has changed since: 2 rows \(.*→ 2 rows"):
        asked(run, changed, 2)
    with pytest.raises(ValueError, match=r"has changed since"):
        asked(run, again.select([1, 0]), 2)
    with pytest.raises(ValueError, match=r"by 2 process\(es\), and this is 4"):
        asked(run, again, 4)
    assert asked(found(tmp_path, **then, trained=4), changed, 1) is None  # only the evaluation is left
    with pytest.raises(ValueError, match="has changed since"):
        asked(found(tmp_path, Difference("max_steps", 4, 8), **then, trained=4), changed, 2, 8)
    asked(found(tmp_path, finished=False), changed, 1)  # of an earlier version, which wrote neither
    asked(replace(run, has_begun=False), changed, 4)  # it failed before its first step


def read_only(**_: Any) -> None:
    raise OSError(errno.EROFS, "read-only")


def test_an_output_folder_that_cannot_be_written_is_said_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"`output_dir` .*cannot be written: .*file: that is no folder"):
        claim(given(tmp_path / "file" / "o"), overwrite=False)
    (tmp_path / "link").symlink_to("gone")  # `mkdir` says of it that it exists
    for folder in (tmp_path / "link", tmp_path / "link" / "o"):
        with pytest.raises(ValueError, match=r"cannot be written: .*link: that is a link which leads nowhere; choose"):
            claim(given(folder), overwrite=False)
    (tmp_path / "gone").mkdir()
    claim(given(tmp_path / "link" / "o"), overwrite=False)
    assert (tmp_path / "gone" / "o" / "run.json").is_file()
    monkeypatch.setattr("tempfile.TemporaryFile", read_only)  # root may write everywhere
    with pytest.raises(
        ValueError, match=r"cannot be written: .*nothing may be written there \(read-only\); choose another"
    ):
        claim(given(tmp_path / "o"), overwrite=False)
    assert not (tmp_path / "o").exists()


def test_metrics_of_steps_that_are_done_again_go(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    lines = [json.dumps({"step": step, "loss": 1.0}) + "\n" for step in (1, 2, 3, 3, 4)]
    file.write_text("".join(lines) + '{"step": 5, "lo')
    cut_metrics(file, 3)
    assert file.read_text() == "".join(lines[:4])
    cut_metrics(file, -1)
    assert file.read_text() == ""
    cut_metrics(tmp_path / "none.jsonl", 3)


@pytest.mark.parametrize(
    ("line", "why"),
    [('{"step": 2, "lo', "not JSON"), ('{"step": "2"}', '"2"; it must be a whole number'), ("[2]", "[2]")],
)
def test_a_damaged_line_among_metrics_that_stay_is_named(line: str, why: str, tmp_path: Path) -> None:
    """It was left out without a word, and with it the step's numbers."""
    file = tmp_path / "metrics.jsonl"
    file.write_text(f'{{"step": 1}}\n{line}\n{{"step": 3}}\n')
    with pytest.raises(ValueError, match=r"metrics\.jsonl, line 2: .*: remove that line") as caught:
        cut_metrics(file, 3)
    assert why in str(caught.value)
    cut_metrics(file, 1)
    assert file.read_text() == '{"step": 1}\n'


def test_an_evaluation_that_is_made_again_is_not_there_twice(tmp_path: Path) -> None:
    """Its checkpoint says that it is due: the run was killed after it, whether made or not."""
    file, place = tmp_path / "metrics.jsonl", save(tmp_path, 2)
    lines = [
        json.dumps(row) + "\n"
        for row in ({"step": 1, "eval_loss": 0.1}, {"step": 2, "loss": 1.0}, {"step": 2, "eval_loss": 0.2})
    ]
    for due, left in ((False, 3), (True, 2)):
        if due:
            write_state(place, {"evaluation_due": {"step": 2}})
        file.write_text("".join(lines))
        _clear_after(found(tmp_path), place, [])
        assert file.read_text() == "".join(lines[:left])


@pytest.mark.parametrize(
    ("changes", "flags", "said"),
    [
        ({"max_steps": 2}, {"resume": True}, "has done 4 steps"),
        (
            {"evaluation": {"data": {"loader": "word_problems", "n": 4, "split": "dev"}}},
            {"resume": True},
            "`split` is 'dev'",
        ),
        ({"data": {"loader": "word_problems", "nn": 8}}, {"overwrite": True}, "has no setting 'nn'; did you mean 'n'"),
    ],
)
def test_a_mistake_leaves_the_run_in_the_folder_as_it_was(
    changes: dict[str, Any], flags: dict[str, bool], said: str, tmp_path: Path
) -> None:
    """It was claimed first: the finished run was open again, its evaluations, with `--overwrite` its checkpoints, were
    gone."""
    rows = {"loader": "word_problems", "n": 4}
    model = {"tiny": {"hidden_size": 16, "num_layers": 1}}
    written = {"model": model, "data": rows, "evaluation": {"data": rows}, "bf16": False, "use_cpu": True}
    written["max_completion_length"] = 8
    folder = claim(given(tmp_path / "o", **written), overwrite=False)
    write_run(folder, {**read_marker(folder / "run.json"), "finished": True, "trained": 4})
    save(folder, 4)
    (folder / "evaluation" / "before").mkdir(parents=True)
    (folder / "evaluation" / "before" / "summary.json").write_text("{}")
    there = {file: file.read_bytes() for file in folder.rglob("*") if file.is_file()}
    with pytest.raises(ValueError, match=said):
        train(given(folder, **{**written, **changes}), **flags)
    assert {file: file.read_bytes() for file in folder.rglob("*") if file.is_file()} == there
