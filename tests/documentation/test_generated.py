"""What of the docs is made is as its generators make it: `make docs-index`. Nobody edits it by hand, and nothing of it
is out of date."""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path

import lab_tables
import measured_runs
import pytest
import reference_pages
import rooms_picture
import step_picture
from file_index import PAGE as FILES
from file_index import index, page_with

from documentation.blocks import ROOT
from grpo_lab.labs.arms import Arms, shipped_labs
from grpo_lab.labs.tables import table
from grpo_lab.registry import load_named
from test_architecture import ALLOWED

MADE: dict[Path, Callable[[], str]] = {
    FILES: lambda: page_with(FILES.read_text(encoding="utf-8"), index(ROOT / "grpo_lab")),
    rooms_picture.PICTURE: rooms_picture.picture,
    step_picture.PICTURE: step_picture.picture,
    **reference_pages.PAGES,
    **{
        page: lambda page=page: measured_runs.page_with(page.read_text(encoding="utf-8"))
        for page in measured_runs.PAGES
    },
}
MEASURED = lab_tables.MEASURED.read_text(encoding="utf-8")
KEPT = json.loads(lab_tables.RECORDS.read_text(encoding="utf-8"))


@pytest.mark.not_fast(cases="files.md")
@pytest.mark.parametrize("page", MADE, ids=lambda page: page.name)
def test_it_is_what_its_generator_makes(page: Path) -> None:
    assert page.read_text(encoding="utf-8") == MADE[page](), "run `make docs-index`"


def test_what_labs_measured_is_said_once() -> None:
    assert lab_tables.measured_with(MEASURED, lab_tables.pages(), KEPT) == MEASURED, "lab_tables.py"


@pytest.mark.parametrize("lab", KEPT)
def test_a_lab_s_table_is_of_its_records(lab: str, tmp_path: Path) -> None:
    """Those of the comparisons are not kept. A lab with a report of its own has its text."""
    blocks = lab_tables.BLOCK.findall("".join(lab_tables.pages().values()))
    [block] = [block for _, name, block in blocks if name == lab]
    own = shipped_labs().get(lab) and Arms.read(lab).said.report
    made = table(KEPT[lab])
    if own:
        made = load_named(own, "report")(KEPT[lab], Namespace(folder=tmp_path)).split("\n\n")[0]
    assert block.split("\n\n")[0].rstrip("\n") == lab_tables.seeds_once(lab, made).rstrip("\n")


def test_seeds_stand_in_one_column() -> None:
    text = (
        "| arm | seeds | a | b |\n| --- | --- | --- | --- |\n| x | 2 | 0.3 ± 0.1 (0.2, 0.4) | -1 ± 2 (-1, 0) |\n\n"
        "After 5 k generated tokens:\n\n| arm | b |\n| --- | --- |\n| x (y) | 1,000 ± 1 (1,000, 999) |\n\n"
        "- a, x − y: 1 (1, 2)\n"
    )
    head = text.partition("\n\n")[0]
    shown = lab_tables.seeds_once("coin", text)
    assert shown == f"{head}\n\n- a, x − y: 1\n".replace(" (-1, 0)", "")


def test_a_lab_s_line_by_hand() -> None:
    page = (
        "<!-- lab coin: begin -->\n| arm | seeds | accuracy | tokens |\n| --- | --- | --- | --- |\n"
        "| (start) | – | 0.250 | 5.0 |\n| a coin | 2 | 0.300 ± 0.100 (0.290, 0.310) | 6.0 |\n\nAfter:\n\n| arm | x |\n"
        "<!-- lab coin: end -->\n<!-- lab none: begin -->\nNot measured yet.\n\n<!-- lab none: end -->"
    )
    kept = {"coin": {"a coin": [{"process_seconds": 200}, {"process_seconds": 100}]}}
    found = lab_tables.measured_with("<!-- labs: begin -->\nold\n<!-- labs: end -->", {"coins.md": page}, kept)
    line = "| [coin](coins.md) | accuracy, 2 seeds | (start) 0.250; a coin 0.300 ± 0.100 | 5 |"  # (200 + 100) / 60
    assert found.splitlines()[3:-1] == [line]


