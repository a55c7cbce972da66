"""``scripts/speedrun.py`` in short, its rules, and the table of docs/speedrun.md."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest
import speedrun
import speedrun_table

SMALLER = {
    "cold_start.max_steps": "2",
    "cold_start.per_device_train_batch_size": "8",
    "cold_start.data.n": "64",
    "data.n": "64",
    "evaluation.data.n": "20",
    "per_device_train_batch_size": "16",
    "max_completion_length": "8",
}
SET = [word for key, value in SMALLER.items() for word in ("--set", key, value)]
OURS = speedrun.OURS


def record(entry: str, cores: int, *seconds: float) -> dict[str, Any]:
    """A record whose runs took ``seconds``, half of it in the cold start, a quarter in the rest."""
    runs = [
        {
            "seed": seed,
            "steps": 8,
            "accuracy": 0.64,
            "low": 0.61,
            "training": {"wall": took, "cpu": 2 * took},
            "cold_start": {"wall": took / 2, "cpu": took},
            "reinforcement": {"wall": took / 4, "cpu": took},
            "evaluations": {"wall": 3.0, "cpu": 3.0},
            "set_up": {"wall": 9.0, "cpu": 9.0},
        }
        for seed, took in enumerate(seconds)
    ]
    facts: dict[str, Any] = {"command": f"--name {entry}", "commit": "abc", "date": "2026-11-28", "machine": "a CPU"}
    facts |= {"load": 0.1, "imports": 5.0}
    return {"entry": entry, "cores": cores, **facts, "runs": runs}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["stock TRL", "ours, further updates"])
def test_a_target_that_is_reached_at_once(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--name", name, *OURS[name], *SET, "--seeds", "3", "--target", "0"]
    monkeypatch.setattr(sys, "argv", ["speedrun.py", *words])
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0})  # threads that wait for a core that is taken spin
    speedrun.main()
    found = json.loads("{" + capsys.readouterr().out.rpartition("\n{")[2])
    [run] = found["runs"]
    assert (run["seed"], run["steps"], run["low"]) == (3, speedrun.EVERY, 0.0)
    parts = [run[part]["wall"] for part in ("cold_start", "reinforcement")]
    assert run["training"]["wall"] == pytest.approx(sum(parts), abs=0.02)
    assert all(run[part]["wall"] > 0 for part in ("cold_start", "reinforcement", "evaluations", "set_up"))
    assert shlex.split(found["command"])[:2] == ["--name", name]


def test_the_page_holds_the_records() -> None:
    records = json.loads(speedrun_table.RECORDS.read_text(encoding="utf-8"))
    page = speedrun_table.PAGE.read_text(encoding="utf-8")
    assert speedrun_table.page_with(page, records) == page, "python scripts/speedrun.py --table"


def test_a_table_by_hand() -> None:
    """The slower seed counts; the fastest entry is first; an earlier record of an entry on as many cores goes."""
    records = [record("a", 2, 50.0, 60.0), record("b", 2, 55.0, 52.0), record("a", 1, 90.0, 95.0)]
    records = speedrun_table.entered(records, record("a", 2, 40.0, 70.0))
    assert [(one["entry"], one["cores"]) for one in records] == [("a", 1), ("b", 2), ("a", 2)]
    lines = speedrun_table.table(records).splitlines()
    assert lines[2].startswith(
        "| b | **55.0** (55.0, 52.0) | 27.5, 26.0 | 13.8, 13.0 | 8, 8 | 110.0, 104.0 | 0.640 (0.610)"
    )
    assert lines[2].endswith("| 5.0; 9.0, 9.0; 3.0, 3.0 | 0.10 | – | abc |")
    assert lines[3].startswith("| a | **70.0** (40.0, 70.0)")
    assert lines[3].endswith("| 90.0, 95.0 | abc |")
    assert lines[-1] == "- a: `python scripts/speedrun.py --name a`"


@pytest.mark.parametrize("words", OURS.values(), ids=OURS)
def test_our_entries_keep_the_rules(words: list[str], tmp_path: Path) -> None:
    assert speedrun.broken_rules(speedrun.recipe_of(speedrun.options_of(words), 1, tmp_path)) == []


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("cold_start.data.blurted", "0.0", "`cold_start.data` is not that of the rules; only its seed may differ"),
        ("data.largest", "30", "`data` is not that of the rules; only its seed and `n` may differ"),
        ("evaluation.data.steps", "[2, 2]", "`evaluation` is not that of the rules in its `data` and `reward`"),
        (
            "evaluation.reward.mode",
            "lenient",
            "`evaluation` is not that of the rules in its `data` and `reward`",
        ),
        ("model", "{path: somewhere}", "`model` has no `tiny`: weights are not random"),
    ],
)
def test_a_broken_rule_is_named(key: str, value: str, said: str, tmp_path: Path) -> None:
    options = speedrun.options_of(["--set", key, value])
    assert speedrun.broken_rules(speedrun.recipe_of(options, 0, tmp_path)) == [said]


def test_what_is_no_entry_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["speedrun.py", "--enter", "--target", "0.1", "--seeds", "0"])
    with pytest.raises(SystemExit, match=r"no entry: --target is 0.1, and 0.6 is the rules'; --seeds are \[0\], "):
        speedrun.main()


def test_a_mistake_in_a_recipe_is_one_line(tmp_path: Path) -> None:
    for words, said in {
        ("--set", "learning_rat", "1"): "error: the recipe has no setting 'learning_rat'; did you mean 'learning_rate'",
        ("--set", "data", "{"): "error: `--set data` .{.: no YAML",
        ("--recipe", "gone.yaml"): "error: the recipe is .*gone.yaml': no such file",
    }.items():
        with pytest.raises(SystemExit, match=said):
            speedrun.recipe_of(speedrun.options_of(words), 0, tmp_path)


def test_stock_is_asked_only_for_what_trl_has(tmp_path: Path) -> None:
    options = speedrun.options_of(["--stock", "--set", "update.dead_groups", "resample"])
    recipe = speedrun.recipe_of(options, 0, tmp_path)
    with pytest.raises(SystemExit, match="--stock: TRL's GRPOConfig has no update"):
        speedrun.stock_settings(recipe)
    settings = speedrun.stock_settings(speedrun.recipe_of(speedrun.options_of(["--stock"]), 0, tmp_path))
    assert (settings["loss_type"], settings["scale_rewards"], settings["beta"]) == ("dr_grpo", "none", 0.0)
