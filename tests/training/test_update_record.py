"""That the exact update is off, why, what it costs and what to change: a plain script sees it, the log and the record
hold it."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

import forked
from grpo_lab import LabConfig, LabTrainer
from grpo_lab.evaluation.page import settings_section
from parity.harness import Run, arguments, train

METRICS = {
    f"update/{name}" for name in ("live_share", "padding_share", "tokens_computed", "tokens_stock", "computed_share")
}


def run_with(folder: Path, model: Path, **changes: Any) -> Run:
    lab = {"objective": "dr_grpo", "update": {"share_prompts": "off"}}  # a price is told in bins of rows
    return train(LabTrainer, LabConfig(**{**arguments(folder, max_steps=2), **lab, **changes}), model)


@pytest.mark.not_fast
@pytest.mark.parametrize(
    ("changes", "setting"), [({"objective": "bnpo"}, "loss_type='dapo'"), ({"entropy_coef": 0.01}, "entropy_coef=0.01")]
)
def test_one_warning_names_the_price_and_the_setting(
    changes: dict[str, Any], setting: str, tiny_folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = run_with(tmp_path, tiny_folder, **changes)
    free = run_with(tmp_path, tiny_folder)
    (line,) = (r for r in caplog.records if r.getMessage().startswith("exact update"))
    assert line.levelno == logging.WARNING
    assert setting in line.getMessage()
    steps, plain = ([row for row in r.history if "loss" in row] for r in (run, free))
    assert all(set(row) >= METRICS for row in (*steps, *plain))
    computed, needed = steps[0]["update/tokens_computed"], plain[0]["update/tokens_computed"]
    assert computed > needed
    assert f"{computed:.0f} tokens where live rows in bins have {needed:.0f}" in line.getMessage()
    assert f"{computed / needed:.1f} times" in line.getMessage()
    told = run.trainer.exact_update.described()
    assert told["because"] in line.getMessage()
    assert (told["first_step_tokens"], told["first_step_tokens_live_in_bins"]) == (computed, needed)
    assert free.trainer.exact_update.described()["rows"] == "live only"
    assert ("because", told["because"]) in dict(settings_section({"exact_update": told}).groups)["exact update"]


@pytest.mark.not_fast
def test_what_was_asked_for_is_no_warning(tiny_folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = run_with(tmp_path, tiny_folder, update="off")
    assert not [r for r in caplog.records if r.getMessage().startswith("exact update") and r.levelno > logging.INFO]
    steps = [row for row in run.history if "loss" in row]
    assert all(row["update/tokens_computed"] == row["update/tokens_stock"] > 0 for row in steps)
    assert run.trainer.exact_update.described()["because"] == "update is 'off'"


@pytest.mark.slow
def test_a_loss_of_the_teams_own_is_named(tiny_folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Team(LabTrainer):
        def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Any:
            return super()._compute_loss(model, inputs)

    run = train(Team, LabConfig(**arguments(tmp_path, max_steps=1), objective="dr_grpo"), tiny_folder)
    assert "Team._compute_loss" in caplog.text
    assert set(run.history[0]) >= METRICS


@pytest.mark.slow
def test_a_plain_script_sees_it(tiny_folder: Path, tmp_path: Path) -> None:
    """No logging is set up: Python's last resort prints warnings on stderr, and nothing below."""
    script = (
        "import sys; from pathlib import Path; from grpo_lab import LabConfig, LabTrainer; from parity.harness "
        "import arguments, train\n"
        "train(LabTrainer, LabConfig(**arguments(Path(sys.argv[2]), max_steps=1), objective='bnpo'), Path(sys.argv[1]))"
    )
    (tmp_path / "script.py").write_text(script)
    words = [str(tmp_path / "script.py"), str(tiny_folder), str(tmp_path)]
    done = forked.run(words)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stderr.count("exact update: micro-batches stay as TRL cut them") == 1
