"""A wrong setting: the dry run and the run refuse it in the same words, and before anything is written."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from torch import Tensor

from grpo_lab.batch import TokenBatch
from grpo_lab.cli import main

ROWS = {"loader": "word_problems", "n": 8, "steps": [1, 2], "largest": 20}
SAMPLED = {"data": ROWS, "n_samples": 2, "max_completion_length": 8, "use_cpu": True}
GOOD: dict[str, dict[str, Any]] = {
    "train": {
        "model": {"tiny": {"hidden_size": 16, "num_layers": 1}}, "data": ROWS, "rewards": ["accuracy"], "use_cpu": True,
        "bf16": False, "num_generations": 2, "per_device_train_batch_size": 4, "max_steps": 1,
        "max_completion_length": 8, "report_to": "none",
    },
    "curate": SAMPLED,
    "rounds": {"method": "expert_iteration", "training": {"max_steps": 1}, **SAMPLED},
    "long2short": {"method": "dpo", "training": {"max_steps": 1}, **SAMPLED},
}  # fmt: skip
ALL = tuple(GOOD)
SAMPLERS = ALL[1:]
TRAINED = ("rounds", "long2short")
ELSEWHERE = {"loader": "math", "source": "/no/such/rows"}

ADAPTER = ["--use_vllm", "true", "--rollout", "{sync: adapter}"]

WRONG: list[tuple[tuple[str, ...], list[str], str]] = [
    # the output folder
    (ALL, ["--output_dir", "TMP/file"], r"`output_dir` .*/file' cannot be written: .*/file: that is no folder; "
        r"choose another"),
    (ALL, ["--output_dir", "/proc/1/x"], r"`output_dir` '/proc/1/x' cannot be written: /proc/1: nothing may be "
        r"written there"),
    (ALL, ["--output_dir", ""], "`output_dir` is empty; name a folder, or leave it out"),
    (ALL, ["--output_dir", "TMP/other"], "is no run of ours|holds something else"),
    # rows and rewards
    (ALL, ["--data.n", "0"], r"`data` \(loader 'word_problems'\): n is 0; at least 1"),
    (ALL, ["--data.largest", "3"], "largest is 3"),
    (ALL, ["--data.limt", "3"], r"`data` .* has no setting 'limt'; did you mean 'limit'\? Allowed: \["),
    (ALL, ["--data.limit", "0"], "`data.limit` is 0; it must be a whole number of at least 1"),
    (ALL, ["--data.split", "dev"], r"`data` .*: `split` is 'dev'\. Allowed: \['test', "),
    (ALL, ["--data.template", "chatt"], r"`data` .*: `template` is 'chatt'; did you mean 'chat'\? Allowed: \["),
    (ALL, ["--data", "{loader: file}"], r"`data` \(loader 'file'\) needs `source`, and has none"),
    # its rows are on the hub
    (ALL, ["--data", "{loader: gsm8k, splitt: x}"], "has no setting 'splitt'; did you mean 'split'"),
    (ALL, ["--data", json.dumps(ELSEWHERE)], "source '/no/such/rows' does not exist"),
    (ALL, ["--data.loader", "no_such_team:rows"], "`data.loader` is 'no_such_team:rows', which cannot be loaded"),
    (("train", "rounds", "long2short"), ["--evaluation", "{data: {loader: sorting, n: 0}}"], r"`evaluation.data` .*: "
        r"n is 0;"),
    (("train", "rounds", "long2short"), ["--evaluation", "{data: {loader: sorting, n: 4}, measures: {m: acuracy}}"],
        r"`evaluation.measures.m`: unknown reward 'acuracy'; did you mean 'accuracy'"),
    (("train", "rounds"), ["--cold_start", "{data: {loader: sorting, n: 0}}"], r"`cold_start.data` .*: n is 0;"),
    (("train", "rounds"), ["--cold_start", "{data: {loader: sorting, n: 4}, learning_rate: -1}"],
        "`cold_start.learning_rate` is -1; it"),
    (("train", "rounds"), ["--cold_start", "{data: {loader: sorting, n: 4}, max_seq_length: 8}"],
        "release notes of trl"),
    (("rounds",), ["--data", "{loader: file, source: TMP/rows.jsonl, template: none}", "--keep.gold", "true"],
        "`keep.gold` needs a column"),
    (SAMPLERS, ["--reward", "acuracy"], r"`reward`: unknown reward 'acuracy'; did you mean 'accuracy'\? Allowed: \["),
    (("train",), ["--rewards", "[{name: accuracy, wieght: 2}]"], "`rewards`: 'accuracy' has no setting 'wieght'; did "
        "you mean 'weight'"),
    (("train",), ["--reward_weights", "[1, 2]"], "`reward_weights` has 2 entries, and there are 1 rewards"),
    (("train",), ["--callbacks", "['math:pi']"], "`callbacks`: 'math:pi' is a float; it must be a TrainerCallback"),
    # the model
    (SAMPLERS, ["--model.path", "a/b/c"], "`model.path` is 'a/b/c': no such folder"),
    (SAMPLERS, ["--model.path", "TMP"], "the folder holds no model"),
    (ALL, ["--max_completion_length", "100000"], "100000.* context"),
    (SAMPLERS, ["--engine", "{dtyp: float32}", "--use_vllm", "true"], "`engine` has no setting 'dtyp'; did you mean "
        "'dtype'"),
    # numbers, names, trackers
    (ALL, ["--temperature", "-1"], "`temperature` is -1; it must be a finite number above 0"),
    (ALL, ["--max_completion_length", "0"], "`max_completion_length` is 0; it must be a whole number of at least 1"),
    (ALL, ["--max_hours", "0"], "`max_hours` is 0; it must be a number of hours above 0"),
    (("train",), ["--top_p", "2"], "`top_p` is 2; it must be a number above 0 and at most 1"),
    (("train",), ["--top_k", "-1"], "`top_k` is -1; it must be a whole number of at least 1, or 0"),
    (("train",), ["--max_steps", "0"],
        "`max_steps` is 0; it must be at least 1, or -1 where `num_train_epochs` says it"),
    (("train",), ["--max_steps", "-1", "--num_train_epochs", "0"], "`num_train_epochs` is 0; it must be a finite "
        "number above 0"),
    (("train",), ["--steps_per_generation", "0"], "`steps_per_generation` is 0; it must be a whole number of at "
        "least 1"),
    (("train",), ["--vllm_mode", "colocat"], "`vllm_mode` is 'colocat'; did you mean 'colocate'"),
    (("train",), ["--loss_type", "gspo"], r"`loss_type` is 'gspo'.* Allowed: .*; 'gspo' is an `objective` here"),
    (("train",), ["--scale_rewards", "grup"], "`scale_rewards` is 'grup'; did you mean 'group'"),
    (("train",), ["--max_prompt_length", "64"], "has no setting 'max_prompt_length'.*release notes of trl"),
    (("train",), ["--evalution", "3"], "the recipe has no setting 'evalution'; did you mean 'evaluation'"),
    (("train",), ["--learning_rate", "-1"], "`learning_rate` is -1; it must be a finite number of at least 0"),
    (TRAINED, ["--training.learning_rate", ".nan"], "`training.learning_rate` is nan; it must be a number"),
    (TRAINED, ["--training.learning_rate", ".inf"], "`training.learning_rate` is inf; it must be a finite number of "
        "at least 0"),
    (("train",), ["--objective", "{surrogate: 'unit.recipe.test_refusals:Push', strength: "
        ".nan}"], "`objective.strength` is nan; it must be a number"),
    (("train",), ["--rewards", "[{name: accuracy, weight: .nan}]"], "`rewards.0.weight` is nan; it must be a number"),
    (ALL, ["--temperature", ".nan"], "`temperature` is nan; it must be a (finite )?number"),
    (TRAINED, ["--training.max_steps", "few"], "`training.max_steps` is 'few'; it must be a whole number"),
    (TRAINED, ["--training.max_step", "3"], "did you mean 'max_steps'"),
    (("rounds",), ["--rounds.questions", "9"], "`rounds.questions` is 9 and `data` has 8 rows"),
    (("curate",), ["--filters.balance", "{by: nothing}"], "`filters.balance.by` is 'nothing'"),
    (("curate",), ["--filters.contamination", "{against: [{loader: word_problems, n: 5, split: heldout}]}"],
        r"`filters.contamination.against.0` \(loader 'word_problems'\): `split` is 'heldout'\. Allowed: \["),
    (("train",), ["--save_steps", "0"],
        "`save_steps` is 0; it must be a finite number above 0, or `save_strategy: no`"),
    (TRAINED, ["--training.save_strategy", "steps", "--training.save_steps", "0"], "`training.save_steps` is 0; it "
        "must be"),
    (("train",), ["--report_to", "wandbb"], r"`report_to` names 'wandbb'; did you mean 'wandb'\? Allowed: \["),
    (TRAINED, ["--training.report_to", "wandbb"], "`training.report_to` names 'wandbb'; did you mean 'wandb'"),
    # what the trainer would refuse of its model, and of too few rows
    (("train",), ["--update", "{share_prompts: on}", "--model.lora", "{r: 2, lora_dropout: 0.1}"],
        "`update.share_prompts` is on, and a dropout of 0.1 is active"),
    (("train",), ["--update", "{share_prompts: on}", "--model_init_kwargs", "{attn_implementation: eager}"],
        "`update.share_prompts` is on, and the model's attention is 'eager'"),
    (("train",), [*ADAPTER], "`rollout.sync` is 'adapter', and the model has no adapter"),
    (("train",), [*ADAPTER, "--model.lora", "{r: 2, use_dora: true}"], "engines know no `use_dora` of LoRA"),
    (("train",), [*ADAPTER, "--model.lora", "{r: 600}"], "600"),
    (("train",), ["--rollout", "{generate: groups}", "--model.lora", "{r: 2, lora_dropout: 0.1}"],
        "`rollout.generate` is 'groups', and dropout is active"),
    (("train",), ["--rollout", "{generate: groups}", "--use_vllm", "true"],
        "`rollout.generate` has no effect with `use_vllm: true`"),
    (("train",), ["--data.n", "1"], "`data` has 1 rows, and a generation batch takes 2 different ones"),
    (("train",), ["--steps_per_generation", "8"], "`data` has 8 rows, and a generation batch takes 16 different ones"),
    # a recipe of another command
    (SAMPLERS, ["--rewards", "[accuracy]"], "this is a recipe of `grpo-lab train`, since it has `rewards`; `grpo-lab"),
    (("train", "rounds"), ["--filters.band.low", "0"], "this is a recipe of `grpo-lab curate`, since it has `filters`"),
    (("train", "curate"), ["--rounds.count", "2"], "this is a recipe of `grpo-lab rounds`, since it has `rounds`"),
    (("curate", "rounds"), ["--method", "merge"], "this is a recipe of `grpo-lab long2short`, since it has `method: "
        "merge`"),
]  # fmt: skip


@dataclass(frozen=True)
class Push:
    """A part of a team's, with a knob."""

    strength: float = 1.0

    def __call__(self, batch: TokenBatch) -> Tensor:
        return -self.strength * batch.advantages * batch.logps


