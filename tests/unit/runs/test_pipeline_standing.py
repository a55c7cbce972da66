"""What a pipeline says of its stages, wherever it is asked: `run`, `--only`, `--dry-run`, `status`, the report."""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest

from grpo_lab import io
from grpo_lab.cli import main
from grpo_lab.io import write_whole_text
from grpo_lab.pipelines import stage_engine
from grpo_lab.pipelines.pipeline_recipe import pipeline_from
from grpo_lab.pipelines.runner import plan_of_pipeline, run_pipeline
from grpo_lab.pipelines.stage_record import AGAIN, GOES_ON, NEW, StageRecord, digest_of
from grpo_lab.pipelines.standing import NOTHING, WAITS, Asked, Look, Standing, standing
from grpo_lab.recipe import digests
from grpo_lab.runs.folder import kept
from grpo_lab.settings import Positive, settings

BROKEN: list[BaseException] = []
"""What the next stage raises."""


@settings()
class Rows:
    """``n`` rows, and a result beside them that nobody takes."""

    leaves: ClassVar[dict[str, str]] = {"rows": "rows.jsonl"}
    keeps: ClassVar[tuple[str, ...]] = ("evaluation",)
    n: Positive
    rows: str = ""

    def run(self, at: Any) -> dict[str, int]:
        if BROKEN:
            raise BROKEN.pop()
        (at.folder / "evaluation").mkdir(exist_ok=True)
        write_whole_text(at.folder / "evaluation" / "outcomes.jsonl", "{}\n")
        write_whole_text(at.folder / "rows.jsonl", "{}\n" * self.n)
        return {"rows": self.n}


@settings()
class Copied:
    """A model in its folder, as `rl` leaves it."""

    leaves: ClassVar[dict[str, str]] = {"model": "."}
    source: str

    def run(self, at: Any) -> None:
        shutil.copytree(self.source, at.folder, dirs_exist_ok=True)


ROWS = f"{__name__}:Rows"
FIRST = {"stage": ROWS, "name": "first", "n": 3}
SECOND = {"stage": ROWS, "name": "second", "n": 2, "inputs": {"rows": "first.rows"}}
THIRD = {"stage": ROWS, "name": "third", "n": 2, "inputs": {"rows": "second.rows"}}
OTHER = {"stage": ROWS, "name": "other", "n": 1}


def recipe(out: Path, *stages: dict[str, Any]) -> Any:
    return pipeline_from({"output_dir": str(out), "stages": list(stages or (FIRST, SECOND, THIRD, OTHER))})


@pytest.fixture(autouse=True)
def uncollected(monkeypatch: pytest.MonkeyPatch) -> None:
    """A collection in a process that has torch and transformers takes a third of a second, and a run makes several."""
    monkeypatch.setattr(stage_engine.gc, "collect", lambda: 0)


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """A pipeline that is done."""
    run_pipeline(recipe(tmp_path / "out"))
    return tmp_path / "out"


def said(out: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """By `status`."""
    capsys.readouterr()
    assert main(["pipeline", "status", str(out)]) == 0
    return " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("status", "n", "look", "first", "state", "why"),
    [
        ("waiting", 1, Look({}), NOTHING, NEW, "new"),
        ("done", 1, Look({"a.rows": "0"}), NOTHING, NOTHING, "new"),
        ("done", 2, Look({}), NOTHING, AGAIN, "again: n: 1 → 2"),
        ("running", 2, Look({}), NOTHING, AGAIN, "again: n: 1 → 2"),
        ("done", 1, Look({"a.rows": "1"}), NOTHING, AGAIN, "again: a.rows has changed"),
        ("running", 1, Look({}), NOTHING, GOES_ON, "goes on"),
        ("failed", 1, Look({}), NOTHING, GOES_ON, "goes on"),
        ("broken off", 1, Look({}, gone=["rows.jsonl"]), NOTHING, GOES_ON, "goes on"),
        ("done", 1, Look({}, gone=["rows.jsonl"]), NOTHING, AGAIN, "again: its rows.jsonl is gone"),
        ("done", 1, Look({}, lost=["evaluation/x"]), NOTHING, GOES_ON, "goes on: its evaluation/x is gone"),
        *(("done", 1, Look({}), state, WAITS, "waits for a") for state in (NEW, AGAIN, GOES_ON, WAITS)),
    ],
)
def test_one_answer(status: str, n: int, look: Look, first: str, state: str, why: str) -> None:
    record = StageRecord("b", "k", status, "new", settings={"n": 1}, digests={"a.rows": "0"})
    found = standing(record, Asked({"n": n}, {"a.rows": "a/rows.jsonl"}), look, {"a": Standing(first, "")})
    assert found[:2] == (state, why)


