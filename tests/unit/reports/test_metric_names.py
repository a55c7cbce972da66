"""``trainer.metrics.metric_names``: the one list of what is logged, against the code that logs, the docs and runs."""

from __future__ import annotations

import ast
import inspect
import json
import re
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import EarlyStoppingCallback, TrainerCallback
from trl import GRPOTrainer

import grpo_lab
from grpo_lab import KimiTrainer, LabTrainer
from grpo_lab.objectives import AGGREGATIONS, PRESETS, RATIO_LEVELS, Clipped, Objective, surrogate
from grpo_lab.recipe.build import REWARDS
from grpo_lab.rewards import AccuracyReward, FlippedReward, step_reward
from grpo_lab.runs.metrics import MetricsFile
from grpo_lab.trainer.exactness.loss_proof import toy_batch
from grpo_lab.trainer.metrics.metric_names import OF_TRANSFORMERS, OF_TRL, OURS, logged_names, team_may_log

TESTS = Path(__file__).resolve().parents[2]
DOCS = (TESTS.parent / "docs" / "metrics.md").read_text(encoding="utf-8")
BY_BOOK = {"add", "add_alike", "add_tokens", "add_worst", "log_metric"}


def test_the_docs_page_has_every_name_and_no_other() -> None:
    table = [line.split("|")[1] for line in DOCS.splitlines() if line.startswith("| `")]
    documented = {name for cell in table for name in re.findall(r"`([^`]+)`", cell)} - {"len_q4"}
    assert documented == {name for name in OURS if not re.search(r"/len_q[234]$", name)}
    for whose, names in {"From TRL": OF_TRL, "From transformers": OF_TRANSFORMERS}.items():
        (sentence,) = re.findall(rf"(?m)^- {whose}[^:]*:([^|]*?)\.$", DOCS)
        assert set(re.findall(r"`([^`]+)`", sentence)) == {*names}


def test_what_trls_trainer_logs_is_in_the_list() -> None:
    found = re.findall(r'_metrics\[[^]]+\]\[f?"([^"]+)"\]', inspect.getsource(GRPOTrainer))
    assert len(found) > 30
    assert {re.sub(r"\{.*?\}", "<name>", name) for name in found} <= {*OURS, *OF_TRL}


def names_in(path: Path) -> Iterator[str]:
    """What is handed to a book or ``log_metric`` as a text, as a pattern."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call) and node.args:
            called = node.func
            by = called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")
            if isinstance(called, ast.Subscript) and isinstance(called.slice, ast.Constant):
                by = str(called.slice.value)
            parts = getattr(node.args[0], "values", [node.args[0]])
            texts = [part.value if isinstance(part, ast.Constant) else ".+" for part in parts]
            if by in BY_BOOK and all(isinstance(text, str) for text in texts) and "/" in "".join(texts):
                yield "".join(texts)


def test_what_the_package_logs_is_in_the_list() -> None:
    known = logged_names(["reward"], ["task"])
    package = Path(grpo_lab.__file__).parent
    found = [name for path in package.rglob("*.py") for name in names_in(path)]
    assert len(found) > 40
    assert not [name for name in found if not any(re.fullmatch(name, one) for one in known)]


@pytest.mark.parametrize("name", PRESETS)
def test_what_the_objectives_report_is_in_the_list(name: str) -> None:
    for ratio in RATIO_LEVELS:
        objective = Objective(name, surrogate(PRESETS[name].surrogate), AGGREGATIONS["token_mean"], ratio)
        assert {*objective.diagnostics(toy_batch(objective))} <= {*OURS}


def test_recorded_trainings_log_nothing_else() -> None:
    """The golden trajectories: every setting's steps."""
    recorded = json.loads((TESTS / "golden" / "trajectories.json").read_text(encoding="utf-8"))["settings"]
    logged = {name for run in recorded.values() for step in run["steps"] for name in step}
    rewards = {name.split("/")[1] for name in logged if re.fullmatch("rewards/.+/std", name)}
    assert len(logged) > 30
    assert logged <= {*logged_names(rewards)}


def own(completions: list[Any], **_: Any) -> list[float]:
    return [0.0] * len(completions)


class OwnTrainer(LabTrainer):
    """A team's."""


class OwnSurrogate(Clipped):
    """A team's."""


def test_who_may_log_other_names() -> None:
    rewards = [getattr(import_module("grpo_lab.rewards"), name) for name in REWARDS.values()]
    ours = [*rewards, AccuracyReward(), FlippedReward(AccuracyReward()), Clipped(), EarlyStoppingCallback()]
    assert not team_may_log(LabTrainer, ours)
    assert not team_may_log(KimiTrainer, [])
    callback = type("Own", (TrainerCallback,), {"__module__": "team"})
    for part in (own, FlippedReward(own), step_reward(own), callback(), OwnSurrogate()):
        assert team_may_log(LabTrainer, [AccuracyReward(), part])
    assert team_may_log(OwnTrainer, [])


def test_steps_that_count_tokens_a_second_are_kept(tmp_path: Path) -> None:
    """With ``include_num_input_tokens_seen`` transformers writes ``train_runtime`` into every log."""
    file = MetricsFile(tmp_path / "metrics.jsonl")
    here: Any = SimpleNamespace(is_world_process_zero=True, global_step=1)
    file.on_log(None, here, None, {"loss": 0.5, "train_runtime": 1.0, "train_tokens_per_second": 9.0})
    file.on_log(None, here, None, {"train_runtime": 1.0, "train_loss": 0.5})
    assert [json.loads(line)["loss"] for line in file.path.read_text().splitlines()] == [0.5]
