"""`--dry-run` refuses what the run would refuse, and needs nothing that only the run's machine has."""

from __future__ import annotations

import functools
import io
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from rich.console import Console

from grpo_lab import LabTrainer, data
from grpo_lab.cli import main
from grpo_lab.pipelines.dry_run import plan_of_training as dry_run
from grpo_lab.pipelines.train import train
from grpo_lab.recipe.job import Job, lab_config, numbers_read
from grpo_lab.recipe.sections import read_recipe, recipe_from
from grpo_lab.recipe.yaml import QUICKSTART, shipped_recipe
from grpo_lab.runs.console import show
from grpo_lab.testing import tiny_model

GOOD: dict[str, Any] = {
    "name": "dry", "model": {"tiny": {"hidden_size": 16, "num_layers": 1}},
    "data": {"loader": "word_problems", "n": 8}, "rewards": [{"name": "accuracy", "mode": "strict"}],
    "num_generations": 2, "per_device_train_batch_size": 4, "max_completion_length": 8, "max_steps": 1,
    "bf16": False,
}  # fmt: skip


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    model, tokenizer = tiny_model(hidden_size=16, num_layers=1)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    "changes",
    [
        {"bf16": True},
        {"bf16": None},
        {"bf16": True, "tf32": True, "use_vllm": True, "vllm_mode": "colocate", "beta": 0.04},
        {"fp16": True, "use_liger_kernel": True, "optim": "adamw_8bit"},
        {"use_vllm": True, "vllm_mode": "server", "vllm_server_base_url": "http://10.0.0.1:8000"},
        {"enable_jit_checkpoint": True, "push_to_hub": True, "hub_model_id": "o/m"},
        {"rollout": {"verify_every": 10}, "use_vllm": True, "vllm_mode": "colocate"},
    ],
    ids=lambda changes: "-".join(changes),
)
def test_a_recipe_of_a_gpu_machine_is_checked_on_a_laptop(changes: dict[str, Any], tmp_path: Path) -> None:
    """It used to fail on bf16, TRL's default."""
    written = {**GOOD, **changes, "output_dir": str(tmp_path / "o")}
    facts = dry_run(recipe_from({name: value for name, value in written.items() if value is not None}))
    assert "the trainer built around a small stand-in" in facts["checked"]
    assert not (tmp_path / "o").exists()


@pytest.mark.parametrize("where", ["hub", "folder"])
def test_a_model_that_is_not_tiny_is_stood_in_for(where: str, saved: Path, tmp_path: Path) -> None:
    path = str(saved) if where == "folder" else "Qwen/Qwen2.5-0.5B"
    written = {**GOOD, "model": {"path": path, "lora": {"r": 4, "target_modules": ["q_proj"]}}, "beta": 0.04}
    facts = dry_run(recipe_from({**written, "output_dir": str(tmp_path / "o")}))
    assert "stand-in" in facts["checked"]
    assert (
        "the hub cannot be asked" in facts["takes"]
        if where == "hub"
        else re.search(r"GiB a process: [\d,]+ parameters", facts["takes"])
    )


