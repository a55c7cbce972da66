"""``--dry-run``: what will happen, without doing it; everything is checked that needs neither a GPU nor the network."""

from __future__ import annotations

import dataclasses
import tempfile
from pathlib import Path
from typing import Any

from grpo_lab.evaluation.terminal import Terminal
from grpo_lab.io import is_local
from grpo_lab.objectives import PRESETS
from grpo_lab.pipelines.in_words import count_of, settings_in_words, show, told
from grpo_lab.pipelines.run_folder import is_begun
from grpo_lab.pipelines.train import resolve
from grpo_lab.recipe.job import Job, lab_config, numbers_read
from grpo_lab.recipe.models import load_model, load_tokenizer, loading, lora_config, model_class
from grpo_lab.recipe.sections import ModelSection, Recipe
from grpo_lab.rewards.schedules import weight_in_words
from grpo_lab.trainer.arguments import with_class_parts, with_declared_rewards
from grpo_lab.trainer.trl_bridge.rewards import reward_name

#: What only the machine of the run can have: number formats of a GPU, engines, sharding, kernels.
OF_THE_MACHINE: dict[str, Any] = {
    "bf16": False, "fp16": False, "tf32": None, "bf16_full_eval": False, "fp16_full_eval": False,
    "torch_compile": False,
    "fsdp": None, "fsdp_config": None, "deepspeed": None, "use_liger_kernel": False, "dataloader_pin_memory": False,
}  # fmt: skip
#: What the stand-in is built without, besides: the engine, the hub, and how the real model is loaded.
NOT_BUILT: dict[str, Any] = {
    "use_cpu": True, "use_vllm": False, "rollout": None, "push_to_hub": False, "report_to": "none",
    "model_init_kwargs": None,
    "enable_jit_checkpoint": False, "max_hours": None, "stop_file": None, "save_checksums": True,
}  # fmt: skip


def dry_run(recipe: Recipe, console: Terminal | None = None) -> dict[str, str]:
    """Print the plan of ``recipe`` as a table and return it."""
    facts = plan_of_training(recipe)
    show(recipe.name, facts, console)
    return facts


def plan_of_training(recipe: Recipe, overwrite: bool = False, resume: bool = False) -> dict[str, str]:
    """What `grpo-lab train` will do, in words. Loads rows and (local) configs, trains nothing.

    Raises:
        ValueError: whatever ``train`` would refuse, as far as it can be known here.
    """
    recipe = numbers_read(recipe)
    config, resume = lab_config(recipe, **OF_THE_MACHINE), is_begun(recipe, overwrite, resume)
    return describe(recipe, resolve(recipe, config, overwrite, resume, here_only=True))


def describe(recipe: Recipe, job: Job) -> dict[str, str]:
    """The facts: rows, groups and tokens per step, parameters, template, what the preset means, output folder."""
    config = with_class_parts(job.trainer, recipe.model.name, job.config)
    algorithm = config.algorithm.with_hooks(job.trainer)
    per_step = config.per_device_train_batch_size * config.world_size * config.gradient_accumulation_steps
    facts = {
        "model": recipe.model.name,
        "parameters": _parameters(recipe),
        "rows": count_of(job.rows, recipe.data),
        "prompt template": recipe.data.template,
        "rewards": _rewards(recipe, job, config),
        "trainer": recipe.trainer,
        "algorithm": algorithm.describe(),
        "source": _source(algorithm.names.get("objective", "")),
        "groups per optimizer step": f"{per_step / config.num_generations:g} × {config.num_generations} completions",
        "completions per generation": str(config.generation_batch_size),
        "tokens per step": _tokens(per_step, config.max_completion_length),
        "optimizer steps": str(config.max_steps) if config.max_steps > 0 else f"{config.num_train_epochs:g} epochs",
        "dropout": _dropout(recipe, config),
        "learning rate": f"{config.learning_rate:g} ({_value(config.lr_scheduler_type)}), {_value(config.optim)}",
        "processes": str(config.world_size),
        "output folder": str(recipe.output_dir),
    }
    facts |= _around(recipe, job)
    if job.rows is not None:
        facts["first prompt"] = first_prompt(recipe, job.rows)
    if job.room is not None:
        facts["context"] = job.room
    facts["checked"] = _checked(recipe, job)
    return facts


