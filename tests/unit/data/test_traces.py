"""Kinds `filter` and `build`: every count by hand."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from grpo_lab.pipelines.pipeline_recipe import pipeline_from
from grpo_lab.pipelines.runner import run_pipeline
from grpo_lab.runs.stage import Workspace
from grpo_lab.runs.stop_requests import StopRequests
from grpo_lab.settings import read
from grpo_lab.stages.mix import Build
from grpo_lab.stages.traces import FilterTraces

PROMPT = [{"role": "user", "content": "Ann has 4 packs of 6 stamps. How many stamps?"}]
GOOD = "<think>\nThere are four packs with six stamps in each of them.\n4*6=24 stamps.\n</think>\n#### 24"
TRACES: dict[str, tuple[str, float | None, int]] = {
    "good": (GOOD, 1.0, 30),
    "wrong": (GOOD.replace("#### 24", "#### 10"), 0.0, 30),
    "unscorable": (GOOD, None, 30),
    "two languages": ("<think>\n现在有四包邮票，每包有六张邮票。4*6=24\nSo it is.\n</think>\n#### 24", 1.0, 30),
    "code": (GOOD.replace("4*6=24 stamps.", "```python\nprint(4 * 6)\n```"), 1.0, 40),
    "no tags": ("There are four packs with six stamps in each of them.\n#### 24", 1.0, 20),
    "long paragraph": (GOOD.replace("4*6", "We think of stamps and of packs too. " * 9 + "4*6"), 1.0, 90),
    "too long": (GOOD, 1.0, 101),
    "repeating": (GOOD.replace("4*6", "There are four packs of them. " * 4 + "4*6"), 1.0, 70),
}
FILTERS: dict[str, Any] = {
    "one_language": "en",
    "readable": {"layout": "think", "longest_paragraph": 300},
    "not_too_long": 100,
    "not_repeating": {"ngram": 4, "share": 0.1},
}


def samples(folder: Path, groups: list[list[tuple[str, float | None, int]]], prompt: Any = PROMPT) -> str:
    """What a stage `sample` leaves, of problems whose answer is 24."""

    def message(text: str) -> Any:
        return text if isinstance(prompt, str) else [{"role": "assistant", "content": text}]

    lines = [
        {
            "row": row,
            "scores": [score for _, score, _ in group],
            "lengths": [length for _, _, length in group],
            "cut": 0,
            "completions": [message(text) for text, _, _ in group],
            "problem": {"prompt": prompt, "question": "How many stamps?", "solution": "24"},
        }
        for row, group in enumerate(groups)
    ]
    file = folder / "samples.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(file)


def done(kind: Any, written: dict[str, Any], folder: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    stage = read(kind, written)
    assert stage.plan()
    facts = stage.run(Workspace(folder, StopRequests(folder)))
    return facts, [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()]


def test_every_filter_counts_what_it_dropped(tmp_path: Path) -> None:
    file = samples(tmp_path, [list(TRACES.values()), [TRACES["wrong"], TRACES["good"]]])
    facts, rows = done(FilterTraces, {"samples": file, **FILTERS}, tmp_path)
    # wrong, wrong, unscorable; the Chinese one; code, no tags, long paragraph; one each
    assert facts["dropped"] == {"right": 3, "one_language": 1, "readable": 3, "not_too_long": 1, "not_repeating": 1}
    assert (facts["traces"], facts["kept"], facts["rows"], facts["solved"]) == (11, 2, 2, 2)
    assert [row["row"] for row in rows] == [0, 1]
    assert rows[0]["completion"] == [{"role": "assistant", "content": GOOD}]
    assert rows[0]["prompt"] == PROMPT
    assert rows[0]["problem"]["solution"] == "24"


@pytest.mark.parametrize(
    ("only", "left"),
    [
        ({"right": False}, 9),
        ({}, 7),
        ({"one_language": {"target": "en", "share": 0.0}}, 7),
        ({"one_language": {"target": "zh", "share": 0.5}}, 1),
        ({"readable": {"code": True}}, 7),
        ({"readable": {}}, 6),
        ({"not_too_long": 30}, 3),
        ({"not_repeating": {"ngram": 4}}, 5),
        ({"per_problem": 3}, 3),
    ],
)
def test_a_filter_that_is_not_set_drops_nothing(only: dict[str, Any], left: int, tmp_path: Path) -> None:
    facts, rows = done(FilterTraces, {"samples": samples(tmp_path, [list(TRACES.values())]), **only}, tmp_path)
    assert len(rows) == facts["kept"] == left
    assert sum(facts["dropped"].values()) == 9 - left


def test_refined_traces_have_one_form_and_are_judged_again(tmp_path: Path) -> None:
    said_twice = "\n\nAnn has 4*6=24 stamps.  \nAnn has 4*6=24 stamps.\n\n\n\nSo 24.\n#### 24"
    without_reasoning, without_answer = "#### 24", "<think>\n4*6=24\n</think>\nThat is it"
    traces = [(text, 1.0, 9) for text in (said_twice, GOOD, without_reasoning, without_answer)]
    traces += [(GOOD.replace("#### 24", "#### 25"), 1.0, 9)]  # the score of the file was wrong: ours is asked again
    file = samples(tmp_path, [traces], prompt="How many stamps?")
    facts, rows = done(FilterTraces, {"samples": file, "refine": {}}, tmp_path)
    assert facts["dropped"] == {"right": 0, "refine": 3}
    assert rows[0]["completion"] == "<think>\nAnn has 4*6=24 stamps.\n\nSo 24.\n</think>\nThe answer is 24."
    assert rows[1]["completion"] == GOOD.replace("#### 24", "The answer is 24.")


def test_nothing_left_says_where_it_fell(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"none of 2 traces is left to learn from; what fell where: \{'right': 2\}"):
        done(FilterTraces, {"samples": samples(tmp_path, [[TRACES["wrong"], TRACES["unscorable"]]])}, tmp_path)
    with pytest.raises(ValueError, match=r"both \{reasoning\} and \{answer\} must stand in it"):
        read(FilterTraces, {"samples": "s", "refine": {"form": "{answer}"}})


def lines(folder: Path, name: str, count: int, same: int = 0) -> str:
    """``count`` rows of which ``same`` say what the first one says, with other blanks."""
    texts = [f"answer {number} of {name}" for number in range(count - same)] + [f"answer 0  of {name}\n"] * same
    rows = [{"prompt": "p", "completion": text, "row": number} for number, text in enumerate(texts)]
    (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(folder / f"{name}.jsonl")


@pytest.mark.parametrize(
    ("of", "sources", "dropped"),
    [
        ({"a": {}, "b": {}}, {"a": 8, "b": 4}, (2, 0)),
        ({"a": {"count": 3}, "b": {}}, {"a": 3, "b": 4}, (2, 5)),
        ({"a": {"weight": 3}, "b": {"weight": 1}}, {"a": 8, "b": 2}, (2, 2)),
        ({"a": {"weight": 0.5}, "b": {"weight": 0.5}}, {"a": 4, "b": 4}, (2, 4)),
    ],
)
def test_mixed_by_weights_or_counts(
    of: dict[str, Any], sources: dict[str, int], dropped: tuple[int, int], tmp_path: Path
) -> None:
    there = {"a": lines(tmp_path, "a", 10, same=2), "b": lines(tmp_path, "b", 4)}
    written = {"rows": {name: {"file": there[name], **one} for name, one in of.items()}}
    facts, rows = done(Build, written, tmp_path)
    assert facts["sources"] == sources
    assert facts["rows"] == len(rows) == sum(sources.values())
    assert tuple(facts["dropped"].values()) == dropped
    assert {name: sum(row["source"] == name for row in rows) for name in sources} == sources
    assert len({row["completion"] for row in rows}) == len(rows)
    assert done(Build, written, tmp_path)[1] == rows
    assert done(Build, {**written, "seed": 1}, tmp_path)[1] != rows


def test_general_rows_of_a_loader_and_the_first_of_two_sources(tmp_path: Path) -> None:
    data = {"loader": "sorting", "n": 5, "template": "none"}
    file = lines(tmp_path, "a", 3)
    facts, rows = done(Build, {"rows": {"own": file, "again": file, "general": {"data": data}}}, tmp_path)
    assert facts["sources"] == {"own": 3, "again": 0, "general": 5}
    general = next(row for row in rows if row["source"] == "general")
    assert general["completion"] == general["problem"]["worked_solution"]


@pytest.mark.parametrize(
    ("written", "said"),
    [
        ({"rows": {"a": {"file": "f", "weight": 1}, "b": "g"}}, r"`rows\.a` has a `weight` and `rows\.b` has none"),
        ({"rows": {"a": {"file": "f", "weight": 1, "count": 1}}}, "a `weight`, a `count` or neither"),
        ({"rows": {"a": {}}}, "is a `file` or `data`"),
        ({"rows": {}}, "`rows` is"),
    ],
)
def test_mistakes_of_a_mix(written: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        read(Build, written)


def test_more_rows_than_there_are(tmp_path: Path) -> None:
    file = lines(tmp_path, "a", 3)
    with pytest.raises(ValueError, match=r"`rows\.a\.count` asks for 4 rows of 'a', which has 3 different ones"):
        done(Build, {"rows": {"a": {"file": file, "count": 4}}}, tmp_path)
    (tmp_path / "b.jsonl").write_text('{"prompt": "p"}\n')
    with pytest.raises(ValueError, match=r"`rows\.b\.file`: .*b\.jsonl, line 1: it has no `completion`"):
        done(Build, {"rows": {"b": str(tmp_path / "b.jsonl")}}, tmp_path)


@pytest.mark.not_fast
def test_they_are_stages_of_a_pipeline(tmp_path: Path) -> None:
    file = samples(tmp_path, [list(TRACES.values())])
    stages = [
        {"stage": "build", "name": "mix", "rows": {"own": {"weight": 1}}, "inputs": {"rows.own.file": "kept.rows"}},
        {"stage": "filter", "name": "kept", "samples": file, "not_too_long": 30},
    ]
    facts = run_pipeline(pipeline_from({"output_dir": str(tmp_path / "out"), "stages": stages}))
    assert facts["kept"]["dropped"] == {"right": 2, "not_too_long": 4}
    assert facts["mix"]["dropped"] == {"the same row": 0, "not drawn": 0}
    assert (tmp_path / "out" / "mix" / "rows.jsonl").is_file()


def test_a_build_takes_the_room_of_its_text(tmp_path: Path) -> None:
    """Rows of a file stand in memory one at a time, the chosen ones as their lines."""
    file = tmp_path / "source.jsonl"
    pieces = {f"p{place}": place for place in range(40)}
    with file.open("w") as lines:
        for number in range(500):
            lines.write(json.dumps({"prompt": f"{number}?", "completion": "x", "pieces": pieces}) + "\n")
    stage = read(Build, {"rows": {"a": {"file": str(file)}}})
    tracemalloc.start()
    try:
        facts = stage.run(Workspace(tmp_path, StopRequests(tmp_path)))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert facts["rows"] == 500
    assert peak < 2.5 * file.stat().st_size