COLD_START = {"data": {**GOOD["data"], "split": "cold_start"}, "max_steps": 1}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "a reward that its module does not have": ({"rewards": ["grpo_lab.rewards:Nothing"]}, r"`rewards`.*'Nothing'"),
    "a reward whose module is nowhere": ({"rewards": ["no_such_team:r"]}, "looked in the working folder"),
    "a reward model that is not there": ({"rewards": ["/no/such/rm"]}, "`rewards`: no such folder '/no/such/rm'"),
    "another key of LoRA": (
        {"model": {**GOOD["model"], "lora": {"rank": 16}}},
        r"`model\.lora` has no setting 'rank'",
    ),
    "modules that the model does not have": ({"lora": {"r": 4, "target_modules": ["no_proj"]}}, "no_proj"),
    "evaluation on the way without "
    "rows": ({"eval_strategy": "steps", "eval_steps": 1}, r"`eval_strategy` is 'steps'.*eval_dataset"),
    "rows for it without evaluation": ({"eval_dataset": GOOD["data"]}, "`eval_dataset` has no effect"),
    "a callback that is not there": ({"callbacks": ["no_such_team:C"]}, "`callbacks`"),
    "a tool that is not there": ({"tools": ["math:no_such_tool"]}, "`tools`.*no_such_tool"),
    "an environment that is not there": ({"environment_factory": "no_such_team:E"}, "`environment_factory`"),
    "a part of the objective": (
        {"objective": {"name": "dr_grpo", "aggregation": "no_such_team:agg"}}, "no_such_team.*looked"),
    "golds that cannot be read": (
        {"data": {"loader": "file", "source": "GOLDS", "question": "q", "gold": "a"}}, "gold|solution"),
    "no such model folder": ({"model": {"path": "/no/such/model"}}, "`model.path` is '/no/such/model'"),
    "two models": ({"model": {**GOOD["model"], "path": "/x"}}, "exactly one of `path`"),
    "an unknown reward": ({"rewards": ["acuracy"]}, "`rewards`: unknown reward 'acuracy'; did you mean 'accuracy'"),
    "a setting of a reward": ({"rewards": [{"name": "accuracy", "mode": "fuzzy"}]}, "strict.*fuzzy"),
    "a judge that is not there": ({"evaluation": {"data": GOOD["data"], "reward": "acuracy"}}, r"`evaluation\.reward`"),
    "two number formats": ({"bf16": True, "fp16": True}, "`bf16` and `fp16` are both true"),
    "a schedule of no reward": ({"reward_schedules": {"acuracy_reward": 1.0}}, "reward_schedules"),
    "a column that no row has": ({"sampler": {"name": "curriculum", "pass_rate_column": "easy"}}, "easy"),
    "a reward that reads a column that no row has": (
        {"rewards": ["unit.recipe.test_dry_run:reads_target"]}, r"needs \['target'\].*'solution'"),
    "an evaluation without room": (
        {"max_completion_length": 600, "evaluation": {"data": GOOD["data"]}, "cold_start": COLD_START},
        r"`evaluation`: the shortest prompt has \d+ tokens and max_new_tokens is 600.*is "
        r"512.*`max_completion_length` \(no"),
    "an evaluation's own tokens without room": (
        {"evaluation": {"data": GOOD["data"], "max_new_tokens": 512}}, r"is 512\. Lower.*setting is "
            r"`evaluation\.max_new_tokens`"),
    "an evaluation by a column that no row has": (
        {"evaluation": {"data": GOOD["data"], "by": "level"}},
        r"`evaluation\.by` is 'level'; the columns of `evaluation\.data` are prompt, .*steps"),
    "an evaluation without a limit": (
        {"max_completion_length": None, "evaluation": {"data": GOOD["data"]}}, r"`max_completion_length` is "
            r"null.*`evaluation\.max_new"),
    "a cold start beyond the context": (
        {"model": {"tiny": {**GOOD["model"]["tiny"], "max_positions": 64}},
         "cold_start": {"data": {**GOOD["data"], "split": "cold_start"}}},
        r"`cold_start`: the longest .* `cold_start\.max_length` is 1024, and the model's context .* is 64"),
    "a prompt that fills the context": (
        {"model": {"tiny": {**GOOD["model"]["tiny"], "max_positions": 16}}}, "leaves no room in a context of 16 "
            "tokens"),
    "a misspelt schedule": ({"lr_scheduler_type": "cosin"}, "`lr_scheduler_type` is 'cosin'; did you mean 'cosine'"),
    "a misspelt optimizer": ({"optim": "adamw_torch_fuse"}, "`optim` is 'adamw_torch_fuse'; did you mean "
        "'adamw_torch_fused'"),
    "a misspelt seed, below 0": ({"seed": -1}, "`seed` is -1; it must be a whole number from 0 to 4294967295"),
    "a misspelt schedule of the cold start": (
        {"cold_start": {"data": {**GOOD["data"], "split": "cold_start"}, "lr_scheduler_type": "cosin"}},
        "`cold_start.lr_scheduler_type` is 'cosin'; did you mean 'cosine'"),
    "a trainer that is none": ({"trainer": "math:floor"}, "trainer"),
    "an unknown trainer": ({"trainer": "DrGROPTrainer"}, "`trainer`.*DrGROPTrainer"),
    "an environment's argument": (
        {"environment_factory": {"name": "unit.recipe.test_dry_run:Room", "sise": 3}}, "`environment_factory`: .* no "
            "setting 'sise'; did you mean 'size'"),
    "a reward without what it needs": ({"rewards": ["token_classification_steps"]}, "needs `model`, and has none"),
}  # fmt: skip


