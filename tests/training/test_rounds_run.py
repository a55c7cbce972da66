"""`grpo-lab rounds` for real: accuracy rises, -9 in each part changes no byte, w(θ) is that of the formula."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

import forked
from grpo_lab import LabConfig, LabTrainer
from grpo_lab.engines.generate import generate_by_groups
from grpo_lab.pipelines.curate import curate, curation_recipe_from
from grpo_lab.pipelines.rounds import run_rounds
from grpo_lab.pipelines.rounds_recipe import rounds_recipe_from
from grpo_lab.recipe.sections import EvaluationSection
from grpo_lab.settings import read
from grpo_lab.stages.held_out import evaluate_saved_model
from grpo_lab.trainer.supervised.methods import implicit_weight, train_by
from tolerance import log_prob_gap
from training.curation_rewards import brief

TESTS = Path(__file__).resolve().parents[1]
DATA = {"loader": "word_problems", "n": 24, "template": "chat", "largest": 20, "steps": [1, 2]}
TRAINING = {
    "per_device_train_batch_size": 16,
    "learning_rate": 3e-3,
    "bf16": False,
    "max_length": 256,
    "logging_steps": 1,
}

MARKERS = ("sample", "select", "train", "evaluate")


def recipe(model: Path, **changes: Any) -> dict[str, Any]:
    return {
        "name": "a-test",
        "method": "expert_iteration",
        "model": {"path": str(model)},
        "data": DATA,
        "reward": "training.curation_rewards:brief",
        "rounds": {"count": 3, "questions": 8},
        "n_samples": 16,
        "max_completion_length": 6,
        "problems_per_save": 4,
        "use_cpu": True,
        "training": {**TRAINING, "num_train_epochs": 6},
        "evaluation": {
            "data": {**DATA, "split": "test"},
            "reward": "training.curation_rewards:brief",
            "max_new_tokens": 6,
            "n_samples": 8,
        },
        "output_dir": "out",
        **changes,
    }


def files(folder: Path) -> dict[str, bytes]:
    """All that a run leaves but its times: `run.json` and markers have the seconds, the page the hour at which it was
    written."""
    found = {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    for name in MARKERS:
        found |= {file: results(content) for file, content in found.items() if file.endswith(f"/{name}.json")}
    return {name: content for name, content in found.items() if name not in ("run.json", "report.html")}


def results(marker: bytes) -> bytes:
    """What a stage has found, by its marker."""
    return json.dumps(json.loads(marker)["results"]).encode()


@pytest.mark.slow
def test_accuracy_rises_and_a_kill_or_a_stop_in_each_part_of_the_second_round_changes_no_byte(
    tiny_folder: Path, tmp_path: Path
) -> None:
    (tmp_path / "recipe.json").write_text(json.dumps(recipe(tiny_folder)))
    worker = [str(TESTS / "training" / "rounds_worker.py"), str(tmp_path / "recipe.json"), str(tmp_path)]
    done = forked.run(worker)
    assert done.returncode == 0, done.stderr[-3000:]
    said = [line for line in done.stdout.splitlines() if line.startswith(("in_", "asked_"))]
    assert said == [
        "in_sample", "in_select sample", "in_train sample select", "in_evaluate sample select train",
        "asked_in_sample 5 lines",  # the header, and the batch under way
        "asked_in_train sample select checkpoint-2", "asked_again_in_train sample select checkpoint-4",
        "asked_in_evaluate sample select train",
    ]  # fmt: skip
    whole = files(tmp_path / "whole" / "out")
    for broken in ("killed", "stopped"):
        other = files(tmp_path / broken / "out")
        assert sorted(whole) == sorted(other)
        assert [name for name in whole if whole[name] != other[name]] == []
    assert "at step 2, with a checkpoint; out can be gone on with by the same command" in done.stderr
    assert "round-2/model/model.safetensors" in whole
    assert not [name for name in whole if ".part" in name or "sampling" in name]
    assert (
        whole["model.safetensors"]
        == whole["round-3/model/model.safetensors"]
        != whole["round-2/model/model.safetensors"]
    )
    places = ("start", "round-1", "round-2", "round-3")
    accuracies = [json.loads(whole[f"{place}/evaluate.json"])["sampled_accuracy"]["value"] for place in places]
    assert accuracies[-1] > accuracies[0], accuracies
    lines = [json.loads(line) for line in whole["rounds.jsonl"].decode().splitlines()]
    assert [line["round"] for line in lines] == [0, 1, 2, 3]
    asked = [
        {json.loads(line)["row"] for line in whole[f"round-{n}/samples.jsonl"].decode().splitlines()} for n in (1, 2, 3)
    ]
    assert len(set.union(*asked)) == 24
    assert lines[-1]["tokens_total"] == sum(line["tokens"] for line in lines)
    assert (tmp_path / "whole" / "out" / "evaluation" / "after" / "summary.json").is_file()


@pytest.mark.slow
def test_pairs_by_rounds_and_more_rounds_than_were_asked_for(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    training = {**TRAINING, "max_steps": 2, "beta": 0.5}
    changes = {"evaluation": None, "training": training, "n_samples": 4, "rounds": {"count": 1, "questions": 8}}
    dpo = rounds_recipe_from(
        recipe(tiny_folder, **changes, method="dpo", pairs={"per_problem": 2, "reference": "base"})
    )
    first = run_rounds(dpo)
    assert first[1]["weight_first"] == pytest.approx(
        0.5, abs=1e-4
    )  # the reference is what training begins with: log-ratios are 0
    rows = [json.loads(line) for line in (tmp_path / "out" / "round-1" / "rows.jsonl").read_text().splitlines()]
    assert 0 < len(rows) <= 16
    for row in rows:
        assert brief([row["chosen"], row["rejected"]]) == [1.0, 0.0]
    before = files(tmp_path / "out" / "round-1")
    (tmp_path / "out" / "report.html").unlink()  # killed before it
    run_rounds(dpo)
    assert (tmp_path / "out" / "report.html").is_file()
    assert "nothing to do" in capsys.readouterr().out
    more = {**changes, "rounds": {"count": 2, "questions": 8}}
    second = run_rounds(
        rounds_recipe_from(recipe(tiny_folder, **more, method="dpo", pairs={"per_problem": 2, "reference": "base"}))
    )
    assert files(tmp_path / "out" / "round-1") == before
    assert second[1] == first[1]
    assert second[2]["weight_first"] != pytest.approx(
        0.5, abs=1e-4
    )  # the base is not the model that round 2 begins with
    simpo = {
        **changes,
        "training": {**training, "simpo_gamma": 0.0},
        "method": "simpo",
        "output_dir": "simpo",
        "keep_models": False,
    }
    done = run_rounds(rounds_recipe_from(recipe(tiny_folder, **simpo)))
    assert 0 < done[1]["weight_last"] < 1


@pytest.mark.slow
def test_training_evaluation_curation_and_rounds_generate_by_groups(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A group's prompts stand together in every call, so that they are read once."""
    calls, ours = list[tuple[int, int]](), generate_by_groups

    def seen(stock: Any, model: Any, input_ids: torch.Tensor, *rest: Any, **more: Any) -> torch.Tensor:
        calls.append((len(input_ids), len(input_ids.unique_consecutive(dim=0))))
        return ours(stock, model, input_ids, *rest, **more)

    def groups_of(size: int) -> bool:
        found, calls[:] = calls[:], []
        return bool(found) and all(rows == prompts * size for rows, prompts in found)

    monkeypatch.chdir(tmp_path)
    for place in ("engines.generate", "trainer.generation.in_step"):
        monkeypatch.setattr(f"grpo_lab.{place}.generate_by_groups", seen)
    few = recipe(tiny_folder, evaluation=None, n_samples=4, rounds={"count": 1, "questions": 8})
    few |= {"training": {**TRAINING, "max_steps": 1}, "method": "rft"}
    run_rounds(rounds_recipe_from(few))
    assert groups_of(4)
    own = {name: few[name] for name in ("name", "model", "data", "reward", "max_completion_length", "use_cpu")}
    curate(curation_recipe_from({**own, "n_samples": 2, "output_dir": "chosen", "filters": {"band": {}}}))
    assert groups_of(2)
    held_out = {"data": {**DATA, "n": 8}, "reward": few["reward"], "max_new_tokens": 4}
    section = read(EvaluationSection, {**held_out, "n_samples": 3}, "evaluation")
    evaluate_saved_model(str(tiny_folder), section, None, use_cpu=True, seed=0)
    assert [rows // prompts for rows, prompts in calls] == [1, 3]
    calls.clear()
    shape = {"per_device_train_batch_size": 12, "num_generations": 6, "max_completion_length": 4, "max_steps": 1}
    args = LabConfig("rl", objective="dr_grpo", use_cpu=True, bf16=False, save_strategy="no", report_to="none", **shape)
    rows = Dataset.from_dict({"prompt": ["1 + 1 =", "2 + 2 ="]})
    LabTrainer(str(tiny_folder), lambda completions, **_: [float(len(one)) for one in completions], args, rows).train()
    assert groups_of(6)


def log_probs(model: Any, tokenizer: Any, prompt: str, answer: str) -> tuple[float, int]:
    """Σ log π of the answer's tokens and its end, token by token in float64, and how many they are."""
    ids, end = tokenizer(prompt)["input_ids"], tokenizer.eos_token_id
    whole = [*ids, *tokenizer(answer, add_special_tokens=False)["input_ids"], end]
    with torch.no_grad():
        logits = model(torch.tensor([whole])).logits[0].double()
    total = 0.0
    for place in range(len(ids), len(whole)):
        total += (logits[place - 1, whole[place]] - torch.logsumexp(logits[place - 1], 0)).item()
    return total, len(whole) - len(ids)


def weight_by_hand(rejected: float, chosen: float, margin: float = 0.0) -> float:
    """σ(r̂⁻ − r̂⁺ + γ) = 1 / (1 + exp(r̂⁺ − r̂⁻ − γ))."""
    return 1.0 / (1.0 + math.exp(chosen - rejected - margin))


@pytest.mark.slow
@pytest.mark.parametrize("method", ["dpo", "simpo"])
def test_loss_and_weight_are_those_of_the_formula(tiny_folder: Path, tmp_path: Path, method: Any) -> None:
    """−log σ(r̂⁺ − r̂⁻ − γ) and σ(r̂⁻ − r̂⁺ + γ), with r̂ = β log π/π_ref (DPO) or β times the mean log π (SimPO). Two
    pairs in one batch whose weights differ, so that a σ of mean rewards is not the mean of σ."""
    pairs = [
        {"prompt": "Ann has 3 stamps.", "chosen": " She has 3.", "rejected": " Perhaps it is four or five of them."},
        {"prompt": "Tom eats 2.", "chosen": " A long answer that says nothing at all about it.", "rejected": " Two."},
    ]
    tokenizer = AutoTokenizer.from_pretrained(tiny_folder)
    model, reference = (AutoModelForCausalLM.from_pretrained(tiny_folder, dtype=torch.float32) for _ in range(2))
    with torch.no_grad():
        generator = torch.Generator().manual_seed(0)
        for weight in reference.parameters():
            weight.add_(0.05 * torch.randn(weight.shape, generator=generator))
    beta, gamma = (0.3, 0.0) if method == "dpo" else (2.0, 0.7)
    by_hand = []
    for pair in pairs:
        rewards = {}
        for side in ("chosen", "rejected"):
            own, count = log_probs(model, tokenizer, pair["prompt"], pair[side])
            other, _ = log_probs(reference, tokenizer, pair["prompt"], pair[side])
            rewards[side] = beta * (own - other if method == "dpo" else own / count)
        by_hand.append(weight_by_hand(rewards["rejected"], rewards["chosen"], gamma))
    assert abs(by_hand[0] - by_hand[1]) > 0.05, by_hand
    seen: list[dict[str, float]] = []

    class Keep(TrainerCallback):  # type: ignore[misc]
        def on_log(self, *_: Any, logs: dict[str, float] | None = None, **__: Any) -> None:
            seen.append(logs or {})

    arguments = {**TRAINING, "max_steps": 1, "per_device_train_batch_size": 2, "use_cpu": True, "beta": beta}
    arguments |= {"simpo_gamma": gamma} if method == "simpo" else {}
    parts: dict[str, Any] = {"ref_model": reference} if method == "dpo" else {}
    train_by(method, model, tokenizer, Dataset.from_list(pairs), tmp_path, arguments, [Keep()], **parts)
    # σ has a slope of at most ¼, −log σ of at most 1; four sums (DPO) of up to 20 log-probs of 7 nats, or two means
    sums = 4 * 20 if method == "dpo" else 2
    gap = beta * sums * log_prob_gap(torch.float32, 7.0, width=32)
    assert seen[0]["rewards/weight"] == pytest.approx(sum(by_hand) / 2, abs=0.25 * gap)
    assert seen[0]["loss"] == pytest.approx(-sum(math.log(1 - weight) for weight in by_hand) / 2, abs=gap)


def test_the_weight_is_high_where_the_reward_is_wrong() -> None:
    found = implicit_weight(torch.tensor([0.0, 3.0, -3.0]), torch.tensor([0.0, 0.0, 0.0]))
    # σ(0) = ½; σ(−3) = 0.0474; σ(3) = 0.9526
    torch.testing.assert_close(found, torch.tensor([0.5, 0.0474259, 0.9525741]))
    assert implicit_weight(torch.zeros(1), torch.zeros(1), 1.0).item() == pytest.approx(0.7310586, abs=1e-6)


@pytest.mark.slow
def test_fewer_rows_than_a_batch_of_prompts_train_nothing_and_are_refused(tiny_folder: Path, tmp_path: Path) -> None:
    """TRL leaves out a batch that is not whole; the start would be called trained."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(tiny_folder), AutoTokenizer.from_pretrained(tiny_folder)
    rows = Dataset.from_list([{"prompt": f"Say {i}."} for i in range(3)])
    arguments = {"max_steps": 1, "per_device_train_batch_size": 4, "max_completion_length": 4, "use_cpu": True}
    with pytest.raises(ValueError, match="no step was trained: 3 rows are no whole batch"):
        train_by("distill", model, tokenizer, rows, tmp_path, arguments, teacher_model=model)
    assert not (tmp_path / "model.safetensors").exists()
