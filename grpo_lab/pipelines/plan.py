"""`--dry-run` of `curate` and `long2short`: rows, completions, samples that are there already; nothing is sampled or written.

What can be checked without loading a model is checked: rows and golds, rewards, columns, the model's folder, whose the output
folder is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

from grpo_lab.curation.weights import check_mergeable
from grpo_lab.evaluation.terminal import Terminal
from grpo_lab.pipelines import curate, long2short, parts
from grpo_lab.pipelines.curation_filters import check_balance_column
from grpo_lab.pipelines.curation_recipe import CurationRecipe
from grpo_lab.pipelines.in_words import told
from grpo_lab.pipelines.long2short_recipe import Long2ShortRecipe, PairSettings
from grpo_lab.pipelines.recipe import DataSection, RewardSection
from grpo_lab.pipelines.sample_counts import problems_in
from grpo_lab.pipelines.sampler import SamplingSettings
from grpo_lab.trainer.supervised.preference import check_training


def show(name: str, facts: Mapping[str, str], console: Terminal | None = None) -> None:
    """The plan as a table."""
    table = Table(title=Text(f"{name}: what will happen"), box=box.SIMPLE_HEAD, show_header=False, title_justify="left")
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for fact, value in facts.items():
        table.add_row(Text(fact), Text(value))
    (console or Terminal()).print(table)


def plan_of_curation(recipe: CurationRecipe, overwrite: bool = False) -> dict[str, str]:
    """What `grpo-lab curate` will do, in words. ValueError for what would stop it."""
    folder = curate.check_folder(recipe)
    if not overwrite:
        curate.check_counts(recipe)
    rows = rows_of(recipe.data, "data", recipe.reward)
    if rows is not None:
        check_balance_column(recipe, rows.column_names)
    filters = {f.name: getattr(recipe.filters, f.name) for f in fields(recipe.filters)}
    against = recipe.filters.contamination.against if recipe.filters.contamination else ()
    for place, section in enumerate(against):
        rows_of(section, f"filters.contamination.against.{place}")
    facts = {
        "rows": count_of(rows, recipe.data),
        **{f"filter: {k}": told(v) for k, v in filters.items() if v is not None},
    }
    if recipe.model is not None:
        facts |= {
            "reward": told(recipe.reward),
            "model": model_of(str(recipe.model.path)),
            **sampling_of(recipe.sampling, rows, folder / "pass_rates.jsonl", overwrite),
        }
    return {**facts, "output folder": str(folder)}


def plan_of_long2short(recipe: Long2ShortRecipe, overwrite: bool = False) -> dict[str, str]:
    """What `grpo-lab long2short` will do, in words. ValueError for what would stop it."""
    folder = long2short.check_folder(recipe, overwrite)
    facts = {"method": recipe.method, "model": model_of(str(recipe.model.path))}
    if recipe.method == "merge":
        check_mergeable(str(recipe.model.path), str(recipe.short_model))
        facts |= {"short model": str(recipe.short_model), "share of the model": f"{recipe.alpha:g}"}
    else:
        assert recipe.data is not None
        check_training(recipe.method, dict(recipe.training))
        rows = rows_of(recipe.data, "data", recipe.reward)
        file = long2short.samples_file(recipe)
        facts |= {"rows": count_of(rows, recipe.data), "reward": told(recipe.reward)}
        facts |= sampling_of(recipe.sampling, rows, file, overwrite=False)
        if recipe.method in ("dpo", "simpo"):
            facts["pairs"] = told(recipe.pairs or PairSettings())
        facts["training"] = ", ".join(f"{k} {v}" for k, v in recipe.training.items()) or "TRL's defaults"
    if recipe.evaluation is not None:
        when = "before and after" if recipe.evaluation.before else "after"
        held_out = rows_of(recipe.evaluation.data, "evaluation.data")
        parts.build_reward(recipe.evaluation.reward, "evaluation.reward")
        count = count_of(held_out, recipe.evaluation.data)
        facts["evaluation"] = f"{when}: {count}, judged by {told(recipe.evaluation.reward)}"
    return {**facts, "output folder": str(folder)}


def rows_of(section: DataSection, where: str, reward: RewardSection | None = None) -> Any:
    """The rows, their golds checked; None for a hub name that cannot be reached from here."""
    built = None if reward is None else parts.build_reward(reward, "reward")
    source = section.arguments.get("source")
    try:
        rows = parts.load_rows(section, where)
    except (ValueError, OSError):
        if section.loader in parts.MADE or (source is not None and Path(str(source)).expanduser().exists()):
            raise
        if source is not None and (str(source).count("/") != 1 or Path(str(source)).suffix):
            raise
        return None
    if built is not None:
        parts.check_golds(rows, [built])
    return rows


def count_of(rows: Any, section: DataSection) -> str:
    return f"{'not loaded here' if rows is None else f'{len(rows):,}'} from {told(section)}"


def model_of(path: str) -> str:
    """``path``, looked at where it is local. ValueError for a folder without a model."""
    if not Path(path).is_dir():
        if path.count("/") != 1 or path.startswith((".", "/", "~")):
            raise ValueError(
                f"`model.path` is {path!r}: no such folder (a saved model, or a hub name such as org/model)"
            )
        return f"{path} (a hub name: loaded when sampling starts)"
    names = ("config.json", "adapter_config.json")
    if not any((Path(path) / name).is_file() for name in names):
        raise ValueError(f"`model.path` is {path!r}: the folder holds no model (neither {names[0]} nor {names[1]})")
    return path


def sampling_of(settings: SamplingSettings, rows: Any, file: Path, overwrite: bool) -> dict[str, str]:
    each = f"{settings.n_samples} a problem at temperature {settings.temperature:g}"
    total = "" if rows is None else f", at most {settings.n_samples * len(rows):,} in all"
    tokens = f"of at most {settings.max_completion_length} tokens each"
    there = problems_in(file)
    forgotten = " (--overwrite makes them anew)" if overwrite and there else ""
    return {
        "completions": f"{each}{total}, {tokens}; by {'vLLM' if settings.use_vllm else 'transformers'}",
        "samples that are there": f"of {there:,} problems in {file}{forgotten}" if there else "none",
    }
