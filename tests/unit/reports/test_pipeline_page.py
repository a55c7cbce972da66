"""The page of a pipeline: numbers by hand, damaged folders, boxes and arrows that never cover each other, and what a
browser shows of it."""

from __future__ import annotations

import io
import json
import math
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from browser import CHROMIUM, Browser
from grpo_lab.cli import main
from grpo_lab.evaluation.pipeline_sections import DROP, WIDTH, drawing, matrix, show, stages_table, status
from grpo_lab.evaluation.run_record import PipelineStage, read_run
from grpo_lab.evaluation.terminal import Terminal
from grpo_lab.pipelines.pipeline_recipe import pipeline_from
from unit.reports.test_report import Page, assert_self_contained, page_of, result
from unit.reports.test_report_kinds import compared, curated, pipelined


def change(folder: Path, stage: str, **more: Any) -> None:
    """What ``pipeline.json`` says of one stage."""
    said = json.loads((folder / "pipeline.json").read_text())
    next(one for one in said["stages"] if one["name"] == stage).update(more)
    (folder / "pipeline.json").write_text(json.dumps(said))


def listed(**one: Any) -> str:
    """A ``pipeline.json`` with the same stage twice."""
    whole = {
        "name": "a", "kind": "rl", "status": "done", "why": "", "inputs": {}, "before": [], "seconds": 1,
        "of another release": 2,
    }  # fmt: skip
    return json.dumps({"stages": [{**whole, "results": {}, **one}] * 2})


def test_the_table_and_the_matrix_by_hand(tmp_path: Path) -> None:
    pipelined(tmp_path)
    run = read_run(tmp_path)
    table = stages_table([run])
    assert table.head == [
        "stage", "kind", "accuracy", "format", "rows", "kept", "steps", "loss", "tokens generated", "time",
    ]  # fmt: skip
    rows = [[cell for cell in row if cell] for row in table.rows]
    assert rows[:3] == [
        ["1. start", "cold_start", "400", "0.5", "1 min 30 s"],
        ["2. start-maths", "evaluate", "25.0%", "50.0%", "100", "1 min 30 s"],
        ["3. traces", "filter", "80", "48", "1 min 30 s"],
    ]
    assert rows[-2:] == [["7. student", "sft, waiting"], ["all stages", "9,100", "9 min 00 s"]]
    maths, general = {"maths": [0.75], "maths, no-thinking": [0.5]}, {"general": [1.0]}
    assert matrix([run]) == {"start": {"maths": [0.25]}, "rl": {**maths, **general}}
    found = (run.before, run.after)
    assert [one.accuracy.value for one in found if one and one.accuracy] == [0.25, 0.75]  # not the last one's problems


def test_a_stage_without_a_model_of_another_is_about_the_start_model(tmp_path: Path) -> None:
    pipelined(tmp_path)
    change(tmp_path, "start-maths", inputs={}, name="evaluate")
    assert next(iter(matrix([read_run(tmp_path)]).items())) == ("start model", {"held-out problems": [0.25]})


@pytest.mark.not_fast
def test_several_runs_are_one_page_with_mean_lowest_and_highest(tmp_path: Path) -> None:
    for name, accuracy in (("a", 0.5), ("b", 0.75), ("c", 1.0)):
        pipelined(tmp_path / name)
        change(tmp_path / name, "rl-maths", results={"accuracy": accuracy, "length": 20.0})
    assert main(["compare", *(str(tmp_path / name) for name in "abc"), "--output", str(tmp_path / "seeds.html")]) == 0
    page = Page((tmp_path / "seeds.html").read_text(encoding="utf-8"))
    assert_self_contained(page)
    assert "5. rl-maths evaluate 75.0% [50.0%, 100.0%] 20.0 1 min 30 s" in page.text
    assert "2. rl 75.0% [50.0%, 100.0%] 100.0%" in page.text  # of the matrix: alike in all runs, it has no brackets
    assert "a: rl 0.305 → 0.595" not in page.text  # smoothed, and by the name of its run
    assert all(f"{name}: rl" in page.text for name in "abc")
    assert "Paired tests" in page.text
    assert "Not recorded: Curves" not in page.text


@pytest.mark.parametrize(
    ("written", "said"),
    [
        ("{", "pipeline.json could not be read"),
        ("[]", "pipeline.json: it holds []; a mapping of names to values is needed"),
        ('{"stages": 3}', "the stages were left out, for stages: Input should be a valid list"),
        (listed(name="../a"), "for stages.0.name: String should match pattern"),
        (listed(seconds="x"), "for stages.0.seconds: Input should be a valid number"),
        (listed(inputs={"x": 1}), "for stages.0.inputs.x: Input should be a valid dictionary"),
        (listed(before=["b", "a", "student"], results={"accuracy": math.nan, "rows": 1e300, "dropped": 3}), ""),
        (listed(kind="evaluate", results={"accuracy": {"value": None}, "accuracy.b": 0.5}, seconds=0), ""),
        (listed(name="student"), ""),
    ],
)
def test_a_damaged_file_is_said_and_the_rest_is_shown(tmp_path: Path, written: str, said: str) -> None:
    pipelined(tmp_path)
    (tmp_path / "pipeline.json").write_text(written)
    page = page_of(tmp_path)
    assert_self_contained(page)
    assert said in page.text
    assert " of 2 " not in page.text  # stages done: the same stage twice is one
    assert ("Notices" in page.text) == bool(said)


