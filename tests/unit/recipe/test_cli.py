"""The command line around the pipelines: version, one line on Ctrl-C, what `--help` says, dry runs."""

from __future__ import annotations

import errno
import json
import os
import re
import signal
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml
from transformers.generation import GenerationMixin

from grpo_lab import __version__
from grpo_lab.cli import main
from grpo_lab.commands import COMMANDS
from grpo_lab.engines.generators import GenerationStopped
from grpo_lab.engines.grouping import EngineFault
from grpo_lab.engines.weights.sync import WeightSyncError
from grpo_lab.recipe.yaml import QUICKSTART, shipped_recipe

RECIPES = Path(__file__).resolve().parents[3] / "recipes"
DATA = {"loader": "word_problems", "n": 12, "steps": [1, 2], "largest": 20, "template": "none"}


def recipe_file(folder: Path, **written: Any) -> str:
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(written))
    return str(path)


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["--version"])
    assert end.value.code == 0
    assert capsys.readouterr().out == f"grpo-lab {__version__}\n"


@pytest.mark.not_fast
def test_quickstart_is_train_with_the_recipe_of_the_package(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    few = ["--data.n", "64", "--cold_start.data.n", "64", "--evaluation.data.n", "8"]
    words = ["--dry-run", "--max_steps", "7", "--output_dir", str(tmp_path / "out"), *few]
    assert main(["quickstart", *words]) == 0
    printed = capsys.readouterr()
    by_name = printed.out.splitlines()
    assert "it/s" not in printed.err  # bars of loading and saving
    recipe = RECIPES / "quickstart" / "dr_grpo.yaml"
    assert by_name[0] == f"recipe: {recipe}"
    assert main(["train", "--config", str(recipe), *words]) == 0
    assert capsys.readouterr().out.splitlines() == by_name[1:]
    assert main(["quickstart", "--dry-run", "--max_step", "7"]) == 2
    assert "did you mean 'max_steps'" in capsys.readouterr().err


def test_an_installation_without_recipes_says_where_it_looked(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"ships no recipe 'quickstart/dr_grpo.yaml'; looked in .*here and .*there"):
        shipped_recipe(QUICKSTART, (tmp_path / "here", tmp_path / "there"))


def test_help_of_evaluate_names_loaders_and_splits(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["evaluate", "--help"])
    said = " ".join(capsys.readouterr().out.split())
    assert "heldout" not in said
    for words in (
        "file, gsm8k, math, humaneval, mbpp or word_problems, coding_tasks, proofs, countdown, sorting",
        "sorting: test, cold_start, train",
        "--largest",
        "--like RUN",
    ):
        assert words in said


@pytest.mark.parametrize("command", ["quickstart", "train", "curate", "long2short", "rounds", "pipeline"])
def test_help_says_that_settings_can_be_replaced(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Only `grpo-lab --help` said so, of two of them."""
    with pytest.raises(SystemExit):
        main([command, "--help"])
    said = " ".join(capsys.readouterr().out.split())
    assert "[options] [--key value …]" in said
    assert ("--config" in said) == (command not in ("quickstart", "pipeline"))
    assert "Every setting of the recipe can be replaced by --key value" in said


@pytest.mark.parametrize("command", [name for name, one in COMMANDS.items() if not one.read])
def test_help_describes_the_command_in_a_sentence(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([command, "--help"])
    said = capsys.readouterr().out.split("\n\n")[1]
    assert said[0].isupper()
    assert said.endswith(".")


# --- --dry-run --------------------------------------------------------------------------------------------------------


def test_dry_run_of_curate_says_what_will_happen_and_writes_nothing(
    tiny_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = recipe_file(
        tmp_path, model={"path": str(tiny_folder)}, data=DATA, n_samples=6, max_completion_length=16,
        filters={"kind": True, "band": {"high": 0.5}}, output_dir=str(tmp_path / "out"),
    )  # fmt: skip
    assert main(["curate", "--config", config, "--dry-run"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    for words in (
        "12 from word_problems",
        "keep open",
        "band rule learnable, high 0.5",
        "at most 72 in all",
        "of at most 16 tokens",
    ):
        assert words in said
    assert not (tmp_path / "out").exists()


def test_dry_run_of_long2short(tiny_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = recipe_file(
        tmp_path, method="dpo", model={"path": str(tiny_folder)}, data=DATA, max_completion_length=64,
        training={"max_steps": 2}, evaluation={"data": {**DATA, "n": 5, "split": "test"}},
        output_dir=str(tmp_path / "out"),
    )  # fmt: skip
    assert main(["long2short", "--config", config, "--dry-run"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    for words in (
        "12 from word_problems",
        "8 a problem at temperature 1, at most 96 in all",
        "ratio 1.5",
        "before and after: 5 from",
    ):
        assert words in said
    assert not (tmp_path / "out").exists()
    merge = ["--method", "merge", "--data", "null", "--training", "{}", "--short_model", str(tmp_path)]
    assert main(["long2short", "--config", config, "--dry-run", *merge]) == 2
    assert re.search(r"`short_model` is .*: the folder holds no model", capsys.readouterr().err)


# --- a full disk, Ctrl-C --------------------------------------------------------------------------------------------


def test_a_full_disk_is_one_line_wherever_it_is_met(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The log, a report, a curation's samples: a checkpoint and the final model say so themselves."""

    def full(*_: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device", "out/metrics.jsonl")

    monkeypatch.setattr("grpo_lab.cli._run", full)
    config = recipe_file(tmp_path, model={"path": "m"}, data=DATA)
    assert main(["curate", "--config", config]) == 74
    said = capsys.readouterr().err.strip()
    assert "No space left on device: 'out/metrics.jsonl'. Mend that; what was written before stays" in said
    assert "\n" not in said


@pytest.mark.parametrize("kind", [WeightSyncError, EngineFault])
def test_an_engine_that_does_not_follow_is_one_line(
    kind: type[Exception], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """And no traceback of twenty frames: it is no fault of the command's."""

    def fails(*_: Any) -> int:
        raise kind("the engine holds other weights:\n  lm_head.weight")

    monkeypatch.setattr("grpo_lab.cli._run", fails)
    config = recipe_file(tmp_path, model={"path": "m"}, data=DATA)
    assert main(["train", "--config", config]) == 1
    assert capsys.readouterr().err == "grpo-lab: error: the engine holds other weights: lm_head.weight\n"


ROUNDS = ["round 1, sample", "round 1, select", "round 2, sample"]


@pytest.mark.parametrize(
    ("command", "stages", "samples", "kept"),
    [
        ("train", ["cold_start", "evaluation_before"], {}, "cold_start; evaluation_before; checkpoint-8 in "),
        ("curate", [], {"pass_rates": 4, "guesses": 2}, "pass rates of 3 problems; guesses of 1 problems in "),
        ("long2short", ["before"], {"samples": 3}, "before; samples of 2 problems in "),
        ("rounds", ROUNDS, {}, "round 1, sample; round 1, select; round 2, sample in "),
        ("report", [], {}, "nothing"),
    ],
)
def test_ctrl_c_is_one_line_with_what_was_kept(
    command: str,
    stages: list[str],
    samples: dict[str, int],
    kept: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "run.json").write_text(json.dumps({"seconds": dict.fromkeys(stages, 1.0)}))
    for name, lines in samples.items():
        (out / f"{name}.jsonl").write_text("{}\n" * lines)
    for number in (4, 8) if command == "train" else ():
        (out / f"checkpoint-{number}").mkdir()
    own = {"train": {"rewards": ["accuracy"]}, "long2short": {"method": "dpo"}, "rounds": {"method": "dpo"}}
    config = recipe_file(tmp_path, model={"path": "m"}, data=DATA, output_dir=str(out), **own.get(command, {}))

    def stopped(*_: Any, **flags: Any) -> int:
        raise GenerationStopped([])  # out of the middle of sampling: a KeyboardInterrupt with a text of its own

    monkeypatch.setattr(f"grpo_lab.{COMMANDS[command].run.replace(':', '.')}", stopped)
    monkeypatch.setattr("grpo_lab.pipelines.dry_run.plan_of_training", stopped)
    words = [command, str(out)] if command == "report" else [command, "--config", config]
    assert main(words) == 130
    said = capsys.readouterr().err.strip()
    assert said.startswith(f"grpo-lab: stopped; kept: {kept}")
    assert "\n" not in said
    if command == "train":
        assert said.endswith(f"in {out} (the same command goes on)")
        assert main([*words, "--dry-run"]) == 130
        assert capsys.readouterr().err.strip() == "grpo-lab: stopped; kept: nothing"
    monkeypatch.setenv("RANK", "1")  # one line a run, not one a process
    assert main(words) == 130
    assert capsys.readouterr().err == ""


@pytest.mark.slow
def test_a_real_ctrl_c_keeps_the_answers_of_an_evaluation(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The signal as a terminal sends it, to this process and to all that it has started, in the middle of
    generation."""
    generate, calls = GenerationMixin.generate, []
    others = {*psutil.Process().children(recursive=True)}

    def interrupted(*given: Any, **named: Any) -> Any:
        calls.append(named)
        if len(calls) == 3:
            for one in {*psutil.Process().children(recursive=True)} - others:
                one.send_signal(signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)
        return generate(*given, **named)

    monkeypatch.setattr(GenerationMixin, "generate", interrupted)
    words = ["evaluate", str(tiny_folder), "--data", "word_problems", "--n", "16", "--batch-size", "4"]
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where this suite runs in the background
    try:
        assert main([*words, "--max-new-tokens", "8", "--output", str(tmp_path / "out")]) == 130
    finally:
        signal.signal(signal.SIGINT, before)
    said = capfd.readouterr()
    assert "Traceback" not in said.err
    assert "of 16 greedy answers, the longest prompts first" in " ".join(said.out.split())
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    answers = len((tmp_path / "out" / "outcomes.jsonl").read_text().splitlines())
    assert 0 < answers == summary["problems"] < 16
    assert summary["settings"]["stopped"].startswith(f"after {answers} of 16")
    assert f"kept: the {answers} answers that were there: in {tmp_path / 'out'}" in said.err


def test_sigterm_ends_an_evaluation_as_ctrl_c_does_with_75(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def measured(*_: Any, **__: Any) -> Any:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(600)
        raise AssertionError("it went on")

    monkeypatch.setattr("grpo_lab.stages.held_out.measure_conditions", measured)
    assert main(["evaluate", "m", "--data", "word_problems"]) == 75
    assert "grpo-lab: SIGTERM: stopped; kept: nothing" in capsys.readouterr().err
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
