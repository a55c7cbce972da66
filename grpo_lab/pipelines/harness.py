"""`grpo-lab harness`: write held-out rows as a task of lm-evaluation-harness, judged as `grpo-lab evaluate` judges
them.

The harness is github.com/EleutherAI/lm-evaluation-harness, tried with 0.4.13. The task's folder has ``<name>.yaml``
(the task), ``<name>.py`` (two functions that the harness calls, which call ``task_rows`` and ``judged`` here) and
``rows.jsonl`` with rendered prompts. docs/evaluation.md says what the harness would otherwise do differently.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from itertools import compress
from pathlib import Path
from typing import Any

from grpo_lab.curation.pass_rate import scores_of
from grpo_lab.engines.generators import context_of_config, in_form_of, render_prompt, too_long
from grpo_lab.evaluation.outcomes import as_text
from grpo_lab.io import whole_folder, write_json_lines, write_whole_text
from grpo_lab.pipelines.evaluate import HeldOut, plan_of
from grpo_lab.reading import checked_object, parse_json
from grpo_lab.recipe.build import build_reward
from grpo_lab.recipe.data import load_rows
from grpo_lab.recipe.models import tokenizer_and_config
from grpo_lab.recipe.sections import ModelSection, RewardSection
from grpo_lab.settings import read
from grpo_lab.stages.held_out import conditions_in, template_kwargs_in
from grpo_lab.stages.sample import read_lines
from grpo_lab.verifiers.verdict import CORRECT_FROM
from grpo_lab.visible import encodable

ROWS = "rows.jsonl"
_SAID = {"model", "tokenizer", "data", "like", "source", "split", "templates", "limit", "mode", "max_new_tokens"}
_SAID |= {"output", "command", "traceback", "verbose", "chat_template_kwargs"}
_TASK = """\
# {about}
# Written by `grpo-lab harness`; run by
#   {command}
task: {name}
custom_dataset: !function {name}.rows
test_split: test
output_type: generate_until
doc_to_text: "{{{{prompt}}}}"
doc_to_target: "{{{{solution}}}}"
process_results: !function {name}.process_results
num_fewshot: 0
generation_kwargs:
  until: []              # the harness's own is the first blank line
  max_gen_toks: {tokens}  # the harness's own is 256
  do_sample: false
  repetition_penalty: 1.0
metric_list:
  - {{metric: accuracy, aggregation: mean, higher_is_better: true}}
  - {{metric: unscorable, aggregation: mean, higher_is_better: false}}
