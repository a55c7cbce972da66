"""A page for every kind of folder, written anew by `grpo-lab report`; text that is not ours, and damaged files, in each
of them."""

from __future__ import annotations

import io
import json
import logging
import shutil
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from grpo_lab.cli import main
from grpo_lab.curation import Selection
from grpo_lab.evaluation import terminal_summary, write_report
from grpo_lab.evaluation.comparison import compare, print_comparison, write_comparison
from grpo_lab.evaluation.run_record import read_run
from grpo_lab.evaluation.terminal import Terminal
from grpo_lab.pipelines.rounds import line_of
from grpo_lab.visible import VisibleFormatter, encodable
from unit.reports.test_report import Page, assert_self_contained, page_of, result, whole_run

HIDDEN = "<script>{{7*7}}\x1b[2J\x00\u202e\u200b\u2066\ud800"
SHOWN = "<script>{{7*7}}␛[2J␀⟨U+202E⟩⟨U+200B⟩⟨U+2066⟩\ufffd"


def write_run(folder: Path, **more: Any) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "run.json").write_text(json.dumps({"name": "a run", "finished": True, **more}))


def trained(folder: Path, words: str = "") -> None:
    whole_run(folder, steps=4)
    write_run(folder, model=words or "m", **{words or "key": {words: words}})
    rows = [
        {"step": n, f"rewards/{words}a/mean": n, "rewards/b/mean": 1, "reward": 1, "loss": 0.5} for n in range(1, 5)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def shortened(folder: Path, words: str = "") -> None:
    write_run(folder, pipeline="long2short", method="dpo", rows=12, training={words or "beta": words})
    result([0.0, 1.0]).write(folder / "evaluation/before")
    result([1.0, 1.0]).write(folder / "evaluation/after")


def evaluated(folder: Path, words: str = "") -> None:
    found = result([0.0, 1.0], text=words or "#### 7", question=f"{words} 3 + 4?")
    found.settings["judge"] = {words or "name": words or "accuracy"}  # type: ignore[index]
    found.write(folder)


def by_rounds(folder: Path, words: str = "") -> None:
    recipe = {"model": {"path": words or "m"}, "rounds": {"questions": 4}, "model_files": {words: "x"}}
    write_run(folder, pipeline="rounds", method="dpo", count=1, recipe=recipe, seconds={f"start{words}": 1.0})
    lines: list[dict[str, Any]] = []
    for number in (0, 1):
        accuracy = {"value": 0.25 * (number + 1), "low": 0.1, "high": 0.6}
        facts = {"sample": {"questions": 4, "samples": 20, "tokens": 200}, "evaluate": {"accuracy": accuracy}}
        lines.append(line_of(number, facts, lines))
    (folder / "rounds.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    result([0.0, 1.0]).write(folder / "evaluation/before")
    result([1.0, 1.0]).write(folder / "evaluation/after")


def curated(folder: Path, words: str = "") -> None:
    folder.mkdir(parents=True, exist_ok=True)
    chosen = Selection([{"prompt": f"{words} question {k}", "solution": "1"} for k in range(4)], title="a set")
    chosen.score("pass_rate", [0.0, 0.5, 0.5, 1.0])
    chosen.keep(f"band{words}", [False, True, True, False], setting=words, reasons=[words] * 4)
    pq.write_table(pa.Table.from_pylist(encodable(chosen.scored_rows())), folder / "all.parquet")
    said = {"name": "a set", "data": words, "finished": True, "report": asdict(chosen.report([words]))}
    (folder / "curation.json").write_text(json.dumps(said))


def pipelined(folder: Path, words: str = "") -> None:
    """Two evaluations of the same problems around an RL stage, one of other problems, and one that waits."""
    listed: list[dict[str, Any]] = []

    def stage(name: str, kind: str, inputs: dict[str, str], results: dict[str, Any], **more: Any) -> None:
        before = [taken.partition(".")[0] for taken in inputs.values()]
        taken = {setting: {"from": one, "digest": "0a"} for setting, one in inputs.items()}
        said = {"name": name, "kind": kind + words, "status": "done", "why": f"new{words}", "seconds": 90.0}
        listed.append({**said, "inputs": taken, "before": before, "results": results, **more})
        (folder / name).mkdir(parents=True)

    made_from = {"max_steps": 3, words or "key": words}
    stage("start", "cold_start", {}, {"rows": 400, "loss": 0.5, f"other{words}": words}, settings=made_from)
    stage("start-maths", "evaluate", {"model": "start.model"}, {"accuracy": 0.25, "format": 0.5, "tokens": 100})
    result([0.0, 0.0, 0.0, 1.0], text=words or "#### 7").write(folder / "start-maths" / "evaluation")
    dropped = {"wrong": 30, f"too long{words}": 2}
    stage("traces", "filter", {"samples": "start.samples"}, {"rows": 80, "kept": 48, "dropped": dropped})
    stage("rl", "rl", {"model.path": "start.model", "data.source": "traces.rows"}, {"steps": 60, "tokens": 9000})
    whole_run(folder / "rl")
    shutil.rmtree(folder / "rl" / "evaluation")
    accuracy = {"value": 0.75, "low": 0.3, "high": 0.95, "n": 4}
    stage("rl-maths", "evaluate", {"model": "rl.model"}, {"accuracy": accuracy, "accuracy.no-thinking": 0.5})
    result([1.0, 0.0, 1.0, 1.0], text=words or "#### 7").write(folder / "rl-maths" / "evaluation")
    stage("general_after_rl", "evaluate", {"model": "rl.model"}, {"accuracy": 1.0, "accuracy.budget-8": 0.0})
    result([1.0], question="What colour?").write(folder / "general_after_rl" / "evaluation")
    stage("student", "sft", {"rows": "traces.rows"}, {}, status="waiting", why="", seconds=None)
    said = {"name": "a pipeline", "pipeline": "pipeline", "finished": False, "stages": listed}
    (folder / "pipeline.json").write_text(json.dumps(said))


def compared(folder: Path, words: str = "") -> None:
    for name in ("a", "b"):
        trained(folder / name, words)
    write_run(folder / "b", name=f"{words} other", model=f"{words} other")
    write_comparison(compare([folder / "a", folder / "b"]), folder / "c.html")


KINDS: dict[str, tuple[Callable[..., None], str, list[str]]] = {
    "training": (trained, "report.html", ["training report", "Gain, same problems", "Is it working?", "Reward",
        "grpo-lab lab controls --recipe with this run's recipe"]),
    "long2short": (shortened, "report.html", ["long2short report", "Length of right answers 12.0 "
        "tokens", "dpo · 12 rows"]),
    "evaluation": (evaluated, "report.html", ["evaluation report", "Held-out accuracy 50.0 %", "answer ✗ wrong"]),
    "rounds": (by_rounds, "report.html", ["rounds report", "Gain, same problems", "round 1 50.0%",
        "Tokens generated 400"]),
    "curation": (curated, "report.html", ["curation report", "Rows kept 2", "Pass rates", "Mean pass rate of the "
        "kept 50.0 %"]),
    "pipeline": (pipelined, "report.html", ["pipeline report", "Stages done 6 of 7", "Gain, same problems +50.0 points",
        "Stage × task", "3. traces filter 80 48", "why it was done new", "results.dropped.too long 2", "Reward"]),
    "compare": (compared, "c.html", ["comparison", "Paired tests", "Set differently", "One line a run."]),
}  # fmt: skip


@pytest.mark.not_fast(but=["long2short", "evaluation", "curation"])
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_has_its_page_and_report_writes_it_again(
    tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """`grpo-lab report` on a folder of `rounds` put an empty training report in the place of its page."""
    make, page, said = KINDS[kind]
    make(tmp_path / "run")
    place = tmp_path / "run" / (page if kind == "compare" else "")
    for _ in range(2):
        assert main(["report", str(place)]) == 0
        html = (tmp_path / "run" / page).read_text(encoding="utf-8")
        assert_self_contained(Page(html))
        for words in said:
            assert words in Page(html).text, words
    assert capsys.readouterr().out == f"report: {tmp_path / 'run' / page}\n" * 2


def test_a_comparison_is_found_again_from_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The page names its runs as its own folder sees them: the whole may be moved, and be asked for from anywhere."""
    compared(tmp_path / "here")
    shutil.move(tmp_path / "here", tmp_path / "there")
    monkeypatch.chdir("/")
    assert "a run · other" in Page(write_report(tmp_path / "there" / "c.html").read_text()).text
    shutil.rmtree(tmp_path / "there" / "b")
    before = (tmp_path / "there" / "c.html").read_bytes()
    with pytest.raises(ValueError, match="b is not a folder"):
        write_report(tmp_path / "there" / "c.html")
    assert (tmp_path / "there" / "c.html").read_bytes() == before


@pytest.mark.parametrize(
    ("make", "about", "others"),
    [
        ((trained, curated, evaluated), "training report", "a curation and evaluation left"),
        ((by_rounds, curated), "rounds report", "a curation left"),
        ((by_rounds, trained), "training report", "a rounds left"),  # `train --overwrite` in a folder of rounds
    ],
)
def test_a_folder_that_mixes_kinds(tmp_path: Path, make: Any, about: str, others: str) -> None:
    for one in make:
        one(tmp_path)
    assert about in page_of(tmp_path).text
    assert f"the folder also holds what {others}; this page is not about that" in page_of(tmp_path).text


def test_a_run_under_way_is_called_so(tmp_path: Path) -> None:
    for pipeline in ("rounds", "long2short", None):
        (tmp_path / "run.json").write_text(json.dumps({"name": "r", "pipeline": pipeline, "finished": False}))
        assert "the run is not finished: this is what it has written so far" in page_of(tmp_path).text


# --- text that is not ours --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_no_name_or_text_reaches_a_page_raw(tmp_path: Path, kind: str) -> None:
    """Markup, a template's slots, ESC, NUL, direction marks in labels of curves, keys of settings, names of filters
    and runs."""
    make, page, _ = KINDS[kind]
    make(tmp_path, HIDDEN)
    html = write_report(tmp_path / page if kind == "compare" else tmp_path).read_text(encoding="utf-8")
    assert SHOWN in Page(html).text
    assert not set("\x1b\x00\u202e\u200b\u2066") & set(html)
    assert_self_contained(Page(html))


@pytest.mark.parametrize("plain", ["[bold]x[/] [/x]", ":bug:", HIDDEN])
def test_nothing_reaches_the_terminal_raw(tmp_path: Path, plain: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Text of models and files neither moves the cursor nor colours, in the tables of a run, in a comparison, in errors
    and logs."""
    stream = io.StringIO()
    console = Terminal(file=stream, width=300, force_terminal=False)
    terminal_summary(None, result([1.0]), title=plain, model_path=plain, console=console)
    compared(tmp_path, plain)
    print_comparison(compare([tmp_path / "a", tmp_path / "b"]), console)
    console.rule(plain)
    console.print(plain)
    stream.write(VisibleFormatter().format(logging.makeLogRecord({"msg": "%s", "args": (plain,)})))
    shown = plain if plain != HIDDEN else SHOWN
    assert stream.getvalue().count(shown) >= 6
    assert "\x1b" not in stream.getvalue()
    if plain == HIDDEN:
        assert main(["report", str(tmp_path / "\x1b[2J\u202e")]) == 2
        assert capsys.readouterr().err.startswith("grpo-lab: error: ")
        assert "\x1b" not in capsys.readouterr().err


# --- damaged files, wrong folders -------------------------------------------------------------------------------------

OUTCOME = (
    '{"problem": 0, "kind": "greedy", "sample": 0, "question": "q", "prompt": "p", "solution": null, '
    '"completion": "c", '
)


@pytest.mark.not_fast
@pytest.mark.parametrize(
    ("file", "content", "notice"),
    [
        ("metrics.jsonl", '{"step": 1, "reward": 1', "metrics.jsonl, line 1: not JSON"),
        ("metrics.jsonl", '{"step": 1, "reward": 1e300}\n{"step": 2, "reward": '
            '1e308}', "reward was NaN, infinite or beyond 1e100 in 2"),
        ("metrics.jsonl", '{"step": 1e300, "reward": 1}', "no usable `step`"),
        ("metrics.jsonl", '{"step": 1, "reward": -1e99}\n{"step": 2, "reward": 1e99}', ""),
        ("run.json", "[1]", "run.json: it holds [1]; a mapping"),
        ("run.json", "{", "run.json could not be read"),
        ("run.json", '{"seed": 1' + "0" * 400 + "}", ""),
        ("run.json",
            '{"name": [1], "seconds": {"a": "x", "b": NaN}, "settings": 3, "finished": "no", "rewards": {}}', ""),
        ("run.json", '{"a": ' + '{"a": ' * 300 + "1" + "}" * 301, "run.json: it is nested more than 100 deep"),
        ("run.json", '{"a": ' + '{"a": ' * 98 + "1" + "}" * 99, ""),
        ("run.json", '{"pipeline": ["rounds"], "recipe": 5, "objective": [[]]}', ""),
        ("run.json", '{"pipeline": "rounds", "recipe": 5, "seconds": 3, "model": 1}', ""),
        ("rounds.jsonl", '{"round": 1, "accuracy": "x"}\n{"round": NaN}\n[1]\n{"round": 2, "accuracy": '
            '0.5}', "rounds.jsonl, line 2"),
        ("rounds.jsonl", '{"round": 1, "tokens_total": 1e', "rounds.jsonl, line 1: not JSON"),
        ("evaluation/after", "a file", ""),
        ("evaluation/after/summary.json", "{", "evaluation/after could not be read"),
        ("evaluation/after/summary.json", '{"settings": {"n_samples": {}, "prompts_too_long": "x"}}', ""),
        ("evaluation/after/outcomes.jsonl", OUTCOME + '"tokens": 1', "evaluation/after could not be read"),
        ("evaluation/after/outcomes.jsonl", OUTCOME + '"tokens": 1' + "0" * 400 + ', "truncated": false, "score": 1, '
            '"answer": null}',
         "no finite number: ['tokens']"),
        ("evaluation/after/outcomes.jsonl", OUTCOME + '"tokens": 1, "truncated": false, "score": NaN, "answer": null}',
         "no finite number: ['score']"),
        ("evaluation/after/outcomes.jsonl", OUTCOME.replace('"c"', r'"\ud800 \u001b"') + '"tokens": 1, "truncated": '
            'false, "score": 1, '
         '"answer": "\\udfff"}', ""),
        ("evaluation/step_3/outcomes.jsonl", "", ""),
    ],
)  # fmt: skip
def test_a_damaged_piece_is_one_line_and_the_rest_is_shown(
    tmp_path: Path, file: str, content: str, notice: str, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = whole_run(tmp_path / "a", steps=3)
    place = folder / file
    if place.is_dir():
        shutil.rmtree(place)
    place.parent.mkdir(exist_ok=True)
    place.write_text(content)
    if file == "rounds.jsonl":
        (folder / "run.json").unlink()
    page = page_of(folder)
    assert_self_contained(page)
    assert notice in page.text
    assert ("Notices" in page.text) == bool(read_run(folder).notices) == (notice != "" or "step_3" in file)
    assert "NaN" in content or "nan" not in page.text.replace("NaN, infinite", "").lower()
    other = whole_run(tmp_path / "b", steps=3)
    for runs in ([folder, other], [other, folder]):
        assert main(["compare", *map(str, runs), "--output", str(tmp_path / "c.html")]) == 0
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["report", "{}/nowhere"], "is not a folder"),
        (["report", "{}/empty"], "holds nothing of ours"),
        (
            ["report", "{}/lab"],
            "holds a lab, which has no page: `grpo-lab lab NAME --at-most 0` draws table and figure",
        ),
        (["report", "{}/lab/a-0"], "holds a cell of a lab: its numbers stand in the table of"),
        (["report", "{}/lab/s"], "holds the stage 's' (sample) of a pipeline, whose page shows it: `grpo-lab report"),
        (["report", "{}/notes.txt"], "is a file and no comparison of runs"),
        (["report", "{}/half"], "report.html cannot be written"),
        (["compare", "{}/run", "{}/empty"], "holds nothing of a run and no evaluation"),
        (["compare", "{}/run", "{}/set"], "holds nothing of a run and no evaluation"),
        (["compare", "{}/run", "{}/notes.txt"], "is not a folder"),
        (["compare", "{}/run", "{}/damaged"], "holds an evaluation that cannot be read"),
        (["compare", "{}/run", "{}/half", "--output", "{}/notes.txt"], "exists and is no comparison"),
        (["compare", "{}/run", "{}/half", "--output", "{}/notes.txt/c.html"], "cannot be written"),
        (
            ["evaluate", "{}/empty", "--data", "word_problems"],
            "the folder holds no model (neither config.json nor adapter_config.json)",
        ),
        (["evaluate", "{}/notes.txt", "--data", "word_problems"], "notes.txt"),
        (["evaluate", "{}/empty", "--like", "{}/set"], "it has no recipe.yaml"),
        (["evaluate", "{}/empty", "--data", "word_problems", "--output", "{}/run"], "holds something else"),
        (["evaluate", "{}/empty", "--data", "word_problems", "--output", "{}/notes.txt"], "notes.txt"),
    ],
)
def test_a_wrong_folder_is_one_line(
    tmp_path: Path, words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    trained(tmp_path / "run")
    trained(tmp_path / "half")
    (tmp_path / "half" / "report.html").mkdir()
    curated(tmp_path / "set")
    evaluated(tmp_path / "damaged")
    (tmp_path / "damaged" / "outcomes.jsonl").write_text("{")
    (tmp_path / "empty").mkdir()
    for name, kind in {"a-0": "cell", "s": "sample"}.items():
        (tmp_path / "lab" / name).mkdir(parents=True)
        (tmp_path / "lab" / name / "stage.json").write_text(json.dumps({"name": name, "kind": kind}))
    (tmp_path / "lab" / "records.json").write_text("{}")
    (tmp_path / "notes.txt").write_text("mine")
    assert main([word.format(tmp_path) for word in words]) == 2
    error = capsys.readouterr().err.strip().splitlines()
    assert len(error) == 1
    assert error[0].startswith("grpo-lab: error: ")
    assert said in error[0]
    assert (tmp_path / "notes.txt").read_text() == "mine"
