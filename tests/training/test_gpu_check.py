"""``make gpu-check``: sections in processes of their own, each with a limit, side by side or alone; results that a kill
does not lose, and a check that is taken up again. The sections here start at once; those of a machine are in the slow
test at the end."""

from __future__ import annotations

import json
import multiprocessing
import re
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import psutil
import pytest
from gpu_checks import fast_tests, markdown
from gpu_checks.record import Record, taken_up
from gpu_checks.runner import Runner
from gpu_checks.section import Section, Setting
from gpu_checks.sections import RATIOS, SECTIONS

import forked

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
TOLD = {"made": "now", "form": "tiny", "device": "cpu", "device_name": "here", "budget_s": 60.0}


def section(name: str, run: str | None = None, **more: Any) -> Section:
    given = {"seconds": 0, "tiny_seconds": 0, "tiny_limit": 20.0, **more}
    return Section(name, f"training.gpu_check_sections:{run or name}", **given)


@pytest.fixture
def record(tmp_path: Path) -> Record:
    return Record(tmp_path / "found.json", dict(TOLD))


def checked(record: Record, sections: list[Section], budget: float = 60.0, cores: int = 2, device: str = "cpu") -> Any:
    """The statuses, by name; read back from the file."""
    folder = record.file.parent / f"scratch-{time.monotonic_ns()}"
    setting = Setting(True, device, time.monotonic() + budget, folder)
    Runner(setting, record.keep, cores).run(sections)
    return {name: outcome["status"] for name, outcome in json.loads(record.file.read_text())["sections"].items()}


def test_the_page_of_what_was_measured_names_sections_that_are_there() -> None:
    page = (SCRIPTS.parent / "docs" / "measured_on_a_gpu.md").read_text()
    cells = [line.split("|")[-2] for line in page.splitlines() if line.startswith("| ") and "section" not in line]
    cells += re.findall('`"[^`]+"`', page.partition("## No verdict yet")[2])
    named = {name.strip('"') for cell in cells for name in re.findall("`([^`]+)`", cell)}
    known = {name for one in SECTIONS for name in one.names()}
    assert len(named) >= 12
    assert named <= known


def test_each_way_to_end_has_its_word_and_no_section_takes_another_with_it(record: Record) -> None:
    """Rows that came before the end are kept."""
    sections = [
        section("breaks"), section("dies"), section("ends itself", "ends_itself"), section("answers"),
        section("outside", "answers", options={"number": 3.0}), section("facts"),
        section("no such function", "nothing"), section("missing", "answers", needs=("no_such_package",)),
        section("long", "answers", tiny_seconds=1000),
    ]  # fmt: skip
    found = checked(record, sections)
    assert found == {
        "breaks": "broke", "dies": "killed", "ends itself": "limit", "answers": "ok", "outside": "failed",
        "facts": "ok", "no such function": "broke", "missing": "not installed", "long": "skipped",
    }  # fmt: skip
    outcomes = record.sections
    assert outcomes["breaks"]["reason"] == "MemoryError: CUDA out of memory"
    assert "in breaks" in outcomes["breaks"]["traceback"]
    assert [row["asked"] for name in ("breaks", "dies") for row in outcomes[name]["rows"]] == ["the first half"] * 2
    assert outcomes["long"]["reason"].startswith("needs about 1000 s, ")
    assert record.failed
    page = record.file.with_suffix(".md").read_text()
    for line in (
        "| breaks | the first half | 1 |  | no verdict |",
        "| breaks | broke |  |  | no verdict: MemoryError: CUDA out of memory |",
        "| answers | a number | 1.00 | <= 2 | pass |",
        "| outside | a number | 3.00 | <= 2 | **fail** |",
        "| missing | not installed |  |  | no verdict: no_such_package not installed |",
    ):
        assert line in page


def test_a_limit_ends_all_that_a_section_started_and_nothing_else(record: Record) -> None:
    """The other one meets a third beside it, while the first hangs."""
    sections = [
        section("hangs", tiny_limit=0.5),
        section("one", "meets", options={"other": "two"}),
        section("two", "meets", options={"other": "one"}),
    ]
    assert checked(record, sections, cores=3) == {"hangs": "limit", "one": "ok", "two": "ok"}
    assert record.sections["hangs"]["reason"] == "its section was ended at its limit of 0 s"
    assert record.sections["hangs"]["rows"]
    (child,) = record.file.parent.glob("scratch-*/child")
    assert is_gone(int(child.read_text()))


