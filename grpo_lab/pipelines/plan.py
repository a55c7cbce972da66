"""`--dry-run` of `curate` and `long2short`: rows, completions, samples that are there already; nothing is sampled or written.

What can be checked without loading a model is checked, by what the run checks with.
"""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

from grpo_lab.io import is_local
from grpo_lab.pipelines import curate, long2short
from grpo_lab.pipelines.curation_recipe import CurationRecipe
from grpo_lab.pipelines.in_words import count_of, settings_in_words, told
from grpo_lab.pipelines.long2short_recipe import Long2ShortRecipe, PairSettings
from grpo_lab.pipelines.sample_counts import problems_in
from grpo_lab.recipe.sections import SamplingSettings


def plan_of_curation(recipe: CurationRecipe, overwrite: bool = False) -> dict[str, str]:
    """What `grpo-lab curate` will do, in words. ValueError for what would stop it."""
    rows = curate.resolve(recipe, overwrite, here_only=True).questions.rows
    filters = {f.name: getattr(recipe.filters, f.name) for f in fields(recipe.filters)}
    facts = {
        "rows": count_of(rows, recipe.data),
        **{f"filter: {k}": told(v) for k, v in filters.items() if v is not None},
    }
    if recipe.model is not None:
        facts |= {
            "reward": told(recipe.reward),
            "model": model_of(str(recipe.model.path)),
            **sampling_of(recipe.sampling, rows, recipe.output_dir / "pass_rates.jsonl", overwrite),
        }
    return {**facts, "output folder": str(recipe.output_dir)}


def plan_of_long2short(recipe: Long2ShortRecipe, overwrite: bool = False) -> dict[str, str]:
    """What `grpo-lab long2short` will do, in words. ValueError for what would stop it."""
    asked = long2short.resolve(recipe, overwrite, here_only=True)
    facts = {"method": recipe.method, "model": model_of(str(recipe.model.path))}
    if recipe.data is None:
        facts |= {"short model": str(recipe.short_model), "share of the model": f"{recipe.alpha:g}"}
    else:
        file = long2short.samples_file(recipe)
        facts |= {"rows": count_of(asked.rows, recipe.data), "reward": told(recipe.reward)}
        facts |= sampling_of(recipe.sampling, asked.rows, file, overwrite=False)
        if recipe.method in ("dpo", "simpo"):
            facts["pairs"] = told(recipe.pairs or PairSettings())
        facts["training"] = settings_in_words(recipe.training)
    if recipe.evaluation is not None:
        when = "before and after" if recipe.evaluation.before else "after"
        count = count_of(asked.held_out, recipe.evaluation.data)
        facts["evaluation"] = f"{when}: {count}, judged by {told(recipe.evaluation.reward)}"
    return {**facts, "output folder": str(recipe.output_dir)}


def model_of(path: str) -> str:
    return path if is_local(path) else f"{path} (a hub name: loaded when sampling starts)"


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
