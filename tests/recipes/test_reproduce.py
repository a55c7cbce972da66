"""Recipes of published numbers: each is dry-run on real rows with the real tokenizer, and its prompt is the source's,
letter by letter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from grpo_lab.data import load_gsm8k, load_math
from grpo_lab.data.prompts import TEMPLATES
from grpo_lab.engines.generators import render_prompt
from grpo_lab.pipelines.dry_run import plan_of_training as dry_run
from grpo_lab.recipe.sections import read_recipe

RECIPES = Path(__file__).resolve().parents[2] / "recipes"
REPRODUCE = sorted((RECIPES / "reproduce").glob("*.yaml"))
CONTROL = "oat-zero-qwen2.5-math-1.5b-coin"

# eric-haibin-lin/verl-data, gsm8k/Qwen2.5-0.5B-bsz256_2-prompt1024-resp512-0.567.log: a prompt as that run printed it
# (test row 901)
VERL_PRINTED = (
    "<|im_start|>system\nYou are Qwen, created by Alibaba Cloud. You are a helpful "
    "assistant.<|im_end|>\n<|im_start|>user\n"
    "Calvin is making soup for his family for dinner. He has a pot with enough soup to fill four adult's bowls or "
    "eight child's "
    "bowls. He is an adult and will be eating with his adult wife and their two children. If everyone eats one bowl "
    "at a meal, how "
    "many times will each child be able to have a bowl of soup for lunch from the leftover soup? Let's think step by "
    "step and output "
    'the final answer after "####".<|im_end|>\n<|im_start|>assistant\n'
)
# the LoRA runs' logs print it without special tokens (test row 0)
VERL_LORA_PRINTED = (
    "system\nYou are Qwen, created by Alibaba Cloud. You are a helpful assistant.\nuser\n"
    "Janet’s ducks lay 16 eggs per day. She eats three for breakfast every morning and bakes muffins for her friends "
    "every day with "
    "four. She sells the remainder at the farmers' market daily for $2 per fresh duck egg. How much in dollars does "
    "she make every "
    "day at the farmers' market? Let's think step by step and output the final answer after \"####\".\nassistant\n"
)
# hkust-nlp/RL-Verifier-Pitfalls (the laboratory's later copy), examples/simplelr_math_eval/utils.py, PROMPT_TEMPLATES
ABEL = "Question:\n{input}\nAnswer:\nLet's think step by step.\n"
QWEN_BOXED = (
    "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
    "<|im_start|>user\n{input}\nPlease reason step by step, and put your final answer within \\boxed{{}}.<|im_end|>\n"
    "<|im_start|>assistant\n"
)
# sail-sg/understand-r1-zero, train_zero_math.py, apply_qwen_math_template and apply_r1_template: before and after the
# question
OAT_QWEN_MATH = (
    "<|im_start|>system\nPlease reason step by step, and put your final answer within "
    "\\boxed{}.<|im_end|>\n<|im_start|>user\n",
    "<|im_end|>\n<|im_start|>assistant\n",
)
OAT_R1 = (
    "A conversation between User and Assistant. The User asks a question, and the Assistant solves it. The Assistant "
    "first thinks about the reasoning process in the mind and then provides the User with the answer. "
    "The reasoning process is enclosed within <think> </think> and answer is enclosed within <answer> </answer> "
    "tags, respectively, i.e., <think> reasoning process here </think> <answer> answer here </answer>.\nUser: ",
    "\nAssistant: <think>",
)
# ServiceNow/TapeAgents, conf/rl_gsm8k.yaml (commit e7ddebba), task_template: a block scalar, so `\n` stays two
# characters
TAPEAGENTS = r"{task}\nPlease reason step by step, and put your final answer within \boxed{{}}."


# What Qwen2.5's own chat template makes of a system and a user turn; the one of shared/data is Qwen3's, which opens
# `<think>`
CHAT_ML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="module")
def tokenizer(grpo_lab_data: Path) -> Any:
    from transformers import AutoTokenizer

    qwen = AutoTokenizer.from_pretrained(grpo_lab_data / "tokenizers" / "qwen3")
    qwen.chat_template = CHAT_ML
    return qwen


def here(path: Path, data: Path) -> dict[str, Any]:
    """The recipe's rows and tokenizer as they are on this machine: MATH-500 stands for MATH, the Qwen BPE for
    Llama's."""
    written = yaml.safe_load(path.read_text())
    changes: dict[str, Any] = {"use_cpu": True, "bf16": False, "model.tokenizer": str(data / "tokenizers" / "qwen3")}
    if written.get("steps_per_generation", 0) > 64:  # a generation batch of no more prompts than there are rows
        changes |= {"gradient_accumulation_steps": 8, "steps_per_generation": 64}
    for section, rows in (("data", written["data"]), ("evaluation.data", written["evaluation"]["data"])):
        changes |= {f"{section}.source": str(data / rows["loader"]), f"{section}.limit": 64}
        if rows["loader"] == "math":
            changes[f"{section}.split"] = "test"
    return changes