class Room:
    def __init__(self, size: int = 2) -> None:
        self.size = size


def reads_target(completions: list[Any], target: list[str], *, trainer_state: Any, **_: Any) -> list[float]:
    return [float(len(one)) for one in target]


@pytest.mark.not_fast(cases="a schedule of no reward")
@pytest.mark.parametrize(("changes", "message"), REFUSED.values(), ids=REFUSED)
def test_what_the_run_would_refuse(
    changes: dict[str, Any],
    message: str,
    saved: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And in the same words."""
    if "lora" in changes:
        changes = {"model": {"path": str(saved), "lora": changes["lora"]}}
    golds = tmp_path / "golds.jsonl"
    golds.write_text("".join(json.dumps({"q": f"What is {i}?", "a": "none of these"}) + "\n" for i in range(4)))
    text = yaml.safe_dump({**GOOD, "output_dir": str(tmp_path / "o"), **changes}).replace("GOLDS", str(golds))
    file = tmp_path / "r.yaml"
    file.write_text(text)
    assert main(["train", "--config", str(file), "--dry-run"]) == 2
    error = capsys.readouterr().err
    assert re.search(message, error, re.DOTALL), error
    monkeypatch.setattr(LabTrainer, "train", lambda *_, **__: pytest.fail("it trained"))
    assert main(["train", "--config", str(file), "--use_cpu", "true"]) == 2
    assert capsys.readouterr().err.splitlines()[-1] == error.splitlines()[-1]


@pytest.mark.parametrize(
    ("changes", "rewards"),
    [
        ({"trainer": "KimiTrainer"}, "accuracy × 1, kimi_length_reward × 0.5 from step 100 on, 0 before (added by "
            "KimiTrainer)"),
        ({"trainer": "R1ZeroTrainer"}, "accuracy × 1"),
        ({"rewards": [{"name": "accuracy", "weight": 2}, {"name": "kimi_length", "weight": 0.5, "warmup_steps": 3}]},
         "accuracy × 2, kimi_length × 0.5 from step 3 on, 0 before"),
        ({"reward_schedules": {"accuracy_reward": {"kind": "linear", "start": 0, "end": 9, "value": 0.25}}},
         "accuracy × 0 to 0.25 over the steps 0 to 9 (linear)"),
    ],
)  # fmt: skip
def test_the_rewards_in_force_are_listed(changes: dict[str, Any], rewards: str) -> None:
    """Declared rewards were left out, and a warm-up was not said."""
    facts = dry_run(recipe_from({**GOOD, **changes, "lr_scheduler_type": "constant", "optim": "sgd"}))
    assert facts["rewards"] == rewards
    assert facts["learning rate"].endswith(" (constant), sgd")  # was SchedulerType.CONSTANT, OptimizerNames.SGD


@pytest.mark.not_fast
def test_a_run_without_evaluation_says_where_its_model_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "o"
    train(recipe_from({**GOOD, "use_cpu": True, "save_strategy": "no", "output_dir": str(out)}))
    assert f"model: {out}\n" in capsys.readouterr().out


def test_a_prompt_is_printed_character_by_character(tmp_path: Path) -> None:
    question = r"Find [asy] x \[\sum_j \frac{1}{j}\] and [b]y[/b]"
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"question": question, "answer": "#### 1"}) + "\n")
    rows.write_text(2 * rows.read_text())
    data = {"loader": "gsm8k", "source": str(rows), "template": "none"}
    console = Console(width=400, record=True, file=io.StringIO())
    show("a-test", dry_run(recipe_from({**GOOD, "data": data, "output_dir": str(tmp_path / "run")})), console)
    assert repr(question) in console.export_text()


def test_traceback_may_stand_after_the_command(tmp_path: Path) -> None:
    """It was a setting that LabConfig does not have."""
    for words in (["train", "--config", "no.yaml", "--traceback"], ["--traceback", "train", "--config", "no.yaml"]):
        with pytest.raises(ValueError, match="no such file"):
            main(words)
    with pytest.raises(ValueError, match="nothing"):
        main(["report", str(tmp_path / "nothing"), "--traceback"])


@pytest.mark.not_fast
def test_completions_beyond_the_context_are_told() -> None:
    facts = dry_run(recipe_from({**GOOD, "max_completion_length": 500}))
    assert "`max_completion_length`=500 a completion may run beyond the context of 512 tokens" in facts["context"]
    assert dry_run(recipe_from(GOOD))["context"] == "512 tokens"


def test_no_room_is_said_before_the_cold_start(tmp_path: Path) -> None:
    """It was the first evaluation's error, when the cold start was over."""
    written = {**GOOD, "use_cpu": True, "max_completion_length": 600, "evaluation": {"data": GOOD["data"]}}
    with pytest.raises(ValueError, match="`evaluation`: the shortest prompt"):
        train(recipe_from({**written, "cold_start": COLD_START, "output_dir": str(tmp_path / "o")}))
    assert not (tmp_path / "o").exists()


@pytest.mark.not_fast
def test_rows_are_loaded_once_and_few_of_a_cold_start(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The rows of training were made three times, and 40,000 of the cold start: 15 of 29 seconds of the quickstart's
    dry run."""
    made: list[tuple[str, int]] = []

    @functools.wraps(data.word_problems)
    def counted(n: int, *given: Any, **more: Any) -> Any:
        made.append((more.get("split", "train"), n))
        return data_word_problems(min(n, 64), *given, **more)

    data_word_problems = data.word_problems
    monkeypatch.setattr(data, "word_problems", counted)
    recipe = read_recipe(shipped_recipe(QUICKSTART), {"output_dir": str(tmp_path / "o")})
    facts = dry_run(recipe)
    assert sorted(made) == [("cold_start", 1000), ("test", 500), ("train", 4000)]
    assert facts["cold start"].startswith("40,000 from word_problems")
    made.clear()
    Job.resolve(numbers_read(recipe), lab_config(numbers_read(recipe), bf16=False))
    assert sorted(made) == [("cold_start", 40000), ("test", 500), ("train", 4000)]


@pytest.mark.slow
def test_no_engine_is_loaded_for_a_plan(tmp_path: Path) -> None:
    """TRL loads vLLM where it is installed: the longest part of a dry run's start."""
    file = tmp_path / "r.yaml"
    file.write_text(yaml.safe_dump({**GOOD, "output_dir": str(tmp_path / "o")}))
    words = [sys.executable, "-X", "importtime", "-m", "grpo_lab", "train", "--config", str(file), "--dry-run"]
    told = subprocess.run(words, capture_output=True, text=True, check=True).stderr
    loaded = {line.rpartition("|")[2].strip() for line in told.splitlines() if line.startswith("import time:")}
    assert "trl" in loaded
    assert not [name for name in loaded if name.partition(".")[0] == "vllm"]


def test_the_real_configuration_is_left_alone() -> None:
    """The dry run's own settings must not reach the run."""
    recipe = recipe_from({**GOOD, "use_cpu": True})
    assert lab_config(numbers_read(recipe)).use_cpu is True
    assert lab_config(numbers_read(recipe), use_cpu=False).use_cpu is False


@pytest.mark.parametrize("ahead", ["overlap", "cut_after", "thinking_budget"])
@pytest.mark.parametrize("turns", ["tools", "environment_factory"])
def test_what_a_training_in_turns_refuses_is_said(ahead: str, turns: str) -> None:
    """The stand-in is built without `rollout`, so that the run alone said it: after a cold start, beside an engine."""
    written = {**GOOD, "rollout": {ahead: 1}, "use_vllm": ahead != "thinking_budget"}
    written["vllm_mode"] = "server" if ahead == "overlap" else "colocate"
    written[turns] = ["builtins:abs"] if turns == "tools" else {"name": "builtins:list"}
    with pytest.raises(ValueError, match=rf"^`rollout\.{ahead}` does not combine with `{turns}`, .* leave one"):
        dry_run(recipe_from(written))


@pytest.mark.parametrize("turns", ["tools", "environment_factory"])
def test_texts_beside_tools_are_refused_with_the_rows(turns: str) -> None:
    """TRL failed over the first of them, generated: 'str' object has no attribute 'get'."""
    written = {**GOOD, "data": {**GOOD["data"], "template": "none"}}
    written[turns] = ["builtins:abs"] if turns == "tools" else {"name": "builtins:list"}
    with pytest.raises(ValueError, match=rf"^`{turns}` needs prompts that are conversations, .* those of `data` are"):
        dry_run(recipe_from(written))
