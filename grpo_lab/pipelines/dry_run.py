"""``--dry-run`` of a training: describe what it will do, without doing it.

Everything is checked that needs neither a GPU nor the network: the recipe, rows and golds if they are on this machine,
and the trainer, which is built around a small stand-in for the model.
"""

from __future__ import annotations

import dataclasses
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from grpo_lab import LabConfig
from grpo_lab.io import saving
from grpo_lab.objectives import PRESETS
from grpo_lab.pipelines.estimate import Estimates
from grpo_lab.pipelines.run_folder import RunFolder
from grpo_lab.recipe.ahead import made_from, outlook
from grpo_lab.recipe.build import scoring_nothing
from grpo_lab.recipe.data import asking_the_hub_once
from grpo_lab.recipe.job import NOT_OF_THIS_MACHINE, Job, lab_config, numbers_read
from grpo_lab.recipe.models import load_model, load_tokenizer
from grpo_lab.recipe.sections import ModelSection, Recipe, template_kwargs_of
from grpo_lab.rewards.for_task import COLUMN
from grpo_lab.rewards.schedules import weight_in_words
from grpo_lab.runs.console import count_of, describe, settings_in_words
from grpo_lab.trainer.arguments import with_class_parts, with_declared_rewards
from grpo_lab.trainer.trl_bridge.rewards import reward_name

NOT_BUILT: dict[str, Any] = {
    **dict.fromkeys(("use_vllm", "push_to_hub", "enable_jit_checkpoint"), False),
    **dict.fromkeys(("rollout", "model_init_kwargs", "max_hours", "stop_file")),
    "use_cpu": True,
    "report_to": "none",
    "save_checksums": True,
}
"""Values that replace the recipe's when the trainer is built around the stand-in: no engine, no hub, no settings of how
the real model is loaded, no stop requests."""


@asking_the_hub_once()
def plan_of_training(recipe: Recipe, overwrite: bool = False, resume: bool = False) -> dict[str, str]:
    """Describe what `grpo-lab train` will do, title → text. Rows and local configurations are loaded, nothing is
    trained or written. Raises ValueError for whatever ``train`` would refuse, as far as it can be known here."""
    recipe = numbers_read(recipe)
    config = lab_config(recipe, **_of_this_machine(recipe))
    folder = RunFolder.open(recipe, overwrite, resume)
    folder.newest_checkpoint(config.max_steps, read=False)
    job = Job.resolve(recipe, config, here_only=True, cold_start=not folder.start_is_whole)
    config = with_class_parts(job.trainer, recipe.model.name, job.config)
    schedule = str(getattr(config.lr_scheduler_type, "value", config.lr_scheduler_type))
    optimizer = str(getattr(config.optim, "value", config.optim))
    return {
        "model": recipe.model.name,
        "takes": Estimates().of(recipe).strip(),
        "rows": count_of(job.rows, recipe.data),
        "prompt template": recipe.data.template,
        "rewards": _rewards(recipe, job, config),
        "trainer": recipe.trainer,
        **_algorithm(job, config),
        **_steps(config),
        "dropout": _dropout(recipe, config),
        "learning rate": f"{config.learning_rate:g} ({schedule}), {optimizer}",
        "processes": str(config.world_size * outlook().processes),
        "output folder": str(recipe.output_dir),
        **_tasks(job, config),
        **_optional(recipe, job, folder),
        "checked": _checked(recipe, job),
    }


def _algorithm(job: Job, config: Any) -> dict[str, str]:
    """Return the lines on the algorithm in force and where it comes from: a preset's source with the paper's values;
    "TRL's settings" for everything else."""
    algorithm = config.algorithm.with_hooks(job.trainer)
    preset = PRESETS.get(algorithm.names.get("objective", ""))
    source = "TRL's settings"
    if preset is not None:
        source = preset.source
        if preset.paper:
            source += f"; the paper's values: {dict(preset.paper)}"
    return {"algorithm": algorithm.describe(), "source": source}