def _rewards(recipe: Recipe, job: Job, config: Any) -> str:
    """The recipe's rewards and those that its trainer declares, each with the weight in force over the steps."""
    given = job.rewards
    if recipe.environment_factory is not None:
        rewards = given  # what an environment owns counts as given, and is known when it is built
    else:
        rewards, config = with_declared_rewards(job.trainer, given, config)
    names = [section.name for section in recipe.rewards] + [reward_name(one) for one in rewards[len(given) :]]
    weights = config.reward_weights or [1.0] * len(rewards)
    scheduled = config.lab_settings.reward_schedules
    told = []
    for name, reward, weight in zip(names, rewards, weights, strict=False):  # more, where an environment owns some
        schedule = scheduled.get(reward_name(reward))
        told.append(f"{name} × {weight_in_words(reward, weight) if schedule is None else schedule.in_words()}")
    told[len(given) :] = [f"{one} (added by {recipe.trainer})" for one in told[len(given) :]]
    return ", ".join(told)


def _dropout(recipe: Recipe, config: Any) -> str:
    """The adapter's, as far as it is written down, and what any dropout means for the update."""
    rate = float(dict(recipe.model.lora or {}).get("lora_dropout") or 0.0)
    settings = config.lab_settings
    what = f"LoRA {rate:g}" if rate else "that of the model, if any"
    if settings.update.is_off:
        return f"{what}; stock's batches and draws (update: off)"
    if settings.randomness == "same_draws":
        return f"{what}; with any, stock's draws in stock's batches of all rows (update.randomness: same_draws)"
    return (
        f"{what}; the update leaves out what it does without any, exact in distribution (update.randomness: "
        "same_distribution)"
    )


def _value(name: Any) -> str:
    """What is written in a recipe, of an enumeration's member too."""
    return str(getattr(name, "value", name))


def _tokens(completions: int, limit: int | None) -> str:
    return "as many as the model writes" if limit is None else f"at most {completions * limit:,} generated"


def _around(recipe: Recipe, job: Job) -> dict[str, str]:
    """What the recipe says beside the training itself."""
    facts = {}
    if recipe.cold_start is not None:
        section = recipe.cold_start
        facts["cold start"] = f"{count_of(job.cold_rows, section.data)}; {settings_in_words(section.arguments)}"
    if recipe.eval_dataset is not None:
        facts["evaluated on the way"] = count_of(job.eval_rows, recipe.eval_dataset)
    if recipe.evaluation is not None:
        counted = count_of(job.held_out, recipe.evaluation.data)
        facts["evaluation"] = f"{counted}, judged by {told(recipe.evaluation.reward)}"
    for name, sections in (("callbacks", recipe.callbacks), ("tools", recipe.tools)):
        if sections:
            facts[name] = ", ".join(section.name for section in sections)
    if recipe.environment_factory is not None:
        facts["environment"] = recipe.environment_factory.name
    if recipe.model.expected:
        facts["public numbers"] = recipe.model.expected
    return facts


def _checked(recipe: Recipe, job: Job) -> str:
    """Build the trainer around a small stand-in model: its own checks speak here."""
    if job.rows is None or (recipe.eval_dataset is not None and job.eval_rows is None):
        return "rewards, parts and settings; not the trainer with its rows, which are not here"
    model = _stand_in(recipe)
    if model.tokenizer is None and not recipe.model.tiny and (recipe.tools or recipe.environment_factory):
        return "rewards, parts, rows and settings; not the trainer: tools need the model's chat template, not here"
    with tempfile.TemporaryDirectory() as folder:
        _build_trainer(recipe, job, model, folder)
    return "rewards, parts, rows, golds, settings, and the trainer built around a small stand-in for the model"


