"""`grpo-lab harness`: the folder, its judge, and the harness itself, where lm-eval is installed: the same scores as
`evaluate` on GSM8K rows, and other ones as soon as one of the harness's defaults is let in."""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from grpo_lab.cli import main
from grpo_lab.engines.generators import Completion
from grpo_lab.evaluation import evaluate
from grpo_lab.pipelines import harness as pipelines_harness
from grpo_lab.pipelines.evaluate import add_arguments
from grpo_lab.pipelines.harness import judged
from grpo_lab.rewards import AccuracyReward

TOKENS = 900
JUDGE = {"name": "accuracy", "mode": "lenient"}


@pytest.fixture(scope="module")
def rows(grpo_lab_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Questions of GSM8K's test set, each with a real model's answer, thought over as a longer model does: three times,
    with a blank line between the steps. The last question is longer than the model's context."""
    lines = (grpo_lab_data / "gsm8k" / "gsm8k_model_outputs.jsonl").read_text().splitlines()
    first = {one["question"]: one for one in map(json.loads, lines[:400])}.values()
    made = [
        *[one for one in first if one["label_correct"]][:18],
        *[one for one in first if not one["label_correct"]][:6],
    ]
    written = [
        {
            "question": one["question"],
            "gold_answer": one["gold_answer"],
            "written": "\n\n".join([*one["output_text"].split("\n")] * 3),
        }
        for one in made
    ]
    written.append({"question": "How many? " * 2000, "gold_answer": "1", "written": "1"})
    file = tmp_path_factory.mktemp("gsm8k") / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in written))
    return file


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model whose own generation_config bends the distribution."""
    from grpo_lab.testing import tiny_model

    folder = tmp_path_factory.mktemp("model") / "qwen2"
    policy, tokenizer = tiny_model("qwen2", hidden_size=32, num_layers=2, initializer_range=0.3, max_positions=2048)
    policy.generation_config.repetition_penalty = 1.8
    policy.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def exported(model: Path, rows: Path, folder: Path, *more: str) -> Path:
    words = ["harness", str(model), "--data", "gsm8k", "--source", str(rows), "--mode", "lenient"]
    assert main([*words, "--max-new-tokens", str(TOKENS), "--output", str(folder / "gsm8k_here"), *more]) == 0
    return folder / "gsm8k_here"


@pytest.fixture
def task(model: Path, rows: Path, tmp_path: Path) -> Path:
    return exported(model, rows, tmp_path)


def lines_of(task: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (task / "rows.jsonl").read_text().splitlines()]


def test_the_folder_says_what_the_harness_would_do_otherwise(
    model: Path, rows: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    task = exported(model, rows, tmp_path)
    said = capsys.readouterr().out
    assert "24 rows of gsm8k; 1 more have prompts too long" in said
    assert f"--model_args pretrained={model} --include_path {task} --tasks gsm8k_here" in said
    text = (task / "gsm8k_here.yaml").read_text()
    written = yaml.safe_load(text.replace("!function ", ""))
    assert written["generation_kwargs"] == {
        "until": [],
        "max_gen_toks": TOKENS,
        "do_sample": False,
        "repetition_penalty": 1.0,
    }
    lines = lines_of(task)
    assert all("<|im_start|>user\n" in line["prompt"] for line in lines)
    assert [line["solution"] for line in lines] == [json.loads(line["row"])["solution"] for line in lines]


def test_the_judge_is_ours(task: Path) -> None:
    lines = lines_of(task)
    texts = [json.loads(line["row"])["written"] for line in lines]
    scores = AccuracyReward(mode="lenient")(
        completions=[[{"content": text}] for text in texts], solution=[line["solution"] for line in lines]
    )
    assert [judged(JUDGE, line, text)["accuracy"] for line, text in zip(lines, texts, strict=True)] == scores
    assert 0.1 < sum(map(bool, scores)) / len(scores) < 0.9
    blank = {"row": json.dumps({"prompt": "q", "solution": ""})}
    assert judged(JUDGE, blank, "18") == {"unscorable": 1.0}
    with pytest.raises(ValueError, match=r"`row` of a line of .*\.jsonl: not JSON"):
        judged(JUDGE, {**blank, "row": '{"prompt'}, "18")


def test_what_cannot_be_exported_is_refused(
    task: Path, model: Path, rows: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["harness", str(model), "--data", "gsm8k", "--source", str(rows)]
    for more, said in (
        ([], "--output is missing"),
        (["--output", str(task)], "is not empty; name a new folder"),
        (["--output", str(task.parent / "new"), "--n-samples", "4"], "`--n-samples` has no effect on a task"),
        (["--output", str(task.parent / "new"), "--max-new-tokens", "9999"], "max_new_tokens is 9999"),
    ):
        assert main([*words, *more]) == 2
        assert said in capsys.readouterr().err
    assert not (task.parent / "new").exists()


def harness(task: Path, model: Any) -> tuple[dict[str, float], dict[str, str]]:
    """The harness's metrics, and the completion of each prompt as it was judged."""
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=str(task), include_defaults=False)
    found = simple_evaluate(model=model, tasks=[task.name], task_manager=manager, bootstrap_iters=0, log_samples=True)
    metrics = {name.partition(",")[0]: value for name, value in found["results"][task.name].items()}
    samples = found["samples"][task.name]
    return metrics, {one["doc"]["prompt"]: one["filtered_resps"][0] for one in samples}