def expected_prompt(template: str, question: str) -> str:
    """What the source makes of ``question``; of a message list the user's turn."""
    if template == "abel":
        return ABEL.format(input=question)
    if template == "qwen_math":
        return OAT_QWEN_MATH[0] + question + OAT_QWEN_MATH[1]
    if template == "tapeagents_boxed":
        return TAPEAGENTS.format(task=question)
    assert template == "verl_gsm8k"
    return question + " " + 'Let\'s think step by step and output the final answer after "####".'


@pytest.mark.not_fast
@pytest.mark.parametrize("path", REPRODUCE, ids=lambda path: path.stem)
def test_dry_runs_on_real_rows_with_the_sources_prompt(path: Path, grpo_lab_data: Path, tmp_path: Path) -> None:
    changes = here(path, grpo_lab_data) | {"output_dir": str(tmp_path / "out")}
    recipe = read_recipe(path, changes)
    facts = dry_run(recipe)
    assert "the trainer built around a small stand-in" in facts["checked"]
    load = {"gsm8k": load_gsm8k, "math": load_math}[recipe.data.loader]
    question = load(**recipe.data.arguments)[0]["question"]
    assert repr(expected_prompt(recipe.data.template, question))[1:-1] in facts["first prompt"]
    assert not (tmp_path / "out").exists()


@pytest.mark.not_fast
def test_verl_prompts_are_what_its_runs_printed(grpo_lab_data: Path, tokenizer: Any) -> None:
    recipe = read_recipe(RECIPES / "reproduce" / "verl-qwen2.5-0.5b-instruct-lora.yaml")
    assert recipe.evaluation is not None
    arguments = {**recipe.evaluation.data.arguments, "source": grpo_lab_data / "gsm8k"}
    rows = load_gsm8k(**arguments, template=recipe.evaluation.data.template)
    assert render_prompt(rows[901]["prompt"], tokenizer).text == VERL_PRINTED
    assert (
        tokenizer.decode(render_prompt(rows[0]["prompt"], tokenizer).ids, skip_special_tokens=True) == VERL_LORA_PRINTED
    )
    assert recipe.data.arguments["system_prompt"] == recipe.evaluation.data.arguments["system_prompt"]


def test_templates_beside_the_recipes_are_the_sources_too(grpo_lab_data: Path) -> None:
    """For the base model's score under several templates."""
    question = load_math(grpo_lab_data / "math")[0]["question"]
    assert TEMPLATES["qwen_boxed"].prompt(question) == QWEN_BOXED.format(input=question)
    assert TEMPLATES["oat_r1"].prompt(question) == OAT_R1[0] + question + OAT_R1[1]
    assert TEMPLATES["none"].prompt(question) == question


#: completions an update, completions a rollout, updates; from the sources (docs/reproduce.md)
BATCHES = {
    "verl-qwen2.5-0.5b-instruct-lora": (64 * 5, 64 * 5, 7473 // 64),
    "verl-qwen2.5-1.5b-instruct-lora": (64 * 5, 64 * 5, 7473 // 64),
    "simplerl-qwen2.5-0.5b": (256 * 8, 1024 * 8, 100 * 4),
    "simplerl-qwen2.5-1.5b": (256 * 8, 1024 * 8, 100 * 4),
    "oat-zero-qwen2.5-math-1.5b": (128, 128 * 8, 200 * 8),
    CONTROL: (128, 128 * 8, 200 * 8),
    "tapeagents-llama-3.2-1b-instruct": (4 * 8, 10 * 4 * 8, 100 * 10),
}


@pytest.mark.parametrize("path", REPRODUCE, ids=lambda path: path.stem)
def test_batches_are_the_sources(path: Path) -> None:
    written = yaml.safe_load(path.read_text())
    rows, accumulated = written["per_device_train_batch_size"], written["gradient_accumulation_steps"]
    rollout = rows * written.get("steps_per_generation", accumulated)
    assert (rows * accumulated, rollout, written["max_steps"]) == BATCHES[path.stem]
    assert written.get("use_bias_correction_kl") is (False if written["beta"] else None), (
        "the sources have the plain k3"
    )
    assert written["name"] == f"reproduce-{path.stem}"


def test_the_control_differs_in_the_reward_alone() -> None:
    run, control = (
        yaml.safe_load((RECIPES / "reproduce" / f"{CONTROL.removesuffix(end)}.yaml").read_text())
        for end in ("-coin", "")
    )
    assert {key for key in run if run[key] != control[key]} == {"name", "model", "rewards"}
    assert run["model"]["path"] == control["model"]["path"]
    assert control["rewards"] == [{"name": "coin", "p": 0.5, "seed": 0}]
    assert control["evaluation"]["reward"] == run["rewards"][0]


@pytest.mark.not_fast
def test_a_published_number_stands_only_where_it_was_published() -> None:
    """Recipes with other data, prompt or grader named SimpleRL-Zoo's numbers as theirs."""
    for path in RECIPES.glob("*/*.yaml"):
        written = yaml.safe_load(path.read_text()) or {}
        model = written.get("model") if isinstance(written, dict) else None
        if path.parent.name != "reproduce" and isinstance(model, dict):
            assert "expected" not in model, path