def _stand_in(recipe: Recipe) -> ModelSection:
    """A tiny model with the recipe's own tokenizer, where that is here."""
    if recipe.model.tiny is not None:
        return recipe.model
    tiny = {"hidden_size": 16, "num_layers": 1, "num_heads": 2}
    return dataclasses.replace(recipe.model, path=None, tokenizer=own_tokenizer(recipe.model), tiny=tiny)


def _build_trainer(recipe: Recipe, job: Job, section: ModelSection, folder: str) -> None:
    given = job.arguments
    model, tokenizer = load_model(section, seed=0)
    model.save_pretrained(folder)  # the reference model is loaded from a folder
    tokenizer.save_pretrained(folder)
    if section is not recipe.model and given["peft_config"] is not None:
        given = {**given, "peft_config": None}  # its target modules are the real model's
    job.trainer(
        model=folder,
        reward_funcs=[_scorer(reward) if isinstance(reward, str) else reward for reward in job.rewards] or None,
        args=lab_config(recipe, **OF_THE_MACHINE, **NOT_BUILT, output_dir=folder),
        train_dataset=job.rows,
        eval_dataset=job.eval_rows,
        processing_class=tokenizer,  # a vision model's would be looked for with its images' part
        **{name: value for name, value in given.items() if value is not None},
    )


def _scorer(name: str) -> Any:
    """In place of a reward model, under the name that TRL gives it."""

    def score(completions: list[Any], **_: Any) -> list[float]:
        return [0.0] * len(completions)

    score.__name__ = name.split("/")[-1]
    return score


def _parameters(recipe: Recipe) -> str:
    """Counted without allocating weights, from the config; a hub model that is not here is not counted."""
    import torch

    section = recipe.model
    if section.tiny is not None:
        model, _ = load_model(section, seed=0)
    elif section.path is not None and is_local(section.path):
        if (Path(section.path) / "adapter_config.json").is_file():
            return f"not counted: {section.path!r} is an adapter"
        with torch.device("meta"), loading(section.path):
            kind, config = model_class(section.path)
            model = kind.from_config(config)
        load_tokenizer(section)
        _check_lora(section, model)
    else:
        return f"not counted: {section.path!r} is a hub name and is loaded when training starts"
    return f"{sum(p.numel() for p in model.parameters()):,}"


def _check_lora(section: ModelSection, model: Any) -> None:
    """The adapter's target modules must be in the model; nothing is allocated."""
    import copy

    import torch
    from peft import get_peft_model

    if section.lora is not None:
        with torch.device("meta"):
            get_peft_model(copy.deepcopy(model), lora_config(section))


def _source(objective: str) -> str:
    row = PRESETS.get(objective)
    if row is None:
        return "TRL's settings"
    return row.source + (f"; the paper's values: {dict(row.paper)}" if row.paper else "")


def first_prompt(recipe: Recipe, rows: Any) -> str:
    """What the model is given for the first row, as Python writes it: rendered where the tokenizer is here and has a
    template."""
    from grpo_lab.engines.sampler import render_prompt

    prompt = rows[0]["prompt"]
    own = own_tokenizer(recipe.model)
    if own is None or isinstance(prompt, str):
        return repr(prompt) if isinstance(prompt, str) else f"{prompt!r} (the model's chat template is not here)"
    tokenizer = load_tokenizer(dataclasses.replace(recipe.model, tokenizer=own))
    return repr(render_prompt(prompt, tokenizer).text) if tokenizer.chat_template else f"{prompt!r} (no chat template)"


def own_tokenizer(section: ModelSection) -> str | None:
    """The folder of the recipe's tokenizer, or its model's, where it is here."""
    return next((p for p in (section.tokenizer, section.path) if p and (Path(p) / "tokenizer.json").is_file()), None)
