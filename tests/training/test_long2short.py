"""`grpo-lab long2short`: the four ways from end to end on a tiny model, and the two pair losses against their
formulas."""

from __future__ import annotations

import json
import os
import shutil
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

from grpo_lab.evaluation import EvaluationResult
from grpo_lab.finite import NumbersError
from grpo_lab.pipelines import long2short as pipeline
from grpo_lab.pipelines.long2short import long2short, long2short_recipe_from
from grpo_lab.recipe.yaml import read_yaml
from grpo_lab.runs.stage import Workspace
from grpo_lab.runs.stop_requests import Interrupted, StopRequests
from grpo_lab.settings import read
from grpo_lab.stages.held_out import Evaluate
from grpo_lab.stages.supervised import Distill, Dpo
from grpo_lab.testing import tiny_model
from grpo_lab.trainer.resume.state import write_state
from grpo_lab.trainer.supervised.methods import train_by
from grpo_lab.trainer.supervised.stoppable import StoppableTraining, TrainingStopped
from tolerance import unit_roundoff

#: two products and a sum, each rounded, in two computations that may fuse them or not: 6 roundings at most
U = unit_roundoff(torch.float32)
RECIPES = Path(__file__).resolve().parents[2] / "recipes"
DATA = {"loader": "word_problems", "n": 12, "template": "chat", "largest": 20, "steps": [1, 2]}
TRAINING = {"max_steps": 2, "per_device_train_batch_size": 4, "learning_rate": 1e-2, "bf16": False, "max_length": 256}


def recipe(folder: Path, measured_by: Path, method: str, **changes: Any) -> Any:
    written = {
        "name": "a-test",
        "method": method,
        "model": {"path": str(measured_by)},
        "data": DATA,
        "reward": "training.curation_rewards:by_digest",
        "n_samples": 6,
        "max_completion_length": 12,
        "use_cpu": True,
        "training": TRAINING,
        "evaluation": {"data": {**DATA, "n": 4, "split": "test"}, "max_new_tokens": 8, "batch_size": 4},
        "output_dir": str(folder / method),
    }
    return long2short_recipe_from({name: value for name, value in {**written, **changes}.items() if value is not None})


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


