"""The stage kinds of Qwen3's pipeline: fusion, what is chosen by difficulty, effort against difficulty."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any, ClassVar

import datasets
import pytest

from grpo_lab.curation import Selection
from grpo_lab.curation.rejection import in_form_of
from grpo_lab.evaluation import EvaluationResult, Outcome
from grpo_lab.evaluation.sweep import Measured
from grpo_lab.io import write_json_lines
from grpo_lab.pipelines.curate import curation_recipe_from
from grpo_lab.pipelines.pipeline_recipe import pipeline_from
from grpo_lab.pipelines.runner import plan_of_pipeline, run_pipeline
from grpo_lab.recipe.data import load_rows
from grpo_lab.recipe.sections import DataSection, SamplingSettings
from grpo_lab.recipe.yaml import read_yaml
from grpo_lab.runs.stage import Workspace
from grpo_lab.runs.stop_requests import StopRequests
from grpo_lab.settings import read, settings
from grpo_lab.stages.filter import Filtering, HardestFilter
from grpo_lab.stages.held_out import Evaluate
from grpo_lab.stages.mix import Fusion
from grpo_lab.testing import tiny_model

RECIPES = Path(__file__).resolve().parents[2] / "recipes" / "qwen3"
PLAIN = {"loader": "word_problems", "n": 3, "split": "cold_start", "blurted": 1.0, "largest": 20}
CLOSED, OPEN = "<think>\n1+1=2\n</think>\n\n#### 2", "<think>\n1+1=2"


@pytest.fixture(scope="module")
def thinker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A saved random Qwen3 whose chat template has the modes."""
    folder = tmp_path_factory.mktemp("thinker") / "model"
    for part in tiny_model("qwen3", hidden_size=16, num_layers=1, num_heads=2, max_positions=2048, thinking=True):
        part.save_pretrained(folder)
    return folder


def samples_file(folder: Path) -> Path:
    def line(row: int, *judged: tuple[str, float | None]) -> dict[str, Any]:
        problem = {"prompt": [{"role": "user", "content": f"Q{row}"}], "solution": "2"}
        completions = [[{"role": "assistant", "content": text}] for text, _ in judged]
        scores, lengths = [score for _, score in judged], [9 for _ in judged]
        return {"row": row, "problem": problem, "completions": completions, "scores": scores, "lengths": lengths}

    other = CLOSED.replace("1+1", "3-1")
    lines = [
        line(0, (CLOSED, 0.0), (other, 1.0), (CLOSED, 1.0)),  # right: the second and the third
        line(1, (OPEN, 1.0), ("#### 2", 1.0), (CLOSED, None)),  # two right ones without a closed block
        line(2, (CLOSED, 1.0), (CLOSED, 1.0), (other, 1.0)),  # the first two are one
        line(3, (CLOSED, 0.0)),
    ]
    (folder / "samples.jsonl").write_text("".join(json.dumps(one) + "\n" for one in lines))
    return folder / "samples.jsonl"


def fused(folder: Path, model: Path, **changes: Any) -> tuple[Any, list[dict[str, Any]]]:
    written = {"model": str(model), "samples": str(samples_file(folder)), "plain": [PLAIN], **changes}
    facts = read(Fusion, written, "stage").run(Workspace(folder, StopRequests(folder)))
    return facts, [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()]


def test_every_count_of_a_fusion(thinker: Path, tmp_path: Path) -> None:
    none = {"unflagged": 0, "in_system": 0, "in_both": 0, "dialogues": 0}
    facts, rows = fused(tmp_path, thinker, shares=none)
    counted = {name: value for name, value in facts.items() if name != "trained_tokens"}
    assert counted == {
        "rows": 5, "thinking": 2, "non_thinking": 3, "dropped": {"no_closed_reasoning": 2},
        "flag_user": 5, "flag_system": 0, "flag_both": 0, "flag_none": 0, "flag_dialogue": 0, "flag_cut": 0,
    }  # fmt: skip
    assert [(row["mode"], row.get("row")) for row in rows] == [("think", 0), ("think", 2), *[("no_think", None)] * 3]
    assert rows[0]["completion"][0]["content"] == CLOSED.replace("1+1", "3-1")  # the first right one
    assert rows[0]["problem"]["solution"] == "2"
    assert all(row["completion"][0]["content"].startswith("<think>\n\n</think>\n\n#### ") for row in rows[2:])
    both, _ = fused(tmp_path, thinker, per_problem=2)
    assert both["thinking"] == 4