CASES = [(command, words, said) for commands, words, said in WRONG for command in commands]


def refusal(command: str, config: Path, words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    assert main([command, "--config", str(config), *words]) == 2
    return capsys.readouterr().err.splitlines()[-1]


def written(command: str, folder: Path, model: Path, tiny: bool = True) -> Path:
    """The good recipe of ``command``; ``tiny``: a training builds its model."""
    recipe = {**GOOD[command], "output_dir": str(folder / "out")}
    if not (tiny and command == "train"):
        recipe["model"] = {"path": str(model)}
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    return folder / "recipe.yaml"


@pytest.fixture
def nothing_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("pipelines.staged_command", "pipelines.open_run"):
        monkeypatch.setattr(f"grpo_lab.{module}.one_writer", lambda _: pytest.fail("the run began to write"))


@pytest.mark.parametrize(("command", "words", "said"), CASES, ids=[f"{c}-{' '.join(w)[2:44]}" for c, w, _ in CASES])
@pytest.mark.usefixtures("nothing_is_written")
def test_dry_run_and_run_refuse_alike(
    command: str, words: list[str], said: str, tiny_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "rows.jsonl").write_text('{"question": "1+1?", "solution": "2"}\n')
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "theirs.txt").write_text("")
    config = written(command, tmp_path, tiny_folder)
    words = [word.replace("TMP", str(tmp_path)) for word in words]
    planned = refusal(command, config, ["--dry-run", *words], capsys)
    assert re.search(said, planned), planned
    assert refusal(command, config, words, capsys) == planned
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("command", ALL)
@pytest.mark.usefixtures("nothing_is_written")
def test_a_tracker_that_is_not_installed(
    command: str, tiny_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from transformers.integrations.integration_utils import get_available_reporting_integrations

    missing = sorted({"clearml", "comet_ml", "wandb"} - set(get_available_reporting_integrations()))
    if not missing or command == "curate":
        pytest.skip("all trackers are installed, or none is asked for")
    where = "report_to" if command == "train" else "training.report_to"
    config = written(command, tmp_path, tiny_folder)
    planned = refusal(command, config, ["--dry-run", f"--{where}", missing[0]], capsys)
    assert f"`{where}` names {missing[0]!r}, which is not installed here; install it" in planned
    assert refusal(command, config, [f"--{where}", missing[0]], capsys) == planned


@pytest.mark.not_fast(
    cases=[
        "{{ 'a' [*] 10000001 }}-makes 10,000,001 characters of one prompt; at most 10,000,000 are taken-train",
    ]
)
@pytest.mark.parametrize("command", ALL)
@pytest.mark.usefixtures("nothing_is_written")
@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("{{ ''.__class__.__mro__ }}", "SecurityError: access to attribute '__class__' of 'str' object is unsafe"),
        ("{{ 'a' * 10000001 }}", "makes 10,000,001 characters of one prompt; at most 10,000,000 are taken"),
        ("{{ raise_exception('no\\nsystem') }}", "TemplateError: no system"),
        ("{% if %}", "TemplateSyntaxError: "),
    ],
)  # fmt: skip
def test_a_chat_template_that_is_too_long_or_leaves_its_sandbox(
    command: str,
    template: str,
    said: str,
    tiny_folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A traceback of jinja2 and exit code 1."""
    model = shutil.copytree(tiny_folder, tmp_path / "model", ignore=shutil.ignore_patterns("*.jinja"))
    settings = json.loads((model / "tokenizer_config.json").read_text())
    (model / "tokenizer_config.json").write_text(json.dumps({**settings, "chat_template": template}))
    config = written(command, tmp_path, model, tiny=False)
    planned = refusal(command, config, ["--dry-run"], capsys)
    assert "the chat template " in planned
    assert said in planned
    assert refusal(command, config, [], capsys) == planned


@pytest.mark.not_fast(but="config.json-{ nope-cannot be loaded: .[*]is not a valid JSON file")
@pytest.mark.parametrize(
    ("file", "text", "said"),
    [
        ("tokenizer.json", "{ nope", "cannot be loaded: .*JSONDecodeError: Expecting property name"),
        ("tokenizer.json", "{}", "cannot be loaded: KeyError: 'added_tokens'"),  # was a traceback
        ("config.json", "{ nope", "cannot be loaded: .*is not a valid JSON file"),
        ("config.json", "[]", "cannot be loaded: "),
        (
            "config.json",
            '{"model_type": "foo"}',
            "model type `foo`.* `pip install --upgrade transformers`",
        ),  # was three lines
    ],
)
@pytest.mark.usefixtures("nothing_is_written")
def test_a_model_whose_files_are_broken_is_one_line(
    file: str, text: str, said: str, tiny_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = shutil.copytree(tiny_folder, tmp_path / "model")
    (model / file).write_text(text)
    for command in ALL:
        config = written(command, tmp_path, model, tiny=False)
        planned = refusal(command, config, ["--dry-run"], capsys)
        assert re.search(said, planned), planned
        assert str(model) in planned
        assert refusal(command, config, [], capsys) == planned


@pytest.mark.parametrize("command", SAMPLERS)
def test_a_hub_name_need_not_have_a_slash(
    command: str, tiny_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`gpt2` was "no such folder" to the dry run, and the run took it."""
    config = written(command, tmp_path, tiny_folder)
    assert main([command, "--config", str(config), "--dry-run", "--model.path", "gpt2"]) == 0
    assert "gpt2" in capsys.readouterr().out