@pytest.mark.slow
def test_four_ways_leave_a_model_and_both_evaluations(
    tiny_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    start = weights(tiny_folder)
    for method in ("shortest_sft", "dpo", "simpo"):
        done = long2short(recipe(tmp_path, tiny_folder, method))
        rows = [json.loads(line) for line in (done.folder / "rows.jsonl").read_text().splitlines()]
        assert len(rows) == done.rows > 0
        if method == "shortest_sft":
            assert len(rows) <= 12
            assert all(row["length"] > 0 for row in rows)
        else:
            assert all(
                row["rejected_because"] == "wrong" or row["rejected_length"] >= 1.5 * row["chosen_length"]
                for row in rows
            )
        assert any(not torch.equal(value, start[name]) for name, value in weights(done.folder).items())
        assert done.before is not None
        assert done.after is not None
        assert (done.folder / "evaluation" / "after" / "outcomes.parquet").is_file()
    sft = tmp_path / "shortest_sft"
    merged = long2short(
        recipe(tmp_path, tiny_folder, "merge", data=None, training=None, short_model=str(sft), alpha=0.25)
    )
    swapped = []
    for name, value in weights(merged.folder).items():
        parts = 0.25 * start[name], 0.75 * weights(sft)[name]
        assert ((value - parts[0] - parts[1]).abs() <= 6 * U * (parts[0].abs() + parts[1].abs())).all()
        gap = (value - 0.75 * start[name] - 0.25 * weights(sft)[name]).abs().max().item()
        swapped.append(gap / (6 * U * value.abs().max().item()))
    assert max(swapped) > 100, "alpha for 1 − alpha must be seen"
    made = (sft / "model.safetensors").stat()
    again = long2short(recipe(tmp_path, tiny_folder, "shortest_sft"))
    assert "is finished: nothing to do" in capsys.readouterr().out
    assert (again.rows, again.after) == (
        len((sft / "rows.jsonl").read_text().splitlines()),
        EvaluationResult.read(sft / "evaluation" / "after"),
    )
    assert (sft / "model.safetensors").stat() == made
    with pytest.raises(ValueError, match=r"holds a run with other settings: temperature: 1\.0 → 0\.5\. Choose"):
        long2short(recipe(tmp_path, tiny_folder, "shortest_sft", temperature=0.5))


class Logs(TrainerCallback):  # type: ignore[misc]
    """What is logged, without times."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        times = ("train_runtime", "train_samples_per_second", "train_steps_per_second", "step_time")
        self.rows.append({"step": state.global_step, **{name: one for name, one in logs.items() if name not in times}})


PAIRS = [
    {"prompt": f"What is {n} and {n}? ", "chosen": f"It is {2 * n}.", "rejected": f"{n} and {n} are not {2 * n + 1}, "
        "I think."}
    for n in range(5)
]  # fmt: skip


def train_on_pairs(
    method: Any, model: Any, tokenizer: Any, folder: Path, arguments: dict[str, Any], callback: Any, training: Any
) -> None:
    rows = PAIRS
    if method == "shortest_sft":
        method = "sft"
        rows = [{"prompt": row["prompt"], "completion": row["chosen"]} for row in PAIRS]
    train_by(method, model, tokenizer, Dataset.from_list(rows), folder, arguments, [callback], train=training)


@pytest.mark.slow
@pytest.mark.thorough(cases=["shortest_sft", "simpo"])
@pytest.mark.parametrize("method", ["shortest_sft", "dpo", "simpo", "distill"])
def test_a_training_that_is_asked_to_stop_goes_on_to_the_bit(method: Any, tiny_folder: Path, tmp_path: Path) -> None:
    """Three steps an epoch (of distillation two): stopped inside a logging window, at an epoch's end; at the last step
    it is not answered."""
    arguments = {**TRAINING, "per_device_train_batch_size": 2, "max_steps": 7, "logging_steps": 4, "use_cpu": True}

    def trained(name: str, asked: Any = None, identity: str = "this") -> tuple[Path, list[dict[str, Any]], Any]:
        model, tokenizer = AutoModelForCausalLM.from_pretrained(tiny_folder), AutoTokenizer.from_pretrained(tiny_folder)
        logs, folder = Logs(), tmp_path / name
        training = None if asked is None else StoppableTraining(folder / "stopped", identity, asked)
        if method == "distill":
            mine = {name: value for name, value in arguments.items() if name != "max_length"}
            mine |= {"max_completion_length": 8, "gradient_accumulation_steps": 2, "per_device_train_batch_size": 1}
            rows, teacher = Dataset.from_list(PAIRS), tiny_model(seed=1)[0].eval()
            train_by("distill", model, tokenizer, rows, folder, mine, [logs], train=training, teacher_model=teacher)
        else:
            train_on_pairs(method, model, tokenizer, folder, arguments, logs, training)
        return folder, logs.rows, training

    whole, rows, _ = trained("whole")
    found = []
    for steps in (2, 1):  # of the process: it stops after the second step, then after the third
        left = iter([*(False,) * (steps - 1), True])
        with pytest.raises(TrainingStopped):
            trained("stopped", lambda left=left: next(left))
        found += [place.name for place in (tmp_path / "stopped" / "stopped").iterdir()]
    assert found == ["checkpoint-2", "checkpoint-3"]
    asked: list[int] = []
    again, rest, training = trained("stopped", lambda: asked.append(1))
    assert len(asked) == 3, "not after the last step"
    assert rest == rows
    assert (again / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()
    training.done()
    assert not (again / "stopped").exists()


@pytest.mark.not_fast
def test_a_distillation_ends_with_its_tokens_and_refuses_another_vocabulary(tiny_folder: Path, tmp_path: Path) -> None:
    """Two prompts a step, of 8 tokens each: 40 are there after the third; a log of two steps sees them at the
    fourth."""
    settings = {"max_steps": 9, "per_device_train_batch_size": 2, "max_completion_length": 8, "bf16": False}
    settings |= {"use_cpu": True, "logging_steps": 2, "generation_kwargs": {"min_new_tokens": 8}}
    data = {"loader": "word_problems", "n": 8, "template": "chat"}
    written = {"model": str(tiny_folder), "teacher": str(tiny_folder), "data": data, "tokens": 40, **settings}
    facts = read(Distill, written, "stages.d").run(Workspace(tmp_path, StopRequests(tmp_path)))
    assert (facts["steps"], facts["tokens"]) == (4, 64)
    tokenizer = AutoTokenizer.from_pretrained(tiny_folder)
    tokenizer.add_tokens(["<another>"])
    shutil.copytree(tiny_folder, tmp_path / "teacher")
    tokenizer.save_pretrained(tmp_path / "teacher")
    other = read(Distill, {**written, "teacher": str(tmp_path / "teacher")}, "stages.d")
    with pytest.raises(ValueError, match="whose tokenizer has other tokens than that of"):
        other.run(Workspace(tmp_path, StopRequests(tmp_path)))


@pytest.mark.not_fast
@pytest.mark.parametrize("at", ["shutil.move", "write_report"])
def test_a_merge_that_is_killed_leaves_nothing_behind(
    at: str, tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder in which the average is made had another name each time, and stayed; a run without its page was
    finished."""
    given: dict[str, Any] = {"data": None, "training": None, "evaluation": None, "short_model": str(tiny_folder)}

    def names(folder: str) -> list[str]:
        return sorted(path.relative_to(tmp_path / folder).as_posix() for path in (tmp_path / folder).rglob("*"))

    if (child := os.fork()) == 0:
        monkeypatch.setattr(f"grpo_lab.pipelines.long2short.{at}", lambda *_: os._exit(9))
        long2short(recipe(tmp_path / "killed", tiny_folder, "merge", **given))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    long2short(recipe(tmp_path / "killed", tiny_folder, "merge", **given))
    long2short(recipe(tmp_path / "whole", tiny_folder, "merge", **given))
    assert names("killed") == names("whole")


@pytest.mark.slow
@pytest.mark.thorough(but="dpo")
@pytest.mark.parametrize("method", ["shortest_sft", "dpo", "simpo"])
def test_nan_is_no_trained_model_and_no_checkpoint(method: Any, tiny_folder: Path, tmp_path: Path) -> None:
    """The optimizer breaks the last step, or the one after which it is asked to stop: neither is kept."""

    class Breaks(TrainerCallback):
        def on_pre_optimizer_step(self, args: Any, state: Any, *_: Any, optimizer: Any = None, **__: Any) -> None:
            if state.global_step == 1:
                optimizer.param_groups[0]["lr"] = float("nan")

    def trained(steps: int) -> None:
        model, tokenizer = AutoModelForCausalLM.from_pretrained(tiny_folder), AutoTokenizer.from_pretrained(tiny_folder)
        training = StoppableTraining(tmp_path / "stopped", "this", lambda: model.lm_head.weight.isnan().any())
        arguments = {**TRAINING, "per_device_train_batch_size": 2, "use_cpu": True, "max_steps": steps}
        train_on_pairs(method, model, tokenizer, tmp_path, arguments, Breaks(), training)

    with pytest.raises(NumbersError, match="the weights that the training has left hold NaN"):
        trained(2)
    with pytest.raises(NumbersError, match="asked to stop after step 2, and nothing is kept of it"):
        trained(3)
    assert list(tmp_path.rglob("*.safetensors")) == []


def test_a_stopped_training_on_other_rows_is_not_gone_on_with(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    place = tmp_path / "checkpoint-3"
    place.mkdir()
    save_file({"w": torch.zeros(2)}, place / "model.safetensors")
    (place / "trainer_state.json").write_text('{"global_step": 3}')
    write_state(place, {"training": {"identity": "one"}})
    assert StoppableTraining(tmp_path, "one", lambda: None).step == 3
    assert StoppableTraining(tmp_path, "other", lambda: None).step == 0
    assert "is of a training on other rows or settings" in caplog.text


@pytest.mark.slow
def test_asked_to_stop_it_goes_on_with_what_is_done(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By SIGTERM in the training, then in the last evaluation: nothing is measured, sampled or trained twice."""
    whole = long2short(recipe(tmp_path / "whole", tiny_folder, "dpo"))
    calls: list[str] = []
    measure, train = Evaluate.measured, Dpo.run

    def measured(kind: Evaluate, target: Path) -> Any:
        calls.append(target.name)
        if target.name == "after" and calls.count("after") == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return measure(kind, target)

    def trained(kind: Dpo, workspace: Workspace, **more: Any) -> Any:
        calls.append("train")
        if calls.count("train") == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return train(kind, workspace, **more)

    monkeypatch.setattr(Evaluate, "measured", measured)
    monkeypatch.setattr(Dpo, "run", trained)
    stopped = recipe(tmp_path / "stopped", tiny_folder, "dpo")
    for _ in range(2):
        with pytest.raises(Interrupted, match=r"SIGTERM: stopped .* can be gone on with by the same command"):
            long2short(stopped)
    (stopped.output_dir / "STOP").touch()
    with pytest.raises(Interrupted, match="was there before this start"):
        long2short(stopped)
    done = long2short(stopped)
    assert calls == ["before", "train", "train", "after", "after"]
    assert done.rows == whole.rows
    for name in ("model.safetensors", "rows.jsonl", "samples.jsonl", "evaluation/after/outcomes.jsonl"):
        assert (done.folder / name).read_bytes() == (whole.folder / name).read_bytes(), name
    assert not (done.folder / "stopped").exists()


def test_overwrite_samples_anew_and_leaves_a_shared_file(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = recipe(tmp_path, tiny_folder, "shortest_sft", evaluation=None)
    written.output_dir.mkdir()
    own, shared = written.output_dir / "samples.jsonl", tmp_path / "shared.jsonl"
    own.write_text("kept")
    shared.write_text("kept")
    (written.output_dir / "run.json").write_text(json.dumps({"pipeline": "long2short", "finished": False}))
    monkeypatch.setattr(pipeline, "carry_out", lambda *_: None)
    monkeypatch.setattr(pipeline, "write_report", lambda folder: folder)
    long2short(replace(written, samples=str(shared)), overwrite=False)
    assert own.is_file()
    long2short(replace(written, samples=str(shared)), overwrite=True)
    assert not own.exists()
    assert shared.read_text() == "kept"


@pytest.mark.parametrize(
    ("method", "changes", "message"),
    [
        ("merging", {}, "`method` is 'merging'"),
        ("merge", {"data": None, "training": None}, "`short_model` is needed"),
        ("merge", {"short_model": "x"}, "`data` is needed to sample on, and has no effect with `method: merge`"),
        ("merge", {"short_model": "x", "data": None}, "`training` has no effect"),
        ("dpo", {"data": None}, "`data` is needed"),
        ("shortest_sft", {"pairs": {"ratio": 2}}, "`pairs` has no effect"),
        ("dpo", {"pairs": {"ratoi": 2}}, "did you mean 'ratio'"),
        ("dpo", {"n_sampels": 2}, "did you mean 'n_samples'"),
    ],
)
def test_mistakes_are_named(tmp_path: Path, method: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        recipe(tmp_path, tmp_path, method, **changes)


def test_models_that_cannot_be_merged_are_said_before_the_first_evaluation(tiny_folder: Path, tmp_path: Path) -> None:
    """A hub name "holds neither model.safetensors nor …", after a whole evaluation."""
    given = {"short_model": str(tiny_folder), "data": None, "training": None}
    written = recipe(tmp_path, tmp_path, "merge", **{**given, "model": {"path": "Qwen/Qwen2.5-1.5B-Instruct"}})
    with pytest.raises(ValueError, match=r"Qwen/Qwen2.5-1.5B-Instruct is no folder here"):
        long2short(written)
    assert not written.output_dir.exists()


@pytest.mark.slow
def test_a_misspelt_training_setting_and_no_rows_are_named(tiny_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="`training` has no setting 'learning_rat'; did you mean 'learning_rate'"):
        long2short(recipe(tmp_path, tiny_folder, "dpo", training={"learning_rat": 1}, evaluation=None))
    with pytest.raises(ValueError, match="`method: shortest_sft`: no row to train on"):
        long2short(recipe(tmp_path, tiny_folder, "shortest_sft", reward={"name": "accuracy"}, evaluation=None))


@pytest.mark.parametrize("path", sorted(RECIPES.glob("*/long2short_*.yaml")), ids=lambda path: path.stem)
def test_recipes_load(path: Path) -> None:
    loaded = long2short_recipe_from(read_yaml(path))
    assert path.stem == f"long2short_{loaded.method}"
    assert loaded.evaluation is not None


def test_golds_that_no_answer_can_meet_stop_the_run_before_it_samples(tiny_folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text('{"prompt": "1+1?", "solution": "unknown"}\n')
    rows = {"loader": "file", "source": str(file), "template": "none"}
    shortened = recipe(tmp_path, tiny_folder, "dpo", data=rows, reward="accuracy", evaluation=None)
    with pytest.raises(ValueError, match="gold answers are unusable"):
        long2short(shortened)


@pytest.mark.slow
def test_a_prompt_without_room_does_not_stop_the_others(
    tiny_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "rows.jsonl"
    questions = ["What is 2 + 2?", "word " * 600, "What is 7 - 3?"]
    file.write_text("".join(json.dumps({"question": q, "solution": "4"}) + "\n" for q in questions))
    data = {"loader": "file", "source": str(file), "template": "none"}
    done = long2short(recipe(tmp_path, tiny_folder, "shortest_sft", data=data, n_samples=24, evaluation=None))
    assert len((done.folder / "samples.jsonl").read_text().splitlines()) == 1 + 2
    assert "left out 1 of 3 problems" in " ".join(capsys.readouterr().out.split())
