"""One rendering: the token ids of a prompt are those of training on every path, on the real Qwen3 tokenizer."""

from __future__ import annotations

import ast
import json
import secrets
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from datasets.fingerprint import Hasher
from transformers import AutoTokenizer
from trl import GRPOTrainer, SFTTrainer

from grpo_lab import LabConfig, LabTrainer
from grpo_lab.cli import main
from grpo_lab.engines import generators as engines
from grpo_lab.pipelines.curate import curate, curation_recipe_from
from grpo_lab.pipelines.dry_run import first_prompt, plan_of_training
from grpo_lab.pipelines.rounds import stages_of
from grpo_lab.pipelines.rounds_recipe import rounds_recipe_from
from grpo_lab.pipelines.train import EvaluationOnTheWay, _evaluate, _make_start
from grpo_lab.recipe.job import Job, lab_config, numbers_read, questions
from grpo_lab.recipe.models import load_tokenizer
from grpo_lab.recipe.sections import ModelSection, recipe_from
from grpo_lab.runs.stage import Workspace
from grpo_lab.runs.stop_requests import StopRequests
from grpo_lab.settings import read
from grpo_lab.stages.held_out import Evaluate
from grpo_lab.stages.sample import Sample
from grpo_lab.stages.supervised import Dpo, Simpo, Train
from grpo_lab.testing import THINKING_TEMPLATE, tiny_model
from grpo_lab.trainer.supervised import methods

pytestmark = pytest.mark.not_fast

USER = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is 3 + 4?"}]
ASSISTANT = [*USER, {"role": "assistant", "content": "It is"}]
BOTH = [USER, ASSISTANT]
#: name → chat template (None: the tokenizer's own, which always thinks), and what it is told
TEMPLATES: dict[str, tuple[str | None, dict[str, Any]]] = {
    "own": (None, {}),
    "hybrid": (THINKING_TEMPLATE, {}),
    "no thinking": (THINKING_TEMPLATE, {"enable_thinking": False}),
}
SMALL = {"max_completion_length": 4, "use_cpu": True}
TOOL = '''
def multiply(a: int, b: int) -> int:
    """Multiply two numbers.

    Args:
        a: The first.
        b: The second.

    Returns:
        Their product.
    """
    return a * b
'''


class World:
    """A model, rows, and what every path asks the model for."""

    def __init__(self, folder: Path, model: Path, told: dict[str, Any], seen: list[list[int]]) -> None:
        self.folder, self.told, self.seen = folder, told, seen
        self.model = str(model)
        self.data = {"loader": "rows_of_one_rendering:rows"}
        self.tokenizer = load_tokenizer(ModelSection(path=self.model))

    @property
    def recipe(self) -> dict[str, Any]:
        return {
            **SMALL, "model": {"path": self.model}, "data": self.data, "rewards": ["accuracy"], "bf16": False,
            "evaluation": {"data": self.data, "every": 1}, "cold_start": {"data": self.data, "max_steps": 1},
            "output_dir": str(self.folder / "run"), "per_device_train_batch_size": 2, "num_generations": 2,
            **({"chat_template_kwargs": self.told} if self.told else {}),
        }  # fmt: skip

    @property
    def sampling(self) -> dict[str, Any]:
        return {**SMALL, "n_samples": 2, **({"chat_template_kwargs": self.told} if self.told else {})}

    def job(self) -> Any:
        recipe = numbers_read(recipe_from({**self.recipe, "output_dir": str(self.folder / "job")}))
        return Job.resolve(recipe, lab_config(recipe))

    def at(self, name: str) -> Workspace:
        (self.folder / name).mkdir(exist_ok=True)
        return Workspace(self.folder / name, StopRequests(self.folder / name))


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory, grpo_lab_data: Path) -> dict[str | None, Path]:
    """Chat template → the folder of a model."""
    folder = tmp_path_factory.mktemp("qwen3")
    qwen = grpo_lab_data / "tokenizers" / "qwen3"
    model, tokenizer = tiny_model(hidden_size=8, num_layers=1, num_heads=1, tokenizer=qwen)
    found: dict[str | None, Path] = {None: folder / "own", THINKING_TEMPLATE: folder / "hybrid"}
    for place in found.values():
        model.save_pretrained(place)
        tokenizer.save_pretrained(place)
    (found[THINKING_TEMPLATE] / "chat_template.jinja").write_text(THINKING_TEMPLATE)
    return found