def test_a_fusion_that_cannot_be(thinker: Path, tmp_path: Path) -> None:
    opens = tmp_path / "opens"
    shutil.copytree(thinker, opens)
    template = opens / "chat_template.jinja"
    template.write_text(template.read_text().replace("<|im_start|>assistant\\n", "<|im_start|>assistant\\n<think>\\n"))
    with pytest.raises(ValueError, match=r"chat template of .*opens' cannot switch modes: row 1 asks for `think`"):
        fused(tmp_path, opens)
    assert not (tmp_path / "rows.jsonl").exists()
    (tmp_path / "plain.jsonl").write_text('{"question": "Q", "solution": "2"}\n')
    no_answer = {"loader": "file", "source": str(tmp_path / "plain.jsonl")}
    written = {"model": "m", "samples": str(tmp_path / "samples.jsonl"), "plain": [PLAIN, no_answer]}
    with pytest.raises(ValueError, match=r"`plain\.1` has no column 'worked_solution'"):
        read(Fusion, written, "stage").plan()
    (tmp_path / "samples.jsonl").write_text("")
    with pytest.raises(ValueError, match=r"no right answer of 0 problems with one closed <think> block"):
        read(Fusion, {**written, "plain": [PLAIN]}, "stage").run(Workspace(tmp_path, StopRequests(tmp_path)))


@pytest.mark.parametrize(
    ("rates", "n", "kept"),
    [
        ([0.5, 0.1, None, 0.9, 0.3], 2, [1, 4]),
        ([0.5, 0.1, None, 0.9, 0.3], 9, [0, 1, 3, 4]),
        ([0.5] * 4 + [0.2], 1, [4]),
    ],
)
def test_the_hardest_are_kept(rates: list[float | None], n: int, kept: list[int], tmp_path: Path) -> None:
    rows = [{"question": f"Q{i}"} for i in range(len(rates))]
    selection = Selection(rows, shown="question", title="a test")
    parts: dict[str, Any] = {"sampling": SamplingSettings(), "reward": None, "judge": "", "shown": "question"}
    filtering = Filtering(folder=tmp_path, stop=StopRequests(tmp_path), rows=rows, selection=selection, **parts)
    selection.score("pass_rate", rates)
    HardestFilter(n).apply(filtering)
    assert filtering.left == kept
    assert ("Only 4 problems" in "".join(filtering.notes)) == (n == 9)


def test_the_hardest_need_a_model() -> None:
    with pytest.raises(ValueError, match=r"`filters\.hardest` needs a `model`"):
        curation_recipe_from({"data": {"loader": "gsm8k"}, "filters": {"hardest": {"n": 3}}})