def test_folders_that_are_gone_or_damaged(tmp_path: Path) -> None:
    pipelined(tmp_path)
    shutil.rmtree(tmp_path / "rl")
    (tmp_path / "rl-maths" / "evaluation" / "outcomes.jsonl").write_text("{")
    text = page_of(tmp_path).text
    assert "rl-maths/evaluation could not be read" in text
    assert "Curves of the stages" not in text
    assert "5. rl-maths evaluate 75.0%" in text


def test_of_arms_none_is_the_headline(tmp_path: Path) -> None:
    """The first answers stood against those of whichever arm came last."""
    pipelined(tmp_path)
    said = json.loads((tmp_path / "pipeline.json").read_text())
    taken = {"model": {"from": "student.model", "digest": "0a"}}
    arm = {"name": "student-maths", "kind": "evaluate", "status": "done", "inputs": taken, "before": ["student"]}
    (tmp_path / "pipeline.json").write_text(json.dumps({**said, "stages": [*said["stages"], arm]}))
    result([1.0, 1.0, 1.0, 1.0]).write(tmp_path / "student-maths" / "evaluation")
    change(tmp_path, "student", before=["traces", "rl"])  # after RL: one chain
    run = read_run(tmp_path)
    assert [one.accuracy.value for one in (run.before, run.after) if one and one.accuracy] == [0.25, 1.0]
    change(tmp_path, "student", before=["traces"])  # beside it
    run = read_run(tmp_path)
    assert (run.before, run.after) == (None, None)
    assert any("ends in 2 models that were evaluated on the same problems (rl, student)" in one for one in run.notices)
    text = page_of(tmp_path).text
    assert "Gain, same problems" not in text
    assert "ends in 2 models" in text


def test_stages_of_one_name_and_two_kinds_are_two(tmp_path: Path) -> None:
    """`compare` said the mean over an SFT and a DPO."""
    for name, kind, accuracy in (("a", "rl", 0.5), ("b", "dpo", 1.0)):
        pipelined(tmp_path / name)
        change(tmp_path / name, "rl", kind=kind, results={"steps": 60 if kind == "rl" else 20})
        change(tmp_path / name, "rl-maths", results={"accuracy": accuracy})
    runs = [read_run(tmp_path / name) for name in "ab"]
    rows = [[cell for cell in row if cell] for row in stages_table(runs).rows]
    assert ["4. rl", "rl", "60", "1 min 30 s"] in rows
    assert ["8. rl", "dpo", "20", "1 min 30 s"] in rows
    found = matrix(runs)
    assert (found["rl (rl)"]["maths"], found["rl (dpo)"]["maths"]) == ([0.5], [1.0])


def test_rows_say_out_of_how_many(tmp_path: Path) -> None:
    pipelined(tmp_path)
    change(tmp_path, "traces", results={"rows": 4, "out_of": 1200})
    assert "4 of 1,200" in stages_table([read_run(tmp_path)]).rows[2]
    change(tmp_path, "traces", results={"rows": 4, "traces": 12})  # of an earlier release
    assert "4 of 12" in stages_table([read_run(tmp_path)]).rows[2]
    shown = next(box for box in drawing(read_run(tmp_path).stages).boxes if box.name == "traces")
    assert "rows 4 of 12" in " ".join(shown.lines)


def test_stages_stand_in_the_order_in_which_they_are_written(tmp_path: Path) -> None:
    """R1's arms stood before the stages that they are compared with."""
    own = {"stage": "merge", "model": "m", "short_model": "n"}
    names = ["base", "first", "second", "arm"]
    taken: dict[str, dict[str, str]] = {"first": {"model": "base.model"}, "second": {"model": "first.model"}}
    taken["arm"] = {"model": "base.model"}
    stages = [{**own, "name": name, "inputs": taken.get(name, {})} for name in names]
    for one in stages[1:]:
        one.pop("model")
    recipe = pipeline_from({"output_dir": str(tmp_path), "stages": stages})
    assert [one.name for one in recipe.in_order()] == names
    turned = pipeline_from({"output_dir": str(tmp_path), "stages": stages[::-1]})
    assert [one.name for one in turned.in_order()] == ["base", "arm", "first", "second"]


# --- boxes and arrows ---------------------------------------------------------------------------------------------


@st.composite
def stages(draw: st.DrawFn) -> list[PipelineStage]:
    found: list[PipelineStage] = []
    for number in range(draw(st.integers(1, 14))):
        before = draw(st.lists(st.sampled_from([one.name for one in found]), unique=True, max_size=3)) if found else []
        names = st.sampled_from(["accuracy", "rows", "tokens", "format", "loss", "length", "steps"])
        results = draw(st.dictionaries(names, st.sampled_from([0.5, 3, 1e12])))
        found.append(PipelineStage(f"s{number}", "x" * 90, before=before, results=results))
    return found