def is_gone(pid: int) -> bool:
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


@pytest.mark.not_fast
def test_functional_sections_are_side_by_side_and_timed_ones_alone_after_them(record: Record) -> None:
    """Those that meet would wait for each other for ever if they came one after the other. Of more than there are cores
    no more than these begin."""
    sections = [
        section("timed", "is_alone", timed=True),
        section("one", "meets", options={"other": "two"}),
        section("two", "meets", options={"other": "one"}),
        section("timed too", "is_alone", timed=True),
    ]
    assert checked(record, sections) == dict.fromkeys(("one", "two", "timed", "timed too"), "ok")
    assert list(record.sections)[2:] == ["timed", "timed too"]
    late = [section("one", "meets", options={"other": "two"}, tiny_limit=0.2), section("two", "answers")]
    assert checked(Record(record.file, dict(TOLD)), late, cores=1) == {"one": "limit", "two": "ok"}


@pytest.mark.not_fast(but="cpu")
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_section_s_limit_is_its_own_and_counts_from_its_turn(device: str, record: Record) -> None:
    """On a GPU its process is a new one, and a timed one's has imported before its turn; the check's own end comes
    before a longer limit."""
    sections = [
        section("settings_of", tiny_limit=5.0),
        section("ends with the check", "settings_of", timed=True),
        section("no time", "answers", timed=True, tiny_seconds=1000),
    ]
    found = checked(record, sections, budget=15.0, device=device)
    assert found == {"settings_of": "ok", "ends with the check": "ok", "no time": "skipped"}
    short, rest, _ = (outcome["rows"] for outcome in record.sections.values())
    assert 4 < short[0]["number"] <= 5
    assert 0 < rest[0]["number"] <= 15
    assert short[1]["number"] != rest[1]["number"], "each has a port of its own"


def test_a_check_that_is_taken_up_does_what_has_no_verdict_and_keeps_the_rest(record: Record) -> None:
    """One section is killed in the middle; it is begun again, nothing else is, and what was there stays as it was."""
    sections = [section("first", "answers"), section("outside", "answers", options={"number": 3.0})]
    checked(record, [*sections, section("middle", "dies"), section("last", "answers", tiny_seconds=1000)])
    before = json.loads(record.file.read_text())["sections"]
    again = Record(record.file, dict(TOLD), taken_up(record.file, TOLD))
    open_ones = [section("middle", "answers"), section("last", "answers")]
    assert [one.name for one in [*sections, *open_ones] if not again.answered(one.name)] == ["middle", "last"]
    assert set(checked(again, open_ones).values()) == {"ok", "failed"}
    after = json.loads(record.file.read_text())["sections"]
    for name in ("first", "outside"):
        assert after[name] == before[name]
    assert (before["middle"]["status"], after["middle"]["status"], after["last"]["status"]) == ("killed", "ok", "ok")


def test_a_section_that_is_left_out_for_time_keeps_the_rows_that_an_earlier_check_has(record: Record) -> None:
    checked(record, [section("dies")])
    again = Record(record.file, dict(TOLD), taken_up(record.file, TOLD))
    assert checked(again, [section("dies", tiny_seconds=1000)]) == {"dies": "killed"}
    assert again.sections["dies"]["rows"]


@pytest.mark.not_fast
def test_a_killed_check_has_lost_nothing_and_left_nothing_behind(record: Record) -> None:
    """Kill −9 of the runner itself, while its second section hangs: the first stands in the file, and the hanging
    section ends with the runner."""
    script = multiprocessing.get_context("fork").Process(
        target=checked, args=(record, [section("answers"), section("hangs", tiny_limit=600.0)])
    )
    script.start()
    wait_until(lambda: list(record.file.parent.glob("scratch-*/child")) and record.file.exists())
    sections = psutil.Process(script.pid).children()
    script.kill()
    script.join()
    psutil.wait_procs(sections, timeout=20)
    assert all(is_gone(one.pid) for one in sections)
    assert {name: one["status"] for name, one in taken_up(record.file, TOLD).items()} == {"answers": "ok"}
    (child,) = record.file.parent.glob("scratch-*/child")
    psutil.Process(int(child.read_text())).kill()  # of another session than its section: as a launcher's worker


