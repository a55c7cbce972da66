"""Whose output folder it is: what a run may be resumed with, and what ``--overwrite`` leaves behind."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from folders import claim, job_in
from grpo_lab.pipelines.open_run import claimed
from grpo_lab.pipelines.run_folder import RunFolder, State, ask_main_process
from grpo_lab.pipelines.same_run import fingerprint
from grpo_lab.recipe.sections import DataSection, ModelSection, Recipe
from grpo_lab.runs.differences import earlier_run, plain_settings
from grpo_lab.runs.folder import read_marker, write_run


def recipe(folder: Path, **arguments: Any) -> Recipe:
    return Recipe(
        "r",
        ModelSection(path="m"),
        DataSection("gsm8k", "chat"),
        (),
        arguments={"output_dir": str(folder), **arguments},
    )


def hash_of(asked: Recipe) -> str:
    return fingerprint(plain_settings(asked))


def is_begun(asked: Recipe, overwrite: bool = False, resume: bool = False) -> bool:
    return RunFolder.open(asked, overwrite, resume).state is not State.NEW


def test_another_server_address_is_the_same_run(tmp_path: Path) -> None:
    one = recipe(tmp_path, use_vllm=True, vllm_mode="server", vllm_server_base_url="http://127.0.0.1:8000")
    other = recipe(tmp_path, use_vllm=True, vllm_mode="server", vllm_server_base_url="http://127.0.0.1:9000")
    assert hash_of(one) == hash_of(other)
    assert hash_of(one) != hash_of(replace(one, arguments={**one.arguments, "vllm_mode": "colocate"}))
    assert hash_of(one) != hash_of(recipe(tmp_path, learning_rate=1e-3))


def test_a_run_whose_start_failed_can_be_resumed(tmp_path: Path) -> None:
    """A server that is never up is noticed after the cold start: its minutes must not be lost. The same command goes
    on."""
    first = recipe(tmp_path / "out", learning_rate=1e-3)
    assert not is_begun(first, overwrite=False, resume=True)
    folder = claim(first, overwrite=False)
    (folder / "cold_start").mkdir()
    assert is_begun(first, overwrite=False, resume=False)
    claim(first, overwrite=False)
    assert (folder / "cold_start").is_dir()
    assert not is_begun(first, overwrite=True, resume=False)


def test_a_run_that_failed_before_its_first_step_leaves_its_folder_to_a_mended_recipe(tmp_path: Path) -> None:
    """It kept it shut: "other settings, give --overwrite"; nothing that was trained is in it. Its cold start may have
    followed from what was mended: it stands beside."""
    out = tmp_path / "out"
    folder = claim(recipe(out, learning_rate=1e-3), overwrite=False)
    write_run(folder, {**read_marker(folder / "run.json"), "parameters": 9, "processes": 2})
    (folder / "cold_start").mkdir()
    (folder / "evaluation" / "before").mkdir(parents=True)
    mended = recipe(out, learning_rate=2e-3)
    assert not is_begun(mended, overwrite=False, resume=True)
    claim(mended, overwrite=False)
    assert read_marker(folder / "run.json")["fingerprint"] == hash_of(mended)
    assert {one.name for one in folder.iterdir() if one.is_dir()} == {"cold_start.before-1", "evaluation.before-1"}


@pytest.mark.parametrize("made", ["metrics.jsonl", "checkpoint-2", "broken-checkpoint-2", "config.json", "trained"])
def test_a_run_that_has_made_a_step_keeps_its_folder(made: str, tmp_path: Path) -> None:
    folder = claim(recipe(tmp_path / "out", learning_rate=1e-3), overwrite=False)
    if made == "trained":
        write_run(folder, {**read_marker(folder / "run.json"), "trained": 3})
    elif "checkpoint" in made:
        (folder / made).mkdir()
    else:
        (folder / made).write_text('{"step": 1}\n')
    with pytest.raises(ValueError, match="other settings"):
        RunFolder.open(recipe(tmp_path / "out", learning_rate=2e-3))


def test_a_run_that_another_process_began_meanwhile_is_not_written_over(tmp_path: Path) -> None:
    """The folder is locked when the rows are loaded: it may not be what was looked at any more."""
    folder = RunFolder.open(recipe(tmp_path / "out"))
    claim(recipe(tmp_path / "out", learning_rate=1e-3))
    there = {file: file.read_bytes() for file in folder.place.iterdir()}
    with pytest.raises(ValueError, match="another process wrote into"), claimed(folder, job_in(folder.place)):
        pass
    assert {file: file.read_bytes() for file in folder.place.iterdir()} == there


@pytest.mark.parametrize("refused", [False, True])
def test_another_process_has_the_answer_of_the_main_one(refused: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each asked for itself, and may have found what the main one had just written; or waited for one that was gone."""
    home = "grpo_lab.pipelines.run_folder"
    said = ValueError("is in use") if refused else "an answer"
    monkeypatch.setattr(f"{home}.PartialState", lambda: SimpleNamespace(is_main_process=False))
    monkeypatch.setattr(f"{home}.gather_object", lambda own: [said, *own])
    with pytest.raises(ValueError, match="is in use") if refused else nullcontext():
        assert ask_main_process(lambda: pytest.fail("it asked itself")) == said


def test_commands_that_failed_before_they_wrote_anything_leave_their_folder_too(tmp_path: Path) -> None:
    """`rounds`, `long2short`: the marker alone kept a mended recipe out."""
    out = tmp_path / "out"
    (out / "start").mkdir(parents=True)
    write_run(out, {"pipeline": "rounds", "recipe": {"seed": 1}})
    asked = SimpleNamespace(output_dir=out)
    assert earlier_run(asked, "rounds", False, lambda _: {"seed": 2}) == {}
    (out / "start" / "metrics.jsonl").write_text("{}\n")
    with pytest.raises(ValueError, match=r"other settings: seed: 1 → 2"):
        earlier_run(asked, "rounds", False, lambda _: {"seed": 2})


def test_overwrite_leaves_no_checkpoint_and_no_evaluation_of_the_run_before(tmp_path: Path) -> None:
    """Resuming takes the highest number: a checkpoint-60 left behind would win over this run's checkpoint-8. A resume,
    or a report of the run that was killed next, took an evaluation that was left for its own."""
    folder = claim(recipe(tmp_path / "out"), overwrite=False)
    (folder / "checkpoint-60").mkdir()
    (folder / "evaluation" / "after").mkdir(parents=True)
    claim(recipe(tmp_path / "out", learning_rate=2e-3), overwrite=True)
    assert not (folder / "checkpoint-60").exists()
    assert not (folder / "evaluation").exists()


def test_overwrite_leaves_no_critic_of_the_run_before_but_the_one_it_starts_from(tmp_path: Path) -> None:
    """A critic beside the policy of another run would be taken for that policy's."""
    out = tmp_path / "out"
    claim(recipe(out), overwrite=False)
    for start in (out / "critic", out / "checkpoint-60" / "critic"):
        for value in (str(start), {"model": str(start)}):
            start.mkdir(parents=True, exist_ok=True)
            claim(recipe(out, value=value), overwrite=True)
            assert start.is_dir()
    (out / "critic").mkdir()
    claim(recipe(out, value={"model": "head"}), overwrite=True)
    assert not (out / "critic").exists()
    assert not (out / "checkpoint-60").exists()