@pytest.mark.not_fast
@settings(max_examples=60)
@given(stages())
def test_no_box_covers_another_and_no_arrow_passes_behind_one(made: list[PipelineStage]) -> None:
    found = drawing(made)
    tops = [box.y for box in found.boxes]
    assert tops[0] > 0
    assert found.boxes[-1].bottom < found.height
    assert all(y == pytest.approx(box.bottom + DROP) for y, box in zip(tops[1:], found.boxes, strict=False))
    assert all(box.height == 28 + 17 * len(box.lines) for box in found.boxes)
    assert all(len(line) * 7 < WIDTH for box in found.boxes for line in box.lines)
    place = {one.name: box for one, box in zip(made, found.boxes, strict=True)}
    drawn = iter(found.arrows)
    lanes: dict[str, float] = {}
    for one in made:
        for other in one.before:
            path, _ = next(drawn)
            aside = re.fullmatch(r"M[\d.]+ ([\d.]+)H([\d.]+)V([\d.]+)H[\d.]+", path)
            if aside is None:  # between two boxes
                assert place[one.name].y == pytest.approx(place[other].bottom + DROP)
                assert path == f"M20 {place[other].bottom:g}v{DROP - 7:g}"
            else:
                start, lane, end = map(float, aside.groups())
                assert WIDTH + 1 < lane < found.width
                assert place[other].y < start < place[other].bottom < place[one.name].y < end < place[one.name].bottom
                assert lanes.setdefault(other, lane) == lane
    assert len({*lanes.values()}) == len(lanes)
    assert next(drawn, None) is None


def test_the_terminal_says_what_the_page_says(tmp_path: Path) -> None:
    pipelined(tmp_path)
    said = Terminal(file=io.StringIO(), width=200)
    status(tmp_path, said)
    show(tmp_path, said)
    found = " ".join(said.file.getvalue().split())  # type: ignore[attr-defined]
    narrow = Terminal(file=io.StringIO(), width=80)
    status(tmp_path, narrow)  # every column was cut to a letter or two
    lines = narrow.file.getvalue()  # type: ignore[attr-defined]
    assert "evaluate, accuracy 25.0%, format 50.0%, tokens generated 100" in " ".join(lines.split())
    assert "…" not in lines
    assert max(map(len, lines.splitlines())) <= 80
    assert "a pipeline: 6 of 7 stages done" in found
    assert "2. start-maths evaluate 25.0% 50.0% 100" in found
    assert "7. student sft, waiting" in found
    assert "filter, done, 1 min 30 s │ │ rows 80, kept 48 │ │ ← start.samples" in " ".join(found.split())
    (tmp_path / "pipeline.json").write_text("{")
    with pytest.raises(ValueError, match=r"holds no pipeline \(pipeline.json could not be read"):
        status(tmp_path)
    with pytest.raises(ValueError, match=r"holds no pipeline \(no pipeline.json with stages is there\)"):
        show(tmp_path / "rl")


def test_a_count_under_a_name_that_is_a_share_elsewhere(tmp_path: Path) -> None:
    """Rows for thinking that `fusion` counts stood as 1200.0%."""
    pipelined(tmp_path)
    change(tmp_path, "traces", results={"thinking": 12})
    change(tmp_path, "rl-maths", results={"thinking": 0.5})
    rows = {row[0]: [cell for cell in row if cell] for row in stages_table([read_run(tmp_path)]).rows}
    assert rows["3. traces"][2] == "12"
    assert rows["5. rl-maths"][2] == "50.0%"


# --- in a browser -------------------------------------------------------------------------------------------------

DRAWINGS = '[...document.querySelectorAll("svg.stages")].filter(e => e.getClientRects().length).length'
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here: `apt-get install chromium`")


@needs_chromium
@pytest.mark.slow
def test_pages_in_a_browser_on_a_desk_and_on_a_phone(tmp_path: Path) -> None:
    """No complaint, nothing asked of anybody, nothing beyond the edge; each width has one drawing of the stages."""
    pipelined(tmp_path / "run")
    compared(tmp_path / "compared")
    curated(tmp_path / "curated")
    for name in ("run", "curated"):
        assert main(["report", str(tmp_path / name)]) == 0
    bad = "<script>undefinedThing()</script><img src='http://127.0.0.1:9/a.png'><div style='width:2000px'>x</div>"
    (tmp_path / "bad.html").write_text(bad)
    with Browser(tmp_path / "profile") as browser:
        for width in (390, 1280):
            for page in ("run/report.html", "compared/c.html", "curated/report.html"):
                seen = browser.open(tmp_path / page, width)
                assert (page, seen.complaints, seen.asked, seen.beyond, seen.width) == (page, [], [], [], width)
                assert len(seen.picture) > 10_000
                assert browser.value(DRAWINGS) == (page == "run/report.html")
            planted = browser.open(tmp_path / "bad.html", width)
            assert "undefinedThing is not defined" in "".join(planted.complaints)
            assert planted.asked == ["http://127.0.0.1:9/a.png"]
            assert planted.beyond