def _steps(config: Any) -> dict[str, str]:
    """Return the lines on the size of an optimizer step, and on the number of steps."""
    per_step = config.per_device_train_batch_size * config.world_size * config.gradient_accumulation_steps
    limit = config.max_completion_length
    return {
        "groups per optimizer step": f"{per_step / config.num_generations:g} × {config.num_generations} completions",
        "completions per generation": str(config.generation_batch_size),
        "tokens per step": f"at most {per_step * limit:,} generated" if limit else "as many as the model writes",
        "optimizer steps": str(config.max_steps) if config.max_steps > 0 else f"{config.num_train_epochs:g} epochs",
    }


def _optional(recipe: Recipe, job: Job, folder: RunFolder) -> dict[str, str]:
    """Return a line on each thing that the recipe may have and others lack, from the cold start to the model's room."""
    lines: dict[str, Any] = {}
    if recipe.cold_start is not None:
        section = recipe.cold_start
        lines["cold start"] = f"{count_of(job.cold_rows, section.data)}; {settings_in_words(section.arguments)}"
    if recipe.eval_dataset is not None:
        lines["evaluated on the way"] = count_of(job.eval_rows, recipe.eval_dataset)
    if recipe.evaluation is not None:
        counted = count_of(job.held_out, recipe.evaluation.data)
        lines["evaluation"] = f"{counted}, judged by {describe(recipe.evaluation.reward)}"
    lines |= {
        "callbacks": ", ".join(section.name for section in recipe.callbacks),
        "tools": ", ".join(section.name for section in recipe.tools),
        "environment": recipe.environment_factory and recipe.environment_factory.name,
        "public numbers": recipe.model.expected,
        "to make again": ", ".join(folder.gone),
        "first prompt": None if job.rows is None else first_prompt(recipe, job.rows, job.arguments["tools"]),
        "context": job.room,
    }
    return {title: text for title, text in lines.items() if text}


def _of_this_machine(recipe: Recipe) -> dict[str, Any]:
    """Return settings that replace the recipe's own in a plan: those of number formats, sharding and kernels, which
    this machine may not have. For a stage on several processes also their batch sizes together, since a plan has one
    process."""
    processes = outlook().processes
    if processes == 1:
        return NOT_OF_THIS_MACHINE
    batches = ("per_device_train_batch_size", "per_device_eval_batch_size")
    defaults = {name: LabConfig.__dataclass_fields__[name].default for name in batches}
    return NOT_OF_THIS_MACHINE | {name: recipe.arguments.get(name, defaults[name]) * processes for name in batches}


def _rewards(recipe: Recipe, job: Job, config: Any) -> str:
    """Describe the recipe's rewards and those that its trainer declares, each with its weight or its schedule."""
    rewards = job.rewards
    own = len(job.rewards)
    if recipe.environment_factory is None:  # an environment's own rewards are known only when it is built
        rewards, config = with_declared_rewards(job.trainer, rewards, config)
    names = ["/".join(filter(None, (one.arguments.get("for_task"), one.name))) for one in recipe.rewards]
    names += [reward_name(one) for one in rewards[own:]]
    weights = config.reward_weights or [1.0] * len(rewards)
    said = []
    for name, reward, weight in zip(names, rewards, weights, strict=False):  # more, where an environment owns some
        schedule = config.lab_settings.reward_schedules.get(reward_name(reward))
        factor = weight_in_words(reward, weight) if schedule is None else schedule.in_words()
        said.append(f"{name} × {factor}")
    return ", ".join(said[:own] + [f"{one} (added by {recipe.trainer})" for one in said[own:]])


def _tasks(job: Job, config: Any) -> dict[str, str]:
    """Return a line of the plan for each task of a mixture: its rows, its weight and its share of the prompts. `{}` if
    the recipe has no mixture."""
    tasks = config.lab_settings.tasks
    counts = Counter[str]()
    if tasks and job.rows is not None:
        counts.update(job.rows[COLUMN])
    weights = sum(task.weight for task in tasks.values())
    lines = {}
    for name, task in tasks.items():
        rows = f"{counts[name]:,} rows" if counts else "not loaded here"
        lines[f"task {name}"] = f"{rows}, weight {task.weight:g}: {task.weight / weights:.1%} of the prompts"
    return lines