@pytest.mark.parametrize("page", ["README.md", "recipes/quickstart/README.md"])
def test_what_make_train_prints_is_the_record_of_seed_0(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    run = measured_runs.records("quickstart/dr_grpo")[0]
    before, after = run["before"], run["after"]
    assert f"accuracy: before {before['accuracy']:.3f} after {after['accuracy']:.3f} (n={run['problems']})" in text
    assert f"length: before {before['tokens']:.1f} after {after['tokens']:.1f} tokens" in text
    if page != "README.md":
        assert f"greedy accuracy   {before['accuracy']:.1%} " in text


def test_a_run_s_record_is_taken_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "run.json").write_text(json.dumps({"seed": 0, "finished": True}))
    for when, right in (("before", 0.25), ("after", 0.875)):
        greedy = {"completions": 8, "accuracy": {"value": right}, "mean_length": 40 * right, "worked_out_share": right}
        (tmp_path / "evaluation" / when).mkdir(parents=True)
        (tmp_path / "evaluation" / when / "summary.json").write_text(json.dumps({"greedy": greedy}))
    (tmp_path / "kept.json").write_text(measured_runs.RECORDS.read_text(encoding="utf-8"))
    monkeypatch.setattr(measured_runs, "RECORDS", tmp_path / "kept.json")
    measured_runs.add(measured_runs.record_of(tmp_path, "quickstart/dr_grpo"))
    page = measured_runs.page_with("<!-- measured: quickstart/dr_grpo cell -->old<!-- end of measured -->")
    others = measured_runs.records("quickstart/dr_grpo")[1:]
    kept = measured_runs.pairs(others, "accuracy", ".3f")
    assert f"accuracy 0.250 → 0.875, {kept}; tokens 10.0 → 35.0, " in page


def test_the_file_index_holds_first_lines(tmp_path: Path) -> None:
    (tmp_path / "new.py").write_text('"""A new one,\nin two lines.\n\nMore."""\n')
    (tmp_path / "long.py").write_text('"""Send rows to the ranks of a plan, and\nsend results back to each."""\n')
    (tmp_path / "__init__.py").write_text('"""A room."""\n')
    made = index(tmp_path)
    assert "- `new.py`: A new one, in two lines." in made
    assert "- `long.py`: Send rows to the ranks of a plan.\n" in made
    (tmp_path / "new.py").unlink()
    assert "new.py" not in index(tmp_path)


def test_the_picture_has_every_room_and_no_arrow_up() -> None:
    height = {room: -number for number, (_, rooms) in enumerate(rooms_picture.FLOORS) for room in rooms}
    rooms = set(ALLOWED) - {"__init__", "__main__"}
    assert rooms <= set(height), "add it to FLOORS of scripts/rooms_picture.py"
    assert [f"{a} → {b}" for a in rooms for b in ALLOWED[a] & rooms if height[a] < height[b]] == []
    inside = {path.name for path in (ROOT / "grpo_lab" / "trainer").iterdir() if (path / "__init__.py").is_file()}
    assert inside <= {room for _, some in rooms_picture.INSIDE_TRAINER for room in some}


def test_every_option_and_every_setting_stands_on_its_page() -> None:
    page = reference_pages.command_line()
    for said in ("## rounds", "`--dry-run`", "`--allow-host", "one of strict, lenient"):
        assert said in page
    settings = reference_pages.settings()
    for name in (*reference_pages.OUR_FIELDS, "rollout.server"):
        assert f"# {name}\n" in settings
    for key in ("dead_groups", "max_bad_steps", "kv_cache_gib", "missing_eos_penalty"):
        assert f"| `{key}` |" in settings
