"""The page of a pipeline: numbers by hand, damaged folders, boxes and arrows that never cover each other, and what a
browser shows of it."""

from __future__ import annotations

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
from grpo_lab.evaluation.drawing import DROP, Drawn, drawing
from grpo_lab.evaluation.pipeline_sections import matrix, stages_table
from grpo_lab.evaluation.run_record import read_run
from unit.test_report import Page, assert_self_contained, page_of
from unit.test_report_kinds import compared, curated, pipelined


def change(folder: Path, stage: str, **more: Any) -> None:
    """What ``pipeline.json`` says of one stage."""
    said = json.loads((folder / "pipeline.json").read_text())
    next(one for one in said["stages"] if one["name"] == stage).update(more)
    (folder / "pipeline.json").write_text(json.dumps(said))


def listed(**one: Any) -> str:
    """A ``pipeline.json`` with the same stage twice."""
    whole = {
        "name": "a",
        "kind": "rl",
        "status": "done",
        "why": "",
        "inputs": {},
        "before": [],
        "seconds": 1,
        "of another release": 2,
    }
    return json.dumps({"stages": [{**whole, "results": {}, **one}] * 2})


def test_the_table_and_the_matrix_by_hand(tmp_path: Path) -> None:
    pipelined(tmp_path)
    run = read_run(tmp_path)
    table = stages_table([run])
    assert table.head == [
        "stage",
        "kind",
        "accuracy",
        "format",
        "rows",
        "kept",
        "steps",
        "loss",
        "tokens generated",
        "time",
    ]
    rows = [[cell for cell in row if cell] for row in table.rows]
    assert rows[:3] == [
        ["1. start", "cold_start", "400", "0.5", "1 min 30 s"],
        ["2. start-maths", "evaluate", "25.0%", "50.0%", "100", "1 min 30 s"],
        ["3. traces", "filter", "80", "48", "1 min 30 s"],
    ]
    assert rows[-2:] == [["7. student", "sft"], ["all stages", "9,100", "9 min 00 s"]]
    maths, general = {"maths": [0.75], "maths, no-thinking": [0.5]}, {"general": [1.0]}
    assert matrix([run]) == {"start": {"maths": [0.25]}, "rl": {**maths, **general}}
    found = (run.before, run.after)
    assert [one.accuracy.value for one in found if one and one.accuracy] == [0.25, 0.75]  # not the last one's problems


def test_a_stage_without_a_model_of_another_is_about_the_start_model(tmp_path: Path) -> None:
    pipelined(tmp_path)
    change(tmp_path, "start-maths", inputs={}, name="evaluate")
    assert next(iter(matrix([read_run(tmp_path)]).items())) == ("start model", {"held-out problems": [0.25]})


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
        ("[]", "pipeline.json holds a list, not a mapping"),
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
    (tmp_path / "student" / "stage.json").write_text('{"made_from": 3}')
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


# --- boxes and arrows ---------------------------------------------------------------------------------------------


@st.composite
def stages(draw: st.DrawFn) -> list[Drawn]:
    found: list[Drawn] = []
    for number in range(draw(st.integers(1, 14))):
        before = draw(st.lists(st.sampled_from([one.name for one in found]), unique=True, max_size=3)) if found else []
        facts = draw(st.lists(st.sampled_from(["accuracy 50.0%", "rows 3", "x" * 90]), max_size=6))
        found.append(Drawn(f"s{number}", "done", ["kind"], facts, before))
    return found


@settings(max_examples=60)
@given(stages(), st.sampled_from([(4, 246.0), (2, 166.0), (1, 60.0)]))
def test_no_box_covers_another_and_no_arrow_passes_behind_one(made: list[Drawn], shape: tuple[int, float]) -> None:
    found = drawing(made, *shape)
    width, height = found.box["width"], found.box["height"]
    place = {one.name: (box.x, box.y) for one, box in zip(made, found.boxes, strict=True)}
    boxes = list(place.values())
    assert all(x > 0 and x + width < found.width and y > 0 and y + height < found.height for x, y in boxes)
    for at, (x, y) in enumerate(boxes):
        assert all(abs(x - a) > width or abs(y - b) >= height + DROP for a, b in boxes[:at])
    assert all(place[one.name][1] > place[other][1] for one in made for other in one.before)
    assert len(found.arrows) == sum(len(one.before) for one in made)
    for path, _ in found.arrows:
        upright = re.search(r"([\d.]+) ([\d.]+)V([\d.]+)", path)
        if upright:  # between two columns; all else of an arrow is between two rows
            x, y, to_y = map(float, upright.groups())
            assert 0 < x < found.width
            assert not any(a < x < a + width and b < to_y and y < b + height for a, b in boxes)
    assert all(len(line) * 6 < width for box in found.boxes for line in box.lines)


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