def test_an_evaluation_says_effort(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its mean at each difficulty, by hand; an answer without thinking counts as none."""
    data = {"loader": "word_problems", "n": 6, "steps": [1, 3], "largest": 20, "split": "test"}
    stage = read(Evaluate, {"model": "m", "data": data, "effort_by": "steps", "max_new_tokens": 4}, "stage")
    thinking = [8, 1, None, 5, 3, 10]
    outcomes = [Outcome(i, "greedy", 0, "Q", "Q", "5", "5", 9, False, 1.0, "5", one) for i, one in enumerate(thinking)]
    found = [Measured("", ".", EvaluationResult(tuple(outcomes), {"model": "m"}))]
    monkeypatch.setattr("grpo_lab.stages.held_out.measure_conditions", lambda *_, **__: found)
    facts = stage.run(Workspace(tmp_path, StopRequests(tmp_path)))
    assert list(load_rows(stage.section.data)["steps"]) == [1, 2, 2, 3, 2, 3]
    said = {name.removeprefix("thinking_tokens."): one for name, one in facts.items() if "thinking_tokens" in name}
    assert said == {"steps_1": 8.0, "steps_2": pytest.approx(4 / 3), "steps_3": 7.5}
    with pytest.raises(ValueError, match=r"`effort_by` is 'level'; the columns of `data` are \["):
        read(Evaluate, {"model": "m", "data": data, "effort_by": "level"}, "stage").plan()


@settings()
class Worked:
    """In the place of `sample`, which a model of two steps has nothing to write with: worked solutions, all right."""

    leaves: ClassVar[dict[str, str]] = {"samples": "samples.jsonl"}
    model: str
    data: DataSection

    def run(self, workspace: Workspace) -> dict[str, int]:
        assert (Path(self.model) / "model.safetensors").is_file()
        lines = []
        for number, row in enumerate(load_rows(self.data)):
            text = f"<think>\n{row['worked_solution'][:80]}\n</think>\n\n#### {row['solution']}"
            judged = {"completions": [in_form_of(row["prompt"], text)], "scores": [1.0], "lengths": [9]}
            lines.append({"row": number, "problem": row, **judged})
        write_json_lines(workspace.folder / "samples.jsonl", lines)
        return {"samples": len(lines)}


CPU = {"use_cpu": True, "bf16": False, "gradient_checkpointing": False}
SAMPLED = {"max_completion_length": 8, "use_cpu": True, "use_vllm": False, "engine": {}}
TWO_STEPS = {"max_steps": 2, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 1, **CPU}
FEW: dict[str, dict[str, Any]] = {
    "cold_start": TWO_STEPS,
    "sft": {**TWO_STEPS, "max_length": 384},
    "rl": {**TWO_STEPS, "num_generations": 4, "use_vllm": False, "max_completion_length": 8},
    "curate": {**SAMPLED, "n_samples": 2, "filters": {"hardest": {"n": 6}}},
    "evaluate": {"max_new_tokens": 16, "use_cpu": True, "use_vllm": False, "engine": {}},
}


def cut(path: Path, out: Path, model: Path | None = None, data: Path | None = None) -> dict[str, Any]:
    """The pipeline with few rows and steps; ``model`` in the place of those of the hub, ``data`` of its data sets."""
    written = read_yaml(path, {"output_dir": str(out)})
    places = {} if data is None else {"gsm8k": str(data / "gsm8k"), "math": str(data / "math" / "math500.jsonl")}

    def few(section: dict[str, Any]) -> dict[str, Any]:
        there = {"source": places[section["loader"]]} if section["loader"] in places else {}
        return {**section, **there, **({"n": 8} if "n" in section else {"limit": 8})}

    for stage in written["stages"]:
        stage |= FEW.get(stage["stage"], {})
        stage |= {"thinking_budget": [0, 4, None]} if "thinking_budget" in stage else {}
        stage |= {"data": few(stage["data"])} if "data" in stage else {}
        stage |= {"plain": [few(one) for one in stage["plain"]]} if "plain" in stage else {}
        if isinstance(stage.get("model"), str):
            stage["model"] = str(model)
        if stage["stage"] == "sample":
            kept = {name: stage[name] for name in ("name", "inputs", "data", "model") if name in stage}
            stage.clear()
            stage |= {"stage": "training.test_fusion_stages:Worked", **kept}
    return written


TASKS = {"pipeline_quickstart.yaml": "stories", "pipeline.yaml": "gsm8k"}
"""Pipeline → its general task."""


@pytest.mark.thorough(but="pipeline_quickstart.yaml")
@pytest.mark.slow
@pytest.mark.parametrize("name", TASKS)
def test_a_pipeline_from_end_to_end_in_two_steps_each(
    name: str, thinker: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """All its stages, and the evaluations of the last one's model."""
    data = request.getfixturevalue("grpo_lab_data") if name == "pipeline.yaml" else None
    written = cut(RECIPES / name, tmp_path / "out", thinker, data)
    names = [stage["name"] for stage in written["stages"] if stage["stage"] == "evaluate"]
    models, tasks = ("long_cot", "reasoning", "fused", "general"), ("thinking", "no_thinking", "modes", TASKS[name])
    assert names == [f"{model}-{task}" for task in tasks for model in models]
    left_out = [name for name in names if not name.startswith("general-")]
    written["stages"] = [stage for stage in written["stages"] if stage["name"] not in left_out]
    done = run_pipeline(pipeline_from(written))
    assert done["both_modes"]["thinking"] == 8
    assert done["both_modes"]["non_thinking"] == 16
    assert done["fused"]["steps"] == 2
    assert any(name.startswith("thinking_tokens.") for name in done["general-thinking"])
    assert done["general-modes"]["accuracy"] is not None


def test_a_hub_out_of_reach_is_asked_once(tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each time would be 23 s of retries, at every stage; another name is asked for where a name is wrong."""
    asked = []

    def splits(name: str, config: str | None) -> list[str]:
        if not datasets.config.HF_HUB_OFFLINE:
            asked.append(name)
        raise ConnectionError(f"Couldn't reach {name!r} on the Hub") if fault is None else fault

    fault: Exception | None = None
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(datasets, "get_dataset_split_names", splits)
    data = [{"loader": "gsm8k"}, {"loader": "math"}, {"loader": "gsm8k", "split": "test"}]
    stages = [
        {"stage": "evaluate", "name": f"e{i}", "model": str(tiny_folder), "data": one} for i, one in enumerate(data)
    ]
    recipe = pipeline_from({"output_dir": str(tmp_path / "out"), "stages": stages})
    for _ in range(2):  # each call anew
        plan_of_pipeline(recipe)
    assert asked == ["openai/gsm8k"] * 2
    fault = datasets.exceptions.DatasetNotFoundError("no such data set")
    plan_of_pipeline(recipe)
    assert asked[2:] == ["openai/gsm8k", "HuggingFaceH4/MATH-500", "openai/gsm8k"]
