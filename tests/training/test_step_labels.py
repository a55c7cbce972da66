"""Steps labelled by what comes of them, and the process reward model that learns the labels."""

from __future__ import annotations

import hashlib
import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification, AutoTokenizer

from grpo_lab.curation import Sampled, pass_rates
from grpo_lab.engines.generators import TransformersGenerator
from grpo_lab.pipelines.pipeline_recipe import pipeline_from
from grpo_lab.pipelines.runner import run_pipeline
from grpo_lab.recipe.build import build_reward
from grpo_lab.recipe.sections import STRICT_ACCURACY
from grpo_lab.rewards import TokenClassificationSteps
from grpo_lab.rewards.preference import holds_out
from grpo_lab.stages.step_labels import beginnings, labelled_rows, solutions_of, whole_answers
from grpo_lab.trainer.supervised.step_classifier import NO_LABEL, step_loss

ASKED = [{"role": "user", "content": "2 + 3 - 1?"}]
PROBLEM = {"prompt": ASKED, "solution": "4"}
TRAINING = {"max_steps": 60, "per_device_train_batch_size": 8, "learning_rate": 5e-3, "bf16": False, "use_cpu": True}
SAID = {"good": 0.9, "bad": 0.2}
"""The word of a step, and the label of every step that says it."""


def answer(text: str) -> list[dict[str, str]]:
    return [{"role": "assistant", "content": text}]


def scripted(prompts: list[Any], n: int) -> list[list[Any]]:
    """A policy that goes on rightly three times of four from a right first step, once from a right second one, and
    never from a wrong step."""
    right = {"2+3=5\n": 3, "2+3=5\n5-1=4\n": 1}
    written = [right.get(prompt[-1]["content"], 0) for prompt in prompts]
    return [[answer("#### 4")] * share + [answer("#### 7")] * (n - share) for share in written]


@pytest.mark.parametrize(("estimate", "first", "second"), [("soft", 0.75, 0.25), ("hard", 1.0, 1.0)])
def test_labels_of_a_scripted_policy_are_its_shares(estimate: str, first: float, second: float) -> None:
    texts = ["2+3=5\n5-1=4\n#### 4", "2+3=5\n\n5-1=3\n#### 3", "#### 4", "2+3=6\n", ""]
    scores = [1.0, 0.0, 1.0, None, 0.0]
    sampled = Sampled(ASKED, [answer(text) for text in texts], scores, [0] * 5, PROBLEM)
    solutions = solutions_of(sampled)
    begun = beginnings(solutions)
    reward = partial(whole_answers, build_reward(STRICT_ACCURACY))
    rates = pass_rates(begun, scripted, reward, n=4, progress=False)
    rows = labelled_rows(solutions, begun, rates, estimate)
    assert [row["labels"] for row in rows] == [[first, second, 1.0], [first, 0.0, 0.0], [1.0]]
    assert rows[1] == {"prompt": ASKED, "completions": ["2+3=5", "5-1=3", "#### 3"], "labels": [first, 0.0, 0.0]}


def says_a(prompts: Any, completions: Any, **columns: Any) -> list[float]:
    """Whether the part of the answer behind its first line has an `a`; something that random tokens do at times."""
    assert all(prompt == ASKED for prompt in prompts)
    return [float("a" in one[0]["content"].partition("\n")[2]) for one in completions]


@pytest.mark.not_fast
def test_the_stage_counts_its_models_completions(tiny_folder: Path, tmp_path: Path) -> None:
    """Literally: the ids of the prompt and of the beginning, the generation from them, the answers counted."""
    text = "2+3=5\n5-1=4"
    line = {"row": 0, "scores": [1.0], "lengths": [9], "completions": [answer(text)], "problem": PROBLEM}
    (tmp_path / "samples.jsonl").write_text(json.dumps(line) + "\n")
    stage = {
        "stage": "step_labels", "name": "labels", "model": str(tiny_folder), "n_samples": 16, "use_cpu": True,
        "samples": str(tmp_path / "samples.jsonl"), "max_completion_length": 5, "batch_size": 16,
        "reward": "training.test_step_labels:says_a",
    }  # fmt: skip
    facts = run_pipeline(pipeline_from({"output_dir": str(tmp_path / "out"), "stages": [stage]}))["labels"]
    row = json.loads((tmp_path / "out/labels/rows.jsonl").read_text())
    assert row["completions"] == ["2+3=5", "5-1=4"]
    assert (facts["steps"], facts["completions"]) == (2, 16)

    tokenizer: Any = AutoTokenizer.from_pretrained(tiny_folder)
    asked = tokenizer.apply_chat_template(ASKED, tokenize=False, add_generation_prompt=True)
    ids = tokenizer(asked + "2+3=5\n", add_special_tokens=False)["input_ids"]
    generate = TransformersGenerator(AutoModelForCausalLM.from_pretrained(tiny_folder), tokenizer, 16, progress=False)
    seed = int.from_bytes(hashlib.sha256(f"0/{json.dumps([ids])}".encode()).digest()[:4], "big") >> 1
    [group] = generate([ids], n=16, temperature=1.0, max_new_tokens=5, seed=seed)
    share = sum("a" in tokenizer.decode(one.ids, skip_special_tokens=True) for one in group) / 16
    assert 0 < share < 1, "the reward tells nothing apart"
    assert row["labels"] == [share, 1.0]


