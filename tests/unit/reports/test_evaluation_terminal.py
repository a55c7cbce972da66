"""The table and the lines at the end of a run."""

import io

import pytest

from grpo_lab.diagnostics import diagnose
from grpo_lab.evaluation import EvaluationResult, Outcome, headline, terminal_summary
from grpo_lab.evaluation.terminal import Terminal, duration, lengths, print_table
from grpo_lab.runs.console import show


def result(correct, wrong, truncated=0, samples=0):
    verdicts = [1.0] * correct + [0.0] * wrong
    outcomes = [
        Outcome(i, kind, s, f"q{i}", "", "", "", 50, i < truncated, verdict, None)
        for i, verdict in enumerate(verdicts)
        for kind, many in (("greedy", 1), ("sampled", samples))
        for s in range(many)
    ]
    return EvaluationResult(tuple(outcomes), {"max_new_tokens": 64, "temperature": 0.8, "n_samples": samples})


def printed(*args, width=80, **kwargs):
    stream = io.StringIO()
    terminal_summary(*args, console=Terminal(file=stream, width=width), **kwargs)
    return stream.getvalue()


def test_the_lines_that_scripts_look_for():
    long_path = "/runs/" + "deep/" * 40 + "report.html"
    lines = printed(
        result(160, 352), result(372, 140), report=long_path, model_path="out/[bold]x", seconds=431.7,
        health=diagnose([{"step": 9, "loss": 0.1, "reward": 0.5}]),
    ).splitlines()  # fmt: skip
    assert "training, step 9: healthy (reward 0.5, first 0.5)" in lines
    assert f"report: {long_path}" in lines  # not wrapped
    assert "model: out/[bold]x" in lines  # not taken for colour
    assert lines[-2:] == [
        "held-out accuracy: before 0.312 after 0.727 (n=512)",
        "held-out length: before 50.0 after 50.0 tokens",
    ]
    assert "run time: 7 min 12 s" in lines


def test_table_fits_eighty_columns_with_nothing_cut():
    text = printed(result(160, 352, samples=4), result(372, 140, samples=4))
    table = text[: text.index("held-out accuracy")]
    assert "…" not in table
    assert max(len(line) for line in table.splitlines()) <= 80
    # 160/512 Wilson: 0.3125 [0.2739, 0.3540]; gain (372 − 160)/512 = .414; with ½ a cell: 212.5 up, 0.5 down of 514,
    # centre .4125, half 1.96/514 · √(213 − 212²/514) = .0427
    assert "31.2% [27.4, 35.4]" in table
    assert "+41.4 [+37.0, +45.5]" in table
    assert "pass@4" in table
    assert "sampled: 4 samples a problem at temperature 0.8" in table


def test_without_before_there_is_one_column():
    text = printed(None, result(3, 1))
    assert "75.0% [30.1, 95.4]" in text
    assert "change" not in text
    assert "held-out accuracy: 0.750 (n=4)" in text


def test_many_truncated_answers_are_warned_about():
    assert "warning: 25.0% of the answers were cut off at max_new_tokens=64" in printed(None, result(3, 1, truncated=1))
    assert "warning" not in printed(None, result(4, 1, truncated=1))  # 20% is not above 20%


def test_headline_without_anything_scorable():
    assert headline(None, EvaluationResult(())) == "held-out accuracy: nan (n=0)"
    assert lengths(None, EvaluationResult(())) == "held-out length: – tokens"


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.25, "0.2 s"), (59.4, "59.4 s"), (61, "1 min 01 s"), (7320, "2 h 02 min")]
)
def test_durations(seconds, text):
    assert duration(seconds) == text


STAGES = ["stage", "kind", "accuracy", "rows", "loss", "tokens generated", "time"]
ROWS = [
    ["1. cold_start", "cold_start", "", "40,000", "0.123", "", "1 min 07 s"],
    ["2. second_supervised", "sft", "12.3%", "1,234", "0.5", "1,234,567", "2 h 03 min"],
]


@pytest.mark.parametrize("width", [20, 40, 60, 80, 100, 200])
def test_a_table_breaks_no_word_at_any_width(width):
    stream = io.StringIO()
    print_table(Terminal(file=stream, width=width), "a long title of words", STAGES, ROWS)
    words = stream.getvalue().split()
    for cell in [*STAGES[1:], *(cell for row in ROWS for cell in row)]:
        assert all(word in words for word in cell.split()), cell
    assert (len(stream.getvalue().splitlines()[2]) <= width) or width < 60


def test_a_plan_leaves_a_folder_to_be_copied():
    stream = io.StringIO()
    folder = "/runs/" + "deep/" * 40
    show("mine", {"output folder": folder, "rows": "one [asy] two " * 9}, Terminal(file=stream, width=80))
    lines = stream.getvalue().splitlines()
    assert lines[0] == "mine: what will happen"
    assert [line for line in lines if folder in line] == [f"  output folder   {folder}"]
    assert all(len(line) <= 80 for line in lines if folder not in line)
