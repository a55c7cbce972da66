"""`grpo-lab evaluate` on saved tiny models: the rows of a run, the output folder, models without a tokenizer."""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from grpo_lab.cli import main
from grpo_lab.evaluation import EvaluationResult, measure
from grpo_lab.evaluation.sweep import read_sweep
from grpo_lab.pipelines.evaluate import held_out_like
from grpo_lab.recipe.models import load_saved_model
from grpo_lab.recipe.sections import RewardSection, recipe_from
from grpo_lab.runs.stage import Workspace
from grpo_lab.runs.stop_requests import StopRequests
from grpo_lab.settings import read
from grpo_lab.stages.held_out import Evaluate, evaluate_saved_model

ROWS: dict[str, Any] = {"loader": "word_problems", "split": "test", "n": 6, "seed": 3, "steps": [1, 2], "largest": 20}
ROWS |= {"template": "none"}
SMALL = ["--max-new-tokens", "8", "--n", "4"]
TELL_TIME = ("summary.json", "report.html")


@pytest.fixture(scope="module")
def run(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder with the `recipe.yaml` that `grpo-lab train` leaves, and the evaluation of it."""
    folder = tmp_path_factory.mktemp("trained") / "run"
    shutil.copytree(tiny_folder, folder)
    written = {
        "model": {"path": str(tiny_folder)},
        "data": {**ROWS, "split": "train"},
        "rewards": ["accuracy"],
        "evaluation": {
            "data": ROWS,
            "reward": {"name": "accuracy", "mode": "lenient"},
            "measures": {"language": {"name": "language_consistency", "target": "de"}},
            "batch_size": 3,
            "n_samples": 2,
        },
        "max_completion_length": 12,
        "seed": 7,
    }
    (folder.parent / "as_written.yaml").write_text(yaml.safe_dump(written))
    recipe = recipe_from(written)
    (folder / "recipe.yaml").write_text(yaml.safe_dump(json.loads(json.dumps(asdict(recipe)))))  # as run_folder.claim
    assert recipe.evaluation is not None
    target = folder / "evaluation" / "after"
    evaluate_saved_model(str(folder), recipe.evaluation, target, use_cpu=True, max_new_tokens=12, seed=7)
    return folder


@pytest.mark.slow
def test_like_a_run_is_what_the_run_measured(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    own = EvaluationResult.read(run / "evaluation" / "after")
    for like, name in ((run, "a"), (run.parent / "as_written.yaml", "b")):
        assert main(["evaluate", str(run), "--like", str(like), "--output", str(tmp_path / name)]) == 0
        again = EvaluationResult.read(tmp_path / name)
        assert again.outcomes == own.outcomes  # greedy and sampled ones, to the letter
        assert again.settings == own.settings
    printed = " ".join(capsys.readouterr().out.split())
    for words in (
        str(run), "split test", "n 6", "seed 3", "steps (1, 2)", "largest 20", "template none", "mode=lenient",
        "max_new_tokens 12, seed 7",
    ):  # fmt: skip
        assert words in printed
    assert f"outcomes: {tmp_path / 'a'}" in printed
    assert f"report: {tmp_path / 'a' / 'report.html'}" in printed


@pytest.mark.not_fast
def test_every_loader_argument_is_an_option_and_the_summary_says_all(run: Path, tmp_path: Path) -> None:
    options = ["--steps", "1,2", "--largest", "20", "--data.seed", "3", "--n", "6", "--template", "none", "--seed", "9"]
    options += ["--max-new-tokens", "12", "--output", str(tmp_path / "o")]
    assert main(["evaluate", str(run), "--data", "word_problems", *options]) == 0
    found = EvaluationResult.read(tmp_path / "o")
    own = EvaluationResult.read(run / "evaluation" / "after")
    assert [one.question for one in found.greedy] == [one.question for one in own.greedy]
    said = found.settings
    assert {**ROWS, "families": None}.items() <= {**said["data"], "template": said["template"]}.items()
    assert (said["model"], said["mode"], said["limit"], said["seed"]) == (str(run), "strict", None, 9)


@pytest.mark.not_fast
def test_rows_other_than_the_run_s_own_are_noted(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["evaluate", str(run), "--data", "word_problems", "--template", "none", *SMALL]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert f"evaluated with seed 3, steps (1, 2), largest 20, n 6; --like {run} takes that" in printed


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "give one of --data"),
        (["--data", "word_problems", "--like", "x"], "give one of --data"),
        (["--like", "/nowhere"], "no such folder or file"),
        (
            ["--data", "gsm"],
            "did you mean 'gsm8k'? Allowed: ['coding_tasks', 'countdown', 'file', 'gsm8k', 'humaneval', 'math', "
            "'mbpp',",
        ),
        (
            ["--data", "gsm8k", "--largest", "5"],
            "--data.largest: the loader 'gsm8k' takes source, split, shots, system_prompt",
        ),
        (["--data", "word_problems", "--source", "x"], "--source: the loader 'word_problems' takes n, seed"),
        (["--data", "word_problems", "--split", "heldout"], "Allowed: ['test', 'cold_start', 'train']"),
    ],
)
def test_mistakes_are_named_before_the_model_is_loaded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    assert main(["evaluate", str(tmp_path / "no-model-here"), *words]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.not_fast
def test_the_output_folder_is_looked_at_first(
    tiny_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["evaluate", str(tiny_folder), "--data", "word_problems", *SMALL, "--output"]
    out, mine, file = tmp_path / "out", tmp_path / "mine", tmp_path / "file"
    mine.mkdir()
    (mine / "thesis.tex").write_text("x")
    file.write_text("x")
    assert main([*words, str(out)]) == 0
    first = {path.name: path.read_bytes() for path in out.iterdir()}

    def worked(*_: Any, **__: Any) -> None:
        raise AssertionError("the model was asked before the folder was looked at")

    with monkeypatch.context() as patched:
        patched.setattr("grpo_lab.stages.held_out.evaluate", worked)
        for folder, said in [
            (out, "holds an evaluation already"),
            (mine, "holds something else (thesis.tex)"),
            (file, "cannot be written to"),
            (file / "below", "cannot be written to"),
        ]:
            capsys.readouterr()
            assert main([*words, str(folder)]) == 2
            assert said in capsys.readouterr().err
    assert {path.name: path.read_bytes() for path in out.iterdir()} == first
    assert main([*words, str(out), "--overwrite", "--data.seed", "1"]) == 0
    assert (out / "outcomes.jsonl").read_bytes() != first["outcomes.jsonl"]


@pytest.mark.not_fast
def test_overwrite_takes_the_place_of_other_conditions_and_of_nothing_else(
    tiny_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It "held something else": the folder of a condition that is none of this evaluation's."""
    out = tmp_path / "out"
    words = ["evaluate", str(tiny_folder), "--data", "word_problems", *SMALL, "--output", str(out)]
    both = ["--template", "chat", "none"]
    assert main([*words, *both]) == 0
    assert (out / "none" / "summary.json").is_file()
    assert main(words) == 2
    assert "holds an evaluation already" in capsys.readouterr().err
    assert main([*words, "--overwrite"]) == 0
    assert {path.name for path in out.iterdir()} == {
        "summary.json", "outcomes.jsonl", "outcomes.parquet", "report.html",
    }  # fmt: skip
    assert main([*words, *both, "--overwrite"]) == 0
    (out / "none" / "thesis.tex").write_text("x")
    assert main([*words, "--overwrite"]) == 2
    assert "holds something else (none/thesis.tex)" in capsys.readouterr().err
    assert (out / "sweep.json").is_file()


@pytest.fixture(scope="module")
def evaluated(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("evaluated") / "out"
    assert main(["evaluate", str(tiny_folder), "--data", "word_problems", *SMALL, "--output", str(out)]) == 0
    return out


def untimed(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name not in TELL_TIME}


@pytest.mark.not_fast
@pytest.mark.parametrize(
    "after", ["run.lock", "outcomes.jsonl.part", "outcomes.jsonl", "outcomes.parquet", "no page", "Ctrl-C"]
)
def test_half_an_evaluation_is_made_again_by_the_same_command(
    after: str, evaluated: Path, tiny_folder: Path, tmp_path: Path
) -> None:
    """Killed while it was written, or asked to stop: it was refused as an evaluation that is there, or as something
    else."""
    out = shutil.copytree(evaluated, tmp_path / "out")
    words = ["evaluate", str(tiny_folder), "--data", "word_problems", *SMALL, "--output", str(out)]
    if after == "Ctrl-C":
        EvaluationResult((), {"stopped": "after 2 of 4 greedy answers"}).write(out)
    elif after == "no page":
        (out / "report.html").unlink()
        (out / "run.lock").touch()  # a kill leaves it
    else:
        for path in out.iterdir():
            if after not in ("outcomes.jsonl", "outcomes.parquet") or path.name in TELL_TIME:
                path.unlink()
        (out / after).touch()
    assert main(words) == 0
    assert untimed(out) == untimed(evaluated)
    assert all((out / name).is_file() for name in TELL_TIME)
    assert main(words) == 2


def test_a_model_without_tokenizer_is_named_and_another_can_be_given(tiny_folder: Path, tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    shutil.copytree(tiny_folder, bare, ignore=shutil.ignore_patterns("*token*", "*.jinja"))
    with pytest.raises(ValueError, match=r"holds a model and no tokenizer \(tokenizer\.json, .*--tokenizer"):
        load_saved_model(str(bare), use_cpu=True)
    _, tokenizer = load_saved_model(str(bare), use_cpu=True, tokenizer=str(tiny_folder))
    assert tokenizer("7")["input_ids"]


def test_an_adapter_without_tokenizer_has_its_base_s(tiny_folder: Path, tmp_path: Path) -> None:
    from peft import LoraConfig, get_peft_model

    model, tokenizer = load_saved_model(str(tiny_folder), use_cpu=True)
    adapter = tmp_path / "adapter"
    get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"])).save_pretrained(adapter)
    _, words = load_saved_model(str(adapter), use_cpu=True)
    assert words.get_vocab() == tokenizer.get_vocab()
    config = json.loads((adapter / "adapter_config.json").read_text())
    (adapter / "adapter_config.json").write_text(json.dumps({**config, "base_model_name_or_path": "/gone/away"}))
    with pytest.raises(ValueError, match=r"is an adapter of '/gone/away' .*cannot be loaded"):
        load_saved_model(str(adapter), use_cpu=True, tokenizer=str(tiny_folder))


def test_like_a_run_that_says_too_little(tmp_path: Path) -> None:
    """`max_completion_length: null` ended in `int(None)`."""
    section = {"data": {"loader": "word_problems", "n": 8}}
    without_limit = {"evaluation": section, "arguments": {"max_completion_length": None, "seed": None}}
    for written, said in (
        ({"name": "x", "evaluation": None}, "has no `evaluation`"),
        (without_limit, r"`max_completion_length` is null .*write `evaluation.max_new_tokens` there"),
    ):
        (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(written))
        with pytest.raises(ValueError, match=said):
            held_out_like(tmp_path)
    limited = {**without_limit, "evaluation": {**section, "max_new_tokens": 9}}
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(limited))
    assert (held_out_like(tmp_path).max_new_tokens, held_out_like(tmp_path).seed) == (9, 42)


CHAT = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant: <think>"
    "{% if enable_thinking is defined and not enable_thinking %}\n\n</think>\n\n{% endif %}"
)


@pytest.fixture(scope="module")
def thinker(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose chat template opens the thinking, or closes it where it is told to."""
    folder = tmp_path_factory.mktemp("modes") / "thinker"
    shutil.copytree(tiny_folder, folder)
    _, tokenizer = load_saved_model(str(folder), use_cpu=True)
    tokenizer.chat_template = CHAT
    tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.slow
def test_budgets_modes_and_a_second_model_in_one_call(
    thinker: Path, tiny_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other, out, closing = tmp_path / "other", tmp_path / "out", "\nso\n</think>\n"
    shutil.copytree(thinker, other)
    rows = ["--data", "word_problems", "--n", "3", "--max-new-tokens", "40"]
    ways = ["--thinking", "on", "off", "--thinking-budget", "0", "8", "none", "--budget-text", closing]
    also = ["--measure", "format={name: think_format, form: think, think_opened: prompt}", "--log-probs"]
    words = ["evaluate", str(thinker), *rows, *ways, *also, "--n-samples", "2", "--against", str(other)]
    assert main([*words, "--output", str(out)]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert printed.count(" against ") == 4
    assert printed.count("p 1 (n=3: 0 right only in the first, 0 only in the second)") == 4
    found = {(one.model, one.name): one for one in read_sweep(out)}
    names = ["thinking-budget-none", "thinking-budget-8", "thinking-budget-0", "no-thinking"]
    assert [*found] == [(str(model), name) for model in (thinker, other) for name in names]
    for name, limit in (("thinking-budget-8", 8), ("thinking-budget-0", 0)):
        result = found[str(thinker), name].result
        assert all(one.thinking == limit for one in result.outcomes)  # the tiny model never closes it
        assert all(one.completion.count(closing) == 1 and one.tokens <= 40 for one in result.outcomes)
        assert result.numbers["measures"] == {"format": pytest.approx(float(limit > 0), abs=1.0)}
        assert result.settings["thinking_budget"] == limit
    own = EvaluationResult.read(out)
    assert own.outcomes == found[str(thinker), "thinking-budget-none"].result.outcomes
    assert own.settings["thinking"] == "on"
    assert {"log_prob"} <= own.calibration.keys() <= {"log_prob", "agreement"}
    silent = found[str(thinker), "no-thinking"].result
    assert all(one.thinking is None for one in silent.outcomes)
    assert silent.greedy[0].prompt.endswith("</think>\n\n")
    page = (out / "report.html").read_text()
    assert "Accuracy over the thinking budget" in page
    assert "Reliability by log-prob" in page
    alone = ["--log-probs", "--n-samples", "2", "--output", str(tmp_path / "p")]
    assert main(["evaluate", str(thinker), *rows, *alone]) == 0
    plain = EvaluationResult.read(tmp_path / "p")
    assert [o.completion for o in plain.outcomes] == [o.completion for o in own.outcomes]
    assert not (tmp_path / "p" / "sweep.json").exists()
    assert main([*words, "--output", str(out)]) == 2  # it is there


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--thinking", "off", "--template", "none"], "the prompt is the same in both modes"),
        (["--thinking-budget", "39"], "leave no room for an answer in max_completion_length 40"),
        (["--thinking-budget", "-1"], "`thinking_budget.0` is '-1'; it must be a whole number of at least 0"),
        (["--against", "THINKER"], "`against` names the model itself"),
        (["--thinking-budget", "8", "--budget-text", "end"], "budget_text must contain '</think>'"),
        (["--budget-text", "</think>"], "has an effect only with `evaluation.thinking_budget`"),
        (["--measure", "format=thinkformat"], "did you mean 'think_format'?"),
        (["--measure", "think_format"], "--measure"),
        (["--measure", "length=think_format"], "has 'length', a number of every evaluation"),
        (["--measure", "pass_at_2=think_format"], "has 'pass_at_2', a number of every evaluation"),
    ],
)
def test_conditions_that_cannot_be(
    thinker: Path, capsys: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    words = [word.replace("THINKER", str(thinker)) for word in words]
    given = ["evaluate", str(thinker), "--data", "word_problems", "--n", "2", "--max-new-tokens", "40", *words]
    assert main(given) == 2
    assert said in capsys.readouterr().err


@pytest.mark.not_fast
def test_a_killed_evaluation_goes_on_with_its_blocks(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It began anew; now what is on the disk is not asked again, and the answers are those of a run that was not
    killed, samples included."""
    written = {"model": {"path": str(tiny_folder)}, "data": ROWS, "rewards": ["accuracy"]}
    section = recipe_from({**written, "evaluation": {"data": ROWS, "batch_size": 4, "n_samples": 2}}).evaluation
    assert section is not None
    how: Any = {"use_cpu": True, "max_new_tokens": 6, "seed": 1}
    whole = evaluate_saved_model(str(tiny_folder), section, tmp_path / "whole", **how)
    assert not list((tmp_path / "whole").glob("answers.*"))
    grade, graded, target = measure._grade, [], tmp_path / "killed"

    def killed(kind: Any, *rest: Any, **named: Any) -> Any:
        if len(graded) == 3:
            raise RuntimeError("killed")
        graded.append(kind)
        return grade(kind, *rest, **named)

    monkeypatch.setattr(measure, "_grade", killed)
    with pytest.raises(RuntimeError, match="killed"):
        evaluate_saved_model(str(tiny_folder), section, target, **how)
    with (target / "answers.0.jsonl").open("a") as file:
        file.write('{"of": "half a li')
    first, graded[:] = list(graded), [None] * 4
    again = evaluate_saved_model(str(tiny_folder), section, target, **how)
    assert (first, graded[4:]) == (["greedy", "greedy", "sampled"], ["sampled", "sampled"])
    assert again.outcomes == whole.outcomes
    graded[:] = [None] * 1
    with pytest.raises(RuntimeError, match="killed"):
        evaluate_saved_model(str(tiny_folder), section, target, **how)
    graded[:] = [None] * 4
    judged = replace(section, measures={"format": RewardSection("think_format", arguments={"form": "think"})})
    with_measure = evaluate_saved_model(str(tiny_folder), judged, target, **how)
    assert graded[4:] == ["greedy", "greedy", "sampled", "sampled", "sampled"]
    assert with_measure.numbers["measures"] == {"format": 0.0}
    other = evaluate_saved_model(str(tiny_folder), section, target, **{**how, "seed": 2})
    assert other.sampled != whole.sampled  # nothing was left to be taken for its own


@pytest.mark.not_fast
def test_facts_of_the_stage_are_flat_numbers(thinker: Path, tmp_path: Path) -> None:
    shutil.copytree(thinker, tmp_path / "other")
    written = {
        "model": str(thinker),
        "against": str(tmp_path / "other"),
        "data": {**ROWS, "template": "chat"},
        "measures": {"format": "think_format", "language": {"name": "language_consistency", "target": "en"}},
        "thinking": [True, False],
        "thinking_budget": [4, "none"],
        "budget_text": "</think>",
        "n_samples": 2,
        "max_completion_length": 16,
        "use_cpu": True,
    }
    stage = read(Evaluate, written)
    assert "budget-4" in stage.plan()
    facts = stage.run(Workspace(tmp_path, StopRequests(tmp_path)))
    assert all(type(value) in (int, float) for value in facts.values())
    names = {"accuracy", "format", "language", "length", "thinking", "rows", "tokens", "accuracy.thinking-budget-4"}
    assert names <= facts.keys()
    assert (facts["difference"], facts["p_value.thinking-budget-4"]) == (0.0, 1.0)
    assert 3 <= facts["thinking_length.thinking-budget-4"] <= 4 < facts["thinking_length"]
    assert (facts["thinking"], facts["no_thinking"]) == (facts["accuracy"], facts["accuracy.no-thinking"])