def stepwise(number: int) -> dict[str, Any]:
    """A solution of three steps, right up to some step; a step's label is told by its word alone."""
    words = ["good" if step < number % 4 else "bad" for step in range(3)]
    labels = [SAID[word] for word in words]
    prompt = [{"role": "user", "content": f"{number}?"}]
    return {"prompt": prompt, "completions": [f"{word} {number}" for word in words], "labels": labels}


@pytest.fixture(scope="module")
def trained(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A stage `step_reward_model`: its model and its facts."""
    folder = tmp_path_factory.mktemp("steps")
    (folder / "rows.jsonl").write_text("".join(json.dumps(stepwise(number)) + "\n" for number in range(80)))
    stage = {"stage": "step_reward_model", "name": "prm", "model": str(tiny_folder), **TRAINING}
    stage["rows"] = str(folder / "rows.jsonl")
    facts = run_pipeline(pipeline_from({"output_dir": str(folder / "out"), "stages": [stage]}))
    return folder / "out" / "prm" / "model", facts["prm"]


@pytest.mark.not_fast
def test_the_classifier_reaches_the_labels_of_held_out_steps(trained: tuple[Path, dict[str, Any]]) -> None:
    folder, facts = trained
    held = [row for row in map(stepwise, range(80)) if holds_out(row["prompt"], 0.2)]
    assert (facts["rows"], facts["held_out"]) == (80 - len(held), len(held))
    assert 5 < len(held) < 30
    assert facts["step_accuracy"] == facts["auc"] == 1.0
    assert 0.5 <= facts["majority"] < 0.75
    prompts = [row["prompt"] for row in held]
    scores = TokenClassificationSteps(folder).score_all(prompts, [row["completions"] for row in held], {})
    for row, own in zip(held, scores, strict=True):
        assert own == pytest.approx(row["labels"], abs=0.1)


@pytest.mark.not_fast
def test_what_is_read_back_is_the_models_softmax_where_the_step_ends(trained: tuple[Path, dict[str, Any]]) -> None:
    folder = trained[0]
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForTokenClassification.from_pretrained(folder).double().eval()
    row = stepwise(2)
    ids = tokenizer(tokenizer.apply_chat_template(row["prompt"], tokenize=False, add_generation_prompt=True))
    read = list(ids["input_ids"])
    expected = []
    for step in row["completions"]:
        read += tokenizer(step, add_special_tokens=False)["input_ids"]
        read += tokenizer("\n", add_special_tokens=False)["input_ids"]
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([read])).logits[0, -1]
        expected.append(float(logits.exp()[1] / logits.exp().sum()))
    found = TokenClassificationSteps(folder).score_texts(row["prompt"], row["completions"])
    assert found == pytest.approx(expected, abs=1e-6)
    assert max(found) - min(found) > 0.5


def test_the_loss_is_the_cross_entropy_of_labelled_tokens() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 5, 2, generator=generator)
    labels = torch.tensor([[NO_LABEL, 1.0, NO_LABEL, 0.25, 0.0], [NO_LABEL, NO_LABEL, 0.6, NO_LABEL, NO_LABEL]])
    total = 0.0
    for row, token in ((0, 1), (0, 3), (0, 4), (1, 2)):
        bad, good = logits[row, token].double().exp().tolist()
        label = float(labels[row, token])
        total -= label * torch.tensor(good / (good + bad)).log() + (1 - label) * torch.tensor(bad / (good + bad)).log()
    outputs = type("Outputs", (), {"logits": logits})
    assert float(step_loss(outputs, labels)) == pytest.approx(float(total) / 4, rel=1e-6)
    halves = [step_loss(type("Outputs", (), {"logits": logits[at : at + 1]}), labels[at : at + 1], 4) for at in (0, 1)]
    assert float(sum(halves)) == pytest.approx(float(total) / 4, rel=1e-6)


@pytest.mark.parametrize(
    ("labels", "said"), [([1.0], r"2 steps and the labels \[1.0\]"), ([1.0, 1.5], r"\[1.0, 1.5\]; each .* \[0, 1\]")]
)
def test_labels_that_are_none(labels: list[float], said: str, tiny_folder: Path, tmp_path: Path) -> None:
    row = {"prompt": ASKED, "completions": ["2+3=5", "5-1=4"], "labels": labels}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    stage = {"stage": "step_reward_model", "name": "prm", "model": str(tiny_folder), "held_out": 0.0, **TRAINING}
    stage["rows"] = str(tmp_path / "rows.jsonl")
    with pytest.raises(ValueError, match=said):
        run_pipeline(pipeline_from({"output_dir": str(tmp_path / "out"), "stages": [stage]}))