read_once = cache(AutoTokenizer.from_pretrained)


@pytest.fixture(params=TEMPLATES)
def world(
    request: pytest.FixtureRequest, saved: dict[str | None, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> World:
    template, told = TEMPLATES[request.param]
    rows = [{"prompt": prompt, "solution": "7", "worked_solution": "7", "question": str(prompt)} for prompt in BOTH]
    module = f"import json\nfrom datasets import Dataset\ndef rows():\n    return Dataset.from_list({rows!r})\n{TOOL}"
    (tmp_path / "rows_of_one_rendering.py").write_text(module)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(__import__("sys").modules, "rows_of_one_rendering", raising=False)
    # seconds each: of reading 150,000 words, and of their hash, by which `Dataset.map` would find what it has made
    monkeypatch.setattr(AutoTokenizer, "from_pretrained", read_once)
    monkeypatch.setattr(Hasher, "hash", lambda *_: secrets.token_hex(8))
    seen: list[list[int]] = []

    def answer(_: Any, prompts: Any, *, n: int, **how: Any) -> list[list[engines.Completion]]:
        seen.extend(list(ids) for ids in prompts)
        return [[engines.Completion([151645], True)] * n for _ in prompts]

    monkeypatch.setattr(engines.TransformersGenerator, "__call__", answer)
    return World(tmp_path, saved[template], told, seen)


def trainer_of(world: World, model: str, **more: Any) -> LabTrainer:
    from rows_of_one_rendering import rows

    config = LabConfig(
        output_dir=str(world.folder / "t"), report_to="none", bf16=False, use_cpu=True, num_generations=2,
        per_device_train_batch_size=2, max_completion_length=4, chat_template_kwargs=world.told or None,
    )  # fmt: skip
    return LabTrainer(model, lambda completions, **_: [0.0] * len(completions), config, rows(), **more)


def in_training(world: World) -> list[list[int]]:
    """By TRL's own method and by ours, which must be one."""
    trainer = trainer_of(world, world.model)
    stock = GRPOTrainer._tokenize_prompts(trainer, BOTH)[0]
    assert trainer._tokenize_prompts(BOTH)[0] == stock
    return [list(ids) for ids in stock]


def evaluation_in_training(world: World) -> None:
    _evaluate(replace(world.job(), folder=world.folder / "before"), world.model, "before")


def evaluation_on_the_way(world: World) -> None:
    job = world.job()
    trainer: Any = type("Stub", (), {})()
    policy = type("Policy", (), {"tokenizer": world.tokenizer, "context": None, "stops": [151645]})()

    def asked(prompts: Any, *, n: int, **how: Any) -> Any:
        return engines.TransformersGenerator.__call__(None, prompts, n=n, **how)  # type: ignore[arg-type]

    class Asks(type(policy)):  # type: ignore[misc]
        __call__ = staticmethod(asked)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("grpo_lab.pipelines.train.PolicyGenerator", lambda *_: Asks())
        way = EvaluationOnTheWay(trainer, job.evaluation, world.folder / "way")
    way.ask(blocks=way.blocks)


def evaluate_stage(world: World) -> None:
    section = {"data": world.data, **({"chat_template_kwargs": world.told} if world.told else {})}
    read(Evaluate, {"model": world.model, **SMALL, **section}, "stage").run(world.at("evaluate"))


def evaluate_like(world: World) -> None:
    (world.folder / "recipe.yaml").write_text(yaml.safe_dump(world.recipe))
    assert main(["evaluate", world.model, "--like", str(world.folder / "recipe.yaml")]) == 0


def evaluate_by_options(world: World) -> None:
    told = ["--chat-template-kwargs", json.dumps(world.told)] if world.told else []
    asked = ["evaluate", world.model, "--data", world.data["loader"], "--max-new-tokens", "4"]
    assert main([*asked, *told]) == 0


def sample_stage(world: World) -> None:
    read(Sample, {"model": world.model, "data": world.data, **world.sampling}, "stage").run(world.at("sample"))


def curation(world: World) -> None:
    recipe = {"output_dir": str(world.folder / "c"), "model": {"path": world.model}, "data": world.data}
    curate(curation_recipe_from({**recipe, **world.sampling}))


def of_a_round(world: World, name: str) -> None:
    """Do a stage of the first round; the model that it leaves is the one that it began with."""
    written = {"method": "online_rft", "model": {"path": world.model}, "data": world.data}
    written |= {"evaluation": {"data": world.data}, "output_dir": str(world.folder / "r"), **world.sampling}
    recipe = rounds_recipe_from(written)
    asked = questions(recipe.data, recipe.reward, recipe.evaluation)
    stage = next(one for one in stages_of(recipe, asked)[1] if one.name == name)
    stage.folder.mkdir(parents=True, exist_ok=True)
    if name == "evaluate":
        (stage.folder / "model").symlink_to(world.model)
    stage.kind.run(Workspace(stage.folder, StopRequests(world.folder)))


def round_samples(world: World) -> None:
    of_a_round(world, "sample")


def round_measures(world: World) -> None:
    of_a_round(world, "evaluate")


PATHS: list[Callable[[World], None]] = [
    evaluation_in_training, evaluation_on_the_way, evaluate_stage, evaluate_like, evaluate_by_options, sample_stage,
    curation, round_samples, round_measures,
]  # fmt: skip


def test_what_the_model_is_asked_is_what_it_is_trained_on(world: World) -> None:
    expected = sorted(in_training(world))
    assert len({tuple(ids) for ids in expected}) == 2
    found = {}
    for path in PATHS:
        world.seen.clear()
        path(world)
        found[path.__name__] = sorted([list(ids) for ids in {tuple(ids) for ids in world.seen}])
    assert found == dict.fromkeys(found, expected)


@pytest.mark.parametrize("world", ["own", "no thinking"], indirect=True)
def test_what_is_shown_and_handed_on_is_what_it_is_trained_on(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    """The dry run's first prompt; the prompts of a task for lm-evaluation-harness."""
    expected = in_training(world)
    plan = plan_of_training(recipe_from(world.recipe))
    assert plan["first prompt"] == repr(world.tokenizer.decode(expected[0]))
    (world.folder / "recipe.yaml").write_text(yaml.safe_dump(world.recipe))
    task = world.folder / "task"
    assert main(["harness", world.model, "--like", str(world.folder / "recipe.yaml"), "--output", str(task)]) == 0
    lines = [json.loads(line) for line in (task / "rows.jsonl").read_text().splitlines()]
    assert [world.tokenizer(line["prompt"], add_special_tokens=False)["input_ids"] for line in lines] == expected


@pytest.mark.parametrize("world", ["no thinking"], indirect=True)
def test_what_is_imitated_begins_with_what_it_is_trained_on(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cold start, and the trainings of a pipeline and of rounds: the prompt's ids, then what is learnt."""
    expected = in_training(world)
    rows: list[dict[str, Any]] = []

    def looked_at(trainer: Any, *_: Any, **__: Any) -> None:
        rows.extend(trainer.train_dataset)
        trainer.state.global_step = 1

    monkeypatch.setattr(SFTTrainer, "train", looked_at)
    monkeypatch.setattr(methods.DPOTrainer, "train", looked_at)
    monkeypatch.setattr(methods.trl_of("simpo")[1], "train", looked_at)
    _make_start(world.job(), world.folder / "start")
    answer = [{"role": "assistant", "content": "7"}]
    other = [{"role": "assistant", "content": "8"}]
    written = [{"prompt": prompt, "completion": answer, "chosen": answer, "rejected": other} for prompt in BOTH]
    (world.folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in written))
    begun: dict[str, list[list[int]]] = {"cold start": _prompts(rows)}
    for kind in (Train, Dpo, Simpo):
        rows.clear()
        said = {"model": world.model, "rows": str(world.folder / "rows.jsonl"), "use_cpu": True, "bf16": False}
        said |= {"chat_template_kwargs": world.told} if world.told else {}
        said |= {"per_device_train_batch_size": 1}
        read(kind, said, "stage").run(world.at(kind.__name__))
        begun[kind.__name__] = _prompts(rows)
    for name, found in begun.items():
        assert len(found) == 2, name
        # as far as the template renders a prompt alike with an answer behind it, which TRL looks for
        assert [ids[: len(whole)] for ids, whole in zip(expected, found, strict=True)] == found, name
        assert found[0] == expected[0], name


def _prompts(rows: list[dict[str, Any]]) -> list[list[int]]:
    """What of each row is not learnt."""
    found = []
    for row in rows:
        if "prompt_ids" in row:
            found.append(row["prompt_ids"])
        elif "prompt_input_ids" in row:
            found.append(row["prompt_input_ids"])
        else:
            found.append([t for t, label in zip(row["input_ids"], row["labels"], strict=True) if label == -100])
    return found


@pytest.mark.parametrize("name", ["add_generation_prompt", "continue_final_message", "tools"])
def test_what_decides_the_rendering_is_no_word_to_a_template(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    said = rf"`chat_template_kwargs` has '{name}', which decides how a prompt is rendered"
    section = {"data": {"loader": "x"}, "chat_template_kwargs": {name: True}}
    with pytest.raises(ValueError, match=said):
        recipe_from({"model": {"path": "m"}, "data": {"loader": "x"}, "rewards": ["accuracy"], "evaluation": section})
    with pytest.raises(ValueError, match=said):
        read(Sample, {"model": "m", "data": {"loader": "x"}, "chat_template_kwargs": {name: True}}, "stage")
    assert main(["evaluate", "m", "--data", "gsm8k", "--chat-template-kwargs", json.dumps({name: True})]) != 0
    assert f"`--chat-template-kwargs` has '{name}'" in capsys.readouterr().err


@pytest.mark.parametrize("world", ["own", "no thinking"], indirect=True)
def test_a_dry_run_renders_a_recipe_s_tools_as_training_does(world: World) -> None:
    """It showed, and evaluations asked, a prompt that the model is never trained on."""
    import trl
    from rows_of_one_rendering import multiply

    knows_tools = Path(trl.__file__).parent / "chat_templates" / "qwen3.jinja"
    model = world.folder / "knows-tools"
    shutil.copytree(world.model, model)
    (model / "chat_template.jinja").write_text(knows_tools.read_text())
    alone = {
        **world.recipe,
        "model": {"path": str(model)},
        "tools": ["rows_of_one_rendering:multiply"],
        "cold_start": None,
    }
    with pytest.raises(ValueError, match=r"`evaluation\.every` does not combine with `tools`"):
        recipe_from(alone)
    recipe = recipe_from({**alone, "evaluation": None})
    shown = ast.literal_eval(first_prompt(numbers_read(recipe), [{"prompt": prompt} for prompt in BOTH], [multiply]))
    trainer = trainer_of(world, str(model), tools=[multiply])
    assert "multiply" in shown
    assert world.tokenizer(shown, add_special_tokens=False)["input_ids"] == trainer._tokenize_prompts(BOTH)[0][0]