def wait_until(there: Any) -> None:
    end = time.monotonic() + 30
    while not there():
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.mark.parametrize(
    ("changed", "said"),
    [({"form": "full"}, "its form is 'tiny', this check's 'full'"), ({"device_name": "H200"}, "'here', .*'H200'")],
)
def test_results_of_another_form_or_machine_are_not_taken_up(
    changed: dict[str, str], said: str, record: Record
) -> None:
    record.write()
    with pytest.raises(SystemExit, match=said):
        taken_up(record.file, TOLD | changed)


def test_a_file_that_holds_no_results_is_named(tmp_path: Path) -> None:
    (tmp_path / "half.json").write_text('{"sections":')
    with pytest.raises(SystemExit, match=r"half\.json: no results of a check"):
        taken_up(tmp_path / "half.json", TOLD)


def test_what_a_cpu_cannot_run_says_why_and_is_built(record: Record) -> None:
    one = section("gpu", "nothing", gpu_only="no CPU has it", builds="training.gpu_check_sections:answers")
    assert checked(record, [one]) == {"gpu": "gpu only"}
    assert record.sections["gpu"]["rows"]
    assert "no verdict: no CPU has it" in record.file.with_suffix(".md").read_text()
    assert not record.failed


def test_two_sections_seconds_stand_beside_each_other() -> None:
    """Where both have been measured; small models are not judged."""
    (asked, ((stock, column), (ours, _))), *_ = RATIOS.items()
    sections = {stock: {"status": "ok", "rows": [{column: 3.0}]}, ours: {"status": "ok", "rows": [{column: 1.5}]}}
    full = TOLD | {"form": "full"}
    (row,) = markdown.ratios({**full, "sections": sections})
    assert (row["asked"], row["number"], row["verdict"]) == (asked, "2.00x", "pass")
    (row,) = markdown.ratios({**TOLD, "sections": sections})
    assert row["verdict"] == "no verdict"
    assert not list(markdown.ratios({**full, "sections": {ours: sections[ours]}}))


@pytest.mark.parametrize("one", SECTIONS, ids=lambda one: one.name)
def test_a_section_fits_and_begins_where_it_says(one: Section) -> None:
    """At most a minute, with an engine two; what no CPU runs is built there. Its functions stand in their files."""
    assert one.seconds <= one.limit <= (120 if "vllm" in one.needs else 60)
    assert one.tiny_seconds <= one.tiny_limit <= 90
    assert (one.gpu_only is None) == (one.builds is None)
    for place in filter(None, (one.run, one.builds)):
        module, _, function = place.partition(":")
        assert f"def {function}(" in (SCRIPTS / f"{module.replace('.', '/')}.py").read_text()


def test_sections_are_chosen_by_name_and_tag(record: Record) -> None:
    check = script()
    args = check.arguments(["--only", "engine", "parity, fp32", "--skip", "timed", "engine, float32"])
    names = [one.name for one in check.chosen(args, record)]
    assert names[0] == "parity, fp32"
    assert "engine, LoRA adapter" in names
    assert not {"engine, float32", "whole step, vLLM, ours", "parity, bf16"} & {*names}
    record.sections["parity, fp32"] = {"status": "ok", "rows": []}
    assert [one.name for one in check.chosen(args, record)] == names[1:]
    assert check.arguments(["--resume", "runs/a.json"]).output == Path("runs/a.json")


def script() -> ModuleType:
    import gpu_check

    return gpu_check


def test_failures_of_the_fast_tests_are_named(tmp_path: Path) -> None:
    """As pytest prints them, with workers of xdist and without; the summary does not count them twice."""
    printed = tmp_path / "printed"
    printed.write_text(
        "[gw1] [ 10%] FAILED tests/unit/test_a.py::test_on_a_gpu[1]\ntests/unit/test_a.py::test_right PASSED [ 20%]\n"
        "[gw0] [ 30%] PASSED tests/unit/test_b.py::test_right\nFAILED tests/unit/test_a.py::test_on_a_gpu[1] - no\n"
    )
    *failed, counted = fast_tests.told(["cat", str(printed)], 20.0, "cuda")
    assert [row["number"] for row in failed] == ["tests/unit/test_a.py::test_on_a_gpu[1]"]
    assert (counted["asked"], counted["number"], counted["pass"]) == ("fast tests that failed, of 3", 1, False)
    hanging = fast_tests.told(["sh", "-c", f"cat {printed}; exec sleep 600"], 0.2, "cuda")
    assert [next(hanging)["pass"], next(hanging)["pass"]] == [False, None]
    with pytest.raises(TimeoutError, match="not all fast tests had run"):
        next(hanging)