def test_one_stage_alone_is_not_done_on_inputs_that_an_edit_has_made_stale(out: Path) -> None:
    """It trained on them, and `status` said that all is done."""
    edited = recipe(out, {**FIRST, "n": 4}, SECOND, THIRD, OTHER)
    before = (out / "pipeline.yaml").read_bytes()
    with pytest.raises(ValueError, match=r"stage 'first', which it reads, is not done in .* \(again: n: 3 → 4\)"):
        run_pipeline(edited, only="second")
    with pytest.raises(ValueError, match=r"stage 'second', which it reads, is not done in .* \(waits for first\)"):
        run_pipeline(edited, only="third")
    assert (out / "pipeline.yaml").read_bytes() == before
    run_pipeline(edited, only="other")
    run_pipeline(edited, only="first")
    run_pipeline(edited, only="second")


def test_a_dry_run_and_status_say_what_the_run_does(out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """ "done already" stood there for stages that the run does again."""
    edited = recipe(out, {**FIRST, "n": 4}, SECOND, THIRD, OTHER)
    plan = plan_of_pipeline(edited)
    assert plan["done already"] == "other"
    assert plan["to do"] == "first (again: n: 3 → 4), second (waits for first), third (waits for second)"
    assert "to do" not in plan_of_pipeline(recipe(out))
    assert plan_of_pipeline(recipe(out), overwrite=True)["done already"] == "nothing"
    run_pipeline(edited, only="other")  # the folder's recipe is now the edited one
    found = said(out, capsys)
    assert "1 of 4 stages done" in found
    assert "first: done, to do again: again: n: 3 → 4" in found
    assert main(["report", str(out)]) == 0
    assert "first: done, to do again: again: n: 3 → 4" in (out / "report.html").read_text()
    run_pipeline(edited)
    records = {one["name"]: one for one in json.loads((out / "pipeline.json").read_text())["stages"]}
    assert [records[name]["why"] for name in ("first", "second", "third")] == [
        "again: n: 3 → 4",
        "again: first.rows has changed",
        "new",  # what it reads came out as before
    ]
    assert "4 of 4 stages done" in said(out, capsys)


def test_what_a_done_stage_left_is_remembered(out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (out / "third" / "rows.jsonl").write_text("[]\n[]\n")  # of the same size; nobody takes it
    (out / "first" / "rows.jsonl").touch()
    found = said(out, capsys)
    assert "4 of 4 stages done" in found
    assert "third: done: rows.jsonl edited since" in found
    assert "first:" not in found
    shutil.rmtree(out / "other" / "evaluation")
    (out / "third" / "rows.jsonl").unlink()
    found = said(out, capsys)
    assert "2 of 4 stages done" in found
    assert "third: done, to do again: again: its rows.jsonl is gone" in found
    assert "other: done, to do again: goes on: its evaluation/outcomes.jsonl is gone" in found
    run_pipeline(recipe(out))
    assert (out / "other" / "evaluation" / "outcomes.jsonl").is_file()
    assert [place.name for place in out.glob("*.before-*")] == ["third.before-1"]


def test_a_damaged_pipeline_json_is_said(out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What it asks of one stage was damaged: all were shown as done."""
    content = json.loads((out / "pipeline.json").read_text())
    content["stages"][0]["asked"] = 5
    (out / "third" / "rows.jsonl").unlink()
    (out / "pipeline.json").write_text(json.dumps(content))
    found = said(out, capsys)
    assert "first: done: pipeline.json does not say what is asked of it" in found
    assert "third: done, to do again: again: its rows.jsonl is gone" in found
    (out / "pipeline.json").write_bytes(b'{"stages": [\n')
    assert main(["pipeline", "status", str(out)]) == 2
    assert "pipeline.json, line 2: not JSON" in capsys.readouterr().err


def test_weights_that_are_gone_are_missed_and_checkpoints_are_not(
    tmp_path: Path, tiny_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A model in the stage's own folder was there as long as the folder was."""
    out, model = tmp_path / "out", tmp_path / "model"
    shutil.copytree(tiny_folder, model)
    (model / "checkpoint-2").mkdir()
    for file in ("model.safetensors", "chat_template.jinja"):
        (model / "checkpoint-2" / file).write_text("x")
    copied = {"stage": f"{__name__}:Copied", "name": "copied", "source": str(model)}
    taker = {"stage": ROWS, "name": "taker", "n": 1, "inputs": {"rows": "copied.model"}}
    run_pipeline(recipe(out, copied, taker))
    shutil.rmtree(out / "copied" / "checkpoint-2")
    assert "2 of 2 stages done" in said(out, capsys)
    weights = next((out / "copied").glob("*.safetensors"))
    weights.unlink()
    assert f"copied: done, to do again: again: its {weights.name} is gone" in said(out, capsys)
    run_pipeline(recipe(out, copied, taker))
    assert weights.is_file()


def test_nothing_of_a_done_pipeline_is_read_again(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither by this process nor by the next, which reads what a stage remembers: models are many gigabytes."""
    digests.KNOWN.clear()
    monkeypatch.setattr(digests.hashlib, "file_digest", lambda *_: pytest.fail("a file was read"))
    run_pipeline(recipe(out))
    assert digest_of(out / "first" / "rows.jsonl")


def test_overwrite_forgets_links_and_what_another_recipe_left(out: Path, tmp_path: Path) -> None:
    run_pipeline(recipe(out, {**FIRST, "name": "another"}))  # pipeline.json names this one alone
    shutil.move(out / "other", tmp_path / "elsewhere")
    (out / "other").symlink_to(tmp_path / "elsewhere")
    (out / "mine").mkdir()
    (out / "mine" / "notes").write_text("x")
    (out / "first" / "old").write_text("x")
    run_pipeline(recipe(out), overwrite=True)
    assert not (out / "first" / "old").exists()
    assert not (out / "other").is_symlink()
    assert (tmp_path / "elsewhere" / "rows.jsonl").is_file()
    assert (out / "mine" / "notes").is_file()
    assert {one["why"] for one in json.loads((out / "pipeline.json").read_text())["stages"]} == {"new"}


def test_a_pipeline_under_a_linked_folder(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "disk")
    run_pipeline(recipe(tmp_path / "link" / "out"))
    stamp = (tmp_path / "disk" / "out" / "first" / "stage.json").stat().st_mtime_ns
    run_pipeline(recipe(tmp_path / "disk" / "out"))
    assert (tmp_path / "disk" / "out" / "first" / "stage.json").stat().st_mtime_ns == stamp


# --- locks, failures, stops -----------------------------------------------------------------------------------------


@pytest.fixture
def busy(tmp_path: Path, holding: Callable[..., subprocess.Popen[str]]) -> subprocess.Popen[str]:
    """Another process that does the stage `second`."""
    return holding(tmp_path / "out", "second.stage.lock")


def test_every_stage_holds_its_lock(out: Path, busy: subprocess.Popen[str], capsys: pytest.CaptureFixture[str]) -> None:
    """`run` and `run --only` in one folder both trained in one stage."""
    in_use = rf"stage 'second' of .*out' is in use: process {busy.pid} on"
    edited = recipe(out, FIRST, {**SECOND, "n": 5}, THIRD, {**OTHER, "n": 5})
    for only in (None, "second"):
        with pytest.raises(ValueError, match=in_use):
            run_pipeline(edited, only=only)
    with pytest.raises(ValueError, match=in_use):
        run_pipeline(edited, overwrite=True)
    assert (out / "first" / "rows.jsonl").is_file()  # refused before anything goes
    run_pipeline(edited, only="other")
    mark(out / "second", status="running")
    assert re.search(r"second [^.]*\.?[^.]*Rows, running", said(out, capsys))
    busy.send_signal(signal.SIGKILL)
    busy.wait()
    assert re.search(r"second [^.]*\.?[^.]*Rows, broken off", said(out, capsys))
    run_pipeline(recipe(out))
    assert not [*out.glob("*.lock")]


def mark(folder: Path, **more: Any) -> None:
    (folder / "stage.json").write_text(json.dumps({**json.loads((folder / "stage.json").read_text()), **more}))


def test_a_stage_that_raised_has_failed_and_says_with_what(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It stood as running for ever."""
    BROKEN.append(RuntimeError("no\x1b[2J luck\nat all"))
    with pytest.raises(RuntimeError):
        run_pipeline(recipe(tmp_path / "out"))
    assert "first: failed: RuntimeError: no␛[2J luck at all" in said(tmp_path / "out", capsys)
    assert main(["report", str(tmp_path / "out")]) == 0
    assert "RuntimeError: no␛[2J luck at all" in (tmp_path / "out" / "report.html").read_text()
    BROKEN.append(KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        run_pipeline(recipe(tmp_path / "out"))
    found = said(tmp_path / "out", capsys)
    assert "broken off" in found
    assert "RuntimeError" not in found
    run_pipeline(recipe(tmp_path / "out"))
    assert not [*(tmp_path / "out").glob("*.before-*")]


def test_one_stage_alone_that_is_done_says_so(out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_pipeline(recipe(out), only="second")
    found = capsys.readouterr().out
    assert "stage 'second' is done: nothing to do" in found
    assert "4 of 4 stages done" in found


def test_what_is_kept_is_said_of_the_stage_under_way(out: Path) -> None:
    """ "kept: nothing" stood there where 60 problems were sampled."""
    (out / "third" / "samples.jsonl").write_text("{}\n" * 61)
    (out / "second" / "samples.jsonl").write_text("{}\n" * 10)
    assert kept(recipe(out)).startswith("first; second; third; other in ")
    mark(out / "third", status="broken off")
    assert kept(recipe(out)).startswith("first; second; other; third: samples of 60 problems in ")
    assert kept(recipe(out / "none")) == "nothing"


# --- cost -------------------------------------------------------------------------------------------------------------


def test_a_stage_costs_the_same_in_a_long_pipeline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files written and read for a stage; each of 1,000 that work 6 ms cost over a second."""
    written, read, collected = [], [], []
    whole, of, collect = io.write_whole, StageRecord.read.__func__, stage_engine.gc.collect  # type: ignore[attr-defined]
    monkeypatch.setattr(io, "write_whole", lambda place, write: (written.append(place), whole(place, write)))
    monkeypatch.setattr(StageRecord, "read", classmethod(lambda *args: (read.append(args), of(*args))[1]))
    monkeypatch.setattr(stage_engine.gc, "collect", lambda: (collected.append(1), collect()))
    run_pipeline(recipe(tmp_path / "out", *({**OTHER, "name": f"s{number}"} for number in range(20))))
    assert len([place for place in written if Path(place).name == "pipeline.json"]) <= 20 + 2
    assert len([place for place in written if Path(place).name in ("run.json", "pipeline.yaml")]) == 2
    assert len(read) <= 20 * 8
    assert len(collected) < 20
