"""`grpo-lab curate` from end to end on a tiny random model: filters, files, the report, and going on after a kill."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import yaml

import forked
from grpo_lab.cli import main
from grpo_lab.data import load_file
from grpo_lab.engines.generators import TransformersGenerator
from grpo_lab.evaluation.curation_page import histogram, kept_examples
from grpo_lab.pipelines.curate import curate, curation_recipe_from
from grpo_lab.recipe.yaml import read_yaml

RECIPES = Path(__file__).resolve().parents[2] / "recipes"

LEAK = "A farmer counts his sheep on Monday and finds that seven are gone because the gate stood open all night."
STAMPS = "Ann has {} stamps and buys {} more in shop number {}. How many stamps does she have?"
QUESTIONS = [
    *(STAMPS.format(k, k + 1, k) for k in range(10)),
    "ann has 3 stamps, and buys 4 more in shop number 3: how many stamps does she have",  # row 10 repeats row 3
    "Is 7 a prime number?",
    f"{LEAK} How many sheep are left of forty?",
    "word " * 300 + "How many words are these?",  # does not fit into the model's context
]


def rows_file(folder: Path) -> Path:
    file = folder / "rows.jsonl"
    rows = [{"question": q, "solution": str(i), "area": "ab"[i % 2]} for i, q in enumerate(QUESTIONS)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "test.jsonl").write_text(json.dumps({"question": f"{LEAK} How many?", "solution": "1"}) + "\n")
    return file


def recipe(folder: Path, measured_by: Path, **changes: Any) -> Any:
    written: dict[str, Any] = {
        "name": "a-test",
        "model": {"path": str(measured_by)},
        "data": {"loader": "file", "source": str(rows_file(folder)), "template": "none"},
        "reward": "training.curation_rewards:by_digest",
        "n_samples": 6,
        "max_completion_length": 6,
        "problems_per_save": 4,
        "use_cpu": True,
        "output_dir": str(folder / "out"),
        "filters": {
            "kind": True,
            "duplicates": {"similarity": 0.9},
            "contamination": {"against": [{"loader": "file", "source": str(folder / "test.jsonl")}]},
            "band": {"low": 0.0, "high": 1.0},
            "guessable": {"tries": 2, "max_new_tokens": 3},
            "balance": {"by": "area"},
        },
    }
    return curation_recipe_from({**written, **changes})


@pytest.mark.not_fast
def test_every_filter_leaves_its_mark(tiny_folder: Path, tmp_path: Path) -> None:
    done = curate(recipe(tmp_path, tiny_folder))
    everything = pq.read_table(done.folder / "all.parquet").to_pylist()
    assert [row["question"] for row in everything] == QUESTIONS
    by = {row["question"]: row["dropped_by"] for row in everything}
    assert by[QUESTIONS[10]] == "duplicates"
    assert by[QUESTIONS[11]] == "kind"
    assert by[QUESTIONS[12]] == "evaluation sets"
    assert by[QUESTIONS[13]] == "prompt too long"
    assert by[QUESTIONS[0]] == "pass rate"  # solution 0: never right
    for row in everything[:10]:
        assert row["trials"] == 6
        assert row["pass_rate"] == row["successes"] / 6
        assert (row["mean_tokens_right"] is None) == (row["successes"] == 0)
    for row in everything[10:]:
        assert row["pass_rate"] is None  # no sample is spent on a row that is out
    kept = [row for row in everything if row["kept"]]
    assert all(0 < row["pass_rate"] < 1 and row["guesses_right"] == 0 for row in kept)
    areas = [row["area"] for row in kept]
    assert areas.count("a") == areas.count("b")
    assert sum(one.dropped for one in done.report.filters) + len(kept) == len(QUESTIONS)
    lines = [json.loads(line) for line in (done.folder / "curated.jsonl").read_text().splitlines()]
    assert lines == done.rows == pq.read_table(done.folder / "curated.parquet").to_pylist()
    page = (done.folder / "report.html").read_text()
    for words in ("a-test", "prompt too long", "evaluation sets", "Is 7 a prime number?", "Mean pass rate"):
        assert words in page


@pytest.mark.not_fast
def test_another_band_costs_no_sample_and_other_settings_are_refused(tiny_folder: Path, tmp_path: Path) -> None:
    first = curate(recipe(tmp_path, tiny_folder, filters={"band": {}}))
    samples = (first.folder / "pass_rates.jsonl").read_bytes()
    harder = curate(recipe(tmp_path, tiny_folder, filters={"band": {"high": 0.5}}))
    assert (first.folder / "pass_rates.jsonl").read_bytes() == samples
    assert 0 < len(harder.rows) < len(first.rows)
    assert all(row["pass_rate"] < 0.5 for row in harder.rows)
    with pytest.raises(ValueError, match=r"pass_rates\.jsonl holds samples made with.*temperature"):
        curate(recipe(tmp_path, tiny_folder, filters={"band": {}}, temperature=0.5))
    again = curate(recipe(tmp_path, tiny_folder, filters={"band": {}}, temperature=0.5), overwrite=True)
    assert (again.folder / "pass_rates.jsonl").read_bytes() != samples


@pytest.mark.not_fast
def test_a_reward_that_reads_tokens_is_given_them(tiny_folder: Path, tmp_path: Path) -> None:
    changes: dict[str, Any] = {"reward": "training.curation_rewards:by_tokens", "filters": {"band": {"low": 0.5}}}
    done = curate(recipe(tmp_path, tiny_folder, max_completion_length=2, n_samples=2, **changes))
    rates = [json.loads(line) for line in (done.folder / "pass_rates.jsonl").read_text().splitlines()]
    assert {score for rate in rates[1:] for score in rate["scores"]} <= {0.0, 1.0}
    assert len(rates) == len(QUESTIONS)  # a head, and all problems but the one that does not fit


@pytest.mark.not_fast
def test_samples_end_with_the_chat_template_and_what_was_cut_is_said_again(tiny_folder: Path, tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(tiny_folder, model)
    data = {"loader": "file", "source": str(rows_file(tmp_path)), "template": "chat"}
    changes: dict[str, Any] = {"filters": {"band": {}}, "data": data, "n_samples": 2, "max_completion_length": 2}
    first, again = (curate(recipe(tmp_path, model, **changes)) for _ in range(2))
    cut = [note for note in first.report.notes if "were cut at" in note]
    assert len(cut) == 1
    assert [note for note in again.report.notes if "were cut at" in note] == cut  # no completion of its own
    (model / "chat_template.jinja").write_text("{% for m in messages %}Q: {{ m['content'] }}{% endfor %}A:")
    with pytest.raises(ValueError, match=r"pass_rates\.jsonl holds samples made with.*chat_template\.jinja"):
        curate(recipe(tmp_path, model, **changes))


@pytest.mark.not_fast
def test_a_row_without_a_value_to_balance_by_is_told(tiny_folder: Path, tmp_path: Path) -> None:
    made = recipe(tmp_path, tiny_folder, model=None, filters={"balance": {"by": "area"}})
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    rows[0]["area"] = None
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    done = curate(made)
    assert len(done.rows) == 12
    assert any("1 of the 14 rows to balance have no `area`" in note for note in done.report.notes)


@pytest.mark.not_fast
def test_what_is_kept_can_be_trained_on_and_curated_again(tiny_folder: Path, tmp_path: Path) -> None:
    done = curate(recipe(tmp_path, tiny_folder, filters={"band": {}}))
    for name in ("curated.parquet", "curated.jsonl"):
        rows = load_file(done.folder / name, template="none")
        assert rows["question"] == [row["question"] for row in done.rows]
        assert rows["pass_rate"] == [row["pass_rate"] for row in done.rows]
        with pytest.raises(ValueError, match="made with template none and template is 'r1'"):
            load_file(done.folder / name, template="r1")
    source = str(done.folder / "curated.parquet")
    data = {"loader": "file", "source": source, "template": "none"}
    changes = {"filters": {"kind": {"keep": "open"}}, "data": data, "output_dir": str(tmp_path / "second")}
    second = curate(recipe(tmp_path, tiny_folder, **changes))
    assert any("measured anew: prompt_tokens, pass_rate" in note for note in second.report.notes)


@pytest.mark.not_fast
def test_without_a_model_only_the_text_is_read(tiny_folder: Path, tmp_path: Path) -> None:
    done = curate(recipe(tmp_path, tiny_folder, model=None, filters={"kind": True, "duplicates": True}))
    assert len(done.rows) == len(QUESTIONS) - 2
    assert "pass_rate" not in done.rows[0]
    with pytest.raises(ValueError, match="needs a `model`"):
        recipe(tmp_path, tiny_folder, model=None)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"n_sample": 3}, "the recipe.*'n_sample'; did you mean 'n_samples'"),
        ({"filters": {"bnad": {}}}, "`filters` has no setting 'bnad'; did you mean 'band'"),
        ({"filters": {"kind": {"keep": ["opne"]}}}, r"`filters.kind.keep` holds \['opne'\]"),
        ({"filters": {"contamination": {}}}, "`filters.contamination` needs `against`"),
        ({"filters": {"balance": {}}}, "needs `by`"),
        ({"temperature": 0}, "`temperature` is 0"),
        ({"engine": {"dtype": "float32"}}, "only with `use_vllm: true`"),
        ({"model": {"tiny": {}}}, "give `path`"),
    ],
)
def test_mistakes_are_named(tiny_folder: Path, tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        recipe(tmp_path, tiny_folder, **changes)


def test_a_folder_of_somebody_else_is_left_alone(tiny_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.tex").write_text("mine")
    with pytest.raises(ValueError, match="holds something else"):
        curate(recipe(tmp_path, tiny_folder), overwrite=True)


@pytest.mark.parametrize("path", sorted(RECIPES.glob("*/curate.yaml")), ids=lambda path: path.parent.name)
def test_recipes_load(path: Path) -> None:
    loaded = curation_recipe_from(read_yaml(path))
    assert loaded.model is not None
    assert loaded.filters.band is not None
    assert loaded.sampling.n_samples == 10


def test_the_histogram_counts_every_rate_once() -> None:
    rows = [{"pass_rate": k / 10, "kept": k % 2 == 0} for k in range(11)] + [{"pass_rate": None}, {"pass_rate": 0.99}]
    bars = histogram(rows)
    assert [bar.kept + bar.dropped for bar in bars] == [1] * 12
    assert (bars[3].label, bars[3].kept, bars[3].dropped) == ("0.3", 0, 1)
    assert histogram([{"pass_rate": None}]) == []
    assert [number for number, *_ in kept_examples(rows)] == ["0", "2", "4", "6", "8", "10"]


def command(model: Path, folder: Path, problems: int, **settings: Any) -> list[str]:
    """`grpo-lab curate` on problems that are made up; its output folder comes behind."""
    data = {"loader": "word_problems", "n": problems, "template": "none", "largest": 20, "steps": [1, 2]}
    written = {"model": {"path": str(model)}, "data": data, "reward": "training.curation_rewards:by_digest"}
    written |= {"problems_per_save": 4, "use_cpu": True, **settings}
    (folder / "curate.yaml").write_text(yaml.safe_dump(written))
    return ["curate", "--config", str(folder / "curate.yaml"), "--output_dir"]


@pytest.mark.thorough
@pytest.mark.slow
def test_a_killed_curation_goes_on_without_repeating_work(tiny_folder: Path, tmp_path: Path) -> None:
    """SIGKILL half-way through the command; the second run must add the missing rows only and end where a whole run
    ends."""
    words = command(tiny_folder, tmp_path, problems=48, n_samples=8, max_completion_length=60, filters={"band": {}})
    assert main([*words, str(tmp_path / "whole")]) == 0
    samples = tmp_path / "killed" / "pass_rates.jsonl"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "HOLD_AT_CALL": "7"}
    printed = tmp_path / "printed"
    process = forked.start(["-m", "grpo_lab", *words, str(samples.parent)], (printed, printed), environment)
    deadline = time.monotonic() + 600
    while not (samples.is_file() and samples.read_bytes().count(b"\n") > 16):
        assert process.exitcode is None, "the command ended before it could be killed"
        assert time.monotonic() < deadline
        time.sleep(0.01)
    process.kill()
    process.join()
    before = samples.read_bytes()
    assert 16 < before.count(b"\n") < 49
    assert not (samples.parent / "curated.parquet").exists()
    with samples.open("ab") as torn:
        torn.write(b'{"key": "half a li')  # as a machine that lost power might leave it
    assert main([*words, str(samples.parent)]) == 0
    whole = tmp_path / "whole"
    assert samples.read_bytes().startswith(before)
    assert samples.read_bytes() == (whole / "pass_rates.jsonl").read_bytes()
    assert (samples.parent / "curated.jsonl").read_bytes() == (whole / "curated.jsonl").read_bytes()


@pytest.mark.not_fast
def test_asked_to_stop_it_keeps_what_is_sampled_and_goes_on(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """By SIGTERM in a batch (which is finished), Ctrl-C (at once), the hours, a stop file that waits; each time the
    same command."""
    filters: dict[str, Any] = {"band": {}, "guessable": {"tries": 2, "max_new_tokens": 4}}
    words = command(tiny_folder, tmp_path, problems=12, n_samples=4, max_completion_length=8, filters=filters)
    assert main([*words, str(tmp_path / "whole")]) == 0
    folder, made = tmp_path / "stopped", TransformersGenerator.__call__
    samples = folder / "pass_rates.jsonl"
    before = signal.getsignal(signal.SIGINT)
    signal.signal(signal.SIGINT, signal.default_int_handler)

    def asked_by(number: int) -> Any:
        def sampled(*given: Any, **named: Any) -> Any:
            os.kill(os.getpid(), number)
            return made(*given, **named)

        return sampled

    try:
        for number, code, problems in ((signal.SIGTERM, 75, 4), (signal.SIGINT, 130, 4), (signal.SIGUSR1, 75, 8)):
            monkeypatch.setattr(TransformersGenerator, "__call__", asked_by(number))
            assert main([*words, str(folder)]) == code
            assert samples.read_bytes().count(b"\n") == 1 + problems
    finally:
        signal.signal(signal.SIGINT, before)
    monkeypatch.setattr(TransformersGenerator, "__call__", made)
    assert main([*words, str(folder), "--max_hours", "1e-9"]) == 75
    (folder / "STOP").touch()
    assert main([*words, str(folder)]) == 75
    assert not (folder / "STOP").exists()
    said = capsys.readouterr().err
    assert f"SIGTERM: stopped outside of the training; {folder} can be gone on with by the same command" in said
    assert "max_hours: stopped" in said
    assert "pass rates of 4 problems" in said
    assert samples.read_bytes().count(b"\n") == 1 + 8
    assert main([*words, str(folder)]) == 0
    for name in ("pass_rates.jsonl", "guesses.jsonl", "curated.jsonl", "all.parquet"):
        assert (folder / name).read_bytes() == (tmp_path / "whole" / name).read_bytes(), name
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


@pytest.mark.not_fast
def test_rows_to_imitate_lose_the_problems_that_can_be_guessed(tiny_folder: Path, tmp_path: Path) -> None:
    """Two answers a problem; the reward takes any answer where the solution is 10, and none where it is 11. Each
    problem is asked once; of the rest as many stay of every domain as of the smallest."""
    asked = {"What is the slope of the line?": "11", "Two dice: the probability of 7?": "11", "Ann has 3 apples?": "10"}
    rows = [
        {"prompt": text, "completion": f"{text} {way}", "solution": gold, "template": "none"}
        for text, gold in asked.items()
        for way in range(2 if gold == "10" or "dice" in text else 3)
    ]
    file = tmp_path / "answers.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    filters = {"guessable": {"tries": 3, "max_new_tokens": 3}, "balance": {"by": "domain"}}
    data = {"loader": "file", "source": str(file), "template": "none"}
    done = curate(recipe(tmp_path, tiny_folder, data=data, filters=filters))
    counted = [(one.name, one.before, one.dropped) for one in done.report.filters]
    assert counted == [("guessable", 7, 2), ("balance", 5, 1)]
    assert Counter(row["domain"] for row in done.rows) == {"algebra": 2, "counting_and_probability": 2}
    assert all(row["guesses_right"] == 0 and row["completion"].startswith(row["prompt"]) for row in done.rows)
    assert (done.folder / "guesses.jsonl").read_bytes().count(b"\n") == 1 + 3
    assert not (done.folder / "pass_rates.jsonl").exists(), "their problems were sampled before"
    filters = {"hardest": {"n": 3}}  # which are measured where a filter needs it
    done = curate(recipe(tmp_path, tiny_folder, data=data, filters=filters, output_dir=str(tmp_path / "hardest")))
    assert [row["solution"] for row in done.rows] == ["11"] * 3
    filters = {"balance": {"by": "successes"}}
    done = curate(recipe(tmp_path, tiny_folder, data=data, filters=filters, output_dir=str(tmp_path / "balance")))
    assert len(set(Counter(row["successes"] for row in done.rows).values())) == 1


@pytest.mark.parametrize(("by", "model"), [("pass_rate", None), ("kind", {}), ("guesses_right", {})])
def test_a_score_that_nothing_makes_is_refused(by: str, model: Any, tiny_folder: Path, tmp_path: Path) -> None:
    model = model if model is None else {"path": str(tiny_folder)}
    made = recipe(tmp_path, tiny_folder, model=model, filters={"balance": {"by": by}})
    with pytest.raises(ValueError, match=f"`filters.balance.by` is {by!r}; the columns are .* the scores made here"):
        curate(made)
