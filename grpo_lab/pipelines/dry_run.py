"""``--dry-run``: what will happen, without doing it."""

from __future__ import annotations

from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from grpo_lab.objectives import PRESETS
from grpo_lab.pipelines import parts
from grpo_lab.pipelines.recipe import Recipe


def dry_run(recipe: Recipe, console: Console | None = None) -> dict[str, str]:
    """Print the plan of ``recipe`` as a table and return it. Loads rows and (local) configs, trains nothing."""
    facts = describe(recipe)
    table = Table(
        title=f"{recipe.name}: what will happen", box=box.SIMPLE_HEAD, show_header=False, title_justify="left"
    )
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in facts.items():
        table.add_row(name, value)
    (console or Console()).print(table)
    return facts


def describe(recipe: Recipe) -> dict[str, str]:
    """The facts: rows, groups and tokens per step, parameters, template, what the preset means, output folder."""
    from grpo_lab.trainer.algorithm import algorithm_from
    from grpo_lab.trainer.named_parts import with_class_parts

    config = with_class_parts(parts.trainer_class(recipe), recipe.model.name, parts.lab_config(recipe))
    algorithm = algorithm_from(config, config.lab_settings).with_hooks(parts.trainer_class(recipe))
    per_step = config.per_device_train_batch_size * config.world_size * config.gradient_accumulation_steps
    facts = {
        "model": recipe.model.name,
        "parameters": _parameters(recipe),
        "rows": _rows(recipe.data),
        "prompt template": recipe.data.template,
        "rewards": ", ".join(f"{reward.name} × {reward.weight:g}" for reward in recipe.rewards),
        "trainer": recipe.trainer,
        "algorithm": algorithm.describe(),
        "source": _source(algorithm.names.get("objective", "")),
        "groups per optimizer step": f"{per_step / config.num_generations:g} × {config.num_generations} completions",
        "completions per generation": str(config.generation_batch_size),
        "tokens per step": f"at most {per_step * config.max_completion_length:,} generated",
        "optimizer steps": str(config.max_steps) if config.max_steps > 0 else f"{config.num_train_epochs:g} epochs",
        "learning rate": f"{config.learning_rate:g} ({config.lr_scheduler_type}), {config.optim}",
        "processes": str(config.world_size),
        "output folder": str(recipe.output_dir),
    }
    if recipe.cold_start is not None:
        facts["cold start"] = f"{_rows(recipe.cold_start.data)}; {dict(recipe.cold_start.arguments)}"
    if recipe.evaluation is not None:
        facts["evaluation"] = f"{_rows(recipe.evaluation.data)}, judged by {recipe.evaluation.reward.name}"
    if recipe.model.expected:
        facts["public numbers"] = recipe.model.expected
    return facts


def _rows(section: Any) -> str:
    try:
        count = f"{len(parts.load_rows(section)):,}"
    except (ValueError, OSError) as error:
        if section.loader == "word_problems" or parts.is_local(section.arguments.get("source")):
            raise
        count = f"not loaded here ({str(error).splitlines()[0][:100]})"
    return f"{count} from {section.loader} {dict(section.arguments)}"


def _parameters(recipe: Recipe) -> str:
    """Counted without allocating weights, from the config; a hub model that is not here is not counted."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    if recipe.model.tiny is not None:
        model, _ = parts.load_model(recipe.model, seed=0)
    elif recipe.model.path is not None and parts.is_local(recipe.model.path):
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(recipe.model.path))
    else:
        return f"not counted: {recipe.model.path!r} is a hub name and is loaded when training starts"
    return f"{sum(p.numel() for p in model.parameters()):,}"


def _source(objective: str) -> str:
    row = PRESETS.get(objective)
    if row is None:
        return "TRL's settings"
    return row.source + (f"; the paper's values: {dict(row.paper)}" if row.paper else "")