def _dropout(recipe: Recipe, config: Any) -> str:
    """Describe the dropout of the recipe's adapter, if it gives one, and what dropout means for the exact update."""
    rate = float(dict(recipe.model.lora or {}).get("lora_dropout") or 0.0)
    if config.lab_settings.update.is_off:
        means = "stock's batches and draws (update: off)"
    elif config.lab_settings.randomness == "same_draws":
        means = "with any, stock's draws in stock's batches of all rows (update.randomness: same_draws)"
    else:
        means = "the update leaves out what it does without any, exact in distribution (update.randomness: "
        means += "same_distribution)"
    which = f"LoRA {rate:g}" if rate else "that of the model, if any"
    return f"{which}; {means}"


def _checked(recipe: Recipe, job: Job) -> str:
    """Build the trainer around a small stand-in for the model, so that its own checks run; return what was checked, in
    words. The recipe's tokenizer is used if it is on this machine. Without rows here, the trainer is not built."""
    if job.rows is None or (recipe.eval_dataset is not None and job.eval_rows is None):
        return "rewards, parts and settings; not the trainer with its rows, which are not here"
    section = made_from(recipe.model) or recipe.model
    given = job.arguments
    if section.tiny is None:
        tiny = {"hidden_size": 16, "num_layers": 1, "num_heads": 2}
        own = own_tokenizer(section)
        if own is None and (recipe.tools or recipe.environment_factory):
            return "rewards, parts, rows and settings; not the trainer: tools need the model's chat template, not here"
        section = dataclasses.replace(section, path=None, tokenizer=own, tiny=tiny)
        given = {**given, "peft_config": None}  # its target modules are the real model's
    model, tokenizer = load_model(section, seed=0)
    rewards = [scoring_nothing(reward) if isinstance(reward, str) else reward for reward in job.rewards]
    with tempfile.TemporaryDirectory() as folder:
        with saving(folder):
            model.save_pretrained(folder)  # the reference model is loaded from a folder
            tokenizer.save_pretrained(folder)
        job.trainer(
            model=folder,
            reward_funcs=rewards or None,
            args=lab_config(recipe, **_of_this_machine(recipe), **_not_built(recipe), output_dir=folder),
            train_dataset=job.rows,
            eval_dataset=job.eval_rows,
            processing_class=tokenizer,  # else TRL would load the processor of a vision model
            **{name: value for name, value in given.items() if value is not None},
        )
    return "rewards, parts, rows, golds, settings, and the trainer built around a small stand-in for the model"


def _not_built(recipe: Recipe) -> dict[str, Any]:
    """Return ``NOT_BUILT`` for this recipe: with an engine, its correction is left out too. ``rollout.turns`` stays,
    since with it an environment's scores of turns are a reward."""
    settings = dict(NOT_BUILT)
    rollout = recipe.arguments.get("rollout") or {}
    if rollout.get("turns") is not None:
        settings["rollout"] = {"turns": rollout["turns"]}
    if recipe.arguments.get("use_vllm"):
        settings["correction"] = None
    return settings


def first_prompt(recipe: Recipe, rows: Any, tools: Sequence[Any] | None = None) -> str:
    """Return the first row's prompt, as Python text. It is rendered as the model gets it, with the descriptions of the
    ``tools``, if a tokenizer with a chat template is on this machine; otherwise a note says why not."""
    from grpo_lab.engines.generators import render_prompt

    prompt = rows[0]["prompt"]
    own = own_tokenizer(recipe.model)
    if recipe.environment_factory is not None:
        return f"{prompt!r} (the environment goes on with it, and names its tools)"
    if isinstance(prompt, str):
        return repr(prompt)
    if own is None:
        return f"{prompt!r} (the model's chat template is not here)"
    tokenizer = load_tokenizer(dataclasses.replace(recipe.model, tokenizer=own))
    if not tokenizer.chat_template:
        return f"{prompt!r} (no chat template)"
    template_kwargs = {**template_kwargs_of(recipe.arguments), **({"tools": list(tools)} if tools else {})}
    return repr(render_prompt(prompt, tokenizer, template_kwargs).text)


def own_tokenizer(section: ModelSection) -> str | None:
    """Return the folder of the recipe's tokenizer, else of its model, if one with a tokenizer is on this machine."""
    for place in (section.tokenizer, section.path):
        if place and (Path(place) / "tokenizer.json").is_file():
            return place
    return None
