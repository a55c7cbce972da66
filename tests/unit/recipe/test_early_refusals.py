"""A pipeline refuses a stage's mistake before its first stage, in one line that names the stage; its dry run says the
same. What an earlier stage will leave is not asked for."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from grpo_lab.cli import main

ROWS = {"loader": "word_problems", "n": 8, "steps": [1, 2], "largest": 20}
WORKED = {**ROWS, "split": "cold_start"}
LIMITS = {"max_completion_length": 8, "use_cpu": True}
TRAINING = {"max_steps": 1, "per_device_train_batch_size": 4, "bf16": False, "use_cpu": True}
SAMPLED = {"n_samples": 2, **LIMITS}
MODEL = {"model": "MODEL"}
PATH = {"model": {"path": "MODEL"}}
HELD = {"data": ROWS, "before": False}

GOOD: dict[str, dict[str, Any]] = {
    "cold_start": {**PATH, "data": WORKED, **TRAINING},
    "sample": {**MODEL, "data": ROWS, **SAMPLED},
    "select": {"samples": "SAMPLES", "shortest": {}},
    "filter": {"samples": "SAMPLES"},
    "fusion": {**MODEL, "samples": "SAMPLES", "plain": [WORKED]},
    "build": {"rows": {"own": {"file": "ROWS"}}},
    "sft": {**MODEL, "rows": "ROWS", **TRAINING},
    "dpo": {**MODEL, "rows": "PAIRS", **TRAINING},
    "simpo": {**MODEL, "rows": "PAIRS", **TRAINING},
    "reward_model": {**MODEL, "rows": "PAIRS", **TRAINING},
    "step_labels": {**MODEL, "samples": "SAMPLES", **SAMPLED},
    "step_reward_model": {**MODEL, "rows": "STEPS", **TRAINING},
    "distill": {**MODEL, "teacher": "MODEL", "data": ROWS, **TRAINING, "max_completion_length": 8},
    "merge": {**MODEL, "short_model": "MODEL"},
    "evaluate": {**MODEL, "data": ROWS, **LIMITS},
    "rl": {**PATH, "data": ROWS, "rewards": ["accuracy"], "num_generations": 4, **TRAINING, **LIMITS},
    "curate": {**PATH, "data": ROWS, "filters": {"band": {}}, **SAMPLED},
    "rounds": {**PATH, "data": ROWS, "method": "expert_iteration", "training": TRAINING, **SAMPLED},
    "long2short": {**PATH, "data": ROWS, "method": "dpo", "training": TRAINING, **SAMPLED},
}
# of each section one mistake is tried in every kind of stage that has it, and the others in a few
OF_A_MODEL = ("sample", "fusion", "sft", "dpo", "simpo", "reward_model", "distill", "merge", "evaluate")
LOADED = ("sample", "sft", "reward_model", "evaluate")
OF_A_PATH = ("cold_start", "rl", "curate", "rounds", "long2short")
OF_DATA = ("cold_start", "sample", "distill", "evaluate", "rl", "curate", "rounds", "long2short")
TRAINED = ("cold_start", "sft", "dpo", "simpo", "reward_model", "distill", "rl")
SAMPLERS = ("sample", "curate", "rounds", "long2short")
JUDGES = ("sample", "evaluate", "curate", "rounds", "long2short")
PREFER = ("dpo", "simpo", "reward_model")

SUPERVISED = ("cold_start", "sft", "dpo", "simpo", "distill", "reward_model")
WHOLE = ("rl", "curate", "rounds", "long2short")
MERGED = {"method": "merge", "short_model": "MODEL", "data": None, "training": None}

WRONG: list[tuple[tuple[str, ...], dict[str, Any], str]] = [
    # a model
    (OF_A_MODEL, {"model": "./gone"}, r"`model` is './gone': no such folder"),
    (LOADED, {"model": "gone"}, r"'gone' is neither a folder with a saved model here nor a model that the hub"),
    (OF_A_PATH, {"model.path": "./gone"}, r"`model.path` is './gone': no such folder"),
    (("rl", "rounds"), {"model.path": "gone"}, r"'gone' is neither a folder with a saved .* model that the hub"),
    (("distill",), {"teacher": "./gone"}, r"`teacher` is './gone': no such folder"),
    (("merge",), {"short_model": "./gone"}, r"`short_model` is './gone': no such folder"),
    (("merge",), {"alpha": 2}, r"alpha.* 2"),
    (("evaluate",), {"against": "./gone"}, r"`against` is './gone': no such folder"),
    (("evaluate",), {"against": "MODEL"}, r"`against` names the model itself"),
    ((*LOADED, "merge"), {"model": "EMPTY"}, r"`model` is .*: the folder holds no model"),
    (("sft", "dpo", "simpo", "reward_model", "distill", "merge"), {"model": "ADAPTER"}, r"is an adapter of .*merge"),
    (("rl", "cold_start"), {"model.path": "ADAPTER"}, r"`model.path` .* is an adapter of .*merge"),
    (("merge",), {"model": "gone"}, r"gone is no folder here"),
    (LOADED, {"model": "WORDLESS"}, r"holds a model and no tokenizer \(tokenizer\.json"),
    (("rl",), {"model.path": "WORDLESS"}, r"holds a model and no tokenizer \(tokenizer\.json"),
    (("sample", "evaluate"), {"model": "ADAPTER", "max_completion_length": 5000}, r"5000"),  # its base's context
    # the entry itself
    (("rl", "sft"), {"launch": "gone.yaml"}, r"`stages.it.launch` is 'gone.yaml': no such file"),
    (("rl", "rounds"), {"recipe": "gone.yaml"}, r"`stages.it.recipe` is 'gone.yaml': no such file"),
    # rows of a loader
    (OF_DATA, {"data.n": 0}, r"`data` \(loader 'word_problems'\): n is 0; at least 1"),
    (("sample", "rl"), {"data.loader": "word_problem"}, r"`data.loader` is 'word_problem'; did you mean 'word_prob"),
    (("sample", "rl"), {"data": {"loader": "file", "source": "./gone.jsonl"}}, r"`data` .*gone.jsonl"),
    (("sample", "rl"), {"data": {"loader": "gsm8k", "source": "./gone"}}, r"`data` .*gone"),
    (
        ("sample", "rl"),
        {"data": {"loader": "unit.recipe.test_early_refusals:broken"}},
        r"`data` \(loader 'unit.*'\): TypeError: .*early_refusals.py, line",
    ),
    (("cold_start",), {"data": {"loader": "file", "source": "QUESTIONS"}}, r"no column 'worked_solution'"),
    (("fusion",), {"plain": [{"loader": "file", "source": "QUESTIONS"}]}, r"`plain.0` has no column 'worked_solution'"),
    (("build",), {"rows": {"own": {"data": {"loader": "file", "source": "QUESTIONS"}}}}, r"`rows.own`: .*worked"),
    # files of rows and samples
    (("sft", *PREFER), {"rows": "./gone.jsonl"}, r"`rows` is './gone.jsonl': no such file"),
    (("step_reward_model",), {"rows": "ROWS"}, r"`rows`: .*rows.jsonl.* line 1: it has no `completions`"),
    (("step_labels",), {"samples": "ROWS"}, r"`samples`: .*rows.jsonl, line 1: it has no `row`"),
    (("step_labels",), {"estimate": "any"}, r"estimate.*any"),
    (("step_labels",), {"reward": "acuracy"}, r"unknown reward 'acuracy'; did you mean 'accuracy'"),
    (("step_reward_model",), {"learning_rte": 1}, r"has no setting 'learning_rte'; did you mean 'learning_rate'"),
    (("step_labels", "step_reward_model"), {"model": "./gone"}, r"`model` is './gone': no such folder"),
    (("sft", *PREFER), {"rows": "QUESTIONS"}, r"`rows`: .*questions.jsonl.* line 1: it has no `prompt`"),
    (("select", "filter", "fusion"), {"samples": "./gone.jsonl"}, r"`samples` is './gone.jsonl': no such file"),
    (("select", "filter", "fusion"), {"samples": "ROWS"}, r"`samples`: .*rows.jsonl, line 1: it has no `row`"),
    (("build",), {"rows": {"own": {"weight": 1}}}, r"`rows.own` is a `file` or `data`"),
    (("build",), {"rows": {"own": "./gone.jsonl"}}, r"`rows.own.file` is './gone.jsonl': no such file"),
    (("build",), {"rows": {"own": "QUESTIONS"}}, r"`rows.own.file`: .*questions.jsonl, line 1: it has no `prompt`"),
    (("build",), {"rows": {"own": {"file": "ROWS", "count": 99}}}, r"`rows.own.count` asks for 99 rows .* which has 4"),
    # rewards
    (JUDGES, {"reward": "acuracy"}, r"unknown reward 'acuracy'; did you mean 'accuracy'"),
    (("rl",), {"rewards": ["acuracy"]}, r"`rewards`: unknown reward 'acuracy'; did you mean 'accuracy'"),
    (("rl",), {"rewards": [{"name": "accuracy", "wieght": 2}]}, r"`rewards`: 'accuracy' has no setting 'wieght'"),
    (("filter",), {"reward": "acuracy", "refine": {}}, r"`reward`: unknown reward 'acuracy'"),
    (("filter",), {"one_language": "klingon"}, r"klingon"),
    (("evaluate",), {"measures": {"m": "acuracy"}}, r"`evaluation.measures.m`: unknown reward 'acuracy'"),
    # lengths
    (("sample", "evaluate", "rl", "curate", "rounds", "long2short"), {"max_completion_length": 5000}, r"5000.*context"),
    (("evaluate",), {"max_new_tokens": 5000}, r"5000.*context"),
    (("rl",), {"evaluation": {"data": ROWS, "max_new_tokens": 5000}}, r"5000.*context"),
    # batches, engines, modes
    (("rl",), {"num_generations": 3}, r"divisible by num_generations \(3\)|num_generations.*3"),
    (("rl",), {"rollout": {"overlap": 1}}, r"`rollout.overlap` generates beside the training, and without `use_vllm`"),
    (("rl",), {"update": {"share_prompts": "on"}, "model.lora": {"r": 4, "lora_dropout": 0.1}}, r"dropout of 0.1"),
    (SAMPLERS, {"engine": {"dtype": "float32"}}, r"`engine` has an effect only with `use_vllm: true`"),
    (("sample", "curate"), {"engine": {"dtyp": "x"}, "use_vllm": True}, r"`engine` has no setting 'dtyp'"),
    (("evaluate",), {"engine": {"dtyp": "x"}, "use_vllm": True}, r"`engine` has no setting 'dtyp'"),
    (("evaluate",), {"thinking": [True, False]}, r"`evaluation.thinking` has no effect"),
    (("evaluate",), {"thinking_budget": 7}, r"thinking_budget 7 .* leave no room"),
    (("evaluate",), {"templates": ["chatt"]}, r"`template` is 'chatt'; did you mean 'chat'"),
    (("evaluate",), {"by": "level"}, r"`evaluation.by` is 'level'"),
    (("evaluate",), {"effort_by": "level"}, r"`effort_by` is 'level'"),
    # numbers and names of a training
    (TRAINED, {"learning_rate": -1}, r"`(\w+.)?learning_rate` is -1; it must be a finite number of at least 0"),
    (("sft", "rl"), {"report_to": "wandbb"}, r"`(\w+.)?report_to` names 'wandbb'; did you mean 'wandb'"),
    (("sft", "dpo", "rl"), {"learning_rte": 1}, r"has no setting 'learning_rte'; did you mean 'learning_rate'"),
    (("sft", "dpo", "rl"), {"eval_strategy": "steps"}, r"`(\w+.)?eval_strategy` is 'steps'"),
    (("rounds", "long2short"), {"training.learning_rate": -1}, r"`training.learning_rate` is -1"),
    (("curate",), {"filters": {"balance": {"by": "level"}}}, r"`filters.balance.by` is 'level'"),
    # what was accepted, and read by nobody
    (
        ("cold_start", "curate", "long2short"),
        {"model.lora": {"r": 4}},
        r"`model.lora` has no effect: a",
    ),
    (
        ("curate", "rounds", "long2short"),
        {"model.tokenizer": "MODEL"},
        r"`model.tokenizer` has no effect: a model",
    ),
    (("cold_start",), {"data": None}, r"` has no effect: without `data` nothing is trained"),
    (
        ("sample", "curate", "rounds", "long2short"),
        {"reward": {"name": "accuracy", "weight": 2}},
        r"`reward.weight` is 2",
    ),
    (("evaluate",), {"measures": {"m": {"name": "accuracy", "weight": 2}}}, r"`evaluation.measures.m.weight` is 2"),
    (("evaluate",), {"every": 2}, r"`every` has no effect"),
    (("evaluate",), {"before": False}, r"`before` has no effect"),
    (("rounds", "long2short"), {"evaluation": {**HELD, "every": 2}}, r"`evaluation.every` has no effect"),
    (("filter",), {"reward": "boxed"}, r"`reward` has an effect only with `refine`"),
    (("long2short",), {"alpha": 0.3}, r"`alpha` has an effect only with `method: merge`"),
    (("long2short",), {**MERGED, "samples": "SAMPLES"}, r"`samples` has no effect with `method: merge`"),
    (WHOLE, {"output_dir": "runs/mine"}, r"`output_dir` has no effect: a stage works in the pipeline's folder"),
    (SUPERVISED, {"output_dir": "runs/mine"}, r"output_dir` has no effect: the model is saved in the folder"),
    (
        ("cold_start", "sft", "dpo"),
        {"model_init_kwargs": {"dtype": "bfloat16"}},
        r"model_init_kwargs` has no effect: TRL",
    ),
    (("rounds",), {"training.model_init_kwargs": {"dtype": "auto"}}, r"`training.model_init_kwargs` has no effect"),
    # other frameworks' words
    (
        ("cold_start", "sft", "reward_model"),
        {"model_name_or_path": "m", "dtype": "auto"},
        r"'dtype' is `bf16: true`.*'model_name_or_path' is `model",
    ),
    (("sample", "evaluate", "build"), {"dataset_name": "d"}, r"'dataset_name' is `rows: …`, a file .*coming_from_trl"),
    (("rl",), {"torch_dtype": "x"}, r"'torch_dtype' is `model_init_kwargs: .*coming_from"),
    (WHOLE[1:], {"torch_dtype": "x"}, r"'torch_dtype' is nothing: a model is loaded as it was saved"),
    (("rounds", "long2short"), {"training.torch_dtype": "x"}, r"`training` has words .*'torch_dtype' is `bf16: true`"),
    (("rl",), {"cold_start": {"data": WORKED, "use_peft": True}}, r"`cold_start` has words .*'use_peft' is nothing"),
]
CASES = [(kind, change, said) for kinds, change, said in WRONG for kind in kinds]


def broken(**_: Any) -> Any:
    """A team's loader with a mistake in it."""
    return len(3)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def places(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What the recipes name in capitals."""
    folder = tmp_path_factory.mktemp("early")
    asked = [{"role": "user", "content": "1 + 1?"}]
    own = {"prompt": asked, "question": "1 + 1?", "solution": "2", "worked_solution": "1 + 1 = 2\n#### 2"}
    answers = [[{"role": "assistant", "content": text}] for text in ("#### 2", "#### 3")]
    lines: dict[str, list[dict[str, Any]]] = {
        "questions": [{"question": "1 + 1?", "solution": "2"}] * 4,
        "rows": [{"prompt": asked, "completion": [{"role": "assistant", "content": f"{n} #### 2"}]} for n in range(4)],
        "pairs": [{"prompt": asked, "chosen": answers[0], "rejected": answers[1]}] * 4,
        "steps": [{"prompt": asked, "completions": ["1 + 1 = 2", "#### 2"], "labels": [0.5, 1.0]}] * 4,
        "samples": [
            {"row": 0, "scores": [1.0, 0.0], "lengths": [3, 3], "cut": 0, "completions": answers, "problem": own}
        ],
    }
    for name, rows in lines.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "empty").mkdir()
    adapter = folder / "adapter"
    shutil.copytree(tiny_folder, adapter, ignore=shutil.ignore_patterns("config.json", "*.safetensors"))
    (adapter / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": str(tiny_folder)}))
    wordless = shutil.copytree(tiny_folder, folder / "wordless", ignore=shutil.ignore_patterns("token*", "*.jinja"))
    files = {name.upper(): str(folder / f"{name}.jsonl") for name in lines}
    models = {"MODEL": tiny_folder, "EMPTY": folder / "empty", "ADAPTER": adapter, "WORDLESS": wordless}
    return files | {name: str(place) for name, place in models.items()}


def placed(written: Any, places: dict[str, str]) -> Any:
    """``written`` with folders and files in the place of their names in capitals."""
    if isinstance(written, dict):
        return {name: placed(one, places) for name, one in written.items()}
    if isinstance(written, list):
        return [placed(one, places) for one in written]
    return places.get(written, written) if isinstance(written, str) else written


def changed(written: dict[str, Any], change: dict[str, Any]) -> dict[str, Any]:
    """``written`` with dotted keys of ``change``."""
    written = json.loads(json.dumps(written))
    for name, value in change.items():
        section, _, key = name.rpartition(".")
        (written[section] if section else written)[key] = value
    return written


def pipeline(tmp_path: Path, *stages: dict[str, Any]) -> Path:
    """A file of a pipeline whose first stage would train, and write."""
    first = {"stage": "cold_start", "name": "first", "model": {"tiny": {"hidden_size": 16, "num_layers": 1}}}
    file = tmp_path / "pipeline.yaml"
    file.write_text(yaml.safe_dump({"output_dir": str(tmp_path / "out"), "stages": [first, *stages]}))
    return file


@pytest.mark.parametrize(("kind", "change", "said"), CASES, ids=[f"{k}-{json.dumps(c)[:44]}" for k, c, _ in CASES])
def test_a_mistake_is_said_before_the_first_stage(
    kind: str,
    change: dict[str, Any],
    said: str,
    places: dict[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    stage = placed({"stage": kind, "name": "it", **changed(GOOD[kind], change)}, places)
    file = pipeline(tmp_path, stage)
    assert main(["pipeline", "run", str(file)]) == 2
    refused = capsys.readouterr().err.splitlines()[-1]
    assert re.search(said, refused), refused
    assert re.search(r"stages\.it\b|stage 'it'", refused), refused
    assert not (tmp_path / "out").exists()
    if "hub" not in said:  # a dry run may have no network
        assert main(["pipeline", "run", str(file), "--dry-run"]) == 2
        assert capsys.readouterr().err.splitlines()[-1] == refused


@pytest.mark.not_fast
def test_what_is_right_is_planned_and_what_comes_from_a_stage_is_not_asked_for(
    places: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stages = [placed({"stage": kind, "name": kind, **written}, places) for kind, written in GOOD.items()]
    taken = {"model": "cold_start.model", "model.path": "cold_start.model", "teacher": "cold_start.model"}
    taken |= {"short_model": "sft.model", "samples": "sample.samples", "data.source": "curate.rows"}
    for kind, written in GOOD.items():
        own = {**taken, "rows": "select.rows"}
        inputs = {name: one for name, one in own.items() if name.partition(".")[0] in written and "." not in name}
        later = {"stage": kind, "name": f"later-{kind}", **written, "inputs": inputs}
        if isinstance(written.get("model"), dict):
            inputs["model.path"] = inputs.pop("model")
        if isinstance(written.get("rows"), dict):
            inputs["rows.own.file"] = inputs.pop("rows")
        if isinstance(written.get("data"), dict) and kind != "cold_start":
            inputs["data.source"] = taken["data.source"]
            later["data"] = {"loader": "file"}
        stages.append(placed(later, places))
    assert main(["pipeline", "run", str(pipeline(tmp_path, *stages)), "--dry-run"]) == 0
    shown = capsys.readouterr().out
    assert "later-rounds" in shown
    assert not (tmp_path / "out").exists()


def test_what_a_stage_will_leave_is_known_by_what_it_is_made_from(
    places: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The model of a first stage is not there yet, but its context is known."""
    for inputs, stage in (
        ({"model.path": "first.model"}, {**GOOD["rl"], "model": {}, "max_completion_length": 5000}),
        ({"model": "first.model"}, {**GOOD["sample"], "max_completion_length": 5000}),
    ):
        kind = "rl" if "rewards" in stage else "sample"
        stage = {name: one for name, one in stage.items() if name != "model" or kind == "rl"}
        file = pipeline(tmp_path, {"stage": kind, "name": "it", "inputs": inputs, **stage})
        assert main(["pipeline", "run", str(file)]) == 2
        assert "5000" in capsys.readouterr().err
    adapter = {"stage": "rl", "name": "tuned", **GOOD["rl"], "model": {"path": places["MODEL"], "lora": {"r": 2}}}
    on = {"stage": "sft", "name": "it", "rows": places["ROWS"], "inputs": {"model": "tuned.model"}, **TRAINING}
    assert main(["pipeline", "run", str(pipeline(tmp_path, adapter, on))]) == 2
    assert re.search(r"stage 'it': .*tuned.* will be an adapter", capsys.readouterr().err)


def test_mistakes_of_several_stages_are_said_together(
    places: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of their settings; then of what they would do."""
    wrong = [{"stage": "sft", "name": "one", **MODEL}, {"stage": "marge", "name": "two", **MODEL}]
    late = [{"stage": "sft", "name": name, **GOOD["sft"], "rows": f"./{name}.jsonl"} for name in ("three", "four")]
    for stages, said in ((wrong, ("`stages.one` needs `rows`", "'marge'")), (late, ("three.jsonl", "four.jsonl"))):
        assert main(["pipeline", "run", str(pipeline(tmp_path, *placed(stages, places)))]) == 2
        refused = capsys.readouterr().err
        assert "2 mistakes" in refused
        assert all(one in refused for one in said), refused


def test_an_empty_entry_is_said_without_the_reader_s_own_words(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "gone.yaml").write_text(yaml.safe_dump({"output_dir": str(tmp_path / "out"), "stages": [{"rows": 1}]}))
    assert main(["pipeline", "run", str(tmp_path / "gone.yaml")]) == 2
    refused = capsys.readouterr().err
    assert "`stages.0` needs `stage`" in refused
    assert "Tuple" not in refused
    (tmp_path / "gone.yaml").unlink()
    assert main(["pipeline", "run", str(tmp_path / "gone.yaml")]) == 2
    assert "--config" not in capsys.readouterr().err  # which nobody gave