def test_the_work_of_a_row_by_hand() -> None:
    """h 64, I 128, k 32, 2 layers: attention 2·64² + 2·64·32 + 64 + 2·32 = 12,416, MLP 3·64·128 = 24,576, norms 128:
    37,120 a layer.

    A row of 6 + 4 tokens: 10 · (2 · 74,240 + 2 · 2 · 64 · 10) = 1,510,400 for the layers, 4 · 2 · 1,024 · 64 = 524,288
    for the head.
    """
    from gpu_checks.work import needed_flops, shape_of

    shape = shape_of("tiny")
    assert shape.layer_parameters == 37_120
    assert needed_flops(shape, [(6, 4)], adapter=False) == 3 * (1_510_400 + 524_288)
    assert needed_flops(shape, [(6, 4)] * 2, adapter=True) == 4 * (1_510_400 + 524_288)


def test_shapes_are_those_of_the_memory_table() -> None:
    import memory_table
    from gpu_checks.work import shape_of

    small, middle = memory_table.SHAPES[:2]
    assert (shape_of("0.5B"), shape_of("1.5B")) == (small, middle)


@pytest.mark.parametrize(
    ("name", "teraflops"),
    [("NVIDIA H100 80GB HBM3", 989), ("NVIDIA H100 PCIe", 756), ("NVIDIA A100-SXM4-80GB", 312), ("Tesla T4", None)],
)
def test_the_peak_is_found_by_the_device_s_name(name: str, teraflops: int | None) -> None:
    from gpu_checks.device import peak_flops

    found = peak_flops(name)
    assert (None if found is None else found[0] / 1e12) == teraflops


@pytest.mark.thorough
@pytest.mark.slow
def test_every_section_gives_numbers(tmp_path: Path) -> None:
    """Engines and ranks have tests of their own kind."""
    command = [str(SCRIPTS / "gpu_check.py"), "--tiny", "--output", str(tmp_path / "found.json"), "--budget", "1500"]
    done = forked.run([*command, "--patience", "10", "--skip", "engine", "sharded"], CUDA_VISIBLE_DEVICES="")
    assert (tmp_path / "found.json").is_file(), done.stderr[-3000:]
    sections = json.loads((tmp_path / "found.json").read_text())["sections"]
    assert done.returncode == 0, (tmp_path / "found.md").read_text()
    statuses = {name: outcome["status"] for name, outcome in sections.items()}
    built = {"FlexAttention, fp32", "FlexAttention, 0.5B", "flash kernel, 0.5B"}
    assert {name for name, status in statuses.items() if status != "ok"} == built
    assert {statuses[name] for name in built} == {"gpu only"}
    assert len(statuses) == len([one for one in SECTIONS if not {*one.names()} & {"engine", "sharded"}])
    updates = [row for name in sections if name.startswith("update, 0.5B") for row in sections[name]["rows"]]
    every = [("plain", 0.5), ("plain", 0.0), ("LoRA", 0.5), ("checkpointing", 0.5)]
    assert [(r["variant"], r["dead"], r["side"]) for r in updates] == [
        (*c, s) for c in every for s in ("stock", "ours")
    ]
    for row in updates:
        assert min(row["seconds"], row["tokens/s"], row["peak MiB"]) > 0
        assert row["MFU"] == "unknown", "no CPU has a peak in the table"
        padded = row["side"] == "stock"  # ours computes live rows alone, and each group's prompt once
        assert (row["computed"] >= row["real"]) == padded
    for row in sections["whole step, transformers"]["rows"][:2]:
        shares = [row[f"{part} %"] for part in ("sync", "generate", "score", "update")]
        assert sum(shares) == pytest.approx(100)
        assert min(shares[1:]) > 0
