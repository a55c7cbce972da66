"""The first prompt of a recipe as its model will read it, for ``--dry-run``."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from grpo_lab.pipelines import parts
from grpo_lab.pipelines.recipe import ModelSection, Recipe


def first_prompt(recipe: Recipe, rows: Any) -> str:
    """What the model is given for the first row, as Python writes it: rendered where the tokenizer is here and has a template."""
    from grpo_lab.engines.sampler import render_prompt

    prompt = rows[0]["prompt"]
    own = own_tokenizer(recipe.model)
    if own is None or isinstance(prompt, str):
        return repr(prompt) if isinstance(prompt, str) else f"{prompt!r} (the model's chat template is not here)"
    tokenizer = parts.load_tokenizer(dataclasses.replace(recipe.model, tokenizer=own))
    return repr(render_prompt(prompt, tokenizer).text) if tokenizer.chat_template else f"{prompt!r} (no chat template)"


def own_tokenizer(section: ModelSection) -> str | None:
    """The folder of the recipe's tokenizer, or its model's, where it is here."""
    return next((p for p in (section.tokenizer, section.path) if p and (Path(p) / "tokenizer.json").is_file()), None)


__all__ = ["first_prompt", "own_tokenizer"]