metadata: {{version: 1}}
"""
_FUNCTIONS = '''\
"""The rows and the judge of {name}.yaml. Written by `grpo-lab harness`."""

from grpo_lab.pipelines.harness import judged, task_rows

REWARD = {reward!r}


def rows(**_):
    return task_rows(__file__)


def process_results(row, completions):
    return judged(REWARD, row, completions[0])
'''


def run(known: argparse.Namespace) -> int:
    """Write the task that the options of `grpo-lab evaluate` describe into ``--output``, and print the command that
    runs it."""
    for name, value in vars(known).items():
        if value not in (None, False) and name not in _SAID and not name.startswith("data."):
            raise ValueError(f"`--{name.replace('_', '-')}` has no effect on a task of the harness; leave it out")
    if len(getattr(known, "templates", ())) > 1:
        raise ValueError(f"`--template` is {known.templates}; a task of the harness has one: write a task for each")
    if known.output is None:
        raise ValueError("--output is missing: name a new folder for the task")
    print(write_task(known.model, plan_of(known), known.output, known.tokenizer))
    return 0


def write_task(model: str, plan: HeldOut, folder: Path, tokenizer: str | None = None) -> str:
    """Write the task's folder, completely or not at all; return how many rows it has, and the command that runs it.

    Args:
        model: the model that is to be measured, whose chat template and context are used.
        plan: the evaluation, of which the first condition is written.
        folder: the task's folder, whose name becomes the task's.
        tokenizer: folder of another tokenizer; None: the model's own.

    Raises:
        ValueError: the folder is not empty, a prompt cannot be rendered, or none leaves room for a completion.
    """
    name = re.sub(r"\W", "_", folder.name)
    if folder.is_dir() and any(folder.iterdir()):
        raise ValueError(f"--output {str(folder)!r} is not empty; name a new folder for the task")
    found = tokenizer_and_config(ModelSection(path=model, tokenizer=tokenizer), here_only=False)
    if found is None:
        raise ValueError(f"{model!r} is an adapter, of which there is no chat template or context here; merge it first")
    own_tokenizer, config = found
    context = context_of_config(config)
    reward = {"name": plan.section.reward.name, **plan.section.reward.arguments}
    _judge(json.dumps(reward))  # raises ValueError if it cannot be built
    way = next(iter(conditions_in(plan.section).values()))
    rows = load_rows(replace(plan.section.data, template=way.template), "evaluation.data").to_list()
    template_kwargs = template_kwargs_in(plan.section, way)
    prompts = [render_prompt(row["prompt"], own_tokenizer, template_kwargs) for row in rows]
    fits = [context is None or len(one.ids) + plan.max_new_tokens <= context for one in prompts]
    if context is not None and not any(fits):
        raise ValueError(too_long("shortest", min(len(one.ids) for one in prompts), plan.max_new_tokens, context))
    lines = [
        {"prompt": one.text, "solution": as_text(row.get("solution")) or "", "row": json.dumps(encodable(row))}
        for row, one in compress(zip(rows, prompts, strict=True), fits)
    ]
    # false where the tokenizer would put a BOS before a text in which the chat template has written its own tokens
    bos = all(list(own_tokenizer(one.text)["input_ids"]) == one.ids for one in compress(prompts, fits))
    arguments = f"pretrained={model}" + ("" if tokenizer is None else f",tokenizer={tokenizer}")
    arguments += "" if bos else ",add_bos_token=False"
    command = f"lm_eval --model hf --model_args {arguments} --include_path {folder} --tasks {name} --log_samples"
    left_out = len(rows) - len(lines)
    about = f"{len(lines):,} rows of {plan.section.data.loader}; {left_out:,} more have prompts too long for the model"
    task = _TASK.format(about=about, command=command, name=name, tokens=plan.max_new_tokens)
    with whole_folder(folder) as partial:
        write_json_lines(partial / ROWS, lines)
        write_whole_text(partial / f"{name}.py", _FUNCTIONS.format(name=name, reward=reward))
        write_whole_text(partial / f"{name}.yaml", task)
    return f"{about}\n{command} --output_path {folder.parent / f'{name}-results'}"


def task_rows(beside: str) -> dict[str, Any]:
    """Return the harness's data set: split `test` with the rows of the ``rows.jsonl`` that is beside the file
    ``beside``."""
    from datasets import Dataset

    return {"test": Dataset.from_list(read_lines(Path(beside).parent / ROWS, {"prompt": str, "row": str}))}


def judged(reward: Mapping[str, Any], row: Mapping[str, Any], text: str) -> dict[str, float]:
    """Return the metrics of one completion: `unscorable`, 0 or 1, and, if the reward can score it, `accuracy`, 0 or 1.

    ``reward``: the mapping ``REWARD`` of the task's file; ``row``: a line of ``rows.jsonl``; ``text``: the completion.
    """
    found = checked_object(parse_json(row["row"], f"`row` of a line of {ROWS}"), {"prompt": str | list})
    columns = {name: value for name, value in found.items() if name != "completion"}
    answer = in_form_of(columns["prompt"], text)
    score = scores_of([(columns, answer)], _judge(json.dumps(reward)))[0]
    if score is None:
        return {"unscorable": 1.0}
    return {"accuracy": float(score >= CORRECT_FROM), "unscorable": 0.0}


@cache
def _judge(reward: str) -> Any:
    """Build the reward from its mapping, as JSON: a cache needs a key that can be hashed."""
    return build_reward(read(RewardSection, json.loads(reward), "REWARD"), "evaluation.reward")