def without(setting: str, task: Path, folder: Path) -> Path:
    """A copy of the task that leaves ``setting`` to the harness."""
    other = shutil.copytree(task, folder / task.name)
    file = other / f"{task.name}.yaml"
    lines = file.read_text().splitlines(keepends=True)
    file.write_text("".join(line for line in lines if not line.startswith(f"  {setting}:")))
    return other


def replaying(words: Any, texts: dict[str, str]) -> Any:
    """A model of the harness that writes the texts; where they end, its own code decides, as its `hf` does."""
    from lm_eval.api.model import LM
    from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs, postprocess_generated_text

    class Replaying(LM):
        def generate_until(self, requests: list[Any], **_: Any) -> list[str]:
            found = []
            for prompt, asked in (one.args for one in requests):
                how: Any = normalize_gen_kwargs(asked)
                stop = handle_stop_sequences(how["until"], eos=words.eos_token)
                whole = words.decode(words(texts[prompt])["input_ids"][: how["max_gen_toks"]])
                found.append(postprocess_generated_text(whole, stop, None))
            return found

        def loglikelihood(self, requests: list[Any], **_: Any) -> Any: ...
        def loglikelihood_rolling(self, requests: list[Any], **_: Any) -> Any: ...

    return Replaying()


needs_harness = "lm-eval is not installed (pip install lm-eval==0.4.13): the export is not run through the harness"


@pytest.mark.slow
def test_the_harness_gives_the_same_scores_and_its_defaults_do_not(task: Path, model: Path, tmp_path: Path) -> None:
    """Real answers replayed: ours against the harness's, and each of its two defaults planted in a copy of the task."""
    pytest.importorskip("lm_eval", reason=needs_harness)
    from transformers import AutoTokenizer

    words: Any = AutoTokenizer.from_pretrained(model)
    lines = lines_of(task)
    texts = {line["prompt"]: json.loads(line["row"])["written"] for line in lines}

    def written(prompts: Any, **how: Any) -> list[list[Completion]]:
        ids = [words(text)["input_ids"][: how["max_new_tokens"]] for text in texts.values()]
        return [[Completion(one, True)] for one in ids]

    rows = [json.loads(line["row"]) for line in lines]
    judge: Any = AccuracyReward(mode="lenient")
    ours = evaluate(None, words, rows, reward=judge, max_new_tokens=TOKENS, batch_size=8, generate=written)
    assert ours.accuracy is not None
    metrics, completions = harness(task, replaying(words, texts))
    assert metrics["accuracy"] == pytest.approx(ours.accuracy.value, abs=1e-12)
    assert metrics["unscorable"] == 0
    assert completions == {one.prompt: one.completion for one in ours.greedy}

    for planted, cut in (("until", "\n\n"), ("max_gen_toks", None)):
        metrics, other = harness(without(planted, task, tmp_path / planted), replaying(words, texts))
        assert metrics["accuracy"] < ours.accuracy.value - 0.05, planted
        changed = [text for prompt, text in other.items() if text != completions[prompt]]
        assert changed
        assert all(completions[prompt].startswith(text) for prompt, text in other.items())
        assert cut is None or not any(cut in text for text in other.values())


@pytest.mark.slow
def test_a_model_writes_the_same_in_the_harness(model: Path, rows: Path, tmp_path: Path) -> None:
    """Greedy, token for token, whatever the model's own generation_config says."""
    pytest.importorskip("lm_eval", reason=needs_harness)
    from lm_eval.models.huggingface import HFLM

    from grpo_lab.recipe.models import load_saved_model

    task = exported(model, rows, tmp_path, "--limit", "12", "--max-new-tokens", "24")
    policy, words = load_saved_model(str(model), use_cpu=True)
    asked = [json.loads(line["row"]) for line in lines_of(task)]
    judge: Any = AccuracyReward(mode="lenient")
    ours = evaluate(policy, words, asked, reward=judge, max_new_tokens=24, batch_size=4, progress=False)
    there = HFLM(pretrained=policy, tokenizer=words, batch_size=4, device="cpu")
    metrics, completions = harness(task, there)
    assert completions == {one.prompt: one.completion for one in ours.greedy}
    assert ours.accuracy is not None
    assert metrics["accuracy"] == ours.accuracy.value
    _, bent = harness(without("repetition_penalty", task, tmp_path / "bent"), there)
    assert bent != completions


def test_a_template_and_solved_examples_before_the_question(model: Path, rows: Path, tmp_path: Path) -> None:
    """`--template`, the docs' own example, was refused, and so no template was there that takes `--shots`."""
    lines = [json.loads(line) for line in rows.read_text().splitlines()]
    worked = [{**one, "answer": f"It is so. #### {one['gold_answer']}"} for one in lines]
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(one) + "\n" for one in worked))
    more = ["--source", str(file), "--template", "harness_gsm8k", "--shots", "2"]
    prompt = lines_of(exported(model, rows, tmp_path, *more))[0]["prompt"]
    assert prompt.count("Question:") == 3
    words = ["harness", str(model), "--data", "gsm8k", "--source", str(file), "--output", str(tmp_path / "two")]
    assert main([*words, "--template", "r1", "qwen_math"]) == 2


def test_every_option_is_taken_or_said_to_have_no_effect() -> None:
    """The list of those that are taken held a name that no option has."""
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    options = {one.dest for one in parser._actions} | {"command", "traceback", "verbose"}
    assert {*pipelines_harness._SAID} <= options


def test_a_kill_leaves_no_half_of_a_task(
    model: Path, rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same command was refused: the folder "is not empty"."""
    writes = pipelines_harness.write_whole_text
    monkeypatch.setattr(pipelines_harness, "write_whole_text", lambda *_: (_ for _ in ()).throw(RuntimeError("killed")))
    with pytest.raises(RuntimeError, match="killed"):
        exported(model, rows, tmp_path)
    assert not (tmp_path / "gsm8k_here").exists()
    monkeypatch.setattr(pipelines_harness, "write_whole_text", writes)
    assert {one.name for one in exported(model, rows, tmp_path).iterdir()} == {
        "rows.jsonl", "gsm8k_here.py", "gsm8k_here.yaml",
    }  # fmt: skip
